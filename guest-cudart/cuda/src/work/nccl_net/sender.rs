//! The sending end of a connection.

use std::collections::VecDeque;

use crate::abi::result::Result as Cuda;
use crate::process::context::Context;
use crate::work::nccl_net::direct::{self, Key, Line, Opening, Preparing, Sending};
use crate::work::nccl_net::frames::Frame;
use crate::work::nccl_net::places::{Place, give_to_server};
use crate::work::nccl_net::requests::Requests;
use crate::work::nccl_net::socket::{Broken, Connection};
use client::counters::{COUNTERS, add};
use client::ops::direct::{DirectTicket, MAX_PIECE, PIECES};
use client::{Status, log};

/// Size of what is put on the socket at a time, in bytes.
const PART: u64 = 256 << 10;
/// Pieces that were sent and are not known to be landed. The servers have room for twice as many, because the
/// sending one may take a moment longer to see that a buffer is free.
const WINDOW: u64 = PIECES as u64 / 2;

/// See the module.
pub(crate) struct Sender {
    here: Option<&'static Context>,
    pub(super) connection: Connection,
    direct: Sending,
    /// What the receiver has room for, one entry for each message.
    credits: VecDeque<Credit>,
    messages: VecDeque<Message>,
    /// How many of them are on their way completely. Messages begin one after the other.
    begun: usize,
    /// Pieces of the direct connection that were landed.
    landed: u64,
    /// Messages that were accepted, and those of them that the receiver says it has.
    accepted: u64,
    received: u64,
}

#[derive(Clone, Copy)]
struct Credit {
    most: u64,
    direct: bool,
}

struct Message {
    request: usize,
    at: u64,
    len: u64,
    /// Bytes whose way has begun.
    begun: u64,
    way: Way,
    /// The end of its frame and of its bytes on the socket.
    end: u64,
}

enum Way {
    /// Over the direct connection. Done when so many of its pieces have been read.
    Direct(u64),
    /// Over the socket.
    Socket,
}

impl Sender {
    /// `here`: the context that NCCL uses.
    pub fn new(mut connection: Connection, here: Option<&'static Context>) -> Sender {
        let useful = here.ok_or_else(|| "the sender uses no device".into());
        let useful = useful.and_then(|context| direct::is_useful(context).map(|()| context));
        let (credits, messages) = Default::default();
        let (begun, landed, accepted, received) = (0, 0, 0, 0);
        let direct = match &useful {
            Ok(context) => Sending::Key(Key::of(context.server)),
            Err(why) => {
                connection.put(&Frame::NoKey(why.clone()));
                Sending::None
            }
        };
        let sender =
            Sender { here, connection, direct, credits, messages, begun, landed, accepted, received };
        useful.err().inspect(|why| sender.tell_no_direct(why));
        sender
    }

    /// Whether it is clear which way messages take, and everything is ready for them.
    pub fn is_settled(&self) -> bool {
        matches!(self.direct, Sending::Open(_) | Sending::None)
    }

    /// Begins to send a message, if the receiver has room for it. False: not now.
    pub fn send(&mut self, request: usize, place: Place, at: u64, len: u64) -> Result<bool, Broken> {
        let Some(Credit { most, direct }) = self.credits.front().copied() else {
            return if self.connection.is_over() { Err(closed()) } else { Ok(false) };
        };
        if len > most {
            return Err(Broken::Here(format!(
                "a message of {len} bytes where the receiver has room for {most}"
            )));
        }
        self.credits.pop_front();
        let (way, frame) = match (place, &self.direct) {
            (Place::Named, Sending::Open(_)) if direct => {
                give_to_server(at, len).map_err(here)?;
                add(&COUNTERS.nccl_direct_bytes, len);
                (Way::Direct(0), Frame::Direct(len))
            }
            _ => {
                add(&COUNTERS.nccl_staged_bytes, len);
                (Way::Socket, Frame::Bytes(len))
            }
        };
        // Bytes of an earlier message that are still to come precede it on the socket.
        let end = if self.begun == self.messages.len() { self.announce(&frame) } else { 0 };
        self.accepted += 1;
        self.messages.push_back(Message { request, at, len, begun: 0, way, end });
        Ok(true)
    }

    fn announce(&mut self, frame: &Frame) -> u64 {
        self.connection.put(frame);
        self.connection.end_of_due()
    }

    /// Does what can be done without waiting.
    pub fn progress(&mut self, requests: &mut Requests) -> Result<(), Broken> {
        self.connection.read()?;
        while let Some(frame) = self.connection.take()? {
            self.hear(frame)?;
        }
        self.settle_direct();
        while self.begun < self.messages.len() && self.begin().map_err(here)? {
            self.begun += 1;
        }
        self.connection.flush()?;
        let read = match &mut self.direct {
            Sending::Open(line) => {
                line.progress.look().map_err(here)?;
                line.progress.done()
            }
            _ => 0,
        };
        while let Some(message) = self.messages.front().filter(|_| self.begun > 0)
            && self.connection.has_flushed(message.end)
            && match &message.way {
                Way::Direct(pieces) => read >= *pieces,
                Way::Socket => true,
            }
        {
            requests.done(message.request, message.len);
            self.messages.pop_front();
            self.begun -= 1;
        }
        if self.connection.is_over() && !(self.messages.is_empty() && self.is_settled()) {
            return Err(closed());
        }
        Ok(())
    }

