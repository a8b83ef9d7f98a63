//! The buffers that pieces are in at one end of a connection.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicU64;
#[cfg(test)]
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use host_bridge::endpoint::Region;
use host_bridge::verbs::{Access, Domain, PieceBuffer, Registration, VerbsError};
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::Status;
use protocol::channel::SleepFlag;
use protocol::ops::direct::{MAX_PIECE, PIECES};

use super::in_place::Found;
use super::near::{Copying, Moving};
use crate::driver::gpu::Preparer;
use crate::lock::lock;

/// Buffers that are made ready for a connection in advance. It has no others then.
const PREPARED: usize = PIECES / 4 * 3;

/// What a session's connections share.
#[derive(Default)]
pub(super) struct Common {
    /// Bytes of pieces sent and received.
    pub(super) all: AtomicU64,
    /// Those of them that went over verbs.
    pub(super) over_verbs: AtomicU64,
    /// Those of them that were sent from device memory.
    pub(super) in_place: AtomicU64,
    /// Buffers of closed connections. CUDA would wait for running kernels if they were released, and others
    /// will need them.
    pub(super) spare: Mutex<Vec<Arc<Memory>>>,
}

/// The buffers of one end of a connection.
pub(super) struct Pool {
    pub(super) common: Arc<Common>,
    pub(super) state: Mutex<PoolState>,
    pub(super) changed: Condvar,
    /// Rung when there is a buffer to take, for an end over verbs.
    pub(super) bell: OnceLock<Arc<Bell>>,
}

pub(super) struct PoolState {
    pub(super) free: Vec<Arc<Memory>>,
    pub(super) made: usize,
    pub(super) most: usize,
    pub(super) closed: bool,
    /// Threads that wait in [`Pool::take`].
    waiting: usize,
}

impl Pool {
    pub(super) fn new(common: &Arc<Common>) -> Arc<Pool> {
        let state = PoolState { free: Vec::new(), made: 0, most: PIECES, closed: false, waiting: 0 };
        let (state, changed, bell) = (Mutex::new(state), Condvar::new(), OnceLock::new());
        Arc::new(Pool { common: Arc::clone(common), state, changed, bell })
    }

    /// A buffer that no connection has.
    pub(super) fn fresh(&self) -> Option<Arc<Memory>> {
        if let Some(memory) = lock(&self.common.spare).pop() {
            return Some(memory);
        }
        let memory = Memory::new(MAX_PIECE as usize);
        memory.inspect_err(|e| tracing::warn!("no memory for a direct connection: {e}")).ok()
    }

    /// Makes the buffers that pieces will use, and no more later.
    pub(super) fn prepare(&self) {
        loop {
            {
                let mut state = lock(&self.state);
                if state.closed || state.made >= PREPARED {
                    state.most = state.made;
                    return;
                }
                state.made += 1;
            }
            // Nobody waits for this lock meanwhile: it may take long.
            let memory = self.fresh();
            let mut state = lock(&self.state);
            match memory {
                Some(memory) => state.free.push(memory),
                None => {
                    state.made -= 1;
                    return;
                }
            }
        }
    }

    /// Makes free buffers ready for a device. Nothing that pieces do later calls the driver for them.
    pub(super) fn lock_pages(&self, ready: &Preparer) {
        let free = lock(&self.state).free.clone();
        free.iter().for_each(|memory| ready(memory.region()));
    }

    /// Takes a buffer, unless all are in use.
    pub(super) fn try_take(self: &Arc<Pool>) -> Option<Buffer> {
        self.take_from(&mut lock(&self.state))
    }

    pub(super) fn take_from(self: &Arc<Pool>, state: &mut PoolState) -> Option<Buffer> {
        if state.closed {
            return None;
        }
        let memory = match state.free.pop() {
            Some(memory) => memory,
            None if state.made < state.most => {
                let memory = self.fresh()?;
                state.made += 1;
                memory
            }
            None => return None,
        };
        Some(Buffer { registration: None, memory, pool: Arc::clone(self) })
    }

    /// Whether there is a buffer, in use or free, so that one can be taken sooner or later.
    pub(super) fn may_have_one_later(&self) -> bool {
        let state = lock(&self.state);
        !state.closed && state.made > 0
    }

    /// Takes a buffer, waiting for one if necessary. `None`: the connection is closed, or there is no memory.
    pub(super) fn take(self: &Arc<Pool>) -> Option<Buffer> {
        let mut state = lock(&self.state);
        while state.free.is_empty() && state.made >= state.most && !state.closed {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        self.take_from(&mut state)
    }

    /// A buffer can be taken that could not be before: wakes whoever waits for one.
    fn has_room(&self, state: MutexGuard<'_, PoolState>) {
        let waits = state.waiting > 0;
        drop(state);
        if waits {
            self.changed.notify_all();
        }
        self.bell.get().inspect(|bell| bell.ring());
    }

    /// Closes the pool: nothing can be taken any more. Other connections get the buffers.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let mut free = std::mem::take(&mut state.free);
        drop(state);
        self.changed.notify_all();
        lock(&self.common.spare).append(&mut free);
    }
}

/// A buffer's memory.
pub(super) struct Memory {
    /// Made when a buffer of it is first used over verbs. Dropped before the memory.
    registration: Mutex<Option<Arc<Registration>>>,
    region: Arc<Region>,
}

