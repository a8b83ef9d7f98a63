//! The worker's side of principals taking turns on a GPU: [`crate::parent`] decides, and tells each session
//! through the **gate** in its [`Terms`].
//!
//! The dispatcher checks the gate before each command that gives a device work. While it is open, which it is
//! as long as nobody else wants the devices, that is one relaxed load and no call. Otherwise:
//!
//! | gate | the dispatcher |
//! |---|---|
//! | `TELL` | rings the daemon's bell once, and continues |
//! | `METERED` | continues while only a few milliseconds of work are unfinished, and reports what is finished; with devices that imitate time, up to its allowance |
//! | `CLOSED` | rings, and waits; continues by one command for each step granted |
//!
//! Before the dispatcher sleeps, it fences unfenced work, so that the daemon knows of work that was enqueued
//! while the gate was open ([`Turns::rest`]). [`super::pace`] knows how much is unfinished.
//!
//! It never waits indefinitely for unfinished work, because a kernel may wait for one that a later command
//! launches. Copies from and to the client don't count as work: they use engines of their own.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::ops::array::MemcpyArray;
use protocol::ops::copy::{MemcpyDtoD, MemcpyDtoD3D, Memset};
use protocol::ops::graph::GraphLaunch;
use protocol::ops::launch::Launch;
use protocol::ops::{self, Op};

use super::pace::{Pace, Takes};
use crate::driver::{Backend, Call};
use crate::pages::{Meter, Page, Terms, gate};

/// Work is fenced at most this often.
const FENCE_EVERY: Duration = Duration::from_micros(100);
/// How often the dispatcher checks at a closed gate whether its session is over.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The pages that a session shares with the daemon, and the daemon's bell.
#[derive(Clone)]
pub struct Link {
    pub terms: Arc<Page<Terms>>,
    pub meter: Arc<Page<Meter>>,
    pub bell: Arc<OwnedFd>,
}

impl Link {
    fn ring(&self) {
        // Writing fails only if the pipe is full. The daemon is then awake.
        let _ = nix::unistd::write(&*self.bell, &[1]);
    }

    /// Sleeps until the gate is no longer `word`, or until it is time to look around.
    fn wait_at_gate(&self, word: u32) {
        let limit = libc::timespec { tv_sec: 0, tv_nsec: LOOK_EVERY.subsec_nanos().into() };
        let at = std::ptr::from_ref::<AtomicU32>(&self.terms.gate);
        // SAFETY: a futex word in a page that stays mapped, which the kernel only reads, and a timeout; the
        // call has no other effect.
        unsafe { libc::syscall(libc::SYS_futex, at, libc::FUTEX_WAIT, word, &raw const limit) };
    }
}

struct Progress {
    link: Link,
    begun: Instant,
    pace: Mutex<Pace>,
    changed: Condvar,
}

impl Progress {
    /// Time in ns since the session began.
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Fenced work. Dropping it means that it is finished, or never will be.
struct Batch {
    progress: Arc<Progress>,
    pieces: u64,
    takes: Takes,
    begun: u64,
}

impl Batch {
    fn new(progress: &Arc<Progress>, pieces: u64, takes: Takes) -> Batch {
        let begun = progress.now();
        let mut pace = progress.lock();
        pace.begin(pieces, takes);
        progress.link.meter.unfinished.store(pace.unfinished(), Ordering::Relaxed);
        drop(pace);
        Batch { progress: Arc::clone(progress), pieces, takes, begun }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let Progress { link, changed, .. } = &*self.progress;
        let now = self.progress.now();
        let mut pace = self.progress.lock();
        let took = pace.end(self.pieces, self.takes, self.begun, now);
        let meter = &link.meter;
        meter.gpu_ns.fetch_add(took, Ordering::Relaxed);
        meter.longest.store(pace.longest(), Ordering::Relaxed);
        meter.finished.fetch_add(self.pieces, Ordering::Relaxed);
        // After the other figures: a daemon that sees no unfinished work sees them, too.
        meter.unfinished.store(pace.unfinished(), Ordering::Release);
        let drained =
            pace.unfinished() == 0 && gate::mode(link.terms.gate.load(Ordering::Relaxed)) == gate::CLOSED;
        drop(pace);
        changed.notify_all();
        if drained {
            link.ring();
        }
    }
}

/// The steps of a closed gate that a session has taken, out of those that its word counts.
#[derive(Default)]
struct Steps(u32);

impl Steps {
    /// Takes a step at a closed gate, if there is one.
    fn take(&mut self, word: u32) -> bool {
        let more = gate::steps(word) != self.0;
        if more {
            self.0 = gate::next_step(self.0);
        }
        more
    }

