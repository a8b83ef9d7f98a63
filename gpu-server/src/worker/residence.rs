//! The worker's side of moving device memory: [`crate::parent`] decides, and the dispatcher carries it out
//! between two commands.
//!
//! ```text
//!  daemon ── order ──▶ thread of the daemon's messages ── [`Orders`], wakes the dispatcher
//!                                                              │
//!  dispatcher   … command ─ rest: leaves ─ sleeps ─ next command: waits for room, comes back ─ executes it …
//! ```
//!
//! Before a command, the dispatcher only checks whether there is anything to look for: its gate
//! ([`super::turns`]), and a flag of its own.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use handover::clock;
use host_bridge::endpoint::Lost;
use protocol::Status;

use crate::driver::call::is_sticky;
use crate::driver::store::Store;
use crate::driver::{Backend, Call};
use crate::pages::{Page, Terms, gate};
use crate::room::{AGAIN, Room, WITHIN};
use crate::worker_protocol::MemoryOrder;

/// How long a session, without and with commands, waits for its own work before it reports that it cannot
/// leave.
const IDLE_WITHIN: Duration = Duration::from_millis(50);
const BUSY_WITHIN: Duration = Duration::from_secs(1);
/// While a session waits for room, how often it looks around and asks again, because a new daemon may not
/// know about it.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often in a row memory may fail to return, other than for lack of room, until the session is lost. The
/// daemon pauses before each time, and twice as long as before the previous one.
const RETURNS: u32 = 5;

/// An order, its number, and its file.
type Ordered = (u32, MemoryOrder, Option<OwnedFd>);

/// How long a command has waited for room without any session's memory moving.
#[derive(Default)]
pub(super) struct Patience(Option<(u64, Instant)>);

/// The latest order that nobody has started to carry out.
#[derive(Default)]
pub(super) struct Orders {
    latest: Mutex<Option<Ordered>>,
    came: Condvar,
}

impl Orders {
    fn lock(&self) -> MutexGuard<'_, Option<Ordered>> {
        self.latest.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Stores an order from the daemon. The dispatcher must then be woken.
    pub(super) fn put(&self, ordered: Ordered) {
        *self.lock() = Some(ordered);
        self.came.notify_all();
    }

    fn take(&self) -> Option<Ordered> {
        self.lock().take()
    }

    /// Waits briefly for one.
    fn wait(&self, moment: Duration) -> Option<Ordered> {
        let waited = self.came.wait_timeout_while(self.lock(), moment, |latest| latest.is_none());
        waited.unwrap_or_else(|e| e.into_inner()).0.take()
    }
}

/// See the module's documentation.
pub(super) struct Residence {
    orders: Arc<Orders>,
    room: Arc<Room>,
    terms: Arc<Page<Terms>>,
    store: Store,
    /// Whether memory is in the store.
    away: bool,
    /// How often in a row memory has failed to return, other than for lack of room.
    failed: u32,
    /// Why memory will never return.
    gone: Option<Status>,
    /// Whether it has been reported since when the session rests, and no command has come since.
    rests: bool,
    /// Whether the server moves device memory at all.
    on: bool,
}

impl Residence {
    pub(super) fn new(orders: Arc<Orders>, room: Arc<Room>, terms: Arc<Page<Terms>>, on: bool) -> Residence {
        Residence {
            orders,
            room,
            terms,
            store: Store::default(),
            away: false,
            failed: 0,
            gone: None,
            rests: false,
            on,
        }
    }

    /// Whether memory must be brought back before the next command.
    #[inline]
    pub(super) fn is_away(&self) -> bool {
        self.away
    }

    /// # Errors
    /// If memory will never return, or the session has ended meanwhile.
    fn check(&self, over: &impl Fn() -> bool) -> Result<(), Lost> {
        match self.gone {
            Some(status) => Err(Lost::new(format!("device memory cannot be brought back: {status}"))),
            None if over() => Err(Lost::new("the session ended while it waited for device memory")),
            None => Ok(()),
        }
    }

