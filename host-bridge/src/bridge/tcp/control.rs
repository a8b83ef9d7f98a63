//! The control connection: frames out, coalesced in one buffer, and frames in.

use std::time::Instant;

use protocol::Status;
use protocol::channel::{MAX_PAYLOAD, Record};
use protocol::handle::{ContextId, StreamId};
use protocol::link::{DataGrant, DataSent, FrameHeader, ProgressUpdate, ReplyHeader, frame, progress};
use protocol::trace::Stage;
use zerocopy::IntoBytes;

use super::socket::{Socket, not_now};
use super::transfer::{Inputs, Outputs};
use crate::bridge::state::{SessionState, Waker};
use crate::bridge::relayed::EndReason;
use crate::framing::{FrameReader, split_struct};

/// Unsent bytes above which no more records are taken off the ring.
const HIGH_WATER: usize = 256 << 10;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Control {
    socket: Socket,
    out: Vec<u8>,
    sent: usize,
    reader: FrameReader,
    /// The server has sent this command's data; until it has arrived nothing further is taken.
    held: Option<DataSent>,
    /// When something last came, on any connection.
    pub(super) heard: Instant,
    /// When something was last sent here.
    pub(super) said: Instant,
    /// What the relay's epoll watches: input, output.
    pub(super) watches: (bool, bool),
}

/// A frame being written.
#[derive(Debug)]
pub(super) struct Begun(usize);

