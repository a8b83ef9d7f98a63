//! Where a message's bytes are.

use crate::abi::result::Result;
use crate::memory::managed::landing::Landing;
use crate::memory::managed::{self, Order, mirror};
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

/// Takes a message's pages from the program, before the server learns where its bytes go.
pub(super) fn begin_landing(at: u64, len: u64) -> Result<Landing> {
    let _order = Order::take();
    let landing = Landing::begin();
    managed::lend(at, len)?;
    Ok(landing)
}

/// All bytes of a message are in the mirror, and NCCL is about to learn of it. What the program got of them
/// meanwhile may be older.
pub(super) fn end_landing(landing: Landing, at: u64, len: u64) -> Result {
    managed::lend(at, len)?;
    drop(landing);
    Ok(())
}