    /// At a metered gate, earlier steps no longer count. (The words of other gates count something else.)
    fn forget(&mut self, word: u32) {
        self.0 = gate::steps(word);
    }
}

/// The gate that the daemon was last told of.
#[derive(Default)]
struct Told(Option<u32>);

impl Told {
    /// The next command is at its gate. If that is closed, it may have opened and closed again since the
    /// daemon was last told, unseen by this thread. So the daemon, which may be asleep, is told again.
    fn begin(&mut self, word: u32) {
        if gate::mode(word) != gate::TELL {
            self.0 = None;
        }
    }

    /// Whether to tell the daemon of this gate.
    fn is_new(&mut self, word: u32) -> bool {
        self.0.replace(word) != Some(word)
    }
}

/// Whether a command gives a device work that others have to wait for.
fn is_work(opcode: u16) -> bool {
    [
        Launch::INFO.opcode,
        GraphLaunch::INFO.opcode,
        Memset::INFO.opcode,
        MemcpyDtoD::INFO.opcode,
        MemcpyDtoD3D::INFO.opcode,
        MemcpyArray::INFO.opcode,
    ]
    .contains(&opcode)
}

/// See the module's documentation.
pub(super) struct Turns {
    link: Link,
    progress: Arc<Progress>,
    /// Stated device time of each block of a kernel in microseconds, if the devices imitate time.
    block_us: u64,
    steps: Steps,
    /// How many daemons the session had had when these steps were counted.
    daemons: u32,
    told: Told,
    /// Stated time in ns of unfenced work.
    stated: u64,
    fenced: Option<Instant>,
    /// Whether work was enqueued while the gate was open, and not fenced since.
    backlog: bool,
}

impl Turns {
    pub(super) fn new(link: Link, block_us: u32) -> Turns {
        let (pace, changed) = Default::default();
        let progress = Arc::new(Progress { link: link.clone(), begun: Instant::now(), pace, changed });
        let (steps, daemons, told, fenced) = (Steps::default(), 0, Told::default(), None);
        let (block_us, stated, backlog) = (block_us.into(), 0, false);
        Turns { link, progress, block_us, steps, daemons, told, stated, fenced, backlog }
    }

    /// Whether anything must be done before work other than continuing.
    #[inline]
    pub(super) fn is_limited(&mut self) -> bool {
        let open = gate::is_free(self.link.terms.gate.load(Ordering::Relaxed));
        self.backlog |= open;
        !open
    }

    /// Called before a command: waits until it may continue. Returns whether [`after`](Turns::after) must be
    /// called once it was executed. `over`: whether the session is over. `waiting`: called while it waits at
    /// its gate, which may take as long as others have work.
    pub(super) fn before(
        &mut self,
        backend: &mut dyn Backend,
        call: &mut Call,
        opcode: u16,
        over: impl Fn() -> bool,
        mut waiting: impl FnMut(&mut dyn Backend, &mut Call),
    ) -> bool {
        if !is_work(opcode) {
            return false;
        }
        let mut limit = None;
        self.told.begin(self.link.terms.gate.load(Ordering::Acquire));
        loop {
            let word = self.link.terms.gate.load(Ordering::Acquire);
            let daemons = self.link.terms.daemons.load(Ordering::Relaxed);
            if std::mem::replace(&mut self.daemons, daemons) != daemons {
                // The new daemon doesn't know what the previous one was told.
                (self.steps, self.told) = Default::default();
            }
            if matches!(gate::mode(word), gate::CLOSED | gate::METERED) && self.backlog {
                self.fence(backend, call);
            }
            match gate::mode(word) {
                gate::CLOSED if over() => return false,
                gate::CLOSED if self.steps.take(word) => {
                    self.wait_for(false);
                    return true;
                }
                gate::CLOSED => {
                    self.fence(backend, call);
                    self.wait_for(true);
                    self.tell(word);
                    waiting(backend, call);
                    self.link.wait_at_gate(word);
                }
                gate::METERED if self.is_used_up() => {
                    if over() {
                        return false;
                    }
                    self.steps.forget(word);
                    self.fence(backend, call);
                    self.wait_for(true);
                    waiting(backend, call);
                    self.link.wait_at_gate(word);
                }
                gate::METERED => {
                    self.steps.forget(word);
                    // If the gate closes again, that is a different time even if the word is the same.
                    self.told = Told::default();
                    self.wait_for(false);
                    if !self.progress.lock().is_deep() {
                        return true;
                    }
                    self.fence(backend, call);
                    let pace = self.progress.lock();
                    let end =
                        *limit.get_or_insert_with(|| Instant::now() + Duration::from_nanos(pace.patience()));
                    let pause = end.saturating_duration_since(Instant::now());
                    if pause.is_zero() {
                        return true;
                    }
                    // Work may have finished while this thread did not hold the lock.
                    if pace.is_deep() {
                        drop(self.progress.changed.wait_timeout(pace, pause));
                    }
                }
                mode => {
                    self.backlog = true;
                    self.wait_for(false);
                    if mode == gate::TELL {
                        self.link.meter.issued.fetch_add(1, Ordering::Relaxed);
                        self.tell(word);
                    }
                    return false;
                }
            }
        }
    }

