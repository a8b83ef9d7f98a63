//! Parts of a device, and contexts that have only a part: green contexts.
//!
//! The driver's structures for parts (`CUdevResource`) have insides that are its own. They stay with the server, which gives each a number; what a program holds is the number and what it may read.

use crate::handle::{DescriptorId, GreenId, StreamId};
use crate::ops::ops;

/// Groups that one split can make, at most: as many as a reply holds.
pub const MAX_GROUPS: u32 = 128;

crate::wire_struct! {
    /// A part of a device.
    pub struct Part {
        /// The server's number for it, from 1; 0: there is none.
        number: u32,
        /// `CUdevResourceType`.
        kind: u32,
        /// `CUdevSmResource`: multiprocessors, the fewest that a part of it can have, and of how many theirs is a multiple.
        sm: [u32; 3],
    }
}

ops! {
    /// Green contexts. Their streams are streams of the device's primary context, as their modules and memory are its.
    trait GreenOps;

    /// What there is of a kind: `cuDeviceGetDevResource`, `cuGreenCtxGetDevResource`.
    sync 0x0d01 part_get: PartGet
        [order Session, may_block Never, lane Main]
    {
        /// Ordinal of the device.
        device: u32,
        /// The green context that is asked about; without: the whole device.
        green: Option<GreenId>,
        /// `CUdevResourceType`.
        kind: u32,
    } -> PartGetReply {
        /// It.
        part: Part,
    }

    /// `cuDevSmResourceSplitByCount`.
    sync 0x0d02 part_split: PartSplit
        [order Session, may_block Never, lane Main]
    {
        /// What is split.
        part: u32,
        /// Groups that are wanted at most, up to [`MAX_GROUPS`]; without: it is only counted how many there can be.
        groups: Option<u32>,
        /// `CUdevSmResourceSplit_flags`.
        flags: u32,
        /// The fewest multiprocessors of a group.
        least: u32,
    } -> PartSplitReply {
        /// Groups that there are, or can be.
        count: u32,
        /// They, unless they were only counted.
        groups: Vec<Part>,
        /// What is left.
        rest: Part,
    }

    /// `cuDevResourceGenerateDesc`.
    sync 0x0d03 part_describe: PartDescribe
        [order Session, may_block Never, lane Main]
    {
        /// Its name, not in use.
        descriptor: DescriptorId,
        /// What it is of.
        parts: Vec<u32>,
    } -> PartDescribeReply {}

    /// `cuGreenCtxCreate`.
    sync 0x0d04 green_create: GreenCreate
        [order Session, may_block Never, lane Main]
    {
        /// Its name, not in use.
        green: GreenId,
        /// What it has.
        descriptor: DescriptorId,
        /// Ordinal of the device.
        device: u32,
        /// `CUgreenCtxCreate_flags`.
        flags: u32,
    } -> GreenCreateReply {}

    /// `cuGreenCtxDestroy`. Its streams have been destroyed.
    sync 0x0d05 green_destroy: GreenDestroy
        [order Session, may_block Never, lane Main]
    {
        /// The green context.
        green: GreenId,
    } -> GreenDestroyReply {}

    /// `cuGreenCtxStreamCreate`: a stream that does not wait for default streams.
    async 0x0d06 green_stream: GreenStream
        [order Session, may_block Never, lane Main]
    {
        /// The green context.
        green: GreenId,
        /// Its name, not in use.
        stream: StreamId,
        /// Priority.
        priority: i32,
    }
}
