//! Transport `tcp`: one connection for frames, several for bulk data.
//!
//! ```text
//!   ring ──▶ relay ──▶ control connection ──▶        COMMANDS, many records in one frame
//!   slots, progress ◀─ control connection ◀──        REPLY, PROGRESS, DATA_SENT, DATA_GRANT
//!   client's pages ═══ data connection 0 … n ══      chunks, sent and received in place by vectored calls
//! ```
//!
//! The rules are the relay's ([`relay`](super::relay)). In reading order: the handshake here, then `carrier` (what the relay calls), `connection` (one data connection), `io_thread` (threads for
//! long chunks), `memory` (the client's memory for vectored calls), `socket` (system calls).

mod carrier;
mod connection;
mod io_thread;
mod memory;
mod socket;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::{BadGreeting, Hello, Welcome, purpose};
use protocol::version::{OURS, Version};

use self::carrier::TcpCarrier;
use self::memory::SocketMemory;
use super::relay::{Flows, Machine, RelayHandle, run};
use super::session::{Handshake, Turn, hello, welcome_at_once, welcome_in_turn};
use super::state::{ChannelMemory, SessionState};
use super::{Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::framing::{connect as dial, recv_greeting, send_message};
use crate::stream::Stream;
use protocol::polling::PollTime;
use zerocopy::IntoBytes;

/// Most data connections that a server may ask for.
const MAX_DATA_CONNECTIONS: u32 = 32;

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: Stream,
    data: Vec<Stream>,
}

/// Connects to the server and shakes hands on every connection.
pub(super) fn connect(
    config: &SessionConfig,
    channel: &ChannelMemory,
    turn: &mut dyn Turn,
) -> Result<(Links, Handshake), ConnectError> {
    let failed = |source| ConnectError::NoServer { server: config.server.to_string(), source };
    let handshake_deadline = Instant::now() + config.connect_timeout + config.handshake_timeout;
    let control = dial(&config.server, config.connect_timeout).map_err(failed)?;
    let first = hello(config, channel, purpose::CONTROL, config.data_connections);
    send_message(control.as_fd(), &[first.as_bytes()], &[]).map_err(failed)?;
    let handshake = welcome_in_turn(config, control.as_fd(), handshake_deadline, turn)?;
    let deadline = Instant::now() + config.connect_timeout + config.handshake_timeout;
    let count = handshake.data_connections;
    if count == 0 || count > MAX_DATA_CONNECTIONS {
        return Err(ConnectError::Protocol {
            server: config.server.to_string(),
            what: format!(
                "it asks for {count} data connections, where 1 to {MAX_DATA_CONNECTIONS} make sense"
            ),
        });
    }
    let mut data = Vec::with_capacity(count as usize);
    for index in 0..count {
        let connection = dial(&config.server, config.connect_timeout).map_err(failed)?;
        let more = Hello { token: handshake.token, index, ..hello(config, channel, purpose::DATA, 0) };
        send_message(connection.as_fd(), &[more.as_bytes()], &[]).map_err(failed)?;
        data.push(connection);
    }
    for connection in &data {
        welcome_at_once(config, connection.as_fd(), deadline)?;
    }
    let data = data.into_iter().map(Stream::from).collect();
    Ok((Links { control: control.into(), data }, handshake))
}

/// A session over TCP (or, for tests and special set-ups, over Unix stream sockets in the same manner).
#[derive(Debug)]
pub(super) struct Tcp {
    relay: RelayHandle<SocketMemory>,
}

impl Tcp {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(
        config: &SessionConfig,
        session: Arc<SessionState>,
        links: Links,
    ) -> Result<Tcp, ConnectError> {
        let config = config.clone();
        let relay = RelayHandle::start(session, move |session, mailbox| {
            let schedule = Flows::new(links.data.len());
            let carrier = match TcpCarrier::new(session, mailbox, links, &config) {
                Ok(carrier) => carrier,
                Err(end) => return end,
            };
            let arena = SocketMemory::Arena(Arc::clone(session));
            let machine = Machine::new(session, Some(arena), schedule, config.silence);
            run(session, mailbox, machine, carrier, PollTime::new(config.poll))
        })?;
        Ok(Tcp { relay })
    }
}

impl Transport for Tcp {
    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let runs = region.memories.resolve(&region.extents, region.size)?;
        self.relay.register(id, SocketMemory::Region { runs, read_only: region.read_only })
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        self.relay.unregister(id)
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.relay.close(reason, patience)
    }
}

/// Reads a welcome with a deadline, for all transports.
pub(super) fn receive_welcome(
    socket: BorrowedFd<'_>,
    deadline: Instant,
) -> io::Result<Result<(Welcome, Version), BadGreeting>> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let time = nix::sys::time::TimeVal::new(left.as_secs() as i64, i64::from(left.subsec_micros()));
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::ReceiveTimeout, &time)?;
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::SendTimeout, &time)?;
    recv_greeting(socket, &OURS).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "no answer in time"),
        io::ErrorKind::UnexpectedEof => {
            io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection without an answer")
        }
        _ => e,
    })
}
