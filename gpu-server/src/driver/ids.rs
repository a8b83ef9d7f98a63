//! Hash tables for a client's small numbers. They are fast because each launch looks up several.
//!
//! The client chooses the numbers, so it could make them collide; that would slow down only its own worker.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A table by handle.
pub type Ids<V> = HashMap<u32, V, BuildHasherDefault<Spread>>;

/// Spreads a number over 64 bits by one multiplication.
#[derive(Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        let spread = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ (spread >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_row_find_their_own() {
        let table: Ids<u32> = (0..5000).map(|n| (n, n * 3)).collect();
        assert!((0..5000).all(|n| table.get(&n) == Some(&(n * 3))));
        assert_eq!(table.get(&5000), None);
    }
}
