//! One data connection: pieces of bulk data out of the client's pages and into them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use protocol::link::{DataHeader, EAGER_FLAG, MAX_DATA};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::hand::Hand;
use super::socket::{Gather, Socket, not_now};
use super::transfer::{Chunk, Inputs, Outputs, Span};
use crate::bridge::state::{SessionState, thread_name};
use crate::bridge::relayed::EndReason;

const HEADER: usize = size_of::<DataHeader>();
/// Bytes moved in one turn, each way: then the relay looks after the others.
const TURN: usize = 4 << 20;
/// Pieces of at least so many bytes are left to a hand, where there is one.
const LONG: u64 = 128 << 10;

#[derive(Debug)]
struct Sending {
    chunk: Chunk,
    header: [u8; HEADER],
    sent: usize,
}

#[derive(Debug)]
struct Receiving {
    seq: u64,
    span: Span,
    at: u64,
}

/// A long piece that a hand receives, and what came of the header behind it.
#[derive(Debug)]
struct Arriving {
    receiving: Receiving,
    header: [u8; HEADER],
    header_got: usize,
}

/// Pieces that a hand may have to send, the one that it is at among them: it need not wait for the relay between two.
pub(super) const AHEAD: usize = 2;

/// The hands of a lane.
#[derive(Debug)]
struct Hands {
    sends: Hand<Sending>,
    receives: Hand<Arriving>,
}

/// Sends a piece to its end.
fn send_whole(socket: &Socket, session: &SessionState, sending: &mut Sending) -> io::Result<()> {
    let mut gather = Gather::new();
    while sending.sent < HEADER + sending.chunk.len as usize {
        sending.gather(session, &mut gather);
        // SAFETY: the header lives in `sending`; the span's memory is mapped as long as the region and the channel are, and `sending` and `session` hold them.
        match not_now(unsafe { socket.send(&mut gather) })? {
            Some(n) => {
                let before = sending.sent.saturating_sub(HEADER);
                sending.sent += n;
                session.counters.data_bytes_sent.add((sending.sent.saturating_sub(HEADER) - before) as u64);
            }
            None => socket.wait(false)?,
        }
    }
    Ok(())
}

