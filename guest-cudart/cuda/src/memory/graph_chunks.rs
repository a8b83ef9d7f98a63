//! Device memory behind the addresses of graphs' allocations.
//!
//! A graph's allocations get addresses when their nodes are made, in segments of the graph, and memory when
//! the graph is launched. A launch gives each of its segments a chunk of device memory. Graphs that do not
//! run at the same time share chunks: a chunk can be reused once its uses on streams other than the launch's
//! have finished, unless it contains an allocation of the program. A segment keeps its chunk until an
//! allocation of another segment stays in it, or the chunk is freed (`cuDeviceGraphMemTrim`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::abi::result::Result;
use crate::memory::graph_memory::GraphMemory;
use crate::memory::{device_memory, virtual_memory};
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::fences;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use client::channel::MAX_DEVICES;
use client::seq::Seq;
use client::{Status, lock};

/// The streams whose work uses something, each with its mark after the last such work. They need not be
/// ordered with each other: a program may free a graph's allocations in several streams.
#[derive(Default)]
struct Uses(Vec<(Arc<Stream>, Seq)>);

impl Uses {
    fn add(&mut self, stream: &Arc<Stream>, mark: Seq) {
        self.0.retain(|(other, mark)| Arc::ptr_eq(other, stream) || !other.has_passed(*mark));
        match self.0.iter_mut().find(|(other, _)| Arc::ptr_eq(other, stream)) {
            Some((_, last)) if mark.may_be_after(*last) => *last = mark,
            Some(_) => {}
            None => self.0.push((stream.clone(), mark)),
        }
    }

    /// Those that may not be over.
    fn open(&self) -> impl Iterator<Item = &(Arc<Stream>, Seq)> {
        self.0.iter().filter(|(stream, mark)| !stream.has_passed(*mark))
    }

    fn is_over(&self) -> bool {
        self.open().next().is_none()
    }

    fn is_on(&self, stream: &Arc<Stream>) -> bool {
        self.0.iter().any(|(other, _)| Arc::ptr_eq(other, stream))
    }
}

/// Addresses of a graph.
pub(crate) struct Segment {
    pub address: u64,
    /// Size in bytes, whole granules.
    pub size: u64,
    pub device: u32,
    pub context: &'static Context,
    used: Mutex<Uses>,
}

/// Device memory.
struct Chunk {
    handle: usize,
    device: u32,
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
#[derive(Clone, Copy)]
struct Figures {
    used_high: u64,
    reserved_high: u64,
}

/// The memory of all graphs.
pub(crate) struct Pool {
    chunks: BTreeMap<u64, Chunk>,
    /// The chunk of each segment that has one, by its address.
    bound: BTreeMap<u64, u64>,
    leaving: Vec<Leaving>,
    figures: [Figures; MAX_DEVICES as usize],
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    chunks: BTreeMap::new(),
    bound: BTreeMap::new(),
    leaving: Vec::new(),
    figures: [Figures { used_high: 0, reserved_high: 0 }; MAX_DEVICES as usize],
});

/// The memory of all graphs, locked while a launch is enqueued.
pub(crate) type Launching = MutexGuard<'static, Pool>;

impl Segment {
    /// Reserves addresses for at least `size` bytes, without memory.
    pub fn new(
        driver: &'static Driver,
        context: &'static Context,
        device: u32,
        size: u64,
    ) -> Result<Arc<Segment>> {
        let all = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?.info.total_memory;
        if size > all {
            return Err(Status::OUT_OF_MEMORY);
        }
        lock(&POOL).collect(driver);
        let (address, size) = virtual_memory::reserve(driver, size)?;
        Ok(Arc::new(Segment { address, size, device, context, used: Mutex::default() }))
    }

    /// A segment whose addresses are not reserved.
    #[cfg(test)]
    pub fn for_tests(context: &'static Context, address: u64, size: u64) -> Arc<Segment> {
        Arc::new(Segment { address, size, device: context.device, context, used: Mutex::default() })
    }

    pub fn has(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.size
    }

