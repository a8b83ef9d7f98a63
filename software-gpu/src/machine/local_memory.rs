//! The local memory of a warp's threads.

use crate::machine::row::{LANES, Line};

/// Local memory of all threads in a warp.
#[derive(Default)]
pub(crate) struct LocalMemory {
    lines: Vec<Line>,
    /// Bytes per thread.
    pub stride: u32,
}

impl LocalMemory {
    /// Makes room for `size` bytes per thread.
    pub fn reserve(&mut self, size: u32) {
        if size <= self.stride {
            return;
        }
        let stride = size.next_power_of_two().max(64);
        let each = stride as usize / size_of::<Line>();
        let mut lines = vec![Line([0; 64]); each * LANES];
        let old = self.stride as usize / size_of::<Line>();
        for l in 0..LANES {
            lines[l * each..l * each + old].copy_from_slice(&self.lines[l * old..(l + 1) * old]);
        }
        self.lines = lines;
        self.stride = stride;
    }

    /// The host address of byte `offset` of a thread, if there are `size` bytes.
    #[inline(always)]
    pub fn at(&mut self, lane: usize, offset: u64, size: u32) -> Option<*mut u8> {
        if offset > u64::from(u32::MAX) || offset + u64::from(size) > u64::from(self.stride) {
            return None;
        }
        let index = lane * self.stride as usize + offset as usize;
        // SAFETY: `lane` is below 32 and `offset` below the stride, so the byte is inside `lines`.
        Some(unsafe { self.lines.as_mut_ptr().cast::<u8>().add(index) })
    }
}
