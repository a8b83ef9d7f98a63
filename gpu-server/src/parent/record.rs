//! A record: what a daemon writes down for its successor, in a memory file that only daemons have.
//!
//! Its first page is a [`Ledger`], which is changed in place. A [`Text`] follows. If a daemon is killed at
//! any point, the text is complete, and at most the last change of the amounts must be completed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use handover::{Inherited, Store, Text};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::limits::{MOST_DEVICES, Resource};
use crate::pages::{self, Page, Shared};

/// Maximum size of a text in bytes.
const ROOM: u64 = 1 << 20;

/// The amounts of a session.
#[repr(C)]
#[derive(Debug)]
struct Ledger {
    /// Which half of the [`Text`] is valid.
    text: AtomicU64,
    /// Granted bytes by device number, then those of page-locked memory.
    granted: [AtomicU64; MOST_DEVICES + 1],
    /// The last change: the request, its resource, the number of bytes, and the amount after it. Request 0
    /// means none.
    request: AtomicU64,
    of: AtomicU64,
    bytes: AtomicU64,
    after: AtomicU64,
    /// Whether the rest was written, which counts instead of what the text says: see [`Link`].
    linked: AtomicU64,
    parked: AtomicU64,
    attempt: AtomicU64,
    resumed: AtomicU64,
}

// SAFETY: all fields are atomic integers.
unsafe impl Shared for Ledger {
    const WRITTEN_BY_WORKER: bool = true;
}

/// A session's links. They change with each new one, and the text may be long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    /// Since when it has none, in ns of CLOCK_MONOTONIC.
    pub(super) parked: Option<u64>,
    /// The latest of them.
    pub(super) attempt: u32,
    /// How often it resumed over new connections.
    pub(super) resumed: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Record {
    ledger: Page<Ledger>,
    text: Text,
}

impl AsFd for Record {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.text.as_fd()
    }
}

fn text(file: OwnedFd) -> Text {
    Text::within(file, std::mem::offset_of!(Ledger, text) as u64, pages::SIZE as u64, ROOM)
}

/// The index of a resource's amount, if there is such a resource.
fn place(resource: Resource) -> Option<usize> {
    match resource {
        Resource::Device(number) => Some(number as usize).filter(|number| *number < MOST_DEVICES),
        Resource::Pinned => Some(MOST_DEVICES),
    }
}

impl Record {
    /// An empty record.
    pub(super) fn new() -> io::Result<Record> {
        let (ledger, file) = Page::with_room(2 * ROOM as usize)?;
        Ok(Record { ledger, text: text(file) })
    }