    /// Called before the dispatcher sleeps, and when it is roused: carries out orders.
    pub(super) fn rest(&mut self, backend: &mut dyn Backend, call: &mut Call) {
        if !self.on {
            return;
        }
        if !std::mem::replace(&mut self.rests, true) {
            self.room.meter.memory.rested.store(clock::to_ns(Instant::now()), Ordering::Relaxed);
        }
        self.obey_all(backend, call);
    }

    /// Carries out orders between two commands, or before one that waits for its turn.
    pub(super) fn obey_all(&mut self, backend: &mut dyn Backend, call: &mut Call) {
        while let Some(ordered) = self.orders.take() {
            self.obey(backend, call, ordered);
        }
    }

    /// Called when there is a command: from now on, the session is busy.
    #[inline]
    pub(super) fn works(&mut self) {
        if std::mem::replace(&mut self.rests, false) {
            self.room.meter.memory.rested.store(0, Ordering::Relaxed);
        }
    }

    /// Called before a command that needs the session's memory, if there may be anything to look for: carries
    /// out orders, and waits until the memory is back. `over`: whether the session is over.
    ///
    /// # Errors
    /// If the session has ended meanwhile, or has lost its memory.
    pub(super) fn before(
        &mut self,
        backend: &mut dyn Backend,
        call: &mut Call,
        over: impl Fn() -> bool,
    ) -> Result<(), Lost> {
        if self.terms.gate.load(Ordering::Acquire) & gate::ASKED != 0 {
            match self.orders.take() {
                // It has work after all.
                Some((number, MemoryOrder::Leave { busy: false }, _)) => self.done(number, false),
                Some(ordered) => self.obey(backend, call, ordered),
                None => {}
            }
        }
        if !self.away {
            return Ok(());
        }
        let memory = &self.room.meter.memory;
        memory.returns.store(1, Ordering::Release);
        while self.away {
            self.room.ring();
            self.check(&over)?;
            match self.orders.wait(LOOK_EVERY) {
                Some((number, MemoryOrder::Return, _)) => {
                    let returned = self.come_back(backend);
                    self.done(number, returned);
                }
                // Part of it may still be there, and another session comes first.
                Some(ordered) => self.obey(backend, call, ordered),
                None => {}
            }
        }
        self.room.meter.memory.returns.store(0, Ordering::Release);
        self.room.ring();
        Ok(())
    }

    /// A command found no room for new memory: waits briefly, and carries out orders meanwhile. So what the
    /// session already has blocks nobody: it leaves for whoever came earlier, and returns in its turn.
    /// Returns false if nothing has moved for too long. Call [`room_found`](Residence::room_found)
    /// afterwards.
    ///
    /// # Errors
    /// As for [`before`](Residence::before).
    pub(super) fn until_room(
        &mut self,
        backend: &mut dyn Backend,
        call: &mut Call,
        patience: &mut Patience,
        over: impl Fn() -> bool,
    ) -> Result<bool, Lost> {
        if !self.on {
            return Ok(false);
        }
        self.room.meter.memory.yields.store(1, Ordering::Release);
        loop {
            self.room.ring();
            self.check(&over)?;
            let moves = self.terms.moves.load(Ordering::Relaxed);
            let (seen, since) = *patience.0.get_or_insert((moves, Instant::now()));
            if seen != moves {
                *patience = Patience(None);
            } else if since.elapsed() > WITHIN {
                tracing::info!("refused: no room on a device");
                return Ok(false);
            }
            match self.orders.wait(if self.away { LOOK_EVERY } else { AGAIN }) {
                Some((number, MemoryOrder::Return, _)) if self.away => {
                    let returned = self.come_back(backend);
                    self.done(number, returned);
                }
                Some(ordered) => self.obey(backend, call, ordered),
                None => {}
            }
            self.room.meter.memory.returns.store(u32::from(self.away), Ordering::Release);
            if !self.away {
                return Ok(true);
            }
        }
    }

    /// A command that waited for room no longer waits.
    pub(super) fn room_found(&mut self) {
        let memory = &self.room.meter.memory;
        memory.yields.store(0, Ordering::Release);
        memory.returns.store(0, Ordering::Release);
        self.room.end();
        self.room.ring();
    }