    /// Whether the session has worked for as long as its turn allows.
    fn is_used_up(&self) -> bool {
        let allowance = self.link.terms.allowance.load(Ordering::Relaxed);
        let Link { meter, .. } = &self.link;
        allowance != u64::MAX
            && meter.gpu_ns.load(Ordering::Relaxed).saturating_add(self.progress.lock().stated()) >= allowance
    }

    /// Reports whether the session waits at its gate.
    fn wait_for(&self, waits: bool) {
        self.link.meter.waits.store(waits.into(), Ordering::Release);
    }

    /// Rings the bell, once for each command that waits, and otherwise once for each state of the gate.
    fn tell(&mut self, word: u32) {
        if self.told.is_new(word) {
            self.link.ring();
        }
    }

    /// Called after a command that gave a device work: notes it.
    pub(super) fn after(&mut self, backend: &mut dyn Backend, call: &mut Call, opcode: u16, body: &[u8]) {
        self.link.meter.issued.fetch_add(1, Ordering::Relaxed);
        let stated = self.stated(opcode, body);
        self.stated += stated;
        if stated > 0 || self.fenced.is_none_or(|last| last.elapsed() >= FENCE_EVERY) {
            self.fence(backend, call);
        }
    }

    /// Called before the dispatcher sleeps, so that the daemon knows of all unfinished work, counted or not.
    /// Otherwise a program with a few long kernels, which rarely has a command for its gate, would seem to
    /// have none.
    pub(super) fn rest(&mut self, backend: &mut dyn Backend, call: &mut Call) {
        self.fence(backend, call);
    }

    /// Stated time in ns that a command takes on a device that imitates time.
    fn stated(&self, opcode: u16, body: &[u8]) -> u64 {
        if self.block_us == 0 {
            return 0;
        }
        let blocks = if opcode == Launch::INFO.opcode {
            let grid = ops::decode::<Launch<'_>>(body).map_or([1; 3], |launch| launch.grid);
            grid.iter().fold(1, |all: u64, n| all.saturating_mul(u64::from(*n)))
        } else {
            1
        };
        blocks.saturating_mul(self.block_us * 1000).clamp(1, 1 << 40)
    }

    /// Makes the backend report when the work so far is finished.
    fn fence(&mut self, backend: &mut dyn Backend, call: &mut Call) {
        let mut stated = std::mem::take(&mut self.stated);
        let backlog = std::mem::take(&mut self.backlog);
        backend.fence_work(call, &mut |pieces| {
            let takes = match std::mem::take(&mut stated) {
                _ if backlog => Takes::Backlog,
                0 => Takes::Measured,
                stated => Takes::Stated(stated),
            };
            let batch = Batch::new(&self.progress, pieces, takes);
            Box::new(move |_: Status| drop(batch))
        });
        self.fenced = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_is_told_of_each_wait_at_a_closed_gate_and_once_of_another_gate() {
        let mut told = Told::default();
        let mut rings = |word| {
            told.begin(word);
            let first = told.is_new(word);
            assert!(!told.is_new(word), "while one command waits");
            first
        };
        let (closed, tell) = (gate::word(gate::CLOSED, 0), gate::word(gate::TELL, 7));
        assert!(rings(closed));
        assert!(rings(closed), "the gate was open in between");
        assert!(rings(tell) && !rings(tell) && rings(gate::word(gate::TELL, 8)));
    }

    #[test]
    fn a_closed_gate_admits_one_command_per_step_and_ignores_old_steps() {
        let closed = |steps| gate::word(gate::CLOSED, steps);
        let mut steps = Steps::default();
        assert!(!steps.take(closed(0)));
        assert!(steps.take(closed(2)) && steps.take(closed(2)) && !steps.take(closed(2)));
        steps.forget(gate::word(gate::METERED, 5));
        assert!(!steps.take(closed(5)) && steps.take(closed(6)));
        let last = gate::steps(u32::MAX);
        steps.forget(gate::word(gate::METERED, last));
        assert!(steps.take(closed(0)) && !steps.take(closed(0)), "the count begins again");
    }
}
