//! One data connection: chunks of bulk data out of the client's pages and into them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use protocol::link::{DataHeader, EAGER_FLAG, MAX_DATA};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::io_thread::IoThread;
use super::memory::{SocketMemory, gather_span};
use super::socket::{Gather, Socket, not_now};
use crate::bridge::relay::{Chunk, EndReason, Flows, Span};
use crate::bridge::state::{SessionState, thread_name};

const HEADER: usize = size_of::<DataHeader>();
/// Bytes moved in one turn, each way. Then the relay turns to the others.
const TURN: usize = 4 << 20;
/// Chunks of at least so many bytes are left to a thread, where there is one.
const LONG: u64 = 128 << 10;

type Machine<'c> = crate::bridge::relay::Machine<'c, Flows<SocketMemory>>;

#[derive(Debug)]
struct Sending {
    chunk: Chunk<SocketMemory>,
    header: [u8; HEADER],
    sent: usize,
}

#[derive(Debug)]
struct Receiving {
    seq: u64,
    span: Span<SocketMemory>,
    at: u64,
}

/// A long chunk that a thread receives, and what came of the header behind it.
#[derive(Debug)]
struct Arriving {
    receiving: Receiving,
    header: [u8; HEADER],
    header_got: usize,
}

/// Most chunks that a thread may have to send, the current one among them: it need not wait for the relay between two.
pub(super) const AHEAD: usize = 2;

/// The threads of a connection.
#[derive(Debug)]
struct Threads {
    sends: IoThread<Sending>,
    receives: IoThread<Arriving>,
}

