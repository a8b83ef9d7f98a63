//! How many blocks fit on a multiprocessor, by the rules that NVIDIA documents in `cuda_occupancy.h`.
//!
//! The rules are for compute capability 9.0 and agree with the driver: checked against 370,000 answers
//! recorded on an H200 (driver 580) for 1456 kernels of NVIDIA's libraries, PyTorch's and our own, with 4 to
//! 255 registers, up to 48 KiB of static shared memory, 0 to 16 barriers, and all carveouts. The server is
//! asked about everything else: a cache preference, and other devices.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::abi::result::{Result, code};
use crate::abi::types::launch_attr;
use crate::code::function::{Function, func};
use crate::code::reading;
use crate::process::device_attributes::attr;
use crate::process::driver::{self, Device};
use client::ops::module::{ClusterShape, OccupancyMaxActiveClusters};
use client::{Status, lock};
use device_code::cubin::{Cubin, Kernel, MOST_THREADS, RESERVED_SHARED};

/// Possible sizes of a multiprocessor's shared memory, in KiB.
const SHARED_KIB: [u64; 10] = [0, 8, 16, 32, 64, 100, 132, 164, 196, 228];
/// Allocation unit of shared memory in bytes, and of a warp's registers.
const SHARED_UNIT: u64 = 128;
const REGISTER_UNIT: u64 = 256;
/// Partitions of a multiprocessor that warps and registers are divided between.
const PARTS: u64 = 4;
/// Barriers per multiprocessor.
const BARRIERS: u64 = 64;
/// Shared memory in bytes that a block can have without setting an attribute.
const USUAL_SHARED: u64 = 48 << 10;
const WARP: u64 = 32;
/// Registers per multiprocessor, and per block.
const REGISTERS: u64 = 64 << 10;
/// Maximum warps and blocks of a multiprocessor.
const MOST_WARPS: u64 = 64;
const MOST_BLOCKS: u64 = 32;

/// The resources of a kernel's block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resources {
    registers: u64,
    shared: u64,
    barriers: u64,
    /// It can only be launched with one block shape. The driver's answers for other shapes were not recorded.
    one_shape: bool,
}

/// A function's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Set {
    /// Maximum dynamic shared memory per block, in bytes.
    pub dynamic_limit: u64,
    /// Percentage of a multiprocessor's memory preferred as shared memory, or -1.
    pub carveout: i32,
}

impl Resources {
    pub fn of(kernel: &Kernel) -> Resources {
        Resources {
            registers: kernel.registers.into(),
            shared: kernel.shared.into(),
            barriers: kernel.barriers.into(),
            one_shape: kernel.required_threads.is_some(),
        }
    }

    /// Registers per warp.
    fn of_warp(&self) -> u64 {
        (self.registers * WARP).next_multiple_of(REGISTER_UNIT)
    }

    /// Warps that the registers of a multiprocessor suffice for.
    fn warps(&self) -> u64 {
        (REGISTERS / PARTS).checked_div(self.of_warp()).map_or(MOST_WARPS, |warps| warps * PARTS)
    }

    /// The kernel's attributes as the driver reports them after loading, by number from 0.
    pub fn attributes(&self, cubin: &Cubin, kernel: &Kernel) -> [i32; func::MAX as usize] {
        let bounds = kernel
            .max_threads
            .map_or(u64::MAX, |sizes| sizes.iter().fold(1, |all: u64, n| all.saturating_mul((*n).into())));
        // The driver ignores the block shape that a kernel requires (`.reqntid`).
        let threads = (self.warps() * WARP).min(MOST_THREADS).min(bounds);
        let cluster = kernel.cluster.unwrap_or_default();
        [
            threads as i32,
            kernel.shared as i32,
            i32::try_from(cubin.constants).unwrap_or(i32::MAX),
            kernel.stack as i32,
            kernel.registers as i32,
            cubin.ptx_arch as i32,
            cubin.arch as i32,
            // CACHE_MODE_CA
            0,
            USUAL_SHARED.saturating_sub(self.shared) as i32,
            // No carveout
            -1,
            kernel.needs_cluster.into(),
            cluster[0] as i32,
            cluster[1] as i32,
            cluster[2] as i32,
            // Only portable sizes of clusters, no preference for their scheduling
            0,
            0,
        ]
    }

