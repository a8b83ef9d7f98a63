//! Transport `tcp`: one connection for frames, several for bulk data.
//!
//! ```text
//!   ring ──▶ relay ──▶ control connection ──▶        COMMANDS, many records in one frame
//!   slots, progress ◀─ control connection ◀──        REPLY, PROGRESS, DATA_SENT, DATA_GRANT
//!   client's pages ═══ data connection 0 … n ══      chunks, sent and received in place by vectored calls
//! ```
//!
//! The rules are the relay's ([`relay`](super::relay)). In reading order: `links` (the connections), then
//! `carrier` (what the relay calls), `connection` (one data connection), `io_thread` (threads for long
//! chunks), `compressor` (one that compresses chunks), `memory` (the client's memory for vectored calls),
//! `redial` (new connections for a session that has lost its own, see [`resume`](super::resume)).

mod carrier;
mod compressor;
mod connection;
mod io_thread;
pub(super) mod links;
mod memory;
mod redial;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use self::carrier::{Left, TcpCarrier};
use self::links::Links;
use self::memory::SocketMemory;
use super::config::SessionConfig;
use super::error::{ConnectError, RegionError};
use super::relay::{EndReason, Flows, Machine, Mailbox, RelayHandle, Restored, Room, rooms, run};
use super::relayed::Relayed;
use super::resume::PROCESS_ENDED;
use super::saved::{InheritedRegion, SavedRemote, StoredRegion, Succession, TakenOver, Terms};
use super::state::SessionState;
use super::transport::{RegionMemory, Transport};
use crate::memory::Memories;
use crate::stream::Stream;
use protocol::polling::PollTime;

/// A region as sockets use it.
fn memory_of(region: &RegionMemory) -> Result<SocketMemory, RegionError> {
    let runs = region.memories.resolve(&region.extents, region.size)?;
    Ok(SocketMemory::Region { runs, read_only: region.read_only })
}

/// Starts the relay. The channel is ready when this returns.
pub(super) fn start(
    config: &SessionConfig,
    session: Arc<SessionState>,
    mut links: Links,
) -> Result<Box<dyn Transport>, ConnectError> {
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
        let silence = if survives { config.silence.min(config.link_silence) } else { config.silence };
        let mut machine = Machine::new(session, Some(arena), schedule, silence);
        if let Some(ledger) = ledger {
            machine.note_in(ledger);
        }
        run(session, mailbox, machine, carrier, PollTime::new(config.poll), None)
    })?;
    Ok(Box::new(Relayed::new(relay, regions, memory_of)))
}

/// Goes on with a session that another process had. Gives the regions that it has. Does not block.
pub(super) fn resume(
    config: &SessionConfig,
    session: Arc<SessionState>,
    saved: &SavedRemote,
    own: Option<&BTreeMap<u32, Memories>>,
) -> io::Result<(Box<dyn Transport>, Vec<InheritedRegion>)> {
    let region =
        |_: &Memories, runs, StoredRegion { read_only, .. }| SocketMemory::Region { runs, read_only };
    let TakenOver { ledger, regions, memory, inherited } = saved.take_over(&session, own, region)?;
    let compressed = saved.memory.as_ref().and_then(|memory| memory.compressed.as_ref());
    let (config, saved) = (config.clone(), saved.terms());
    let rooms = compressed.map(|file| rooms(file, saved.connections())).transpose()?;
    let relay = RelayHandle::start(session, move |session, mailbox| {
        relay_on(session, mailbox, &config, saved, (&ledger, rooms), memory)
    });
    let relay = relay.map_err(io::Error::other)?;
    Ok((Box::new(Relayed::new(relay, Some(regions), memory_of)), inherited))
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
    let ticket = saved.ticket(config, rooms.is_some());
    let schedule = Flows::new(lanes, ticket.eager, ticket.cache(config)).noted();
    let memory = (Some(SocketMemory::Arena(Arc::clone(session))), regions);
    let silence = config.silence.min(config.link_silence);
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
