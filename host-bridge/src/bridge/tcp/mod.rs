//! Transport `tcp`: one connection for commands, several for bulk data, and a relay thread between them and the channel.
//!
//! ```text
//!   ring ──▶ relay ──▶ control ─────────▶        COMMANDS, many records in one frame
//!   slots, progress ◀─ control ◀─────────        REPLY, PROGRESS, DATA_SENT
//!   client's pages ═══ lane 0 … lane n ══        pieces, sent and received in place by vectored calls
//! ```
//!
//! In reading order: the handshake here, then `relay` (the loop), `control` and `lane` (the two kinds of connection), `hand` (threads for long pieces), `transfer` (data under way), `mailbox` (what
//! other threads ask of the relay), `socket` (system calls).

pub(super) mod control;
mod hand;
mod lane;
pub(super) mod mailbox;
mod relay;
mod socket;
mod transfer;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use protocol::link::{Hello, Welcome, purpose};

use self::mailbox::{Mailbox, Message};
use self::relay::Relay;
use self::transfer::Region;
use super::core::{ChannelMemory, Core, thread_name};
use super::session::{Handshake, hello, welcome};
use super::{Capabilities, Closed, ConnectError, RegionError, RegionMemory, SessionConfig, Transport};
use crate::framing::{Address, connect_tcp, connect_unix, send_message};
use zerocopy::IntoBytes;

/// Data connections that a server may ask for at most.
const MAX_LANES: u32 = 32;

/// Why a relay ended.
#[derive(Debug)]
pub(super) enum EndReason {
    /// The client did what no correct client does.
    Client(String),
    /// The server did what no correct server does.
    Server(String),
    /// A connection to the server broke.
    Gone(String),
    /// The server said goodbye.
    Bye(String),
    /// Something on this host failed.
    Here(String),
    /// [`Transport::close`].
    Asked(String),
}

impl EndReason {
    pub(super) fn text(&self, server: &str) -> String {
        match self {
            EndReason::Client(what) => format!("malformed command in the channel: {what}"),
            EndReason::Server(what) => {
                format!("the server at {server} does not keep to the protocol: {what}")
            }
            EndReason::Gone(what) => format!("connection to the server at {server} lost: {what}"),
            EndReason::Bye(what) if what.is_empty() => format!("the server at {server} ended the session"),
            EndReason::Bye(what) => format!("the server at {server} ended the session: {what}"),
            EndReason::Here(what) => {
                format!("this host failed while talking to the server at {server}: {what}")
            }
            EndReason::Asked(what) => what.clone(),
        }
    }
}

/// The connections of a session after the handshake.
#[derive(Debug)]
pub(super) struct Links {
    control: OwnedFd,
    data: Vec<OwnedFd>,
}

pub(super) fn dial(address: &Address, timeout: Duration) -> io::Result<OwnedFd> {
    Ok(match address {
        Address::Tcp(host, port) => connect_tcp(host, *port, timeout)?.into(),
        Address::Unix(path) => connect_unix(path)?.into(),
    })
}

/// Connects to the server and shakes hands on every connection.
pub(super) fn connect(
    config: &SessionConfig,
    channel: &ChannelMemory,
) -> Result<(Links, Handshake), ConnectError> {
    let failed = |source| ConnectError::NoServer { server: config.server.to_string(), source };
    let deadline = Instant::now() + config.connect_timeout;
    let handshake_deadline = deadline + config.handshake_timeout;
    let control = dial(&config.server, config.connect_timeout).map_err(failed)?;
    let first = hello(config, channel, purpose::CONTROL, config.data_connections);
    send_message(control.as_fd(), &[first.as_bytes()], &[]).map_err(failed)?;
    let handshake = welcome(config, control.as_fd(), handshake_deadline)?;
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
        welcome(config, lane.as_fd(), handshake_deadline)?;
    }
    Ok((Links { control, data }, handshake))
}

/// Whether the relay has ended.
#[derive(Debug, Default)]
struct Ended {
    over: Mutex<bool>,
    changed: Condvar,
}

/// A session over TCP (or, for tests and special set-ups, over Unix stream sockets in the same manner).
pub(super) struct Tcp {
    core: Arc<Core>,
    mailbox: Arc<Mailbox<Region>>,
    ended: Arc<Ended>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Tcp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tcp").field("core", &self.core).finish_non_exhaustive()
    }
}

impl Tcp {
    /// Starts the relay. The channel is ready when this returns.
    pub(super) fn start(config: &SessionConfig, core: Arc<Core>, links: Links) -> Result<Tcp, ConnectError> {
        let here = |source| ConnectError::Here { source };
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
                    match Relay::new(&for_relay, &for_mailbox, links, &config) {
                        Ok(relay) => relay.run(),
                        Err(end) => end,
                    }
                }))
                .unwrap_or_else(|_| {
                    EndReason::Here("the relay failed; its message stands on standard error".into())
                });
                let reason = end.text(&for_relay.server);
                crate::trace::save(&for_relay.trace, &format!("bridge-{}", for_relay.channel.pid));
                for_mailbox.close();
                match end {
                    EndReason::Asked(_) => for_relay.end(&reason),
                    _ => for_relay.lose(&reason),
                }
                *for_ended.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
                for_ended.changed.notify_all();
            })
            .map_err(here)?;
        Ok(Tcp { core, mailbox, ended, thread: Mutex::new(Some(thread)) })
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

impl Transport for Tcp {
    fn capabilities(&self) -> Capabilities {
        Capabilities { server_reads_ring: false, zero_copy: false, remote_write: false }
    }

    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let pieces = region.memories.resolve(&region.extents, region.size)?;
        let region = Region { pieces, read_only: region.read_only };
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

impl Drop for Tcp {
    fn drop(&mut self) {
        self.close("closed", Duration::from_secs(60));
    }
}

/// Reads a welcome with a deadline; used by both transports.
pub(super) fn receive_welcome(socket: BorrowedFd<'_>, deadline: Instant) -> io::Result<Option<Welcome>> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let time = nix::sys::time::TimeVal::new(left.as_secs() as i64, i64::from(left.subsec_micros()));
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::ReceiveTimeout, &time)?;
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::SendTimeout, &time)?;
    let result = crate::framing::recv_struct::<Welcome>(socket, &mut Vec::new());
    match result {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))
        }
        other => other,
    }
}
