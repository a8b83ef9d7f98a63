//! Transport `verbs`: commands and answers as messages, bulk data as RDMA writes between the client's own pages and the server's staging memory.
//!
//! ```text
//!   ring ──▶ relay ──▶ queue 0: messages ─────────▶        COMMANDS, REGION_KEY
//!   slots, progress ◀─ queue 0: messages ◀─────────        REPLY, PROGRESS, DATA_SENT, SLOTS_FREE
//!   client's pages ═══ queues 1 … n: writes ══════▶        slots of the server's memory
//!   client's pages ◀══ queues 1 … n: writes ═══════        by the region's key
//! ```
//!
//! A region is registered with the RDMA device when the client registers it, and that registration serves until the client unregisters it. No CPU of this host touches bulk data;
//! the server's copies once between the memory that is written or sent here and its driver's own (`endpoint/verbs/`). The rules are the relay's ([`relay`](super::relay)).
//! The TCP connection of the handshake stays, for `ALIVE` and `BYE`. In reading order: [`connect`], then `carrier` (what the relay calls), `redial` (other queue pairs for a session that has lost its
//! own).

mod carrier;
mod redial;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use protocol::device::Answer;
use protocol::link::{GRANTED_SLOTS, Queues, SLOT_DATA, VERBS_RESUME_SINCE, frame, purpose};
use zerocopy::IntoBytes;

use self::carrier::{DeviceMemory, Left, VerbsCarrier};
use super::connect::{Daemon, greet};
use super::relay::{AllMemory, EndReason, Machine, Mailbox, RelayHandle, RestoredSlots, Slots, run};
use super::resume::{PROCESS_ENDED, Ticket, Unbegun};
use super::saved::About;
use super::session::{Handshake, InheritedRegion, Turn, hello};
use super::state::{ChannelMemory, SessionState};
use super::tcp::{RegionsFile, SavedQueues, SavedRemote, StoredRegion, Succession, TakenOver, Terms};
use super::{Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::framing::split_struct;
use crate::memory::Memories;
use crate::stream::Stream;
use crate::verbs::{Device, Domain, Link, RegisteredRegion, Unconnected, VerbsError};
use protocol::polling::{PollTime, processors};

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: Stream,
    link: Link,
    queues: Queues,
    /// The most writes under way on each queue.
    depth: u32,
    /// Under TLS: the connection to the daemon.
    daemon: Option<Daemon>,
    ticket: Ticket,
    /// The session has not begun.
    unbegun: Unbegun,
    /// If the session was saved: what another process goes on from.
    succession: Option<Succession>,
}

impl Links {
    /// Has another process be able to go on with the session. `None`: it ends with its connections.
    pub(super) fn save(&mut self, about: About) -> io::Result<Option<SavedRemote>> {
        if !self.ticket.survives() {
            return Ok(None);
        }
        let mut saved = SavedRemote::new(&self.ticket, self.link.data_queues(), about);
        saved.queues = Some(saved_queues(&self.queues, self.depth));
        self.succession = Some(saved.remember(None)?);
        Ok(Some(saved))
    }

    /// The bridge can come back to the session from now on, because what was [saved](Self::save) is kept. Tells the
    /// server, which does not keep a session for long before that: on the control connection, where it arrives even if
    /// this process ends now.
    pub(super) fn open(self) -> Links {
        if self.ticket.survives() {
            // If that fails, the link is lost, and the bridge shows it by coming back.
            let _ = self.control.send_frame(frame::ALIVE, &[]);
        }
        self
    }
}

fn saved_queues(queues: &Queues, depth: u32) -> SavedQueues {
    let Queues { slots_address, slots_key, slots, slot_size, .. } = *queues;
    SavedQueues { slots_address, slots_key, slots, slot_size, depth }
}

/// Whether there can be such slots.
fn has_slots(queues: &SavedQueues) -> bool {
    let SavedQueues { slots_address, slots, slot_size, .. } = *queues;
    let end = u64::from(slots).checked_mul(slot_size.into()).and_then(|all| slots_address.checked_add(all));
    (GRANTED_SLOTS + 1..=1 << 16).contains(&slots) && slot_size >= SLOT_DATA + 4096 && end.is_some()
}

/// Connects to the server, shakes hands and connects the queue pairs.
pub(super) fn connect(
    config: &SessionConfig,
    channel: &ChannelMemory,
    turn: &mut dyn Turn,
) -> Result<(Links, Handshake), ConnectError> {
    let server = || config.server.to_string();
    let failed = |source| ConnectError::NoServer { server: server(), source };
    let here = |source| ConnectError::Verbs { source };
    // What is wrong on this host is said before the server is bothered.
    let domain = Domain::new(Device::open(&config.verbs).map_err(here)?).map_err(here)?;
    let unconnected = Unconnected::new(&domain, &config.verbs).map_err(here)?;
    let offer = unconnected.offer(None);
    let first = hello(config, channel, purpose::VERBS, offer.count - 1);
    let (greeted, mut handshake) = greet(config, &first, turn)?;
    if handshake.version < VERBS_RESUME_SINCE {
        // It keeps sessions, and resumes them in a way of its own.
        handshake.grace = Duration::ZERO;
    }
    let ticket = Ticket::new(first, &greeted, &handshake, config);
    let unbegun = Unbegun::new(&ticket, config);
    let (control, daemon) = greeted.control(config, first)?;
    let protocol = |what: String| ConnectError::Protocol { server: server(), what };
    control.send_frame(frame::QUEUES, &[offer.as_bytes()]).map_err(failed)?;
    let mut body = Vec::new();
    let queues = match control.recv_frame(&mut body).map_err(failed)? {
        Some(frame::QUEUES) => split_struct::<Queues>(&body).map_err(|e| protocol(e.to_string()))?.0,
        Some(frame::BYE) => {
            let reason = String::from_utf8_lossy(&body).into_owned();
            return Err(ConnectError::Refused { server: server(), answer: Answer::NoResources, reason });
        }
        kind => return Err(protocol(format!("frame {kind:?} where QUEUES was expected"))),
    };
    if !has_slots(&saved_queues(&queues, offer.depth)) {
        return Err(protocol(format!("it has {} slots of {} bytes", queues.slots, queues.slot_size)));
    }
    let mut link = unconnected.connect(&queues).map_err(|source| match source {
        VerbsError::Peer(what) => protocol(what),
        source => ConnectError::Verbs { source },
    })?;
    if ticket.survives() {
        link.keep();
    }
    let depth = offer.depth;
    Ok((Links { control, link, queues, depth, daemon, ticket, unbegun, succession: None }, handshake))
}

