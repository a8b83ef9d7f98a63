//! The memory that a connection's pieces are in, for ends that copy them without the dispatcher.
//!
//! A kernel may be waiting for a piece, and the dispatcher for that kernel, in a call of the driver. So what
//! such a piece needs is made in advance: what copies it ([`Carrier`]), and which memory it may be in. Any
//! thread can then copy it, as long as the session's device memory [stays where it is](Motion).
//!
//! Pieces in mirrors of the client's memory are copied by the processor, and no call of the driver is on
//! their way. Those in device memory are added to a stream, and NVIDIA's driver does that only while no other
//! thread is in a call that waits for a kernel.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use host_bridge::endpoint::Mapped;
use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::direct::{DirectCloseReply, MAX_NAMED, MAX_PIECE};

use crate::driver::beside::Beside;
use crate::driver::call::{End, Pending};
use crate::driver::gpu::{Carrier, Progress};
use crate::driver::rows::Rows;
use crate::driver::store::Way;
use crate::lock::lock;

/// A prepared end.
pub struct Near {
    /// Its context.
    pub context: ContextId,
    /// The connection's stream.
    pub stream: StreamId,
    /// Copies pieces in mirrors.
    pub mirrors: Arc<dyn Carrier>,
}

/// Which kind of memory pieces are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A device's.
    Device,
    /// A mirror of the client's.
    Mirror,
}

/// A part of memory.
struct Part {
    address: u64,
    size: u64,
    memory: Memory,
}

/// What an end has.
#[derive(Default)]
struct State {
    near: Option<Near>,
    /// Copies pieces in device memory, once some was named.
    device: Option<Arc<dyn Carrier>>,
    parts: Vec<Part>,
}

/// An end's memory, once it was prepared: which parts of it the client has named.
#[derive(Default)]
pub(super) struct Named(Mutex<State>);

impl Named {
    pub(super) fn prepare(&self, near: Near) {
        lock(&self.0).near = Some(near);
    }

    /// The end's context and stream.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if it was not prepared.
    pub(super) fn place(&self) -> Result<(ContextId, StreamId), Status> {
        lock(&self.0).near.as_ref().map(|near| (near.context, near.stream)).ok_or(Status::INVALID_HANDLE)
    }

    /// Whether pieces can be in device memory.
    pub(super) fn has_device(&self) -> bool {
        lock(&self.0).device.is_some()
    }

    /// Sets what copies pieces in device memory.
    pub(super) fn set_device(&self, carrier: Arc<dyn Carrier>) {
        lock(&self.0).device = Some(carrier);
    }

    /// Names memory: address and size.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if the end was not prepared for this kind, `OUT_OF_MEMORY` beyond [`MAX_NAMED`].
    pub(super) fn name(&self, (address, size): (u64, u64), memory: Memory) -> Result<(), Status> {
        let state = &mut *lock(&self.0);
        if state.near.is_none() || memory == Memory::Device && state.device.is_none() {
            return Err(Status::INVALID_HANDLE);
        }
        if state.parts.len() >= MAX_NAMED {
            return Err(Status::OUT_OF_MEMORY);
        }
        state.parts.push(Part { address, size, memory });
        Ok(())
    }

    /// Forgets what was named with this address and size.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if the end was not prepared, `INVALID_VALUE` if there is nothing to forget.
    pub(super) fn unname(&self, (address, size): (u64, u64)) -> Result<(), Status> {
        let state = &mut *lock(&self.0);
        if state.near.is_none() {
            return Err(Status::INVALID_HANDLE);
        }
        let is_it = |part: &Part| (part.address, part.size) == (address, size);
        let found = state.parts.iter().position(is_it).ok_or(Status::INVALID_VALUE)?;
        state.parts.swap_remove(found);
        Ok(())
    }

    /// Forgets every part that has bytes in this range.
    pub(super) fn forget(&self, address: u64, size: u64) {
        let apart = |part: &Part| {
            part.address >= address.saturating_add(size) || address >= part.address.saturating_add(part.size)
        };
        lock(&self.0).parts.retain(apart);
    }

