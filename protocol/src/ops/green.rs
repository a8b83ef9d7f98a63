//! Green contexts, which have only a part of a device, and these parts.
//!
//! The driver's structures for parts (`CUdevResource`) are partly opaque. They stay on the server, which
//! gives each a number. A program has the number and the fields that it may read.

use crate::handle::{DescriptorId, GreenId, StreamId};
use crate::ops::ops;

/// Maximum groups of one split: as many as fit into a reply.
pub const MAX_GROUPS: u32 = 128;

crate::wire_struct! {
    /// A part of a device.
    pub struct Part {
        /// The server's number for it, from 1; 0: no part.
        number: u32,
        /// `CUdevResourceType`.
        kind: u32,
        /// `CUdevSmResource`: the number of multiprocessors, the minimum of a part of it, and the number of
        /// which such a part's count is a multiple.
        sm: [u32; 3],
    }
}

ops! {
    /// Green contexts. Their streams, modules and memory belong to the device's primary context.
    trait GreenOps;

    /// `cuDeviceGetDevResource`, `cuGreenCtxGetDevResource`: the part of this kind that a device or green
    /// context has.
    sync 0x0d01 part_get: PartGet
        [order None, may_block Never, lane Main]
    {
        /// Ordinal of the device.
        device: u32,
        /// The green context; `None`: the whole device.
        green: Option<GreenId>,
        /// `CUdevResourceType`.
        kind: u32,
    } -> PartGetReply {
        /// The part.
        part: Part,
    }

    /// `cuDevSmResourceSplitByCount`.
    sync 0x0d02 part_split: PartSplit
        [order None, may_block Never, lane Main]
    {
        /// The part to split.
        part: u32,
        /// Maximum number of groups to make, up to [`MAX_GROUPS`]; `None`: only count the possible groups.
        groups: Option<u32>,
        /// `CUdevSmResourceSplit_flags`.
        flags: u32,
        /// Minimum multiprocessors of a group.
        least: u32,
    } -> PartSplitReply {
        /// Number of groups made, or possible.
        count: u32,
        /// The groups; empty if they were only counted.
        groups: Vec<Part>,
        /// The remaining part.
        rest: Part,
    }

    /// `cuDevResourceGenerateDesc`.
    sync 0x0d03 part_describe: PartDescribe
        [order None, may_block Never, lane Main]
    {
        /// Its id, not in use.
        descriptor: DescriptorId,
        /// Numbers of its parts.
        parts: Vec<u32>,
    } -> PartDescribeReply {}

    /// `cuGreenCtxCreate`.
    sync 0x0d04 green_create: GreenCreate
        [order None, may_block Never, lane Main]
    {
        /// Its id, not in use.
        green: GreenId,
        /// The parts that it has.
        descriptor: DescriptorId,
        /// Ordinal of the device.
        device: u32,
        /// `CUgreenCtxCreate_flags`.
        flags: u32,
    } -> GreenCreateReply {}

    /// `cuGreenCtxDestroy`. Its streams have been destroyed before.
    sync 0x0d05 green_destroy: GreenDestroy
        [order Session, may_block Never, lane Main]
    {
        /// The green context.
        green: GreenId,
    } -> GreenDestroyReply {}

    /// `cuGreenCtxStreamCreate`: a stream that does not wait for default streams.
    async 0x0d06 green_stream: GreenStream
        [order Streams, may_block Never, lane Main]
    {
        /// The green context.
        green: GreenId,
        /// Its id, not in use.
        stream: StreamId,
        /// Priority.
        priority: i32,
    }
}
