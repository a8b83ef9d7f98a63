//! Going on with a session that another process's relay had: its [`Machine`], its [`Flows`] and its streams, out of the [ledger](super::ledger), the client's ring and the client's regions.
//!
//! The streams are the same byte for byte as before, so everything else is as after a link that was lost: both ends say how far they have come, and go on from there.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use protocol::channel::RECORD_HEADER;
use protocol::link::{
    COMPRESSED_FLAG, DATA_FLAGS, DataHeader, EAGER_FLAG, HASH_FLAG, KEEP_FLAG, KNOWN_FLAG, frame,
};

use super::compressed::Room;
use super::flows::{Carries, Chunk, Flows};
use super::ledger::{Content, Framed, Ledger};
use super::machine::Machine;
use super::regions::{ClientMemory, Span};
use super::sent::Sent;
use super::{EndReason, Upload};
use crate::bridge::state::SessionState;
use crate::framing::SendBuffer;

/// A data connection's streams.
#[derive(Debug)]
pub(in crate::bridge) struct RestoredLane<M> {
    /// Bytes that have come, as far as chunks are whole.
    pub(in crate::bridge) received: u64,
    /// Where `sent` begins in the stream to the server.
    pub(in crate::bridge) base: u64,
    /// What the server may not have.
    pub(in crate::bridge) sent: VecDeque<Sent<M>>,
}

/// A session as another process left it.
pub(in crate::bridge) struct Restored<'c, M: ClientMemory> {
    pub(in crate::bridge) machine: Machine<'c, Flows<M>>,
    /// The control stream to the server.
    pub(in crate::bridge) out: SendBuffer,
    pub(in crate::bridge) lanes: Vec<RestoredLane<M>>,
    /// How many processes have had the session before this one.
    pub(in crate::bridge) generation: u64,
}

fn wrong(what: impl std::fmt::Display) -> EndReason {
    EndReason::Here(format!("the process that served the program before has left what cannot be: {what}"))
}

