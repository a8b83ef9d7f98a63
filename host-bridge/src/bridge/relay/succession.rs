//! Going on with a session that another process's relay had: its [`Machine`], its [`Flows`] or [`Slots`], and
//! its streams, out of the [ledger](super::ledger), the client's ring and the client's regions.
//!
//! The streams are the same byte for byte as before, so everything else is as after a link that was lost:
//! both ends say how far they have come, and go on from there. Over `verbs` one thing is not the same: the
//! client's memory is registered anew. Frames that name a key, and have not been acted on, name the new one.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use protocol::channel::RECORD_HEADER;
use protocol::data::Place;
use protocol::link::{
    ARENA_KEY, COMPRESSED_FLAG, DATA_FLAGS, DataHeader, EAGER_FLAG, HASH_FLAG, KEEP_FLAG, KNOWN_FLAG,
    RegionKey, frame,
};
use zerocopy::{FromBytes, IntoBytes};

use super::compressed::Room;
use super::end::EndReason;
use super::flows::{Carries, Chunk, Flows};
use super::ledger::{Content, Framed, Job, Ledger};
use super::machine::Machine;
use super::regions::{Awaited, ClientMemory, MemoryKey, Span};
use super::schedule::{Schedule, Upload};
use super::sent::Sent;
use super::slots::{Slots, Write};
use crate::bridge::state::SessionState;
use crate::framing::SendBuffer;

/// A client's memory: the arena, and the regions by their ids.
pub(in crate::bridge) type AllMemory<M> = (Option<M>, Vec<(u32, M)>);

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

/// A session over `verbs` as another process left it.
pub(in crate::bridge) struct RestoredSlots<'c, M: ClientMemory> {
    pub(in crate::bridge) machine: Machine<'c, Slots<M>>,
    /// The control stream to the server.
    pub(in crate::bridge) out: SendBuffer,
    /// For each queue of data.
    pub(in crate::bridge) writes: Vec<RestoredWrites<M>>,
    /// Keys of the memories that the server may be about to write.
    pub(in crate::bridge) keys: Vec<RegionKey>,
    /// How many processes have had the session before this one.
    pub(in crate::bridge) generation: u64,
}

/// A queue's writes.
#[derive(Debug)]
pub(in crate::bridge) struct RestoredWrites<M> {
    /// Those of the server that were acted on.
    pub(in crate::bridge) taken: u64,
    /// Those to the server that it is known to have.
    pub(in crate::bridge) done: u64,
    /// Those behind them, in order.
    pub(in crate::bridge) under_way: Vec<Write<M>>,
}

/// A region's key as the server knows it.
pub(super) fn region_key(place: Place, MemoryKey { address, size, key }: MemoryKey) -> RegionKey {
    let region = match place {
        Place::Arena => ARENA_KEY,
        Place::Region(id) => id,
    };
    RegionKey { address, size, region, key }
}

impl<'c, M: ClientMemory> Machine<'c, Slots<M>> {
    /// Goes on with a session of `lanes` queues and `slots` slots from its ledger. `schedule` is
    /// [noted](Slots::noted) and new; the client's memory is as it was, and registered anew. The session's
    /// link is lost.
    pub(in crate::bridge) fn restore_verbs(
        session: &'c SessionState,
        memory: AllMemory<M>,
        schedule: Slots<M>,
        silence: Duration,
        file: &impl AsFd,
        (lanes, slots): (usize, u32),
    ) -> Result<RestoredSlots<'c, M>, EndReason> {
        let (mut machine, content, ledger, out) =
            Machine::restore_control(session, memory, schedule, silence, file, lanes)?;
        let in_use = ledger.slots_in_use(slots);
        machine.note_in(ledger);
        let mut keys = BTreeMap::new();
        for download in &content.downloads {
            let place = download.range.place;
            if let Some(key) = machine.regions.memory(place).and_then(|memory| memory.key()) {
                keys.insert(region_key(place, key).region, region_key(place, key));
            }
        }
        let mut spans = BTreeMap::new();
        let pieces = machine.pieces(&content, &mut spans)?;
        machine.schedule.restore(pieces, &in_use, content.turns);
        let mut writes = Vec::new();
        for lane in &content.lanes {
            let write = |(header, more): &(DataHeader, [u8; 32])| {
                let DataHeader { seq, offset, piece, len } = *header;
                let (span, left) = spans.get_mut(&(seq, piece))?;
                let source = span.part(offset, len.into()).filter(|_| len > 0)?;
                *left += u64::from(len);
                let slot = u32::from_le_bytes(*more.first_chunk()?);
                let token = machine.schedule.restore_write(seq, slot, source.clone())?;
                Some(Write { slot, header: *header, source, token, signal: true })
            };
            let under_way = lane.chunks.iter().map(write).collect::<Option<_>>();
            let under_way = under_way.ok_or_else(|| wrong("what was written of an upload"))?;
            writes.push(RestoredWrites { taken: lane.received, done: lane.base, under_way });
        }
        let (keys, generation) = (keys.into_values().collect(), content.generation);
        machine.finish_restoring(content, &spans);
        Ok(RestoredSlots { machine, out, writes, keys, generation })
    }
}

