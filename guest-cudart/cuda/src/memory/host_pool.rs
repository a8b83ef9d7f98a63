//! Memory pools of pinned host memory.
//!
//! A pool keeps freed memory, because registering memory is slow and unregistering waits for the device. A
//! freed piece can be reused immediately by the stream that freed it, and by others when that stream has
//! reached the free. Memory beyond the release threshold and beyond [`KEPT`] is returned to the system. So is
//! all of it when the pool is destroyed.

use std::collections::{BTreeMap, VecDeque};
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

/// The free memory of a pool.
#[derive(Default)]
struct Idle {
    /// By number, the oldest first.
    pieces: BTreeMap<u64, Free>,
    /// The numbers of those that have the same size and that the same stream has freed.
    alike: BTreeMap<(u64, u64), VecDeque<u64>>,
    /// Number of pieces so far.
    count: u64,
    /// Size of the pieces together, in bytes.
    bytes: u64,
}

impl Idle {
    fn put(&mut self, piece: Free) {
        self.count += 1;
        self.bytes += piece.room;
        self.alike.entry((piece.room, piece.stream.unique())).or_default().push_back(self.count);
        self.pieces.insert(self.count, piece);
    }

    /// Takes the oldest of these pieces that are alike.
    fn take(&mut self, alike: (u64, u64)) -> Option<Free> {
        let numbers = self.alike.get_mut(&alike)?;
        let number = numbers.pop_front();
        if numbers.is_empty() {
            self.alike.remove(&alike);
        }
        let piece = self.pieces.remove(&number?)?;
        self.bytes -= piece.room;
        Some(piece)
    }
}

/// The state of a pool besides its allocations.
#[derive(Default)]
pub(crate) struct HostPool(Mutex<Idle>);

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
        lock(&self.0).bytes
    }

    /// Keeps a free piece.
    fn put(&self, piece: Free) {
        lock(&self.0).put(piece);
    }

    /// A piece of this size that a stream may use now. Of each stream only the oldest is looked at.
    fn again(&self, stream: &Arc<Stream>, room: u64) -> Option<usize> {
        let mut idle = lock(&self.0);
        if let Some(own) = idle.take((room, stream.unique())) {
            return Some(own.address);
        }
        // A stream reaches its frees in their order.
        let is_over = |numbers: &VecDeque<u64>| {
            let first = numbers.front().and_then(|number| idle.pieces.get(number));
            first.is_some_and(|first| context::has_freed(&first.stream, first.mark, None))
        };
        let mut others = idle.alike.range((room, 0)..=(room, u64::MAX));
        let others = others.find(|(_, numbers)| is_over(numbers)).map(|(alike, _)| *alike);
        idle.take(others?).map(|piece| piece.address)
    }

    /// Returns free pieces to the system until at most `keep` bytes are left, the oldest first.
    pub fn trim(&self, keep: u64) {
        let mut gone = Vec::new();
        let mut idle = lock(&self.0);
        while idle.bytes > keep
            && let Some((_, oldest)) = idle.pieces.first_key_value()
        {
            let alike = (oldest.room, oldest.stream.unique());
            let Some(piece) = idle.take(alike) else { break };
            gone.push((piece.address, piece.stream, piece.mark));
        }
        drop(idle);
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
    host.put(piece);
    host.trim(live.pool.threshold().max(KEPT));
    Ok(true)
}

/// Whether a pool's allocation begins at an address.
pub(crate) fn is_here(address: u64) -> bool {
    driver().is_ok() && lock(&LIVE).contains_key(&(address as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::driver::Server;
    use client::handle::ContextId;

    #[test]
    fn a_stream_gets_its_own_pieces_or_what_others_have_reached_of_the_same_size() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let id = |n| client::handle::StreamId(client::channel::MAX_CONTEXTS + n);
        let [own, other] = [1, 2].map(|n| Arc::new(Stream::new(id(n), context, 1, 0, false)));
        let pool = HostPool::default();
        let put = |address, room, stream: &Arc<Stream>, mark| {
            let mark = Seq::for_tests(0, mark);
            pool.put(Free { address, room, stream: stream.clone(), mark });
        };
        put(1, STEP, &other, 10);
        put(2, STEP, &other, 20);
        put(3, 2 * STEP, &own, 30);
        put(4, STEP, &own, 40);
        assert_eq!([(); 2].map(|()| pool.again(&own, STEP)), [Some(4), None]);
        other.is_synced(Seq::for_tests(0, 15));
        assert_eq!([(); 2].map(|()| pool.again(&own, STEP)), [Some(1), None]);
        assert_eq!(pool.again(&other, STEP), Some(2));
        assert_eq!((pool.idle(), pool.again(&own, 2 * STEP), pool.idle()), (2 * STEP, Some(3), 0));
    }

    #[test]
    fn what_is_free_is_counted_while_threads_free_allocate_and_trim() {
        const ROUNDS: usize = 1_000_000;
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let stream = context.legacy();
        let pool = HostPool::default();
        let put = |n: usize| {
            let mark = Seq::for_tests(0, 1);
            pool.put(Free { address: n * STEP as usize, room: STEP, stream: stream.clone(), mark });
        };
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (pool, put) = (&pool, &put);
                scope.spawn(move || {
                    for n in 0..ROUNDS {
                        match n % 3 {
                            0 => put(n),
                            1 if thread % 2 == 0 => _ = pool.again(stream, STEP),
                            _ => pool.trim(2 * STEP),
                        }
                    }
                });
            }
        });
        assert_eq!(pool.idle(), lock(&pool.0).pieces.len() as u64 * STEP);
        pool.trim(0);
        assert_eq!(pool.idle(), 0);
    }
}
