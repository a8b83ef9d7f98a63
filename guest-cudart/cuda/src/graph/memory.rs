//! Allocations of graphs.
//!
//! Memory of a node has its address from when the node is made, and backing with it: it is the program's, in CUDA's sense, from when a launch comes to the node
//! until it is freed, by a node, in stream order or by `cuMemFree`. It goes back when it is free and neither a graph nor an instance has it any more; what the program
//! still has then is an ordinary allocation from there on.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::context::Context;
use crate::state::{self, Driver, driver};
use crate::stream::Stream;
use crate::{Result, memory, non_null, put};
use client::channel::MAX_DEVICES;
use client::{Status, lock};

/// Memory of an allocation node.
pub(crate) struct GraphMemory {
    pub address: u64,
    pub size: u64,
    device: u32,
    context: &'static Context,
    /// Tells it from another allocation at the same address.
    buffer: u64,
    /// The program's.
    live: AtomicBool,
    /// Where it was used last.
    stream: Mutex<Option<Arc<Stream>>>,
}

/// Memory of all graphs, by address.
static ALL: Mutex<BTreeMap<u64, Weak<GraphMemory>>> = Mutex::new(BTreeMap::new());

/// Bytes that graphs of a device have, now and at most.
struct Used {
    now: AtomicU64,
    high: AtomicU64,
}

static USED: [Used; MAX_DEVICES as usize] =
    [const { Used { now: AtomicU64::new(0), high: AtomicU64::new(0) } }; MAX_DEVICES as usize];

impl GraphMemory {
    /// Allocates; the program has it only when a launch has come to it.
    pub fn new(
        driver: &'static Driver,
        context: &'static Context,
        device: u32,
        size: u64,
    ) -> Result<Arc<GraphMemory>> {
        memory::collect(driver);
        let address = memory::alloc(driver, context, device, size, 0)?;
        let buffer = memory::find(driver, address).map_or(0, |found| found.buffer);
        let made = Arc::new(GraphMemory {
            address,
            size,
            device,
            context,
            buffer,
            live: AtomicBool::new(false),
            stream: Mutex::default(),
        });
        lock(&ALL).insert(address, Arc::downgrade(&made));
        if let Some(used) = USED.get(device as usize) {
            let now = used.now.fetch_add(size, Ordering::Relaxed) + size;
            used.high.fetch_max(now, Ordering::Relaxed);
        }
        Ok(made)
    }

    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    /// A launch on a stream comes to it: it is the program's afterwards, or not.
    pub fn used(&self, stream: &Arc<Stream>, live: bool) {
        *lock(&self.stream) = Some(stream.clone());
        self.live.store(live, Ordering::Release);
    }

    /// The device that it is on.
    pub fn device(&self) -> u32 {
        self.device
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        if let Some(used) = USED.get(self.device as usize) {
            used.now.fetch_sub(self.size, Ordering::Relaxed);
        }
        let mut all = lock(&ALL);
        if all.get(&self.address).is_some_and(|kept| kept.strong_count() == 0) {
            all.remove(&self.address);
        }
        drop(all);
        let Ok(driver) = driver() else { return };
        let there = memory::find(driver, self.address).is_some_and(|found| found.buffer == self.buffer);
        if there && !self.is_live() {
            let stream = lock(&self.stream).take().filter(|stream| !stream.is_finished());
            // A lost session has no memory to give back.
            let _ =
                memory::let_go(driver, self.address, stream.unwrap_or_else(|| self.context.legacy().clone()));
        }
    }
}

/// A graph's memory that begins at an address.
pub(crate) fn find(address: u64) -> Option<Arc<GraphMemory>> {
    lock(&ALL).get(&address)?.upgrade()
}

/// The program frees an address. True: a graph has the memory, and it goes back with that.
///
/// # Errors
/// `INVALID_VALUE` when a graph has it and no launch has given it to the program.
pub(crate) fn freed(address: u64) -> Result<bool> {
    match find(address) {
        None => Ok(false),
        Some(memory) if memory.live.swap(false, Ordering::AcqRel) => Ok(true),
        Some(_) => Err(Status::INVALID_VALUE),
    }
}

fn used(device: i32) -> Result<&'static Used> {
    state::device(device)?;
    USED.get(device as usize).ok_or(Status::INVALID_DEVICE)
}

api! {
    fn cuDeviceGetGraphMemAttribute(device: i32, attribute: u32, value: *mut c_void) {
        non_null(value)?;
        let used = used(device)?;
        match attribute {
            // What is reserved for graphs is what they use.
            0 | 2 => put(value.cast(), used.now.load(Ordering::Relaxed)),
            1 | 3 => put(value.cast(), used.high.load(Ordering::Relaxed)),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuDeviceSetGraphMemAttribute(device: i32, attribute: u32, value: *mut c_void) {
        non_null(value)?;
        let used = used(device)?;
        // The two high-water marks can only be set to 0.
        if !matches!(attribute, 1 | 3) || value.cast::<u64>().read() != 0 {
            return Err(Status::INVALID_VALUE);
        }
        used.high.store(used.now.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }

    fn cuDeviceGraphMemTrim(device: i32) {
        let driver = driver()?;
        state::device(device)?;
        memory::collect(driver);
        Ok(())
    }
}
