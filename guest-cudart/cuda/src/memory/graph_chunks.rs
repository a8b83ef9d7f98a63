//! What backs the memory of graphs.
//!
//! A graph's allocations have addresses from when their nodes are made, in segments of the graph's own; memory they have from a launch on. A launch gives each of its segments a chunk of device memory, and
//! segments of graphs that do not run at the same time share chunks: one that was used last on the launch's own stream, or by what is done by now, serves again, as long as the program has nothing in it. A
//! segment keeps its chunk until another's allocation stays in there, or the chunk is given back (`cuDeviceGraphMemTrim`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::abi::result::Result;
use crate::memory::graph_memory::GraphMemory;
use crate::memory::virtual_memory;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::fences;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use client::channel::MAX_DEVICES;
use client::{Status, lock};

/// A stream, and its mark behind the last work that uses something.
type Use = Option<(Arc<Stream>, u64)>;

/// Addresses of a graph.
pub(crate) struct Segment {
    pub address: u64,
    /// Bytes: whole granules.
    pub size: u64,
    pub device: u32,
    pub context: &'static Context,
    used: Mutex<Use>,
}

/// Device memory.
struct Chunk {
    handle: usize,
    device: u32,
    size: u64,
    /// The last work that uses it, in whichever segment.
    used: Use,
    /// Allocations in it that are the program's, by address.
    live: BTreeMap<u64, Arc<GraphMemory>>,
}

/// A segment of a graph that is gone.
struct Leaving {
    address: u64,
    size: u64,
    used: Use,
    mapped: bool,
}

/// What graphs of a device have.
#[derive(Clone, Copy)]
struct Figures {
    used_high: u64,
    reserved_high: u64,
}

/// Memory of all graphs.
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

/// The memory of all graphs, for as long as a launch is put on its stream.
pub(crate) type Launching = MutexGuard<'static, Pool>;

fn is_over(driver: &Driver, used: &Use) -> bool {
    used.as_ref().is_none_or(|(stream, mark)| stream.has_passed(driver, *mark))
}

impl Segment {
    /// Addresses for at least `size` bytes, and no memory.
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
        // The next caller gives the addresses back: this thread may be one that a stream waits for.
        let mut pool = lock(&POOL);
        let mapped = pool.bound.remove(&self.address).is_some();
        let used = lock(&self.used).take();
        pool.leaving.push(Leaving { address: self.address, size: self.size, used, mapped });
    }
}

impl Pool {
    /// Gives the addresses of graphs that are gone back.
    fn collect(&mut self, driver: &Driver) {
        self.leaving.retain(|segment| {
            if !is_over(driver, &segment.used) {
                return true;
            }
            // What a lost session has is gone with it.
            if segment.mapped {
                let _ = virtual_memory::unmap(driver, segment.address, segment.size);
            }
            let _ = virtual_memory::unreserve(driver, segment.address, segment.size);
            false
        });
    }

    /// Gives a segment that has none a chunk, or another than the one that something stays in. True: it has another now.
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
        let on_stream =
            |chunk: &Chunk| chunk.used.as_ref().is_some_and(|(last, _)| Arc::ptr_eq(last, stream));
        let found = self.chunks.iter().filter(|(id, chunk)| fits(id, chunk));
        let found = found.filter(|(_, chunk)| on_stream(chunk) || is_over(driver, &chunk.used));
        let id = match found.max_by_key(|(_, chunk)| on_stream(chunk)).map(|(id, _)| *id) {
            Some(id) => id,
            None => match self.fresh(driver, segment, taken) {
                // Another stream's, which the launch then waits for.
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
            if let Some((last, mark)) = &*lock(&segment.used) {
                driver.session.wait_progress(|| last.has_passed(driver, *mark))?;
            }
            virtual_memory::unmap(driver, segment.address, segment.size)?;
            self.bound.remove(&segment.address);
        }
        virtual_memory::map(driver, segment.address, segment.size, handle, segment.device)?;
        self.bound.insert(segment.address, id);
        taken.insert(id);
        self.look(segment.device);
        Ok(true)
    }

    /// A chunk that did not exist before.
    fn fresh(&mut self, driver: &'static Driver, segment: &Segment, taken: &BTreeSet<u64>) -> Result<u64> {
        let (device, size) = (segment.device, segment.size);
        let handle = match virtual_memory::create(driver, device, size) {
            // What no graph uses now may be what is missing.
            Err(Status::OUT_OF_MEMORY) if self.trim(driver, device, taken) => {
                virtual_memory::create(driver, device, size)?
            }
            made => made?,
        };
        let id = unique_id();
        self.chunks.insert(id, Chunk { handle, device, size, used: None, live: BTreeMap::new() });
        Ok(id)
    }

