//! The rules of a relayed session, without I/O.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::channel::{
    Completed, Consumer, Header, MAX_PAYLOAD, MAX_RECORD, NO_SLOT, Position, RECORD_HEADER, Record,
};
use protocol::data::{DataUse, HostRange};
use protocol::handle::{ContextId, StreamId};
use protocol::link::{
    DataAsk, DataGrant, DataHeader, DataSent, ProgressUpdate, Received, ReplyHeader, frame, progress,
};
use protocol::ops::{self, Class};
use protocol::trace::Stage;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::downloads::Downloads;
use super::end::EndReason;
use super::flows::Chunk;
use super::ledger::{Framed, Ledger};
use super::mailbox::{Mailbox, Message};
use super::regions::{Awaited, ClientMemory, Regions, Span};
use super::schedule::{Schedule, Upload};
use super::sent::Sent;
use super::succession::region_key;
use super::unsent::Unsent;
use crate::bridge::state::{SessionState, Waker};
use crate::framing::{ALIVE_EVERY, BadAcknowledgement, FrameReader, OpenFrame, SendBuffer, split_struct};

/// Most commands with data under way, each way; above it no more records are taken. (A GPU's own queue holds
/// about a thousand.)
const MAX_UNDER_WAY: usize = 1 << 16;
/// Bytes under way, both ways together, from which on that is bulk data.
const BULK: u64 = 256 << 10;

/// The state of a relayed session. All its methods return at once; an error ends the session.
pub(in crate::bridge) struct Machine<'c, S: Schedule> {
    pub(super) session: &'c SessionState,
    pub(super) consumer: Consumer<'c>,
    pub(super) regions: Regions<S::Memory>,
    pub(super) schedule: S,
    pub(super) unsent: Unsent,
    pub(super) downloads: Downloads<S::Memory>,
    /// For another process that takes this one's place.
    pub(super) ledger: Option<Ledger>,
    reader: FrameReader,
    /// The server has sent this command's data. Until it is all here no further frame is taken, for what
    /// comes behind may depend on it.
    settling: Option<DataSent>,
    /// For each reply slot the seq of the command that awaits an answer there; 0: none.
    pub(super) waiting: Vec<u64>,
    /// Bytes of records that the server has not taken, where it says what it takes.
    pub(super) untaken: u64,
    /// Where the ring was read to when the control stream was so long. What the server has received leaves
    /// the ring.
    pub(super) forwarded: VecDeque<(u64, Position)>,
    /// What stands in frames that are finished.
    pub(super) framed: Position,
    /// Bytes of the control stream that have come, and of frames that were acted on.
    pub(super) control_received: u64,
    pub(super) processed: u64,
    /// The next frame may have been acted on by another process.
    pub(super) again: bool,
    /// What the server says that it has received, as far as its carrier has not asked.
    acknowledged: Vec<Received>,
    pub(super) last_seq: u64,
    taken_bytes: u64,
    released: u64,
    /// All data of a command was sent since `released` was last published.
    completed: bool,
    /// When something last came, when the server was last asked whether it is there, and the bytes of data
    /// received by then.
    heard: Instant,
    asked: Instant,
    received: u64,
    silence: Duration,
    body: Vec<u8>,
    uses: Vec<DataUse>,
    /// Where the data of a record lies, while that is checked.
    found: Vec<Found<S::Memory>>,
}

/// Memory that a record names.
enum Found<M: ClientMemory> {
    /// Of `In` data.
    Source(Span<M>),
    /// Of `Out` data, which the server may write from now on.
    Target(Awaited<M>),
}

