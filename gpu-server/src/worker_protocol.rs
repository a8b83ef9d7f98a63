//! The protocol between the daemon and its workers: JSON messages with descriptors over a seqpacket socket
//! pair, one message per packet.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use host_bridge::framing::recv_packet;
use identity::Fingerprint;
use nix::sys::socket::{ControlMessage, MsgFlags, getsockopt, sendmsg, sockopt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use sandbox::Report;

use crate::config::WorkerOptions;
use crate::confinement::Orders;
use crate::driver::listed::Listed;
use crate::limits::{Limits, Resource};

/// Maximum bytes of a message.
const MAX_MESSAGE: usize = 64 * 1024;
/// Maximum descriptors of a message: those of [`ToWorker::Session`].
const MOST_DESCRIPTORS: usize = 5;

/// What a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Sessions that use devices. The worker has a context on the first device before its session begins.
    Gpu,
    /// Sessions that only query NVML. The worker creates no context and refuses every other operation.
    Nvml,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 2] = [Kind::Gpu, Kind::Nvml];

    /// Its name in the status.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gpu => "gpu",
            Kind::Nvml => "nvml",
        }
    }
}

/// Version of the messages between the daemon and its workers and of what daemons keep for their successors.
/// 5: events that a session opens are added to its record; charges of imported memory name its token; limits
/// say whose a lease is. 6: workers ask for the programs that use a device; the numbers of NVIDIA's devices
/// are kept.
pub const FORMAT: u32 = 6;
/// The oldest version whose sessions a daemon takes over.
pub const OLDEST: u32 = 4;

/// A client's program that uses a device: its process id, and bytes of the device's memory.
pub type Process = (u32, u64);

/// Names a shared object.
pub type Token = [u8; 16];

/// An object that sessions of one client share ([`cuda_ipc`](crate::cuda_ipc)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shared {
    /// Device memory, with its descriptor.
    Memory {
        /// The device's number on this server, the same in every worker.
        device: u32,
        /// Bytes.
        size: u64,
    },
    /// An [interprocess event](crate::shared_event), with its descriptor.
    Event {
        /// The session's slot: 0 for the one that shares it. The daemon gives each session that opens it
        /// another one.
        slot: u16,
    },
}

/// Why a token is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// It names no object that this client may open.
    Unknown,
    /// The session, its principal, or the daemon has reached its maximum.
    Full,
    /// The device has no room now, but others may make some.
    Crowded,
}

/// The daemon's answer to a worker's request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To a request to share.
    Shared(Token),
    /// To a request to open, with the object's descriptor if it has one.
    Opened {
        /// The object.
        what: Shared,
        /// Whether the session that opens it is the one that shared it.
        own: bool,
    },
    /// To a request to charge bytes.
    Charged,
    /// To a request for a ticket of a [direct connection](crate::direct).
    Ticket {
        /// Its name.
        token: Token,
        /// Its secret.
        secret: [u8; 32],
        /// Whether connections over TCP are under TLS.
        encrypted: bool,
        /// Where this server listens.
        addresses: Vec<String>,
    },
    /// To a request for a connection to another server, which is attached.
    Connected,
    /// To such a request: why there is no connection.
    NotConnected(String),
    /// To a request for the programs that use a device.
    Processes(Vec<Process>),
    /// The request is refused.
    Refused(Refusal),
}

