//! What another process needs to go on with a session over `tcp` or `verbs`: how to reach the server as the
//! same client, the relay's ledger, and the session's regions.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use protocol::channel::State;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::about::About;
use super::regions::{InheritedRegion, RegionsFile, StoredRegion};
use crate::bridge::config::SessionConfig;
use crate::bridge::relay::{Ledger, ledger_file};
use crate::bridge::resume::{Farewell, Ticket};
use crate::bridge::state::SessionState;
use crate::memory::{Memories, Runs};

/// A saved session with a server on another machine.
#[derive(Debug)]
pub(in crate::bridge) struct SavedRemote {
    /// What an operator is told of it.
    pub(in crate::bridge) about: About,
    terms: Terms,
    /// Over `verbs`.
    pub(in crate::bridge) queues: Option<SavedQueues>,
    /// `None`: the session can only be ended, because the server does not keep it.
    pub(in crate::bridge) memory: Option<SavedMemory>,
}

/// What a session over `verbs` has that does not change.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(in crate::bridge) struct SavedQueues {
    /// The server's slots.
    pub(in crate::bridge) slots_address: u64,
    pub(in crate::bridge) slots_key: u32,
    pub(in crate::bridge) slots: u32,
    pub(in crate::bridge) slot_size: u32,
    /// The most writes under way on each queue.
    pub(in crate::bridge) depth: u32,
}

/// Where it is noted what a session has done.
#[derive(Debug)]
pub(in crate::bridge) struct Succession {
    pub(in crate::bridge) ledger: Ledger,
    pub(in crate::bridge) regions: RegionsFile,
}

/// What is taken over of a session from another process.
pub(in crate::bridge) struct TakenOver<M> {
    pub(in crate::bridge) ledger: OwnedFd,
    pub(in crate::bridge) regions: RegionsFile,
    pub(in crate::bridge) memory: Vec<(u32, M)>,
    pub(in crate::bridge) inherited: Vec<InheritedRegion>,
}

/// Files in memory that change while the session runs.
#[derive(Debug)]
pub(in crate::bridge) struct SavedMemory {
    /// The [ledger](crate::bridge::relay::Ledger).
    pub(in crate::bridge) ledger: OwnedFd,
    /// The [regions](super::RegionsFile).
    pub(in crate::bridge) regions: OwnedFd,
    /// What was [compressed](crate::bridge::relay::Room). `None`: the server does not understand that, or
    /// nothing is to be compressed.
    pub(in crate::bridge) compressed: Option<OwnedFd>,
}

/// What the server has granted, and how it knows the session.
#[derive(Debug, Clone, Copy)]
pub(in crate::bridge) struct Terms {
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

impl SavedRemote {
    pub(in crate::bridge) fn new(ticket: &Ticket, connections: usize, about: About) -> SavedRemote {
        let numbers = Numbers {
            eager: ticket.eager,
            dialed_in: u64::try_from(ticket.dialed_in.as_nanos()).unwrap_or(u64::MAX),
            connections: connections as u32,
            cache: ticket.has_cache.into(),
        };
        let terms = Terms { numbers, farewell: ticket.farewell() };
        SavedRemote { about, terms, queues: None, memory: None }
    }

    /// Has another process be able to go on with the session, from where what it does is noted. `compressed`:
    /// where compressed bytes lie.
    pub(in crate::bridge) fn remember(&mut self, compressed: Option<OwnedFd>) -> io::Result<Succession> {
        let (file, regions_file) = (ledger_file()?, RegionsFile::new()?);
        let ledger = Ledger::begin(&file, self.terms.connections())?;
        let regions = regions_file.file().try_clone_to_owned()?;
        self.memory = Some(SavedMemory { ledger: file, regions, compressed });
        Ok(Succession { ledger, regions: regions_file })
    }

    /// Takes over what another process has left. `memory` makes what a transport needs of a region, whose
    /// pieces it gets as well.
    pub(in crate::bridge) fn take_over<M>(
        &self,
        session: &SessionState,
        own: Option<&BTreeMap<u32, Memories>>,
        mut memory: impl FnMut(&Memories, Runs, StoredRegion) -> M,
    ) -> io::Result<TakenOver<M>> {
        let Some(SavedMemory { ledger, regions, .. }) = &self.memory else {
            return Err(io::Error::other("the server keeps no session whose connections are closed"));
        };
        if session.header().state() != State::Ready {
            return Err(io::Error::other("it had ended before"));
        }
        let (regions, stored) = RegionsFile::open(regions.try_clone()?)?;
        let ledger = ledger.try_clone()?;
        let mut taken = TakenOver { ledger, regions, memory: Vec::new(), inherited: Vec::new() };
        for region in stored {
            let (id, size) = (region.id, region.size);
            let memories = own.map_or(Some(&session.channel.memories), |own| own.get(&id));
            let missing = || io::Error::other(format!("the memory of region {id} is missing"));
            let memories = memories.ok_or_else(missing)?;
            let runs = memories.resolve(&region.extents, size).map_err(io::Error::other)?;
            let pieces = runs.all().len() as u32;
            taken.inherited.push(InheritedRegion { region: id, size, pieces });
            taken.memory.push((id, memory(memories, runs, region)));
        }
        Ok(taken)
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
    pub(in crate::bridge) fn from_parts(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<SavedRemote> {
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
        Some(SavedRemote { about, terms, queues: None, memory })
    }

    pub(in crate::bridge) fn terms(&self) -> Terms {
        self.terms
    }

    /// Tells the server that the session has ended. Does not block.
    pub(in crate::bridge) fn end(&self, config: &SessionConfig) {
        self.terms.farewell.say(config);
    }
}

impl Terms {
    /// Data connections, or queues for data.
    pub(in crate::bridge) fn connections(&self) -> usize {
        self.numbers.connections as usize
    }

    /// What it takes to resume the session. `compresses`: its server understands compressed data.
    pub(in crate::bridge) fn ticket(self, config: &SessionConfig, compresses: bool) -> Ticket {
        let Numbers { eager, dialed_in, cache, .. } = self.numbers;
        let dialed_in = Duration::from_nanos(dialed_in);
        Ticket::restored(self.farewell, config, eager, dialed_in, (cache != 0, compresses))
    }
}
