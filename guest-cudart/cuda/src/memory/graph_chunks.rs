//! Device memory behind the addresses of graphs' allocations.
//!
//! A graph's allocations get addresses when their nodes are made, in segments of the graph, and memory when
//! the graph is launched. A launch gives each of its segments a chunk of device memory. Graphs that do not
//! run at the same time share chunks: a chunk can be reused once its uses on streams other than the launch's
//! have finished, unless it contains an allocation of the program. A segment keeps its chunk until an
//! allocation of another segment stays in it, or the chunk is freed (`cuDeviceGraphMemTrim`).
//!
//! Each device has a table of its own, which is locked while the device's server is asked: a server that does
//! not answer stops only graphs with memory of its own devices.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use crate::abi::result::Result;
use crate::abi::types::MemAccessDesc;
use crate::memory::graph_memory::GraphMemory;
use crate::memory::{device_memory, virtual_memory};
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Server, driver};
use crate::process::ids::unique_id;
use crate::process::server_waits;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::channel::MAX_DEVICES;
use client::seq::Seq;
use client::{Status, lock};

/// The streams whose work uses memory of a server, each with its mark after the last such work. They need not
/// be ordered with each other: a program may free a graph's allocations in several streams, also of other
/// servers, which may be lost before they get there ([`context::has_freed`]).
struct Uses {
    home: &'static Server,
    all: Vec<(Arc<Stream>, Seq)>,
}

impl Uses {
    fn new(home: &'static Server) -> Uses {
        Uses { home, all: Vec::new() }
    }

    fn add(&mut self, stream: &Arc<Stream>, mark: Seq) {
        let home = self.home;
        self.all.retain(|(other, mark)| {
            Arc::ptr_eq(other, stream) || !context::has_freed(other, *mark, Some(home))
        });
        match self.all.iter_mut().find(|(other, _)| Arc::ptr_eq(other, stream)) {
            Some((_, last)) if mark.may_be_after(*last) => *last = mark,
            Some(_) => {}
            None => self.all.push((stream.clone(), mark)),
        }
    }

    /// Those that may not be over.
    fn open(&self) -> impl Iterator<Item = &(Arc<Stream>, Seq)> {
        self.all.iter().filter(|(stream, mark)| !context::has_freed(stream, *mark, Some(self.home)))
    }

    fn is_over(&self) -> bool {
        self.open().next().is_none()
    }

    fn is_on(&self, stream: &Arc<Stream>) -> bool {
        self.all.iter().any(|(other, _)| Arc::ptr_eq(other, stream))
    }

    /// Waits until all are over.
    fn wait(&self) {
        self.open().for_each(|(stream, mark)| context::wait_until_freed(stream, *mark, Some(self.home)));
    }

    /// Makes work that a stream gets from now on come behind all.
    fn hold(&self, stream: &Arc<Stream>) -> Result {
        for (last, _) in self.open().filter(|(last, _)| !Arc::ptr_eq(last, stream)) {
            if last.session().check().is_ok() {
                server_waits::join(last, stream)?;
                continue;
            }
            // What the lost server's stream would have waited for may be under way on the memory's server.
            for context in context::busy().filter(|context| std::ptr::eq(context.server, self.home)) {
                for (other, _) in stream_table::marks(context)? {
                    server_waits::join(&other, stream)?;
                }
            }
        }
        Ok(())
    }
}

/// Addresses of a graph.
pub(crate) struct Segment {
    pub address: u64,
    /// Size in bytes, whole granules.
    pub size: u64,
    pub device: u32,
    /// What other devices may do with its memory.
    pub access: Box<[MemAccessDesc]>,
    /// A context of the device.
    pub context: &'static Context,
    used: Mutex<Uses>,
}

/// Device memory.
struct Chunk {
    handle: usize,
    size: u64,
    /// The work that uses it, through any segment.
    used: Uses,
    /// Existing allocations in it, by address.
    live: BTreeMap<u64, Arc<GraphMemory>>,
}

/// A segment of a destroyed graph.
struct Leaving {
    address: u64,
    size: u64,
    used: Uses,
    mapped: bool,
}

/// Memory figures of one device's graphs.
struct Figures {
    used_high: u64,
    reserved_high: u64,
}