impl Memory {
    pub(super) fn new(len: usize) -> io::Result<Arc<Memory>> {
        let len = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Arc::new(Memory { registration: Mutex::default(), region: Region::own(len)? }))
    }

    pub(super) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Registers it in a domain, unless it is. It may be another connection's domain in which it was before,
    /// of a device that has failed since.
    fn register(&self, domain: &Arc<Domain>) -> Result<Arc<Registration>, VerbsError> {
        let mut kept = lock(&self.registration);
        if let Some(known) = kept.as_ref().filter(|known| Arc::ptr_eq(known.domain(), domain)) {
            return Ok(Arc::clone(known));
        }
        let len = self.region.size();
        let runs = self.region.runs(0, len as u64).unwrap_or_default();
        let [(at, len)] = runs[..] else {
            return Err(VerbsError::Region { size: len as u64, why: "it is not in one piece".into() });
        };
        // SAFETY: the region is mapped as long as this, and whoever has the registration has this, too.
        // Slices of it exist only while its buffer is with its owner, and not with a queue.
        let registration = Arc::new(unsafe { domain.register(at, len, Access::Write) }?);
        *kept = Some(Arc::clone(&registration));
        Ok(registration)
    }
}

/// Wakes the thread of one end. It rings only if that thread listens.
pub(super) struct Bell {
    rings: EventFd,
    listens: SleepFlag,
    /// How often it has rung.
    #[cfg(test)]
    rung: AtomicU64,
}

impl Bell {
    pub(super) fn new() -> io::Result<Bell> {
        Ok(Bell {
            rings: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            listens: SleepFlag::default(),
            #[cfg(test)]
            rung: AtomicU64::new(0),
        })
    }

    /// There is something for the thread, which others can see already.
    pub(super) fn ring(&self) {
        if self.listens.take() {
            // A full counter means that it has rung.
            let _ = self.rings.write(1);
            #[cfg(test)]
            self.rung.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The thread is about to sleep. It must look once more before it does: whatever was there before this
    /// does not ring.
    pub(super) fn listen(&self) {
        self.listens.announce();
    }

    /// Readable when it has rung.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.rings.as_fd()
    }

    /// The thread has woken, and looks for everything. It may have rung meanwhile.
    pub(super) fn ignore(&self) {
        self.listens.cancel();
    }

    /// The same, and what has rung is over.
    pub(super) fn silence(&self) {
        self.ignore();
        // It may not have rung.
        let _ = self.rings.read();
    }

    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.listens.is_asleep()
    }

    #[cfg(test)]
    pub(super) fn rung(&self) -> u64 {
        self.rung.load(Ordering::Acquire)
    }
}

/// A buffer in use. Dropping it makes it free again.
pub(super) struct Buffer {
    /// In the domain of the connection that uses it, once it goes over verbs. Dropped before the memory.
    registration: Option<Arc<Registration>>,
    pub(super) memory: Arc<Memory>,
    pub(super) pool: Arc<Pool>,
}

impl Buffer {
    /// Whether it is ready for a queue of this domain, so that making it ready takes no time.
    pub(super) fn is_registered(&self, domain: &Arc<Domain>) -> bool {
        lock(&self.memory.registration).as_ref().is_some_and(|known| Arc::ptr_eq(known.domain(), domain))
    }

    /// Makes it ready for a queue of this domain.
    pub(super) fn register(&mut self, domain: &Arc<Domain>) -> Result<(), VerbsError> {
        self.registration = Some(self.memory.register(domain)?);
        Ok(())
    }

    /// Its first `len` bytes.
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        match self.memory.region().runs(0, len as u64).as_deref() {
            // SAFETY: the region belongs to this buffer, and whoever has the buffer has it exclusively: a
            // device is done with it when it is passed on.
            Some([(at, len)]) => unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), *len) },
            _ => &mut [],
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        if state.closed {
            lock(&self.pool.common.spare).push(Arc::clone(&self.memory));
        } else {
            state.free.push(Arc::clone(&self.memory));
        }
        self.pool.has_room(state);
    }
}

// SAFETY: the memory belongs to the buffer, and whoever has the buffer has it exclusively (`Buffer::bytes`).
// A registration that was made stays as long as the memory.
unsafe impl PieceBuffer for Buffer {
    fn registration(&self) -> Option<&Registration> {
        self.registration.as_deref()
    }
}

/// Bytes of a box where they are in device memory, for verbs. See [`Blocks`](super::in_place::Blocks).
pub(super) struct InPlace {
    pub(super) found: Found,
    /// Until the device has read them, and the other end's has them, their memory is not freed, and does not
    /// leave.
    pub(super) _copying: [Copying; 2],
    pub(super) _moving: Arc<Moving>,
    /// Says that it is under way.
    pub(super) _piece: Arc<()>,
}

/// The bytes of a piece that is sent.
pub(super) enum Source {
    Buffer(Buffer),
    InPlace(InPlace),
}

// SAFETY: for a buffer as above. Device memory stays, with its registration, until `InPlace` is dropped; as
// for any copy, the program sees to it that nobody writes what it copies.
unsafe impl PieceBuffer for Source {
    fn registration(&self) -> Option<&Registration> {
        match self {
            Source::Buffer(buffer) => buffer.registration(),
            Source::InPlace(bytes) => Some(&bytes.found.registration),
        }
    }

    fn offset(&self) -> u64 {
        match self {
            Source::Buffer(buffer) => buffer.offset(),
            Source::InPlace(bytes) => bytes.found.offset,
        }
    }
}

/// A buffer that a device uses. Unless the device is known to be [done](InUse::over), its memory is never
/// freed.
pub struct InUse(pub(super) Option<Buffer>);

impl InUse {
    /// The device is done with it.
    pub(super) fn over(mut self) -> Option<Buffer> {
        self.0.take()
    }

    /// Releases it if the status says that the device is done; nobody needs its bytes.
    pub fn release(self, status: Status) {
        if status.is_success() {
            drop(self.over());
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            // A new buffer takes its place.
            let mut state = lock(&buffer.pool.state);
            state.made -= 1;
            buffer.pool.has_room(state);
            std::mem::forget(buffer);
        }
    }
}