/// Sends a chunk to its end.
fn send_whole(socket: &Socket, session: &SessionState, sending: &mut Sending) -> io::Result<()> {
    let mut gather = Gather::new();
    while sending.sent < HEADER + sending.chunk.len as usize {
        sending.gather(&mut gather);
        // SAFETY: the header lives in `sending`; `sending` holds the span, which keeps the client's memory mapped.
        match not_now(unsafe { socket.send(&mut gather) })? {
            Some(n) => {
                let before = sending.sent.saturating_sub(HEADER);
                sending.sent += n;
                session.counters.data_bytes_sent.add((sending.sent.saturating_sub(HEADER) - before) as u64);
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
    let Arriving { receiving, header, header_got } = arriving;
    while receiving.at < receiving.span.len() {
        let left = receiving.span.len() - receiving.at;
        gather.clear();
        gather_span(&receiving.span, receiving.at, left, &mut gather);
        if gather.bytes() as u64 == left {
            gather.push(NonNull::from(&mut *header).cast(), HEADER);
        }
        // SAFETY: the header lives in `arriving` and is not borrowed; `receiving` keeps the client's memory mapped, and no reference covers it.
        match not_now(unsafe { socket.receive(&mut gather) })? {
            Some(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the server")),
            Some(n) => {
                let data = (n as u64).min(left);
                receiving.at += data;
                *header_got = n - data as usize;
                session.counters.data_bytes_received.add(data);
            }
            None => socket.wait(true)?,
        }
    }
    Ok(())
}

impl Sending {
    /// What is left to send.
    fn gather(&mut self, gather: &mut Gather) {
        gather.clear();
        if self.sent < HEADER {
            let rest = &mut self.header[self.sent..];
            gather.push(NonNull::from(&mut *rest).cast(), rest.len());
        }
        let at = self.sent.saturating_sub(HEADER) as u64;
        gather_span(&self.chunk.span, self.chunk.at + at, u64::from(self.chunk.len) - at, gather);
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct DataConnection {
    /// They end before the rest goes; [`Drop`] has shut the connection down by then.
    threads: Option<Threads>,
    socket: Arc<Socket>,
    index: usize,
    sending: Option<Sending>,
    header: [u8; HEADER],
    header_got: usize,
    receiving: Option<Receiving>,
    /// What the relay watches it for: input, room.
    pub(super) watched: (bool, bool),
}

impl Drop for DataConnection {
    fn drop(&mut self) {
        self.socket.shut_down();
    }
}

impl DataConnection {
    pub(super) fn new(socket: Socket, index: usize) -> DataConnection {
        DataConnection {
            threads: None,
            socket: Arc::new(socket),
            index,
            sending: None,
            header: [0; HEADER],
            header_got: 0,
            receiving: None,
            watched: (true, false),
        }
    }

    /// Starts threads for long chunks. They write to `wake` when they are done with one.
    pub(super) fn start_threads(&mut self, session: &Arc<SessionState>, wake: &OwnedFd) -> io::Result<()> {
        let tell = |wake: OwnedFd| {
            move || {
                // A full counter means that it is raised already.
                let _ = nix::unistd::write(&wake, &1u64.to_ne_bytes());
            }
        };
        let (socket, held) = (self.socket.clone(), session.clone());
        let work = move |sending: &mut Sending| send_whole(&socket, &held, sending);
        let sends = IoThread::start(thread_name("send"), work, tell(wake.as_fd().try_clone_to_owned()?))?;
        let (socket, held) = (self.socket.clone(), session.clone());
        let work = move |arriving: &mut Arriving| receive_whole(&socket, &held, arriving);
        let receives =
            IoThread::start(thread_name("receive"), work, tell(wake.as_fd().try_clone_to_owned()?))?;
        self.threads = Some(Threads { sends, receives });
        Ok(())
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
        self.sending.is_some()
            || self.threads.as_ref().is_some_and(|threads| threads.sends.held() > 0)
            || self.socket.has_output()
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
        result.map_err(|e| self.gone(e))?;
        machine.received(arrived.receiving.seq, arrived.receiving.span.len())?;
        (self.header, self.header_got) = (arrived.header, arrived.header_got);
        if self.header_got == HEADER {
            self.begin(machine)?;
        }
        Ok(true)
    }

    /// Sends what the connection takes. A thread is given chunks until it has `ahead` of them; beyond the first that is all that this does. True: something moved.
    pub(super) fn send(
        &mut self,
        machine: &mut Machine<'_>,
        session: &SessionState,
        gather: &mut Gather,
        ahead: usize,
    ) -> Result<bool, EndReason> {
        let mut worked = false;
        if ahead > 1 && self.threads.is_none() {
            return Ok(false);
        }
        while let Some((sending, result)) = self.threads.as_ref().and_then(|threads| threads.sends.take()) {
            result.map_err(|e| self.gone(e))?;
            worked = true;
            machine.sent(sending.chunk.seq, sending.chunk.len.into());
        }
        if self.has_output() {
            self.socket.flush().map_err(|e| self.gone(e))?;
        }
        let mut budget = TURN;
        while budget > 0 {
            let held = self.threads.as_ref().map_or(0, |threads| threads.sends.held());
            if self.sending.is_none() {
                // A short chunk waits until the thread is done: the relay would have to send it in between.
                let fits = |len| held == 0 || (held < ahead && len >= LONG);
                if !machine.schedule().peek().is_some_and(fits) {
                    break;
                }
                let Some(chunk) = machine.schedule().next_chunk() else { break };
                let flag = if chunk.eager { EAGER_FLAG } else { 0 };
                let (seq, offset, piece) = (chunk.seq, chunk.at, chunk.piece);
                let header = DataHeader { seq, offset, piece, len: chunk.len | flag };
                let mut bytes = [0; HEADER];
                bytes.copy_from_slice(header.as_bytes());
                let sending = Sending { chunk, header: bytes, sent: 0 };
                if let Some(threads) = self.threads.as_ref().filter(|_| u64::from(sending.chunk.len) >= LONG)
                {
                    threads.sends.give(sending);
                    worked = true;
                    break;
                }
                self.sending = Some(sending);
            }
            let Some(sending) = &mut self.sending else { break };
            let whole = HEADER + sending.chunk.len as usize;
            let at = sending.sent.saturating_sub(HEADER) as u64;
            sending.gather(gather);
            // SAFETY: the header lives in `self`; `sending` holds the span, which keeps the client's memory mapped.
            let result = unsafe { self.socket.send(gather) };
            match not_now(result) {
                Ok(Some(n)) => {
                    let data = (sending.sent + n).saturating_sub(HEADER) as u64 - at;
                    session.counters.data_bytes_sent.add(data);
                    sending.sent += n;
                    worked = true;
                    budget = budget.saturating_sub(n);
                    if sending.sent == whole {
                        machine.sent(sending.chunk.seq, sending.chunk.len.into());
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
        let mut taken = 0;
        while taken < TURN && self.wants_input() {
            // One call takes the rest of the chunk and, if all of its memory fits the call, the next header.
            gather.clear();
            let body = self.receiving.as_ref().map_or(0, |r| r.span.len() - r.at);
            if let Some(receiving) = &self.receiving {
                gather_span(&receiving.span, receiving.at, body, gather);
            }
            if gather.bytes() as u64 == body {
                let rest = &mut self.header[self.header_got..];
                gather.push(NonNull::from(&mut *rest).cast(), rest.len());
            }
            // SAFETY: the header lives in `self` and is not borrowed; `receiving` keeps the client's memory mapped, and no reference covers it.
            let result = unsafe { self.socket.receive(gather) };
            let n = match not_now(result) {
                Ok(Some(0)) => return Err(self.gone("closed by the server")),
                Ok(Some(n)) => n,
                Ok(None) => break,
                Err(e) => return Err(self.gone(e)),
            };
            taken += n;
            let data = (n as u64).min(body);
            if let Some(receiving) = &mut self.receiving {
                receiving.at += data;
                machine.received(receiving.seq, data)?;
                session.counters.data_bytes_received.add(data);
                if receiving.at == receiving.span.len() {
                    self.receiving = None;
                }
            }
            self.header_got += n - data as usize;
            if self.header_got == HEADER {
                self.begin(machine)?;
            }
        }
        Ok(taken > 0)
    }

    fn begin(&mut self, machine: &Machine<'_>) -> Result<(), EndReason> {
        let mut header = DataHeader::new_zeroed();
        if let Ok(read) = DataHeader::read_from_bytes(&self.header) {
            header = read;
        }
        self.header_got = 0;
        if header.len > MAX_DATA {
            return Err(EndReason::Server(format!(
                "it sent a piece of {} bytes, more than {MAX_DATA}",
                header.len
            )));
        }
        let span = machine.target(header.seq, header.piece, header.offset, header.len.into())?;
        let receiving = Receiving { seq: header.seq, span, at: 0 };
        match &self.threads {
            Some(threads) if receiving.span.len() >= LONG => {
                threads.receives.give(Arriving { receiving, header: [0; HEADER], header_got: 0 });
            }
            _ if receiving.span.len() > 0 => self.receiving = Some(receiving),
            _ => {}
        }
        Ok(())
    }
}
