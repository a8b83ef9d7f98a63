//! The client's memory as sockets use it: runs of bytes for vectored calls.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::bridge::relay::{ClientMemory, Span, ToHash};
use crate::bridge::socket::Gather;
use crate::bridge::state::SessionState;
use crate::memory::Runs;
use crate::shared::SharedBytes;

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

/// Calls `take` with the runs of `len` bytes from `at` of a span, as long as it returns true.
fn each_run(span: &Span<SocketMemory>, at: u64, len: u64, mut take: impl FnMut(NonNull<u8>, usize) -> bool) {
    debug_assert!(at + len <= span.len());
    let at = span.offset() + at;
    match span.memory() {
        SocketMemory::Arena(session) => {
            if let Some((at, len)) = session.channel.view.arena(at, len) {
                take(at, len);
            }
        }
        SocketMemory::Region { runs, .. } => {
            for (at, len) in runs.range(at, len).into_iter().flatten() {
                if !take(at, len) {
                    break;
                }
            }
        }
    }
}

/// Appends the runs of `len` bytes from `at` of a span to `gather`, as far as it has room for runs.
pub(super) fn gather_span(span: &Span<SocketMemory>, at: u64, len: u64, gather: &mut Gather) {
    each_run(span, at, len, |at, len| gather.push(at, len));
}

/// Copies the first bytes of a part of a span, as many as `to` has. False: they are not there. The client may
/// write them meanwhile.
pub(super) fn copy(span: &Span<SocketMemory>, at: u64, to: &mut [u8]) -> bool {
    let mut filled = 0;
    each_run(span, at, to.len() as u64, |at, len| {
        // SAFETY: the span keeps the client's memory mapped, and this process accesses that through `shared`
        // and the kernel only.
        unsafe { SharedBytes::new(at, len) }.read(&mut to[filled..filled + len]);
        filled += len;
        true
    });
    filled == to.len()
}

/// Writes a span. False: its memory is not there.
pub(super) fn write(span: &Span<SocketMemory>, bytes: &[u8]) -> bool {
    let mut rest = bytes;
    each_run(span, 0, bytes.len() as u64, |at, len| {
        let Some((now, behind)) = rest.split_at_checked(len) else { return false };
        // SAFETY: the span keeps the client's memory mapped, which is writable where the server's data goes,
        // and this process accesses that through `shared` and the kernel only.
        unsafe { SharedBytes::new(at, len) }.write(now);
        rest = behind;
        true
    });
    rest.is_empty()
}

/// Computes the hash of a block. The client may write its memory meanwhile, so a copy of it is read.
pub(super) fn hash(task: &mut ToHash<SocketMemory>) {
    const STEP: usize = 128 << 10;
    let (mut hasher, mut copy) = (blake3::Hasher::new(), vec![0; STEP]);
    each_run(&task.span, 0, task.span.len(), |at, len| {
        // SAFETY: the span keeps the client's memory mapped, and this process accesses that through `shared`
        // and the kernel only.
        let run = unsafe { SharedBytes::new(at, len) };
        for from in (0..len).step_by(STEP) {
            let part = &mut copy[..STEP.min(len - from)];
            run.part(from, part.len()).read(part);
            hasher.update(part);
        }
        true
    });
    task.hash = *hasher.finalize().as_bytes();
}
