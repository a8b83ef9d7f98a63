//! Launches.

use crate::handle::{FunctionId, StreamId};
use crate::ops::ops;

crate::wire_struct! {
    /// One launch attribute: `CUlaunchAttribute`.
    pub struct LaunchAttribute {
        /// `CUlaunchAttributeID`.
        id: u32,
        /// The value union as the program passed it. A server passes on attributes whose values contain no
        /// handle or pointer, translates the others that it knows, and refuses the rest.
        value: [u8; 64],
    }
}

/// `CUlaunchAttributeID`: the attributes of launches that a server passes on as they are, because their
/// values contain no handle: nothing (0), the access policy window, cooperative, the cluster's dimension and
/// scheduling, programmatic serialization, priority, the map of memory synchronization domains and the
/// domain, the preferred cluster, and the carveout of shared memory. A server refuses all others.
pub const PASSED_ON: [u32; 11] = [0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 14];

ops! {
    /// Launches.
    trait LaunchOps;

    /// `cuLaunchKernel`, `cuLaunchKernelEx`, `cuLaunchCooperativeKernel`.
    async 0x0601 launch: Launch<'a>
        [order Streams, may_block FirstLaunch, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// Stream.
        stream: StreamId,
        /// Blocks in x, y, z.
        grid: [u32; 3],
        /// Threads of a block in x, y, z.
        block: [u32; 3],
        /// Dynamic shared memory of a block, in bytes.
        dynamic_shared: u32,
        /// Attributes.
        attributes: Vec<LaunchAttribute>,
        /// The parameter block, laid out as [`crate::ops::module::FunctionInfo::params`] says.
        params: &'a [u8],
    }
}
