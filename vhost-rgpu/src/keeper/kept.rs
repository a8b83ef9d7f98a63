//! What a keeper keeps for its successor about one VMM's connection, or one user's programs: descriptors, and
//! a record that identifies them.
//!
//! Each descriptor is kept under a number ([`Kept::hold`]), and the record refers to numbers. The record is
//! written after the descriptors that it names are kept, and before those that it no longer names are
//! released. So a keeper that is killed at any point leaves a consistent record.
//!
//! A user's programs may have tens of thousands of descriptors. What often changes is added to the record, as
//! one [step](Words::Step) more, so that it costs the same however many there are. Everything is written anew
//! when the steps have become longer than that.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use handover::{Inherited, Store, Text};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::takeover::{FORMAT, takes_over};

/// Maximum size of a record in bytes.
pub(super) const ROOM: u64 = 16 << 20;
/// The last part of the record's name.
const RECORD: &str = "record";

/// Steps may be that long in any case, in bytes.
const SHORT: usize = 64 << 10;

/// The contents of a record.
pub trait Words: Serialize + DeserializeOwned + Default + Send {
    /// A change that is small, and frequent.
    type Step: Serialize + DeserializeOwned;

    /// The numbers of all descriptors that it names, each as often as it names it.
    fn numbers(&self) -> Vec<u64>;

    /// Makes a change.
    fn step(&mut self, step: Self::Step) -> Renamed;
}

/// What a [step](Words::Step) has changed: numbers of descriptors, each as often as it is named.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Renamed {
    /// Those that are named now.
    pub now: Vec<u64>,
    /// Those that were named before.
    pub before: Vec<u64>,
}

/// A descriptor, and the number under which it is kept.
#[derive(Debug)]
pub struct Held<T> {
    /// The descriptor.
    pub fd: T,
    /// Its number.
    pub number: u64,
}

#[derive(Default, Serialize, Deserialize)]
struct Record<W> {
    format: u32,
    /// The number of the next descriptor.
    next: u64,
    words: W,
}

/// The beginning of every record, in any version.
#[derive(Deserialize)]
struct Head {
    format: u32,
}

struct State<W> {
    record: Record<W>,
    /// All kept descriptors. New ones are not in the record yet.
    held: BTreeSet<u64>,
    /// How often the record names each descriptor.
    named: BTreeMap<u64, usize>,
    /// Bytes of the record without its steps, and of these.
    written: (usize, usize),
    /// Whether the record could not be written.
    behind: bool,
    /// Nothing is kept any more: the names may be somebody else's.
    ended: bool,
}

/// See the module's documentation.
pub struct Kept<W> {
    store: Arc<Store>,
    /// The prefix of all names.
    prefix: String,
    text: Text,
    state: Mutex<State<W>>,
}

impl<W> std::fmt::Debug for Kept<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// The previous keeper's descriptors, by number.
#[derive(Debug)]
pub struct Found(BTreeMap<u64, OwnedFd>);

impl Found {
    /// Duplicates one of them.
    ///
    /// # Errors
    /// If it doesn't exist, or this process can have no more.
    pub fn get(&self, number: u64) -> io::Result<OwnedFd> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("descriptor {number} was not kept"));
        self.0.get(&number).ok_or_else(missing)?.try_clone()
    }
}

/// How often each number occurs.
fn count(numbers: Vec<u64>) -> BTreeMap<u64, usize> {
    let mut all = BTreeMap::new();
    numbers.into_iter().for_each(|number| *all.entry(number).or_default() += 1);
    all
}

impl<W: Words> Kept<W> {
    /// Starts keeping things under names that begin with `prefix` and a hyphen.
    pub fn new(store: Arc<Store>, prefix: &str) -> io::Result<Kept<W>> {
        let record = Record { format: FORMAT, ..Record::default() };
        Kept::begin(store, prefix, Text::new(ROOM)?, record)
    }

    fn begin(store: Arc<Store>, prefix: &str, text: Text, record: Record<W>) -> io::Result<Kept<W>> {
        let named = count(record.words.numbers());
        let held = named.keys().copied().collect();
        let state = Mutex::new(State { held, named, record, written: (0, 0), behind: false, ended: false });
        let kept = Kept { store, prefix: prefix.to_owned(), text, state };
        kept.change(|_| ());
        kept.store.keep(&kept.name(RECORD), &kept.text)?;
        Ok(kept)
    }

