//! What another process needs to go on with a session over `tcp`: how to reach the server as the same client, the relay's ledger, and the session's regions.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::bridge::resume::{Farewell, Ticket};
use crate::bridge::saved::About;
use crate::bridge::{ConnectError, SessionConfig};

/// A saved session.
#[derive(Debug)]
pub(in crate::bridge) struct SavedTcp {
    /// What an operator is told of it.
    pub(in crate::bridge) about: About,
    terms: Terms,
    /// `None`: the session can only be ended, because the server does not keep it, or because it goes over `verbs`.
    pub(super) memory: Option<SavedMemory>,
}

/// Files in memory that change while the session runs.
#[derive(Debug)]
pub(super) struct SavedMemory {
    /// The [ledger](crate::bridge::relay::Ledger).
    pub(super) ledger: OwnedFd,
    /// The [regions](super::RegionsFile).
    pub(super) regions: OwnedFd,
    /// What was [compressed](crate::bridge::relay::Room). `None`: the server does not understand that, or nothing is to be compressed.
    pub(super) compressed: Option<OwnedFd>,
}

/// What the server has granted, and how it knows the session.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    numbers: Numbers,
    /// It holds the session's secret.
    farewell: Farewell,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Numbers {
    /// Bytes of data that the server takes without a grant.
    eager: u64,
    /// How long it took to connect the first time, in ns.
    dialed_in: u64,
    connections: u32,
    /// Not 0: the server keeps what it is sent.
    cache: u32,
}

impl SavedTcp {
    pub(in crate::bridge) fn new(ticket: &Ticket, connections: usize, about: About) -> SavedTcp {
        let numbers = Numbers {
            eager: ticket.eager,
            dialed_in: u64::try_from(ticket.dialed_in.as_nanos()).unwrap_or(u64::MAX),
            connections: connections as u32,
            cache: ticket.has_cache.into(),
        };
        SavedTcp { about, terms: Terms { numbers, farewell: ticket.farewell() }, memory: None }
    }

    /// Bytes, which contain the session's secret, and descriptors.
    pub(in crate::bridge) fn parts(&self) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        let Terms { numbers, farewell } = &self.terms;
        let bytes = [self.about.as_bytes(), numbers.as_bytes(), &farewell.to_bytes()].concat();
        let files = self.memory.iter().flat_map(|SavedMemory { ledger, regions, compressed }| {
            [Some(ledger), Some(regions), compressed.as_ref()].into_iter().flatten().map(OwnedFd::as_fd)
        });
        (bytes, files.collect())
    }

    /// What [`parts`](Self::parts) gave.
    pub(in crate::bridge) fn from_parts(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<SavedTcp> {
        let (about, rest) = About::read_from_prefix(bytes).ok()?;
        let (numbers, rest) = Numbers::read_from_prefix(rest).ok()?;
        let terms = Terms { numbers, farewell: Farewell::from_bytes(rest)? };
        let mut descriptors = descriptors.into_iter();
        let memory = match (descriptors.next(), descriptors.next(), descriptors.next()) {
            (None, ..) => None,
            (Some(ledger), Some(regions), compressed) => Some(SavedMemory { ledger, regions, compressed }),
            _ => return None,
        };
        if descriptors.next().is_some() {
            return None;
        }
        Some(SavedTcp { about, terms, memory })
    }

    pub(super) fn terms(&self) -> Terms {
        self.terms
    }

    /// Tells the server that the session has ended. Does not block.
    pub(in crate::bridge) fn end(&self, config: &SessionConfig) {
        self.terms.farewell.say(config);
    }
}

impl Terms {
    /// Data connections.
    pub(super) fn connections(&self) -> usize {
        self.numbers.connections as usize
    }

    /// What it takes to resume the session. May ask for the host's key. `compresses`: its server understands compressed data.
    pub(super) fn ticket(self, config: &SessionConfig, compresses: bool) -> Result<Ticket, ConnectError> {
        let Numbers { eager, dialed_in, cache, .. } = self.numbers;
        let dialed_in = Duration::from_nanos(dialed_in);
        Ticket::restored(self.farewell, config, eager, dialed_in, (cache != 0, compresses))
    }
}