impl<'c, M: ClientMemory> Machine<'c, Flows<M>> {
    /// Goes on with a session of `lanes` data connections from its ledger, and the rooms of its compressed bytes if it has them. `schedule` is [noted](Flows::noted) and new; the client's memory is as it
    /// was. The session's link is lost.
    pub(in crate::bridge) fn restore(
        session: &'c SessionState,
        (arena, regions): (Option<M>, Vec<(u32, M)>),
        schedule: Flows<M>,
        silence: Duration,
        (file, rooms): (&impl AsFd, &[Arc<Room>]),
        lanes: usize,
    ) -> Result<Restored<'c, M>, EndReason> {
        let slots = session.channel.view.geometry().slot_count;
        let (ledger, content) = Ledger::open(file, slots, lanes).map_err(wrong)?;
        let mut machine = Machine::new(session, arena, schedule, silence);
        regions.into_iter().for_each(|(id, region)| machine.regions.restore(id, region));
        let generation = content.generation;
        let out = machine.restore_frames(&content)?;
        machine.restore_downloads(&content)?;
        machine.note_in(ledger);
        let lanes = machine.restore_uploads(&content, rooms)?;
        machine.waiting = content.awaited;
        (machine.control_received, machine.processed) = (content.control_in, content.control_in);
        machine.again = true;
        machine.commit();
        Ok(Restored { machine, out, lanes, generation })
    }

    /// Reads again what was sent of the control stream.
    fn restore_frames(&mut self, content: &Content) -> Result<SendBuffer, EndReason> {
        let begin = content.out_base;
        self.consumer = self.session.channel.view.consumer(content.ring);
        self.consumer.release(content.ring);
        let (mut out, mut body) = (SendBuffer::restored(begin, Vec::new()), Vec::new());
        for (end, framed) in &content.frames {
            match framed {
                Framed::Short(kind, len, bytes) => out.frame(*kind, &bytes[..*len]),
                Framed::Commands(position) => {
                    let commands = out.begin(frame::COMMANDS);
                    while self.consumer.position() != *position && out.appended() < *end {
                        let record =
                            self.consumer.take(&mut body).map_err(|e| EndReason::Client(e.to_string()))?;
                        let Some(record) = record else { break };
                        let size = (RECORD_HEADER + body.len()) as u32;
                        out.end().extend_from_slice(&record.to_bytes(size));
                        out.end().extend_from_slice(&body);
                    }
                    out.finish(commands);
                    if self.consumer.position() != *position {
                        return Err(EndReason::Client("the ring was changed behind its end".into()));
                    }
                    self.forwarded.push_back((*end, *position));
                }
            }
            if out.appended() != *end {
                return Err(EndReason::Client("commands in the ring were changed".into()));
            }
        }
        self.framed = self.consumer.position();
        self.last_seq = self.framed.parts().1;
        let sent = out.unsent().len();
        out.advance(sent);
        Ok(out)
    }

    fn restore_downloads(&mut self, content: &Content) -> Result<(), EndReason> {
        let mut received: BTreeMap<u64, u64> = BTreeMap::new();
        for download in &content.downloads {
            let span = self.regions.span(download.range, true).map_err(wrong)?;
            self.downloads.expect(download.seq, download.piece, span);
            let sum = received.entry(download.seq).or_default();
            *sum = sum.saturating_add(download.received);
        }
        for (seq, bytes) in received {
            self.downloads.received(seq, bytes).map_err(|_| wrong("a download's length"))?;
        }
        Ok(())
    }

    /// What was sent of uploads, by connection; what was not is for the schedule.
    fn restore_uploads(
        &mut self,
        content: &Content,
        rooms: &[Arc<Room>],
    ) -> Result<Vec<RestoredLane<M>>, EndReason> {
        let mut spans: BTreeMap<(u64, u32), (Span<M>, u64)> = BTreeMap::new();
        let mut pieces = Vec::new();
        for upload in &content.uploads {
            let span = self.regions.span(upload.range, false).map_err(wrong)?;
            let left = span.len() - upload.job.at;
            spans.insert((upload.seq, upload.piece), (span.clone(), left));
            let (seq, piece, late) = (upload.seq, upload.piece, upload.late);
            pieces.push((Upload { seq, piece, span, late }, upload.job));
        }
        let mut lanes = Vec::new();
        for (index, lane) in content.lanes.iter().enumerate() {
            let room = rooms.get(index);
            let sent = lane.chunks.iter().map(|(header, more)| chunk(*header, *more, &mut spans, room));
            let sent = sent.collect::<Option<_>>().ok_or_else(|| wrong("what was sent of an upload"))?;
            lanes.push(RestoredLane { received: lane.received, base: lane.base, sent });
        }
        for ((seq, _), (_, left)) in &spans {
            if *left > 0 {
                self.unsent.add(*seq, *left);
            }
        }
        self.schedule.restore(pieces, content.unplaced);
        Ok(lanes)
    }
}

/// A chunk that was sent. What it has of its piece is added to what the server may not have of that.
fn chunk<M>(
    header: DataHeader,
    more: [u8; 32],
    spans: &mut BTreeMap<(u64, u32), (Span<M>, u64)>,
    room: Option<&Arc<Room>>,
) -> Option<Sent<M>> {
    let DataHeader { seq, offset: at, piece, len: flags } = header;
    let (len, has) = (flags & !DATA_FLAGS, |flag| flags & flag != 0);
    if (seq, flags) == (0, 0) {
        return Some(Sent::Plain(header, None));
    }
    if has(HASH_FLAG) {
        // The server may have had all that it was asked about in the meantime.
        return Some(Sent::Plain(header, Some(more)));
    }
    let (span, left) = spans.get_mut(&(seq, piece))?;
    span.part(at, len.into())?;
    *left += u64::from(len);
    let carries = if has(KNOWN_FLAG) { Carries::Nothing } else { Carries::Bytes { keep: has(KEEP_FLAG) } };
    let chunk = Chunk { seq, piece, span: span.clone(), at, len, eager: has(EAGER_FLAG), carries };
    if !has(COMPRESSED_FLAG) {
        return Some(Sent::Chunk(chunk));
    }
    let ([begin, compressed, ..], _) = more.as_chunks::<8>() else { return None };
    let (begin, compressed) = (u64::from_le_bytes(*begin), u64::from_le_bytes(*compressed));
    let fewer = compressed < len.into() && carries != Carries::Nothing;
    let bytes = room.filter(|_| fewer)?.find(begin, compressed)?;
    Some(Sent::Compressed(chunk, bytes))
}