/// The memory of all graphs on one device.
pub(crate) struct Pool {
    chunks: BTreeMap<u64, Chunk>,
    /// The chunk of each segment that has one, by its address.
    bound: BTreeMap<u64, u64>,
    leaving: Vec<Leaving>,
    figures: Figures,
}

static POOLS: [Mutex<Pool>; MAX_DEVICES as usize] = [const {
    Mutex::new(Pool {
        chunks: BTreeMap::new(),
        bound: BTreeMap::new(),
        leaving: Vec::new(),
        figures: Figures { used_high: 0, reserved_high: 0 },
    })
}; MAX_DEVICES as usize];

/// The memory of all graphs on a device.
fn table_of(device: u32) -> &'static Mutex<Pool> {
    &POOLS[device as usize % POOLS.len()]
}

fn pool_of(device: u32) -> MutexGuard<'static, Pool> {
    lock(table_of(device))
}

/// The memory of all graphs on the devices of a launch, locked while it is enqueued. By device: whoever locks
/// several takes them in this order.
pub(crate) struct Launching(BTreeMap<u32, MutexGuard<'static, Pool>>);

thread_local! {
    /// Whether the thread has a [`Launching`].
    static LAUNCHES: Cell<bool> = const { Cell::new(false) };
}

impl Launching {
    fn on(devices: &BTreeSet<u32>) -> Launching {
        LAUNCHES.set(true);
        Launching(devices.iter().map(|device| (*device, pool_of(*device))).collect())
    }
}

impl Drop for Launching {
    fn drop(&mut self) {
        LAUNCHES.set(false);
    }
}

impl Segment {
    /// Reserves addresses for at least `size` bytes, without memory.
    pub fn new(
        driver: &'static Driver,
        context: &'static Context,
        device: u32,
        access: &[MemAccessDesc],
        size: u64,
    ) -> Result<Arc<Segment>> {
        let on = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
        if size > on.info.total_memory {
            return Err(Status::OUT_OF_MEMORY);
        }
        pool_of(device).collect(driver);
        let (address, size) = virtual_memory::reserve(driver, on.server, size)?;
        // A graph may have memory of another device than its own context's, also of another server.
        let context = if context.device == device { context } else { on.primary };
        let used = Mutex::new(Uses::new(on.server));
        Ok(Arc::new(Segment { address, size, device, access: access.into(), context, used }))
    }

    /// A segment whose addresses are not reserved.
    #[cfg(test)]
    pub fn for_tests(context: &'static Context, address: u64, size: u64) -> Arc<Segment> {
        let used = Mutex::new(Uses::new(context.server));
        let access = Box::default();
        Arc::new(Segment { address, size, device: context.device, access, context, used })
    }

    pub fn has(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.size
    }

    /// Whether there is memory at its addresses.
    pub fn is_backed(&self) -> bool {
        pool_of(self.device).bound.contains_key(&self.address)
    }

    /// The contexts whose streams use it.
    pub fn users(&self) -> Vec<&'static Context> {
        lock(&self.used).open().map(|(stream, _)| stream.context).collect()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // The next caller frees the addresses, because a stream may be waiting for this thread.
        let mut pool = pool_of(self.device);
        let mapped = pool.bound.remove(&self.address).is_some();
        let mut used = lock(&self.used);
        let home = used.home;
        let used = std::mem::replace(&mut *used, Uses::new(home));
        pool.leaving.push(Leaving { address: self.address, size: self.size, used, mapped });
    }
}

impl Pool {
    /// Frees the addresses of destroyed graphs.
    fn collect(&mut self, driver: &Driver) {
        self.leaving.retain(|segment| {
            if !segment.used.is_over() {
                return true;
            }
            // After the session is lost there is nothing to free.
            if segment.mapped {
                let _ = virtual_memory::unmap(segment.address, segment.size);
            }
            let _ = virtual_memory::free(driver, segment.address, segment.size);
            false
        });
    }

