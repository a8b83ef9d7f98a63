//! The size of rows (see `program`), and the memory that they lie in.

/// Lanes per warp.
pub(crate) const LANES: usize = 32;

/// 64 bytes of register memory, aligned for rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);