    /// Takes over what the previous keeper has kept, if anything. What its record doesn't name is closed.
    ///
    /// # Errors
    /// If the record cannot be read. Nothing is kept any more in that case.
    pub fn take_over(
        store: Arc<Store>,
        prefix: &str,
        inherited: &mut Inherited,
    ) -> io::Result<Option<(Kept<W>, Found)>> {
        let start = format!("{prefix}-");
        let Some(file) = inherited.remove(&format!("{start}{RECORD}")) else { return Ok(None) };
        let text = Text::open(file, ROOM);
        let read = || -> io::Result<Record<W>> {
            let bytes = text.read()?;
            let head = Head::deserialize(&mut serde_json::Deserializer::from_slice(&bytes))?;
            takes_over(head.format).map_err(io::Error::other)?;
            let mut all = serde_json::Deserializer::from_slice(&bytes);
            let mut record = Record::<W>::deserialize(&mut all)?;
            for step in all.into_iter::<W::Step>() {
                record.words.step(step?);
            }
            record.format = FORMAT;
            let last = record.words.numbers().into_iter().max();
            record.next = record.next.max(last.map_or(0, |last| last + 1));
            Ok(record)
        };
        let record = read();
        let named = record.as_ref().map(|record| record.words.numbers()).unwrap_or_default();
        let named: BTreeSet<u64> = named.into_iter().collect();
        let mut found = BTreeMap::new();
        for rest in inherited.names(&start) {
            // It belongs to something else whose name begins with this one's.
            let Ok(number) = rest.parse() else { continue };
            let name = format!("{start}{rest}");
            let Some(fd) = inherited.remove(&name) else { continue };
            if named.contains(&number) {
                store.keep(&name, &fd)?;
                found.insert(number, fd);
            } else {
                store.forget(&name);
            }
        }
        match record {
            Ok(record) => Ok(Some((Kept::begin(store, prefix, text, record)?, Found(found)))),
            Err(e) => {
                store.forget(&format!("{start}{RECORD}"));
                Err(e)
            }
        }
    }

    fn name(&self, rest: impl std::fmt::Display) -> String {
        format!("{}-{rest}", self.prefix)
    }

    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a descriptor for the record. One that is already kept gets the same number again.
    pub fn hold(&self, fd: &impl AsFd) -> u64 {
        self.hold_as(fd, false)
    }

    /// The same for one of the many descriptors that a guest or a program can have kept. They take no room
    /// from [others](Self::hold) of any guest or user ([`Store::keep_if_room`]).
    pub fn hold_if_room(&self, fd: &impl AsFd) -> u64 {
        self.hold_as(fd, true)
    }

    fn hold_as(&self, fd: &impl AsFd, spared: bool) -> u64 {
        let mut state = self.lock();
        if state.ended {
            return u64::MAX;
        }
        let before = self.store.name_of(&self.name(""), fd);
        let before = before.and_then(|name| name.strip_prefix(&self.name(""))?.parse().ok());
        if let Some(number) = before.filter(|number| state.held.contains(number)) {
            return number;
        }
        let number = state.record.next;
        state.record.next += 1;
        state.held.insert(number);
        let name = self.name(number);
        let kept = if spared { self.store.keep_if_room(&name, fd) } else { self.store.keep(&name, fd) };
        if let Err(e) = kept {
            tracing::warn!("{}: cannot keep a descriptor for another keeper: {e}", self.prefix);
        }
        number
    }

    /// [`hold`](Self::hold)s a descriptor and returns it with its number.
    pub fn held<T: AsFd>(&self, fd: T) -> Held<T> {
        Held { number: self.hold(&fd), fd }
    }

    /// [`hold`](Self::hold)s a file with memory of a guest and returns it with its number.
    ///
    /// A VMM sends the same open file for each device of its guest, and a service manager stores an open file
    /// only once, under its first name. So another device's file is opened again, and both outlive each
    /// other.
    pub fn held_memory(&self, file: File) -> Held<File> {
        Held { number: self.hold_memory(&file), fd: file }
    }

    fn hold_memory(&self, file: &File) -> u64 {
        // Whether files are kept is asked first, and then they are: one after the other.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.name("");
        let number = |name: String| name.strip_prefix(&own)?.parse().ok();
        if let Some(number) = self.store.name_of_memory(&own, file).and_then(number) {
            return number;
        }
        if self.store.name_of("", file).is_none() {
            return self.hold(file);
        }
        match handover::open_again(file) {
            Ok(again) => self.hold(&again),
            Err(e) => {
                let prefix = &self.prefix;
                tracing::warn!(
                    "{prefix}: another device has the same memory, and this one could not go on after a crash of this daemon: {e}"
                );
                self.hold(file)
            }
        }
    }