impl<'c, S: Schedule> Machine<'c, S> {
    /// A session that begins now. A server that is silent for longer than `silence` while something is
    /// expected from it is lost.
    pub(in crate::bridge) fn new(
        session: &'c SessionState,
        arena: Option<S::Memory>,
        schedule: S,
        silence: Duration,
    ) -> Machine<'c, S> {
        let (view, now) = (&session.channel.view, Instant::now());
        Machine {
            session,
            consumer: view.consumer(Position::default()),
            regions: Regions::new(arena.map(std::sync::Arc::new)),
            schedule,
            unsent: Unsent::default(),
            downloads: Downloads::new(),
            ledger: None,
            reader: FrameReader::new(),
            settling: None,
            waiting: vec![0; view.geometry().slot_count],
            untaken: 0,
            forwarded: VecDeque::new(),
            framed: Position::default(),
            control_received: 0,
            processed: 0,
            again: false,
            acknowledged: Vec::new(),
            last_seq: 0,
            taken_bytes: 0,
            released: 0,
            completed: false,
            heard: now,
            asked: now,
            received: 0,
            silence,
            body: Vec::with_capacity(MAX_RECORD),
            uses: Vec::new(),
            found: Vec::new(),
        }
    }

    /// Has all that is done noted for another process. To be called before anything is.
    pub(in crate::bridge) fn note_in(&mut self, ledger: Ledger) {
        self.ledger = Some(ledger);
    }

    /// Notes what has been done. Called before anybody sees it, except for answers and progress.
    pub(in crate::bridge) fn commit(&mut self) {
        if let Some(ledger) = &mut self.ledger {
            self.schedule.note(ledger);
            ledger.untaken(self.untaken);
            ledger.commit();
        }
    }

    /// The process ends when it has written so many more words into its ledger.
    #[cfg(test)]
    pub(super) fn end_after(&self, words: Option<u64>) {
        self.ledger.as_ref().unwrap().end_after(words);
    }

    /// Appends a short frame to the control stream. False: there is no room for it now.
    pub(in crate::bridge) fn frame(&mut self, out: &mut SendBuffer, kind: u32, body: &[u8]) -> bool {
        let room = self.ledger.as_ref().is_none_or(Ledger::has_room_for_frame);
        if room {
            short_frame(&mut self.ledger, out, kind, body);
        }
        room
    }

    /// What may be sent now.
    pub(in crate::bridge) fn schedule(&mut self) -> &mut S {
        &mut self.schedule
    }

    // What other threads ask for.

    /// Acts on another thread's message.
    pub(super) fn message(&mut self, message: Message<S::Memory>) -> Result<(), EndReason> {
        match message {
            Message::Register { id, region, done } => self.regions.register(id, region, done),
            Message::Unregister { id, done } => self.regions.unregister(id, self.taken_bytes, done),
            Message::Close(reason) => return Err(EndReason::Asked(reason)),
        }
        Ok(())
    }

    /// Acts on other threads' messages while there is no connection. [`EndReason::Paused`]: the client's
    /// memory is not to be touched until [`Mailbox::rest`] returns.
    pub(in crate::bridge) fn serve(&mut self, mailbox: &Mailbox<S::Memory>) -> Result<(), EndReason> {
        if mailbox.is_to_pause() {
            return Err(EndReason::Paused);
        }
        while let Some(message) = mailbox.next() {
            self.message(message)?;
        }
        self.finish_turn();
        Ok(())
    }

    /// Tells the client what was sent.
    pub(super) fn publish_sent(&mut self) {
        if std::mem::take(&mut self.completed) {
            self.publish_released();
        }
    }

    /// Ends a turn of the relay's loop: drops unregistered regions that nothing uses any more.
    pub(super) fn finish_turn(&mut self) {
        self.publish_sent();
        let ring = self.session.channel.view.geometry().ring_size as u64;
        let Machine { regions, consumer, taken_bytes, .. } = self;
        regions.release(|| consumer.has_work(), *taken_bytes, ring);
    }

    // Records in, frames out.

    /// Whether records stand in the ring.
    pub(super) fn has_records(&self) -> bool {
        self.consumer.has_work()
    }

    /// Whether another record may be taken.
    pub(super) fn can_take(&self, out: &SendBuffer) -> bool {
        out.has_room()
            && S::COMMANDS_AHEAD.is_none_or(|most| self.untaken < most)
            && self.unsent.commands() < MAX_UNDER_WAY
            && self.downloads.commands() < MAX_UNDER_WAY
            && self.ledger.as_ref().is_none_or(Ledger::has_room)
    }

    /// Takes records off the ring and appends them to `out`, as many as limits allow. True: there was one.
    pub(super) fn take_records(&mut self, out: &mut SendBuffer) -> Result<bool, EndReason> {
        let (mut commands, mut worked) = (None, false);
        let taken = self.append_records(out, &mut commands, &mut worked);
        // Also behind a record that is refused: the farewell must not land inside a frame.
        if let Some(commands) = commands {
            out.finish(commands);
            if let Some(ledger) = &mut self.ledger {
                ledger.frame(out.appended(), Framed::Commands(self.framed));
            }
        }
        // Those before one that could not be taken for lack of a link are taken all the same.
        if worked && matches!(taken, Ok(()) | Err(EndReason::Gone(_))) {
            self.commit();
            if self.schedule.is_acknowledged() {
                self.forwarded.push_back((out.appended(), self.consumer.position()));
            } else {
                self.release_records(self.consumer.position());
            }
            self.publish_released();
        }
        taken.map(|()| worked)
    }

    /// Gives the client the place of the records before `position` back.
    fn release_records(&mut self, position: Position) {
        self.consumer.release(position);
        if self.consumer.has_room() && self.session.header().ring_sleep.take() {
            self.session.waker().wake(Header::RING_SLEEP_OFFSET);
        }
    }

    /// The server has received the first `upto` bytes of the control stream, which comes out of `out`.
    pub(in crate::bridge) fn frames_arrived(
        &mut self,
        out: &mut SendBuffer,
        upto: u64,
    ) -> Result<(), EndReason> {
        out.acknowledge(upto).map_err(untrue)?;
        self.records_arrived(upto);
        Ok(())
    }

    fn records_arrived(&mut self, upto: u64) {
        if let Some(ledger) = &mut self.ledger {
            ledger.frames_arrived(upto);
            self.commit();
        }
        let mut passed = None;
        while let Some((end, position)) = self.forwarded.front()
            && *end <= upto
        {
            passed = Some(*position);
            self.forwarded.pop_front();
        }
        if let Some(position) = passed {
            self.release_records(position);
        }
    }

    /// The control stream goes on behind its first `upto` bytes, over a new connection.
    pub(in crate::bridge) fn frames_resume(
        &mut self,
        out: &mut SendBuffer,
        upto: u64,
    ) -> Result<(), EndReason> {
        out.resume(upto).map_err(untrue)?;
        self.records_arrived(upto);
        Ok(())
    }

    fn append_records(
        &mut self,
        out: &mut SendBuffer,
        commands: &mut Option<OpenFrame>,
        worked: &mut bool,
    ) -> Result<(), EndReason> {
        let counters = &self.session.counters;
        while self.can_take(out) {
            let before = self.consumer.position();
            let record = self.consumer.take(&mut self.body).map_err(|e| EndReason::Client(e.to_string()))?;
            let Some(record) = record else { break };
            self.session.trace.note(Stage::Taken, record.seq, record.opcode);
            if let Err(end) = self.check(record, out, commands) {
                if matches!(end, EndReason::Gone(_)) {
                    self.consumer.return_to(before);
                }
                return Err(end);
            }
            if commands.is_none() {
                *commands = Some(out.begin(frame::COMMANDS));
                counters.frames_sent.add(1);
            }
            let size = RECORD_HEADER + self.body.len();
            out.end().extend_from_slice(&record.to_bytes(size as u32));
            out.end().extend_from_slice(&self.body);
            self.framed = self.consumer.position();
            self.last_seq = record.seq;
            self.taken_bytes += size as u64;
            self.untaken += size as u64;
            counters.commands.add(1);
            counters.copied_bytes.add(2 * size as u64);
            *worked = true;
        }
        Ok(())
    }

    /// Checks the copy of a record and takes over the data that it names. What the server needs to know
    /// before it has the command goes before it: the frame `commands` ends then. While a server executes a
    /// command it may read nothing that is behind it. After [`EndReason::Gone`] nothing has been done with
    /// the record, which is to be taken again when there is a link.
    fn check(
        &mut self,
        record: Record,
        out: &mut SendBuffer,
        commands: &mut Option<OpenFrame>,
    ) -> Result<(), EndReason> {
        let Record { opcode, reply_slot, seq } = record;
        let Some(info) = ops::info(opcode) else {
            return Err(EndReason::Client(format!("command {seq} has unknown opcode {opcode:#06x}")));
        };
        let wrong =
            |what: &dyn std::fmt::Display| EndReason::Client(format!("command {seq} ({}) {what}", info.name));
        let undecodable = |e| wrong(&format_args!("does not decode: {e}"));
        self.uses.clear();
        if info.carries_data {
            let uses = &mut self.uses;
            (info.visit_data)(&self.body, &mut |data| uses.push(data)).map_err(undecodable)?;
        }
        // First, since it may take a link.
        if let Err(end) = self.find(&wrong, out, commands) {
            self.found.clear();
            return Err(end);
        }
        match info.class {
            Class::Async if reply_slot == NO_SLOT => {}
            Class::Async => {
                return Err(wrong(&format_args!(
                    "names reply slot {reply_slot} though it is never answered"
                )));
            }
            Class::Sync => match self.waiting.get_mut(usize::from(reply_slot)) {
                None => {
                    return Err(wrong(&format_args!("names reply slot {reply_slot}, which does not exist")));
                }
                Some(awaited @ 0) => {
                    *awaited = seq;
                    if let Some(ledger) = &mut self.ledger {
                        ledger.awaits(reply_slot, seq);
                    }
                }
                Some(other) if self.again && self.session.was_completed(reply_slot, *other) => {
                    // The process before had given that answer, and not noted it.
                    *other = seq;
                    if let Some(ledger) = &mut self.ledger {
                        ledger.awaits(reply_slot, seq);
                    }
                }
                Some(other) => {
                    return Err(wrong(&format_args!(
                        "names reply slot {reply_slot}, where command {other} awaits its answer"
                    )));
                }
            },
        }
        self.schedule.command(seq, info, &self.body).map_err(undecodable)?;
        for (piece, (data, found)) in self.uses.iter().zip(self.found.drain(..)).enumerate() {
            let (range, piece) = (range_of(data), piece as u32);
            match found {
                Found::Target(awaited) => {
                    self.downloads.expect(seq, piece, awaited);
                    if let Some(ledger) = &mut self.ledger {
                        ledger.download(seq, piece, range);
                    }
                }
                Found::Source(span) if span.len() > 0 => {
                    let late = matches!(data, DataUse::Late(_));
                    self.unsent.add(seq, span.len());
                    if let Some(ledger) = &mut self.ledger {
                        ledger.upload(seq, piece, range, late);
                    }
                    if self.schedule.push(Upload { seq, piece, span, late }) {
                        let ask = DataAsk { seq, piece, reserved: 0 };
                        let ahead = (frame::DATA_ASK, ask.as_bytes());
                        send_ahead(&mut self.ledger, out, commands, self.framed, ahead);
                    }
                }
                Found::Source(_) => {}
            }
        }
        Ok(())
    }

    /// Finds the memory that a record's data uses name, and lets the server write what it is to write. A key
    /// that it needs for that goes before the record.
    fn find(
        &mut self,
        wrong: &impl Fn(&dyn std::fmt::Display) -> EndReason,
        out: &mut SendBuffer,
        commands: &mut Option<OpenFrame>,
    ) -> Result<(), EndReason> {
        for data in &self.uses {
            let (range, write) = (range_of(data), matches!(data, DataUse::Out(_)));
            let span = self.regions.span(range, write).map_err(|what| {
                wrong(&format_args!(
                    "names data at offset {:#x} of {:?}, {} bytes, which {what}",
                    range.offset, range.place, range.len
                ))
            })?;
            if !write {
                self.found.push(Found::Source(span));
                continue;
            }
            let (awaited, key) = Awaited::new(span)?;
            self.found.push(Found::Target(awaited));
            if let Some(key) = key {
                let key = region_key(range.place, key);
                let ahead = (frame::REGION_KEY, key.as_bytes());
                send_ahead(&mut self.ledger, out, commands, self.framed, ahead);
            }
        }
        Ok(())
    }

    // Data that a carrier has moved.

    /// `len` bytes of command `seq`'s `In` data are with the server, and their source is the client's again.
    pub(in crate::bridge) fn sent(&mut self, seq: u64, len: u64) {
        let complete = self.unsent.sent(seq, len);
        self.completed |= complete;
        if let (true, Some(ledger)) = (complete, &mut self.ledger) {
            ledger.uploaded(seq);
        }
    }

    /// Whether data connection `lane` may have another chunk under way. There is more room for
    /// acknowledgements than for data.
    pub(in crate::bridge) fn lane_has_room(&self, lane: usize, data: bool) -> bool {
        self.ledger.as_ref().is_none_or(|ledger| ledger.lane_has_room(lane, data))
    }

    /// A chunk was given out to data connection `lane`, and what is sent of it will be told to
    /// [`sending`](Self::sending). Until then nothing else is.
    pub(in crate::bridge) fn preparing(&mut self, lane: usize, chunk: &Chunk<S::Memory>) {
        if let Some(ledger) = &mut self.ledger {
            ledger.preparing(lane, &chunk.header());
            self.commit();
        }
    }

    /// This is about to be sent on data connection `lane`.
    pub(in crate::bridge) fn sending(&mut self, lane: usize, what: &Sent<S::Memory>) {
        if let Some(ledger) = &mut self.ledger {
            ledger.sending(lane, &what.header(), what.noted().as_ref());
            self.commit();
        }
    }

    /// This write is about to be posted on a queue of data, `lane`.
    pub(in crate::bridge) fn posting(&mut self, lane: usize, header: &DataHeader, slot: u32) {
        if let Some(ledger) = &mut self.ledger {
            let mut more = [0; 32];
            more[..4].copy_from_slice(&slot.to_le_bytes());
            ledger.sending(lane, header, Some(&more));
            self.commit();
        }
    }

    /// The server has what was sent first on data connection `lane` of what it had not, `len` bytes of the
    /// stream.
    pub(in crate::bridge) fn arrived(&mut self, lane: usize, len: u64) {
        // After a long silence the server may acknowledge everything on all connections at once. What the
        // last chunk means for its command has been staged with it.
        if self.ledger.as_ref().is_some_and(Ledger::must_commit) {
            self.commit();
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.arrived(lane, len);
        }
    }

    /// A whole chunk of `len` bytes of command `seq` has come on data connection `lane`, of whose stream that
    /// are the first `end` bytes.
    pub(in crate::bridge) fn chunk_came(&mut self, lane: usize, end: u64, seq: u64, len: u64) {
        if let Some(ledger) = &mut self.ledger {
            ledger.chunk_came(lane, end, seq, len);
            self.commit();
        }
    }

    /// Where `len` bytes from `offset` of a piece of `Out` data go, which come now. To be called once for
    /// them, however many links they take.
    pub(in crate::bridge) fn target(
        &mut self,
        seq: u64,
        piece: u32,
        offset: u64,
        len: u64,
    ) -> Result<Span<S::Memory>, EndReason> {
        self.downloads.target(seq, piece, offset, len)
    }

    /// `len` bytes of command `seq`'s `Out` data are in the client's memory, where [`target`](Self::target)
    /// said.
    pub(in crate::bridge) fn received(&mut self, seq: u64, len: u64) -> Result<(), EndReason> {
        self.downloads.received(seq, len)
    }

    /// The same for a server that writes by itself and names the lower half of the seq. It is its write
    /// number `number` on the queue of data `lane`.
    pub(in crate::bridge) fn written_by_server(
        &mut self,
        lane: usize,
        number: u64,
        (low, len): (u32, u32),
    ) -> Result<(), EndReason> {
        let wrong = |what| EndReason::Server(format!("it wrote {len} bytes for command …{low:#x}, {what}"));
        let behind = u64::from((self.last_seq as u32).wrapping_sub(low));
        let seq = self.last_seq.checked_sub(behind).ok_or_else(|| wrong("which was not sent"))?;
        if len == 0 {
            return Err(wrong("which is no data"));
        }
        self.downloads.came(seq, len.into())?;
        self.chunk_came(lane, number, seq, len.into());
        Ok(())
    }

    /// Whether so much data is under way that polling for each part of it would be in vain.
    pub(super) fn is_bulk(&self) -> bool {
        self.unsent.bytes() + self.downloads.bytes() >= BULK
    }

    pub(super) fn publish_released(&mut self) {
        let released = self.unsent.released(self.last_seq);
        if released <= self.released {
            return;
        }
        self.commit();
        self.released = released;
        self.session.channel.view.progress().set_released(released);
        if self.session.header().progress_sleep.take() {
            self.session.waker().wake(Header::PROGRESS_SLEEP_OFFSET);
        }
    }

    // Frames in.

    /// Reads the server's frames once, to be [taken](Self::take_frames). 0: the end of the stream.
    pub(in crate::bridge) fn read(&mut self, from: &mut impl Read) -> io::Result<usize> {
        let n = self.reader.fill(from)?;
        self.control_received += n as u64;
        self.session.counters.control_bytes_received.add(n as u64);
        Ok(n)
    }

    /// What was read of frames and not taken, for whoever reads on when the session is over.
    pub(in crate::bridge) fn take_reader(&mut self) -> FrameReader {
        std::mem::take(&mut self.reader)
    }

    /// Bytes of the control stream whose frames were acted on since the session began. What has come beyond
    /// that is not acknowledged, because another process would not know of it.
    pub(in crate::bridge) fn control_taken(&self) -> u64 {
        self.processed
    }

    /// The control stream goes on behind the frames that were acted on, over a new connection. Gives its
    /// bytes up to there.
    pub(in crate::bridge) fn restart_frames(&mut self) -> u64 {
        (self.reader, self.settling) = (FrameReader::new(), None);
        self.control_received = self.processed;
        self.processed
    }

    /// What the server says that it has received, since the last call.
    pub(in crate::bridge) fn take_acknowledged(&mut self) -> Vec<Received> {
        std::mem::take(&mut self.acknowledged)
    }

    /// Whether frames are taken now. While data that they may depend on is on its way they are not.
    pub(in crate::bridge) fn takes_frames(&self) -> bool {
        self.settling.is_none()
    }

    /// Bytes of frames that wait for data.
    pub(in crate::bridge) fn backlog(&self) -> usize {
        if self.takes_frames() { 0 } else { self.reader.buffered() }
    }

    /// Something came from the server.
    pub(in crate::bridge) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Acts on the frames that were read, as far as the order of data allows.
    pub(in crate::bridge) fn take_frames(&mut self) -> Result<(), EndReason> {
        let session = self.session;
        let mut waker = session.waker();
        let mut published = false;
        loop {
            if let Some(DataSent { seq, bytes }) = self.settling {
                if !self.downloads.settle(seq, bytes)? {
                    break;
                }
                self.settling = None;
                if let Some(ledger) = &mut self.ledger {
                    ledger.downloaded(seq);
                }
                self.frame_taken();
            }
            let next = self.reader.next_frame().map_err(|e| EndReason::Server(e.to_string()))?;
            let Some((kind, body)) = next else { break };
            session.counters.frames_received.add(1);
            let again = std::mem::take(&mut self.again);
            match kind {
                frame::REPLY => {
                    let slot =
                        reply(session, &mut self.waiting, body, &mut waker, again.then_some(&self.consumer))?;
                    if let (Some(slot), Some(ledger)) = (slot, &mut self.ledger) {
                        ledger.awaits(slot, 0);
                    }
                }
                frame::PROGRESS => {
                    each(body, "a frame of progress", |update| publish(session, update, again))?;
                    published = true;
                }
                frame::DATA_SENT => {
                    let (sent, _) = split_struct(body).map_err(|e| EndReason::Server(e.to_string()))?;
                    self.settling = Some(sent);
                    continue;
                }
                frame::DATA_GRANT => {
                    each(body, "a frame of grants", |grant: DataGrant| self.schedule.grant(grant))?;
                }
                frame::RECEIVED if self.schedule.is_acknowledged() => {
                    each(body, "a frame of acknowledgements", |received| {
                        self.acknowledged.push(received);
                        Ok(())
                    })?;
                }
                frame::COMMANDS_TAKEN if S::COMMANDS_AHEAD.is_some() => {
                    let bytes = body.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
                    let left = bytes.and_then(|bytes| self.untaken.checked_sub(bytes));
                    self.untaken = left.ok_or_else(|| {
                        EndReason::Server(format!(
                            "it has taken {bytes:?} bytes of commands, more than were sent"
                        ))
                    })?;
                }
                frame::ALIVE => {}
                frame::BYE => return Err(EndReason::Bye(String::from_utf8_lossy(body).into_owned())),
                kind => {
                    if !self.schedule.frame(kind, body)? {
                        return Err(EndReason::Server(format!("it sent a frame of unknown kind {kind}")));
                    }
                }
            }
            self.frame_taken();
        }
        if published && session.header().progress_sleep.take() {
            waker.wake(Header::PROGRESS_SLEEP_OFFSET);
        }
        Ok(())
    }

    /// Looks for the server's farewell among the frames that were read, while they [are not
    /// taken](Self::takes_frames). They are dropped: they come again if the session is resumed.
    pub(in crate::bridge) fn farewell_behind(&mut self) -> Result<(), EndReason> {
        while let Some((kind, body)) =
            self.reader.next_frame().map_err(|e| EndReason::Server(e.to_string()))?
        {
            if kind == frame::BYE {
                return Err(EndReason::Bye(String::from_utf8_lossy(body).into_owned()));
            }
        }
        Ok(())
    }

    /// The last frame that was read has been acted on.
    fn frame_taken(&mut self) {
        self.processed = self.control_received - self.reader.buffered() as u64;
        if let Some(ledger) = &mut self.ledger {
            ledger.control_in(self.processed);
            self.commit();
        }
    }

    // Whether the server is there.

    /// Whether something is expected from the server. Only then does its silence mean anything; that a server
    /// dies meanwhile is noticed by the connection's keepalive.
    fn awaits(&self, out: &SendBuffer) -> bool {
        !out.is_empty()
            || self.unsent.commands() > 0
            || self.downloads.commands() > 0
            || self.session.channel.view.progress().executed() < self.last_seq
            || self.waiting.iter().any(|seq| *seq != 0)
    }

    /// Asks a silent server that is waited for whether it is there. True: it was asked just now. The error:
    /// it has been silent for so many seconds that it is lost.
    pub(super) fn keep_alive(&mut self, out: &mut SendBuffer, now: Instant) -> Result<bool, u64> {
        // Worker threads receive data unseen.
        let received = self.session.counters.data_bytes_received.get();
        if received != self.received {
            (self.received, self.heard) = (received, now);
        }
        let silent = now.saturating_duration_since(self.heard);
        if silent < ALIVE_EVERY.min(self.silence) {
            return Ok(false);
        }
        if !self.awaits(out) {
            self.heard = now;
            return Ok(false);
        }
        if silent > self.silence {
            if self.asked >= self.heard {
                return Err(silent.as_secs());
            }
            // This thread has not run for so long, and nobody has asked: the silence begins now.
            self.heard = now;
        }
        if now.saturating_duration_since(self.asked) < ALIVE_EVERY {
            return Ok(false);
        }
        self.asked = now;
        Ok(out.has_room() && self.frame(out, frame::ALIVE, &[]))
    }

    /// How long nothing needs to be done unless something happens. `None`: for ever.
    pub(super) fn rest(&self, out: &SendBuffer, now: Instant) -> Option<Duration> {
        let next = (self.asked.max(self.heard) + ALIVE_EVERY).min(self.heard + self.silence);
        self.awaits(out).then(|| next.saturating_duration_since(now))
    }

    /// To be called after a sleep: a silence begins only when something is awaited.
    pub(super) fn rested(&mut self, awaited: bool, now: Instant) {
        if !awaited {
            self.heard = now;
        }
    }
}

