//! The messages between the keeper and a device process.
//!
//! They share a packet socket: one message is one packet, with a [`Header`], then text for some, and
//! descriptors. A packet that has been sent arrives even if its sender dies, so what a device process has
//! [stored](ToKeeper::Store) outlives it without an acknowledgement.
//!
//! The keeper trusts nothing that a device process sends. Everything here is bounded: [`MAX_PACKET`] bytes,
//! [`MAX_FDS`] descriptors, and no packet makes the keeper allocate more than that.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::exit;
use std::time::Duration;

use host_bridge::bridge::saved::MAX_DESCRIPTORS;
use host_bridge::framing::{peek_some, recv_some};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, sendmsg, socketpair,
};
use protocol::device::Answer;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::role::Role;

/// Maximum bytes of a packet.
const MAX_PACKET: usize = 4096;
/// Maximum descriptors in a packet: a file, a native client's memory and doorbell, and those of a saved
/// session.
const MAX_FDS: usize = 3 + MAX_DESCRIPTORS;

/// The beginning of each packet.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    kind: u32,
    reserved: u32,
    /// A channel's ID, or the number of a client or a question.
    number: u64,
}

mod kind {
    pub const CONFIG: u32 = 1;
    pub const VMM: u32 = 2;
    pub const RESTORE: u32 = 3;
    pub const CLIENT: u32 = 4;
    pub const ASK_STATUS: u32 = 5;
    pub const END: u32 = 6;
    pub const KEYS: u32 = 7;
    pub const ORDERS: u32 = 8;
    pub const CONNECTED: u32 = 9;
    pub const SERVE: u32 = 10;
    pub const CLIENT_AGAIN: u32 = 11;
    pub const ANSWERED: u32 = 12;
    pub const STORE: u32 = 17;
    pub const FORGET: u32 = 18;
    pub const STATUS: u32 = 19;
    pub const GONE: u32 = 20;
    pub const CONFINED: u32 = 21;
    pub const CONNECT: u32 = 22;
    pub const ANSWER: u32 = 23;
    pub const LEFT: u32 = 24;
    pub const ENDED: u32 = 25;
    pub const NOTIFY: u32 = 26;
}

/// What a device process must know of a channel that its predecessor opened, or of a native client's region.
/// The keeper only holds it.
#[derive(Debug)]
pub struct Stored {
    /// A memfd with the channel's extents and its saved session ([`host_bridge::bridge::Saved`]).
    pub known: OwnedFd,
    /// A native client's memory and doorbell, and the saved session's descriptors.
    pub descriptors: Vec<OwnedFd>,
}

impl Stored {
    /// Duplicates it.
    pub fn try_clone(&self) -> io::Result<Stored> {
        let descriptors = self.descriptors.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        Ok(Stored { known: self.known.try_clone()?, descriptors })
    }
}

