//! Allocations of graphs.
//!
//! An allocation gets its address when its node is made, in a [`Segment`] of the graph. Allocations whose
//! lifetimes do not overlap may have the same addresses. In CUDA's terms, the allocation exists from when a
//! launch reaches the node until it is freed, by a node, in stream order or by `cuMemFree`. A launch gives it
//! memory ([`graph_chunks`]). An allocation that still exists when the graph and its instance are destroyed
//! stays until it is freed.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::abi::result::Result;
use crate::abi::types::MemAccessDesc;
use crate::memory::device_memory::Found;
use crate::memory::graph_chunks::{self, Segment};
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use client::{Status, lock};

/// Alignment of allocations, in bytes.
const ALIGN: u64 = 512;

/// Memory of an allocation node.
pub(crate) struct GraphMemory {
    pub address: u64,
    pub size: u64,
    pub(crate) segment: Arc<Segment>,
    /// Distinguishes it from another allocation at the same address. A later one has a higher number.
    buffer: u64,
    /// The node of its own graph that frees it.
    freed_by: OnceLock<u64>,
    /// Whether the allocation exists for the program.
    live: AtomicBool,
}

/// Memory of all graphs, by address and number. If several share an address, only the latest can belong to
/// the program, but nodes of their graph use the earlier ones as well.
static ALL: Mutex<BTreeMap<(u64, u64), Weak<GraphMemory>>> = Mutex::new(BTreeMap::new());

/// The allocations of a graph.
#[derive(Default)]
pub(crate) struct Allocations(Mutex<Vec<Arc<GraphMemory>>>);

/// The first free place for `size` bytes in a segment of `room` bytes. `taken` is sorted by start.
fn gap(room: u64, size: u64, taken: &[(u64, u64)]) -> Option<u64> {
    let mut at = 0;
    for (begin, end) in taken {
        if begin.saturating_sub(at) >= size {
            break;
        }
        at = at.max(end.next_multiple_of(ALIGN));
    }
    at.checked_add(size).is_some_and(|end| end <= room).then_some(at)
}

impl Allocations {
    /// A place that overlaps no allocation, except those that one of the `earlier` nodes frees.
    fn place(
        &self,
        device: u32,
        access: &[MemAccessDesc],
        size: u64,
        earlier: &HashSet<u64>,
    ) -> Option<(Arc<Segment>, u64)> {
        let all = lock(&self.0);
        let segments: BTreeMap<u64, &Arc<Segment>> =
            all.iter().map(|memory| (memory.segment.address, &memory.segment)).collect();
        let fits = |segment: &&Arc<Segment>| segment.device == device && *segment.access == *access;
        segments.into_values().filter(fits).find_map(|segment| {
            let is_there = |memory: &&Arc<GraphMemory>| {
                Arc::ptr_eq(&memory.segment, segment)
                    && memory.freed_by.get().is_none_or(|node| !earlier.contains(node))
            };
            let from = |memory: &Arc<GraphMemory>| memory.address - segment.address;
            let mut taken: Vec<(u64, u64)> = all
                .iter()
                .filter(is_there)
                .map(|memory| (from(memory), from(memory) + memory.size))
                .collect();
            taken.sort_unstable();
            Some((segment.clone(), segment.address + gap(segment.size, size, &taken)?))
        })
    }

    /// Registers that a node frees the latest allocation at an address. Returns false if another node frees
    /// it, and `None` if there is none.
    pub fn is_freed_by(&self, address: u64, node: u64) -> Option<bool> {
        let all = lock(&self.0);
        let memory = all.iter().rfind(|memory| memory.address == address)?;
        Some(memory.freed_by.set(node).is_ok())
    }

    pub fn clear(&self) {
        let all = std::mem::take(&mut *lock(&self.0));
        drop(all);
    }
}

impl GraphMemory {
    /// Finds an address for the allocation of a node that depends on the `earlier` ones, and that other
    /// devices have `access` to. The allocation exists once a launch reaches the node.
    pub fn new(
        driver: &'static Driver,
        allocations: &Allocations,
        context: &'static Context,
        earlier: &HashSet<u64>,
        device: u32,
        access: &[MemAccessDesc],
        size: u64,
    ) -> Result<Arc<GraphMemory>> {
        let placed = allocations.place(device, access, size, earlier);
        let (segment, address) = match placed {
            Some(placed) => placed,
            None => {
                let segment = Segment::new(driver, context, device, access, size)?;
                let address = segment.address;
                (segment, address)
            }
        };
        let (buffer, freed_by, live) = (unique_id(), OnceLock::new(), AtomicBool::new(false));
        let made = Arc::new(GraphMemory { address, size, segment, buffer, freed_by, live });
        lock(&allocations.0).push(made.clone());
        lock(&ALL).insert((address, buffer), Arc::downgrade(&made));
        Ok(made)
    }

    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    pub(crate) fn set_live(&self, live: bool) {
        self.live.store(live, Ordering::Release);
    }

    /// Whether its own graph frees it.
    pub(crate) fn is_freed_in_graph(&self) -> bool {
        self.freed_by.get().is_some()
    }

