//! Transport `tcp`: one connection for frames, several for bulk data.
//!
//! ```text
//!   ring ──▶ relay ──▶ control connection ──▶        COMMANDS, many records in one frame
//!   slots, progress ◀─ control connection ◀──        REPLY, PROGRESS, DATA_SENT, DATA_GRANT
//!   client's pages ═══ data connection 0 … n ══      chunks, sent and received in place by vectored calls
//! ```
//!
//! The rules are the relay's ([`relay`](super::relay)). In reading order: the handshake here, then `carrier` (what the relay calls), `connection` (one data connection), `io_thread` (threads for
//! long chunks), `memory` (the client's memory for vectored calls), `socket` (system calls), `resume`
//! (new connections for a session that has lost its own).

mod carrier;
mod connection;
mod io_thread;
mod memory;
mod resume;
mod socket;

use std::sync::Arc;
use std::time::Duration;

use protocol::link::{Hello, purpose};

use self::carrier::TcpCarrier;
use self::memory::SocketMemory;
pub(super) use self::resume::Farewell;
use self::resume::{Ticket, Unbegun};
use super::connect::{Connections, Daemon, greet, open};
use super::relay::{Flows, Machine, RelayHandle, run};
use super::session::{Handshake, Turn, hello};
use super::state::{ChannelMemory, SessionState};
use super::{Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::stream::Stream;
use protocol::polling::PollTime;

/// Most data connections that a server may ask for.
const MAX_DATA_CONNECTIONS: u32 = 32;

/// A server that is waited for and silent for longer is asked for new connections.
const SILENCE: Duration = Duration::from_secs(2);

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: Stream,
    data: Vec<Stream>,
    /// Under TLS, of a session's first link: the connection to the daemon.
    daemon: Option<Daemon>,
    ticket: Ticket,
    /// For the first links of a session that has not begun.
    unbegun: Option<Unbegun>,
}

impl Links {
    /// For telling the server that the session has ended.
    pub(super) fn farewell(&self) -> Farewell {
        self.ticket.farewell()
    }
}

/// Connects to the server and shakes hands on every connection.
pub(super) fn connect(
    config: &SessionConfig,
    channel: &ChannelMemory,
    turn: &mut dyn Turn,
) -> Result<(Links, Handshake), ConnectError> {
    let first = hello(config, channel, purpose::CONTROL, config.data_connections);
    let greeted = greet(config, &first, turn)?;
    let ticket = Ticket::new(first, &greeted);
    // Whatever fails from here on: the server has the session already.
    let unbegun = Some(Unbegun::new(&ticket, config));
    let count = greeted.handshake.data_connections;
    if count == 0 || count > MAX_DATA_CONNECTIONS {
        return Err(ConnectError::Protocol {
            server: config.server.to_string(),
            what: format!(
                "it asks for {count} data connections, where 1 to {MAX_DATA_CONNECTIONS} make sense"
            ),
        });
    }
    let data = (0..count).map(|index| Hello { index, ..hello(config, channel, purpose::DATA, 0) });
    let (Connections { control, data, daemon }, handshake) = open(config, greeted, first, data.collect())?;
    Ok((Links { control, data, daemon, ticket, unbegun }, handshake))
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
            let cache = links.ticket.cache(&config);
            let schedule = Flows::new(links.data.len(), links.ticket.eager, cache);
            let survives = !links.ticket.limit(session).is_zero();
            let carrier = match TcpCarrier::new(session, mailbox, links, &config) {
                Ok(carrier) => carrier,
                Err(end) => return end,
            };
            let arena = SocketMemory::Arena(Arc::clone(session));
            // To ask for new connections harms nobody, and those that hang may do so for as long again.
            let silence = if survives { config.silence.min(SILENCE) } else { config.silence };
            let machine = Machine::new(session, Some(arena), schedule, silence);
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
