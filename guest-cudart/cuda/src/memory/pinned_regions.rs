//! The table of the process's pinned memory, and which of it kernels reach in place.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

use crate::memory::claims::Claims;
use crate::process::context::Context;
use crate::process::driver::{Driver, Server};
use client::channel::MAX_SERVERS;
use client::lock;
use client::regions::Regions;
use client::session::Session;

/// A piece of pinned memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostTag {
    pub context: &'static Context,
    pub flags: u32,
    pub buffer: u64,
}

/// The process's pinned memory.
pub(crate) static REGIONS: Regions<HostTag> = Regions::new();

/// The pieces that kernels can reach, by address, each with the contexts it was mapped in: one per server.
pub(crate) static MAPPED: Mutex<BTreeMap<usize, Vec<&'static Context>>> = Mutex::new(BTreeMap::new());

/// Pieces that become reachable for kernels. Copies of their bytes wait for that.
pub(crate) static REACHING: Claims = Claims::new();

/// Held for reading while a copy of a session names pinned memory in place and is put on its stream. A server
/// that does not take it stops only those who wait for copies of its own session.
static STEADY: [RwLock<()>; MAX_SERVERS] = [const { RwLock::new(()) }; MAX_SERVERS];

/// While the guard exists, answers of [`Regions::range`] for a session stay valid.
pub(crate) fn steady(session: &Session) -> RwLockReadGuard<'static, ()> {
    STEADY[session.index() % MAX_SERVERS].read().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the piece at `base` away from copies that would use it in place. When this returns, those that do
/// are on their streams.
pub(crate) fn take_away(driver: &Driver, base: usize) {
    REGIONS.set_elsewhere(base, true);
    for server in driver.servers.iter().filter(|server| REGIONS.is_known_to(server.session, base)) {
        drop(STEADY[server.session.index() % MAX_SERVERS].write());
    }
}

/// Whether kernels of a server can reach an address of pinned memory in place.
pub(crate) fn is_mapped(server: &Server, pointer: u64) -> bool {
    let on_server = |context: &&Context| std::ptr::eq(context.server, server);
    REGIONS.find(pointer as usize).is_some_and(|(base, ..)| {
        lock(&MAPPED).get(&base).is_some_and(|contexts| contexts.iter().any(on_server))
    })
}

/// The pinned memory that contains an address: its first address, its size, and its entry.
pub(crate) fn find(pointer: u64) -> Option<(usize, usize, HostTag)> {
    REGIONS.any(pointer as usize)
}