    /// Carries out an order for a session that isn't waiting for its memory.
    fn obey(&mut self, backend: &mut dyn Backend, call: &mut Call, (number, order, file): Ordered) {
        self.room.meter.memory.begun.store(number, Ordering::Release);
        let obeyed = match order {
            // If the previous daemon ordered it, too, nothing is left to do.
            MemoryOrder::Leave { busy } => {
                self.leave(backend, call, file, if busy { BUSY_WITHIN } else { IDLE_WITHIN })
            }
            MemoryOrder::Forget if self.away => false,
            MemoryOrder::Forget => {
                backend.clear(&mut self.store);
                true
            }
            // It isn't waiting for that: it has returned, or it waits only when there is a command.
            MemoryOrder::Return => !self.away,
        };
        self.done(number, obeyed);
    }

    fn leave(
        &mut self,
        backend: &mut dyn Backend,
        call: &mut Call,
        file: Option<OwnedFd>,
        patience: Duration,
    ) -> bool {
        let (begun, before) = (Instant::now(), self.bytes_away());
        let left = backend.leave(call, &mut self.store, file, patience);
        self.look_at(backend);
        let bytes = self.bytes_away().saturating_sub(before);
        // Also after an error: what has left is away, and will be counted when it returns.
        note(&self.room.meter.memory.left, bytes, begun);
        match left {
            Ok(()) => {
                tracing::info!(
                    bytes,
                    ms = begun.elapsed().as_millis() as u64,
                    "moved device memory to this machine"
                );
                true
            }
            Err(Status::NOT_READY) => {
                // Copies from and to the client do not count as work, and do not show otherwise.
                self.works();
                tracing::debug!("device memory stays where it is: a device is working");
                false
            }
            Err(status) => {
                tracing::warn!(bytes, "device memory stays where it is, except for these bytes: {status}");
                false
            }
        }
    }

    fn come_back(&mut self, backend: &mut dyn Backend) -> bool {
        let (begun, before) = (Instant::now(), self.bytes_away());
        let returned = backend.come_back(&mut self.store);
        self.look_at(backend);
        let bytes = before.saturating_sub(self.bytes_away());
        match returned {
            Ok(()) => {
                self.failed = 0;
                note(&self.room.meter.memory.returned, bytes, begun);
                tracing::info!(bytes, ms = begun.elapsed().as_millis() as u64, "moved device memory back");
                true
            }
            Err(Status::OUT_OF_MEMORY) => {
                tracing::info!("device memory cannot come back yet: there is no room");
                false
            }
            Err(status) => {
                tracing::warn!("device memory cannot come back: {status}");
                self.failed += 1;
                if self.failed >= RETURNS || is_sticky(status) {
                    self.gone.get_or_insert(status);
                }
                false
            }
        }
    }

    /// Notes the state in which moving memory has left the session.
    fn look_at(&mut self, backend: &dyn Backend) {
        self.gone = self.gone.or(backend.torn());
        // Then a command must not use what is there.
        self.away = backend.is_away() || self.gone.is_some();
    }

    /// The session's bytes that are off their devices.
    fn bytes_away(&self) -> u64 {
        let all = &self.room.meter.memory.away;
        all.iter().fold(0, |sum, bytes| sum.saturating_add(bytes.load(Ordering::Relaxed)))
    }

    /// Reports that an order was handled.
    fn done(&self, number: u32, carried_out: bool) {
        let memory = &self.room.meter.memory;
        memory.keeps.store(self.store.memory(), Ordering::Relaxed);
        // After everything else that it reports about its memory.
        memory.done.store(u64::from(number) << 32 | u64::from(carried_out), Ordering::Release);
        self.room.ring();
    }
}

/// Adds to the totals of bytes and ns, if anything moved.
fn note([bytes, ns]: &[AtomicU64; 2], moved: u64, begun: Instant) {
    if moved == 0 {
        return;
    }
    bytes.fetch_add(moved, Ordering::Relaxed);
    ns.fetch_add(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}