/// Messages from the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// The first message to a worker whose only purpose is to find out what its sandbox lacks. It answers and
    /// exits.
    Probe(Orders),
    /// The first message: what to prepare.
    Prepare {
        /// What the worker must do before anything else.
        orders: Orders,
        /// The worker's process id as the daemon knows it.
        pid: u32,
        /// The kind of sessions that the worker is for.
        kind: Kind,
        /// The daemon's options.
        options: WorkerOptions,
    },
    /// The session to serve, with its connection (without TLS), the descriptors of its
    /// [`Terms`](crate::pages::Terms) and its [`Meter`](crate::pages::Meter), the daemon's bell, and a socket
    /// to the cache, if the session has one.
    Session {
        /// The kind of connection.
        transport: Transport,
        /// Name of the client's program, for the log.
        program: String,
        /// Name of the client, for the log.
        client: String,
        /// What the session may use.
        limits: Limits,
        /// Under TLS: who may open the session's connections. This message then carries no connection.
        door: Option<Visitor>,
    },
    /// A data connection of the session.
    Data {
        /// Which of the session's links it belongs to.
        attempt: u32,
        /// Which data connection of that link it is.
        index: u32,
    },
    /// A new control connection of the session, after its connections were lost.
    Resume {
        /// Which of the session's links it begins.
        attempt: u32,
    },
    /// The client has ended the session.
    End,
    /// A connection under TLS that named the session. Nothing has been read from it.
    Connection,
    /// A direct connection from another server's worker, which named a ticket of the session.
    Direct {
        /// The ticket's name.
        token: Token,
        /// The daemon has checked the ticket and welcomed the connection. Otherwise it is under TLS, and
        /// nothing has been read from it.
        welcomed: bool,
    },
    /// Another daemon has taken over the session. Carries the descriptor of its
    /// [`Terms`](crate::pages::Terms).
    TakenOver,
    /// A device has failed, and CUDA reports this to every program that uses it.
    DeviceFailed {
        /// Its number on the server.
        device: u32,
        /// The `CUresult`.
        status: u32,
    },
    /// An order for the session's device memory, with the descriptor of an empty file if the memory should go
    /// to one. The worker reports in its [`Whereabouts`](crate::pages::Whereabouts) when it has handled it. A
    /// later order replaces one that has not been begun.
    Memory {
        /// The order's number.
        number: u32,
        /// What to do.
        order: MemoryOrder,
    },
    /// The answer to a `Share`, an `Open`, a `Charge`, a `Ticket`, a `Connect` or a `Processes`, with a
    /// descriptor if it has one.
    Reply {
        /// The request's number.
        request: u64,
        /// The answer.
        reply: Reply,
    },
}

/// What a session does with its device memory. A worker that cannot carry out an order reports that, and
/// nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryOrder {
    /// Moves it to this machine's memory, or to the attached file. `busy`: even if there are commands,
    /// otherwise only while there are none. Never while a device is executing one.
    Leave {
        /// See above.
        busy: bool,
    },
    /// There is room: moves it back. Only for a session that waits for that.
    Return,
    /// Frees the memory of this machine that is kept for the next time.
    Forget,
}

/// The one client that may open a session's connections under TLS.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Visitor {
    /// The client's key.
    pub key: Fingerprint,
    /// The session's name, which is not secret.
    pub token: Token,
    /// The session's secret.
    pub secret: [u8; 32],
}

/// A session's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A control connection over TCP.
    Tcp {
        /// The channel's reply slots.
        slot_count: u32,
        /// Number of data connections to come.
        data_connections: u32,
        /// The client's host takes compressed data.
        takes_compressed: bool,
    },
    /// The control connection of a session over verbs.
    Verbs {
        /// The channel's reply slots.
        slot_count: u32,
        /// The bridge replaces connections that are lost.
        resumes: bool,
    },
    /// A Unix socket.
    Local,
}