    /// Does something with what copies a piece, while its memory is known to be named.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if the end was not prepared, `INVALID_VALUE` for other memory, and for a size that no
    /// piece has.
    pub(super) fn with<T>(
        &self,
        address: u64,
        len: u64,
        f: impl FnOnce(&Arc<dyn Carrier>, Memory) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let State { near, device, parts } = &*lock(&self.0);
        let near = near.as_ref().ok_or(Status::INVALID_HANDLE)?;
        let holds = |part: &&Part| {
            address.checked_sub(part.address).is_some_and(|at| at <= part.size && len <= part.size - at)
        };
        let part = parts.iter().find(holds).filter(|_| len > 0 && len <= MAX_PIECE);
        let memory = part.ok_or(Status::INVALID_VALUE)?.memory;
        match memory {
            Memory::Device => f(device.as_ref().ok_or(Status::INVALID_HANDLE)?, memory),
            Memory::Mirror => f(&near.mirrors, memory),
        }
    }
}

/// Copies pieces between mirrors and buffers, in the thread that calls it. Rows in mirrors have no gaps.
pub struct MirrorCarrier {
    /// The session's mirrors.
    pub beside: Arc<dyn Beside>,
    /// Whether pieces come in or go out.
    pub way: Way,
    /// That of the connection's stream.
    pub progress: Progress,
}

impl MirrorCarrier {
    fn copy(&self, mut at: u64, bytes: &Mapped) -> Result<(), Status> {
        for (run, len) in bytes.runs() {
            // SAFETY: the caller has these bytes of this process alone.
            let bytes = unsafe { std::slice::from_raw_parts_mut(run.as_ptr(), *len) };
            match self.way {
                Way::In => self.beside.write(at, bytes)?,
                Way::Out => self.beside.read(at, bytes)?,
            }
            at += *len as u64;
        }
        Ok(())
    }
}

impl Carrier for MirrorCarrier {
    fn carry(&self, rows: &Rows, offset: u64, bytes: Mapped, seq: u64, end: End) {
        let copied = self.copy(rows.at + offset, &bytes);
        drop(bytes);
        (self.progress)(seq, copied.err().unwrap_or(Status::SUCCESS));
        end(copied.err().unwrap_or(Status::SUCCESS));
    }
}

/// Whether pieces are being copied without the dispatcher, or the session's memory is to stay as it is.
#[derive(Default)]
pub(super) struct Motion(Mutex<(usize, bool)>);

impl Motion {
    /// Begins to copy. `None`: not now.
    pub(super) fn begin(self: &Arc<Motion>) -> Option<Moving> {
        let mut state = lock(&self.0);
        if state.1 {
            return None;
        }
        state.0 += 1;
        Some(Moving(Arc::clone(self)))
    }

    /// Lets nothing begin. `None`: something is being copied.
    pub(super) fn stop(self: &Arc<Motion>) -> Option<Still> {
        let mut state = lock(&self.0);
        if state.0 > 0 || state.1 {
            return None;
        }
        state.1 = true;
        Some(Still(Arc::clone(self)))
    }
}

/// A copy under way.
pub(super) struct Moving(Arc<Motion>);

impl Drop for Moving {
    fn drop(&mut self) {
        lock(&self.0.0).0 -= 1;
    }
}

/// While this exists, the session's memory is used by the dispatcher only.
pub struct Still(Arc<Motion>);

impl Drop for Still {
    fn drop(&mut self) {
        lock(&self.0.0).1 = false;
    }
}

/// Copies of pieces that are under way at one end, and whom to tell when none is.
#[derive(Default)]
pub(super) struct Copies(pub(super) Mutex<(usize, Option<Pending>)>, Condvar);

impl Copies {
    pub(super) fn begin(self: &Arc<Copies>) -> Copying {
        lock(&self.0).0 += 1;
        Copying(Arc::clone(self))
    }

    pub(super) fn are_under_way(&self) -> bool {
        lock(&self.0).0 > 0
    }