    /// Whether there is memory at its addresses.
    pub fn is_backed(&self) -> bool {
        lock(&POOL).bound.contains_key(&self.address)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // The next caller frees the addresses, because a stream may be waiting for this thread.
        let mut pool = lock(&POOL);
        let mapped = pool.bound.remove(&self.address).is_some();
        let used = std::mem::take(&mut *lock(&self.used));
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
            let _ = virtual_memory::unreserve(driver, segment.address, segment.size);
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
            chunk.device == segment.device
                && chunk.size == segment.size
                && chunk.live.is_empty()
                && !taken.contains(id)
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
            for (last, mark) in lock(&segment.used).open() {
                last.session().wait_progress(|| last.has_passed(*mark))?;
            }
            virtual_memory::unmap(segment.address, segment.size)?;
            self.bound.remove(&segment.address);
        }
        virtual_memory::map(driver, segment.address, segment.size, handle, segment.device)?;
        self.bound.insert(segment.address, id);
        taken.insert(id);
        self.look(segment.device);
        Ok(true)
    }

    /// Allocates a new chunk.
    fn fresh(&mut self, driver: &'static Driver, segment: &Segment, taken: &BTreeSet<u64>) -> Result<u64> {
        let (device, size) = (segment.device, segment.size);
        let handle = match virtual_memory::create(driver, device, size) {
            // Free chunks that no graph uses, and try again.
            Err(Status::OUT_OF_MEMORY) if self.trim(driver, device, taken) => {
                virtual_memory::create(driver, device, size)?
            }
            made => made?,
        };
        let id = unique_id();
        self.chunks.insert(id, Chunk { handle, device, size, used: Uses::default(), live: BTreeMap::new() });
        Ok(id)
    }

    /// Frees chunks of a device that are not in use or taken by a launch. Returns false if there were none.
    fn trim(&mut self, driver: &Driver, device: u32, taken: &BTreeSet<u64>) -> bool {
        self.collect(driver);
        let idle = |id: &u64, chunk: &Chunk| {
            chunk.device == device && chunk.live.is_empty() && !taken.contains(id) && chunk.used.is_over()
        };
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
    fn now(&self, device: u32) -> [u64; 2] {
        let reached: BTreeSet<&u64> = self.bound.values().collect();
        let of_device = self.chunks.iter().filter(|(_, chunk)| chunk.device == device);
        of_device.fold([0, 0], |[used, reserved], (id, chunk)| {
            [used + if reached.contains(id) { chunk.size } else { 0 }, reserved + chunk.size]
        })
    }

    /// Updates the maximum.
    fn look(&mut self, device: u32) {
        let [used, reserved] = self.now(device);
        if let Some(figures) = self.figures.get_mut(device as usize) {
            figures.used_high = figures.used_high.max(used);
            figures.reserved_high = figures.reserved_high.max(reserved);
        }
    }
}

/// Called before a launch that uses segments. Gives them memory that no concurrent work uses. Returns whether
/// any segment's memory changed, and a value to pass to [`launched`] once the launch is enqueued.
pub(crate) fn back(
    driver: &'static Driver,
    segments: &[Arc<Segment>],
    stream: &Arc<Stream>,
) -> Result<(Launching, bool)> {
    let (mut taken, mut moved) = (BTreeSet::new(), false);
    let mut back_all = || -> Result<Launching> {
        let mut pool = lock(&POOL);
        taken.clear();
        for segment in segments {
            moved |= pool.back(driver, segment, stream, &mut taken)?;
        }
        Ok(pool)
    };
    let returned = |segment: &Arc<Segment>| {
        driver.devices.get(segment.device as usize).is_some_and(device_memory::wait_for_returned)
    };
    let pool = match back_all() {
        // Waits without the lock, which a thread may need before it lets a stream go on.
        Err(Status::OUT_OF_MEMORY) if segments.iter().any(returned) => back_all()?,
        backed => backed?,
    };
    for id in taken {
        let Some(chunk) = pool.chunks.get(&id) else { continue };
        for (last, _) in chunk.used.open().filter(|(last, _)| !Arc::ptr_eq(last, stream)) {
            fences::join(last, stream)?;
        }
    }
    Ok((pool, moved))
}

/// Called after a launch was enqueued. Registers which of its allocations exist now, and which allocations of
/// other graphs it freed.
pub(crate) fn launched(
    mut pool: Launching,
    stream: &Arc<Stream>,
    memory: &[(Arc<GraphMemory>, bool)],
    freed: &[Arc<GraphMemory>],
) -> Result {
    let mark = stream.mark()?;
    let mut gone = Vec::new();
    let all =
        memory.iter().map(|(memory, live)| (memory, *live)).chain(freed.iter().map(|memory| (memory, false)));
    for (memory, live) in all {
        gone.extend(pool.hold(memory, live, Some((stream, mark))));
    }
    drop(pool);
    drop(gone);
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
    let mut pool = lock(&POOL);
    let gone = pool.hold(memory, false, used);
    drop(pool);
    drop(gone);
}

/// Drops existing allocations of graphs of a destroyed context.
pub(crate) fn forget(context: &'static Context) {
    let mut gone = Vec::new();
    let mut pool = lock(&POOL);
    for chunk in pool.chunks.values_mut() {
        let of_context = |memory: &Arc<GraphMemory>| std::ptr::eq(memory.segment.context, context);
        gone.extend(chunk.live.extract_if(.., |_, memory| of_context(memory)));
        chunk.used.0.retain(|(stream, _)| !std::ptr::eq(stream.context, context));
    }
    drop(pool);
    gone.iter().for_each(|(_, memory)| memory.set_live(false));
}

/// Frees what no graph of a device uses. Returns false if there was nothing.
pub(crate) fn trim(driver: &Driver, device: u32) -> bool {
    lock(&POOL).trim(driver, device, &BTreeSet::new())
}

/// Device memory held by graphs, in bytes: used, maximum used, reserved, maximum reserved.
pub(crate) fn figures(device: u32) -> [u64; 4] {
    if let Ok(driver) = driver() {
        lock(&POOL).collect(driver);
    }
    let pool = lock(&POOL);
    let [used, reserved] = pool.now(device);
    let high = pool.figures.get(device as usize);
    let [used_high, reserved_high] = high.map_or([0; 2], |high| [high.used_high, high.reserved_high]);
    [used, used_high.max(used), reserved, reserved_high.max(reserved)]
}

/// Resets the maximum that was used, or reserved.
pub(crate) fn reset_high(device: u32, reserved: bool) {
    let mut pool = lock(&POOL);
    let now = pool.now(device);
    if let Some(figures) = pool.figures.get_mut(device as usize) {
        match reserved {
            false => figures.used_high = now[0],
            true => figures.reserved_high = now[1],
        }
    }
}
