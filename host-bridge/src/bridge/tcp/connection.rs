//! One data connection: chunks of bulk data out of the client's pages and into them.
//!
//! The connection may be lost and replaced by another: the two streams, one each way, go on behind the last
//! byte that came. So what was sent is kept in a [`Journal`] until the server has acknowledged it, and what
//! came is counted and acknowledged, on this connection's own stream.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use protocol::link::{ACKNOWLEDGE_OUT, COMPRESSED_FLAG, DataHeader, MAX_DATA};
use zerocopy::{FromZeros, IntoBytes};

use super::compressor::Compressor;
use super::io_thread::{Alarm, IoThread};
use super::memory::{SocketMemory, gather_span, write};
use crate::bridge::connect::Unwelcomed;
use crate::bridge::relay::{Carries, EndReason, Flows, Head, RestoredLane, Room, Sent, Span, untrue};
use crate::bridge::socket::{Gather, Socket, not_now};
use crate::bridge::state::{SessionState, thread_name};
use crate::compression::{CompressUse, Decompressor};
use crate::journal::{Journal, Piece};

const HEADER: usize = size_of::<DataHeader>();
/// A header with the number of compressed bytes behind it.
const WITH_LENGTH: usize = HEADER + size_of::<u32>();
/// Bytes moved in one turn, each way. Then the relay turns to the others.
const TURN: usize = 4 << 20;
/// Chunks of at least so many bytes are left to a thread, where there is one.
const LONG: u64 = 128 << 10;

type Machine<'c> = crate::bridge::relay::Machine<'c, Flows<SocketMemory>>;

type Outbound = Sent<SocketMemory>;

#[derive(Debug)]
struct Sending {
    what: Outbound,
    /// What stands before its bytes.
    head: Head,
    sent: usize,
}

/// A chunk whose bytes are coming.
#[derive(Debug)]
struct Receiving {
    seq: u64,
    span: Span<SocketMemory>,
    /// Bytes that are in the client's memory.
    at: u64,
    /// Where it comes compressed.
    compressed: Option<Box<Decompressor>>,
}

/// A long chunk that a thread receives, and what came of the header behind it.
#[derive(Debug)]
struct Arriving {
    receiving: Receiving,
    header: [u8; HEADER],
    header_got: usize,
    /// The chunk is not one that a server may send.
    wrong: Option<EndReason>,
}

impl Receiving {
    /// Where its next bytes go. Gives how many of them are to come, for all of which `gather` may have no
    /// room.
    fn gather(&mut self, gather: &mut Gather) -> u64 {
        gather.clear();
        match &mut self.compressed {
            None => {
                let left = self.span.len() - self.at;
                gather_span(&self.span, self.at, left, gather);
                left
            }
            Some(compressed) => {
                let room = compressed.room();
                let len = room.len();
                gather.push(NonNull::from(room).cast(), len);
                len as u64
            }
        }
    }

    /// `n` bytes have come to where [`gather`](Self::gather) said. Gives how many more bytes are in the
    /// client's memory now.
    fn filled(&mut self, session: &SessionState, n: u64) -> Result<u64, EndReason> {
        session.counters.data_bytes_received.add(n);
        let (seq, len) = (self.seq, self.span.len());
        let now = match &mut self.compressed {
            None => n,
            Some(compressed) => {
                let wrong = |wrong| EndReason::Server(format!("it sent data of command {seq}: {wrong}"));
                if !compressed.filled(n as usize).map_err(wrong)? {
                    return Ok(0);
                }
                if !write(&self.span, compressed.plain()) {
                    let gone = format!("the memory for data of command {seq} is not there");
                    return Err(EndReason::Here(gone));
                }
                session.counters.data_bytes_decompressed.add(len);
                session.counters.data_bytes_decompressed_from.add(compressed.got() as u64);
                len
            }
        };
        self.at += now;
        Ok(now)
    }

    fn is_whole(&self) -> bool {
        self.at == self.span.len()
    }

    /// Bytes of the stream that have come for it.
    fn came(&self) -> u64 {
        self.compressed.as_ref().map_or(self.at, |compressed| compressed.got() as u64)
    }
}

/// Most chunks that a thread may have to send, the current one among them: it need not wait for the relay
/// between two.
pub(super) const AHEAD: usize = 2;