impl<'c, M: ClientMemory> Machine<'c, Flows<M>> {
    /// Goes on with a session of `lanes` data connections from its ledger, and the rooms of its compressed
    /// bytes if it has them. `schedule` is [noted](Flows::noted) and new; the client's memory is as it was.
    /// The session's link is lost.
    pub(in crate::bridge) fn restore(
        session: &'c SessionState,
        memory: AllMemory<M>,
        schedule: Flows<M>,
        silence: Duration,
        (file, rooms): (&impl AsFd, &[Arc<Room>]),
        lanes: usize,
    ) -> Result<Restored<'c, M>, EndReason> {
        let (mut machine, content, ledger, out) =
            Machine::restore_control(session, memory, schedule, silence, file, lanes)?;
        machine.note_in(ledger);
        let mut spans = BTreeMap::new();
        let pieces = machine.pieces(&content, &mut spans)?;
        let mut lanes = Vec::new();
        for (index, lane) in content.lanes.iter().enumerate() {
            let room = rooms.get(index);
            let sent = lane.chunks.iter().map(|(header, more)| chunk(*header, *more, &mut spans, room));
            let sent = sent.collect::<Option<_>>().ok_or_else(|| wrong("what was sent of an upload"))?;
            lanes.push(RestoredLane { received: lane.received, base: lane.base, sent });
        }
        machine.schedule.restore(pieces, content.unplaced);
        let generation = content.generation;
        machine.finish_restoring(content, &spans);
        Ok(Restored { machine, out, lanes, generation })
    }
}

/// By command and piece: where it lies, and how much of it the server may not have.
type Spans<M> = BTreeMap<(u64, u32), (Span<M>, u64)>;

/// Pieces, with how far each has been given out.
type Pieces<M> = Vec<(Upload<M>, Job)>;

impl<'c, S: Schedule> Machine<'c, S> {
    /// What is the same for all schedules and comes first: the control stream, and what is awaited from the
    /// server.
    fn restore_control(
        session: &'c SessionState,
        (arena, regions): AllMemory<S::Memory>,
        schedule: S,
        silence: Duration,
        file: &impl AsFd,
        lanes: usize,
    ) -> Result<(Machine<'c, S>, Content, Ledger, SendBuffer), EndReason> {
        let slots = session.channel.view.geometry().slot_count;
        let (ledger, content) = Ledger::open(file, slots, lanes).map_err(wrong)?;
        let mut machine = Machine::new(session, arena, schedule, silence);
        regions.into_iter().for_each(|(id, region)| machine.regions.restore(id, region));
        // First, because it gives the memories keys, which frames may name.
        machine.restore_downloads(&content)?;
        let out = machine.restore_frames(&content)?;
        Ok((machine, content, ledger, out))
    }

    /// What comes last.
    fn finish_restoring(&mut self, content: Content, spans: &Spans<S::Memory>) {
        for ((seq, _), (_, left)) in spans {
            if *left > 0 {
                self.unsent.add(*seq, *left);
            }
        }
        self.waiting = content.awaited;
        self.untaken = content.untaken;
        (self.control_received, self.processed) = (content.control_in, content.control_in);
        self.again = true;
        self.commit();
        // The process before may have ended between its last word and this.
        self.publish_released();
    }

    /// Reads again what was sent of the control stream.
    fn restore_frames(&mut self, content: &Content) -> Result<SendBuffer, EndReason> {
        let begin = content.out_base;
        self.consumer = self.session.channel.view.consumer(content.ring);
        self.consumer.publish();
        let (mut out, mut body) = (SendBuffer::restored(begin, Vec::new()), Vec::new());
        for (end, framed) in &content.frames {
            match framed {
                Framed::Short(kind, len, bytes) => {
                    let new = if *kind == frame::REGION_KEY { self.new_key(bytes) } else { None };
                    out.frame(*kind, new.as_ref().map_or(&bytes[..*len], IntoBytes::as_bytes));
                }
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

    /// The key by which the server reaches the memory now of which a frame gives the former key. `None`: the
    /// region has left, so the server has acted on that frame.
    fn new_key(&self, body: &[u8]) -> Option<RegionKey> {
        let (RegionKey { region, .. }, _) = RegionKey::read_from_prefix(body).ok()?;
        let place = if region == ARENA_KEY { Place::Arena } else { Place::Region(region) };
        Some(region_key(place, self.regions.memory(place)?.key()?))
    }

    fn restore_downloads(&mut self, content: &Content) -> Result<(), EndReason> {
        let mut received: BTreeMap<u64, u64> = BTreeMap::new();
        for download in &content.downloads {
            let span = self.regions.span(download.range, true).map_err(wrong)?;
            // No key is sent here: the server gets the newest one of each memory once everything is restored.
            let (awaited, _) = Awaited::new(span)?;
            self.downloads.expect(download.seq, download.piece, awaited);
            let sum = received.entry(download.seq).or_default();
            *sum = sum.saturating_add(download.received);
        }
        for (seq, bytes) in received {
            self.downloads.came(seq, bytes).map_err(|_| wrong("a download's length"))?;
        }
        Ok(())
    }

    /// The pieces of uploads, with how far each has been given out. What has not been is what the server does
    /// not have of it so far.
    fn pieces(
        &self,
        content: &Content,
        spans: &mut Spans<S::Memory>,
    ) -> Result<Pieces<S::Memory>, EndReason> {
        let mut pieces = Vec::new();
        for upload in &content.uploads {
            let span = self.regions.span(upload.range, false).map_err(wrong)?;
            let left = span.len() - upload.job.at;
            spans.insert((upload.seq, upload.piece), (span.clone(), left));
            let (seq, piece, late) = (upload.seq, upload.piece, upload.late);
            pieces.push((Upload { seq, piece, span, late }, upload.job));
        }
        Ok(pieces)
    }
}

/// A chunk that was sent. What it has of its piece is added to what the server may not have of that.
fn chunk<M>(
    header: DataHeader,
    more: [u8; 32],
    spans: &mut Spans<M>,
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