    /// Gives a segment a chunk if it has none, or if an allocation of another segment stays in its chunk.
    /// Returns true if it has a new one.
    fn back(
        &mut self,
        driver: &'static Driver,
        segment: &Segment,
        stream: &Arc<Stream>,
        taken: &mut BTreeSet<u64>,
    ) -> Result<bool> {
        let old = self.bound.get(&segment.address).copied();
        let keeps = |chunk: &Chunk| chunk.live.keys().all(|address| segment.has(*address));
        if let Some(old) = old
            && !taken.contains(&old)
            && self.chunks.get(&old).is_some_and(keeps)
        {
            taken.insert(old);
            return Ok(false);
        }
        let fits = |id: &u64, chunk: &Chunk| {
            chunk.size == segment.size && chunk.live.is_empty() && !taken.contains(id)
        };
        let is_free = |chunk: &Chunk| chunk.used.open().all(|(last, _)| Arc::ptr_eq(last, stream));
        let found = self.chunks.iter().filter(|(id, chunk)| fits(id, chunk) && is_free(chunk));
        let id = match found.max_by_key(|(_, chunk)| chunk.used.is_on(stream)).map(|(id, _)| *id) {
            Some(id) => id,
            None => match self.fresh(driver, segment, taken) {
                // Last used by another stream, which the launch then waits for.
                Err(Status::OUT_OF_MEMORY) => {
                    let other = self.chunks.iter().find(|(id, chunk)| fits(id, chunk)).map(|(id, _)| *id);
                    other.ok_or(Status::OUT_OF_MEMORY)?
                }
                made => made?,
            },
        };
        let handle = self.chunks.get(&id).ok_or(Status::UNKNOWN)?.handle;
        if old.is_some() {
            // Earlier launches use the addresses.
            lock(&segment.used).wait();
            virtual_memory::unmap(segment.address, segment.size)?;
            self.bound.remove(&segment.address);
        }
        virtual_memory::map(driver, segment.address, segment.size, handle, segment.device)?;
        let given: Vec<_> = segment.access.iter().map(|to| (to.location.id as u32, to.flags)).collect();
        // The first error is the one to report.
        virtual_memory::set_access_to(driver, segment.address, &given)
            .inspect_err(|_| _ = virtual_memory::unmap(segment.address, segment.size))?;
        self.bound.insert(segment.address, id);
        taken.insert(id);
        self.look();
        Ok(true)
    }

    /// Allocates a new chunk.
    fn fresh(&mut self, driver: &'static Driver, segment: &Segment, taken: &BTreeSet<u64>) -> Result<u64> {
        let (device, size) = (segment.device, segment.size);
        let handle = match virtual_memory::create(driver, device, size) {
            // Free chunks that no graph uses, and try again.
            Err(Status::OUT_OF_MEMORY) if self.trim(driver, taken) => {
                virtual_memory::create(driver, device, size)?
            }
            made => made?,
        };
        let id = unique_id();
        let used = Uses::new(lock(&segment.used).home);
        self.chunks.insert(id, Chunk { handle, size, used, live: BTreeMap::new() });
        Ok(id)
    }

    /// Frees chunks that are not in use or taken by a launch. Returns false if there were none.
    fn trim(&mut self, driver: &Driver, taken: &BTreeSet<u64>) -> bool {
        self.collect(driver);
        let idle =
            |id: &u64, chunk: &Chunk| chunk.live.is_empty() && !taken.contains(id) && chunk.used.is_over();
        let ids: Vec<u64> =
            self.chunks.iter().filter(|(id, chunk)| idle(id, chunk)).map(|(id, _)| *id).collect();
        for id in &ids {
            let Some(chunk) = self.chunks.remove(id) else { continue };
            let segments: Vec<u64> =
                self.bound.iter().filter(|(_, of)| *of == id).map(|(at, _)| *at).collect();
            for address in segments {
                self.bound.remove(&address);
                // As in `collect`.
                let _ = virtual_memory::unmap(address, chunk.size);
            }
            let _ = virtual_memory::release(chunk.handle);
        }
        !ids.is_empty()
    }

    /// Device memory held by graphs, in bytes: the part that a graph can use, and all of it.
    fn now(&self) -> [u64; 2] {
        let reached: BTreeSet<&u64> = self.bound.values().collect();
        self.chunks.iter().fold([0, 0], |[used, reserved], (id, chunk)| {
            [used + if reached.contains(id) { chunk.size } else { 0 }, reserved + chunk.size]
        })
    }

    /// Updates the maximum.
    fn look(&mut self) {
        let [used, reserved] = self.now();
        self.figures.used_high = self.figures.used_high.max(used);
        self.figures.reserved_high = self.figures.reserved_high.max(reserved);
    }
}