/// From the keeper to a device process.
#[derive(Debug)]
pub enum ToDevice {
    /// How to confine itself. Comes first.
    Orders {
        /// A memfd with [`sandbox::Orders`] as JSON.
        text: OwnedFd,
    },
    /// The configuration file as the keeper read it. Comes next, if there is a file.
    Config {
        /// Its path, for messages.
        path: String,
        /// A memfd with its text.
        text: OwnedFd,
    },
    /// What to serve. Comes next, once something must be served.
    Serve {
        /// The role.
        role: Role,
    },
    /// Where this host's key signs ([`identity::remote`]). Comes next, if sessions are protected by TLS.
    Keys {
        /// A stream socket.
        socket: OwnedFd,
    },
    /// A VMM has connected. Comes once.
    Vmm {
        /// A listening socket with one connection in its queue, on which the keeper speaks vhost-user.
        listening: OwnedFd,
        /// Memory for the requests in progress (`vm::recovery`).
        requests: OwnedFd,
        /// How the predecessor ended, if there was one. The rings are then resumed.
        resumed: Option<String>,
    },
    /// Notify the guest or this process of a ring. The keeper itself must not: the VMM, which has the same
    /// eventfd, can make it full, and then whoever writes it waits.
    Notify {
        /// The ring's eventfd.
        event: OwnedFd,
    },
    /// What the predecessor had stored. Comes before [`Vmm`](ToDevice::Vmm).
    Restore {
        /// The channel; for a native client, its number and one of its regions
        /// ([`place`](crate::native::recovery::place)).
        channel: u64,
        /// What was stored.
        stored: Stored,
    },
    /// A process of this host has connected.
    Client {
        /// Its number.
        number: u64,
        /// Its name in the log.
        who: String,
        /// The connection.
        socket: OwnedFd,
        /// A file that tells whether a request was being answered. It outlives device processes.
        answering: OwnedFd,
        /// Whether another process has served it before. What that process had stored for it has already been
        /// sent.
        again: bool,
    },
    /// A native client has received its [`Answer`](ToKeeper::Answer), and its request was consumed.
    Answered {
        /// The client's number.
        number: u64,
    },
    /// Asks for a [`Status`](ToKeeper::Status).
    AskStatus {
        /// Repeated in the answer.
        question: u64,
    },
    /// End all sessions and exit.
    End {
        /// Whether servers may be told of the sessions' end for as long as they would keep them. Otherwise,
        /// the process soon exits anyway.
        lingers: bool,
    },
}

/// From a device process to the keeper.
#[derive(Debug)]
pub enum ToKeeper {
    /// Keep this for a successor, replacing what was stored for the channel before.
    Store {
        /// The channel.
        channel: u64,
        /// What to keep.
        stored: Stored,
    },
    /// Forget what was stored for the channel.
    Forget {
        /// The channel.
        channel: u64,
    },
    /// The status.
    Status {
        /// The question; 0 if nobody asked.
        question: u64,
        /// A file with JSON text.
        text: OwnedFd,
    },
    /// A client's connection is closed. Its session is over, but the server may not know that yet: only the
    /// channel stays stored, with which a successor would tell it.
    Left {
        /// Its number.
        number: u64,
    },
    /// A client has [left](ToKeeper::Left), and the server knows.
    Gone {
        /// Its number.
        number: u64,
    },
    /// Consume a native client's request, and answer it. So it is certain whether a process that ends has
    /// answered.
    Answer {
        /// The client's number.
        number: u64,
        /// The answer.
        status: Answer,
        /// Why, if it is not `Ok`.
        reason: String,
        /// The descriptor sent with it.
        fd: Option<OwnedFd>,
    },
    /// All sessions have ended, and the process exits as soon as their servers know.
    Ended,
    /// What its sandbox lacks, or why it must not serve. Comes first.
    Confined {
        /// A memfd with a `Result<sandbox::Report, String>` as JSON.
        text: OwnedFd,
    },
    /// Connect to a server of the process's sessions.
    Connect {
        /// Its index in the configuration.
        server: usize,
        /// How long to try each address of the server's name.
        timeout: Duration,
        /// Where the answer goes ([`Control::answer`]).
        reply: OwnedFd,
    },
}

/// One end of the socket.
#[derive(Debug)]
pub struct Control(OwnedFd);