    fn hear(&mut self, frame: Frame) -> Result<(), Broken> {
        match (frame, &self.direct) {
            (Frame::Ticket(ticket), Sending::Known) => self.open(ticket),
            (Frame::NoTicket(why), Sending::Known) => self.no_direct(&why),
            (Frame::Credit(most), _) => self.credit(most, false)?,
            (Frame::DirectCredit(most), Sending::Open(_)) => self.credit(most, true)?,
            (Frame::Landed(landed), Sending::Open(line))
                if landed >= self.landed && landed <= line.progress.begun() =>
            {
                self.landed = landed;
            }
            (Frame::Received(received), _) if received >= self.received && received <= self.accepted => {
                self.received = received;
            }
            (Frame::Failed(why), _) => return Err(Broken::Peer(why)),
            _ => return Err(Broken::Peer("the receiver sent a frame that is not due".into())),
        }
        Ok(())
    }

    fn credit(&mut self, most: u64, direct: bool) -> Result<(), Broken> {
        if self.credits.len() >= Requests::MOST {
            return Err(Broken::Peer("the receiver gave too many credits".into()));
        }
        self.credits.push_back(Credit { most, direct });
        Ok(())
    }

    fn tell_no_direct(&self, why: &str) {
        log::info(format_args!(
            "NCCL's messages to {} pass through this machine: {why}",
            self.connection.peer()
        ));
    }

    fn no_direct(&mut self, why: &str) {
        self.tell_no_direct(why);
        self.direct = Sending::None;
    }

    fn not_open(&mut self, why: &str) {
        self.connection.put(&Frame::NotOpen(why.into()));
        self.no_direct(why);
    }

    fn open(&mut self, ticket: DirectTicket) {
        // Without a context there is no key, and so no ticket.
        let opening = self.here.map(|context| Opening::new(context, ticket));
        match opening.unwrap_or_else(|| Err("the sender uses no device".into())) {
            Ok(opening) => self.direct = Sending::Opening(opening),
            Err(why) => self.not_open(&why),
        }
    }

    /// The direct connection, if there is one.
    pub fn line(&self) -> Option<&Line> {
        if let Sending::Open(line) = &self.direct { Some(line) } else { None }
    }

    fn settle_direct(&mut self) {
        match &mut self.direct {
            Sending::Key(key) => match key.answer() {
                Some(Ok(known)) => {
                    self.connection.put(&Frame::Key(known));
                    self.direct = Sending::Known;
                }
                Some(Err(why)) => {
                    self.connection.put(&Frame::NoKey(why.clone()));
                    self.no_direct(&why);
                }
                None => {}
            },
            Sending::Opening(opening) => match opening.answer() {
                Some(Ok(line)) => self.direct = Sending::Preparing(Preparing::new(&line), line),
                Some(Err(why)) => self.not_open(&why),
                None => {}
            },
            Sending::Preparing(preparing, _) => match preparing.answer() {
                Some(Ok(())) => {
                    if let Sending::Preparing(_, line) = std::mem::replace(&mut self.direct, Sending::None) {
                        self.direct = Sending::Open(line);
                    }
                    log::info(format_args!(
                        "NCCL's messages to {} go from server to server",
                        self.connection.peer()
                    ));
                    self.connection.put(&Frame::Open);
                }
                Some(Err(why)) => self.not_open(&why),
                None => {}
            },
            _ => {}
        }
    }

    /// Continues the first message that is not on its way completely. True: now it is.
    fn begin(&mut self) -> Cuda<bool> {
        let Some(message) = self.messages.get_mut(self.begun) else { return Ok(false) };
        if message.end == 0 {
            let frame = match message.way {
                Way::Direct(..) => Frame::Direct(message.len),
                Way::Socket => Frame::Bytes(message.len),
            };
            self.connection.put(&frame);
            message.end = self.connection.end_of_due();
        }
        match (&mut message.way, &mut self.direct) {
            (Way::Direct(last), Sending::Open(line)) => {
                while message.begun < message.len && line.progress.begun() - self.landed < WINDOW {
                    let len = (message.len - message.begun).min(MAX_PIECE);
                    line.send(message.at + message.begun, len)?;
                    *last = line.progress.begun();
                    message.begun += len;
                }
                Ok(message.begun == message.len)
            }
            (Way::Socket, _) => {
                while message.begun < message.len && self.connection.has_room() {
                    let len = (message.len - message.begun).min(PART);
                    let at = message.at + message.begun;
                    // SAFETY: memory that NCCL has given to the plugin until the message is sent. It is read
                    // here and not by the kernel, which cannot resolve the page faults of mirrored memory.
                    self.connection.put_bytes(|due| unsafe {
                        due.extend_from_slice(std::slice::from_raw_parts(at as *const u8, len as usize));
                    });
                    message.begun += len;
                }
                message.end = self.connection.end_of_due();
                Ok(message.begun == message.len)
            }
            (Way::Direct(..), _) => Ok(false),
        }
    }

    /// Whether the receiver has everything, or never will. Pieces may still be in a server's buffers when
    /// their requests are done, and are lost with the session if the process ends. With requests that are not
    /// done, this end gives up.
    pub fn is_delivered(&self) -> bool {
        self.received == self.accepted || !self.messages.is_empty() || self.connection.is_over()
    }

    /// Tells the receiver that there will be no more messages.
    pub fn say_goodbye(&mut self) {
        self.connection.put(&Frame::Bye);
    }
}

fn here(status: Status) -> Broken {
    Broken::Here(format!("CUDA answers {status}"))
}

fn closed() -> Broken {
    Broken::Peer("the receiver has closed the connection".into())
}
