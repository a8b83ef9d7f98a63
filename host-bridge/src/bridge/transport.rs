//! What a session needs of the transport that carries it.

use std::time::Duration;

use protocol::device::Extent;

use super::error::RegionError;
use crate::memory::Memories;

/// A region of the client's memory that is about to be registered: where it lies, unchecked.
#[derive(Debug)]
pub struct RegionMemory {
    /// The memories that the extents count in.
    pub memories: Memories,
    /// The region's extents, in order, byte-granular.
    pub extents: Vec<Extent>,
    /// Bytes in all; equals the sum of the extents' lengths.
    pub size: u64,
    /// `memories` is this region's own (one file, its addresses being offsets in that file) and not the
    /// channel's.
    pub own_memory: bool,
    /// Nobody may write the region.
    pub read_only: bool,
}

/// How a [`Transport::close`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// Nothing accesses the client's memory any more.
    Released,
    /// The other side did not release the memory in the given time. It must stay as it is until a later
    /// `close` returns [`Released`](Closed::Released).
    StillHeld,
}

/// What carries a session once it stands.
///
/// An implementation is made by a `connect` of its own, which blocks until the server has answered (or the
/// configured time is over) and leaves the session running: commands that the client appends to its ring
/// reach the server, with all they refer to, without any further call. It then keeps these promises:
///
/// - **Order.** The server sees records in ring order. A reply or a progress word that says data has arrived
///   is published after the data.
/// - **Loss.** When the server is gone, says goodbye, or the client sends what no correct client sends, it
///   calls [`SessionState::lose`](super::state::SessionState::lose) once, from a thread of its own, and
///   touches the client's memory no more after that.
/// - **Isolation.** It never panics on anything that came out of the channel or off the network, and what it
///   allocates for a client is bounded.
///
/// All methods may be called from any thread, at the same time, also after a loss. They may block and so must
/// not be called from a thread that serves a virtqueue, nor from the callbacks given to
/// [`Session::connect`](super::Session::connect).
pub trait Transport: Send + Sync + std::fmt::Debug {
    /// Makes `region` known as `id`. The caller has checked that `id` is free and that limits hold, and that
    /// the extents lie inside `region.memories`.
    ///
    /// Once this has returned `Ok`, records that name the region are accepted.
    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError>;

    /// Forgets a region. Returns when neither this process nor the server touches it any more: records that
    /// the client appended before the call are forwarded first, and transfers under way are finished. A
    /// record that names the region after that is malformed.
    ///
    /// On a session that is over this returns `Ok` at once, or once the server has released the memory.
    fn unregister_region(&self, id: u32) -> Result<(), RegionError>;

    /// Ends the session, with `reason` in words for the server and for the client's sleeping threads.
    /// Idempotent. Waits at most `patience` for the other side to release the client's memory.
    fn close(&self, reason: &str, patience: Duration) -> Closed;

    /// Has the session pause: neither this process nor the server touches the client's memory until
    /// [`go_on`](Self::go_on), and the session stands meanwhile, as long as the server keeps it. Does not
    /// wait until that is reached. Where a session cannot pause this does nothing.
    fn pause(&self) {}

    /// Waits up to `patience` until a session that was told to [pause](Self::pause) does, or is over. False:
    /// it does not, and has to be closed before the client's memory is somebody else's.
    fn is_paused(&self, _patience: Duration) -> bool {
        false
    }

    /// Continues a paused session. If that fails, the caller has to close it.
    fn go_on(&self) -> std::io::Result<()> {
        Ok(())
    }
}
