//! The parts of devices (`CUdevResource`) that a session knows, by number.
//!
//! A program copies them like any value and never frees them. So they are kept until the session ends, equal
//! parts have one number, and their number is limited.

use std::collections::HashMap;

use protocol::Status;

/// Maximum number of parts of a session, and of descriptors and of green contexts.
const MAX: usize = 4096;

/// The parts of a session. `T`: the GPU's.
pub struct Parts<T>(Vec<T>);

impl<T> Default for Parts<T> {
    fn default() -> Self {
        Parts(Vec::new())
    }
}

impl<T: PartialEq> Parts<T> {
    /// The number of a part, from 1. A new part gets the next one.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the session has too many.
    pub fn number(&mut self, part: T) -> Result<u32, Status> {
        if let Some(place) = self.0.iter().position(|other| *other == part) {
            return Ok(place as u32 + 1);
        }
        if self.0.len() >= MAX {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.0.push(part);
        Ok(self.0.len() as u32)
    }

    /// Whether no part has a number.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The part with a number.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a number that no part has.
    pub fn get(&self, number: u32) -> Result<&T, Status> {
        let place = (number as usize).checked_sub(1).ok_or(Status::INVALID_VALUE)?;
        self.0.get(place).ok_or(Status::INVALID_VALUE)
    }
}

impl<T: PartialEq + Clone> Parts<T> {
    /// The parts with these numbers.
    ///
    /// # Errors
    /// As [`Parts::get`].
    pub fn all(&self, numbers: &[u32]) -> Result<Vec<T>, Status> {
        numbers.iter().map(|number| self.get(*number).cloned()).collect()
    }
}

/// Checks that a table of descriptors or green contexts can take another one with this id.
///
/// # Errors
/// `OUT_OF_MEMORY` if it is full, `INVALID_HANDLE` if the id is in use.
pub fn may_have<T>(table: &HashMap<u32, T>, name: u32) -> Result<(), Status> {
    if table.len() >= MAX {
        return Err(Status::OUT_OF_MEMORY);
    }
    if table.contains_key(&name) { Err(Status::INVALID_HANDLE) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_have_one_number_and_zero_is_no_part() {
        let mut parts = Parts::default();
        assert!(parts.is_empty());
        assert_eq!((parts.number("a"), parts.number("b"), parts.number("a")), (Ok(1), Ok(2), Ok(1)));
        assert_eq!(parts.get(2), Ok(&"b"));
        assert!(!parts.is_empty());
        assert_eq!((parts.get(0), parts.get(3)), (Err(Status::INVALID_VALUE), Err(Status::INVALID_VALUE)));
    }

    #[test]
    fn a_table_takes_new_ids_until_it_is_full() {
        let mut table: HashMap<u32, ()> = (1..MAX as u32).map(|name| (name, ())).collect();
        assert_eq!((may_have(&table, 0), may_have(&table, 1)), (Ok(()), Err(Status::INVALID_HANDLE)));
        table.insert(0, ());
        assert_eq!(may_have(&table, MAX as u32), Err(Status::OUT_OF_MEMORY));
    }

    #[test]
    fn the_number_of_parts_is_limited() {
        let mut parts = Parts::default();
        for n in 0..MAX {
            assert_eq!(parts.number(n), Ok(n as u32 + 1));
        }
        assert_eq!(parts.number(MAX), Err(Status::OUT_OF_MEMORY));
        assert_eq!(parts.number(7), Ok(8));
    }
}
