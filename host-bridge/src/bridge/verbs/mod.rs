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

use std::sync::Arc;
use std::time::Duration;

use protocol::device::Answer;
use protocol::link::{GRANTED_SLOTS, Queues, SLOT_DATA, frame, purpose};
use zerocopy::IntoBytes;

use self::carrier::{DeviceMemory, VerbsCarrier};
use super::connect::{Daemon, greet};
use super::relay::{Machine, RelayHandle, Slots, run};
use super::resume::{Ticket, Unbegun};
use super::saved::About;
use super::session::{Handshake, Turn, hello};
use super::state::{ChannelMemory, SessionState};
use super::tcp::SavedTcp;
use super::{Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::framing::split_struct;
use crate::stream::Stream;
use crate::verbs::{Device, Domain, Link, RegisteredRegion, Unconnected, VerbsError};
use protocol::polling::{PollTime, processors};

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: Stream,
    link: Link,
    queues: Queues,
    /// Under TLS: the connection to the daemon.
    daemon: Option<Daemon>,
    ticket: Ticket,
    /// The session has not begun.
    unbegun: Unbegun,
}

impl Links {
    /// Has another process be able to end the session, which a server that keeps it would not learn otherwise. `None`: it ends with its connections.
    pub(super) fn save(&self, about: About) -> Option<SavedTcp> {
        self.ticket.survives().then(|| SavedTcp::new(&self.ticket, 0, about))
    }
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
    let (greeted, handshake) = greet(config, &first, turn)?;
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
    let end = u64::from(queues.slots)
        .checked_mul(queues.slot_size.into())
        .and_then(|all| queues.slots_address.checked_add(all));
    let planned = queues.slots.checked_sub(GRANTED_SLOTS).filter(|slots| *slots > 0);
    if planned.is_none() || queues.slots > 1 << 16 || queues.slot_size < SLOT_DATA + 4096 || end.is_none() {
        return Err(protocol(format!("it has {} slots of {} bytes", queues.slots, queues.slot_size)));
    }
    let link = unconnected.connect(&queues).map_err(|source| match source {
        VerbsError::Peer(what) => protocol(what),
        source => ConnectError::Verbs { source },
    })?;
    Ok((Links { control, link, queues, daemon, ticket, unbegun }, handshake))
}

/// A session over verbs.
#[derive(Debug)]
pub(super) struct Verbs {
    relay: RelayHandle<DeviceMemory>,
    domain: Arc<Domain>,
}

impl Verbs {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(
        config: &SessionConfig,
        session: Arc<SessionState>,
        links: Links,
    ) -> Result<Verbs, ConnectError> {
        let (domain, config) = (Arc::clone(links.link.domain()), config.clone());
        // SAFETY: the relay drops the registration before it ends, and `session`, which owns the view, outlives the relay.
        let arena = unsafe { RegisteredRegion::arena(&domain, &session.channel.view) }
            .map_err(|source| ConnectError::Verbs { source })?;
        let relay = RelayHandle::start(session, move |session, mailbox| {
            let (queues, link) = (&links.queues, &links.link);
            let under_way = link.most_under_way();
            let schedule = Slots::new(queues.slots, queues.slot_size, link.data_queues(), under_way);
            let carrier = match VerbsCarrier::new(session, mailbox, links, &config) {
                Ok(carrier) => carrier,
                Err(end) => return end,
            };
            let arena = arena.map(|registered| DeviceMemory::new(registered, false));
            let machine = Machine::new(session, arena, schedule, config.silence);
            run(session, mailbox, machine, carrier, PollTime::giving_way(config.poll, processors()), None)
        })?;
        Ok(Verbs { relay, domain })
    }
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
        self.relay.register(id, DeviceMemory::new(registered, region.read_only))
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        self.relay.unregister(id)
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.relay.close(reason, patience)
    }
}