/// Called before a launch that uses segments. Gives them memory that no concurrent work uses. Returns whether
/// any segment's memory changed, and a value to pass to [`launched`] once the launch is enqueued.
pub(crate) fn back(
    driver: &'static Driver,
    segments: &[Arc<Segment>],
    stream: &Arc<Stream>,
) -> Result<(Launching, bool)> {
    let devices: BTreeSet<u32> = segments.iter().map(|segment| segment.device).collect();
    let (mut taken, mut moved) = (BTreeSet::new(), false);
    let mut back_all = || -> Result<Launching> {
        let mut pools = Launching::on(&devices);
        taken.clear();
        for segment in segments {
            let pool = pools.0.get_mut(&segment.device).ok_or(Status::UNKNOWN)?;
            moved |= pool.back(driver, segment, stream, &mut taken)?;
        }
        Ok(pools)
    };
    let returned = |segment: &Arc<Segment>| {
        driver.devices.get(segment.device as usize).is_some_and(device_memory::give_back)
    };
    let pools = match back_all() {
        // Waits without the lock, which a thread may need before it lets a stream go on.
        Err(Status::OUT_OF_MEMORY) if segments.iter().any(returned) => back_all()?,
        backed => backed?,
    };
    for id in taken {
        let found = pools.0.values().find_map(|pool| pool.chunks.get(&id));
        found.map_or(Ok(()), |chunk| chunk.used.hold(stream))?;
    }
    Ok((pools, moved))
}

/// Called after a launch was enqueued. Registers which of its allocations exist now, and which allocations of
/// other graphs it freed.
pub(crate) fn launched(
    mut pools: Launching,
    stream: &Arc<Stream>,
    memory: &[(Arc<GraphMemory>, bool)],
    freed: &[Arc<GraphMemory>],
) -> Result {
    let mark = stream.mark()?;
    let mut gone = Vec::new();
    for (memory, live) in memory {
        if let Some(pool) = pools.0.get_mut(&memory.device()) {
            gone.extend(pool.hold(memory, *live, Some((stream, mark))));
        }
    }
    drop(pools);
    drop(gone);
    // Memory of other graphs may be on other devices. Until now it exists, so no launch has taken it.
    freed.iter().for_each(|memory| self::freed(memory, Some((stream, mark))));
    Ok(())
}

impl Pool {
    /// Records work that uses an allocation, and whether the allocation exists. The returned value must be
    /// dropped without the lock.
    fn hold(
        &mut self,
        memory: &Arc<GraphMemory>,
        live: bool,
        used: Option<(&Arc<Stream>, Seq)>,
    ) -> Option<Arc<GraphMemory>> {
        memory.set_live(live);
        if let Some((stream, mark)) = used {
            lock(&memory.segment.used).add(stream, mark);
        }
        let chunk = self.chunks.get_mut(self.bound.get(&memory.segment.address)?)?;
        if let Some((stream, mark)) = used {
            chunk.used.add(stream, mark);
        }
        if live {
            chunk.live.insert(memory.address, memory.clone())
        } else {
            chunk.live.remove(&memory.address)
        }
    }
}

/// The program has freed an allocation, in stream order or after all work.
pub(crate) fn freed(memory: &Arc<GraphMemory>, used: Option<(&Arc<Stream>, Seq)>) {
    let mut pool = pool_of(memory.device());
    let gone = pool.hold(memory, false, used);
    drop(pool);
    drop(gone);
}

/// Drops existing allocations of graphs of a destroyed context.
pub(crate) fn forget(driver: &Driver, context: &'static Context) {
    let mut gone = Vec::new();
    for device in &driver.devices {
        let its_own = std::ptr::eq(device.server, context.server);
        // Another server may not answer whoever has locked this. Then the streams' words tell the same.
        let pool = if its_own {
            Some(pool_of(device.ordinal))
        } else {
            POOLS[device.ordinal as usize].try_lock().ok()
        };
        let Some(mut pool) = pool else { continue };
        for chunk in pool.chunks.values_mut() {
            let of_context = |memory: &Arc<GraphMemory>| std::ptr::eq(memory.segment.context, context);
            gone.extend(chunk.live.extract_if(.., |_, memory| of_context(memory)));
            // What a lost server's streams would have waited for may still use it.
            if its_own || context.session().check().is_ok() {
                chunk.used.all.retain(|(stream, _)| !std::ptr::eq(stream.context, context));
            }
        }
    }
    gone.iter().for_each(|(_, memory)| memory.set_live(false));
}

