//! Occupancy. The server says how many blocks fit, once for each question; the search for a good block size happens here.

use crate::abi::arguments::{In, Out};
use crate::abi::result::Result;
use crate::abi::types::{BlockToShared, LaunchConfig};
use crate::code::function::{Function, func};
use crate::code::library;
use crate::process::device_attributes::attr;
use crate::process::driver::{self, Device};
use crate::work::launch;
use client::Status;
use client::ops::module::{
    OccupancyAvailableShared, OccupancyMaxActiveBlocks, OccupancyMaxActiveClusters,
    OccupancyMaxPotentialClusterSize,
};

/// Blocks of a function that fit on one multiprocessor.
fn blocks(function: &Function, block_size: i32, shared: usize, flags: u32) -> Result<i32> {
    let block_size = u32::try_from(block_size).ok().filter(|n| *n != 0).ok_or(Status::INVALID_VALUE)?;
    if flags & !1 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let request =
        OccupancyMaxActiveBlocks { function: function.id, block_size, dynamic_shared: shared as u64, flags };
    Ok(function.ask(&request, |reply| reply.blocks as u64)? as i32)
}

/// A cooperative grid must be resident as a whole.
pub(crate) fn check_cooperative(
    device: &Device,
    handle: usize,
    grid: &[u32; 3],
    block: &[u32; 3],
    shared: u32,
) -> Result {
    let function = library::of(handle)?;
    let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
    let wanted: u128 = grid.iter().map(|n| u128::from(*n)).product();
    if threads == 0 || wanted == 0 || threads > device.attribute(attr::MAX_THREADS_PER_BLOCK).max(0) as u64 {
        return Err(Status::INVALID_VALUE);
    }
    let each = blocks(&function, threads as i32, shared as usize, 0)?;
    let most = i64::from(each) * i64::from(device.attribute(attr::MULTIPROCESSOR_COUNT));
    if wanted > most.max(0) as u128 { Err(Status::COOPERATIVE_LAUNCH_TOO_LARGE) } else { Ok(()) }
}

/// The block size with the most threads on a multiprocessor, largest first, as CUDA's own search goes: by warps, from the limit down.
fn potential(
    min_grid: Out<i32>,
    block_size: Out<i32>,
    handle: usize,
    to_shared: Option<BlockToShared>,
    shared: usize,
    limit: i32,
    flags: u32,
) -> Result {
    min_grid.required()?;
    block_size.required()?;
    let function = library::of(handle)?;
    if limit < 0 {
        return Err(Status::INVALID_VALUE);
    }
    function.ready()?;
    let device = driver::device(function.context.device as i32)?;
    let warp = device.attribute(attr::WARP_SIZE).max(1);
    let most_threads = device
        .attribute(attr::MAX_THREADS_PER_BLOCK)
        .min(function.attribute(func::MAX_THREADS_PER_BLOCK))
        .max(1);
    let limit = if limit == 0 { most_threads } else { limit.min(most_threads) };
    // SAFETY: the program gave the function for this call.
    let dynamic = |size: i32| to_shared.map_or(shared, |function| unsafe { function(size) });
    let (mut best_size, mut best_blocks, mut best_threads) = (0, 0, 0);
    let mut aligned = (limit + warp - 1) / warp * warp;
    while aligned > 0 {
        let size = aligned.min(limit);
        let n = blocks(&function, size, dynamic(size), flags)?;
        if n * size > best_threads {
            (best_size, best_blocks, best_threads) = (size, n, n * size);
        }
        // No smaller block can hold more threads than all that a multiprocessor has.
        if best_threads >= device.attribute(attr::MAX_THREADS_PER_MULTIPROCESSOR) && best_threads > 0 {
            break;
        }
        aligned -= warp;
    }
    block_size.put(best_size)?;
    min_grid.put(best_blocks * device.attribute(attr::MULTIPROCESSOR_COUNT))
}

api! {
    unsafe fn cuOccupancyMaxActiveClusters(count: Out<i32>, function: usize, config: In<LaunchConfig>) {
        count.required()?;
        config.required()?;
        let c = config.get()?;
        let function = library::of(function)?;
        let request = OccupancyMaxActiveClusters {
            function: function.id,
            grid: c.grid,
            block: c.block,
            dynamic_shared: c.sharedMemBytes,
            // SAFETY: the array has as many attributes as the program says.
            attributes: unsafe { launch::attributes(&c) }?,
        };
        count.put(function.ask(&request, |reply| reply.clusters as u64)? as i32)
    }

    unsafe fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: usize, config: In<LaunchConfig>) {
        size.required()?;
        config.required()?;
        let c = config.get()?;
        let function = library::of(function)?;
        let request = OccupancyMaxPotentialClusterSize {
            function: function.id,
            grid: c.grid,
            block: c.block,
            dynamic_shared: c.sharedMemBytes,
            // SAFETY: the array has as many attributes as the program says.
            attributes: unsafe { launch::attributes(&c) }?,
        };
        size.put(function.ask(&request, |reply| reply.size as u64)? as i32)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(count: Out<i32>, function: usize, block_size: i32, shared: usize) {
        count.required()?;
        count.put(blocks(&*library::of(function)?, block_size, shared, 0)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: Out<i32>, function: usize, block_size: i32, shared: usize, flags: u32
    ) {
        count.required()?;
        count.put(blocks(&*library::of(function)?, block_size, shared, flags)?)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        min_grid: Out<i32>, block_size: Out<i32>, function: usize, to_shared: Option<BlockToShared>, shared: usize, limit: i32
    ) {
        potential(min_grid, block_size, function, to_shared, shared, limit, 0)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        min_grid: Out<i32>, block_size: Out<i32>, function: usize, to_shared: Option<BlockToShared>, shared: usize, limit: i32, flags: u32
    ) {
        potential(min_grid, block_size, function, to_shared, shared, limit, flags)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(size: Out<usize>, function: usize, num_blocks: i32, block_size: i32) {
        size.required()?;
        let function = library::of(function)?;
        if num_blocks <= 0 || block_size <= 0 {
            return Err(Status::INVALID_VALUE);
        }
        function.ready()?;
        let request =
            OccupancyAvailableShared { function: function.id, blocks: num_blocks as u32, block_size: block_size as u32 };
        size.put(function.ask(&request, |reply| reply.bytes)? as usize)
    }
}