    /// A multiprocessor's shared memory in bytes, if each block needs `each`.
    fn shared_in_all(&self, set: Set, each: u64) -> u64 {
        let sizes = SHARED_KIB.map(|kib| kib << 10);
        let most = sizes[sizes.len() - 1];
        let at_least = |bytes: u64| sizes.iter().copied().find(|size| *size >= bytes).unwrap_or(most);
        match u64::try_from(set.carveout) {
            Ok(percent) => at_least(most * percent / 100).max(at_least(each)),
            Err(_) => most,
        }
    }

    /// Number of blocks of `threads` threads and `dynamic` bytes of dynamic shared memory that fit on a
    /// multiprocessor: `cuOccupancyMaxActiveBlocksPerMultiprocessor`.
    pub fn blocks(&self, set: Set, threads: u64, dynamic: u64) -> u64 {
        let warps = threads.div_ceil(WARP);
        // Registers are checked as if a block's warps were spread evenly.
        let registers = self.of_warp() * warps.next_multiple_of(PARTS);
        let shared = self.shared.saturating_add(dynamic);
        let each =
            shared.saturating_add(RESERVED_SHARED).checked_next_multiple_of(SHARED_UNIT).unwrap_or(u64::MAX);
        let most = SHARED_KIB[SHARED_KIB.len() - 1] << 10;
        let allowed = USUAL_SHARED.max(set.dynamic_limit.saturating_add(self.shared));
        if warps == 0 || threads > MOST_THREADS || registers > REGISTERS || shared > allowed || each > most {
            return 0;
        }
        let by_barriers = BARRIERS.checked_div(self.barriers).unwrap_or(MOST_BLOCKS);
        (MOST_WARPS / warps)
            .min(self.warps() / warps)
            .min(self.shared_in_all(set, each) / each)
            .min(by_barriers)
            .min(MOST_BLOCKS)
    }

    /// An amount of dynamic shared memory in bytes with which `resident` blocks of `threads` threads fit on a
    /// multiprocessor (for [`Clusters::MOST_RESIDENT`], at least that many), if there is one.
    fn dynamic_for(&self, set: Set, threads: u64, resident: u64) -> Option<u32> {
        let most = SHARED_KIB[SHARED_KIB.len() - 1] << 10;
        let each = most / resident / SHARED_UNIT * SHARED_UNIT;
        let allowed =
            USUAL_SHARED.max(set.dynamic_limit.saturating_add(self.shared)).saturating_sub(self.shared);
        let dynamic = each.checked_sub(RESERVED_SHARED + self.shared)?.min(allowed);
        let fits = |dynamic| self.blocks(set, threads, dynamic).min(Clusters::MOST_RESIDENT) == resident;
        [dynamic, 0].into_iter().find(|dynamic| fits(*dynamic)).map(|dynamic| dynamic as u32)
    }

    /// Dynamic shared memory in bytes available to each of `blocks` blocks:
    /// `cuOccupancyAvailableDynamicSMemPerBlock`.
    ///
    /// # Errors
    /// `INVALID_VALUE` if that many blocks don't fit.
    pub fn available(&self, set: Set, blocks: u64, threads: u64) -> Result<u64> {
        let most = SHARED_KIB[SHARED_KIB.len() - 1] << 10;
        let each = most.checked_div(blocks).ok_or(Status::INVALID_VALUE)? / SHARED_UNIT * SHARED_UNIT;
        if self.blocks(set, threads, 0) < blocks {
            return Err(Status::INVALID_VALUE);
        }
        Ok(each.saturating_sub(self.shared).min(set.dynamic_limit))
    }
}