/// Frees what no graph of a device uses. Returns false if there was nothing, or if this thread is launching a
/// graph and the table is locked.
pub(crate) fn trim(driver: &Driver, device: u32) -> bool {
    // A step of a launch may find no memory. This table may be one that the launch has locked itself, or one
    // of another launch, which in turn waits for this one's.
    let pool = if LAUNCHES.get() {
        match table_of(device).try_lock() {
            Ok(pool) => Some(pool),
            Err(TryLockError::Poisoned(pool)) => Some(pool.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    } else {
        Some(pool_of(device))
    };
    pool.is_some_and(|mut pool| pool.trim(driver, &BTreeSet::new()))
}

/// Device memory held by graphs, in bytes: used, maximum used, reserved, maximum reserved.
pub(crate) fn figures(device: u32) -> [u64; 4] {
    let mut pool = pool_of(device);
    if let Ok(driver) = driver() {
        pool.collect(driver);
    }
    let [used, reserved] = pool.now();
    let Figures { used_high, reserved_high } = pool.figures;
    [used, used_high.max(used), reserved, reserved_high.max(reserved)]
}

/// Resets the maximum that was used, or reserved.
pub(crate) fn reset_high(device: u32, reserved: bool) {
    let mut pool = pool_of(device);
    let now = pool.now();
    match reserved {
        false => pool.figures.used_high = now[0],
        true => pool.figures.reserved_high = now[1],
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::time::Duration;

    use super::*;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};
    use client::ops::stream::StreamMark;

    fn on(server: &'static Server, number: u32) -> Arc<Stream> {
        let context = Context::new(ContextId(number), server, number, 0, false);
        Arc::new(Stream::new(StreamId(MAX_CONTEXTS + number + 1), context, 1, 0, false))
    }

    fn works(stream: &Stream) -> Seq {
        stream.work(&StreamMark { stream: stream.id }).unwrap();
        stream.mark().unwrap()
    }

    #[test]
    fn what_a_lost_servers_stream_has_freed_can_be_used_again() {
        let [home, lost] = [(); 2].map(|()| Server::unused());
        let (stream, gone) = (on(home, 0), on(lost, 1));
        let mut uses = Uses::new(home);
        uses.add(&gone, works(&gone));
        let mark = works(&stream);
        lost.lose();
        assert!(!uses.is_over(), "what the stream would have waited for may be under way");
        assert_eq!(uses.hold(&on(home, 2)), Ok(()), "a launch does not fail");
        stream.context.is_synced(mark);
        assert!(uses.is_over());
        uses.add(&stream, mark);
        assert!(uses.all.iter().all(|(other, _)| Arc::ptr_eq(other, &stream)));
    }

    #[test]
    fn launches_that_find_no_memory_do_not_wait_for_each_others_tables() {
        let driver = Driver::for_tests(&[Server::unused()]);
        // No other test has graphs on these devices.
        let (own, other) = (MAX_DEVICES - 1, MAX_DEVICES - 2);
        let (says, said) = mpsc::channel();
        let waits = Arc::new(Barrier::new(2));
        for [held, needed] in [[own, other], [other, own]] {
            let (says, waits) = (says.clone(), waits.clone());
            std::thread::spawn(move || {
                let launching = Launching::on(&BTreeSet::from([held]));
                waits.wait();
                let trimmed = [held, needed].map(|device| trim(driver, device));
                // Both tables are locked until now.
                waits.wait();
                drop(launching);
                says.send((trimmed, trim(driver, held))).unwrap();
            });
        }
        for _ in 0..2 {
            let said = said.recv_timeout(Duration::from_secs(60)).expect("they wait for each other");
            assert_eq!(said, ([false; 2], false));
        }
    }

    #[test]
    fn a_launch_comes_behind_the_uses_by_streams_of_other_servers() {
        let [home, other] = [(); 2].map(|()| Server::unused());
        let (stream, user) = (on(home, 0), on(other, 1));
        let mut uses = Uses::new(home);
        let mark = works(&user);
        uses.add(&user, mark);
        let before = other.session.last_seq();
        uses.hold(&stream).unwrap();
        // No event of the other server's: this one does not know it.
        assert_eq!(other.session.last_seq(), before);
        let waits = lock(&stream.waited_for);
        assert!(waits.iter().any(|(_, from, record)| Arc::ptr_eq(from, &user) && *record == mark));
        // Ends the thread's wait.
        other.lose();
    }
}
