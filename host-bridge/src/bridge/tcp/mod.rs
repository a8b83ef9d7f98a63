//! Transport `tcp`: one connection for commands, several for bulk data, and a relay thread between them and the channel.
//!
//! ```text
//!   ring ──▶ relay ──▶ control ─────────▶        COMMANDS, many records in one frame
//!   slots, progress ◀─ control ◀─────────        REPLY, PROGRESS, DATA_SENT
//!   client's pages ═══ lane 0 … lane n ══        pieces, sent and received in place by vectored calls
//! ```
//!
//! In reading order: the handshake here, then `relay` (the loop), `control` and `lane` (the two kinds of connection), `hand` (threads for long pieces), `transfer` (data under way),
//! `socket` (system calls).

pub(super) mod control;
mod hand;
mod lane;
mod relay;
mod socket;
mod transfer;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::{BadGreeting, Hello, Welcome, purpose};
use protocol::version::{OURS, Version};

use self::relay::Relay;
use self::transfer::Region;
use super::core::{ChannelMemory, Core};
use super::relayed::{Relayed, dial};
use super::session::{Handshake, Turn, hello, welcome_at_once, welcome_in_turn};
use super::{Capabilities, Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::framing::{recv_greeting, send_message};
use zerocopy::IntoBytes;

/// Data connections that a server may ask for at most.
const MAX_LANES: u32 = 32;

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: OwnedFd,
    data: Vec<OwnedFd>,
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
    if count == 0 || count > MAX_LANES {
        return Err(ConnectError::Protocol {
            server: config.server.to_string(),
            what: format!("it asks for {count} data connections, where 1 to {MAX_LANES} make sense"),
        });
    }
    let mut data = Vec::with_capacity(count as usize);
    for index in 0..count {
        let lane = dial(&config.server, config.connect_timeout).map_err(failed)?;
        let more = Hello { token: handshake.token, index, ..hello(config, channel, purpose::DATA, 0) };
        send_message(lane.as_fd(), &[more.as_bytes()], &[]).map_err(failed)?;
        data.push(lane);
    }
    for lane in &data {
        welcome_at_once(config, lane.as_fd(), deadline)?;
    }
    Ok((Links { control, data }, handshake))
}

/// A session over TCP (or, for tests and special set-ups, over Unix stream sockets in the same manner).
#[derive(Debug)]
pub(super) struct Tcp {
    relayed: Relayed<Region>,
}

impl Tcp {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(config: &SessionConfig, core: Arc<Core>, links: Links) -> Result<Tcp, ConnectError> {
        let config = config.clone();
        let relayed = Relayed::start(core, move |core, mailbox| {
            let end = match Relay::new(core, mailbox, links, &config) {
                Ok(relay) => relay.run(),
                Err(end) => end,
            };
            crate::trace::save(&core.trace, &format!("bridge-{}", core.channel.pid));
            end
        })?;
        Ok(Tcp { relayed })
    }
}

impl Transport for Tcp {
    fn capabilities(&self) -> Capabilities {
        Capabilities { server_reads_ring: false, zero_copy: false, remote_write: false }
    }

    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let pieces = region.memories.resolve(&region.extents, region.size)?;
        self.relayed.register(id, Region { pieces, read_only: region.read_only })
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        self.relayed.unregister(id)
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.relayed.close(reason, patience)
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
