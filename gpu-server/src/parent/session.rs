//! A session, as the daemon knows it.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use handover::clock;
use identity::Secret;
use nix::poll::{PollFd, PollFlags};

use super::accounts::account::Account;
use super::control::Control;
use super::leases::table::LeaseId;
use super::record::Link;
use super::trust::Principal;
use crate::cuda_ipc::origin;
use crate::limits::Limits;
use crate::worker_protocol::{Counters, Kind, Token};

/// What is left of a session that is over: its client is gone, or it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// It is not over, as far as the daemon knows.
    No,
    /// Its worker should end by itself, until then.
    Until(Instant),
    /// The daemon has killed the worker.
    Killed,
}

/// What tells the daemon that a client which shares memory with its worker is gone.
#[derive(Clone)]
pub(super) enum Presence {
    /// The client has the other end of a pipe. It is gone when there is something to read here, or when
    /// nobody has that end any more. Its connection does not tell: it also closes when the client's host
    /// replaces the process that serves the session.
    Pipe(Arc<OwnedFd>),
    /// For a client that takes no pipe.
    Connection(Arc<Control>),
}

impl Presence {
    /// What has an event when the client is gone.
    pub(super) fn watched(&self) -> PollFd<'_> {
        match self {
            Presence::Pipe(pipe) => PollFd::new(pipe.as_fd(), PollFlags::POLLIN),
            Presence::Connection(control) => control.hung_up(),
        }
    }

    pub(super) fn is(&self, other: &Presence) -> bool {
        match (self, other) {
            (Presence::Pipe(one), Presence::Pipe(other)) => Arc::ptr_eq(one, other),
            (Presence::Connection(one), Presence::Connection(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Session {
    /// Where it comes from: see [`origin`].
    pub(super) fn origin(&self) -> String {
        origin(&self.principal.name, &self.peer, &self.client)
    }

    /// The state of its links, for the next daemon.
    pub(super) fn link(&self) -> Link {
        Link { parked: self.parked.map(clock::to_ns), attempt: self.attempt, resumed: self.resumed }
    }
}

/// See the module's documentation.
pub(super) struct Session {
    pub(super) kind: Kind,
    pub(super) client: String,
    pub(super) program: String,
    pub(super) pid: u32,
    pub(super) transport: &'static str,
    pub(super) peer: String,
    pub(super) since: Instant,
    pub(super) counters: Counters,
    /// Its name in metrics.
    pub(super) key: metrics::Key,
    pub(super) limits: Limits,
    /// The lease under which it runs.
    pub(super) lease: Option<LeaseId>,
    /// Numbers of its devices.
    pub(super) devices: Vec<u32>,
    pub(super) account: Account,
    pub(super) token: Token,
    pub(super) secret: Secret,
    pub(super) principal: Principal,
    /// Data connections that it was granted, and those of its first link without TLS.
    pub(super) data_connections: (u32, u32),
    /// Whether its connections use TLS.
    pub(super) encrypted: bool,
    /// For telling the client why its session ended if the worker no longer can. Replaced whenever the
    /// session is resumed without TLS. `None`: the previous daemon had it.
    pub(super) control: Option<Arc<Control>>,
    /// Since when it has no link.
    pub(super) parked: Option<Instant>,
    /// For a client that shares memory with the worker, unless the previous daemon had it.
    pub(super) presence: Option<Presence>,
    /// Whether its worker has to go.
    pub(super) leaving: Leaving,
    /// The latest of its links, and how often it resumed over new connections.
    pub(super) attempt: u32,
    pub(super) resumed: u64,
    /// Whether the worker has the connection. Before that, the client can still be given to another worker.
    pub(super) begun: bool,
    /// Whether its client has not been welcomed yet, and so has no session.
    pub(super) unwelcomed: bool,
    /// Whether a kernel has run too long.
    pub(super) overrun: bool,
    /// Whether the worker has reported the session's end, or the daemon has decided it.
    pub(super) ended: bool,
    /// Whether it ended without its client closing it.
    pub(super) lost: bool,
    /// How many daemons it has had before this one.
    pub(super) daemons: u32,
    /// Whether it is kept for the next daemon.
    pub(super) kept: bool,
    /// Events of other sessions that it has opened, and its slot in each.
    pub(super) opened: Vec<(Token, u16)>,
    /// The workers of sessions whose memory or events it has opened.
    pub(super) linked: BTreeSet<u32>,
}
