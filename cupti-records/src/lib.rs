//! The layouts of CUPTI's activity records, as in `cupti_activity.h` of CUDA 13.0. `guest-cudart/cupti`
//! writes records for programs, and `gpu-server` reads those of NVIDIA's library.
//!
//! A later CUPTI only appends fields to a record, under a new name. So a reader of another version can use
//! those fields of [`Kernel`], [`Memcpy`] and [`Memset`] that both versions have. `tests/header.rs` compares
//! everything here with NVIDIA's header.

#![allow(missing_docs, non_snake_case, reason = "the fields, their names and their meanings are CUPTI's")]

use std::ffi::{c_char, c_void};

/// `CUpti_ActivityKind`.
pub mod kind {
    pub const MEMCPY: u32 = 1;
    pub const MEMSET: u32 = 2;
    pub const KERNEL: u32 = 3;
    pub const DRIVER: u32 = 4;
    pub const RUNTIME: u32 = 5;
    pub const CONCURRENT_KERNEL: u32 = 10;
    pub const OVERHEAD: u32 = 17;
    pub const MEMCPY2: u32 = 22;
    pub const CUDA_EVENT: u32 = 36;
    pub const SYNCHRONIZATION: u32 = 38;
    pub const EXTERNAL_CORRELATION: u32 = 39;
    /// One more than the last kind of CUDA 13.0.
    pub const COUNT: u32 = 56;
}

/// `CUpti_ActivityMemcpyKind`.
pub mod copy {
    pub const HTOD: u8 = 1;
    pub const DTOH: u8 = 2;
    pub const ATOA: u8 = 5;
    pub const ATOD: u8 = 6;
    pub const DTOA: u8 = 7;
    pub const DTOD: u8 = 8;
    pub const PTOP: u8 = 10;
}

/// `CUpti_ActivityMemoryKind`.
pub mod memory {
    pub const PAGEABLE: u8 = 1;
    pub const PINNED: u8 = 2;
    pub const DEVICE: u8 = 3;
    pub const ARRAY: u8 = 4;
}

/// `CUpti_ActivityFlag`.
pub mod flag {
    pub const FLUSH_FORCED: u32 = 1;
}

/// Those values of `CUpti_ActivityAttribute` that rgpu uses.
pub mod attribute {
    pub const PER_THREAD_ACTIVITY_BUFFER: u32 = 9;
    pub const LAST: u32 = 10;
}

/// `CUpti_ExternalCorrelationKind`.
pub mod external {
    pub const UNKNOWN: u32 = 1;
    pub const CUSTOM0: u32 = 3;
    /// One more than the last kind.
    pub const SIZE: u32 = 6;
}

/// `CUpti_ChannelType`.
pub mod channel {
    pub const COMPUTE: u32 = 1;
    pub const ASYNC_MEMCPY: u32 = 2;
}

/// Defines records, and [`layouts`], which lists their fields.
macro_rules! records {
    ($($(#[$meta:meta])* $name:ident = $c:literal { $($field:ident: $ty:ty),* $(,)? })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            pub struct $name { $(pub $field: $ty),* }

            impl $name {
                /// A record whose fields are zero.
                pub const fn zeroed() -> $name {
                    // SAFETY: numbers and pointers, for all of which zero is a value.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*

        /// Each record's name in C, its size, and the names, offsets and sizes of its fields.
        pub fn layouts() -> Vec<(&'static str, usize, Vec<(&'static str, usize, usize)>)> {
            vec![$((
                $c,
                size_of::<$name>(),
                vec![$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$ty>())),*],
            )),*]
        }
    };
}

records! {
    /// `CUpti_ActivityKernel10`.
    Kernel = "CUpti_ActivityKernel10" {
        kind: u32,
        cacheConfig: u8,
        sharedMemoryConfig: u8,
        registersPerThread: u16,
        partitionedGlobalCacheRequested: u32,
        partitionedGlobalCacheExecuted: u32,
        start: u64,
        end: u64,
        completed: u64,
        deviceId: u32,
        contextId: u32,
        streamId: u32,
        gridX: i32,
        gridY: i32,
        gridZ: i32,
        blockX: i32,
        blockY: i32,
        blockZ: i32,
        staticSharedMemory: i32,
        dynamicSharedMemory: i32,
        localMemoryPerThread: u32,
        localMemoryTotal: u32,
        correlationId: u32,
        gridId: i64,
        name: *const c_char,
        reserved0: *mut c_void,
        queued: u64,
        submitted: u64,
        launchType: u8,
        isSharedMemoryCarveoutRequested: u8,
        sharedMemoryCarveoutRequested: u8,
        padding: u8,
        sharedMemoryExecuted: u32,
        graphNodeId: u64,
        shmemLimitConfig: u32,
        graphId: u32,
        pAccessPolicyWindow: *mut c_void,
        channelID: u32,
        channelType: u32,
        clusterX: u32,
        clusterY: u32,
        clusterZ: u32,
        clusterSchedulingPolicy: u32,
        localMemoryTotal_v2: u64,
        maxPotentialClusterSize: u32,
        maxActiveClusters: u32,
        isDeviceLaunched: u8,
        padding3: [u8; 7],
    }

    /// `CUpti_ActivityMemcpy6`.
    Memcpy = "CUpti_ActivityMemcpy6" {
        kind: u32,
        copyKind: u8,
        srcKind: u8,
        dstKind: u8,
        flags: u8,
        bytes: u64,
        start: u64,
        end: u64,
        deviceId: u32,
        contextId: u32,
        streamId: u32,
        correlationId: u32,
        runtimeCorrelationId: u32,
        pad: u32,
        reserved0: *mut c_void,
        graphNodeId: u64,
        graphId: u32,
        channelID: u32,
        channelType: u32,
        isDeviceLaunched: u8,
        pad2: [u8; 3],
        copyCount: u64,
    }

    /// `CUpti_ActivityMemcpyPtoP4`.
    MemcpyPtoP = "CUpti_ActivityMemcpyPtoP4" {
        kind: u32,
        copyKind: u8,
        srcKind: u8,
        dstKind: u8,
        flags: u8,
        bytes: u64,
        start: u64,
        end: u64,
        deviceId: u32,
        contextId: u32,
        streamId: u32,
        srcDeviceId: u32,
        srcContextId: u32,
        dstDeviceId: u32,
        dstContextId: u32,
        correlationId: u32,
        reserved0: *mut c_void,
        graphNodeId: u64,
        graphId: u32,
        channelID: u32,
        channelType: u32,
    }

    /// `CUpti_ActivityMemset4`.
    Memset = "CUpti_ActivityMemset4" {
        kind: u32,
        value: u32,
        bytes: u64,
        start: u64,
        end: u64,
        deviceId: u32,
        contextId: u32,
        streamId: u32,
        correlationId: u32,
        flags: u16,
        memoryKind: u16,
        pad: u32,
        reserved0: *mut c_void,
        graphNodeId: u64,
        graphId: u32,
        channelID: u32,
        channelType: u32,
        isDeviceLaunched: u8,
        pad2: [u8; 3],
    }

    /// `CUpti_ActivityAPI`.
    Api = "CUpti_ActivityAPI" {
        kind: u32,
        cbid: u32,
        start: u64,
        end: u64,
        processId: u32,
        threadId: u32,
        correlationId: u32,
        returnValue: u32,
    }

    /// `CUpti_ActivityExternalCorrelation`.
    ExternalCorrelation = "CUpti_ActivityExternalCorrelation" {
        kind: u32,
        externalKind: u32,
        externalId: u64,
        correlationId: u32,
        reserved: u32,
    }
}