fn range_of(data: &DataUse) -> HostRange {
    match *data {
        DataUse::In(range) | DataUse::Late(range) | DataUse::Out(range) => range,
    }
}

/// Appends a short frame, behind the records before position `framed`: their frame `commands` ends.
fn send_ahead(
    ledger: &mut Option<Ledger>,
    out: &mut SendBuffer,
    commands: &mut Option<OpenFrame>,
    framed: Position,
    (kind, body): (u32, &[u8]),
) {
    if let Some(commands) = commands.take() {
        out.finish(commands);
        if let Some(ledger) = ledger {
            ledger.frame(out.appended(), Framed::Commands(framed));
        }
    }
    short_frame(ledger, out, kind, body);
}

fn short_frame(ledger: &mut Option<Ledger>, out: &mut SendBuffer, kind: u32, body: &[u8]) {
    out.frame(kind, body);
    if let Some(ledger) = ledger {
        let mut words = [0; 24];
        words[..body.len()].copy_from_slice(body);
        ledger.frame(out.appended(), Framed::Short(kind, body.len(), words));
    }
}

/// The server acknowledges what it cannot have.
pub(in crate::bridge) fn untrue(bad: BadAcknowledgement) -> EndReason {
    EndReason::Server(bad.to_string())
}

/// Calls `act` with each entry of a frame's body. Entries are copied one by one: a frame begins anywhere in
/// its buffer, so its body may lie at any address.
fn each<T: FromBytes + Immutable>(
    body: &[u8],
    what: &str,
    mut act: impl FnMut(T) -> Result<(), EndReason>,
) -> Result<(), EndReason> {
    for entry in body.chunks(size_of::<T>()) {
        let wrong = |_| EndReason::Server(format!("it sent {what} of {} bytes", body.len()));
        act(T::read_from_bytes(entry).map_err(wrong)?)?;
    }
    Ok(())
}

