//! Modules, functions and their variables.

use crate::data::{HostIn, HostOut};
use crate::handle::{ContextId, FunctionId, LinkId, ModuleId};
use crate::ops::launch::LaunchAttribute;
use crate::ops::ops;

crate::wire_struct! {
    /// One kernel parameter: where it lies in the parameter block.
    pub struct Param {
        /// Offset in bytes.
        offset: u32,
        /// Size in bytes.
        size: u32,
    }
}

crate::wire_struct! {
    /// What a client knows of a function.
    pub struct FunctionInfo {
        /// Mangled name.
        name: String,
        /// Parameters in order: `cuFuncGetParamInfo`.
        params: Vec<Param>,
        /// `CUfunction_attribute` by number, from 0 (`MAX_THREADS_PER_BLOCK`); as many as the server's driver knows. Empty where they are to be
        /// asked for by [`FunctionAttributes`].
        attributes: Vec<i32>,
    }
}

crate::wire_struct! {
    /// A module's function table. A function's place in it is its [`FunctionId::index`].
    pub struct FunctionTable {
        /// The functions.
        functions: Vec<FunctionInfo>,
    }
}

crate::wire_struct! {
    /// One option of the JIT compiler.
    pub struct JitOption {
        /// `CUjit_option`; only those with an integer value travel.
        option: u32,
        /// Value.
        value: u64,
    }
}

/// `CUjitInputType`.
pub mod jit_input {
    /// Machine code.
    pub const CUBIN: u32 = 0;
    /// PTX.
    pub const PTX: u32 = 1;
    /// A fat binary.
    pub const FATBINARY: u32 = 2;
    /// A host's object file with code for devices in it.
    pub const OBJECT: u32 = 3;
    /// An archive of such.
    pub const LIBRARY: u32 = 4;
    /// The last kind: intermediate code.
    pub const LAST: u32 = 5;
}

