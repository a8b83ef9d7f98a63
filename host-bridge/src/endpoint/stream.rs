//! The two streams between a bridge and a worker, whatever carries them: records that come, and frames that
//! go.

use protocol::Status;
use protocol::channel::{
    MAX_CONTEXTS, MAX_PAYLOAD, MAX_RECORD, MAX_STREAMS, NO_SLOT, PAD, RECORD_HEADER, Record,
};
use protocol::link::{FrameHeader, ProgressUpdate, ReplyHeader, frame, progress};
use zerocopy::IntoBytes;

use super::end::Lost;

/// Records to be taken apart, one behind the other.
#[derive(Debug, Default)]
pub(crate) struct Records {
    bytes: Vec<u8>,
    at: usize,
    /// Of the last record.
    seq: u64,
}

impl Records {
    /// Whether all have been taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// An empty buffer for more of them, once all have been taken.
    pub(crate) fn refill(&mut self) -> &mut Vec<u8> {
        self.bytes.clear();
        self.at = 0;
        &mut self.bytes
    }

    /// The next record; its body goes into `body`. `None`: all have been taken.
    pub(crate) fn take(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        let rest = &self.bytes[self.at..];
        if rest.is_empty() {
            return Ok(None);
        }
        let Some(header) = rest.first_chunk::<RECORD_HEADER>() else {
            return Err(Lost::new(format!("{} bytes at the end of a frame are no record", rest.len())));
        };
        let (record, size) = Record::from_bytes(header);
        let size = size as usize;
        if size < RECORD_HEADER
            || !size.is_multiple_of(16)
            || size > MAX_RECORD
            || size > rest.len()
            || record.opcode == PAD
        {
            return Err(Lost::new(format!(
                "record {}: a size of {size} bytes where {} are left",
                self.seq + 1,
                rest.len()
            )));
        }
        if record.seq != self.seq + 1 {
            return Err(Lost::new(format!(
                "record with seq {} where {} was expected",
                record.seq,
                self.seq + 1
            )));
        }
        body.clear();
        body.extend_from_slice(&rest[RECORD_HEADER..size]);
        self.seq += 1;
        self.at += size;
        Ok(Some(record))
    }
}

/// Appends a frame.
pub(crate) fn put(out: &mut Vec<u8>, kind: u32, parts: &[&[u8]]) {
    let len = parts.iter().map(|p| p.len()).sum::<usize>() as u32;
    out.extend_from_slice(FrameHeader { kind, len }.as_bytes());
    parts.iter().for_each(|p| out.extend_from_slice(p));
}

/// Appends words of progress. Those with a wrong index are left out: a client may have named a context or a
/// stream that there cannot be, and the bridge takes such a word for the server's fault.
pub(crate) fn put_progress(out: &mut Vec<u8>, updates: &[ProgressUpdate]) {
    let exists = |update: &&ProgressUpdate| match update.kind {
        progress::STREAM => update.index < MAX_STREAMS,
        progress::ERROR => update.index & !(1 << 31) < MAX_CONTEXTS,
        _ => true,
    };
    let (count, all) = (updates.iter().filter(exists).count(), updates.len());
    if count == all && all > 0 {
        put(out, frame::PROGRESS, &[updates.as_bytes()]);
    } else if count > 0 {
        let parts: Vec<_> = updates.iter().filter(exists).map(IntoBytes::as_bytes).collect();
        put(out, frame::PROGRESS, &parts);
    }
}

/// Appends that every command up to `seq` has been executed.
pub(crate) fn put_executed(out: &mut Vec<u8>, seq: u64) {
    let update = ProgressUpdate { kind: progress::EXECUTED, index: 0, seq, value: 0 };
    put(out, frame::PROGRESS, &[update.as_bytes()]);
}

/// What is wrong with the reply slot that a command names, where the channel has `count`.
pub(crate) fn check_slot(seq: u64, slot: u16, count: u32) -> Result<(), String> {
    match slot {
        NO_SLOT => Err(format!("command {seq} names no reply slot")),
        slot if u32::from(slot) >= count => Err(format!("command {seq} names reply slot {slot} of {count}")),
        _ => Ok(()),
    }
}

/// Appends an answer. A payload that no slot holds is answered as an unknown error.
pub(crate) fn put_reply(out: &mut Vec<u8>, seq: u64, slot: u16, status: Status, payload: &[u8]) {
    let (status, payload) =
        if payload.len() > MAX_PAYLOAD { (Status::UNKNOWN, &[][..]) } else { (status, payload) };
    let header = ReplyHeader { seq, slot: slot.into(), status: status.0 };
    put(out, frame::REPLY, &[header.as_bytes(), payload]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seq: u64, body: usize) -> Vec<u8> {
        let size = RECORD_HEADER + body;
        let mut bytes = Record { opcode: 1, reply_slot: NO_SLOT, seq }.to_bytes(size as u32).to_vec();
        bytes.resize(size, 7);
        bytes
    }

    #[test]
    fn records_come_one_by_one_over_several_fills() {
        let (mut records, mut body) = (Records::default(), Vec::new());
        records.refill().extend([record(1, 16), record(2, 0)].concat());
        assert_eq!(records.take(&mut body).unwrap().unwrap().seq, 1);
        assert_eq!(body, [7; 16]);
        assert_eq!(records.take(&mut body).unwrap().unwrap().seq, 2);
        assert!(records.is_empty() && records.take(&mut body).unwrap().is_none());
        records.refill().extend(record(3, 32));
        assert_eq!(records.take(&mut body).unwrap().unwrap().seq, 3);
    }

    #[test]
    fn what_is_no_record_is_said() {
        for (bytes, words) in [
            (record(2, 0), "seq 2 where 1 was expected"),
            (record(1, 0)[..8].to_vec(), "no record"),
            (record(1, 8), "a size of"),
            (record(1, 16)[..RECORD_HEADER].to_vec(), "a size of"),
        ] {
            let mut records = Records::default();
            records.refill().extend(bytes);
            let lost = records.take(&mut Vec::new()).unwrap_err();
            assert!(lost.reason.contains(words), "{lost:?}");
        }
    }

    #[test]
    fn words_that_a_channel_does_not_have_are_left_out() {
        let word = |kind, index| ProgressUpdate { kind, index, seq: 7, value: 201 };
        let words = [
            word(progress::ERROR, MAX_CONTEXTS),
            word(progress::ERROR, 1 << 31 | 3),
            word(progress::STREAM, MAX_STREAMS),
            word(progress::STREAM, MAX_STREAMS - 1),
            word(progress::OUTPUT, 99),
        ];
        let (mut out, mut expected) = (Vec::new(), Vec::new());
        put_progress(&mut out, &words);
        put(
            &mut expected,
            frame::PROGRESS,
            &[words[1], words[3], words[4]].each_ref().map(IntoBytes::as_bytes),
        );
        assert_eq!(out, expected);
        put_progress(&mut out, &words[..1]);
        assert_eq!(out, expected, "no frame without a word");
    }

    #[test]
    fn slots_that_a_channel_does_not_have_are_refused() {
        assert!(check_slot(1, 63, 64).is_ok());
        assert!(check_slot(1, 64, 64).is_err() && check_slot(1, NO_SLOT, 64).is_err());
    }
}
