//! Special registers, clocks, sleeping, traps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::Fault;
use crate::exec::rows;
use crate::machine::address::{RESERVED, RESERVED_BYTES};
use crate::machine::program::Handler;
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};

macro_rules! lanes32 {
    (|$w:pat, $l:ident| $e:expr) => {
        handler!(|w, i, m| {
            let $w: &Warp = w;
            let mut out = [0u32; LANES];
            for $l in 0..LANES {
                out[$l] = $e;
            }
            rows::put(w, i.r[0], m, &out);
            Flow::Next
        })
    };
}

macro_rules! same {
    ($t:ty, |$w:ident| $e:expr) => {
        same!($t, |$w, i| $e)
    };
    ($t:ty, |$w:ident, $i:ident| $e:expr) => {
        handler!(|$w, $i, m| {
            let value: $t = $e;
            rows::put($w, $i.r[0], m, &[value; LANES]);
            Flow::Next
        })
    };
}

/// The cluster's index in the grid and the block's index in the cluster, in one dimension.
fn cluster(w: &mut Warp, dimension: usize) -> (u32, u32) {
    let block = w.block();
    let (index, size) = (block.index[dimension], block.grid().cluster[dimension]);
    (index / size, index % size)
}

fn wall_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

fn clock() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

fn worker() -> u32 {
    // The pool names its threads, for example "sgpu-worker-3".
    let name = std::thread::current();
    name.name().and_then(|n| n.rsplit('-').next()?.parse().ok()).unwrap_or(0)
}

/// The handler and width of a special register.
pub(crate) fn register(name: &str) -> Option<(Handler, u32)> {
    Some((
        match name {
            "%tid.x" => lanes32!(|w, l| w.tid[0][l]),
            "%tid.y" => lanes32!(|w, l| w.tid[1][l]),
            "%tid.z" => lanes32!(|w, l| w.tid[2][l]),
            "%ntid.x" => same!(u32, |w| w.block().grid().config.block[0]),
            "%ntid.y" => same!(u32, |w| w.block().grid().config.block[1]),
            "%ntid.z" => same!(u32, |w| w.block().grid().config.block[2]),
            "%ctaid.x" => same!(u32, |w| w.block().index[0]),
            "%ctaid.y" => same!(u32, |w| w.block().index[1]),
            "%ctaid.z" => same!(u32, |w| w.block().index[2]),
            "%nctaid.x" => same!(u32, |w| w.block().grid().config.grid[0]),
            "%nctaid.y" => same!(u32, |w| w.block().grid().config.grid[1]),
            "%nctaid.z" => same!(u32, |w| w.block().grid().config.grid[2]),
            "%clusterid.x" => same!(u32, |w| cluster(w, 0).0),
            "%clusterid.y" => same!(u32, |w| cluster(w, 1).0),
            "%clusterid.z" => same!(u32, |w| cluster(w, 2).0),
            "%cluster_ctaid.x" => same!(u32, |w| cluster(w, 0).1),
            "%cluster_ctaid.y" => same!(u32, |w| cluster(w, 1).1),
            "%cluster_ctaid.z" => same!(u32, |w| cluster(w, 2).1),
            "%nclusterid.x" => same!(u32, |w| w.block().grid().clusters(0)),
            "%nclusterid.y" => same!(u32, |w| w.block().grid().clusters(1)),
            "%nclusterid.z" => same!(u32, |w| w.block().grid().clusters(2)),
            "%cluster_nctaid.x" => same!(u32, |w| w.block().grid().cluster[0]),
            "%cluster_nctaid.y" => same!(u32, |w| w.block().grid().cluster[1]),
            "%cluster_nctaid.z" => same!(u32, |w| w.block().grid().cluster[2]),
            "%cluster_ctarank" => same!(u32, |w| w.block().rank),
            "%cluster_nctarank" => same!(u32, |w| w.block().grid().cluster.iter().product()),
            "%clusterid.w" | "%cluster_ctaid.w" => same!(u32, |w| 0),
            "%nclusterid.w" | "%cluster_nctaid.w" => same!(u32, |w| 1),
            "%tid.w" | "%ctaid.w" => same!(u32, |w| 0),
            "%ntid.w" | "%nctaid.w" => same!(u32, |w| 1),
            "%laneid" => lanes32!(|_, l| l as u32),
            "%warpid" => same!(u32, |w| w.index),
            "%nwarpid" => same!(u32, |w| 64),
            // The address where the CUDA headers expect the barrier of a cooperative grid; zero for other
            // launches.
            "%envreg1" => same!(u32, |w| (w.block().grid().barrier() >> 32) as u32),
            "%envreg2" => same!(u32, |w| w.block().grid().barrier() as u32),
            "%smid" => same!(u32, |w| worker()),
            "%nsmid" => same!(u32, |w| w.block().grid().hardware.properties.multiprocessors),
            "%lanemask_eq" => lanes32!(|_, l| 1 << l),
            "%lanemask_le" => lanes32!(|_, l| u32::MAX >> (31 - l)),
            "%lanemask_lt" => lanes32!(|_, l| (1 << l) - 1),
            "%lanemask_ge" => lanes32!(|_, l| u32::MAX << l),
            "%lanemask_gt" => lanes32!(|_, l| !(u32::MAX >> (31 - l))),
            "%clock" => same!(u32, |w| clock() as u32),
            "%clock_hi" => same!(u32, |w| (clock() >> 32) as u32),
            "%globaltimer_lo" => same!(u32, |w| wall_ns() as u32),
            "%globaltimer_hi" => same!(u32, |w| (wall_ns() >> 32) as u32),
            // Where cooperative groups exchange data between tiles of several warps.
            "%reserved_smem_offset_begin" | "%reserved_smem_offset_0" | "%reserved_smem_offset_1" => {
                same!(u32, |w| RESERVED as u32)
            }
            "%reserved_smem_offset_end" => same!(u32, |w| (RESERVED + RESERVED_BYTES) as u32),
            "%reserved_smem_offset_cap" => same!(u32, |w| RESERVED_BYTES as u32),
            "%dynamic_smem_size" => same!(u32, |w| w.block().grid().config.dynamic_shared),
            "%total_smem_size" | "%aggr_smem_size" => same!(u32, |w| w.block().grid().shared_bytes),
            "%clock64" => return Some((same!(u64, |w| clock()), 64)),
            "%globaltimer" => return Some((same!(u64, |w| wall_ns()), 64)),
            "%gridid" => return Some((same!(u64, |w| w.block().grid().grid_id), 64)),
            "%current_graph_exec" => return Some((same!(u64, |w| 0), 64)),
            _ => return None,
        },
        32,
    ))
}