    /// The contexts whose work may use it: one of its device, and those of the launches that gave it memory.
    pub fn users(&self) -> impl Iterator<Item = &'static Context> {
        std::iter::once(self.segment.context).chain(self.segment.users())
    }

    /// The device that it is on.
    pub fn device(&self) -> u32 {
        self.segment.device
    }

    /// What other devices may do with it.
    pub fn access(&self) -> &[MemAccessDesc] {
        &self.segment.access
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        lock(&ALL).remove(&(self.address, self.buffer));
    }
}

/// The latest graph memory that begins at an address.
pub(crate) fn find(address: u64) -> Option<Arc<GraphMemory>> {
    let all = lock(&ALL);
    let here = all.range((address, 0)..=(address, u64::MAX)).rev();
    here.filter_map(|(_, memory)| memory.upgrade()).next()
}

/// The graph memory that contains a range: the latest of those that begin nearest to it.
pub(crate) fn at(address: u64, len: u64) -> Option<Arc<GraphMemory>> {
    let end = address.checked_add(len)?;
    // Dropped after the lock: each may be the last reference by then, and dropping that one locks, too.
    let mut seen = Vec::new();
    let all = lock(&ALL);
    for memory in all.range(..=(address, u64::MAX)).rev().filter_map(|(_, memory)| memory.upgrade()) {
        let is_of_segment = memory.segment.has(address);
        let contains = end <= memory.address + memory.size;
        seen.push(memory);
        if !is_of_segment {
            return None;
        }
        if contains {
            return seen.pop();
        }
    }
    None
}

/// The same, as [`Found`].
pub(crate) fn found(address: u64, len: u64) -> Option<Found> {
    let memory = at(address, len)?;
    Some(Found {
        base: memory.address,
        size: memory.size,
        context: memory.segment.context,
        buffer: memory.buffer,
        pool: 0,
        sync_memops: false,
        managed: false,
    })
}

/// The program frees an address, in stream order or after all work. Returns true if a graph allocated it.
///
/// # Errors
/// `INVALID_VALUE` if it is a graph's and doesn't exist because no launch has reached its node.
pub(crate) fn freed(address: u64, stream: Option<&Arc<Stream>>) -> Result<bool> {
    let Some(memory) = find(address) else { return Ok(false) };
    // If the stream's server is lost, nothing is freed.
    let used = stream.map(|stream| Ok((stream, stream.mark_as_operation()?))).transpose()?;
    if !memory.live.swap(false, Ordering::AcqRel) {
        return Err(Status::INVALID_VALUE);
    }
    graph_chunks::freed(&memory, used);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::handle::ContextId;
    use proptest::prelude::*;
    use std::sync::mpsc;
    use std::time::Duration;

    use crate::process::driver::Server;

    #[test]
    fn memory_may_go_while_another_thread_looks_for_memory_behind_it() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let segment = Segment::for_tests(context, 1 << 50, 4 * ALIGN);
        let make = move || {
            let (address, buffer, segment) = (segment.address, unique_id(), segment.clone());
            let (freed_by, live) = (OnceLock::new(), AtomicBool::new(false));
            let made = Arc::new(GraphMemory { address, size: ALIGN, segment, buffer, freed_by, live });
            lock(&ALL).insert((address, buffer), Arc::downgrade(&made));
            made
        };
        let (ended, is_ended) = mpsc::channel();
        let looks = std::thread::spawn(move || {
            let kept = make();
            let goes = std::thread::spawn(move || {
                for turn in 0..200_000 {
                    let made = make();
                    // Dropped at any point of the other thread's search.
                    (0..turn % 100).for_each(|_| std::hint::spin_loop());
                    drop(made);
                }
            });
            while !goes.is_finished() {
                assert!(at(kept.address, 2 * ALIGN).is_none());
            }
            assert_eq!(at(kept.address, ALIGN).map(|found| found.buffer), Some(kept.buffer));
            ended.send(()).unwrap();
        });
        // Threads that wait for themselves never end.
        is_ended.recv_timeout(Duration::from_secs(120)).unwrap();
        looks.join().unwrap();
    }

    #[test]
    fn memory_that_a_lost_servers_stream_cannot_free_can_be_freed() {
        let [home, lost] = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, false));
        let segment = Segment::for_tests(home, 2 << 50, ALIGN);
        let (address, buffer, live) = (segment.address, unique_id(), AtomicBool::new(true));
        let freed_by = OnceLock::new();
        let made = Arc::new(GraphMemory { address, size: ALIGN, segment, buffer, freed_by, live });
        lock(&ALL).insert((address, buffer), Arc::downgrade(&made));
        lost.server.lose();
        assert!(freed(address, Some(lost.legacy())).is_err() && made.is_live());
        assert_eq!(freed(address, None), Ok(true));
    }

    proptest! {
        #[test]
        fn a_place_is_inside_the_range_and_does_not_overlap(
            room in 1u64..20, size in 1u64..6000, parts in proptest::collection::vec((0u64..40, 1u64..3000), 0..6)
        ) {
            let room = room * ALIGN * 4;
            let mut taken: Vec<(u64, u64)> = parts.iter().map(|(at, size)| (at * ALIGN, at * ALIGN + size)).collect();
            taken.sort_unstable();
            let free = |at: u64| at + size <= room && taken.iter().all(|(begin, end)| at + size <= *begin || at >= *end);
            match gap(room, size, &taken) {
                Some(at) => prop_assert!(at % ALIGN == 0 && free(at)),
                None => prop_assert!((0..room / ALIGN).all(|at| !free(at * ALIGN))),
            }
        }
    }
}