/// Gives an answer to its client. `again`: another process may have given it, and the ring tells what the
/// client has done since. Gives the slot, unless another answer is awaited there.
fn reply(
    session: &SessionState,
    waiting: &mut [u64],
    body: &[u8],
    waker: &mut Waker<'_>,
    again: Option<&Consumer<'_>>,
) -> Result<Option<u16>, EndReason> {
    let (header, payload) =
        split_struct::<ReplyHeader>(body).map_err(|e| EndReason::Server(e.to_string()))?;
    let ReplyHeader { seq, slot, status } = header;
    let view = &session.channel.view;
    let awaited = waiting.get_mut(slot as usize);
    if again.is_some()
        && awaited.as_ref().is_some_and(|awaited| **awaited != seq)
        && session.was_completed(slot as u16, seq)
    {
        return Ok(None);
    }
    let awaited = awaited.filter(|awaited| **awaited == seq && seq != 0);
    let (Some(awaited), Some(reply_slot)) =
        (awaited, u16::try_from(slot).ok().and_then(|slot| view.slot(slot)))
    else {
        return Err(EndReason::Server(format!(
            "it answered command {seq} in slot {slot}, where no such answer is awaited"
        )));
    };
    if payload.len() > MAX_PAYLOAD {
        return Err(EndReason::Server(format!(
            "it answered command {seq} with {} bytes, more than {MAX_PAYLOAD}",
            payload.len()
        )));
    }
    *awaited = 0;
    session.counters.replies.add(1);
    session.counters.copied_bytes.add(payload.len() as u64);
    session.trace.note(Stage::Delivered, seq, 0);
    let given = again.map_or(Completed::No, |_| reply_slot.was_completed(seq));
    let given = match (given, again) {
        (Completed::No, _) | (Completed::Unknown, None) => false,
        (Completed::Yes, _) => true,
        (Completed::Unknown, Some(consumer)) => {
            // Whoever uses the slot again appends a command, and sleeps only after that.
            let sleeps = reply_slot.sleeps();
            match names_slot(session, consumer.position(), slot as u16) {
                true => true,
                false if sleeps => false,
                false => {
                    let what = format!("it is not known whether command {seq} was answered");
                    return Err(EndReason::Here(what));
                }
            }
        }
    };
    if !given && reply_slot.complete(seq, Status(status), payload) {
        waker.wake(view.geometry().slot_offset(slot as usize) as u64);
    }
    Ok(Some(slot as u16))
}