/// Whether these rules apply to a device.
fn is_known(device: &Device) -> bool {
    let attribute = |number: usize| device.attribute(number);
    let known = [
        (attr::COMPUTE_CAPABILITY_MAJOR, 9),
        (attr::COMPUTE_CAPABILITY_MINOR, 0),
        (attr::WARP_SIZE, WARP as i32),
        (attr::MAX_THREADS_PER_BLOCK, MOST_THREADS as i32),
        (attr::MAX_REGISTERS_PER_BLOCK, REGISTERS as i32),
        (attr::MAX_THREADS_PER_MULTIPROCESSOR, (MOST_WARPS * WARP) as i32),
        (attr::MAX_SHARED_MEMORY_PER_BLOCK, USUAL_SHARED as i32),
        (attr::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10),
        (attr::MAX_REGISTERS_PER_MULTIPROCESSOR, REGISTERS as i32),
        (attr::MAX_BLOCKS_PER_MULTIPROCESSOR, MOST_BLOCKS as i32),
        (attr::RESERVED_SHARED_MEMORY_PER_BLOCK, RESERVED_SHARED as i32),
    ];
    known.iter().all(|(number, value)| attribute(*number) == *value)
}

/// A function's resources and settings, if these rules apply to it.
fn known(function: &Function) -> Option<(&Resources, Set)> {
    let resources = function.resources()?;
    let device = driver::device(function.context.device as i32).ok()?;
    let recorded = !resources.one_shape || reading::is_checked();
    if !recorded || !is_known(device) || !function.has_usual_caches() {
        return None;
    }
    let set = Set {
        dynamic_limit: function.attribute(func::MAX_DYNAMIC_SHARED_SIZE_BYTES).max(0) as u64,
        carveout: function.attribute(func::PREFERRED_SHARED_MEMORY_CARVEOUT),
    };
    Some((resources, set))
}

/// Number of a function's blocks that fit on a multiprocessor, if these rules tell.
pub(crate) fn blocks(function: &Function, threads: u32, dynamic: u64) -> Option<i32> {
    let (resources, set) = known(function)?;
    Some(resources.blocks(set, threads.into(), dynamic) as i32)
}

/// Dynamic shared memory available to each of `blocks` blocks, if these rules tell.
pub(crate) fn available(function: &Function, blocks: u32, threads: u32) -> Option<Result<u64>> {
    let (resources, set) = known(function)?;
    // Not recorded for other carveouts.
    matches!(set.carveout, -1 | 100).then(|| resources.available(set, blocks.into(), threads.into()))
}

/// A class of cluster questions with the same answer: how many clusters a device can run depends on how its
/// multiprocessors are grouped, and on the function only through how many of its blocks fit on one. (Recorded
/// for 104,000 combinations of kernels, shapes and settings on an H200.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Clusters {
    /// Address of the context, which is never freed. Green contexts have other multiprocessors.
    context: usize,
    /// Blocks per cluster.
    blocks: u64,
    /// Blocks that fit on a multiprocessor; more than eight make no difference.
    resident: u64,
}

/// What these rules tell about a cluster question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterAnswer {
    /// The answer.
    Known(Result<i32>),
    /// All questions of this class have the same answer.
    Class(Clusters),
    /// Nothing, for this reason.
    Unknown(&'static str),
}

/// Cached answers of the server.
static CLUSTERS: Mutex<Option<HashMap<Clusters, i32>>> = Mutex::new(None);

