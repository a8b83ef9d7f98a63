//! Occupancy. How many blocks fit is computed if the rules are known; otherwise the server is asked once per
//! question. The search for a good block size happens here.

use crate::abi::arguments::{In, Out};
use crate::abi::result::Result;
use crate::abi::types::{BlockToShared, LaunchConfig};
use crate::code::function::{Function, func};
use crate::code::occupancy::{self, ClusterAnswer};
use crate::code::{library, reading};
use crate::process::device_attributes::attr;
use crate::process::driver::{self, Device};
use crate::work::launch;
use client::ops::module::{
    OccupancyAvailableShared, OccupancyMaxActiveBlocks, OccupancyMaxActiveClusters,
    OccupancyMaxPotentialClusterSize,
};
use client::{Status, log};

/// Number of a function's blocks that fit on one multiprocessor.
fn blocks(function: &Function, block_size: i32, shared: usize, flags: u32) -> Result<i32> {
    let block_size = u32::try_from(block_size).ok().filter(|n| *n != 0).ok_or(Status::INVALID_VALUE)?;
    if flags & !1 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    function.context.session().check()?;
    let dynamic_shared = shared as u64;
    // The flag has no effect on devices whose rules are known.
    let computed = occupancy::blocks(function, block_size, dynamic_shared);
    if let Some(blocks) = computed
        && !reading::is_checked()
    {
        return Ok(blocks);
    }
    let function_id = function.id()?;
    let request = OccupancyMaxActiveBlocks { function: function_id, block_size, dynamic_shared, flags };
    let told = function.ask(&request, |reply| reply.blocks as u64)? as i32;
    if let Some(blocks) = computed.filter(|blocks| *blocks != told) {
        differs(function, "blocks", blocks.into(), told.into());
    }
    Ok(told)
}

/// Logs a difference found with `RGPU_READ_IMAGES=check`.
fn differs(function: &Function, what: &str, computed: i64, told: i64) {
    let name = function.name.to_string_lossy();
    log::warn(format_args!("occupancy of {name}: computed {computed} {what}, the server says {told}"));
}

/// Number of a function's clusters that the device runs at once.
fn clusters(function: &Function, mut request: OccupancyMaxActiveClusters) -> Result<i32> {
    let changes = function.changes();
    let rules = occupancy::clusters(function, &request);
    let known = match rules {
        ClusterAnswer::Known(answer) => Some(answer),
        ClusterAnswer::Class(class) => class.known().map(Ok),
        ClusterAnswer::Unknown(_) => function.answered(&request).map(cluster_answer),
    };
    if let Some(answer) = known
        && !reading::is_checked()
    {
        return answer;
    }
    if let ClusterAnswer::Class(_) | ClusterAnswer::Unknown(_) = rules {
        let name = function.name.to_string_lossy();
        log::debug(format_args!("asking the server how many clusters of {name} fit: {rules:?}; {request:?}"));
    }
    // The question is cached without the others sent with it.
    let question = request.clone();
    let mut classes = Vec::new();
    match rules {
        ClusterAnswer::Class(class) if reading::asks_ahead() => {
            (classes, request.shapes) = class.others(function, &question).into_iter().unzip();
        }
        ClusterAnswer::Unknown(_) if reading::asks_ahead() => {
            request.shapes = occupancy::other_lines(&question);
        }
        _ => {}
    }
    let mut answers = Vec::new();
    let told = function.ask(&request, |reply| {
        answers = reply.shapes;
        u64::from(reply.result) << 32 | u64::from(reply.clusters as u32)
    })?;
    let told_of_it = cluster_answer(told);
    if let Some(answer) = known.filter(|answer| *answer != told_of_it) {
        let number = |answer: Result<i32>| answer.map_or_else(|status| -i64::from(status.0), i64::from);
        differs(function, "clusters", number(answer), number(told_of_it));
    }
    function.keep_answer(&question, told, changes);
    if let ClusterAnswer::Unknown(_) = rules {
        for (line, clusters) in request.shapes.iter().zip(&answers).filter(|(_, clusters)| **clusters >= 0) {
            function.keep_answer(&line.question(&question), *clusters as u64, changes);
        }
    }
    // Another thread may have changed a setting since the rules were applied.
    if function.changes() == changes {
        for (class, clusters) in classes.iter().zip(answers).filter(|(_, clusters)| *clusters >= 0) {
            class.keep(clusters);
        }
        if let (ClusterAnswer::Class(class), Ok(clusters)) = (rules, told_of_it) {
            class.keep(clusters);
        }
    }
    told_of_it
}

/// An answer of the server in cached form: the status in the upper half, the clusters in the lower.
fn cluster_answer(kept: u64) -> Result<i32> {
    Status((kept >> 32) as u32).ok().map(|()| kept as u32 as i32)
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

/// The block size with the most threads on a multiprocessor. Like CUDA's own search, it tries whole warps
/// from the limit down, so the largest of equals wins.
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
    // SAFETY: the program passed the function to be called here.
    let dynamic = |size: i32| to_shared.map_or(shared, |function| unsafe { function(size) });
    let (mut best_size, mut best_blocks, mut best_threads) = (0, 0, 0);
    let mut aligned = (limit + warp - 1) / warp * warp;
    while aligned > 0 {
        let size = aligned.min(limit);
        let n = blocks(&function, size, dynamic(size), flags)?;
        if n * size > best_threads {
            (best_size, best_blocks, best_threads) = (size, n, n * size);
        }
        // No smaller block size can exceed a full multiprocessor.
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
        function.context.session().check()?;
        let request = OccupancyMaxActiveClusters {
            function: function.id()?,
            grid: c.grid,
            block: c.block,
            dynamic_shared: c.sharedMemBytes,
            // SAFETY: the program passes as many attributes as it says.
            attributes: unsafe { launch::attributes(&c) }?,
            shapes: Vec::new(),
        };
        count.put(clusters(&function, request)?)
    }

    unsafe fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: usize, config: In<LaunchConfig>) {
        size.required()?;
        config.required()?;
        let c = config.get()?;
        let function = library::of(function)?;
        let request = OccupancyMaxPotentialClusterSize {
            function: function.id()?,
            grid: c.grid,
            block: c.block,
            dynamic_shared: c.sharedMemBytes,
            // SAFETY: the program passes as many attributes as it says.
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
        let computed = occupancy::available(&function, num_blocks as u32, block_size as u32);
        if let Some(bytes) = computed
            && !reading::is_checked()
        {
            function.context.session().check()?;
            return size.put(bytes? as usize);
        }
        let request =
            OccupancyAvailableShared { function: function.id()?, blocks: num_blocks as u32, block_size: block_size as u32 };
        let told = function.ask(&request, |reply| reply.bytes);
        if let Some(bytes) = computed.filter(|bytes| *bytes != told) {
            let number = |bytes: Result<u64>| bytes.map_or(-1, |bytes| bytes as i64);
            differs(&function, "bytes of shared memory", number(bytes), number(told));
        }
        size.put(told? as usize)
    }
}