impl Control {
    pub(super) fn new(socket: Socket) -> Control {
        let now = Instant::now();
        let out = Vec::with_capacity(2 * HIGH_WATER);
        let watches = (true, false);
        Control {
            socket,
            out,
            sent: 0,
            reader: FrameReader::new(),
            held: None,
            heard: now,
            said: now,
            watches,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Whether there is room for more records.
    pub(super) fn has_room(&self) -> bool {
        self.out.len() - self.sent < HIGH_WATER
    }

    pub(super) fn wants_out(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Whether frames are taken now.
    pub(super) fn wants_in(&self) -> bool {
        self.held.is_none()
    }

    pub(super) fn begin(&mut self, kind: u32) -> Begun {
        let at = self.out.len();
        self.out.extend_from_slice(FrameHeader { kind, len: 0 }.as_bytes());
        Begun(at)
    }

    /// Appends a record to the frame begun.
    pub(super) fn record(&mut self, record: Record, body: &[u8]) {
        let size = protocol::channel::RECORD_HEADER + body.len();
        self.out.extend_from_slice(&record.to_bytes(size as u32));
        self.out.extend_from_slice(body);
    }

    pub(super) fn finish(&mut self, begun: Begun) {
        let len = (self.out.len() - begun.0 - size_of::<FrameHeader>()) as u32;
        self.out[begun.0 + 4..begun.0 + 8].copy_from_slice(&len.to_le_bytes());
    }

    /// Queues a whole frame.
    pub(super) fn frame(&mut self, kind: u32, body: &[u8]) {
        let begun = self.begin(kind);
        self.out.extend_from_slice(body);
        self.finish(begun);
    }

    /// Sends what the connection takes. True: it took something.
    pub(super) fn send(&mut self, session: &SessionState, now: Instant) -> Result<bool, EndReason> {
        let mut worked = false;
        while self.wants_out() {
            match not_now(self.socket.send_bytes(&self.out[self.sent..])) {
                Ok(Some(n)) => {
                    self.sent += n;
                    self.said = now;
                    worked = true;
                    session.counters.control_bytes_sent.add(n as u64);
                }
                Ok(None) => break,
                Err(e) => return Err(EndReason::Gone(e.to_string())),
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        } else if self.sent >= HIGH_WATER {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(worked)
    }

    /// Reads once. True: there was something.
    pub(super) fn read(&mut self, session: &SessionState) -> Result<bool, EndReason> {
        match not_now(self.reader.fill(&mut &self.socket)) {
            Ok(Some(0)) => Err(EndReason::Gone("the server closed the connection".into())),
            Ok(Some(n)) => {
                session.counters.control_bytes_received.add(n as u64);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(e) => Err(EndReason::Gone(e.to_string())),
        }
    }

    /// Acts on the frames that are here, as far as the order of data allows. True: there was one.
    pub(super) fn take_frames(
        &mut self,
        session: &SessionState,
        waiting: &mut [u64],
        outputs: &mut Outputs,
        inputs: &mut Inputs,
    ) -> Result<bool, EndReason> {
        let mut worked = false;
        let mut waker = session.waker();
        let mut published = false;
        loop {
            if let Some(held) = self.held {
                if !outputs.settle(held.seq, held.bytes)? {
                    break;
                }
                self.held = None;
            }
            let Some((kind, body)) =
                self.reader.next_frame().map_err(|e| EndReason::Server(e.to_string()))?
            else {
                break;
            };
            session.counters.frames_received.add(1);
            worked = true;
            match kind {
                frame::REPLY => reply(session, waiting, body, &mut waker)?,
                frame::PROGRESS => {
                    // Read one by one: a frame begins anywhere in the buffer, so its body may lie at any address.
                    let updates = body.chunks_exact(size_of::<ProgressUpdate>());
                    if !updates.remainder().is_empty() {
                        return Err(EndReason::Server(format!("a progress frame of {} bytes", body.len())));
                    }
                    for update in updates {
                        let (update, _) =
                            split_struct(update).map_err(|e| EndReason::Server(e.to_string()))?;
                        publish(session, &update)?;
                    }
                    published = true;
                }
                frame::DATA_SENT => {
                    let (sent, _) = split_struct(body).map_err(|e| EndReason::Server(e.to_string()))?;
                    self.held = Some(sent);
                }
                frame::DATA_GRANT => {
                    let grants = body.chunks_exact(size_of::<DataGrant>());
                    if !grants.remainder().is_empty() {
                        return Err(EndReason::Server(format!("a frame of grants of {} bytes", body.len())));
                    }
                    for grant in grants {
                        let (DataGrant { seq, piece, upto, .. }, _) =
                            split_struct(grant).map_err(|e| EndReason::Server(e.to_string()))?;
                        inputs.grant(seq, piece, upto);
                    }
                }
                frame::DATA_PLACED => {
                    let bytes = body.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
                    if !bytes.is_some_and(|bytes| inputs.placed(bytes)) {
                        return Err(EndReason::Server(format!(
                            "it has placed {bytes:?} eager bytes, more than were sent"
                        )));
                    }
                }
                frame::ALIVE => {}
                frame::BYE => return Err(EndReason::Bye(String::from_utf8_lossy(body).into_owned())),
                other => return Err(EndReason::Server(format!("it sent a frame of unknown kind {other}"))),
            }
        }
        if published && session.header().progress_sleep.take() {
            waker.wake(protocol::channel::Header::PROGRESS_SLEEP_OFFSET);
        }
        Ok(worked)
    }
}

pub(in crate::bridge) fn reply(
    session: &SessionState,
    waiting: &mut [u64],
    body: &[u8],
    waker: &mut Waker<'_>,
) -> Result<(), EndReason> {
    let (header, payload) =
        split_struct::<ReplyHeader>(body).map_err(|e| EndReason::Server(e.to_string()))?;
    let ReplyHeader { seq, slot, status } = header;
    let awaited = waiting.get_mut(slot as usize).filter(|awaited| **awaited == seq && seq != 0);
    let (Some(awaited), Some(reply_slot)) =
        (awaited, u16::try_from(slot).ok().and_then(|slot| session.channel.view.slot(slot)))
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
    if reply_slot.complete(seq, Status(status), payload) {
        waker.wake(session.channel.view.geometry().slot_offset(slot as usize) as u64);
    }
    Ok(())
}

pub(in crate::bridge) fn publish(session: &SessionState, update: &ProgressUpdate) -> Result<(), EndReason> {
    let area = session.channel.view.progress();
    let wrong = || {
        EndReason::Server(format!("a progress update of kind {} for index {:#x}", update.kind, update.index))
    };
    match update.kind {
        progress::EXECUTED => area.set_executed(update.seq),
        progress::STREAM => {
            let word = area.stream(StreamId(update.index)).ok_or_else(wrong)?;
            word.store(update.seq, std::sync::atomic::Ordering::Release);
        }
        progress::ERROR => {
            let (context, sticky) = (update.index & !(1 << 31), update.index >> 31 != 0);
            let word = area.error(ContextId(context)).ok_or_else(wrong)?;
            match u32::try_from(update.value).map_err(|_| wrong())? {
                0 => word.clear(),
                status => word.set(Status(status), sticky, update.seq),
            }
        }
        progress::OUTPUT => area.set_output(update.value),
        // The bridge knows by itself what it has sent.
        progress::RELEASED => {}
        _ => return Err(wrong()),
    }
    Ok(())
}
