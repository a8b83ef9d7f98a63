//! The device memory that a connection's pieces are in, for ends that copy them without the dispatcher.
//!
//! A kernel may be waiting for a piece, and the dispatcher for that kernel, in a call of the driver. So what such a
//! piece needs is made in advance: what copies it ([`Carrier`]), and which memory it may be in. Any thread can then
//! copy it, as long as the session's memory [stays where it is](Motion).

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::direct::{DirectCloseReply, MAX_NAMED, MAX_PIECE};

use super::lock;
use crate::driver::call::Pending;
use crate::driver::gpu::Carrier;

/// A prepared end's device memory.
pub struct Near {
    /// Its context.
    pub context: ContextId,
    /// Copies pieces.
    pub carrier: Arc<dyn Carrier>,
}

/// A part of memory: address and size.
type Part = (u64, u64);

/// An end's device memory, once it was prepared, and which parts of it the client has named.
#[derive(Default)]
pub(super) struct Named(Mutex<(Option<Near>, Vec<Part>)>);

impl Named {
    pub(super) fn prepare(&self, near: Near) {
        lock(&self.0).0 = Some(near);
    }

    /// The end's context.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if it was not prepared.
    pub(super) fn context(&self) -> Result<ContextId, Status> {
        lock(&self.0).0.as_ref().map(|near| near.context).ok_or(Status::INVALID_HANDLE)
    }

    /// Names memory, or forgets it.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if the end was not prepared, `INVALID_VALUE` if there is no such memory to forget,
    /// `OUT_OF_MEMORY` beyond [`MAX_NAMED`].
    pub(super) fn name(&self, part: Part, allowed: bool) -> Result<(), Status> {
        let (near, parts) = &mut *lock(&self.0);
        if near.is_none() {
            return Err(Status::INVALID_HANDLE);
        }
        if !allowed {
            let found = parts.iter().position(|known| *known == part).ok_or(Status::INVALID_VALUE)?;
            parts.swap_remove(found);
            return Ok(());
        }
        if parts.len() >= MAX_NAMED {
            return Err(Status::OUT_OF_MEMORY);
        }
        parts.push(part);
        Ok(())
    }

    /// Forgets every part that has bytes in this range.
    pub(super) fn forget(&self, address: u64, size: u64) {
        let apart =
            |part: &Part| part.0 >= address.saturating_add(size) || address >= part.0.saturating_add(part.1);
        lock(&self.0).1.retain(apart);
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
        f: impl FnOnce(&Arc<dyn Carrier>) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let state = lock(&self.0);
        let (Some(near), parts) = &*state else { return Err(Status::INVALID_HANDLE) };
        let holds = |(start, size): &Part| {
            address.checked_sub(*start).is_some_and(|at| at <= *size && len <= size - at)
        };
        if len == 0 || len > MAX_PIECE || !parts.iter().any(holds) {
            return Err(Status::INVALID_VALUE);
        }
        f(&near.carrier)
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

    /// Waits until none is under way, or the time is over.
    pub(super) fn wait(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = lock(&self.0);
        while state.0 > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
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
        named.prepare(Near { context: ContextId(0), carrier: Arc::new(Nothing) });
        named
    }

    #[test]
    fn pieces_are_in_named_memory_only() {
        let named = prepared();
        let may = |address, len| named.with(address, len, |_| Ok(())).is_ok();
        assert!(!may(100, 1));
        named.name((100, 50), true).unwrap();
        named.name((120, 80), true).unwrap();
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
        named.name((0, u64::MAX), true).unwrap();
        assert!(may(300, MAX_PIECE) && !may(300, MAX_PIECE + 1));
        named.name((0, u64::MAX), false).unwrap();
        assert!(!may(300, 1) && may(120, 1));
    }

    #[test]
    fn memory_is_forgotten_as_it_was_named_or_with_any_byte_of_it() {
        let named = prepared();
        for _ in 0..2 {
            named.name((100, 50), true).unwrap();
        }
        assert_eq!(named.name((100, 49), false), Err(Status::INVALID_VALUE));
        let may = || named.with(100, 1, |_| Ok(())).is_ok();
        named.name((100, 50), false).unwrap();
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
        assert_eq!(named.name((100, 50), true), Err(Status::INVALID_HANDLE));
        assert_eq!(named.with(100, 1, |_| Ok(())), Err(Status::INVALID_HANDLE));
        let named = prepared();
        (0..MAX_NAMED).for_each(|_| named.name((100, 50), true).unwrap());
        assert_eq!(named.name((100, 50), true), Err(Status::OUT_OF_MEMORY));
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
