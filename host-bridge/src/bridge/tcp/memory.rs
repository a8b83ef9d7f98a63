//! The client's memory as sockets use it: runs of bytes for vectored calls.

use std::sync::Arc;

use super::socket::Gather;
use crate::bridge::relay::{ClientMemory, Span};
use crate::bridge::state::SessionState;
use crate::memory::Runs;

/// The arena, or a registered region.
#[derive(Debug)]
pub(super) enum SocketMemory {
    /// The arena of this session's channel.
    Arena(Arc<SessionState>),
    /// A region.
    Region { runs: Runs, read_only: bool },
}

impl ClientMemory for SocketMemory {
    fn size(&self) -> u64 {
        match self {
            SocketMemory::Arena(session) => session.channel.view.geometry().arena_size as u64,
            SocketMemory::Region { runs, .. } => runs.size() as u64,
        }
    }

    fn is_read_only(&self) -> bool {
        matches!(self, SocketMemory::Region { read_only: true, .. })
    }
}

/// Appends the runs of `len` bytes from `at` of a span to `gather`, as far as it has room for runs.
pub(super) fn gather_span(span: &Span<SocketMemory>, at: u64, len: u64, gather: &mut Gather) {
    debug_assert!(at + len <= span.len());
    let at = span.offset() + at;
    match span.memory() {
        SocketMemory::Arena(session) => {
            if let Some((at, len)) = session.channel.view.arena(at, len) {
                gather.push(at, len);
            }
        }
        SocketMemory::Region { runs, .. } => {
            for (at, len) in runs.range(at, len).into_iter().flatten() {
                if !gather.push(at, len) {
                    break;
                }
            }
        }
    }
}
