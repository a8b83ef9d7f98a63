//! The receiving end of a connection.

use std::collections::VecDeque;

use crate::abi::result::Result as Cuda;
use crate::memory::managed::landing::Landing;
use crate::process::context::Context;
use crate::work::nccl_net::direct::{self, Line, Offering, Preparing, Receiving};
use crate::work::nccl_net::frames::Frame;
use crate::work::nccl_net::places::{Place, begin_landing, end_landing};
use crate::work::nccl_net::requests::Requests;
use crate::work::nccl_net::socket::{Broken, Connection};
use client::log;
use client::ops::direct::{MAX_PIECE, PIECES};

/// The sender is told of landed pieces when there are so many.
const TELL_AFTER: u64 = PIECES as u64 / 8;

/// See the module.
pub(crate) struct Receiver {
    pub(super) connection: Connection,
    direct: Receiving,
    /// The context in whose memory pieces are landed.
    here: Option<&'static Context>,
    /// What NCCL has posted.
    posted: VecDeque<Posted>,
    /// How many of them the sender knows about, and for how many its message has been announced.
    credited: usize,
    announced: usize,
    /// Pieces that the sender knows to be landed.
    confirmed: u64,
    /// Messages that are received, and those of them that the sender knows of.
    received: u64,
    told_received: u64,
    /// The sender sends no more messages.
    bye: bool,
}

struct Posted {
    request: usize,
    place: Place,
    at: u64,
    most: u64,
    /// Whether its message may take the direct connection.
    direct: bool,
    /// Its message, once it has been announced.
    message: Option<Message>,
}

struct Message {
    len: u64,
    /// Bytes for which the server knows where they go, or which have been read from the socket.
    taken: u64,
    way: Way,
}

enum Way {
    /// Done when so many pieces have been landed. The server knows where they go once there is the second.
    Direct(u64, Option<Landing>),
    /// Done when its bytes have been read.
    Socket,
}

impl Receiver {
    /// `here`: the context that NCCL uses.
    pub fn new(connection: Connection, here: Option<&'static Context>) -> Receiver {
        Receiver {
            connection,
            direct: Receiving::Unknown,
            here,
            posted: VecDeque::new(),
            credited: 0,
            announced: 0,
            confirmed: 0,
            received: 0,
            told_received: 0,
            bye: false,
        }
    }

    /// Whether it is clear which way messages take, and everything is ready for them.
    pub fn is_settled(&self) -> bool {
        matches!(self.direct, Receiving::Open(_) | Receiving::None)
    }

    /// Takes memory for the next message.
    pub fn receive(&mut self, request: usize, place: Place, at: u64, most: u64) {
        self.posted.push_back(Posted { request, place, at, most, direct: false, message: None });
    }

    /// Does what can be done without waiting.
    pub fn progress(&mut self, requests: &mut Requests) -> Result<(), Broken> {
        let here = |status| Broken::Here(format!("CUDA answers {status}"));
        loop {
            self.connection.read()?;
            self.settle_direct();
            self.give_credits();
            // The bytes of a message precede what comes after it.
            let mut worked = self.take_bytes();
            while self.is_between_messages()
                && let Some(frame) = self.connection.take()?
            {
                self.hear(frame)?;
                worked = true;
            }
            if !worked {
                break;
            }
        }
        self.tell_server().map_err(here)?;
        let landed = match &mut self.direct {
            Receiving::Open(line) => {
                line.progress.look().map_err(here)?;
                line.progress.done()
            }
            _ => 0,
        };
        if landed - self.confirmed >= TELL_AFTER {
            self.confirmed = landed;
            self.connection.put(&Frame::Landed(landed));
        }
        while let Some(Posted { request, message: Some(message), .. }) = self.posted.front()
            && message.taken == message.len
            && match &message.way {
                Way::Direct(pieces, _) => landed >= *pieces,
                Way::Socket => true,
            }
        {
            let (request, len) = (*request, message.len);
            if let Some(Posted { at, message: Some(message), .. }) = self.posted.pop_front()
                && let Way::Direct(_, Some(landing)) = message.way
            {
                end_landing(landing, at, len).map_err(here)?;
            }
            requests.done(request, len);
            self.credited -= 1;
            self.announced -= 1;
            self.received += 1;
        }
        if self.posted.is_empty() && self.received > self.told_received {
            self.told_received = self.received;
            self.connection.put(&Frame::Received(self.received));
        }
        // A sender that has said goodbye may be gone.
        self.connection.flush().or_else(|broken| if self.bye { Ok(()) } else { Err(broken) })?;
        if let Receiving::Open(line) = &self.direct
            && !line.progress.is_idle()
            && line.has_failed().map_err(here)?
        {
            return Err(Broken::Peer("the direct connection of the servers was lost".into()));
        }
        let over = self.bye || self.connection.is_over();
        let waits = self.announced < self.posted.len() || !self.is_between_messages() || !self.is_settled();
        if over && waits {
            return Err(Broken::Peer("the sender has closed the connection".into()));
        }
        Ok(())
    }

    /// Whether the next bytes of the socket are a frame.
    fn is_between_messages(&self) -> bool {
        let last = self.announced.checked_sub(1).and_then(|last| self.posted.get(last));
        let message = last.and_then(|posted| posted.message.as_ref());
        message.is_none_or(|message| matches!(message.way, Way::Direct(..)) || message.taken == message.len)
    }

