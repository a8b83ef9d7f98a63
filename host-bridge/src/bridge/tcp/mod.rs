//! Transport `tcp`: one connection for frames, several for bulk data.
//!
//! ```text
//!   ring ──▶ relay ──▶ control connection ──▶        COMMANDS, many records in one frame
//!   slots, progress ◀─ control connection ◀──        REPLY, PROGRESS, DATA_SENT, DATA_GRANT
//!   client's pages ═══ data connection 0 … n ══      chunks, sent and received in place by vectored calls
//! ```
//!
//! The rules are the relay's ([`relay`](super::relay)). In reading order: the [`Greeting`] here, then `carrier` (what the relay calls), `connection` (one data connection), `io_thread` (threads for
//! long chunks), `compressor` (one that compresses chunks), `memory` (the client's memory for vectored calls), `socket` (system calls), `redial`
//! (new connections for a session that has lost its own, see [`resume`](super::resume)), `saved` and `regions` (what another process needs to go on with a session).

mod carrier;
mod compressor;
mod connection;
mod io_thread;
mod memory;
mod redial;
mod regions;
mod saved;
mod socket;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use protocol::link::{Hello, purpose};

use self::carrier::{Left, TcpCarrier};
use self::memory::SocketMemory;
pub(super) use self::regions::{RegionsFile, StoredRegion};
pub(super) use self::saved::{SavedQueues, SavedRemote, Succession, TakenOver, Terms};
pub(super) use self::socket::{Socket, not_now};
use super::connect::{Daemon, Greeted, Opening, greet};
use super::relay::{
    EndReason, Flows, Machine, Mailbox, RelayHandle, Restored, Room, compressed_file, rooms, run,
};
use super::resume::{PROCESS_ENDED, Ticket, Unbegun};
use super::saved::About;
use super::session::{Handshake, InheritedRegion, Turn, hello};
use super::state::{ChannelMemory, SessionState};
use super::{Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::compression::CompressUse;
use crate::memory::Memories;
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
    /// The data connections, and how many they are. `None`: there are none, nor will there be before the session is resumed.
    opening: Option<Opening>,
    lanes: usize,
    /// Under TLS, of a session's first link: the connection to the daemon. The worker's welcome then comes on the control connection.
    daemon: Option<Daemon>,
    ticket: Ticket,
    /// Where compressed bytes lie, for each data connection. Empty: nothing is compressed.
    rooms: Vec<Arc<Room>>,
    /// For the first links of a session that has not begun.
    unbegun: Option<Unbegun>,
    /// If the session was saved: what another process goes on from.
    succession: Option<Succession>,
}

/// A server that has welcomed a session, which has its first connection only.
///
/// The server knows by the others that somebody has the session's secret, and keeps it for long from then on if connections are lost. So they are opened once the session is saved: whatever this
/// process comes to, another one can go on with the session or end it.
#[derive(Debug)]
pub(super) struct Greeting {
    greeted: Greeted,
    /// What the connections begin with: the control connection under TLS, and data connections.
    control: Hello,
    data: Vec<Hello>,
    ticket: Ticket,
    /// For compressed bytes, in a session that has some.
    compressed: Option<(OwnedFd, Vec<Arc<Room>>)>,
    /// Whatever fails from here on: the server has the session already.
    unbegun: Unbegun,
    succession: Option<Succession>,
}

impl Greeting {
    /// Has another process be able to go on with the session, or at least to end it.
    pub(super) fn save(&mut self, about: About) -> io::Result<SavedRemote> {
        let mut saved = SavedRemote::new(&self.ticket, self.data.len(), about);
        if self.ticket.survives() {
            let compressed = self.compressed.as_ref().map(|(file, _)| file.try_clone()).transpose()?;
            self.succession = Some(saved.remember(compressed)?);
        }
        Ok(saved)
    }

    /// Opens the session's other connections. Waits for the control connection only, on which commands may go before it is welcome and before there is a data connection.
    pub(super) fn open(self, config: &SessionConfig) -> Result<Links, ConnectError> {
        let Greeting { greeted, control, data, ticket, compressed, unbegun, succession } = self;
        let lanes = data.len();
        let opening = Some(Opening::begin(config, &greeted, data)?);
        let (control, daemon) = greeted.begin_control(config, control)?;
        let rooms = compressed.map(|(_, rooms)| rooms).unwrap_or_default();
        let unbegun = Some(unbegun);
        Ok(Links { control, opening, lanes, daemon, ticket, rooms, unbegun, succession })
    }
}

/// Has the server welcome a session.
pub(super) fn greet_server(
    config: &SessionConfig,
    channel: &ChannelMemory,
    turn: &mut dyn Turn,
) -> Result<(Greeting, Handshake), ConnectError> {
    let control = hello(config, channel, purpose::CONTROL, config.data_connections);
    let (greeted, handshake) = greet(config, &control, turn)?;
    let ticket = Ticket::new(control, &greeted, &handshake, config);
    let unbegun = Unbegun::new(&ticket, config);
    let count = handshake.data_connections;
    if count == 0 || count > MAX_DATA_CONNECTIONS {
        return Err(ConnectError::Protocol {
            server: config.server.to_string(),
            what: format!(
                "it asks for {count} data connections, where 1 to {MAX_DATA_CONNECTIONS} make sense"
            ),
        });
    }
    let data = (0..count).map(|index| Hello { index, ..hello(config, channel, purpose::DATA, 0) }).collect();
    let compressed = match ticket.compress {
        CompressUse::Never => None,
        _ => match compressed_memory(count as usize) {
            Ok(compressed) => Some(compressed),
            Err(e) => {
                tracing::warn!(server = %config.server, "data of a session is not compressed: {e}");
                None
            }
        },
    };
    Ok((Greeting { greeted, control, data, ticket, compressed, unbegun, succession: None }, handshake))
}