impl From<OwnedFd> for Control {
    fn from(socket: OwnedFd) -> Control {
        Control(socket)
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A connected pair.
pub fn pair() -> io::Result<(Control, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    Ok((Control(ours), theirs))
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// [`recv_some`] or [`peek_some`].
type Receive = fn(BorrowedFd<'_>, &mut [u8], &mut Vec<OwnedFd>) -> io::Result<usize>;

/// A received packet.
struct Packet {
    kind: u32,
    number: u64,
    text: String,
    fds: std::vec::IntoIter<OwnedFd>,
}

impl Packet {
    fn fd(&mut self) -> io::Result<OwnedFd> {
        self.fds.next().ok_or_else(|| malformed("a packet without its descriptor"))
    }

    fn stored(&mut self) -> io::Result<Stored> {
        Ok(Stored { known: self.fd()?, descriptors: self.fds.by_ref().collect() })
    }
}

impl Control {
    fn send(
        &self,
        kind: u32,
        number: u64,
        text: &str,
        fds: &[BorrowedFd<'_>],
        flags: MsgFlags,
    ) -> io::Result<()> {
        let header = Header { kind, reserved: 0, number };
        // Only texts for display are ever that long.
        let text = &text.as_bytes()[..text.len().min(MAX_PACKET - size_of::<Header>())];
        let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(text)];
        loop {
            match sendmsg::<()>(self.0.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL | flags, None) {
                Ok(_) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The next packet. `None`: the other end is closed.
    fn receive(&self) -> io::Result<Option<Packet>> {
        self.receive_with(recv_some)
    }

    fn receive_with(&self, receive: Receive) -> io::Result<Option<Packet>> {
        // One byte more than a packet may have, to detect longer ones.
        let (mut bytes, mut fds, mut reset) = ([0; MAX_PACKET + 1], Vec::new(), false);
        let length = loop {
            match receive(self.0.as_fd(), &mut bytes, &mut fds) {
                Ok(0) => return Ok(None),
                Ok(length) => break length,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => fds.clear(),
                // The other end died with unread packets. The kernel reports this once, before it delivers
                // what was sent.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset && !reset => reset = true,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(e) => return Err(e),
            }
        };
        if length > MAX_PACKET || fds.len() > MAX_FDS {
            return Err(malformed("a packet that is too long"));
        }
        let (header, text) = Header::read_from_prefix(&bytes[..length])
            .map_err(|_| malformed("a packet shorter than its header"))?;
        Ok(Some(Packet {
            kind: header.kind,
            number: header.number,
            text: String::from_utf8_lossy(text).into_owned(),
            fds: fds.into_iter(),
        }))
    }

    /// Sends a message to the device process. Never blocks: a process that doesn't read its packets is
    /// broken.
    pub fn tell_device(&self, message: &ToDevice) -> io::Result<()> {
        let send = |kind, number, text: &str, fds: &[BorrowedFd<'_>]| {
            self.send(kind, number, text, fds, MsgFlags::MSG_DONTWAIT)
        };
        match message {
            ToDevice::Orders { text } => send(kind::ORDERS, 0, "", &[text.as_fd()]),
            ToDevice::Config { path, text } => send(kind::CONFIG, 0, path, &[text.as_fd()]),
            ToDevice::Serve { role } => send(kind::SERVE, 0, &role.to_string(), &[]),
            ToDevice::Keys { socket } => send(kind::KEYS, 0, "", &[socket.as_fd()]),
            ToDevice::Vmm { listening, requests, resumed } => send(
                kind::VMM,
                resumed.is_some().into(),
                resumed.as_deref().unwrap_or_default(),
                &[listening.as_fd(), requests.as_fd()],
            ),
            ToDevice::Notify { event } => send(kind::NOTIFY, 0, "", &[event.as_fd()]),
            ToDevice::Restore { channel, stored } => self.restore(*channel, stored),
            ToDevice::Client { number, who, socket, answering, again } => {
                let kind = if *again { kind::CLIENT_AGAIN } else { kind::CLIENT };
                send(kind, *number, who, &[socket.as_fd(), answering.as_fd()])
            }
            ToDevice::Answered { number } => send(kind::ANSWERED, *number, "", &[]),
            ToDevice::AskStatus { question } => send(kind::ASK_STATUS, *question, "", &[]),
            ToDevice::End { lingers } => send(kind::END, (*lingers).into(), "", &[]),
        }
    }

    /// Gives a device process what its predecessor had stored.
    pub fn restore(&self, channel: u64, stored: &Stored) -> io::Result<()> {
        self.send_stored(kind::RESTORE, channel, stored, MsgFlags::MSG_DONTWAIT)
    }

    fn send_stored(&self, kind: u32, channel: u64, stored: &Stored, flags: MsgFlags) -> io::Result<()> {
        let fds: Vec<_> =
            std::iter::once(&stored.known).chain(&stored.descriptors).map(AsFd::as_fd).collect();
        self.send(kind, channel, "", &fds, flags)
    }

    /// The keeper's next message; `None` if the keeper is gone. Blocks.
    pub fn next_from_keeper(&self) -> io::Result<Option<ToDevice>> {
        let Some(mut packet) = self.receive()? else { return Ok(None) };
        Ok(Some(match packet.kind {
            kind::ORDERS => ToDevice::Orders { text: packet.fd()? },
            kind::CONFIG => ToDevice::Config { text: packet.fd()?, path: packet.text },
            kind::SERVE => ToDevice::Serve { role: packet.text.parse().map_err(|e: String| malformed(&e))? },
            kind::KEYS => ToDevice::Keys { socket: packet.fd()? },
            kind::VMM => ToDevice::Vmm {
                listening: packet.fd()?,
                requests: packet.fd()?,
                resumed: (packet.number != 0).then_some(packet.text),
            },
            kind::NOTIFY => ToDevice::Notify { event: packet.fd()? },
            kind::RESTORE => ToDevice::Restore { channel: packet.number, stored: packet.stored()? },
            kind::CLIENT | kind::CLIENT_AGAIN => ToDevice::Client {
                number: packet.number,
                socket: packet.fd()?,
                answering: packet.fd()?,
                again: packet.kind == kind::CLIENT_AGAIN,
                who: packet.text,
            },
            kind::ANSWERED => ToDevice::Answered { number: packet.number },
            kind::ASK_STATUS => ToDevice::AskStatus { question: packet.number },
            kind::END => ToDevice::End { lingers: packet.number != 0 },
            _ => return Err(malformed("a packet of unknown kind")),
        }))
    }

    /// Sends a message to the keeper. Blocks while the keeper has much to read.
    pub fn tell_keeper(&self, message: &ToKeeper) -> io::Result<()> {
        let flags = MsgFlags::empty();
        match message {
            ToKeeper::Store { channel, stored } => self.send_stored(kind::STORE, *channel, stored, flags),
            ToKeeper::Forget { channel } => self.send(kind::FORGET, *channel, "", &[], flags),
            ToKeeper::Status { question, text } => {
                self.send(kind::STATUS, *question, "", &[text.as_fd()], flags)
            }
            ToKeeper::Answer { number, status, reason, fd } => {
                let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                // The answer's number is its first character.
                let status = char::from_u32(*status as u32).unwrap_or_default();
                self.send(kind::ANSWER, *number, &format!("{status}{reason}"), &fds, flags)
            }
            ToKeeper::Left { number } => self.send(kind::LEFT, *number, "", &[], flags),
            ToKeeper::Gone { number } => self.send(kind::GONE, *number, "", &[], flags),
            ToKeeper::Ended => self.send(kind::ENDED, 0, "", &[], flags),
            ToKeeper::Confined { text } => self.send(kind::CONFINED, 0, "", &[text.as_fd()], flags),
            ToKeeper::Connect { server, timeout, reply } => {
                let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                self.send(kind::CONNECT, millis, &server.to_string(), &[reply.as_fd()], flags)
            }
        }
    }

    /// A device process's next message; `None` if the process has ended. Does not block if the socket is
    /// readable. The message stays the next one until it is [consumed](Self::consume): a keeper that ends
    /// before that leaves it to the next keeper.
    pub fn next_from_device(&self) -> io::Result<Option<ToKeeper>> {
        let Some(mut packet) = self.receive_with(peek_some)? else { return Ok(None) };
        Ok(Some(match packet.kind {
            kind::STORE => ToKeeper::Store { channel: packet.number, stored: packet.stored()? },
            kind::FORGET => ToKeeper::Forget { channel: packet.number },
            kind::STATUS => ToKeeper::Status { question: packet.number, text: packet.fd()? },
            kind::ANSWER => {
                let mut text = packet.text.chars();
                let status = text.next().ok_or_else(|| malformed("an answer without a status"))?;
                ToKeeper::Answer {
                    number: packet.number,
                    status: Answer::from_number(status.into()),
                    reason: text.collect(),
                    fd: packet.fds.next(),
                }
            }
            kind::LEFT => ToKeeper::Left { number: packet.number },
            kind::GONE => ToKeeper::Gone { number: packet.number },
            kind::ENDED => ToKeeper::Ended,
            kind::CONFINED => ToKeeper::Confined { text: packet.fd()? },
            kind::CONNECT => ToKeeper::Connect {
                server: packet.text.parse().map_err(|_| malformed("a server's index is not a number"))?,
                timeout: Duration::from_millis(packet.number),
                reply: packet.fd()?,
            },
            _ => return Err(malformed("a packet of unknown kind")),
        }))
    }
}

impl Control {
    /// Passes a device process's next message to `act`, and consumes it. `None`: the process has ended. Does
    /// not block if the socket is readable.
    ///
    /// A keeper that ends meanwhile leaves the message to the next keeper. An answer is consumed before `act`
    /// instead: a client that has it may ask the next thing, which the next keeper must not take for
    /// answered. Without the message, a request that nobody has answered is carried out again.
    pub fn hear<T>(&self, act: impl FnOnce(ToKeeper) -> T) -> io::Result<Option<T>> {
        let Some(message) = self.next_from_device()? else { return Ok(None) };
        if matches!(message, ToKeeper::Answer { .. }) {
            self.consume()?;
            return Ok(Some(act(message)));
        }
        let done = act(message);
        self.consume()?;
        Ok(Some(done))
    }

    /// Consumes the message that [`next_from_device`](Self::next_from_device) has returned.
    pub fn consume(&self) -> io::Result<()> {
        let mut reset = false;
        loop {
            match recv(self.0.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) {
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::ECONNRESET) if !reset => reset = true,
                done => return done.map(drop).map_err(io::Error::from),
            }
        }
    }
}

/// Ends this process, which goes with its keeper. Nobody is told anything in its last moments, for example
/// that there is no connection to a server: the next process makes one.
pub fn keeper_has_ended() -> ! {
    tracing::warn!("the keeper has ended");
    exit(1);
}

/// The answer to [`ToKeeper::Connect`], on the socket that came with the request.
impl Control {
    /// Answers with a connected socket, or with the reason why there is none. Never blocks.
    pub fn answer(&self, connected: &io::Result<OwnedFd>) -> io::Result<()> {
        match connected {
            Ok(socket) => self.send(kind::CONNECTED, 0, "", &[socket.as_fd()], MsgFlags::MSG_DONTWAIT),
            Err(e) => {
                let number = e.raw_os_error().map_or(0, i32::unsigned_abs);
                self.send(kind::CONNECTED, number.into(), &e.to_string(), &[], MsgFlags::MSG_DONTWAIT)
            }
        }
    }

    /// Waits for the answer. `None`: the keeper has ended.
    pub fn connected(&self) -> io::Result<Option<OwnedFd>> {
        let Some(mut packet) = self.receive()? else { return Ok(None) };
        match (packet.kind, i32::try_from(packet.number), packet.fds.next()) {
            (kind::CONNECTED, Ok(0), Some(socket)) => Ok(Some(socket)),
            (kind::CONNECTED, Ok(number @ 1..), None) => Err(io::Error::from_raw_os_error(number)),
            (kind::CONNECTED, Ok(0), None) => Err(io::Error::other(packet.text)),
            _ => Err(malformed("a packet of unknown kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn messages_arrive_even_after_their_sender_has_ended() {
        let (keeper, theirs) = pair().unwrap();
        let device = Control::from(theirs);
        let stored = Stored { known: file(), descriptors: vec![file(), file(), file()] };
        device.tell_keeper(&ToKeeper::Store { channel: 7, stored }).unwrap();
        device.tell_keeper(&ToKeeper::Forget { channel: 9 }).unwrap();
        drop(device);
        let first = keeper.next_from_device().unwrap();
        keeper.consume().unwrap();
        assert!(
            matches!(&first, Some(ToKeeper::Store { channel: 7, stored }) if stored.descriptors.len() == 3)
        );
        // It stays until it is consumed.
        for _ in 0..2 {
            assert!(matches!(keeper.next_from_device(), Ok(Some(ToKeeper::Forget { channel: 9 }))));
        }
        keeper.consume().unwrap();
        assert!(keeper.next_from_device().unwrap().is_none());
    }

    #[test]
    fn only_an_answer_is_not_left_to_the_next_keeper_while_this_one_acts_on_it() {
        let (keeper, theirs) = pair().unwrap();
        let device = Control::from(theirs);
        let answer = ToKeeper::Answer { number: 7, status: Answer::Ok, reason: String::new(), fd: None };
        for message in [answer, ToKeeper::Forget { channel: 9 }, ToKeeper::Ended] {
            device.tell_keeper(&message).unwrap();
        }
        // What the next keeper would find.
        let next = |_| keeper.next_from_device().unwrap().unwrap();
        assert!(matches!(keeper.hear(next), Ok(Some(ToKeeper::Forget { channel: 9 }))));
        assert!(matches!(keeper.hear(next), Ok(Some(ToKeeper::Forget { channel: 9 }))));
        assert!(matches!(keeper.hear(|message| message), Ok(Some(ToKeeper::Ended))));
        drop(device);
        assert!(matches!(keeper.hear(|message| message), Ok(None)));
    }

    #[test]
    fn an_answer_contains_a_socket_or_a_reason() {
        let answered = |connected: io::Result<OwnedFd>| {
            let (ours, theirs) = pair().unwrap();
            Control::from(theirs).answer(&connected).unwrap();
            ours.connected()
        };
        assert!(answered(Ok(file())).is_ok());
        let refused = answered(Err(io::Error::from_raw_os_error(libc::ECONNREFUSED))).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let unknown = answered(Err(io::Error::other("no such host"))).unwrap_err();
        assert_eq!(unknown.to_string(), "no such host");
        let (ours, theirs) = pair().unwrap();
        drop(theirs);
        assert!(ours.connected().unwrap().is_none());
    }

    #[test]
    fn the_keeper_never_waits_for_a_device_process_that_does_not_read() {
        let (keeper, _theirs) = pair().unwrap();
        let refused =
            (0..1_000_000).find_map(|_| keeper.tell_device(&ToDevice::End { lingers: false }).err());
        assert_eq!(refused.unwrap().kind(), io::ErrorKind::WouldBlock);
    }

    proptest! {
        #[test]
        fn arbitrary_packets_are_refused_or_understood(bytes in proptest::collection::vec(any::<u8>(), 1..5000), descriptors in 0usize..6) {
            let (keeper, theirs) = pair().unwrap();
            let files: Vec<OwnedFd> = (0..descriptors).map(|_| file()).collect();
            let raw: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
            let rights = [ControlMessage::ScmRights(&raw)];
            let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
            sendmsg::<()>(theirs.as_raw_fd(), &[IoSlice::new(&bytes)], control, MsgFlags::empty(), None).unwrap();
            drop(theirs);
            let packet = keeper.next_from_device();
            keeper.consume().unwrap();
            if bytes.len() < size_of::<Header>() || bytes.len() > MAX_PACKET || descriptors > MAX_FDS {
                prop_assert!(packet.is_err());
            }
            prop_assert!(keeper.next_from_device().unwrap().is_none());
        }
    }
}