/// What a connection may do in a turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// A thread is given chunks until it has so many of them. Beyond the first, that is all that is done.
    pub(super) ahead: usize,
    /// Chunks that it may take, at most.
    pub(super) chunks: usize,
}

/// The threads of a connection.
#[derive(Debug)]
struct Threads {
    sends: IoThread<Sending>,
    receives: IoThread<Arriving>,
}

/// Sends a chunk to its end.
fn send_whole(socket: &Socket, session: &SessionState, sending: &mut Sending) -> io::Result<()> {
    let mut gather = Gather::new();
    while sending.sent < sending.what.stream_len() as usize {
        sending.gather(&mut gather);
        // SAFETY: the header lives in `sending`; `sending` holds the span, which keeps the client's memory
        // mapped.
        match not_now(unsafe { socket.send(&mut gather) })? {
            Some(n) => {
                let before = sending.data_sent();
                sending.sent += n;
                session.counters.data_bytes_sent.add(sending.data_sent() - before);
            }
            None => socket.wait(false)?,
        }
    }
    socket.flush()?;
    while socket.has_output() {
        socket.wait(false)?;
        socket.flush()?;
    }
    Ok(())
}

/// Receives a chunk to its end, and of the next header what is there already.
fn receive_whole(socket: &Socket, session: &SessionState, arriving: &mut Arriving) -> io::Result<()> {
    let mut gather = Gather::new();
    let Arriving { receiving, header, header_got, wrong } = arriving;
    while !receiving.is_whole() && wrong.is_none() {
        let left = receiving.gather(&mut gather);
        if gather.bytes() as u64 == left {
            gather.push(NonNull::from(&mut *header).cast(), HEADER);
        }
        // SAFETY: the header and compressed bytes live in `arriving` and are not borrowed; `receiving` keeps
        // the client's memory mapped, and no reference covers it.
        match not_now(unsafe { socket.receive(&mut gather) })? {
            Some(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the server")),
            Some(n) => {
                let data = (n as u64).min(left);
                *header_got = n - data as usize;
                *wrong = receiving.filled(session, data).err();
            }
            None => socket.wait(true)?,
        }
    }
    Ok(())
}

impl Sending {
    /// The server has the first `sent` bytes of it.
    fn new(what: Outbound, sent: u64) -> Sending {
        Sending { head: what.head(), what, sent: sent as usize }
    }

    /// Bytes behind the head that have been sent.
    fn data_sent(&self) -> u64 {
        self.sent.saturating_sub(self.head.as_bytes().len()) as u64
    }

    /// What is left to send.
    fn gather(&mut self, gather: &mut Gather) {
        gather.clear();
        let at = self.data_sent();
        if let Some(rest @ [_, ..]) = self.head.as_mut_bytes().get_mut(self.sent..) {
            gather.push(NonNull::from(&mut *rest).cast(), rest.len());
        }
        let left = self.what.len() - at;
        match &self.what {
            Outbound::Chunk(chunk) if left > 0 => gather_span(&chunk.span, chunk.at + at, left, gather),
            Outbound::Compressed(_, bytes) if left > 0 => {
                // SAFETY: `at` is less than the number of bytes that lie there.
                gather.push(unsafe { bytes.address().add(at as usize) }, left as usize);
            }
            _ => {}
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct DataConnection {
    /// They end before the rest goes; [`Drop`] has shut the connection down by then.
    threads: Option<Threads>,
    /// In a session that compresses. It goes on while there is no link.
    compressor: Option<Compressor>,
    socket: Arc<Socket>,
    /// The server's welcome on it has not come. It is not part of the stream.
    unwelcomed: Option<Unwelcomed>,
    index: usize,
    journal: Journal<Outbound>,
    sending: Option<Sending>,
    /// Room for a header, and for the number of compressed bytes behind it; how many of them are to come, and
    /// how many have.
    header: [u8; WITH_LENGTH],
    header_whole: usize,
    header_got: usize,
    receiving: Option<Receiving>,
    /// The server may send compressed data. It has memory between two chunks here.
    takes_compressed: bool,
    decompressor: Box<Decompressor>,
    /// A compressed chunk has come of which the server was not told.
    tells_at_once: bool,
    /// Bytes of the stream that have come; how many of them are whole chunks; and how many the server was
    /// told of on this connection, which is the end of a chunk, because another process would not know of
    /// more.
    received: u64,
    whole: u64,
    told: u64,
    /// The same for what the server was told on the control connection. It may not read that in time, so it
    /// does not count in place of `told`.
    told_along: u64,
    /// What the relay watches it for: input, room.
    pub(super) watched: (bool, bool),
}

impl Drop for DataConnection {
    fn drop(&mut self) {
        self.socket.shut_down();
    }
}

/// Nobody has to send it any more.
fn freed(machine: &mut Machine<'_>, index: usize, what: &Outbound) {
    machine.arrived(index, what.stream_len());
    if let Some(chunk) = what.chunk() {
        machine.schedule().arrived(chunk, what.stream_len());
        if !matches!(chunk.carries, Carries::Hash(_)) {
            machine.sent(chunk.seq, chunk.len.into());
        }
    }
}

impl DataConnection {
    pub(super) fn new(socket: Socket, index: usize, takes_compressed: bool) -> DataConnection {
        DataConnection {
            threads: None,
            compressor: None,
            socket: Arc::new(socket),
            unwelcomed: None,
            index,
            journal: Journal::default(),
            sending: None,
            header: [0; WITH_LENGTH],
            header_whole: HEADER,
            header_got: 0,
            receiving: None,
            takes_compressed,
            decompressor: Box::default(),
            tells_at_once: false,
            received: 0,
            whole: 0,
            told: 0,
            told_along: 0,
            watched: (true, false),
        }
    }

    /// One that another process had, whose connection is lost.
    pub(super) fn restored(
        socket: Socket,
        index: usize,
        takes_compressed: bool,
        lane: RestoredLane<SocketMemory>,
    ) -> DataConnection {
        let RestoredLane { received, base, sent } = lane;
        let mut connection = DataConnection::new(socket, index, takes_compressed);
        connection.journal = Journal::restored(base, sent);
        (connection.received, connection.whole, connection.told) = (received, received, received);
        connection
    }

    /// Starts threads for long chunks. They raise the alarm when they are done with one.
    pub(super) fn start_threads(
        &mut self,
        session: &Arc<SessionState>,
        alarm: &Arc<Alarm>,
    ) -> io::Result<()> {
        let (socket, held) = (self.socket.clone(), session.clone());
        let work = move |sending: &mut Sending| send_whole(&socket, &held, sending);
        let raised = Arc::clone(alarm);
        let sends = IoThread::start(thread_name("send"), work, move || raised.raise())?;
        let (socket, held) = (self.socket.clone(), session.clone());
        let work = move |arriving: &mut Arriving| receive_whole(&socket, &held, arriving);
        let raised = Arc::clone(alarm);
        let receives = IoThread::start(thread_name("receive"), work, move || raised.raise())?;
        self.threads = Some(Threads { sends, receives });
        Ok(())
    }

    /// Has long chunks compressed from now on where that saves time. The compressor raises the alarm
    /// when it is done with one.
    pub(super) fn compress(&mut self, when: CompressUse, room: &Arc<Room>, alarm: &Arc<Alarm>) {
        // It goes on over every connection.
        self.compressor.get_or_insert_with(|| Compressor::new(when, room, alarm));
    }

    fn is_compressing(&self) -> bool {
        self.compressor.as_ref().is_some_and(Compressor::is_busy)
    }

    /// Waits until nothing reads the client's memory. The connection is lost.
    pub(super) fn rest(&self) {
        self.compressor.iter().for_each(Compressor::wait_for_rest);
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Whether the relay receives here: not while a thread does.
    pub(super) fn wants_input(&self) -> bool {
        self.threads.as_ref().is_none_or(|threads| threads.receives.held() == 0)
    }

    /// Whether the relay waits for room to send.
    pub(super) fn wants_room(&self) -> bool {
        self.sending.is_some() || self.has_output()
    }

    /// Whether bytes that the socket took from the relay wait for room. Those of a thread are the thread's.
    fn has_output(&self) -> bool {
        self.threads.as_ref().is_none_or(|threads| threads.sends.held() == 0) && self.socket.has_output()
    }

    /// Whether [`receive`](Self::receive) has something that no event tells of.
    pub(super) fn has_input(&self) -> bool {
        self.wants_input() && self.socket.has_input()
    }

    /// Whether [`send`](Self::send) has something to do even if there are no further chunks.
    pub(super) fn may_send(&self) -> bool {
        let held = self.threads.as_ref().is_some_and(|threads| threads.sends.held() > 0);
        held || self.sending.is_some()
            || self.journal.next().is_some()
            || self.is_compressing()
            || self.socket.has_output()
    }

    /// The server has received the first `upto` bytes of the stream.
    pub(super) fn arrived(&mut self, machine: &mut Machine<'_>, upto: u64) -> Result<(), EndReason> {
        let index = self.index;
        self.journal.acknowledge(upto, |what| freed(machine, index, &what)).map_err(untrue)
    }

    /// The connection is lost: ends its threads. Gives the bytes of the stream that have come.
    pub(super) fn disconnect(&mut self, machine: &mut Machine<'_>) -> Result<u64, EndReason> {
        self.socket.shut_down();
        self.sending = None;
        if let Some(Threads { sends, receives }) = self.threads.take() {
            // What a thread had to send is in the journal.
            drop(sends.finish());
            // A thread has one chunk to receive at a time.
            for arrived in receives.finish() {
                self.take_back(machine, arrived)?;
            }
        }
        Ok(self.received)
    }

    /// Takes over what a thread has received, which may be a part.
    fn take_back(&mut self, machine: &mut Machine<'_>, arrived: Arriving) -> Result<(), EndReason> {
        let Arriving { receiving, header, header_got, wrong } = arrived;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        self.received += receiving.came() + header_got as u64;
        machine.received(receiving.seq, receiving.at)?;
        self.header[..HEADER].copy_from_slice(&header);
        (self.header_whole, self.header_got) = (HEADER, header_got);
        if !receiving.is_whole() {
            self.receiving = Some(receiving);
            return Ok(());
        }
        self.finish(machine, receiving);
        if self.header_got == HEADER { self.begin(machine) } else { Ok(()) }
    }

    /// A whole chunk has come, and some of the next header.
    fn finish(&mut self, machine: &mut Machine<'_>, receiving: Receiving) {
        self.whole = self.received - self.header_got as u64;
        machine.chunk_came(self.index, self.whole, receiving.seq, receiving.at);
        if let Some(decompressor) = receiving.compressed {
            (self.decompressor, self.tells_at_once) = (decompressor, true);
        }
    }

    /// Goes on over a new connection, of whose stream the server has `upto` bytes.
    pub(super) fn reconnect(
        &mut self,
        machine: &mut Machine<'_>,
        socket: Socket,
        upto: u64,
    ) -> Result<(), EndReason> {
        (self.socket, self.unwelcomed) = (Arc::new(socket), None);
        (self.told, self.tells_at_once) = (self.received, false);
        self.watched = (true, false);
        let index = self.index;
        self.journal.resume(upto, |what| freed(machine, index, &what)).map_err(untrue)
    }

    /// The server's welcome comes before everything else that it sends, and is not waited for with what is
    /// sent.
    pub(super) fn await_welcome(&mut self) {
        self.unwelcomed = Some(Unwelcomed::default());
    }

    /// Reads of the welcome what there is, if it has not come yet. True: it has, or has now.
    fn is_welcome(&mut self) -> Result<bool, EndReason> {
        while let Some(unwelcomed) = &mut self.unwelcomed {
            match not_now(unwelcomed.read(&*self.socket)) {
                Ok(Some(0)) => return Err(self.gone("closed by the server")),
                Ok(Some(_)) => {}
                Ok(None) => return Ok(false),
                Err(e) => return Err(self.gone(e)),
            }
            if unwelcomed.is_over(format_args!("data connection {}", self.index))? {
                self.unwelcomed = None;
            }
        }
        Ok(true)
    }

    /// Has the server told what has come, once that is much, and at once of a compressed chunk: it measures
    /// the link by that.
    fn acknowledge(&mut self, machine: &mut Machine<'_>) {
        let enough = if self.tells_at_once { 1 } else { ACKNOWLEDGE_OUT };
        let enough = self.whole.saturating_sub(self.told) >= enough;
        if enough && !self.is_compressing() && machine.lane_has_room(self.index, false) {
            (self.told, self.tells_at_once) = (self.whole, false);
            let what = Outbound::received(self.whole);
            machine.sending(self.index, &what);
            self.journal.push(what);
        }
    }

    /// What has come, if the server was not told of data among it. Whoever says it on the control connection
    /// calls [`told_along`](Self::told_along).
    pub(super) fn untold(&self) -> Option<u64> {
        (self.whole > self.told.max(self.told_along)).then_some(self.whole)
    }

    /// So much was said on the control connection.
    pub(super) fn told_along(&mut self, bytes: u64) {
        self.told_along = bytes;
    }

    fn gone(&self, what: impl std::fmt::Display) -> EndReason {
        EndReason::Gone(format!("data connection {}: {what}", self.index))
    }

    /// Takes over what a thread has received. True: there was something.
    pub(super) fn collect(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        let Some((arrived, result)) = self.threads.as_ref().and_then(|threads| threads.receives.take())
        else {
            return Ok(false);
        };
        self.take_back(machine, arrived)?;
        result.map_err(|e| self.gone(e))?;
        self.acknowledge(machine);
        Ok(true)
    }

    /// Sends what the connection takes. True: something moved.
    pub(super) fn send(
        &mut self,
        machine: &mut Machine<'_>,
        session: &SessionState,
        gather: &mut Gather,
        Budget { ahead, mut chunks }: Budget,
    ) -> Result<bool, EndReason> {
        let mut worked = false;
        if ahead > 1 && self.threads.is_none() {
            return Ok(false);
        }
        while let Some((_, result)) = self.threads.as_ref().and_then(|threads| threads.sends.take()) {
            result.map_err(|e| self.gone(e))?;
            worked = true;
        }
        if self.has_output() {
            self.socket.flush().map_err(|e| self.gone(e))?;
        }
        if let Some(what) = self.compressor.as_mut().and_then(Compressor::take) {
            if let (Outbound::Compressed(chunk, _), counters) = (&what, &session.counters) {
                counters.data_bytes_compressed.add(chunk.len.into());
                counters.data_bytes_compressed_to.add(what.len());
            }
            machine.sending(self.index, &what);
            self.journal.push(what);
            // It had to wait.
            self.acknowledge(machine);
            worked = true;
        }
        let mut budget = TURN;
        while budget > 0 {
            let held = self.threads.as_ref().map_or(0, |threads| threads.sends.held());
            if self.sending.is_none() {
                // A short chunk waits until the thread is done: the relay would have to send it in between.
                let fits = |len| held == 0 || (held < ahead && len >= LONG);
                let next = self.journal.next().map(Outbound::len);
                let Some(len) = next.or_else(|| machine.schedule().peek()).filter(|len| fits(*len)) else {
                    break;
                };
                if next.is_none() {
                    if chunks == 0 {
                        break;
                    }
                    chunks -= 1;
                    // What is being compressed comes first.
                    let waits = |compressor: &Compressor| compressor.is_busy() || compressor.is_full(len);
                    if self.compressor.as_ref().is_some_and(waits) || !machine.lane_has_room(self.index, true)
                    {
                        break;
                    }
                    let Some(chunk) = machine.schedule().next_chunk() else { break };
                    if chunk.carries == Carries::Nothing {
                        session.counters.data_bytes_known.add(chunk.len.into());
                    }
                    let link = machine.schedule().link();
                    if let Some(compressor) = &mut self.compressor
                        && let Some(trial) = compressor.tries(chunk.sends(), link)
                    {
                        machine.preparing(self.index, &chunk);
                        compressor.give(chunk, trial).map_err(|e| EndReason::Here(e.to_string()))?;
                        worked = true;
                        break;
                    }
                    let what = Outbound::Chunk(chunk);
                    machine.sending(self.index, &what);
                    self.journal.push(what);
                }
                let Some((what, skip)) = self.journal.take() else { break };
                let sending = Sending::new(what, skip);
                if let Some(threads) = self.threads.as_ref().filter(|_| sending.what.len() >= LONG) {
                    threads.sends.give(sending);
                    worked = true;
                    break;
                }
                self.sending = Some(sending);
            }
            let Some(sending) = &mut self.sending else { break };
            let at = sending.data_sent();
            sending.gather(gather);
            // SAFETY: the header lives in `self`; `sending` holds the span, which keeps the client's memory
            // mapped.
            let result = unsafe { self.socket.send(gather) };
            match not_now(result) {
                Ok(Some(n)) => {
                    sending.sent += n;
                    session.counters.data_bytes_sent.add(sending.data_sent() - at);
                    worked = true;
                    budget = budget.saturating_sub(n);
                    if sending.sent as u64 == sending.what.stream_len() {
                        self.sending = None;
                    }
                }
                Ok(None) => break,
                Err(e) => return Err(self.gone(e)),
            }
        }
        Ok(worked)
    }

    /// Receives what there is. True: there was something.
    pub(super) fn receive(
        &mut self,
        machine: &mut Machine<'_>,
        session: &SessionState,
        gather: &mut Gather,
    ) -> Result<bool, EndReason> {
        if !self.is_welcome()? {
            return Ok(false);
        }
        let mut taken = 0;
        while taken < TURN && self.wants_input() {
            // One call takes the rest of the chunk and, if all of its memory fits the call, the next header.
            gather.clear();
            let body = self.receiving.as_mut().map_or(0, |receiving| receiving.gather(gather));
            if gather.bytes() as u64 == body {
                let rest = &mut self.header[self.header_got..self.header_whole];
                gather.push(NonNull::from(&mut *rest).cast(), rest.len());
            }
            // SAFETY: the header and compressed bytes live in `self` and are not borrowed; `receiving` keeps
            // the client's memory mapped, and no reference covers it.
            let result = unsafe { self.socket.receive(gather) };
            let n = match not_now(result) {
                Ok(Some(0)) => return Err(self.gone("closed by the server")),
                Ok(Some(n)) => n,
                Ok(None) => break,
                Err(e) => return Err(self.gone(e)),
            };
            taken += n;
            self.received += n as u64;
            let data = (n as u64).min(body);
            self.header_got += n - data as usize;
            if let Some(receiving) = &mut self.receiving {
                let now = receiving.filled(session, data)?;
                machine.received(receiving.seq, now)?;
                // A few compressed bytes may be much data.
                taken += now.saturating_sub(data) as usize;
            }
            if let Some(receiving) = self.receiving.take_if(|receiving| receiving.is_whole()) {
                self.finish(machine, receiving);
            }
            if self.header_got == self.header_whole {
                self.begin(machine)?;
            }
        }
        self.acknowledge(machine);
        Ok(taken > 0)
    }

    /// A whole header has come, or what is behind it.
    fn begin(&mut self, machine: &mut Machine<'_>) -> Result<(), EndReason> {
        let (mut header, mut length) = (DataHeader::new_zeroed(), 0u32);
        header.as_mut_bytes().copy_from_slice(&self.header[..HEADER]);
        length.as_mut_bytes().copy_from_slice(&self.header[HEADER..]);
        let compressed = self.takes_compressed && header.len & COMPRESSED_FLAG != 0;
        if compressed && self.header_whole == HEADER {
            self.header_whole = WITH_LENGTH;
            return Ok(());
        }
        (self.header_whole, self.header_got) = (HEADER, 0);
        header.len &= if compressed { !COMPRESSED_FLAG } else { u32::MAX };
        if header.len > MAX_DATA {
            return Err(EndReason::Server(format!(
                "it sent a piece of {} bytes, more than {MAX_DATA}",
                header.len
            )));
        }
        let span = machine.target(header.seq, header.piece, header.offset, header.len.into())?;
        let compressed = if compressed {
            let mut decompressor = std::mem::take(&mut self.decompressor);
            let wrong = |wrong| EndReason::Server(format!("it sent data of command {}: {wrong}", header.seq));
            decompressor.begin(header.len, length).map_err(wrong)?;
            Some(decompressor)
        } else {
            None
        };
        let receiving = Receiving { seq: header.seq, span, at: 0, compressed };
        match &self.threads {
            Some(threads) if receiving.span.len() >= LONG => {
                let header = [0; HEADER];
                threads.receives.give(Arriving { receiving, header, header_got: 0, wrong: None });
            }
            _ if receiving.span.len() > 0 => self.receiving = Some(receiving),
            _ => {}
        }
        Ok(())
    }
}