    /// Waits until none is under way. False: the time is over.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let waited = self.1.wait_timeout_while(lock(&self.0), limit, |state| state.0 > 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Answers when none is under way any more.
    pub(super) fn when_over(&self, pending: Pending) {
        let mut state = lock(&self.0);
        if state.0 == 0 { pending.answer(Ok(DirectCloseReply {})) } else { state.1 = Some(pending) }
    }
}

/// One of them.
pub(super) struct Copying(pub(super) Arc<Copies>);

impl Drop for Copying {
    fn drop(&mut self) {
        let mut state = lock(&self.0.0);
        state.0 -= 1;
        self.0.1.notify_all();
        if state.0 == 0
            && let Some(pending) = state.1.take()
        {
            pending.answer(Ok(DirectCloseReply {}));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::tests::Nothing;

    fn prepared() -> Named {
        let named = Named::default();
        named.prepare(Near { context: ContextId(0), stream: StreamId(0), mirrors: Arc::new(Nothing) });
        named.set_device(Arc::new(Nothing));
        named
    }

    const DEVICE: Memory = Memory::Device;

    #[test]
    fn pieces_are_in_named_memory_only() {
        let named = prepared();
        let may = |address, len| named.with(address, len, |_, _| Ok(())).is_ok();
        assert!(!may(100, 1));
        named.name((100, 50), DEVICE).unwrap();
        named.name((120, 80), Memory::Mirror).unwrap();
        for (address, len, allowed) in [
            (100, 50, true),
            (99, 2, false),
            (149, 1, true),
            (110, 41, false),
            (120, 80, true),
            (200, 1, false),
            (200, 0, false),
            (150, u64::MAX, false),
            (u64::MAX, 1, false),
            (0, u64::MAX, false),
        ] {
            assert_eq!(may(address, len), allowed, "{address} {len}");
        }
        let kind = |address| named.with(address, 1, |_, memory| Ok(memory)).unwrap();
        assert_eq!((kind(119), kind(150)), (DEVICE, Memory::Mirror));
        named.name((0, u64::MAX), DEVICE).unwrap();
        assert!(may(300, MAX_PIECE) && !may(300, MAX_PIECE + 1));
        named.unname((0, u64::MAX)).unwrap();
        assert!(!may(300, 1) && may(120, 1));
    }

    #[test]
    fn memory_is_forgotten_as_it_was_named_or_with_any_byte_of_it() {
        let named = prepared();
        for _ in 0..2 {
            named.name((100, 50), DEVICE).unwrap();
        }
        assert_eq!(named.unname((100, 49)), Err(Status::INVALID_VALUE));
        let may = || named.with(100, 1, |_, _| Ok(())).is_ok();
        named.unname((100, 50)).unwrap();
        assert!(may());
        named.forget(0, 100);
        named.forget(150, u64::MAX);
        assert!(may());
        named.forget(149, 1);
        assert!(!may());
    }

    #[test]
    fn an_end_that_is_not_prepared_has_no_memory_and_one_has_not_endlessly_much() {
        let named = Named::default();
        for memory in [DEVICE, Memory::Mirror] {
            assert_eq!(named.name((100, 50), memory), Err(Status::INVALID_HANDLE));
        }
        assert_eq!(named.unname((100, 50)), Err(Status::INVALID_HANDLE));
        assert_eq!(named.with(100, 1, |_, _| Ok(())), Err(Status::INVALID_HANDLE));
        named.prepare(Near { context: ContextId(0), stream: StreamId(0), mirrors: Arc::new(Nothing) });
        assert_eq!(named.name((100, 50), DEVICE), Err(Status::INVALID_HANDLE));
        (0..MAX_NAMED).for_each(|_| named.name((100, 50), Memory::Mirror).unwrap());
        assert_eq!(named.name((100, 50), Memory::Mirror), Err(Status::OUT_OF_MEMORY));
    }

    #[test]
    fn memory_is_still_only_while_nothing_moves() {
        let motion = Arc::<Motion>::default();
        let moving = motion.begin().expect("nothing is still");
        assert!(motion.stop().is_none());
        drop(moving);
        let still = motion.stop().expect("nothing moves");
        assert!(motion.begin().is_none() && motion.stop().is_none());
        drop(still);
        assert!(motion.begin().is_some());
    }
}
