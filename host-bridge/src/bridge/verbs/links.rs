//! The connections of a session over `verbs`: how they are opened.

use std::io;
use std::time::{Duration, Instant};

use protocol::device::Answer;
use protocol::link::{
    GRANTED_SLOTS, Queues, SEVERAL_KEYS_SINCE, SLOT_DATA, VERBS_RESUME_SINCE, frame, purpose,
};
use zerocopy::IntoBytes;

use crate::bridge::config::SessionConfig;
use crate::bridge::connect::{Daemon, greet};
use crate::bridge::error::ConnectError;
use crate::bridge::resume::{Ticket, Unbegun};
use crate::bridge::saved::{About, SavedQueues, SavedRemote, Succession};
use crate::bridge::state::ChannelMemory;
use crate::bridge::welcome::{Handshake, Turn, hello};
use crate::framing::split_struct;
use crate::stream::Stream;
use crate::verbs::{Device, Domain, Link, Unconnected, VerbsError};

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(in crate::bridge) struct Links {
    pub(super) control: Stream,
    pub(super) link: Link,
    pub(super) queues: Queues,
    /// The most writes under way on each queue.
    pub(super) depth: u32,
    /// Under TLS: the connection to the daemon.
    pub(super) daemon: Option<Daemon>,
    pub(super) ticket: Ticket,
    /// The server can do with several keys for one memory.
    pub(super) several_keys: bool,
    /// The session has not begun.
    pub(super) unbegun: Unbegun,
    /// For a session that was saved: where another process continues.
    pub(super) succession: Option<Succession>,
}

impl Links {
    /// Has another process be able to go on with the session. `None`: it ends with its connections.
    pub(in crate::bridge) fn save(&mut self, about: About) -> io::Result<Option<SavedRemote>> {
        if !self.ticket.survives() {
            return Ok(None);
        }
        let mut saved = SavedRemote::new(&self.ticket, self.link.data_queues(), about);
        saved.queues = Some(saved_queues(&self.queues, self.depth));
        self.succession = Some(saved.remember(None)?);
        Ok(Some(saved))
    }

    /// The bridge can come back to the session from now on, because what was [saved](Self::save) is kept.
    /// Tells the server, which does not keep a session for long before that: on the control connection, where
    /// it arrives even if this process ends now.
    pub(in crate::bridge) fn open(self) -> Links {
        if self.ticket.survives() {
            // If that fails, the link is lost, and the bridge shows it by coming back.
            let _ = self.control.send_frame(frame::ALIVE, &[]);
        }
        self
    }
}

pub(super) fn saved_queues(queues: &Queues, depth: u32) -> SavedQueues {
    let Queues { slots_address, slots_key, slots, slot_size, .. } = *queues;
    SavedQueues { slots_address, slots_key, slots, slot_size, depth }
}

/// Whether there can be such slots.
pub(super) fn has_slots(queues: &SavedQueues) -> bool {
    let SavedQueues { slots_address, slots, slot_size, .. } = *queues;
    let end = u64::from(slots).checked_mul(slot_size.into()).and_then(|all| slots_address.checked_add(all));
    (GRANTED_SLOTS + 1..=1 << 16).contains(&slots) && slot_size >= SLOT_DATA + 4096 && end.is_some()
}

/// Connects to the server, shakes hands and connects the queue pairs.
pub(in crate::bridge) fn connect(
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
    let (greeted, mut handshake) = greet(config, &first, 0, turn)?;
    if handshake.version < VERBS_RESUME_SINCE {
        // It keeps sessions, and resumes them in a way of its own.
        handshake.grace = Duration::ZERO;
    }
    let several_keys = handshake.version >= SEVERAL_KEYS_SINCE;
    let ticket = Ticket::new(first, &greeted, &handshake, config);
    let unbegun = Unbegun::new(&ticket, config);
    // The queue pairs need the server's numbers, so the session begins with its answer.
    let (control, daemon) = greeted.control(config, first, (frame::QUEUES, offer.as_bytes()))?;
    let protocol = |what: String| ConnectError::Protocol { server: server(), what };
    let mut body = Vec::new();
    let deadline = Instant::now() + config.handshake_timeout;
    let queues = match control.recv_frame_until(&mut body, deadline).map_err(failed)? {
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
        link.give_up_stalled();
    }
    let depth = offer.depth;
    let succession = None;
    Ok((Links { control, link, queues, depth, daemon, ticket, several_keys, unbegun, succession }, handshake))
}