    /// Changes the record, and releases what it no longer names.
    pub fn change<T>(&self, change: impl FnOnce(&mut W) -> T) -> T {
        let mut state = self.lock();
        let done = change(&mut state.record.words);
        self.write(&mut state);
        done
    }

    /// The same for a small change.
    pub fn step(&self, step: W::Step) {
        let mut state = self.lock();
        // Separated, because a step may be a number.
        let mut text = b"\n".to_vec();
        let is_text = serde_json::to_writer(&mut text, &step).is_ok();
        let Renamed { now, before } = state.record.words.step(step);
        let (whole, steps) = state.written;
        let fits = is_text && steps + text.len() <= whole.max(SHORT);
        if state.ended || state.behind || !fits || self.text.add(&text).is_err() {
            return self.write(&mut state);
        }
        state.written.1 += text.len();
        for number in now {
            *state.named.entry(number).or_default() += 1;
        }
        for number in before {
            let named = state.named.get_mut(&number).map(|times| {
                *times -= 1;
                *times
            });
            if named == Some(0) {
                state.named.remove(&number);
                self.release(&mut state, number);
            }
        }
    }

    fn write(&self, state: &mut State<W>) {
        if state.ended {
            return;
        }
        let written = serde_json::to_vec(&state.record).map_err(io::Error::from);
        let written = written.and_then(|bytes| self.text.write(&bytes).map(|()| bytes.len()));
        state.behind = written.is_err();
        match written {
            Ok(whole) => state.written = (whole, 0),
            Err(e) => {
                // The descriptors in the previous record stay.
                tracing::warn!("{}: cannot save the state for another keeper: {e}", self.prefix);
                return;
            }
        }
        let named = count(state.record.words.numbers());
        let before = std::mem::replace(&mut state.named, named);
        for number in before.into_keys() {
            if !state.named.contains_key(&number) {
                self.release(state, number);
            }
        }
    }

    fn release(&self, state: &mut State<W>, number: u64) {
        state.held.remove(&number);
        self.store.forget(&self.name(number));
    }

    /// Reads the record.
    pub fn read<T>(&self, read: impl FnOnce(&W) -> T) -> T {
        read(&self.lock().record.words)
    }