ops! {
    /// Modules.
    trait ModuleOps;

    /// Loads an image (fat binary, cubin, PTX): `cuModuleLoadDataEx`, `cuLibraryLoadData`. The server fetches the function table at
    /// once: when its wire form ([`FunctionTable`]) fits `info`, it is written there and `info_size` says how long it is; when it does not fit,
    /// nothing is written and `info_size` says what is needed for [`ModuleInfo`].
    sync 0x0501 module_load: ModuleLoad<'a>
        [order None, may_block Context, lane Main]
    {
        /// Context that it is loaded into.
        context: ContextId,
        /// Its name.
        module: ModuleId,
        /// JIT options.
        options: Vec<JitOption>,
        /// The image, to its end; PTX ends with a NUL byte.
        image: HostIn<'a>,
        /// Room for the function table.
        info: HostOut,
    } -> ModuleLoadReply {
        /// `CUresult`; with a failure nothing is loaded, and all but the logs means nothing.
        result: u32,
        /// Size of the function table's wire form in bytes.
        info_size: u64,
        /// Its code for this device was looked through and has kernels that may call `printf`.
        prints: bool,
        /// JIT information log, cut to what a reply holds.
        info_log: String,
        /// The same of errors.
        error_log: String,
    }

    /// Fetches the function table of a loaded module.
    sync 0x0502 module_info: ModuleInfo
        [order None, may_block Never, lane Main]
    {
        /// The module.
        module: ModuleId,
        /// Room for the function table.
        info: HostOut,
    } -> ModuleInfoReply {
        /// Its size in bytes; nothing is written when there is less room.
        info_size: u64,
    }

    /// `cuModuleUnload`, `cuLibraryUnload`.
    async 0x0503 module_unload: ModuleUnload
        [order Session, may_block Context, lane Main]
    {
        /// The module.
        module: ModuleId,
    }

    /// Finds a variable: `cuModuleGetGlobal`, `cuLibraryGetGlobal`.
    sync 0x0504 module_get_global: ModuleGetGlobal<'a>
        [order None, may_block Never, lane Main]
    {
        /// The module.
        module: ModuleId,
        /// Mangled name.
        name: &'a str,
    } -> ModuleGetGlobalReply {
        /// Its address: outside every window, in this session's device all the same.
        address: u64,
        /// Its size in bytes.
        size: u64,
        /// Whether it is managed memory: the client's at the same address as well.
        managed: bool,
    }

    /// `cuFuncSetAttribute`, `cuKernelSetAttribute`: where only the driver can tell whether it takes the value.
    sync 0x0505 function_set_attribute: FunctionSetAttribute
        [order Session, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// `CUfunction_attribute`.
        attribute: u32,
        /// Value.
        value: i32,
    } -> FunctionSetAttributeReply {}

    /// `cuFuncSetAttribute`, `cuKernelSetAttribute`, `cuFuncSetCacheConfig` (as attribute 0x1_0000), with a value that the client knows the driver to take.
    async 0x050f function_preset: FunctionPreset
        [order Session, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// `CUfunction_attribute`.
        attribute: u32,
        /// Value.
        value: i32,
    }

    /// Every `cuFuncGetAttribute` of a function whose row of the function table has none. It loads the function, where the server's driver loads
    /// them when they are used.
    sync 0x0506 function_attributes: FunctionAttributes
        [order None, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
    } -> FunctionAttributesReply {
        /// As [`FunctionInfo`] has them.
        attributes: Vec<i32>,
    }

    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
    sync 0x0507 occupancy_max_active_blocks: OccupancyMaxActiveBlocks
        [order None, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// Threads of a block.
        block_size: u32,
        /// Dynamic shared memory of a block, in bytes.
        dynamic_shared: u64,
        /// `CUoccupancy_flags`.
        flags: u32,
    } -> OccupancyMaxActiveBlocksReply {
        /// Blocks on a multiprocessor.
        blocks: i32,
    }

    /// `cuOccupancyAvailableDynamicSMemPerBlock`.
    sync 0x050e occupancy_available_shared: OccupancyAvailableShared
        [order None, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// Blocks that a multiprocessor shall have at once.
        blocks: u32,
        /// Threads of a block.
        block_size: u32,
    } -> OccupancyAvailableSharedReply {
        /// Dynamic shared memory that a block may have then, in bytes.
        bytes: u64,
    }

    /// `cuOccupancyMaxActiveClusters`: the launch is described and not made.
    sync 0x0508 occupancy_max_active_clusters: OccupancyMaxActiveClusters
        [order None, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// Blocks in x, y, z.
        grid: [u32; 3],
        /// Threads of a block in x, y, z.
        block: [u32; 3],
        /// Dynamic shared memory of a block, in bytes.
        dynamic_shared: u32,
        /// Attributes.
        attributes: Vec<LaunchAttribute>,
    } -> OccupancyMaxActiveClustersReply {
        /// Clusters on the device.
        clusters: i32,
    }

    /// `cuOccupancyMaxPotentialClusterSize`: the launch is described and not made.
    sync 0x0509 occupancy_max_potential_cluster_size: OccupancyMaxPotentialClusterSize
        [order None, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// Blocks in x, y, z.
        grid: [u32; 3],
        /// Threads of a block in x, y, z.
        block: [u32; 3],
        /// Dynamic shared memory of a block, in bytes.
        dynamic_shared: u32,
        /// Attributes.
        attributes: Vec<LaunchAttribute>,
    } -> OccupancyMaxPotentialClusterSizeReply {
        /// Blocks of a cluster.
        size: i32,
    }

    /// `cuLinkCreate`.
    sync 0x050a link_create: LinkCreate
        [order Session, may_block Never, lane Main]
    {
        /// Context.
        context: ContextId,
        /// Its name, not in use.
        link: LinkId,
        /// JIT options.
        options: Vec<JitOption>,
    } -> LinkCreateReply {}

    /// `cuLinkAddData`, `cuLinkAddFile`. What the linker says of it is told whether it takes it or not.
    sync 0x050b link_add: LinkAdd<'a>
        [order Session, may_block Never, lane Main]
    {
        /// The linker.
        link: LinkId,
        /// `CUjitInputType`: see [`jit_input`].
        kind: u32,
        /// What messages call it.
        name: &'a str,
        /// JIT options for it alone.
        options: Vec<JitOption>,
        /// The input.
        data: HostIn<'a>,
    } -> LinkAddReply {
        /// `CUresult`.
        result: u32,
        /// What the linker has said so far, cut to what a reply holds.
        info_log: String,
        /// The same of errors.
        error_log: String,
    }

    /// `cuLinkComplete`. An image that fits `image` is written there; for one that does not, it is asked again.
    sync 0x050c link_complete: LinkComplete
        [order Session, may_block Never, lane Main]
    {
        /// The linker.
        link: LinkId,
        /// Room for the image.
        image: HostOut,
    } -> LinkCompleteReply {
        /// `CUresult`.
        result: u32,
        /// Size of the image in bytes.
        size: u64,
        /// As in [`LinkAddReply`].
        info_log: String,
        /// As in [`LinkAddReply`].
        error_log: String,
    }

    /// `cuLinkDestroy`.
    async 0x050d link_destroy: LinkDestroy
        [order Session, may_block Never, lane Main]
    {
        /// The linker.
        link: LinkId,
    }
}