/// Classifies a cluster question for a function with these resources and settings. `context`: see
/// [`Clusters`]. `non_portable`: the function may use larger clusters than every device supports.
fn classify(
    resources: &Resources,
    set: Set,
    context: usize,
    non_portable: bool,
    op: &OccupancyMaxActiveClusters,
) -> ClusterAnswer {
    let mut size = None;
    for attribute in &op.attributes {
        match attribute.id {
            launch_attr::CLUSTER_DIMENSION if size.is_none() => {
                let word =
                    |at: usize| attribute.value[at..].first_chunk().copied().map_or(0, u32::from_le_bytes);
                size = Some([word(0), word(4), word(8)]);
            }
            // These do not matter.
            launch_attr::CLUSTER_SCHEDULING_POLICY_PREFERENCE
            | launch_attr::PROGRAMMATIC_STREAM_SERIALIZATION
            | launch_attr::PRIORITY => {}
            _ => return ClusterAnswer::Unknown("an attribute that may matter"),
        }
    }
    let product = |sizes: &[u32; 3]| sizes.iter().try_fold(1u64, |all, n| all.checked_mul((*n).into()));
    let threads = product(&op.block).filter(|threads| (1..=MOST_THREADS).contains(threads));
    let (Some(threads), true) = (threads, op.grid.iter().all(|n| *n != 0)) else {
        return ClusterAnswer::Unknown("a grid or block of an impossible size");
    };
    let Some(size) = size else { return ClusterAnswer::Known(Ok(0)) };
    if !(0..3).all(|i| size[i] != 0 && op.grid[i].is_multiple_of(size[i])) {
        return ClusterAnswer::Unknown("a grid that is no whole number of clusters");
    }
    let Some(blocks) = product(&size) else {
        return ClusterAnswer::Unknown("a cluster of an impossible size");
    };
    if blocks > Clusters::PORTABLE && !non_portable {
        return ClusterAnswer::Known(Err(code::INVALID_CLUSTER_SIZE));
    }
    let resident = resources.blocks(set, threads, op.dynamic_shared.into()).min(Clusters::MOST_RESIDENT);
    if resident == 0 && blocks <= Clusters::PORTABLE {
        return ClusterAnswer::Known(Ok(0));
    }
    ClusterAnswer::Class(Clusters { context, blocks, resident })
}

/// Classifies a cluster question.
pub(crate) fn clusters(function: &Function, op: &OccupancyMaxActiveClusters) -> ClusterAnswer {
    let Some((resources, set)) = known(function) else {
        return ClusterAnswer::Unknown("a function whose rules are not known");
    };
    if function.attribute(func::REQUIRED_CLUSTER_WIDTH) != 0 {
        return ClusterAnswer::Unknown("a function that requires clusters of one size");
    }
    let non_portable = function.attribute(func::NON_PORTABLE_CLUSTER_SIZE_ALLOWED) != 0;
    let context = std::ptr::from_ref(function.context) as usize;
    classify(resources, set, context, non_portable, op)
}

/// The other questions asked by a library that looks for a kernel's largest cluster: one-dimensional clusters
/// of all sizes, with the same shared memory. Empty if `op` isn't such a question.
pub(crate) fn other_lines(op: &OccupancyMaxActiveClusters) -> Vec<ClusterShape> {
    let line = |blocks| ClusterShape { blocks, dynamic_shared: op.dynamic_shared };
    let asked = op.grid[0];
    if *op != line(asked).question(op) {
        return Vec::new();
    }
    (1..=Clusters::MOST_ASKED as u32).filter(|blocks| *blocks != asked).map(line).collect()
}

impl Clusters {
    const MOST_RESIDENT: u64 = 8;
    /// Maximum blocks per cluster that every device supports, that this device supports, and that libraries
    /// ask about.
    const PORTABLE: u64 = 8;
    const MOST: u64 = 16;
    const MOST_ASKED: u64 = 32;

    /// The cached answer to such a question.
    pub fn known(self) -> Option<i32> {
        lock(&CLUSTERS).as_ref()?.get(&self).copied()
    }

    /// Caches the server's answer.
    pub fn keep(self, clusters: i32) {
        lock(&CLUSTERS).get_or_insert_default().insert(self, clusters);
    }

    /// The other classes that questions about the same function can fall in, with a question for each: a
    /// library that asks about one of its kernels will ask about many.
    pub fn others(
        self,
        function: &Function,
        op: &OccupancyMaxActiveClusters,
    ) -> Vec<(Clusters, ClusterShape)> {
        let Some((resources, set)) = known(function) else { return Vec::new() };
        let threads = op.block.iter().map(|n| u64::from(*n)).product();
        let non_portable = function.attribute(func::NON_PORTABLE_CLUSTER_SIZE_ALLOWED) != 0;
        self.others_of(resources, set, threads, if non_portable { Self::MOST } else { Self::PORTABLE })
    }