    /// Stops keeping anything, for good.
    pub fn end(&self) {
        // First the record: without it, the others mean nothing.
        let mut state = self.lock();
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        self.store.forget(&self.name(RECORD));
        for number in std::mem::take(&mut state.held) {
            self.store.forget(&self.name(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[derive(Default, Serialize, Deserialize)]
    struct Numbers(Vec<u64>);

    impl Words for Numbers {
        type Step = u64;

        fn numbers(&self) -> Vec<u64> {
            self.0.clone()
        }

        fn step(&mut self, step: u64) -> Renamed {
            self.0.push(step);
            Renamed { now: vec![step], before: Vec::new() }
        }
    }

    /// What the next process inherits: duplicates with these names.
    fn next(files: &[(&str, &OwnedFd)]) -> Inherited {
        Inherited::from_pairs(files.iter().map(|(name, fd)| ((*name).to_owned(), fd.try_clone().unwrap())))
    }

    #[test]
    fn the_next_keeper_has_what_the_record_names() {
        let store = Arc::new(Store::default());
        let kept = Kept::<Numbers>::new(store.clone(), "guest-a").unwrap();
        let files: Vec<OwnedFd> = (0..3).map(|_| std::io::pipe().unwrap().0.into()).collect();
        let numbers: Vec<u64> = files.iter().map(|file| kept.hold(file)).collect();
        assert_eq!(
            (numbers.as_slice(), kept.hold(&files[1].try_clone().unwrap())),
            ([0, 1, 2].as_slice(), 1)
        );
        kept.change(|words| words.0 = vec![0, 1, 2]);
        kept.change(|words| words.0 = vec![0, 2]);
        assert_eq!(store.name_of("guest-a-", &files[1]), None, "it is let go");
        let record = kept.text.as_fd().try_clone_to_owned().unwrap();
        // Including something kept but never recorded, and something else with a similar name.
        let given = [
            ("guest-a-record", &record),
            ("guest-a-0", &files[0]),
            ("guest-a-2", &files[2]),
            ("guest-a-3", &files[1]),
            ("guest-a-b-0", &files[1]),
        ];
        let mut inherited = next(&given);
        let store = Arc::new(Store::default());
        let (kept, found) =
            Kept::<Numbers>::take_over(store.clone(), "guest-a", &mut inherited).unwrap().unwrap();
        assert_eq!(inherited.names(""), ["guest-a-b-0"]);
        assert!(
            found.get(0).is_ok() && found.get(2).is_ok() && found.get(1).is_err() && found.get(3).is_err()
        );
        let file: OwnedFd = std::io::pipe().unwrap().0.into();
        assert_eq!(kept.hold(&file), 3);
        kept.end();
        assert_eq!(store.name_of("", &files[0]), None);
    }

    #[test]
    fn memory_that_another_device_has_too_is_another_open_file() {
        let store = Arc::new(Store::default());
        let kept = ["guest-a", "guest-b"].map(|prefix| Kept::<Numbers>::new(store.clone(), prefix).unwrap());
        let file = || File::from(memfd_create(c"memory", MFdFlags::MFD_CLOEXEC).unwrap());
        let (memory, other) = (file(), file());
        // A VMM sends a file for each of its regions, and again whenever one of them changes.
        for _ in 0..2 {
            let numbers = kept.each_ref().map(|kept| {
                let held = |file: &File| kept.held_memory(file.try_clone().unwrap()).number;
                (held(&memory), held(&memory), held(&other))
            });
            assert_eq!(numbers, [(0, 0, 1); 2]);
        }
        let name = |prefix| store.name_of(prefix, &memory);
        assert_eq!((name("guest-a-").as_deref(), name("guest-b-")), (Some("guest-a-0"), None));
        let name = |prefix| store.name_of_memory(prefix, &memory);
        assert_eq!(name("guest-b-").as_deref(), Some("guest-b-0"));
    }

    #[test]
    fn the_next_keeper_has_what_was_added_to_the_record() {
        let store = Arc::new(Store::default());
        let kept = Kept::<Numbers>::new(store.clone(), "guest-a").unwrap();
        let files: Vec<OwnedFd> = (0..3).map(|_| std::io::pipe().unwrap().0.into()).collect();
        kept.step(kept.hold(&files[0]));
        // Until all of it is written anew, and on.
        (0..40_000).for_each(|_| kept.step(0));
        kept.step(kept.hold(&files[1]));
        kept.step(kept.hold(&files[2]));
        let record = kept.text.as_fd().try_clone_to_owned().unwrap();
        let given = [
            ("guest-a-record", &record),
            ("guest-a-0", &files[0]),
            ("guest-a-1", &files[1]),
            ("guest-a-2", &files[2]),
        ];
        let (next, found) =
            Kept::<Numbers>::take_over(Arc::default(), "guest-a", &mut next(&given)).unwrap().unwrap();
        let named = next.read(|words| count(words.0.clone()));
        assert_eq!(named, BTreeMap::from([(0, 40_001), (1, 1), (2, 1)]));
        assert!((0..3).all(|number| found.get(number).is_ok()));
        assert_eq!(next.hold(&record), 3, "its name is new");
        // What is no longer named is let go.
        kept.change(|words| words.0 = vec![1]);
        assert_eq!(store.name_of("guest-a-", &files[2]), None);
    }

    #[test]
    fn one_that_has_ended_leaves_the_next_of_the_same_name_alone() {
        let store = Arc::new(Store::default());
        let files: Vec<OwnedFd> = (0..3).map(|_| std::io::pipe().unwrap().0.into()).collect();
        let [first, second] = [0, 1].map(|place| {
            let kept = Kept::<Numbers>::new(store.clone(), "user-1").unwrap();
            let number = kept.hold(&files[place]);
            kept.change(|words| words.0 = vec![number]);
            if place == 0 {
                kept.end();
            }
            kept
        });
        // What the first one's process says late.
        let late = first.hold(&files[2]);
        first.change(|words| words.0 = vec![late]);
        first.end();
        assert_eq!(store.name_of("user-1-", &files[1]).as_deref(), Some("user-1-0"));
        assert_eq!(store.name_of("user-1-", &files[2]), None);
        assert!(store.name_of("user-1-", &second.text).is_some());
    }

    #[test]
    fn a_record_of_another_version_is_not_taken_over() {
        let text = Text::new(ROOM).unwrap();
        text.write(br#"{"format": 4711, "next": 1, "words": [0]}"#).unwrap();
        let record = text.as_fd().try_clone_to_owned().unwrap();
        let store = Arc::new(Store::default());
        let mut inherited = next(&[("guest-a-record", &record), ("guest-a-0", &record)]);
        assert!(Kept::<Numbers>::take_over(store, "guest-a", &mut inherited).is_err());
        assert!(inherited.names("").is_empty());
    }
}
