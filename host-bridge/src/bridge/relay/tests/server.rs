//! The server's side of the tests.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use protocol::channel::{MAX_RECORD, NO_SLOT, RECORD_HEADER, Record};
use protocol::data::{DataUse, Place};
use protocol::fuzzing::Random;
use protocol::link::{
    COMMANDS_AHEAD, DataAsk, DataGrant, DataSent, EAGER_PIECE, GRANTED_SLOTS, ProgressUpdate, RegionKey,
    ReplyHeader, frame, progress,
};
use protocol::ops;
use zerocopy::IntoBytes;

use super::{SLOTS, Sent};
use crate::framing::{FrameReader, SendBuffer, split_struct};

/// A server that keeps to the protocol and checks that the bridge does.
#[derive(Default)]
pub(super) struct Server {
    pub(super) verbs: bool,
    reader: FrameReader,
    pub(super) records: VecDeque<(Record, Vec<u8>)>,
    last_seq: u64,
    pub(super) executed: u64,
    /// What the bridge has asked for ahead of its command.
    asked: HashSet<(u64, u32)>,
    keys: HashMap<u32, u32>,
    /// Runs that go by grants: their length, and how much was granted.
    pub(super) granting: BTreeMap<(u64, u32), (u64, u64)>,
    pub(super) granted: HashMap<(u64, u32), u64>,
    /// Bytes received of each piece, and of each piece its length, once known.
    pub(super) received: HashMap<(u64, u32), u64>,
    pub(super) lengths: HashMap<(u64, u32), u64>,
    /// Eager bytes that have come and of which the bridge was not told.
    pub(super) placed: u64,
    /// Bytes of records that were received, and not executed, and executed without the bridge being told.
    pub(super) untaken: u64,
    taken: u64,
    /// Slots that were written, in order, and not freed.
    filled: VecDeque<u32>,
    filled_granted: Vec<u32>,
    pub(super) farewell: Option<String>,
}

impl Server {
    pub(super) fn new(verbs: bool) -> Server {
        Server { verbs, ..Server::default() }
    }

