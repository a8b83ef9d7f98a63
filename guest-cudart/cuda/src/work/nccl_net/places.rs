//! Where a message's bytes are.

use crate::abi::result::Result;
use crate::memory::managed::{self, mirror};
use crate::process::context::Context;

/// Memory that NCCL has registered. All of it is this process's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A server mirrors it, and it was named for the direct connection.
    Named,
    /// This process reads and writes it.
    Here,
}

/// Whether the server of a context mirrors this memory, so that the bytes that kernels see are there.
pub(super) fn is_mirrored(context: &Context, at: u64) -> bool {
    mirror::is_on(context.server, at)
}

/// Gives the mirror what the program has changed, before the server sends it. NCCL's kernels use such memory
/// and the program doesn't, so usually there is nothing to do.
pub(super) fn give_to_server(at: u64, len: u64) -> Result {
    managed::send_changes(at, len)
}
