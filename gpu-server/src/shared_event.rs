//! Interprocess events: events that sessions of one client record and wait for.
//!
//! ```text
//!  session A: record ──▶ last = (slot 0, n)         session B: wait ──▶ which moment is `last`?
//!             … its stream gets there: done[0] = n ───────────────────▶ the stream goes on when done[0] ≥ n
//! ```
//!
//! NVIDIA's driver has such events, too, but keeps them in files in `/dev/shm` that its processes find by
//! name, and workers do not share any (decision 53). Here an event is an ordinary one plus a [page](Records)
//! that the sessions share. Each session that opens the event has its own slot, which only it writes, so
//! streams of several processes may record it in any order. A session that ends leaves nothing to wait for:
//! the daemon [settles](settle) its slot.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::pages::Page;

/// How many times an event can be opened.
pub const SLOTS: usize = 511;

/// Bits of a record's number in [`Records::last`]; the slot is above them.
const NUMBER_BITS: u32 = 48;

/// An event's part that the sessions share.
#[repr(C)]
#[derive(Debug)]
pub struct Records {
    /// The last record of any session: its slot and its number, from 1. 0: the event was never recorded.
    last: AtomicU64,
    /// By slot: all records up to this number are done.
    done: [AtomicU64; SLOTS],
}

// SAFETY: all fields are atomic integers.
unsafe impl crate::pages::Shared for Records {
    const WRITTEN_BY_WORKER: bool = true;
}

/// Marks all records of a slot as done; no more will come, because its session has ended.
pub fn settle(event: &OwnedFd, slot: u16) -> io::Result<()> {
    let page = Page::<Records>::adopt(event)?;
    if let Some(done) = page.done.get(usize::from(slot)) {
        done.store(u64::MAX, Ordering::Release);
    }
    Ok(())
}

/// How many of an event's slots, from the first one on, have been in use, as far as the sessions have written
/// to them. Another daemon may have given them, and knows of sessions that have ended since.
pub fn used(event: &OwnedFd) -> io::Result<usize> {
    let page = Page::<Records>::adopt(event)?;
    Ok(page.done.iter().rposition(|done| done.load(Ordering::Relaxed) != 0).map_or(0, |last| last + 1))
}

/// Checks that a descriptor sent by a worker is an event's.
pub fn check(event: &OwnedFd) -> io::Result<()> {
    Page::<Records>::adopt(event).map(drop)
}

/// Records of this session.
#[derive(Debug, Default)]
struct Own {
    /// How many were made.
    made: u64,
    /// Those that are not done.
    open: BTreeSet<u64>,
}

/// An interprocess event, as one session has it.
#[derive(Debug)]
pub struct SharedEvent {
    page: Arc<Page<Records>>,
    file: OwnedFd,
    slot: u16,
    own: Arc<Mutex<Own>>,
}

fn lock(own: &Mutex<Own>) -> MutexGuard<'_, Own> {
    own.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedEvent {
    /// A new event, which no other session has yet.
    pub fn new() -> io::Result<SharedEvent> {
        let (page, file) = Page::new()?;
        Ok(SharedEvent { page: Arc::new(page), file, slot: 0, own: Arc::default() })
    }

    /// Opens another session's event, with the slot that the daemon has assigned to this session.
    pub fn open(file: OwnedFd, slot: u16) -> io::Result<SharedEvent> {
        let page = Page::adopt(&file)?;
        Ok(SharedEvent { page: Arc::new(page), file, slot, own: Arc::default() })
    }

    /// Whether this session made the event, rather than opened it.
    pub fn is_ours(&self) -> bool {
        self.slot == 0
    }

    /// The descriptor for other sessions.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Records the event. The record is done when the returned value is dropped.
    pub fn record(&self) -> Running {
        let mut own = lock(&self.own);
        own.made += 1;
        let number = own.made;
        own.open.insert(number);
        let last = u64::from(self.slot) << NUMBER_BITS | number;
        // The other session learns of it later: from the program, which the server has answered by then.
        self.page.last.store(last, Ordering::Release);
        Running { page: Arc::clone(&self.page), slot: self.slot, own: Arc::clone(&self.own), number }
    }

    /// The moment at which the last record, by any session, is done. `None` if it was never recorded.
    pub fn last(&self) -> Option<Moment> {
        let last = self.page.last.load(Ordering::Acquire);
        let (slot, number) = ((last >> NUMBER_BITS) as u16, last & ((1 << NUMBER_BITS) - 1));
        (last != 0).then(|| Moment { page: Arc::clone(&self.page), slot, number })
    }

    /// Whether this session made that record.
    pub fn is_own(&self, moment: &Moment) -> bool {
        moment.slot == self.slot && moment.number == lock(&self.own).made
    }
}

/// A record that is not done yet.
#[derive(Debug)]
pub struct Running {
    page: Arc<Page<Records>>,
    slot: u16,
    own: Arc<Mutex<Own>>,
    number: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut own = lock(&self.own);
        own.open.remove(&self.number);
        let done = own.open.first().map_or(own.made, |first| first - 1);
        if let Some(word) = self.page.done.get(usize::from(self.slot)) {
            word.store(done, Ordering::Release);
        }
    }
}

/// A point in the work of some session.
#[derive(Debug, Clone)]
pub struct Moment {
    page: Arc<Page<Records>>,
    slot: u16,
    number: u64,
}