    fn hear(&mut self, frame: Frame) -> Result<(), Broken> {
        match (frame, &mut self.direct) {
            (Frame::Key(key), Receiving::Unknown) => self.offer(key),
            (Frame::NoKey(why), Receiving::Unknown) => self.no_direct(&why),
            (Frame::Open, direct @ Receiving::Offered(_)) => {
                if let Receiving::Offered(line) = std::mem::replace(direct, Receiving::None) {
                    *direct = Receiving::Open(line);
                }
            }
            (Frame::NotOpen(why), Receiving::Offered(_)) => self.no_direct(&why),
            (Frame::Direct(len), _) => self.announce(len, true)?,
            (Frame::Bytes(len), _) => self.announce(len, false)?,
            (Frame::Bye, _) => self.bye = true,
            (Frame::Failed(why), _) => return Err(Broken::Peer(why)),
            _ => return Err(Broken::Peer("the sender sent a frame that is not due".into())),
        }
        Ok(())
    }

    fn announce(&mut self, len: u64, direct: bool) -> Result<(), Broken> {
        let room = self.posted.get_mut(self.announced).filter(|_| self.announced < self.credited);
        let Some(posted) = room.filter(|posted| len <= posted.most && (posted.direct || !direct)) else {
            return Err(Broken::Peer("the sender sent a message for which there is no room".into()));
        };
        let way = if direct { Way::Direct(0, None) } else { Way::Socket };
        posted.message = Some(Message { len, taken: 0, way });
        self.announced += 1;
        Ok(())
    }

    fn no_direct(&mut self, why: &str) {
        if self.here.is_some() {
            log::info(format_args!(
                "NCCL's messages from {} pass through this machine: {why}",
                self.connection.peer()
            ));
        }
        self.direct = Receiving::None;
    }

    fn settle_direct(&mut self) {
        match &mut self.direct {
            Receiving::Offering(offering) => match offering.answer() {
                Some(Ok((line, ticket))) => {
                    self.direct = Receiving::Preparing(Preparing::new(&line), line, ticket);
                }
                Some(Err(why)) => self.refuse(&why),
                None => {}
            },
            Receiving::Preparing(preparing, ..) => match preparing.answer() {
                Some(Ok(())) => {
                    let direct = std::mem::replace(&mut self.direct, Receiving::None);
                    if let Receiving::Preparing(_, line, ticket) = direct {
                        self.connection.put(&Frame::Ticket(ticket));
                        self.direct = Receiving::Offered(line);
                    }
                }
                Some(Err(why)) => self.refuse(&why),
                None => {}
            },
            _ => {}
        }
    }

    /// Asks for a ticket for the sender.
    fn offer(&mut self, key: [u8; 32]) {
        let offering = match self.here {
            Some(context) => direct::is_useful(context).and_then(|()| Offering::new(context, key)),
            None => Err("the receiver uses no device".into()),
        };
        match offering {
            Ok(offering) => self.direct = Receiving::Offering(offering),
            Err(why) => self.refuse(&why),
        }
    }

    fn refuse(&mut self, why: &str) {
        self.connection.put(&Frame::NoTicket(why.into()));
        self.no_direct(why);
    }

    /// Tells the sender what was posted.
    fn give_credits(&mut self) {
        for posted in self.posted.iter_mut().skip(self.credited) {
            posted.direct = posted.place == Place::Named && matches!(self.direct, Receiving::Open(_));
            let credit = if posted.direct { Frame::DirectCredit } else { Frame::Credit };
            self.connection.put(&credit(posted.most));
            self.credited += 1;
        }
    }

    /// Tells the server where the pieces of announced messages go.
    fn tell_server(&mut self) -> Cuda {
        let Receiving::Open(line) = &mut self.direct else { return Ok(()) };
        for posted in self.posted.iter_mut().take(self.announced) {
            let Posted { at, message: Some(message), .. } = posted else { continue };
            let Way::Direct(last, landing) = &mut message.way else { continue };
            if landing.is_none() {
                *landing = Some(begin_landing(*at, message.len)?);
            }
            while message.taken < message.len {
                if line.progress.begun() - line.progress.done() >= 2 * PIECES as u64 {
                    return Ok(());
                }
                let len = (message.len - message.taken).min(MAX_PIECE);
                line.receive(*at + message.taken, len)?;
                *last = line.progress.begun();
                message.taken += len;
            }
        }
        Ok(())
    }

    /// The direct connection, if there is one.
    pub fn line(&self) -> Option<&Line> {
        if let Receiving::Open(line) = &self.direct { Some(line) } else { None }
    }

    /// Takes bytes of the announced message from the socket. True: there were some.
    fn take_bytes(&mut self) -> bool {
        let Some(last) = self.announced.checked_sub(1) else { return false };
        let Some(Posted { at, message: Some(message), .. }) = self.posted.get_mut(last) else { return false };
        let before = message.taken;
        while matches!(message.way, Way::Socket)
            && message.taken < message.len
            && self.connection.unread() > 0
        {
            let most = usize::try_from(message.len - message.taken).unwrap_or(usize::MAX);
            let bytes = self.connection.bytes(most);
            let at = *at + message.taken;
            // SAFETY: memory that NCCL has given to the plugin until the message is here, and it has room for
            // it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
            message.taken += bytes.len() as u64;
        }
        message.taken > before
    }
}
