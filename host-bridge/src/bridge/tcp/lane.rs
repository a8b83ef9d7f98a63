//! One data connection: pieces of bulk data out of the client's pages and into them.

use std::ptr::NonNull;

use protocol::link::{DataHeader, MAX_DATA};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::EndReason;
use super::socket::{Gather, Socket, not_now};
use super::transfer::{Chunk, Inputs, Outputs, Span};
use crate::bridge::core::Core;

const HEADER: usize = size_of::<DataHeader>();
/// Bytes moved in one turn, each way: then the relay looks after the others.
const TURN: usize = 4 << 20;

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

/// See the module's text.
#[derive(Debug)]
pub(super) struct Lane {
    socket: Socket,
    index: usize,
    sending: Option<Sending>,
    header: [u8; HEADER],
    header_got: usize,
    receiving: Option<Receiving>,
    /// Whether the relay's epoll watches for room to send.
    pub(super) watches_out: bool,
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
        Lane { socket, index, sending: None, header, header_got, receiving: None, watches_out: false }
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

    /// Sends what the connection takes.
    pub(super) fn send(
        &mut self,
        core: &Core,
        inputs: &mut Inputs,
        gather: &mut Gather,
    ) -> Result<Sent, EndReason> {
        let mut done = Sent::default();
        let mut budget = TURN;
        while budget > 0 {
            if self.sending.is_none() {
                let Some(chunk) = inputs.next_chunk() else { break };
                let header =
                    DataHeader { seq: chunk.seq, offset: chunk.at, piece: chunk.piece, len: chunk.len };
                let mut bytes = [0; HEADER];
                bytes.copy_from_slice(header.as_bytes());
                self.sending = Some(Sending { chunk, header: bytes, sent: 0 });
            }
            let Some(sending) = &mut self.sending else { break };
            let (len, whole) = (u64::from(sending.chunk.len), HEADER + sending.chunk.len as usize);
            gather.clear();
            if sending.sent < HEADER {
                let rest = &mut sending.header[sending.sent..];
                gather.push(NonNull::from(&mut *rest).cast(), rest.len());
            }
            let at = sending.sent.saturating_sub(HEADER) as u64;
            sending.chunk.span.gather(core, sending.chunk.at + at, len - at, gather);
            // SAFETY: the header lives in `self`; the span's memory is mapped as long as the region and the channel are, and `sending` and `core` hold them.
            let result = unsafe { self.socket.send(gather) };
            match not_now(result) {
                Ok(Some(n)) => {
                    let data = (sending.sent + n).saturating_sub(HEADER) as u64 - at;
                    core.counters.data_bytes_sent.add(data);
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
        core: &Core,
        outputs: &mut Outputs,
        gather: &mut Gather,
    ) -> Result<bool, EndReason> {
        let mut taken = 0;
        while taken < TURN {
            // One call takes the rest of the piece and, if all of that piece's memory fits the call, the next header.
            gather.clear();
            let body = self.receiving.as_ref().map_or(0, |r| r.span.len() - r.at);
            if let Some(receiving) = &self.receiving {
                receiving.span.gather(core, receiving.at, body, gather);
            }
            if gather.bytes() as u64 == body {
                let rest = &mut self.header[self.header_got..];
                gather.push(NonNull::from(&mut *rest).cast(), rest.len());
            }
            // SAFETY: the header lives in `self` and is not borrowed; client memory is mapped as long as `receiving` and `core` live, and no reference covers it.
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
                core.counters.data_bytes_received.add(data);
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
        if span.len() > 0 {
            self.receiving = Some(Receiving { seq: header.seq, span, at: 0 });
        }
        Ok(())
    }
}