/// Receives a piece to its end, and of the next header what is there already.
fn receive_whole(socket: &Socket, session: &SessionState, arriving: &mut Arriving) -> io::Result<()> {
    let mut gather = Gather::new();
    let Arriving { receiving, header, header_got } = arriving;
    while receiving.at < receiving.span.len() {
        let left = receiving.span.len() - receiving.at;
        gather.clear();
        receiving.span.gather(session, receiving.at, left, &mut gather);
        if gather.bytes() as u64 == left {
            gather.push(NonNull::from(&mut *header).cast(), HEADER);
        }
        // SAFETY: the header lives in `arriving` and is not borrowed; client memory is mapped as long as `receiving` and `session` live, and no reference covers it.
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
    fn gather(&mut self, session: &SessionState, gather: &mut Gather) {
        gather.clear();
        if self.sent < HEADER {
            let rest = &mut self.header[self.sent..];
            gather.push(NonNull::from(&mut *rest).cast(), rest.len());
        }
        let at = self.sent.saturating_sub(HEADER) as u64;
        self.chunk.span.gather(session, self.chunk.at + at, u64::from(self.chunk.len) - at, gather);
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Lane {
    /// Its threads end before the rest goes; [`Drop`] has closed the connection by then.
    hands: Option<Hands>,
    socket: Arc<Socket>,
    index: usize,
    sending: Option<Sending>,
    header: [u8; HEADER],
    header_got: usize,
    receiving: Option<Receiving>,
    /// What the relay's epoll watches: input, room to send.
    pub(super) watches: (bool, bool),
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.socket.shut_down();
    }
}

/// What a turn at sending came to.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Sent {
    pub(super) worked: bool,
    /// The data of at least one command is complete.
    pub(super) completed: bool,
}

impl Lane {
    pub(super) fn new(socket: Socket, index: usize) -> Lane {
        let (header, header_got) = ([0; HEADER], 0);
        let socket = Arc::new(socket);
        let watches = (true, false);
        Lane { hands: None, socket, index, sending: None, header, header_got, receiving: None, watches }
    }

    /// Gives the lane threads of its own for long pieces. They write to `wake` when they are done with one.
    pub(super) fn take_hands(&mut self, session: &Arc<SessionState>, wake: &OwnedFd) -> io::Result<()> {
        let tell = |wake: OwnedFd| {
            move || {
                // A full counter means that it is raised already.
                let _ = nix::unistd::write(&wake, &1u64.to_ne_bytes());
            }
        };
        let (socket, held) = (self.socket.clone(), session.clone());
        let work = move |sending: &mut Sending| send_whole(&socket, &held, sending);
        let sends = Hand::start(thread_name("send"), work, tell(wake.as_fd().try_clone_to_owned()?))?;
        let (socket, held) = (self.socket.clone(), session.clone());
        let work = move |arriving: &mut Arriving| receive_whole(&socket, &held, arriving);
        let receives = Hand::start(thread_name("receive"), work, tell(wake.as_fd().try_clone_to_owned()?))?;
        self.hands = Some(Hands { sends, receives });
        Ok(())
    }

    /// Whether the relay is to receive here: not while a hand does.
    pub(super) fn wants_in(&self) -> bool {
        self.hands.as_ref().is_none_or(|hands| hands.receives.held() == 0)
    }

    /// Whether a hand is sending, or has sent and was not asked yet.
    pub(super) fn is_sending(&self) -> bool {
        self.hands.as_ref().is_some_and(|hands| hands.sends.held() > 0)
    }

    /// Takes over what a hand has received. True: there was something.
    pub(super) fn collect(&mut self, outputs: &mut Outputs) -> Result<bool, EndReason> {
        let Some((arrived, result)) = self.hands.as_ref().and_then(|hands| hands.receives.take()) else {
            return Ok(false);
        };
        result.map_err(|e| self.gone(e))?;
        outputs.received(arrived.receiving.seq, arrived.receiving.span.len());
        (self.header, self.header_got) = (arrived.header, arrived.header_got);
        if self.header_got == HEADER {
            self.begin(outputs)?;
        }
        Ok(true)
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Whether a chunk waits for room.
    pub(super) fn wants_out(&self) -> bool {
        self.sending.is_some()
    }

    fn gone(&self, what: impl std::fmt::Display) -> EndReason {
        EndReason::Gone(format!("data connection {}: {what}", self.index))
    }

    /// Sends what the connection takes. A hand is given tasks until it has `ahead` of them; beyond the first that is all that this does.
    pub(super) fn send(
        &mut self,
        session: &SessionState,
        inputs: &mut Inputs,
        gather: &mut Gather,
        ahead: usize,
    ) -> Result<Sent, EndReason> {
        let mut done = Sent::default();
        if ahead > 1 && self.hands.is_none() {
            return Ok(done);
        }
        while let Some((sending, result)) = self.hands.as_ref().and_then(|hands| hands.sends.take()) {
            result.map_err(|e| self.gone(e))?;
            done.worked = true;
            done.completed |= inputs.sent(&sending.chunk);
        }
        let mut budget = TURN;
        while budget > 0 {
            let held = self.hands.as_ref().map_or(0, |hands| hands.sends.held());
            if self.sending.is_none() {
                // A short piece waits until the hand is done: the relay would have to send it in between.
                let fits = |len| held == 0 || (held < ahead && len >= LONG);
                if !inputs.peek().is_some_and(fits) {
                    break;
                }
                let Some(chunk) = inputs.next_chunk() else { break };
                let flag = if chunk.eager { EAGER_FLAG } else { 0 };
                let (seq, offset, piece) = (chunk.seq, chunk.at, chunk.piece);
                let header = DataHeader { seq, offset, piece, len: chunk.len | flag };
                let mut bytes = [0; HEADER];
                bytes.copy_from_slice(header.as_bytes());
                let sending = Sending { chunk, header: bytes, sent: 0 };
                if let Some(hands) = self.hands.as_ref().filter(|_| u64::from(sending.chunk.len) >= LONG) {
                    hands.sends.give(sending);
                    done.worked = true;
                    break;
                }
                self.sending = Some(sending);
            }
            let Some(sending) = &mut self.sending else { break };
            let whole = HEADER + sending.chunk.len as usize;
            let at = sending.sent.saturating_sub(HEADER) as u64;
            sending.gather(session, gather);
            // SAFETY: the header lives in `self`; the span's memory is mapped as long as the region and the channel are, and `sending` and `session` hold them.
            let result = unsafe { self.socket.send(gather) };
            match not_now(result) {
                Ok(Some(n)) => {
                    let data = (sending.sent + n).saturating_sub(HEADER) as u64 - at;
                    session.counters.data_bytes_sent.add(data);
                    sending.sent += n;
                    done.worked = true;
                    budget = budget.saturating_sub(n);
                    if sending.sent == whole {
                        done.completed |= inputs.sent(&sending.chunk);
                        self.sending = None;
                    }
                }
                Ok(None) => break,
                Err(e) => return Err(self.gone(e)),
            }
        }
        Ok(done)
    }

    /// Receives what there is. True: there was something.
    pub(super) fn receive(
        &mut self,
        session: &SessionState,
        outputs: &mut Outputs,
        gather: &mut Gather,
    ) -> Result<bool, EndReason> {
        let mut taken = 0;
        while taken < TURN && self.wants_in() {
            // One call takes the rest of the piece and, if all of that piece's memory fits the call, the next header.
            gather.clear();
            let body = self.receiving.as_ref().map_or(0, |r| r.span.len() - r.at);
            if let Some(receiving) = &self.receiving {
                receiving.span.gather(session, receiving.at, body, gather);
            }
            if gather.bytes() as u64 == body {
                let rest = &mut self.header[self.header_got..];
                gather.push(NonNull::from(&mut *rest).cast(), rest.len());
            }
            // SAFETY: the header lives in `self` and is not borrowed; client memory is mapped as long as `receiving` and `session` live, and no reference covers it.
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
                outputs.received(receiving.seq, data);
                session.counters.data_bytes_received.add(data);
                if receiving.at == receiving.span.len() {
                    self.receiving = None;
                }
            }
            self.header_got += n - data as usize;
            if self.header_got == HEADER {
                self.begin(outputs)?;
            }
        }
        Ok(taken > 0)
    }

    fn begin(&mut self, outputs: &Outputs) -> Result<(), EndReason> {
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
        let span = outputs.target(header.seq, header.piece, header.offset, header.len.into())?;
        let receiving = Receiving { seq: header.seq, span, at: 0 };
        match &self.hands {
            Some(hands) if receiving.span.len() >= LONG => {
                hands.receives.give(Arriving { receiving, header: [0; HEADER], header_got: 0 });
            }
            _ if receiving.span.len() > 0 => self.receiving = Some(receiving),
            _ => {}
        }
        Ok(())
    }
}