    pub(super) fn hear(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.reader.fill(&mut bytes).unwrap();
        }
        while let Some((kind, body)) = self.reader.next_frame().unwrap() {
            let body = body.to_vec();
            match kind {
                frame::COMMANDS => self.commands(&body),
                frame::DATA_ASK => {
                    let (DataAsk { seq, piece, .. }, _) = split_struct(&body).unwrap();
                    assert!(seq > self.last_seq, "it asks for data of command {seq} behind it");
                    assert!(self.asked.insert((seq, piece)));
                }
                frame::REGION_KEY => {
                    let (key, _) = split_struct::<RegionKey>(&body).unwrap();
                    let before = self.keys.insert(key.region, key.key);
                    assert_ne!(before, Some(key.key), "a key comes once");
                }
                frame::ALIVE => {}
                frame::BYE => self.farewell = Some(String::from_utf8(body).unwrap()),
                kind => panic!("a frame of kind {kind}"),
            }
        }
    }

    fn commands(&mut self, mut body: &[u8]) {
        assert!(!body.is_empty(), "a frame of commands has one");
        while !body.is_empty() {
            let (record, size) = Record::from_bytes(body.first_chunk().unwrap());
            let (now, rest) = body.split_at(size as usize);
            assert_eq!(record.seq, self.last_seq + 1);
            self.last_seq = record.seq;
            self.untaken += u64::from(size);
            if self.verbs {
                assert!(self.untaken <= COMMANDS_AHEAD + MAX_RECORD as u64, "{}", self.untaken);
            }
            self.records.push_back((record, now[RECORD_HEADER..].to_vec()));
            body = rest;
        }
    }

    /// Executes the next command. Its frames go to `frames`, its data to `data`.
    pub(super) fn execute(
        &mut self,
        random: &mut Random,
        frames: &mut SendBuffer,
        data: &mut Vec<(u64, u32, u64, u64)>,
    ) {
        let Some((record, body)) = self.records.pop_front() else { return };
        let seq = record.seq;
        let size = (RECORD_HEADER + body.len()) as u64;
        (self.untaken, self.taken) = (self.untaken - size, self.taken + size);
        let mut uses = Vec::new();
        let info = ops::info(record.opcode).unwrap();
        (info.visit_data)(&body, &mut |data| uses.push(data)).unwrap();
        let mut sends = None;
        for (piece, use_) in uses.into_iter().enumerate() {
            let key = (seq, piece as u32);
            let (range, late) = match use_ {
                DataUse::In(range) => (range, false),
                DataUse::Late(range) => (range, true),
                DataUse::Out(range) => {
                    let region = match range.place {
                        Place::Arena => protocol::link::ARENA_KEY,
                        Place::Region(id) => id,
                    };
                    assert!(
                        self.keys.contains_key(&region),
                        "a command whose memory the server has no key for"
                    );
                    // A command that fails sends less.
                    let all = if random.below(8) == 0 { range.len / 2 } else { range.len };
                    let mut at = 0;
                    while at < all {
                        let now = (all - at).min(1 + random.number() % (1 << 20));
                        data.push((seq, key.1, at, now));
                        at += now;
                    }
                    *sends.get_or_insert(0) += all;
                    continue;
                }
            };
            self.lengths.insert(key, range.len);
            if self.asked.remove(&key) || !self.verbs && (late || range.len > EAGER_PIECE) {
                self.granting.insert(key, (range.len, 0));
            }
        }
        if let Some(bytes) = sends {
            frames.frame(frame::DATA_SENT, DataSent { seq, bytes }.as_bytes());
        }
        self.executed = seq;
        let update = ProgressUpdate { kind: progress::EXECUTED, index: 0, seq, value: 0 };
        frames.frame(frame::PROGRESS, update.as_bytes());
        if record.reply_slot != NO_SLOT {
            let header = ReplyHeader { seq, slot: record.reply_slot.into(), status: 0 };
            frames.frame(frame::REPLY, [header.as_bytes(), &seq.to_le_bytes()].concat().as_slice());
        }
    }

    /// Grants parts of some pieces, in one frame.
    pub(super) fn grant(&mut self, random: &mut Random, frames: &mut SendBuffer, all: bool) {
        let keys: Vec<_> = self.granting.keys().copied().collect();
        let mut grants = Vec::new();
        for key in keys {
            if !all && random.below(3) == 0 {
                continue;
            }
            let Some((len, granted)) = self.granting.get_mut(&key) else { continue };
            *granted = if all { u64::MAX } else { *granted + 1 + random.number() % (2 << 20) };
            let upto = *granted;
            self.granted.insert(key, upto);
            grants.push(DataGrant { seq: key.0, piece: key.1, reserved: 0, upto });
            if upto >= *len {
                self.granting.remove(&key);
            }
        }
        if !grants.is_empty() {
            frames.frame(frame::DATA_GRANT, grants.as_bytes());
        }
    }

    /// Data has come.
    pub(super) fn land(&mut self, sent: &Sent) {
        *self.received.entry((sent.seq, sent.piece)).or_default() += sent.len;
        self.placed += if sent.eager { sent.len } else { 0 };
        match sent.slot {
            Some(slot) if slot < SLOTS - GRANTED_SLOTS => self.filled.push_back(slot),
            Some(slot) => self.filled_granted.push(slot),
            None => {}
        }
    }

    /// Says what else the bridge must be told.
    pub(super) fn tell(
        &mut self,
        random: &mut Random,
        frames: &mut SendBuffer,
        free: &mut Vec<u32>,
        planned: u64,
    ) {
        if self.placed > 0 {
            frames.frame(frame::DATA_PLACED, &std::mem::take(&mut self.placed).to_le_bytes());
        }
        if self.verbs && self.taken > 0 {
            frames.frame(frame::COMMANDS_TAKEN, &std::mem::take(&mut self.taken).to_le_bytes());
        }
        // Planned slots become free in the order in which they were given out, whatever landed first.
        let count = u64::from(SLOTS - GRANTED_SLOTS);
        let mut slots = Vec::new();
        while let Some(at) =
            self.filled.iter().position(|slot| u64::from(*slot) == (planned + slots.len() as u64) % count)
        {
            slots.extend(self.filled.remove(at));
        }
        while !self.filled_granted.is_empty() {
            slots.push(self.filled_granted.swap_remove(random.below(self.filled_granted.len())));
        }
        if !slots.is_empty() {
            free.extend(&slots);
            frames.frame(frame::SLOTS_FREE, slots.as_bytes());
        }
    }
}
