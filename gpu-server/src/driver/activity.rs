//! Device activity, kept until the client reads it: the server's side of [`protocol::ops::activity`].

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use protocol::ops::activity::{ActivityRecord, ActivityRecords, MOST_RECORDS};
use protocol::wire::{Wire, Writer};

/// Size of a record on the wire, in bytes.
const RECORD: usize = 127;
/// Size of both lists' lengths, in bytes.
const LISTS: usize = 8;
/// Maximum number of different names kept.
const MOST_NAMES: usize = 1 << 16;
/// Maximum length of a name in bytes; longer names are truncated.
const LONGEST_NAME: usize = 4096;

/// Records that the client has not read yet. Any thread may add records.
#[derive(Debug, Default)]
pub struct Activity {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    records: VecDeque<ActivityRecord>,
    /// Each name once; records contain indices into this.
    names: Vec<Arc<str>>,
    places: HashMap<Arc<str>, u32>,
    dropped: u64,
}

/// A record of zeros.
pub fn blank() -> ActivityRecord {
    ActivityRecord {
        seq: 0,
        kind: 0,
        stream: 0,
        device: 0,
        begin: 0,
        end: 0,
        bytes: 0,
        value: 0,
        memory: [0; 3],
        ends: [0; 2],
        grid: [0; 3],
        block: [0; 3],
        cluster: [0; 3],
        shared: [0; 2],
        registers: 0,
        local: 0,
        graph: 0,
        node: 0,
        name: 0,
    }
}

/// The system's clock in nanoseconds, which CUPTI also uses.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

impl Kept {
    fn place(&mut self, name: &str) -> Option<u32> {
        let name = &name[..name.floor_char_boundary(LONGEST_NAME)];
        if let Some(place) = self.places.get(name) {
            return Some(*place);
        }
        if self.names.len() >= MOST_NAMES {
            return None;
        }
        let (name, place): (Arc<str>, u32) = (name.into(), self.names.len() as u32);
        self.names.push(Arc::clone(&name));
        self.places.insert(name, place);
        Some(place)
    }
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a record. `name`: the kernel's name; empty for other work.
    pub fn push(&self, record: ActivityRecord, name: &str) {
        let mut kept = self.lock();
        let place = kept.place(name).filter(|_| kept.records.len() < MOST_RECORDS);
        match place {
            Some(place) => kept.records.push_back(ActivityRecord { name: place, ..record }),
            None => kept.dropped += 1,
        }
    }

    /// Counts records that someone else lost for lack of space.
    pub fn lose(&self, records: u64) {
        self.lock().dropped += records;
    }

    /// Takes the oldest records, encoded, as many as fit into `room` bytes; empty if there are none or the
    /// first does not fit. Also returns how many were dropped since the last call.
    pub fn take(&self, room: u64) -> (Vec<u8>, u64) {
        let mut kept = self.lock();
        let dropped = std::mem::take(&mut kept.dropped);
        let mut batch = ActivityRecords { names: Vec::new(), records: Vec::new() };
        let (mut bytes, mut places) = (LISTS as u64, HashMap::new());
        while let Some(record) = kept.records.front() {
            let name = Arc::clone(&kept.names[record.name as usize]);
            let is_new = !places.contains_key(&record.name);
            let more = RECORD + if is_new { 4 + name.len() } else { 0 };
            if bytes + more as u64 > room {
                break;
            }
            bytes += more as u64;
            let Some(mut record) = kept.records.pop_front() else { break };
            record.name = *places.entry(record.name).or_insert_with(|| {
                batch.names.push(name.to_string());
                batch.names.len() as u32 - 1
            });
            batch.records.push(record);
        }
        if batch.records.is_empty() {
            return (Vec::new(), dropped);
        }
        let mut encoded = Vec::with_capacity(bytes as usize);
        batch.put(&mut Writer(&mut encoded));
        (encoded, dropped)
    }

    /// Takes all records with their names, for this process's own timeline.
    pub fn drain(&self) -> (Vec<(ActivityRecord, Arc<str>)>, u64) {
        let mut kept = self.lock();
        let records = std::mem::take(&mut kept.records);
        let named = |record: ActivityRecord| {
            let name = Arc::clone(&kept.names[record.name as usize]);
            (record, name)
        };
        let records = records.into_iter().map(named).collect();
        (records, std::mem::take(&mut kept.dropped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::wire::Reader;

    fn decode(bytes: &[u8]) -> ActivityRecords {
        let mut reader = Reader::new(bytes);
        let records = ActivityRecords::get(&mut reader).unwrap();
        reader.finish().unwrap();
        records
    }

    #[test]
    fn a_record_has_the_size_that_is_counted() {
        let mut bytes = Vec::new();
        blank().put(&mut Writer(&mut bytes));
        assert_eq!(bytes.len(), RECORD);
    }

    #[test]
    fn records_beyond_the_limit_are_dropped_and_counted_once() {
        let activity = Activity::default();
        for seq in 0..MOST_RECORDS as u64 + 3 {
            activity.push(ActivityRecord { seq, ..blank() }, "k");
        }
        activity.lose(4);
        assert_eq!(activity.take(0), (Vec::new(), 7));
        let (records, dropped) = activity.drain();
        assert_eq!((records.len(), dropped, records[0].0.seq), (MOST_RECORDS, 0, 0));
    }

    #[test]
    fn a_name_that_is_too_long_is_kept_once() {
        let activity = Activity::default();
        let name = "k".repeat(LONGEST_NAME + 1000);
        for seq in 0..3 {
            activity.push(ActivityRecord { seq, ..blank() }, &name);
        }
        assert_eq!(activity.lock().names.len(), 1);
        let (records, dropped) = activity.drain();
        assert!(records.iter().all(|(_, kept)| **kept == name[..LONGEST_NAME]));
        assert_eq!((records.len(), dropped), (3, 0));
    }

    proptest! {
        #[test]
        fn each_record_is_read_once_and_with_its_name(
            names in prop::collection::vec("[a-d]{0,6}", 0..60), room in 170u64..2000
        ) {
            let activity = Activity::default();
            for (seq, name) in names.iter().enumerate() {
                activity.push(ActivityRecord { seq: seq as u64, ..blank() }, name);
            }
            let mut read = Vec::new();
            loop {
                let (bytes, dropped) = activity.take(room);
                prop_assert_eq!(dropped, 0);
                prop_assert!(bytes.len() as u64 <= room);
                if bytes.is_empty() {
                    break;
                }
                let batch = decode(&bytes);
                prop_assert!(!batch.records.is_empty());
                for record in batch.records {
                    read.push((record.seq, batch.names[record.name as usize].clone()));
                }
            }
            let all: Vec<_> = (0..).zip(names).collect();
            prop_assert_eq!(read, all);
        }
    }
}