    /// The previous daemon's record.
    pub(super) fn open(file: OwnedFd) -> io::Result<Record> {
        let ledger = Page::<Ledger>::adopt(&file)?;
        let Ledger { granted, request, of, after, .. } = &*ledger;
        if request.load(Ordering::Acquire) != 0 {
            // Completes the last change, which may or may not have been applied.
            let of = usize::try_from(of.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
            granted
                .get(of)
                .inspect(|granted| granted.store(after.load(Ordering::Relaxed), Ordering::Relaxed));
        }
        Ok(Record { ledger, text: text(file) })
    }

    /// Replaces the text.
    pub(super) fn write(&self, what: &impl Serialize) -> io::Result<()> {
        self.text.write(&serde_json::to_vec(what)?)
    }

    /// Adds something to the text, which costs the same however long that is.
    pub(super) fn add(&self, what: &impl Serialize) -> io::Result<()> {
        let mut more = b"\n".to_vec();
        serde_json::to_writer(&mut more, what)?;
        self.text.add(&more)
    }

    /// Reads the text without what was added.
    pub(super) fn read<T: DeserializeOwned>(&self) -> io::Result<T> {
        Ok(T::deserialize(&mut serde_json::Deserializer::from_slice(&self.text.read()?))?)
    }

    /// Reads the text, and what was added.
    pub(super) fn read_all<T: DeserializeOwned, A: DeserializeOwned>(&self) -> io::Result<(T, Vec<A>)> {
        let text = self.text.read()?;
        let mut all = serde_json::Deserializer::from_slice(&text);
        let first = T::deserialize(&mut all)?;
        Ok((first, all.into_iter().collect::<Result<_, _>>()?))
    }

    /// Notes a session's links.
    pub(super) fn set_link(&self, Link { parked, attempt, resumed }: Link) {
        let ledger = &*self.ledger;
        ledger.parked.store(parked.unwrap_or(0), Ordering::SeqCst);
        ledger.attempt.store(attempt.into(), Ordering::SeqCst);
        ledger.resumed.store(resumed, Ordering::SeqCst);
        ledger.linked.store(1, Ordering::SeqCst);
    }

    /// The session's links, if they were noted.
    pub(super) fn link(&self) -> Option<Link> {
        let read = |word: &AtomicU64| word.load(Ordering::Acquire);
        let Ledger { linked, parked, attempt, resumed, .. } = &*self.ledger;
        (read(linked) != 0).then(|| Link {
            parked: Some(read(parked)).filter(|at| *at != 0),
            attempt: read(attempt) as u32,
            resumed: read(resumed),
        })
    }

    /// Granted bytes of a resource. For a nonexistent one, more than any limit.
    pub(super) fn granted(&self, resource: Resource) -> u64 {
        place(resource).map_or(u64::MAX, |at| self.ledger.granted[at].load(Ordering::Relaxed))
    }

    /// Whether there is such a resource.
    pub(super) fn has(&self, resource: Resource) -> bool {
        place(resource).is_some()
    }

    /// A request changes the granted bytes of a resource by `bytes`, to `after`.
    pub(super) fn change(&self, request: u64, resource: Resource, bytes: u64, after: u64) {
        let Some(at) = place(resource) else { return };
        let ledger = &*self.ledger;
        // In this order, so that a daemon killed in between leaves either no change or a complete one.
        ledger.request.store(0, Ordering::SeqCst);
        ledger.of.store(at as u64, Ordering::SeqCst);
        ledger.bytes.store(bytes, Ordering::SeqCst);
        ledger.after.store(after, Ordering::SeqCst);
        ledger.request.store(request, Ordering::SeqCst);
        ledger.granted[at].store(after, Ordering::SeqCst);
    }

    /// Whether the last change was made by this request. The previous daemon may have been killed before it
    /// consumed the request.
    pub(super) fn has_done(&self, request: u64, resource: Resource, bytes: u64) -> bool {
        let Ledger { request: last, of, bytes: by, .. } = &*self.ledger;
        let is = |word: &AtomicU64, value: u64| word.load(Ordering::Relaxed) == value;
        request != 0
            && is(last, request)
            && is(by, bytes)
            && place(resource).is_some_and(|place| is(of, place as u64))
    }
}

/// The name of the daemon's own record.
const DAEMON: &str = "daemon";

/// The transition from this program to the next one.
pub(super) struct Succession {
    pub(super) store: Store,
    /// The daemon's own record.
    pub(super) record: Record,
    /// The file that this program was started from. It may have been replaced since.
    pub(super) program: PathBuf,
    /// Whether the previous daemon has executed this one in its place.
    pub(super) executed: bool,
}

impl Succession {
    /// Continues with the previous daemon's record, if there was one.
    pub(super) fn new(inherited: &mut Inherited) -> io::Result<Succession> {
        let store = Store::new();
        let before = inherited.remove(DAEMON).map(Record::open);
        let record = match before {
            Some(Ok(record)) => record,
            before => {
                if let Some(Err(e)) = before {
                    tracing::warn!("cannot read the previous daemon's record: {e}");
                    store.forget(DAEMON);
                }
                Record::new()?
            }
        };
        store.keep(DAEMON, &record)?;
        Ok(Succession { store, record, program: std::env::current_exe()?, executed: inherited.executed() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(record: &Record) -> Record {
        Record::open(record.as_fd().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn the_text_and_the_amounts_leave_each_other_alone() {
        let record = Record::new().unwrap();
        assert!(record.read::<String>().is_err(), "there is none yet");
        record.change(1, Resource::Device(0), 5, 5);
        for text in ["first", "a longer second", "3"] {
            record.write(&text).unwrap();
            assert_eq!(copy(&record).read::<String>().unwrap(), text);
        }
        record.add(&4).unwrap();
        record.add(&[5; 0]).unwrap();
        let (text, added) = copy(&record).read_all::<String, serde_json::Value>().unwrap();
        assert_eq!((text.as_str(), added), ("3", vec![serde_json::json!(4), serde_json::json!([])]));
        assert_eq!(copy(&record).read::<String>().unwrap(), "3");
        assert!(record.write(&"x".repeat(ROOM as usize)).is_err());
        assert_eq!((copy(&record).granted(Resource::Device(0)), record.granted(Resource::Pinned)), (5, 0));
    }

    #[test]
    fn a_change_is_made_once_wherever_the_daemon_was_killed() {
        let record = Record::new().unwrap();
        record.change(7, Resource::Device(2), 100, 100);
        // Before the amount was written.
        record.ledger.granted[2].store(0, Ordering::Relaxed);
        let successor = copy(&record);
        assert_eq!(successor.granted(Resource::Device(2)), 100);
        assert!(successor.has_done(7, Resource::Device(2), 100));
        for (request, resource, bytes) in [
            (8, Resource::Device(2), 100),
            (7, Resource::Pinned, 100),
            (7, Resource::Device(2), 99),
            (0, Resource::Device(2), 100),
        ] {
            assert!(!successor.has_done(request, resource, bytes), "{request} {resource} {bytes}");
        }
        successor.change(8, Resource::Pinned, 5, 5);
        let next = copy(&successor);
        assert_eq!((next.granted(Resource::Device(2)), next.granted(Resource::Pinned)), (100, 5));
        assert_eq!((next.granted(Resource::Device(64)), next.has(Resource::Device(64))), (u64::MAX, false));
    }

    #[test]
    fn other_files_are_not_records() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(Record::open(reader.into()).is_err());
        assert!(Record::open(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }
}
