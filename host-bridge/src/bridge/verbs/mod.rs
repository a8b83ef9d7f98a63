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
//! the server's copies once between the memory that is written or sent here and its driver's own (`endpoint/verbs.rs`).
//! The TCP connection of the handshake stays, for `ALIVE` and `BYE`. In reading order: [`connect`], [`relay`], [`transfer`].

mod relay;
mod transfer;

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use protocol::device::Answer;
use protocol::link::{Queues, SLOT_DATA, frame, purpose};
use zerocopy::IntoBytes;

use self::relay::Relay;
use self::transfer::Region;
use super::core::{ChannelMemory, Core, thread_name};
use super::session::{Handshake, hello, welcome};
use super::tcp::mailbox::{Mailbox, Message};
use super::tcp::{EndReason, dial};
use super::{Capabilities, Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::framing::{recv_frame, send_frame, send_message, split_struct};
use crate::verbs::{Device, Domain, Link, RegisteredRegion, Unconnected, VerbsError};

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: OwnedFd,
    link: Link,
    queues: Queues,
}

/// Connects to the server, shakes hands and connects the queue pairs.
pub(super) fn connect(
    config: &SessionConfig,
    channel: &ChannelMemory,
) -> Result<(Links, Handshake), ConnectError> {
    let server = || config.server.to_string();
    let failed = |source| ConnectError::NoServer { server: server(), source };
    let here = |source| ConnectError::Verbs { source };
    // What is wrong on this host is said before the server is bothered.
    let domain = Domain::new(Device::open(&config.verbs).map_err(here)?).map_err(here)?;
    let unconnected = Unconnected::new(&domain, &config.verbs).map_err(here)?;
    let deadline = Instant::now() + config.connect_timeout + config.handshake_timeout;
    let control = dial(&config.server, config.connect_timeout).map_err(failed)?;
    let offer = unconnected.offer(None);
    let first = hello(config, channel, purpose::VERBS, offer.count - 1);
    send_message(control.as_fd(), &[first.as_bytes()], &[]).map_err(failed)?;
    let handshake = welcome(config, control.as_fd(), deadline)?;
    let protocol = |what: String| ConnectError::Protocol { server: server(), what };
    send_frame(control.as_fd(), frame::QUEUES, &[offer.as_bytes()], &[]).map_err(failed)?;
    let mut body = Vec::new();
    let queues = match recv_frame(control.as_fd(), &mut body, &mut Vec::new()).map_err(failed)? {
        Some(frame::QUEUES) => split_struct::<Queues>(&body).map_err(|e| protocol(e.to_string()))?.0,
        Some(frame::BYE) => {
            let reason = String::from_utf8_lossy(&body).into_owned();
            return Err(ConnectError::Refused { server: server(), answer: Answer::NoResources, reason });
        }
        kind => return Err(protocol(format!("frame {kind:?} where QUEUES was due"))),
    };
    let end = u64::from(queues.slots)
        .checked_mul(queues.slot_size.into())
        .and_then(|all| queues.slots_address.checked_add(all));
    if queues.slots == 0 || queues.slots > 1 << 16 || queues.slot_size < SLOT_DATA + 4096 || end.is_none() {
        return Err(protocol(format!("it has {} slots of {} bytes", queues.slots, queues.slot_size)));
    }
    let link = unconnected.connect(&queues).map_err(|source| match source {
        VerbsError::Peer(what) => protocol(what),
        source => ConnectError::Verbs { source },
    })?;
    Ok((Links { control, link, queues }, handshake))
}

/// Whether the relay has ended.
#[derive(Debug, Default)]
struct Ended {
    over: Mutex<bool>,
    changed: Condvar,
}

/// A session over verbs.
pub(super) struct Verbs {
    core: Arc<Core>,
    domain: Arc<Domain>,
    mailbox: Arc<Mailbox<Region>>,
    ended: Arc<Ended>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Verbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verbs").field("core", &self.core).finish_non_exhaustive()
    }
}

impl Verbs {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(
        config: &SessionConfig,
        core: Arc<Core>,
        links: Links,
    ) -> Result<Verbs, ConnectError> {
        let here = |source| ConnectError::Here { source };
        let domain = Arc::clone(links.link.domain());
        // SAFETY: the relay drops the registration before it ends, and `core`, which owns the view, outlives the relay.
        let arena = unsafe { RegisteredRegion::arena(&domain, &core.channel.view) }
            .map_err(|source| ConnectError::Verbs { source })?;
        let mailbox = Arc::new(Mailbox::new().map_err(here)?);
        let ended = Arc::new(Ended::default());
        core.header().set_ready();
        let (for_relay, for_mailbox, for_ended, config) =
            (core.clone(), mailbox.clone(), ended.clone(), config.clone());
        let thread = std::thread::Builder::new()
            .name(thread_name("relay"))
            .spawn(move || {
                // A defect here must end this session with a reason, and not leave its client waiting.
                let end = catch_unwind(AssertUnwindSafe(|| {
                    match Relay::new(&for_relay, &for_mailbox, links, arena, &config) {
                        Ok(relay) => relay.run(),
                        Err(end) => end,
                    }
                }))
                .unwrap_or_else(|_| {
                    EndReason::Here("the relay failed; its message stands on standard error".into())
                });
                let reason = end.text(&for_relay.server);
                for_mailbox.close();
                match end {
                    EndReason::Asked(_) => for_relay.end(&reason),
                    _ => for_relay.lose(&reason),
                }
                *for_ended.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
                for_ended.changed.notify_all();
            })
            .map_err(here)?;
        Ok(Verbs { core, domain, mailbox, ended, thread: Mutex::new(Some(thread)) })
    }

    fn over(&self) -> RegionError {
        RegionError::Over(self.core.ended().unwrap_or("the session is over").to_owned())
    }

    fn wait_for_end(&self, patience: Duration) -> bool {
        let over = self.ended.over.lock().unwrap_or_else(PoisonError::into_inner);
        let (over, _) = self
            .ended
            .changed
            .wait_timeout_while(over, patience, |over| !*over)
            .unwrap_or_else(PoisonError::into_inner);
        *over
    }
}

impl Transport for Verbs {
    fn capabilities(&self) -> Capabilities {
        Capabilities { server_reads_ring: false, zero_copy: true, remote_write: true }
    }

    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let registered = RegisteredRegion::new(
            &self.domain,
            &region.memories,
            &region.extents,
            region.size,
            region.read_only,
        )?;
        let region = Region::new(registered, region.read_only);
        let (done, answer) = channel();
        self.mailbox.post(Message::Register { id, region, done }).map_err(|_| self.over())?;
        answer.recv().unwrap_or_else(|_| Err(self.over()))
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        let (done, answer) = channel();
        if self.mailbox.post(Message::Unregister { id, done }).is_err() {
            return Ok(());
        }
        match answer.recv() {
            Ok(answer) => answer,
            // The relay has ended, and with it every access.
            Err(_) => Ok(()),
        }
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        let _ = self.mailbox.post(Message::Close(reason.to_owned()));
        if !self.wait_for_end(patience) {
            return Closed::StillHeld;
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It has said that it is over; what is left of it is its own return.
            let _ = thread.join();
        }
        Closed::Released
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        self.close("closed", Duration::from_secs(60));
    }
}

/// The control connection, which says little.
fn quiet(control: OwnedFd) -> std::io::Result<TcpStream> {
    let control = TcpStream::from(control);
    control.set_nonblocking(true)?;
    Ok(control)
}
