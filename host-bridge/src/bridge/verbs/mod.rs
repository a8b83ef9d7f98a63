//! Transport `verbs`: commands and answers as messages, bulk data as RDMA writes between the client's own
//! pages and the server's staging memory.
//!
//! ```text
//!   ring ──▶ relay ──▶ queue 0: messages ─────────▶        COMMANDS, REGION_KEY
//!   slots, progress ◀─ queue 0: messages ◀─────────        REPLY, PROGRESS, DATA_SENT, SLOTS_FREE
//!   client's pages ═══ queues 1 … n: writes ══════▶        slots of the server's memory
//!   client's pages ◀══ queues 1 … n: writes ═══════        by the region's key
//! ```
//!
//! A region is registered with the RDMA device when the client registers it, and that registration serves
//! until the client unregisters it. The server gets a key for what it is to write, and only while somebody
//! waits for that. No CPU of this host touches bulk data; the server's copies once between the memory that is
//! written or sent here and its driver's own (`endpoint/verbs/`). The rules are the relay's
//! ([`relay`](super::relay)). The TCP connection of the handshake stays, for `ALIVE` and `BYE`. In reading
//! order: `links` (the connections), `memory` (the client's, and the server's keys for it), then `carrier`
//! (what the relay calls), `redial` (other queue pairs for a session that has lost its own).

mod carrier;
pub(super) mod links;
mod memory;
mod redial;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use self::carrier::{Left, VerbsCarrier};
use self::links::{Links, has_slots};
use self::memory::{DeviceMemory, Keys};
use super::config::SessionConfig;
use super::error::{ConnectError, RegionError};
use super::relay::{AllMemory, EndReason, Machine, Mailbox, RelayHandle, RestoredSlots, Slots, run};
use super::relayed::Relayed;
use super::resume::{Interruption, PROCESS_ENDED};
use super::saved::{InheritedRegion, SavedQueues, SavedRemote, StoredRegion, Succession, TakenOver, Terms};
use super::state::SessionState;
use super::transport::{RegionMemory, Transport};
use crate::memory::Memories;
use crate::verbs::{Device, Domain, RegisteredRegion, VerbsError};
use protocol::polling::{PollTime, processors};

/// How often a process that begins without an address looks for one.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Registers regions with the device.
fn memory_in(domain: Arc<Domain>, keys: Keys) -> impl Fn(&RegionMemory) -> Result<DeviceMemory, RegionError> {
    move |region| {
        let RegionMemory { memories, extents, size, read_only, .. } = region;
        let registered = RegisteredRegion::new(&domain, memories, extents, *size, *read_only)?;
        Ok(DeviceMemory::new(registered, *read_only, &keys))
    }
}

/// Starts the relay. The channel is ready when this returns.
pub(super) fn start(
    config: &SessionConfig,
    session: Arc<SessionState>,
    mut links: Links,
) -> Result<Box<dyn Transport>, ConnectError> {
    let (domain, config) = (Arc::clone(links.link.domain()), config.clone());
    // SAFETY: the relay drops the registration before it ends, and `session`, which owns the view, outlives
    // the relay.
    let arena = unsafe { RegisteredRegion::arena(&domain, &session.channel.view) }
        .map_err(|source| ConnectError::Verbs { source })?;
    let keys = Keys::new(&domain, links.several_keys);
    let for_relay = keys.clone();
    let (ledger, regions) =
        links.succession.take().map(|Succession { ledger, regions }| (ledger, regions)).unzip();
    let relay = RelayHandle::start(session, move |session, mailbox| {
        let (queues, link) = (&links.queues, &links.link);
        let under_way = link.most_under_way();
        let schedule = Slots::new(queues.slots, queues.slot_size, link.data_queues(), under_way);
        let schedule = if links.ticket.survives() { schedule.acknowledged() } else { schedule };
        let schedule = if ledger.is_some() { schedule.noted() } else { schedule };
        let carrier = match VerbsCarrier::new(session, mailbox, links, &config) {
            Ok(carrier) => carrier,
            Err(end) => return end,
        };
        let arena = arena.map(|registered| DeviceMemory::new(registered, false, &for_relay));
        let mut machine = Machine::new(session, arena, schedule, config.silence);
        if let Some(ledger) = ledger {
            machine.note_in(ledger);
        }
        run(session, mailbox, machine, carrier, PollTime::giving_way(config.poll, processors()), None)
    })?;
    Ok(Box::new(Relayed::new(relay, regions, memory_in(domain, keys))))
}

