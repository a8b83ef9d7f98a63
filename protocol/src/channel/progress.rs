//! The progress area, in which the host side publishes how far the session's work has come.
//!
//! | offset | what |
//! |---|---|
//! | 0x000 | `released` u64: of every command with `seq` up to this, the source data has been read (arena may be reused) |
//! | 0x008 | `executed` u64: every command with `seq` up to this has been executed by the server |
//! | 0x010 | `output` u64: bytes that kernels have printed so far (the `device_output` operation fetches them) |
//! | 0x018 | `watched` u64, from version 2.8 on: whether what the client has of mirrors is as new as all work that it knows to be done ([`crate::link::progress::WATCHED`]) |
//! | 0x040 | [`MAX_CONTEXTS`] error words of 16 bytes: u32 status (0: none), u32 flags (bit 0: sticky), u64 seq of the command that failed, 0 if unknown |
//! | 0x1000 | [`MAX_STREAMS`] stream words u64: `seq` of the last publishing command that the stream has completed |

use super::sizes::{MAX_CONTEXTS, MAX_STREAMS};
use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::Status;
use crate::handle::{ContextId, StreamId};
use crate::schema::{Layout, layout_of};

/// The progress area as it lies in shared memory. Only the host side writes it, except that a client zeroes
/// the word of a stream before it creates the stream.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Progress {
    released: AtomicU64,
    executed: AtomicU64,
    output: AtomicU64,
    watched: AtomicU64,
    _to_errors: [AtomicU64; 4],
    errors: [ErrorWord; MAX_CONTEXTS as usize],
    _to_streams: [AtomicU64; (4096 - 64 - 16 * MAX_CONTEXTS as usize) / 8],
    streams: [AtomicU64; MAX_STREAMS as usize],
}

impl Progress {
    /// Without `watched`, of which versions before 2.8 know nothing.
    pub(super) const LAYOUT: Layout = layout_of!(Progress {
        released: u64,
        executed: u64,
        output: u64,
        errors: [ErrorWord; MAX_CONTEXTS as usize],
        streams: [u64; MAX_STREAMS as usize],
    });
}

impl ErrorWord {
    pub(super) const LAYOUT: Layout = layout_of!(ErrorWord { status: u32, flags: u32, seq: u64 });
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Progress>() == super::sizes::PROGRESS_SIZE);
    assert!(std::mem::offset_of!(Progress, errors) == 0x40);
    assert!(std::mem::offset_of!(Progress, streams) == Progress::STREAMS_OFFSET);
};

/// The deferred error of one context.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorWord {
    status: AtomicU32,
    flags: AtomicU32,
    seq: AtomicU64,
}

impl ErrorWord {
    /// The error if there is one, whether it is sticky (stays until the context is reset), and the `seq` of
    /// the failed command.
    #[inline]
    pub fn get(&self) -> Option<(Status, bool, u64)> {
        let status = self.status.load(Ordering::Acquire);
        (status != 0).then(|| {
            (Status(status), self.flags.load(Ordering::Relaxed) & 1 != 0, self.seq.load(Ordering::Relaxed))
        })
    }

    /// Publishes an error, unless one is there: a context's later errors follow from its first one. For the
    /// host side.
    pub fn set(&self, status: Status, sticky: bool, seq: u64) {
        if self.status.load(Ordering::Relaxed) == 0 {
            self.flags.store(sticky.into(), Ordering::Relaxed);
            self.seq.store(seq, Ordering::Relaxed);
            self.status.store(status.0, Ordering::Release);
        }
    }

    /// Whether [`set`](Self::set) was called for an error of command `seq` that is not there now: it was
    /// about to be published, or the client has taken it. For a process of the host side that replaces one
    /// that may have published it.
    pub fn may_have_been_taken(&self, seq: u64) -> bool {
        self.seq.load(Ordering::Acquire) == seq && self.status.load(Ordering::Acquire) == 0
    }

    /// Clears the error. The client does this after it returned an error that is not sticky, the host side
    /// when it resets a context.
    pub fn clear(&self) {
        self.status.store(0, Ordering::Release);
    }
}

impl Progress {
    /// Offset of the stream words in the progress area, in bytes.
    pub const STREAMS_OFFSET: usize = 4096;

    /// See the table above.
    #[inline]
    pub fn released(&self) -> u64 {
        self.released.load(Ordering::Acquire)
    }

    /// For the host side. The value never decreases.
    pub fn set_released(&self, seq: u64) {
        self.released.store(seq, Ordering::Release);
    }

    /// See the table above.
    pub fn executed(&self) -> u64 {
        self.executed.load(Ordering::Acquire)
    }

    /// For the host side. The value never decreases.
    pub fn set_executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Release);
    }

    /// See the table above.
    #[inline]
    pub fn output(&self) -> u64 {
        self.output.load(Ordering::Acquire)
    }

    /// For the host side. The value never decreases.
    pub fn set_output(&self, bytes: u64) {
        self.output.store(bytes, Ordering::Release);
    }

    /// See the table above.
    #[inline]
    pub fn watched(&self) -> u64 {
        self.watched.load(Ordering::Acquire)
    }

    /// For the host side.
    pub fn set_watched(&self, value: u64) {
        self.watched.store(value, Ordering::Release);
    }

    /// The error word of a context; `None` for an id out of range.
    pub fn error(&self, context: ContextId) -> Option<&ErrorWord> {
        self.errors.get(context.0 as usize)
    }

    /// The word of a stream; `None` for an id out of range.
    #[inline]
    pub fn stream(&self, stream: StreamId) -> Option<&AtomicU64> {
        self.streams.get(stream.0 as usize)
    }
}
