//! Memory pools of pinned host memory.
//!
//! A pool keeps freed memory, because registering memory is slow and unregistering waits for the device. A
//! freed piece can be reused immediately by the stream that freed it, and by others when that stream has
//! reached the free. Memory beyond the release threshold and beyond [`KEPT`] is returned to the system. So is
//! all of it when the pool is destroyed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::memory::pinned;
use crate::memory::pool::Pool;
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, driver};
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use client::seq::Seq;
use client::{Status, lock};

/// Amount of free memory that a pool keeps even with a lower threshold, in bytes.
const KEPT: u64 = 64 << 20;
/// Pieces are multiples of this, in bytes.
const STEP: u64 = 4096;

/// A piece that was freed in stream order.
struct Free {
    address: usize,
    room: u64,
    stream: Arc<Stream>,
    mark: Seq,
}

/// The state of a pool besides its allocations.
#[derive(Default)]
pub(crate) struct HostPool {
    free: Mutex<Vec<Free>>,
    idle: AtomicU64,
}

/// An allocation.
#[derive(Clone)]
pub(crate) struct Live {
    /// Its pool, which outlives its handle while there are allocations.
    pool: Arc<Pool>,
    /// The pool's handle.
    pub handle: usize,
    /// The requested size in bytes.
    pub size: u64,
    room: u64,
    /// Distinguishes it from another at the same address.
    pub buffer: u64,
}

/// The allocations of all pools, by address.
static LIVE: Mutex<BTreeMap<usize, Live>> = Mutex::new(BTreeMap::new());

impl HostPool {
    /// Size of its free memory, in bytes.
    pub fn idle(&self) -> u64 {
        self.idle.load(Ordering::Relaxed)
    }

    /// A piece of this size that a stream may use now.
    fn again(&self, stream: &Arc<Stream>, room: u64) -> Option<usize> {
        let mut free = lock(&self.free);
        let is_over = |f: &Free| context::has_freed(&f.stream, f.mark, None);
        let fits = |f: &Free| f.room == room && (Arc::ptr_eq(&f.stream, stream) || is_over(f));
        let at = free.iter().position(fits)?;
        self.idle.fetch_sub(room, Ordering::Relaxed);
        Some(free.swap_remove(at).address)
    }

    /// Returns free pieces to the system until at most `keep` bytes are left, the oldest first.
    pub fn trim(&self, keep: u64) {
        let mut gone = Vec::new();
        let mut free = lock(&self.free);
        let mut idle = self.idle();
        while idle > keep && !free.is_empty() {
            let piece = free.remove(0);
            idle -= piece.room;
            gone.push((piece.address, piece.stream, piece.mark));
        }
        self.idle.store(idle, Ordering::Relaxed);
        drop(free);
        if let (false, Ok(driver)) = (gone.is_empty(), driver()) {
            pinned::remove_later(driver, gone);
        }
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        self.trim(0);
    }
}

/// The pool's allocation that an address lies in, and where it begins.
pub(crate) fn find(pointer: u64) -> Option<(usize, Live)> {
    let live = lock(&LIVE);
    let (base, found) = live.range(..=pointer as usize).next_back()?;
    (pointer - (*base as u64) < found.size).then(|| (*base, found.clone()))
}

/// Allocates for a stream; the pool has counted the bytes.
pub(crate) fn alloc(
    driver: &'static Driver,
    (handle, pool): (usize, &Arc<Pool>),
    host: &HostPool,
    stream: &Arc<Stream>,
    size: u64,
) -> Result<u64> {
    let room = size.checked_next_multiple_of(STEP).ok_or(Status::OUT_OF_MEMORY)?;
    let context: &'static Context = driver
        .devices
        .get(stream.context.device as usize)
        .map(|device| device.primary)
        .filter(|primary| primary.is_alive())
        .unwrap_or(stream.context);
    let address = match host.again(stream, room) {
        Some(address) => address,
        None => pinned::pin_new(driver, context, room as usize, None, 0)?,
    };
    let live = Live { pool: pool.clone(), handle, size, room, buffer: unique_id() };
    lock(&LIVE).insert(address, live);
    Ok(address as u64)
}

/// Frees an allocation in stream order. Returns false if no pool allocated the address.
pub(crate) fn free(address: u64, stream: Arc<Stream>) -> Result<bool> {
    if !is_here(address) {
        return Ok(false);
    }
    // If the stream's server is lost, nothing is freed.
    let mark = stream.mark_as_operation()?;
    let Some(live) = lock(&LIVE).remove(&(address as usize)) else { return Ok(false) };
    live.pool.give_back(live.size);
    let Some(host) = live.pool.host() else { return Ok(false) };
    let piece = Free { address: address as usize, room: live.room, stream, mark };
    lock(&host.free).push(piece);
    host.idle.fetch_add(live.room, Ordering::Relaxed);
    host.trim(live.pool.threshold().max(KEPT));
    Ok(true)
}

/// Whether a pool's allocation begins at an address.
pub(crate) fn is_here(address: u64) -> bool {
    driver().is_ok() && lock(&LIVE).contains_key(&(address as usize))
}