/// Goes on with a session that another process had. Gives the regions that it has. Does not block.
pub(super) fn resume(
    config: &SessionConfig,
    session: Arc<SessionState>,
    saved: &SavedRemote,
    own: Option<&BTreeMap<u32, Memories>>,
) -> io::Result<(Box<dyn Transport>, Vec<InheritedRegion>)> {
    let queues = saved.queues.filter(has_slots);
    let queues = queues.ok_or_else(|| io::Error::other("it did not go over verbs"))?;
    // Registering takes long where there is much memory.
    let region = |memories: &Memories, _, region| (memories.clone(), region);
    let TakenOver { ledger, regions, memory, inherited } = saved.take_over(&session, own, region)?;
    let mut config = config.clone();
    config.verbs.queue_depth = Some(queues.depth);
    config.verbs.queue_pairs = Some(saved.terms().connections() as u32);
    config.verbs.check().map_err(io::Error::other)?;
    // The link may have been down when the other process ended.
    let domain = Device::open_again(&config.verbs).and_then(Domain::new).map_err(io::Error::other)?;
    let (keys, terms) = (Keys::of_another_process(&domain), saved.terms());
    let for_relay = (Arc::clone(&domain), keys.clone());
    let relay = RelayHandle::start(session, move |session, mailbox| {
        relay_on(session, mailbox, &config, (terms, &queues), &for_relay, (&ledger, memory))
    });
    let relay = relay.map_err(io::Error::other)?;
    Ok((Box::new(Relayed::new(relay, Some(regions), memory_in(domain, keys))), inherited))
}

/// Regions of another process by their ids, each with the memories that it lies in.
type StoredRegions = Vec<(u32, (Memories, StoredRegion))>;

/// The relay of a session that another process had.
fn relay_on(
    session: &Arc<SessionState>,
    mailbox: &Mailbox<DeviceMemory>,
    config: &SessionConfig,
    (terms, queues): (Terms, &SavedQueues),
    (domain, keys): &(Arc<Domain>, Keys),
    (ledger, regions): (&impl AsFd, StoredRegions),
) -> EndReason {
    let ticket = terms.ticket(config, false);
    let (lanes, under_way) = (terms.connections(), terms.connections() * queues.depth as usize);
    let ready = await_address(session, mailbox, keys, ticket.limit(session));
    let begun = ready.and_then(|()| memory(session, domain, keys, regions)).and_then(|memory| {
        let schedule = Slots::new(queues.slots, queues.slot_size, lanes, under_way).acknowledged().noted();
        let size = (lanes, queues.slots);
        let restored = Machine::restore_verbs(session, memory, schedule, config.silence, ledger, size)?;
        let RestoredSlots { machine, out, writes, keys, generation } = restored;
        let left = Left { out, writes, keys, generation };
        let carrier = VerbsCarrier::restored(session, mailbox, (domain, &ticket, queues), config, left)?;
        Ok((machine, carrier))
    });
    match begun {
        Ok((machine, carrier)) => {
            let (poll, lost) = (PollTime::giving_way(config.poll, processors()), PROCESS_ENDED.to_owned());
            run(session, mailbox, machine, carrier, poll, Some(lost))
        }
        Err(end) => {
            ticket.farewell().say(config);
            end
        }
    }
}

/// Waits until keys can be given, which what is restored needs: the port may have no address now, and without
/// one there is no link either. Meanwhile nothing reaches the client's memory, and of what other threads ask
/// for, only a pause and the session's end are acted on.
fn await_address(
    session: &Arc<SessionState>,
    mailbox: &Mailbox<DeviceMemory>,
    keys: &Keys,
    limit: Duration,
) -> Result<(), EndReason> {
    let mut waits = None;
    loop {
        let why = match keys.prepare() {
            Ok(()) => return Ok(()),
            Err(VerbsError::Broken(why)) => why,
            Err(e) => return Err(e.into()),
        };
        if let Some(reason) = mailbox.closing() {
            return Err(EndReason::Asked(reason));
        }
        if mailbox.is_to_pause() {
            mailbox.rest();
        }
        let lost = waits
            .get_or_insert_with(|| Interruption::begin(Arc::clone(session), PROCESS_ENDED.to_owned(), limit));
        if let Err(seconds) = lost.look() {
            return Err(EndReason::Gone(format!("{PROCESS_ENDED}, and for {seconds} s {why}")));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Registers the client's memory: the arena, and regions.
fn memory(
    session: &SessionState,
    domain: &Arc<Domain>,
    keys: &Keys,
    regions: StoredRegions,
) -> Result<AllMemory<DeviceMemory>, EndReason> {
    // SAFETY: the relay drops the registration before it ends, and `session`, which owns the view, outlives
    // the relay.
    let arena = unsafe { RegisteredRegion::arena(domain, &session.channel.view) }?;
    let region = |(id, (memories, region)): (u32, (Memories, StoredRegion))| {
        let StoredRegion { size, read_only, extents, .. } = region;
        let registered = RegisteredRegion::new(domain, &memories, &extents, size, read_only)?;
        Ok((id, DeviceMemory::new(registered, read_only, keys)))
    };
    let regions = regions.into_iter().map(region).collect::<Result<_, EndReason>>()?;
    Ok((arena.map(|registered| DeviceMemory::new(registered, false, keys)), regions))
}