    fn others_of(
        self,
        resources: &Resources,
        set: Set,
        threads: u64,
        most: u64,
    ) -> Vec<(Clusters, ClusterShape)> {
        let shared = (1..=Self::MOST_RESIDENT)
            .filter_map(|resident| Some((resident, resources.dynamic_for(set, threads, resident)?)));
        let with_shared = |(resident, dynamic)| {
            // A library that looks for a function's largest cluster tries sizes beyond the maximum.
            let most =
                if resident == self.resident && most > Self::PORTABLE { Self::MOST_ASKED } else { most };
            (1..=most).map(move |blocks| {
                let shape = ClusterShape { blocks: blocks as u32, dynamic_shared: dynamic };
                (Clusters { blocks, resident, ..self }, shape)
            })
        };
        shared.flat_map(with_shared).filter(|(class, _)| *class != self && class.known().is_none()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::handle::FunctionId;
    use client::ops::launch::LaunchAttribute;
    use client::ops::module::MOST_CLUSTER_SHAPES;

    const USUAL: Set = Set { dynamic_limit: 48 << 10, carveout: -1 };

    fn with(registers: u64, shared: u64, barriers: u64) -> Resources {
        Resources { registers, shared, barriers, one_shape: false }
    }

    /// As recorded on an H200.
    #[test]
    fn blocks_with_large_needs_fit_rarely() {
        let plain = with(10, 0, 1);
        let opted = Set { dynamic_limit: 232_448, carveout: -1 };
        let blocks = |set, threads, dynamic| plain.blocks(set, threads, dynamic);
        assert_eq!([0, 1024, 40_000, 60_000].map(|n| blocks(USUAL, 32, n)), [32, 32, 5, 0]);
        assert_eq!([0, 1024, 40_000, 60_000].map(|n| blocks(USUAL, 1024, n)), [2, 2, 2, 0]);
        assert_eq!([40_000, 60_000, 200_000].map(|n| blocks(opted, 32, n)), [5, 3, 1]);
        let fixed = with(14, 12_000, 1);
        // Static shared memory counts against what a block can have without setting an attribute.
        let rest = Set { dynamic_limit: (48 << 10) - 12_000, carveout: -1 };
        assert_eq!([0, 1024, 40_000].map(|n| fixed.blocks(rest, 32, n)), [17, 16, 0]);
        assert_eq!(with(10, 0, 6).blocks(USUAL, 32, 0), 10);
    }

    /// As recorded on an H200.
    #[test]
    fn blocks_share_the_resources_of_a_multiprocessor() {
        let opted = |limit| Set { dynamic_limit: limit, carveout: -1 };
        let (plain, fixed) = (with(10, 0, 1), with(14, 12_000, 1));
        assert_eq!(
            [1, 2, 4].map(|n| plain.available(opted(232_448), n, 128)),
            [Ok(232_448), Ok(116_736), Ok(58_368)]
        );
        assert_eq!(
            [1, 2, 4].map(|n| fixed.available(opted(220_448), n, 128)),
            [Ok(220_448), Ok(104_736), Ok(46_368)]
        );
        assert_eq!([1, 4].map(|n| plain.available(opted(100), n, 128)), [Ok(100), Ok(100)]);
        assert_eq!(plain.available(opted(100), 33, 32), Err(Status::INVALID_VALUE));
    }

    #[test]
    fn a_carveout_always_leaves_room_for_one_block() {
        let plain = with(10, 0, 1);
        let none = Set { carveout: 0, ..USUAL };
        assert_eq!([0, 1024, 40_000].map(|n| plain.blocks(none, 32, n)), [8, 4, 1]);
    }

    /// As an H200's driver (580) reports for Triton's kernels, which all require a shape.
    #[test]
    fn a_required_shape_does_not_limit_the_threads_that_are_reported() {
        let most = |registers, required_threads, max_threads| {
            let kernel = Kernel {
                name: "kernel".to_owned(),
                params: Vec::new(),
                registers,
                shared: 0,
                stack: 0,
                barriers: 0,
                max_threads,
                required_threads,
                cluster: None,
                needs_cluster: false,
            };
            let cubin = Cubin { arch: 90, ptx_arch: 90, constants: 0, kernels: Vec::new(), prints: false };
            let resources = Resources::of(&kernel);
            assert_eq!(resources.one_shape, required_threads.is_some());
            resources.attributes(&cubin, &kernel)[func::MAX_THREADS_PER_BLOCK as usize]
        };
        assert_eq!(most(32, Some([128, 1, 1]), None), 1024);
        assert_eq!(most(255, Some([128, 1, 1]), None), 256);
        assert_eq!(most(32, None, Some([100, 1, 1])), 100);
    }

    #[test]
    fn registers_are_allocated_in_four_partitions() {
        assert_eq!(with(255, 0, 0).blocks(USUAL, 256, 0), 1);
        assert_eq!(with(255, 0, 0).blocks(USUAL, 257, 0), 0);
        assert_eq!(with(128, 0, 0).blocks(USUAL, 96, 0), 5);
    }

    fn question(
        grid: [u32; 3],
        cluster: Option<[u32; 3]>,
        dynamic_shared: u32,
    ) -> OccupancyMaxActiveClusters {
        let attribute = |size: [u32; 3]| {
            let mut value = [0; 64];
            for (i, n) in size.into_iter().enumerate() {
                value[4 * i..][..4].copy_from_slice(&n.to_le_bytes());
            }
            LaunchAttribute { id: launch_attr::CLUSTER_DIMENSION, value }
        };
        OccupancyMaxActiveClusters {
            function: FunctionId(0),
            grid,
            block: [128, 1, 1],
            dynamic_shared,
            attributes: cluster.map(attribute).into_iter().collect(),
            shapes: Vec::new(),
        }
    }

    /// As recorded on an H200: the server is never asked about these.
    #[test]
    fn some_questions_about_clusters_have_one_answer_everywhere() {
        let of = |non_portable, op| classify(&with(32, 0, 1), USUAL, 1, non_portable, &op);
        assert_eq!(of(false, question([64, 1, 1], None, 0)), ClusterAnswer::Known(Ok(0)));
        assert_eq!(of(true, question([8, 1, 1], Some([8, 1, 1]), 100_000)), ClusterAnswer::Known(Ok(0)));
        for size in [[9, 1, 1], [4, 4, 1], [32, 1, 1]] {
            let op = question(size, Some(size), 0);
            assert_eq!(of(false, op), ClusterAnswer::Known(Err(code::INVALID_CLUSTER_SIZE)));
        }
        let class = |blocks, resident| ClusterAnswer::Class(Clusters { context: 1, blocks, resident });
        assert_eq!(of(true, question([16, 1, 1], Some([16, 1, 1]), 0)), class(16, 8));
        assert_eq!(of(false, question([2, 4, 8], Some([2, 2, 2]), 40_000)), class(8, 5));
        for (grid, size) in [([3, 1, 1], [2, 1, 1]), ([2, 1, 1], [0, 1, 1])] {
            assert!(matches!(of(false, question(grid, Some(size), 0)), ClusterAnswer::Unknown(_)));
        }
    }

    #[test]
    fn questions_asked_ahead_are_in_the_class_they_are_cached_for() {
        let opted = |shared: u64| Set { dynamic_limit: 232_448 - shared, carveout: -1 };
        let kernels =
            [(with(32, 0, 1), opted(0)), (with(168, 40_000, 2), opted(40_000)), (with(90, 0, 16), USUAL)];
        for (resources, set) in kernels {
            for threads in [32, 128, 384, 1024] {
                let first = Clusters { context: 1, blocks: 2, resident: 1 };
                let others = first.others_of(&resources, set, threads, Clusters::MOST);
                assert!(others.len() <= MOST_CLUSTER_SHAPES);
                for (class, shape) in others {
                    let fit = resources.blocks(set, threads, shape.dynamic_shared.into());
                    assert_eq!(
                        (class.blocks, class.resident),
                        (shape.blocks.into(), fit.min(8)),
                        "{shape:?}"
                    );
                }
            }
        }
        // With much shared memory to choose from, one question covers all.
        let all = Clusters { context: 1, blocks: 2, resident: 1 };
        assert_eq!(all.others_of(&with(32, 0, 1), opted(0), 128, Clusters::PORTABLE).len(), 8 * 8 - 1);
    }
}