/// Messages from a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// The answer to a probe: what the sandbox lacks, or why a worker must not serve.
    Sandbox(Result<Report, String>),
    /// The worker is ready for a session.
    Ready {
        /// `cuda` or `software`.
        backend: String,
        /// Names of the devices.
        devices: Vec<String>,
        /// All devices of NVIDIA's driver, by number: as the daemon has said, or as CUDA lists them.
        all: Vec<Listed>,
        /// Free bytes on the device on which the worker has created a context, if known.
        free: Option<u64>,
        /// The key that the worker has made for the connections of its session.
        key: Fingerprint,
    },
    /// The worker cannot serve.
    Failed {
        /// Why.
        reason: String,
        /// Whether the reason is that the device has no memory left for a context.
        full: bool,
    },
    /// Shares an object with the client's other sessions. The daemon answers.
    Share {
        /// Number of the request.
        request: u64,
        /// The object, with a descriptor if it has one.
        what: Shared,
    },
    /// Opens an object that a session has shared. The daemon answers.
    Open {
        /// Number of the request.
        request: u64,
        /// The object's token.
        token: Token,
    },
    /// Revokes a token.
    Unshare {
        /// The token.
        token: Token,
    },
    /// Charges bytes to the principal. The daemon answers.
    Charge {
        /// Number of the request.
        request: u64,
        /// What the bytes are of.
        resource: Resource,
        /// How many.
        bytes: u64,
        /// For memory that another session shares: its token.
        #[serde(default)]
        shared: Option<Token>,
    },
    /// Gives charged bytes back.
    Discharge {
        /// Number of the request, which is not answered.
        request: u64,
        /// What the bytes are of.
        resource: Resource,
        /// How many.
        bytes: u64,
        /// As they were charged.
        #[serde(default)]
        shared: Option<Token>,
    },
    /// Asks for a ticket of a direct connection to the session. The daemon answers.
    Ticket {
        /// Number of the request.
        request: u64,
    },
    /// Asks for a connection to another server. The daemon answers.
    Connect {
        /// Number of the request.
        request: u64,
        /// Where to.
        address: String,
        /// Whether the worker will shake hands under TLS.
        encrypted: bool,
    },
    /// Asks for the client's programs that use a device. The daemon answers.
    Processes {
        /// Number of the request.
        request: u64,
        /// The device's number on this server.
        device: u32,
        /// The PID namespace of whoever asks.
        namespace: u64,
    },
    /// Counters of the running session.
    Counters(Counters),
    /// The session has lost its link or has one again.
    Link {
        /// Whether it has one.
        up: bool,
    },
    /// A kernel of the session has run too long, so the session ends.
    Overrun,
    /// The session has ended, and the worker exits.
    Ended {
        /// Why it was lost, if it was.
        lost: Option<String>,
        /// The final counters.
        counters: Counters,
    },
}

/// Counters of a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Commands executed.
    pub commands: u64,
    /// Of these: kernels and graphs launched.
    #[serde(default)]
    pub launches: u64,
    /// Of these: copies.
    #[serde(default)]
    pub copies: u64,
    /// Of these: commands whose answer the client waits for.
    #[serde(default)]
    pub round_trips: u64,
    /// Bytes of bulk data read from the client.
    pub bytes_in: u64,
    /// Bytes of bulk data written to the client.
    pub bytes_out: u64,
    /// Bytes of bulk data that the worker's CPU copied between the transport's memory and the driver's.
    #[serde(default)]
    pub bytes_copied: u64,
    /// Bytes copied to and from workers of other servers.
    #[serde(default)]
    pub bytes_direct: u64,
    /// Those of them that went over verbs.
    #[serde(default)]
    pub bytes_direct_verbs: u64,
    /// Bytes of device memory held.
    pub device_memory: u64,
}

impl Counters {
    /// Whether any of the counters that only grow is smaller than before.
    pub fn is_before(&self, before: &Counters) -> bool {
        let (mut now, mut before) = (*self, *before);
        now.growing().into_iter().zip(before.growing()).any(|(now, before)| now < before)
    }

    /// The counters that only grow, in the order of their fields.
    pub fn growing(&mut self) -> [&mut u64; 9] {
        [
            &mut self.commands,
            &mut self.launches,
            &mut self.copies,
            &mut self.round_trips,
            &mut self.bytes_in,
            &mut self.bytes_out,
            &mut self.bytes_copied,
            &mut self.bytes_direct,
            &mut self.bytes_direct_verbs,
        ]
    }
}

/// Sends a message.
pub fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, message, fds, MsgFlags::empty())
}

/// Sends a message if there is room for it. Otherwise the error is `WouldBlock`.
pub fn try_send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, message, fds, MsgFlags::MSG_DONTWAIT)
}