/// Predicate `r[0]`: whether the launch or the kernel gave a cluster size.
pub(crate) const IS_EXPLICIT_CLUSTER: Handler = handler!(|w, i, m| {
    let explicit = w.block().grid().explicit_cluster;
    rows::put_pred(w, i.r[0], m, if explicit { u32::MAX } else { 0 });
    Flow::Next
});

/// `nanosleep`: row `r[1]`. A short sleep only yields.
pub(crate) const NANOSLEEP: Handler = handler!(|w, i, m| {
    let ns: [u32; LANES] = rows::get(w, i.r[1]);
    w.spinning = true;
    if ns[m.trailing_zeros() as usize & 31] >= 100_000 {
        std::thread::sleep(Duration::from_micros(50));
    } else {
        std::thread::yield_now();
    }
    Flow::Next
});

/// `trap`.
pub(crate) const TRAP: Handler = handler!(|w, i, m| trap(w, m));

fn trap(w: &mut Warp, mask: u32) -> Flow {
    w.set_fault(Fault::Trap, mask.trailing_zeros() as usize)
}

/// Does nothing, for hints such as `prefetch`.
pub(crate) const NOTHING: Handler = handler!(|w, i, m| Flow::Next);

/// The address of the dynamic shared memory, which follows the static: 64 bits.
pub(crate) const DYNAMIC_SHARED_64: Handler = same!(u64, |w, i| {
    let block = w.block();
    u64::from(block.shared_bytes - block.grid().config.dynamic_shared) + i.imm as u64
});

/// Like [`DYNAMIC_SHARED_64`], 32 bits.
pub(crate) const DYNAMIC_SHARED_32: Handler = same!(u32, |w, i| {
    let block = w.block();
    (block.shared_bytes - block.grid().config.dynamic_shared).wrapping_add(i.imm as u32)
});