/// A session over verbs.
#[derive(Debug)]
pub(super) struct Verbs {
    relay: RelayHandle<DeviceMemory>,
    domain: Arc<Domain>,
    /// For another process.
    regions: Option<RegionsFile>,
}

impl Verbs {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(
        config: &SessionConfig,
        session: Arc<SessionState>,
        mut links: Links,
    ) -> Result<Verbs, ConnectError> {
        let (domain, config) = (Arc::clone(links.link.domain()), config.clone());
        // SAFETY: the relay drops the registration before it ends, and `session`, which owns the view, outlives the relay.
        let arena = unsafe { RegisteredRegion::arena(&domain, &session.channel.view) }
            .map_err(|source| ConnectError::Verbs { source })?;
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
            let arena = arena.map(|registered| DeviceMemory::new(registered, false));
            let mut machine = Machine::new(session, arena, schedule, config.silence);
            if let Some(ledger) = ledger {
                machine.note_in(ledger);
            }
            run(session, mailbox, machine, carrier, PollTime::giving_way(config.poll, processors()), None)
        })?;
        Ok(Verbs { relay, domain, regions })
    }

    /// Goes on with a session that another process had. Gives the regions that it has. Does not block.
    pub(super) fn resume(
        config: &SessionConfig,
        session: Arc<SessionState>,
        saved: &SavedRemote,
        own: Option<&BTreeMap<u32, Memories>>,
    ) -> io::Result<(Verbs, Vec<InheritedRegion>)> {
        let queues = saved.queues.filter(has_slots);
        let queues = queues.ok_or_else(|| io::Error::other("it did not go over verbs"))?;
        // Registering takes long where there is much memory.
        let region = |memories: &Memories, _, region| (memories.clone(), region);
        let TakenOver { ledger, regions, memory, inherited } = saved.take_over(&session, own, region)?;
        let mut config = config.clone();
        config.verbs.queue_depth = Some(queues.depth);
        config.verbs.queue_pairs = Some(saved.terms().connections() as u32);
        config.verbs.check().map_err(io::Error::other)?;
        let domain = Device::open(&config.verbs).and_then(Domain::new).map_err(io::Error::other)?;
        let (for_relay, terms) = (Arc::clone(&domain), saved.terms());
        let relay = RelayHandle::start(session, move |session, mailbox| {
            relay_on(session, mailbox, &config, (terms, &queues), &for_relay, (&ledger, memory))
        });
        Ok((Verbs { relay: relay.map_err(io::Error::other)?, domain, regions: Some(regions) }, inherited))
    }
}

/// Regions of another process by their ids, each with the memories that it lies in.
type StoredRegions = Vec<(u32, (Memories, StoredRegion))>;

/// The relay of a session that another process had.
fn relay_on(
    session: &Arc<SessionState>,
    mailbox: &Mailbox<DeviceMemory>,
    config: &SessionConfig,
    (terms, queues): (Terms, &SavedQueues),
    domain: &Arc<Domain>,
    (ledger, regions): (&impl AsFd, StoredRegions),
) -> EndReason {
    let ticket = match terms.ticket(config, false) {
        Ok(ticket) => ticket,
        Err(e) => return EndReason::Here(e.to_string()),
    };
    let (lanes, under_way) = (terms.connections(), terms.connections() * queues.depth as usize);
    let begun = memory(session, domain, regions).and_then(|memory| {
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

/// Registers the client's memory: the arena, and regions.
fn memory(
    session: &SessionState,
    domain: &Arc<Domain>,
    regions: StoredRegions,
) -> Result<AllMemory<DeviceMemory>, EndReason> {
    // SAFETY: the relay drops the registration before it ends, and `session`, which owns the view, outlives the relay.
    let arena = unsafe { RegisteredRegion::arena(domain, &session.channel.view) }?;
    let region = |(id, (memories, region)): (u32, (Memories, StoredRegion))| {
        let StoredRegion { size, read_only, extents, .. } = region;
        let registered = RegisteredRegion::new(domain, &memories, &extents, size, read_only)?;
        Ok((id, DeviceMemory::new(registered, read_only)))
    };
    let regions = regions.into_iter().map(region).collect::<Result<_, EndReason>>()?;
    Ok((arena.map(|registered| DeviceMemory::new(registered, false)), regions))
}

impl Transport for Verbs {
    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let registered = RegisteredRegion::new(
            &self.domain,
            &region.memories,
            &region.extents,
            region.size,
            region.read_only,
        )?;
        RegionsFile::note(self.regions.as_ref(), id, &region)?;
        self.relay.register(id, DeviceMemory::new(registered, region.read_only))
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