/// A file for the compressed bytes of `count` data connections, and their rooms.
fn compressed_memory(count: usize) -> io::Result<(OwnedFd, Vec<Arc<Room>>)> {
    let file = compressed_file(count)?;
    let rooms = rooms(&file, count)?;
    Ok((file, rooms))
}

/// A session over TCP (or, for tests and special set-ups, over Unix stream sockets in the same manner).
#[derive(Debug)]
pub(super) struct Tcp {
    relay: RelayHandle<SocketMemory>,
    /// For another process.
    regions: Option<RegionsFile>,
}

impl Tcp {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(
        config: &SessionConfig,
        session: Arc<SessionState>,
        mut links: Links,
    ) -> Result<Tcp, ConnectError> {
        let config = config.clone();
        let (ledger, regions) =
            links.succession.take().map(|Succession { ledger, regions }| (ledger, regions)).unzip();
        let relay = RelayHandle::start(session, move |session, mailbox| {
            let cache = links.ticket.cache(&config);
            let schedule = Flows::new(links.lanes, links.ticket.eager, cache);
            let schedule = if ledger.is_some() { schedule.noted() } else { schedule };
            let survives = !links.ticket.limit(session).is_zero();
            let carrier = match TcpCarrier::new(session, mailbox, links, &config) {
                Ok(carrier) => carrier,
                Err(end) => return end,
            };
            let arena = SocketMemory::Arena(Arc::clone(session));
            // To ask for new connections harms nobody, and those that hang may do so for as long again.
            let silence = if survives { config.silence.min(SILENCE) } else { config.silence };
            let mut machine = Machine::new(session, Some(arena), schedule, silence);
            if let Some(ledger) = ledger {
                machine.note_in(ledger);
            }
            run(session, mailbox, machine, carrier, PollTime::new(config.poll), None)
        })?;
        Ok(Tcp { relay, regions })
    }

    /// Goes on with a session that another process had. Gives the regions that it has. Does not block.
    pub(super) fn resume(
        config: &SessionConfig,
        session: Arc<SessionState>,
        saved: &SavedRemote,
        own: Option<&BTreeMap<u32, Memories>>,
    ) -> io::Result<(Tcp, Vec<InheritedRegion>)> {
        let region =
            |_: &Memories, runs, StoredRegion { read_only, .. }| SocketMemory::Region { runs, read_only };
        let TakenOver { ledger, regions, memory, inherited } = saved.take_over(&session, own, region)?;
        let compressed = saved.memory.as_ref().and_then(|memory| memory.compressed.as_ref());
        let (config, saved) = (config.clone(), saved.terms());
        let rooms = compressed.map(|file| rooms(file, saved.connections())).transpose()?;
        let relay = RelayHandle::start(session, move |session, mailbox| {
            relay_on(session, mailbox, &config, saved, (&ledger, rooms), memory)
        });
        Ok((Tcp { relay: relay.map_err(io::Error::other)?, regions: Some(regions) }, inherited))
    }
}

/// The relay of a session that another process had.
fn relay_on(
    session: &Arc<SessionState>,
    mailbox: &Mailbox<SocketMemory>,
    config: &SessionConfig,
    saved: Terms,
    (ledger, rooms): (&impl AsFd, Option<Vec<Arc<Room>>>),
    regions: Vec<(u32, SocketMemory)>,
) -> EndReason {
    let here = |what: &dyn std::fmt::Display| EndReason::Here(what.to_string());
    let lanes = saved.connections();
    let ticket = match saved.ticket(config, rooms.is_some()) {
        Ok(ticket) => ticket,
        Err(e) => return here(&e),
    };
    let schedule = Flows::new(lanes, ticket.eager, ticket.cache(config)).noted();
    let memory = (Some(SocketMemory::Arena(Arc::clone(session))), regions);
    let silence = config.silence.min(SILENCE);
    let rooms = rooms.unwrap_or_default();
    let restored = Machine::restore(session, memory, schedule, silence, (ledger, &rooms), lanes);
    let begun = restored.and_then(|Restored { machine, out, lanes, generation }| {
        let control = Stream::closed().map_err(|e| here(&e))?;
        let links = Links {
            control,
            opening: None,
            lanes: saved.connections(),
            daemon: None,
            ticket: ticket.clone(),
            rooms,
            unbegun: None,
            succession: None,
        };
        let left = Left { out, lanes, generation };
        Ok((machine, TcpCarrier::restored(session, mailbox, links, config, left)?))
    });
    match begun {
        Ok((machine, carrier)) => {
            let lost = Some(PROCESS_ENDED.to_owned());
            run(session, mailbox, machine, carrier, PollTime::new(config.poll), lost)
        }
        Err(end) => {
            ticket.farewell().say(config);
            end
        }
    }
}

impl Transport for Tcp {
    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let runs = region.memories.resolve(&region.extents, region.size)?;
        RegionsFile::note(self.regions.as_ref(), id, &region)?;
        self.relay.register(id, SocketMemory::Region { runs, read_only: region.read_only })
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        self.relay.unregister(id)?;
        RegionsFile::forget(self.regions.as_ref(), id);
        Ok(())
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.relay.close(reason, patience)
    }

    fn pause(&self) {
        self.relay.pause();
    }

    fn is_paused(&self, patience: Duration) -> bool {
        self.relay.is_paused(patience)
    }

    fn go_on(&self) -> io::Result<()> {
        self.relay.go_on();
        Ok(())
    }
}