/// Whether a command in the ring behind `position` awaits its answer in this slot.
fn names_slot(session: &SessionState, position: Position, slot: u16) -> bool {
    let (mut records, mut body) = (session.channel.view.consumer(position), Vec::new());
    std::iter::from_fn(|| records.take(&mut body).ok().flatten()).any(|record| record.reply_slot == slot)
}

/// Publishes a word of progress. `again`: another process may have done so.
fn publish(session: &SessionState, update: ProgressUpdate, again: bool) -> Result<(), EndReason> {
    let area = session.channel.view.progress();
    let wrong = || {
        EndReason::Server(format!(
            "it sent a progress update of kind {} for index {:#x}",
            update.kind, update.index
        ))
    };
    match update.kind {
        progress::EXECUTED => area.set_executed(update.seq),
        progress::STREAM => {
            let word = area.stream(StreamId(update.index)).ok_or_else(wrong)?;
            word.store(update.seq, Ordering::Release);
        }
        progress::ERROR => {
            let (context, sticky) = (update.index & !(1 << 31), update.index >> 31 != 0);
            let word = area.error(ContextId(context)).ok_or_else(wrong)?;
            match u32::try_from(update.value).map_err(|_| wrong())? {
                0 => word.clear(),
                _ if again && word.may_have_been_taken(update.seq) => {
                    let what =
                        format!("it is not known whether the error of command {} was told", update.seq);
                    return Err(EndReason::Here(what));
                }
                status => word.set(Status(status), sticky, update.seq),
            }
        }
        progress::OUTPUT => area.set_output(update.value),
        progress::WATCHED => area.set_watched(update.value),
        // The bridge knows by itself what it has sent.
        progress::RELEASED => {}
        _ => return Err(wrong()),
    }
    Ok(())
}