impl Moment {
    /// Whether it has come.
    pub fn has_come(&self) -> bool {
        // A slot that does not exist belongs to nobody, so nothing will ever happen to it.
        self.page
            .done
            .get(usize::from(self.slot))
            .is_none_or(|done| done.load(Ordering::Acquire) >= self.number)
    }

    /// Waits until it comes, with short sleeps in between, or until `is_over`.
    pub fn await_unless(&self, is_over: impl Fn() -> bool) {
        let begin = Instant::now();
        while !self.has_come() && !is_over() {
            std::thread::sleep(nap(begin));
        }
    }
}

/// How long to sleep between looks, for a wait that began at `begin`.
fn nap(begin: Instant) -> Duration {
    match begin.elapsed().as_millis() {
        0..10 => Duration::from_micros(20),
        10..1000 => Duration::from_micros(200),
        _ => Duration::from_millis(2),
    }
}

type Wait = (Moment, Box<dyn FnOnce() + Send>);

/// A thread that looks for moments. It sleeps while it has none to look for.
#[derive(Debug)]
pub struct Lookout(Sender<Wait>);

impl Lookout {
    /// Starts the thread. It ends with the lookout.
    pub fn start() -> io::Result<Lookout> {
        let (waits, new) = channel();
        std::thread::Builder::new().name("rgpu-events".into()).spawn(move || look(&new))?;
        Ok(Lookout(waits))
    }

    /// Calls `then` when the moment has come.
    pub fn when(&self, moment: Moment, then: impl FnOnce() + Send + 'static) {
        // The thread ends only with `self`.
        let _ = self.0.send((moment, Box::new(then)));
    }
}

fn look(new: &Receiver<Wait>) {
    let mut waits: Vec<Wait> = Vec::new();
    let mut begin = Instant::now();
    loop {
        if waits.is_empty() {
            let Ok(wait) = new.recv() else { return };
            waits.push(wait);
            begin = Instant::now();
        }
        loop {
            match new.try_recv() {
                Ok(wait) => {
                    waits.push(wait);
                    begin = Instant::now();
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let come: Vec<Wait> = waits.extract_if(.., |(moment, _)| moment.has_come()).collect();
        if come.is_empty() {
            std::thread::sleep(nap(begin));
        }
        come.into_iter().for_each(|(_, then)| then());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use proptest::prelude::*;

    fn pair() -> (SharedEvent, SharedEvent) {
        let ours = SharedEvent::new().unwrap();
        let theirs = SharedEvent::open(ours.file().as_fd().try_clone_to_owned().unwrap(), 1).unwrap();
        (ours, theirs)
    }

    #[test]
    fn another_session_sees_when_the_last_record_is_done() {
        let (ours, theirs) = pair();
        assert!(theirs.last().is_none());
        let first = ours.record();
        let moment = theirs.last().unwrap();
        assert!(!moment.has_come() && !theirs.is_own(&moment) && ours.is_own(&moment));
        // From now on the event stands for the second record. Earlier waiters still wait for the first.
        let second = theirs.record();
        assert!(!ours.is_own(&ours.last().unwrap()));
        drop(second);
        assert!(ours.last().unwrap().has_come());
        assert!(!moment.has_come());
        drop(first);
        assert!(moment.has_come());
    }

    #[test]
    fn what_a_session_that_has_ended_recorded_is_done() {
        let (ours, theirs) = pair();
        let running = theirs.record();
        let moment = ours.last().unwrap();
        settle(ours.file(), 0).unwrap();
        assert!(!moment.has_come(), "the other one goes on");
        settle(ours.file(), 1).unwrap();
        assert!(moment.has_come());
        std::mem::forget(running);
    }

    #[test]
    fn a_file_that_may_shrink_is_not_an_event() {
        let file = nix::sys::memfd::memfd_create(c"x", nix::sys::memfd::MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&file, 4096).unwrap();
        assert!(check(&file).is_err());
        assert!(SharedEvent::open(file, 1).is_err());
        let (pipe, _) = nix::unistd::pipe().unwrap();
        assert!(check(&pipe).is_err());
    }

    #[test]
    fn a_slot_that_does_not_exist_holds_nobody_up() {
        let (ours, theirs) = pair();
        ours.page.last.store(u64::MAX, Ordering::Release);
        assert!(theirs.last().unwrap().has_come());
        settle(ours.file(), u16::MAX).unwrap();
    }

    #[test]
    fn the_lookout_calls_when_the_moment_comes() {
        let (ours, theirs) = pair();
        let lookout = Lookout::start().unwrap();
        let (done, came) = channel();
        let running = ours.record();
        lookout.when(theirs.last().unwrap(), move || done.send(()).unwrap());
        assert_eq!(came.try_recv(), Err(TryRecvError::Empty));
        drop(running);
        came.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    proptest! {
        /// Records may end in any order: for the others, a record is done when it and all earlier ones of its
        /// session are.
        #[test]
        fn records_end_in_any_order(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..60)) {
            let (ours, theirs) = pair();
            let mut running: Vec<(Moment, Running)> = Vec::new();
            let mut ended: Vec<Moment> = Vec::new();
            for (begin, which) in steps {
                if begin || running.is_empty() {
                    let record = ours.record();
                    running.push((theirs.last().unwrap(), record));
                } else {
                    ended.push(running.remove(which.index(running.len())).0);
                }
                let first = running.iter().map(|(moment, _)| moment.number).min().unwrap_or(u64::MAX);
                prop_assert!(running.iter().all(|(moment, _)| !moment.has_come()));
                prop_assert!(ended.iter().all(|moment| moment.has_come() == (moment.number < first)));
            }
        }
    }
}
