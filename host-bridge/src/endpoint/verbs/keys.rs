//! Where in the client's memories the server may write, and with which keys.
//!
//! The bridge says a memory's key before the first command that waits for data in it. When nothing is awaited
//! there any more the key is void, and the next command that waits brings another one. The bridge never says
//! that a memory is gone, and a program may register new ones as long as it runs. So when there are many,
//! those are forgotten that are void for certain:
//!
//! - No command that has come waits for data in the memory.
//! - The bridge knows that. It sends at most [`COMMANDS_AHEAD`] bytes of records until it is told that some
//!   were taken, and acts on frames in their order. So when that many bytes have come after a command's
//!   `DATA_SENT`, the bridge had the data when it sent the last of them. By then it has counted every write
//!   for the command, and none is repeated over another link.

use std::collections::{HashMap, HashSet};

use protocol::channel::MAX_RECORD;
use protocol::data::Place;
use protocol::link::{ARENA_KEY, COMMANDS_AHEAD, REGION_KEYS, RegionKey};

/// Bytes of records that may have been sent before the bridge knew what it was told.
const AHEAD: u64 = COMMANDS_AHEAD + MAX_RECORD as u64;

/// The number of a memory as keys name it.
pub(super) fn region(place: Place) -> u32 {
    match place {
        Place::Arena => ARENA_KEY,
        Place::Region(id) => id,
    }
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Keys {
    known: HashMap<u32, Known>,
    /// Commands that have come and wait for data, by their seq: in which memory.
    awaited: HashMap<u64, u32>,
    /// Bytes of records that have come.
    came: u64,
}

struct Known {
    key: RegionKey,
    /// `came` when the key was said, or when the last data for the memory was.
    used: u64,
}

impl Keys {
    pub(super) fn get(&self, region: u32) -> Option<RegionKey> {
        self.known.get(&region).map(|known| known.key)
    }

    /// The bridge has said a key. Gives the memory's former one. The error: there are too many, or this one
    /// cannot be.
    pub(super) fn learn(&mut self, key: RegionKey) -> Result<Option<RegionKey>, String> {
        let is_new = !self.known.contains_key(&key.region);
        if is_new && self.known.len() >= REGION_KEYS {
            self.forget();
        }
        if is_new && self.known.len() >= REGION_KEYS || key.address.checked_add(key.size).is_none() {
            return Err("the bridge gave a key that cannot be".into());
        }
        let former = self.known.insert(key.region, Known { key, used: self.came });
        Ok(former.map(|former| former.key))
    }

    /// A record of `len` bytes has come.
    pub(super) fn record(&mut self, len: usize) {
        self.came += len as u64;
    }

    /// A command has come that waits for data in this memory.
    pub(super) fn awaits(&mut self, seq: u64, region: u32) {
        self.awaited.insert(seq, region);
    }

    /// The bridge is told that all data for this command was sent.
    pub(super) fn sent(&mut self, seq: u64) {
        if let Some(region) = self.awaited.remove(&seq)
            && let Some(known) = self.known.get_mut(&region)
        {
            known.used = self.came;
        }
    }

    /// Forgets keys that are void.
    fn forget(&mut self) {
        let awaited: HashSet<u32> = self.awaited.values().copied().collect();
        let came = self.came;
        self.known.retain(|region, known| awaited.contains(region) || came - known.used <= AHEAD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the shortest record that waits for data.
    const RECORD: usize = 64;

    fn key(region: u32) -> RegionKey {
        RegionKey { address: 1 << 20, size: 4096, region, key: region + 1 }
    }

    /// A command comes that waits for data in a memory of its own.
    fn command(keys: &mut Keys, seq: u64) {
        keys.learn(key(seq as u32)).unwrap();
        keys.record(RECORD);
        keys.awaits(seq, seq as u32);
    }

    #[test]
    fn a_program_may_use_any_number_of_memories_one_after_the_other() {
        let mut keys = Keys::default();
        for seq in 0..3 * REGION_KEYS as u64 {
            command(&mut keys, seq);
            assert_eq!(keys.get(seq as u32), Some(key(seq as u32)));
            keys.sent(seq);
        }
        assert!(keys.known.len() <= REGION_KEYS && keys.awaited.is_empty());
    }

    #[test]
    fn a_key_stays_while_it_is_good_for_something() {
        let mut keys = Keys::default();
        // One is awaited all the time, and one until just before keys are forgotten.
        command(&mut keys, 0);
        command(&mut keys, 1);
        let last = REGION_KEYS as u64;
        for seq in 2..last {
            command(&mut keys, seq);
            keys.sent(seq);
        }
        keys.sent(1);
        keys.record(AHEAD as usize);
        command(&mut keys, last);
        assert_eq!([0, 1, 2].map(|region| keys.get(region).is_some()), [true, true, false]);
        assert!(keys.get(last as u32).is_some());
    }

    #[test]
    fn a_memory_that_is_known_gets_another_key_however_many_there_are() {
        let mut keys = Keys::default();
        (0..REGION_KEYS as u64).for_each(|seq| command(&mut keys, seq));
        let other = RegionKey { key: 77, ..key(5) };
        assert_eq!(keys.learn(other), Ok(Some(key(5))));
        assert_eq!(keys.get(5), Some(other));
        // All of the others are awaited.
        assert!(keys.learn(key(u32::MAX - 1)).is_err());
        assert!(keys.learn(RegionKey { size: u64::MAX, ..key(5) }).is_err());
    }
}