/// Whether more than half of the room for messages is left: of what was sent, little is unread.
pub fn has_much_room(socket: &OwnedFd) -> io::Result<bool> {
    let mut unread: libc::c_int = 0;
    // SAFETY: TIOCOUTQ (for sockets, SIOCOUTQ) writes an int to this address, which is that of one.
    nix::Error::result(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) })?;
    let room = getsockopt(socket, sockopt::SndBuf)?;
    Ok(usize::try_from(unread).is_ok_and(|unread| unread <= room / 2))
}

fn send_with<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    fds: &[BorrowedFd<'_>],
    flags: MsgFlags,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    loop {
        match sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            control,
            MsgFlags::MSG_NOSIGNAL | flags,
            None,
        ) {
            Ok(_) => return Ok(()),
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Receives a message. `Ok(None)` if the other end is closed.
pub fn receive<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    receive_with(socket, MsgFlags::empty())
}

/// Receives a message without removing it: it stays the next one until it is [consumed](consume), no matter
/// who receives next. `Ok(None)` if the other end is closed.
pub fn peek<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    receive_with(socket, MsgFlags::MSG_PEEK)
}

/// Removes the message that was peeked at.
pub fn consume(socket: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MsgFlags::MSG_DONTWAIT;
    loop {
        match nix::sys::socket::recv(socket.as_raw_fd(), &mut [0], flags) {
            Err(nix::Error::EINTR) => {}
            done => return done.map(drop).map_err(io::Error::from),
        }
    }
}

fn receive_with<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    flags: MsgFlags,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut reset = false;
    let (count, fds) = loop {
        match recv_packet(socket, &mut bytes, MOST_DESCRIPTORS, flags) {
            Ok(received) => break received,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The peer closed its end while it held unread messages. The kernel reports this once, before it
            // delivers what the peer had sent.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset && !reset => reset = true,
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(e) => return Err(e),
        }
    };
    if count == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..count])?, fds)))
}

/// A connected pair of sockets for [`send`] and [`receive`].
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_message_arrives_whole_with_its_descriptor() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &ToWorker::Data { attempt: 0, index: 0 }, &[a.as_fd()]).unwrap();
        send(a.as_fd(), &FromWorker::Failed { reason: "ä".repeat(1000), full: false }, &[]).unwrap();
        let (first, fds) = receive::<ToWorker>(b.as_fd()).unwrap().unwrap();
        assert!(matches!(first, ToWorker::Data { .. }) && fds.len() == 1);
        let (second, _) = receive::<FromWorker>(b.as_fd()).unwrap().unwrap();
        assert!(matches!(second, FromWorker::Failed { reason, .. } if reason.chars().count() == 1000));
        drop((a, fds));
        assert!(receive::<ToWorker>(b.as_fd()).unwrap().is_none());
    }

    #[test]
    fn a_message_that_was_peeked_at_is_there_until_it_is_consumed() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &ToWorker::Data { attempt: 0, index: 7 }, &[a.as_fd()]).unwrap();
        send(a.as_fd(), &ToWorker::End, &[]).unwrap();
        for _ in 0..2 {
            let (message, fds) = peek::<ToWorker>(b.as_fd()).unwrap().unwrap();
            assert!(matches!(message, ToWorker::Data { index: 7, .. }) && fds.len() == 1);
        }
        consume(b.as_fd()).unwrap();
        assert!(matches!(peek::<ToWorker>(b.as_fd()).unwrap().unwrap().0, ToWorker::End));
        consume(b.as_fd()).unwrap();
        assert_eq!(consume(b.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn messages_sent_before_the_peer_closed_with_unread_input_arrive() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &ToWorker::Data { attempt: 0, index: 0 }, &[a.as_fd()]).unwrap();
        send(b.as_fd(), &FromWorker::Failed { reason: "last words".into(), full: false }, &[]).unwrap();
        // This closes the end with the first message unread.
        drop(b);
        let (message, _) = receive::<FromWorker>(a.as_fd()).unwrap().unwrap();
        assert!(matches!(message, FromWorker::Failed { reason, .. } if reason == "last words"));
        assert!(receive::<FromWorker>(a.as_fd()).unwrap().is_none());
    }
}
