//! Pinned host memory that kernels reach.
//!
//! With unified addressing a kernel may receive the address of any pinned memory as it is, whatever its flags
//! say (PyTorch does that with small arrays of pointers). A device that shares this process's memory has all
//! pinned memory mapped from the start. For other devices, a piece is
//! [mirrored](crate::memory::managed::mirror) when a kernel could first find its address: among the
//! parameters of a launch, or when the program asks for its device pointer ([`reach`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::memory::managed::{forks, mirror};
use crate::memory::pinned_regions::{self, HostTag, MAPPED, REACHING, REGIONS};
use crate::memory::{host_mappings, pending_writes};
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Server};
use crate::process::fences;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use client::channel::MAX_SERVERS;
use client::data::HostOut;
use client::ops::memory::{HostMap, HostUnmap};
use client::seq::Seq;
use client::{Status, lock, log};

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
pub(crate) const DEVICEMAP: u32 = 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`.
const READ_ONLY: u32 = 8;

/// A piece that kernels of some servers cannot reach yet and may.
#[derive(Clone, Copy)]
struct Unreached {
    size: usize,
    /// A bit for each server, by session number.
    servers: u32,
}

/// Such pieces, by address.
static UNREACHED: Mutex<BTreeMap<usize, Unreached>> = Mutex::new(BTreeMap::new());

/// The range of addresses of [`UNREACHED`]. Every launch compares its parameters with it, without a lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);

static HIGHEST: AtomicU64 = AtomicU64::new(0);

fn with_unreached<R>(change: impl FnOnce(&mut BTreeMap<usize, Unreached>) -> R) -> R {
    let mut unreached = lock(&UNREACHED);
    let result = change(&mut unreached);
    let end = unreached.last_key_value().map_or(0, |(base, piece)| base + piece.size);
    LOWEST.store(unreached.first_key_value().map_or(usize::MAX, |(base, _)| *base) as u64, Ordering::Release);
    HIGHEST.store(end as u64, Ordering::Release);
    result
}

/// A bit for a server.
fn bit(server: &Server) -> u32 {
    1 << server.session.index()
}

/// Whether kernels of a server can reach the piece that begins at `base`.
pub(crate) fn is_reached_now(server: &Server, base: u64) -> bool {
    pinned_regions::is_mapped(server, base) || mirror::is_on(server, base)
}

/// Whether a kernel of a server can use this address.
pub(crate) fn is_reached(server: &Server, pointer: u64) -> bool {
    is_reached_now(server, pointer) || unreached_at(server, pointer).is_some()
}

/// The piece at an address that kernels of a server cannot reach yet.
fn unreached_at(server: &Server, pointer: u64) -> Option<(usize, usize)> {
    let unreached = lock(&UNREACHED);
    let (base, piece) = unreached.range(..=pointer as usize).next_back()?;
    let is_it = pointer as usize - base < piece.size && piece.servers & bit(server) != 0;
    is_it.then_some((*base, piece.size))
}

/// Notes that kernels of a server reach a piece, or never will.
fn settled(server: &Server, base: usize) {
    with_unreached(|unreached| {
        let Some(piece) = unreached.get_mut(&base) else { return };
        piece.servers &= !bit(server);
        if piece.servers == 0 {
            unreached.remove(&base);
        }
    });
}

/// Notes that kernels of a server no longer reach a piece. A launch in another context makes it reachable
/// again.
fn unsettled(server: &Server, base: usize) {
    let Some((_, size, _)) = REGIONS.any(base) else { return };
    with_unreached(|unreached| {
        unreached.entry(base).or_insert(Unreached { size, servers: 0 }).servers |= bit(server);
    });
}

/// Lets kernels of a context reach the pinned memory whose addresses are among a launch's parameters.
#[inline]
pub(crate) fn reach(driver: &'static Driver, context: &'static Context, parameters: &[u8]) {
    let within = LOWEST.load(Ordering::Acquire)..HIGHEST.load(Ordering::Acquire);
    if within.is_empty() {
        return;
    }
    for word in parameters.chunks_exact(8) {
        let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
        if within.contains(&word) {
            reach_at(driver, context, word);
        }
    }
}

/// Makes a context's device read pinned memory in place if it can, so that a copy's bytes are read when its
/// stream reaches it.
#[cold]
pub(crate) fn read_in_place(driver: &'static Driver, context: &'static Context, address: u64) {
    if driver.devices.get(context.device as usize).is_some_and(|device| device.shares_host_memory) {
        reach_at(driver, context, address);
    }
}

/// Lets kernels reach the pinned memory at an address, if they cannot reach it yet. If that is impossible,
/// kernels find nothing there, and the log says why when one has failed.
#[cold]
pub(crate) fn reach_at(driver: &'static Driver, context: &'static Context, pointer: u64) {
    let Some((base, _)) = unreached_at(context.server, pointer) else { return };
    reach_piece(driver, context, base);
    let neighbors = host_mappings::neighbors(base as u64);
    neighbors.into_iter().for_each(|base| reach_piece(driver, context, base as usize));
}

fn reach_piece(driver: &'static Driver, launching: &'static Context, base: usize) {
    /// One thread at a time asks a server. The claim is taken first: a thread that waits for it, because
    /// another server is being asked about that piece, must not hold a turn that others need.
    static TURNS: [Mutex<()>; MAX_SERVERS] = [const { Mutex::new(()) }; MAX_SERVERS];
    let Some((_, size)) = unreached_at(launching.server, base as u64) else { return };
    let _reaching = REACHING.take(base as u64, size as u64);
    let _turn = lock(&TURNS[launching.session().index() % MAX_SERVERS]);
    // Another thread may have done it.
    let Some((base, size)) = unreached_at(launching.server, base as u64) else { return };
    let Some((_, _, tag)) = REGIONS.any(base) else { return };
    let own = std::ptr::eq(tag.context.server, launching.server) && tag.context.is_alive();
    let context = if own { tag.context } else { launching };
    // A server that shares this process's memory has mapped what belongs to its own contexts, if it can.
    let reached = match driver.devices.get(context.device as usize) {
        Some(device) if device.shares_host_memory && !own && !mirror::is_here(base as u64) => {
            // The server may not know this memory.
            map(context, base, size).or_else(|_| mirror(driver, context, base, size))
        }
        _ => mirror(driver, context, base, size),
    };
    if let Err(status) = &reached {
        launching.cannot_reach(format!(
            "kernels of {launching:?} cannot use the {size} bytes of pinned memory at {base:#x}: {status}. Kernels of several servers can use the same pinned memory if all servers are on this host, or none is and it is no more than {} MiB in all",
            mirror::MOST_SHARED >> 20
        ));
    }
    // The next launch tries again if copies that are under way were in the way.
    if reached != Err(Status::NOT_READY) {
        settled(context.server, base);
    }
}

/// Lets kernels reach the piece that begins at `base` by mirroring it. Copies that are under way end first.
pub(crate) fn mirror(driver: &'static Driver, context: &'static Context, base: usize, size: usize) -> Result {
    if mirror::is_here(base as u64) {
        return mirror::share(driver, context, base as u64);
    }
    // No mirror can hold its bytes while another server's device accesses them in place.
    if REGIONS.find(base).is_none() || lock(&MAPPED).contains_key(&base) {
        return Err(Status::NOT_SUPPORTED);
    }
    pinned_regions::take_away(driver, base);
    pending_writes::settle_all(driver, base, size).inspect_err(|_| REGIONS.set_elsewhere(base, false))?;
    forks::follow();
    // The pages may have been replaced before it failed.
    mirror::adopt(driver, context, base as u64, size as u64).inspect_err(|_| REGIONS.bring_back(base))
}

/// Lets kernels reach the piece that begins at `base`.
pub(crate) fn map(context: &'static Context, base: usize, size: usize) -> Result {
    // Without a region the server does not know the memory at all.
    let range = REGIONS.range(context.session(), base, size).ok_or(Status::NOT_SUPPORTED)?;
    // The table is not locked while the server is asked: it may not answer, and others need the table.
    let _registering = context.session().registering();
    let on_server = |other: &&Context| std::ptr::eq(other.server, context.server);
    let buffer = || REGIONS.any(base).map(|(_, _, tag)| tag.buffer);
    let asked_for = {
        let mut mapped = lock(&MAPPED);
        let contexts = mapped.entry(base).or_default();
        if contexts.iter().any(on_server) {
            return Ok(());
        }
        // While it is asked, the entry says that the piece is there: whoever frees it removes the entry.
        buffer()
    };
    let map = HostMap { context: context.id, address: base as u64, memory: HostOut(range) };
    let asked = context.session().call(&map);
    {
        let mut mapped = lock(&MAPPED);
        // Another piece may be at its address by now.
        match mapped.get_mut(&base).filter(|_| asked_for.is_some() && buffer() == asked_for) {
            Some(contexts) if asked.is_ok() && context.is_alive() => {
                contexts.push(context);
                return Ok(());
            }
            Some(contexts) if contexts.is_empty() => _ = mapped.remove(&base),
            _ => {}
        }
    }
    asked?;
    // It was freed meanwhile, or the context destroyed, and nobody knew that there is something to undo.
    let _ = context.session().append(&HostUnmap { context: context.id, address: base as u64 });
    Err(Status::NOT_SUPPORTED)
}

/// Lets kernels reach the piece that begins at `base` if the device shares this process's memory. Otherwise
/// adds it to the pieces that they cannot reach yet, if they may.
pub(crate) fn offer(driver: &Driver, context: &'static Context, base: usize, size: usize, flags: u32) {
    fences::host_sees();
    let device = driver.devices.get(context.device as usize);
    let shares = device.is_some_and(|device| device.shares_host_memory);
    let reached = shares && map(context, base, size).is_ok();
    let all = driver.servers.iter().fold(0, |all, server| all | bit(server));
    let servers = if reached { all & !bit(context.server) } else { all };
    if servers != 0 && flags & READ_ONLY == 0 {
        with_unreached(|unreached| unreached.insert(base, Unreached { size, servers }));
    } else if !reached {
        // Its pages cannot be replaced by those of a mirror.
        context.cannot_reach(format!(
            "kernels of {context:?} cannot use the {size} bytes at {base:#x} that are registered as read-only: only a server on this host can reach such memory. Copy it, or register it without CU_MEMHOSTREGISTER_READ_ONLY"
        ));
    }
}

/// Prepares for the piece at `base` to be freed or unregistered. `keep`: its memory stays the program's.
pub(crate) fn unmap(driver: &'static Driver, base: usize, keep: bool) {
    with_unreached(|unreached| unreached.remove(&base));
    // Nobody begins to make it reachable any more. Whoever has begun, for a launch that need not use it,
    // would otherwise find other memory there. The claim ends before the mirror is released: that waits for
    // launches that are being enqueued, and one of them may wait for the claim.
    let size = REGIONS.any(base).map_or(1, |(_, size, _)| size);
    drop(REACHING.take(base as u64, size as u64));
    mirror::release(driver, base as u64, keep);
    let mapped = lock(&MAPPED).remove(&base);
    for context in mapped.unwrap_or_default() {
        // After the session is lost nothing is mapped.
        let _ = context.session().append(&HostUnmap { context: context.id, address: base as u64 });
    }
}

/// Drops what was mapped in a context that is being destroyed. Memory that was registered in it is registered
/// no more, as natively; memory that was allocated in it stays until it is freed.
pub(crate) fn forget(driver: &'static Driver, context: &'static Context) {
    for base in REGIONS.registered(|tag| std::ptr::eq(tag.context, context)) {
        unmap(driver, base, true);
        REGIONS.remove(base, false);
    }
    for base in mirror::of_context(context) {
        if mirror::leave(driver, context, base) {
            REGIONS.bring_back(base as usize);
        }
        unsettled(context.server, base as usize);
    }
    let mut left = Vec::new();
    lock(&MAPPED).retain(|base, contexts| {
        // None: a server is being asked.
        let is_asked = contexts.is_empty();
        if contexts.extract_if(.., |other| std::ptr::eq(*other, context)).count() != 0 {
            left.push(*base);
        }
        is_asked || !contexts.is_empty()
    });
    left.into_iter().for_each(|base| unsettled(context.server, base));
}

/// Allocates pinned memory, at an exact address if one is given. Returns its address.
pub(crate) fn pin_new(
    driver: &'static Driver,
    context: &'static Context,
    size: usize,
    at: Option<usize>,
    flags: u32,
) -> Result<usize> {
    let tag = HostTag { context, flags, buffer: unique_id() };
    let session = context.session();
    let address = REGIONS.alloc(session, size, at, tag).map_err(|error| {
        session.no_memory(format_args!("cannot allocate {size} bytes of pinned memory"), &error)
    })?;
    offer(driver, context, address, size, 0);
    Ok(address)
}

/// Pinned memory that was allocated here, and the last work that uses it: a mark on a stream.
pub(crate) type Used = (usize, Arc<Stream>, Seq);

/// Frees pinned memory that was allocated here. No work may use it.
pub(crate) fn remove(driver: &'static Driver, address: usize) {
    unmap(driver, address, false);
    REGIONS.remove(address, true);
}

/// Frees pinned memory that was allocated here once the streams that use it have passed their marks.
///
/// Unregistering memory waits for all work of the device. So neither this thread does it, because a stream
/// may wait for its next call, nor the thread that calls host functions.
pub(crate) fn remove_later(driver: &'static Driver, pieces: Vec<Used>) {
    let wait = move || {
        for (address, stream, mark) in pieces {
            context::wait_until_freed(&stream, mark, None);
            remove(driver, address);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("rgpu-unpins".into()).spawn(wait) {
        log::error(format_args!(
            "cannot start a thread to free pinned memory: {error}; the memory stays allocated"
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use client::handle::ContextId;

    const SIZE: usize = 1 << 16;

    /// Registers new memory, which stays.
    fn register(context: &'static Context) -> usize {
        let memory = Box::leak(vec![0_u8; SIZE].into_boxed_slice()).as_ptr() as usize;
        let tag = HostTag { context, flags: 0, buffer: unique_id() };
        REGIONS.register(context.session(), memory, SIZE, tag).unwrap();
        memory
    }

    /// As `offer` does, which also has all copies of the process wait from then on.
    fn make_unreached(memory: usize, server: &Server) {
        with_unreached(|unreached| unreached.insert(memory, Unreached { size: SIZE, servers: bit(server) }));
    }

    #[test]
    fn memory_that_was_registered_in_a_context_is_registered_no_more_after_it() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let [ends, stays] = [0, 1].map(|n| Context::new(ContextId(n), server, 0, 0, false));
        let [memory, others] = [ends, stays].map(register);
        make_unreached(memory, server);
        forget(driver, ends);
        assert!(REGIONS.any(memory).is_none() && !is_reached(server, memory as u64));
        assert!(REGIONS.any(others).is_some());
        let again = HostTag { context: stays, flags: 0, buffer: unique_id() };
        REGIONS.register(server.session, memory, SIZE, again).unwrap();
    }

    #[test]
    fn other_contexts_reach_memory_again_that_was_mapped_in_a_context_that_is_gone() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let [ends, stays] = [0, 1].map(|n| Context::new(ContextId(n), server, 0, 0, false));
        let memory = register(stays);
        lock(&MAPPED).insert(memory, vec![ends]);
        assert!(unreached_at(server, memory as u64).is_none());
        forget(driver, ends);
        assert!(!lock(&MAPPED).contains_key(&memory));
        assert!(unreached_at(server, memory as u64 + 8).is_some());
        unmap(driver, memory, true);
        forget(driver, ends);
        assert!(unreached_at(server, memory as u64).is_none());
    }

    #[test]
    fn a_server_that_does_not_answer_while_memory_becomes_reachable_stops_no_copies_of_other_memory() {
        let [silent, other] = [(); 2].map(|()| Server::unused());
        let driver = Driver::for_tests(&[silent, other]);
        let [context, beside] =
            [0, 1].map(|n| Context::new(ContextId(n), [silent, other][n as usize], n, 0, false));
        let [memory, others] = [context, beside].map(register);
        make_unreached(memory, silent);
        let before = silent.session.last_seq();
        let reaches = std::thread::spawn(move || reach_at(driver, context, memory as u64));
        while silent.session.last_seq() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        // If a copy waited for the answer, so would the test: it never comes.
        let (copies, copied) = mpsc::channel();
        std::thread::spawn(move || {
            let waits = REACHING.wait(others as u64);
            let _steady = pinned_regions::steady(beside.session());
            copies.send(waits).unwrap();
        });
        assert_eq!(copied.recv_timeout(Duration::from_secs(60)), Ok(false));
        assert!(REGIONS.find(memory).is_none() && REGIONS.find(others).is_some());
        silent.lose();
        reaches.join().unwrap();
        assert!(REGIONS.find(memory).is_some(), "copies use it in place again");
    }

    #[test]
    fn memory_is_not_freed_under_a_thread_that_makes_it_reachable() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let memory = register(context);
        make_unreached(memory, server);
        let before = server.session.last_seq();
        let reaches = std::thread::spawn(move || reach_at(driver, context, memory as u64));
        while server.session.last_seq() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (frees, freed) = mpsc::channel();
        std::thread::spawn(move || {
            unmap(driver, memory, true);
            frees.send(()).unwrap();
        });
        while unreached_at(server, memory as u64).is_some() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(freed.recv_timeout(Duration::from_millis(50)).is_err(), "the server is still asked");
        server.lose();
        freed.recv_timeout(Duration::from_secs(60)).unwrap();
        reaches.join().unwrap();
    }
}
