//! The table of the process's pinned memory, and which of it kernels reach in place.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

use crate::process::context::Context;
use crate::process::driver::Server;
use client::lock;
use client::regions::Regions;

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

/// Locked for writing while a piece becomes reachable for kernels.
pub(crate) static CHANGING: RwLock<()> = RwLock::new(());

/// While the guard exists, answers of [`Regions::range`] stay valid.
pub(crate) fn steady() -> RwLockReadGuard<'static, ()> {
    CHANGING.read().unwrap_or_else(PoisonError::into_inner)
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