    /// Gives back chunks of a device that nobody uses, but those that a launch has taken. False: there was none.
    fn trim(&mut self, driver: &Driver, device: u32, taken: &BTreeSet<u64>) -> bool {
        self.collect(driver);
        let idle = |id: &u64, chunk: &Chunk| {
            chunk.device == device
                && chunk.live.is_empty()
                && !taken.contains(id)
                && is_over(driver, &chunk.used)
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
                let _ = virtual_memory::unmap(driver, address, chunk.size);
            }
            let _ = virtual_memory::release(driver, chunk.handle);
        }
        !ids.is_empty()
    }

    /// Bytes of a device that graphs have: those that a graph can reach, and all.
    fn now(&self, device: u32) -> [u64; 2] {
        let reached: BTreeSet<&u64> = self.bound.values().collect();
        let of_device = self.chunks.iter().filter(|(_, chunk)| chunk.device == device);
        of_device.fold([0, 0], |[used, reserved], (id, chunk)| {
            [used + if reached.contains(id) { chunk.size } else { 0 }, reserved + chunk.size]
        })
    }

    /// Notes how much it is at most.
    fn look(&mut self, device: u32) {
        let [used, reserved] = self.now(device);
        if let Some(figures) = self.figures.get_mut(device as usize) {
            figures.used_high = figures.used_high.max(used);
            figures.reserved_high = figures.reserved_high.max(reserved);
        }
    }
}

/// Before a launch on a stream that uses segments: they have memory that no work beside the launch uses. True: some have other memory than before. What is given is to be handed to [`launched`]
/// when the launch is on its stream.
pub(crate) fn back(
    driver: &'static Driver,
    segments: &[Arc<Segment>],
    stream: &Arc<Stream>,
) -> Result<(Launching, bool)> {
    let mut pool = lock(&POOL);
    let (mut taken, mut moved) = (BTreeSet::new(), false);
    for segment in segments {
        moved |= pool.back(driver, segment, stream, &mut taken)?;
    }
    for id in taken {
        let Some(chunk) = pool.chunks.get(&id) else { continue };
        let Some((last, _)) = chunk
            .used
            .as_ref()
            .filter(|(last, mark)| !Arc::ptr_eq(last, stream) && !last.has_passed(driver, *mark))
        else {
            continue;
        };
        fences::join(driver, last, stream)?;
    }
    Ok((pool, moved))
}

/// After a launch on a stream: which of its allocations the program has now, and what it has freed of other graphs.
pub(crate) fn launched(
    driver: &Driver,
    mut pool: Launching,
    stream: &Arc<Stream>,
    memory: &[(Arc<GraphMemory>, bool)],
    freed: &[Arc<GraphMemory>],
) -> Result {
    let mark = stream.mark(driver)?;
    let mut gone = Vec::new();
    let all =
        memory.iter().map(|(memory, live)| (memory, *live)).chain(freed.iter().map(|memory| (memory, false)));
    for (memory, live) in all {
        *lock(&memory.segment.used) = Some((stream.clone(), mark));
        gone.extend(pool.hold(memory, live, Some((stream.clone(), mark))));
    }
    drop(pool);
    drop(gone);
    Ok(())
}

impl Pool {
    /// Notes the last use of an allocation's chunk, and whether the program has the allocation. What is given back is to be dropped without the lock.
    fn hold(&mut self, memory: &Arc<GraphMemory>, live: bool, used: Use) -> Option<Arc<GraphMemory>> {
        memory.set_live(live);
        let chunk = self.chunks.get_mut(self.bound.get(&memory.segment.address)?)?;
        chunk.used = used;
        if live {
            chunk.live.insert(memory.address, memory.clone())
        } else {
            chunk.live.remove(&memory.address)
        }
    }
}

/// The program has freed an allocation, in a stream's order or when all was done.
pub(crate) fn freed(memory: &Arc<GraphMemory>, used: Use) {
    let mut pool = lock(&POOL);
    let gone = pool.hold(memory, false, used);
    drop(pool);
    drop(gone);
}

/// Forgets the allocations that graphs of a destroyed context gave to the program.
pub(crate) fn forget(context: &'static Context) {
    let mut gone = Vec::new();
    let mut pool = lock(&POOL);
    for chunk in pool.chunks.values_mut() {
        let of_context = |memory: &Arc<GraphMemory>| std::ptr::eq(memory.segment.context, context);
        gone.extend(chunk.live.extract_if(.., |_, memory| of_context(memory)));
        chunk.used.take_if(|(stream, _)| std::ptr::eq(stream.context, context));
    }
    drop(pool);
    gone.iter().for_each(|(_, memory)| memory.set_live(false));
}

/// Gives back what no graph of a device uses. False: there was nothing.
pub(crate) fn trim(driver: &Driver, device: u32) -> bool {
    lock(&POOL).trim(driver, device, &BTreeSet::new())
}

/// Bytes of a device that graphs have: used, at most used, reserved, at most reserved.
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

/// Begins anew with what was used, or reserved, at most.
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
