//! Modules, functions and their variables.

use crate::data::{HostIn, HostOut};
use crate::handle::{ContextId, FunctionId, LinkId, ModuleId};
use crate::ops::launch::LaunchAttribute;
use crate::ops::ops;

crate::wire_struct! {
    /// One kernel parameter: its place in the parameter block.
    pub struct Param {
        /// Offset in bytes.
        offset: u32,
        /// Size in bytes.
        size: u32,
    }
}

crate::wire_struct! {
    /// A function, as a client knows it.
    pub struct FunctionInfo {
        /// Mangled name.
        name: String,
        /// Parameters in order: `cuFuncGetParamInfo`.
        params: Vec<Param>,
        /// `CUfunction_attribute` by number, from 0 (`MAX_THREADS_PER_BLOCK`); as many as the server's driver
        /// knows. If empty, [`FunctionAttributes`] returns them.
        attributes: Vec<i32>,
    }
}

crate::wire_struct! {
    /// A module's function table. A function's index in it is its [`FunctionId::index`].
    pub struct FunctionTable {
        /// The functions.
        functions: Vec<FunctionInfo>,
    }
}

crate::wire_struct! {
    /// One option of the JIT compiler.
    pub struct JitOption {
        /// `CUjit_option`; only options with an integer value are sent.
        option: u32,
        /// Value.
        value: u64,
    }
}

crate::wire_struct! {
    /// A further query of [`OccupancyMaxActiveClusters`], for the same number of threads in a block, and a
    /// grid of one cluster, which is a row of blocks.
    pub struct ClusterShape {
        /// Blocks of a cluster.
        blocks: u32,
        /// Dynamic shared memory of a block, in bytes.
        dynamic_shared: u32,
    }
}

impl ClusterShape {
    /// The query that it stands for: in all else it equals `first`, with which it is sent.
    pub fn question(&self, first: &OccupancyMaxActiveClusters) -> OccupancyMaxActiveClusters {
        let mut value = [0; 64];
        for (at, size) in [self.blocks, 1, 1].into_iter().enumerate() {
            value[4 * at..][..4].copy_from_slice(&size.to_le_bytes());
        }
        OccupancyMaxActiveClusters {
            function: first.function,
            grid: [self.blocks, 1, 1],
            block: first.block,
            dynamic_shared: self.dynamic_shared,
            attributes: vec![LaunchAttribute { id: CLUSTER_DIMENSION, value }],
            shapes: Vec::new(),
        }
    }
}

/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: blocks of a cluster in x, y and z, as 32-bit numbers.
pub const CLUSTER_DIMENSION: u32 = 4;

/// Maximum further queries of one [`OccupancyMaxActiveClusters`].
pub const MOST_CLUSTER_SHAPES: usize = 256;

/// Maximum functions that a client can bind in one module.
pub const MOST_FUNCTIONS: u32 = 1 << 16;

/// `CUjitInputType`.
pub mod jit_input {
    /// Machine code.
    pub const CUBIN: u32 = 0;
    /// PTX.
    pub const PTX: u32 = 1;
    /// A fat binary.
    pub const FATBINARY: u32 = 2;
    /// A host object file with embedded device code.
    pub const OBJECT: u32 = 3;
    /// An archive of host object files.
    pub const LIBRARY: u32 = 4;
    /// The last kind: intermediate code.
    pub const LAST: u32 = 5;
}

ops! {
    /// Modules.
    trait ModuleOps;

    /// Loads an image (fat binary, cubin, PTX): `cuModuleLoadDataEx`, `cuLibraryLoadData`. The server returns
    /// the function table as well: if its wire form ([`FunctionTable`]) fits `info`, it is written there and
    /// `info_size` is its length. If not, nothing is written and `info_size` is the size needed for
    /// [`ModuleInfo`].
    sync 0x0501 module_load: ModuleLoad<'a>
        [order None, may_block Context, lane Main]
    {
        /// Context to load it into.
        context: ContextId,
        /// Its id.
        module: ModuleId,
        /// JIT options.
        options: Vec<JitOption>,
        /// The whole image; PTX ends with a NUL byte.
        image: HostIn<'a>,
        /// Room for the function table.
        info: HostOut,
    } -> ModuleLoadReply {
        /// `CUresult`. After a failure nothing is loaded, and only the logs are valid.
        result: u32,
        /// Size of the function table's wire form in bytes.
        info_size: u64,
        /// Whether the code for this device has kernels that may call `printf`.
        prints: bool,
        /// JIT information log, cut to fit into a reply.
        info_log: String,
        /// The same for errors.
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
        /// Its size in bytes. Nothing is written if there is less room.
        info_size: u64,
    }

    /// Loads an image that the client has parsed itself, so that it need not wait for the answer. There is no
    /// function table: the module's functions are those that the client binds ([`FunctionBind`]). If loading
    /// fails, later commands for the module fail with that result.
    sync 0x0511 module_load_by_name: ModuleLoadByName<'a>
        [order None, may_block Context, lane Main]
    {
        /// Context to load it into.
        context: ContextId,
        /// Its id.
        module: ModuleId,
        /// The image.
        image: HostIn<'a>,
    } -> ModuleLoadByNameReply {
        /// `CUresult`. After a failure nothing is loaded, and only the log is valid.
        result: u32,
        /// JIT error log, cut to fit into a reply.
        error_log: String,
    }

    /// Gives a function an id, in a module that was loaded by [`ModuleLoadByName`]. The client sends the
    /// parameters as it found them in the image. If the server's driver reports other parameters, the server
    /// refuses the function and all its launches, so a kernel never gets parameters at places that it does
    /// not expect.
    async 0x0510 function_bind: FunctionBind<'a>
        [order Object, may_block Context, lane Main]
    {
        /// The id, not in use. Its index is below [`MOST_FUNCTIONS`].
        function: FunctionId,
        /// Mangled name.
        name: &'a str,
        /// Parameters in order.
        params: Vec<Param>,
    }

    /// `cuModuleUnload`, `cuLibraryUnload`.
    async 0x0503 module_unload: ModuleUnload
        [order Earlier, may_block Context, lane Main]
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
        /// Its address, which is outside every window.
        address: u64,
        /// Its size in bytes.
        size: u64,
        /// Whether it is managed memory, which the client has at the same address.
        managed: bool,
    }

    /// What a module of a context has at an address that no window contains. The client knows the variables
    /// that it has asked for by name; a program may have the address of another one, or of a string literal,
    /// from a kernel. `NOT_FOUND` if no module has anything there.
    sync 0x0512 module_memory: ModuleMemory
        [order None, may_block Never, lane Main, since 3]
    {
        /// The context.
        context: ContextId,
        /// The address.
        address: u64,
    } -> ModuleMemoryReply {
        /// First address of what contains it: the variable, or more of the module, as the driver says.
        base: u64,
        /// Size in bytes.
        size: u64,
    }

    /// `cuFuncSetAttribute`, `cuKernelSetAttribute`, with a value that the driver may refuse.
    sync 0x0505 function_set_attribute: FunctionSetAttribute
        [order Object, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// `CUfunction_attribute`.
        attribute: u32,
        /// Value.
        value: i32,
    } -> FunctionSetAttributeReply {}

    /// `cuFuncSetAttribute`, `cuKernelSetAttribute`, `cuFuncSetCacheConfig` (as attribute 0x1_0000), with a
    /// value that the driver certainly accepts.
    async 0x050f function_preset: FunctionPreset
        [order Object, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// `CUfunction_attribute`.
        attribute: u32,
        /// Value.
        value: i32,
    }

    /// All `cuFuncGetAttribute` values of a function whose row in the function table has none. Loads the
    /// function if the server's driver loads functions lazily.
    sync 0x0506 function_attributes: FunctionAttributes
        [order Streams, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
    } -> FunctionAttributesReply {
        /// As in [`FunctionInfo`].
        attributes: Vec<i32>,
    }

    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
    sync 0x0507 occupancy_max_active_blocks: OccupancyMaxActiveBlocks
        [order Streams, may_block Never, lane Main]
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
        [order Streams, may_block Never, lane Main]
    {
        /// The function.
        function: FunctionId,
        /// Blocks that should run on a multiprocessor at once.
        blocks: u32,
        /// Threads of a block.
        block_size: u32,
    } -> OccupancyAvailableSharedReply {
        /// Dynamic shared memory available to each block, in bytes.
        bytes: u64,
    }

    /// `cuOccupancyMaxActiveClusters`; nothing is launched.
    sync 0x0508 occupancy_max_active_clusters: OccupancyMaxActiveClusters
        [order Streams, may_block Never, lane Main]
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
        /// Further queries that the client expects the program to make; at most [`MOST_CLUSTER_SHAPES`].
        shapes: Vec<ClusterShape>,
    } -> OccupancyMaxActiveClustersReply {
        /// `CUresult` of the query itself.
        result: u32,
        /// Number of clusters that the device can run at once.
        clusters: i32,
        /// The same for each of `shapes`; -1 if the driver has no answer.
        shapes: Vec<i32>,
    }

    /// `cuOccupancyMaxPotentialClusterSize`; nothing is launched.
    sync 0x0509 occupancy_max_potential_cluster_size: OccupancyMaxPotentialClusterSize
        [order Streams, may_block Never, lane Main]
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
        [order None, may_block Never, lane Main]
    {
        /// Context.
        context: ContextId,
        /// Its id, not in use.
        link: LinkId,
        /// JIT options.
        options: Vec<JitOption>,
    } -> LinkCreateReply {}

    /// `cuLinkAddData`, `cuLinkAddFile`. The logs are returned whether or not the linker accepts the input.
    sync 0x050b link_add: LinkAdd<'a>
        [order None, may_block Never, lane Main]
    {
        /// The linker.
        link: LinkId,
        /// `CUjitInputType`: see [`jit_input`].
        kind: u32,
        /// Its name in messages.
        name: &'a str,
        /// JIT options for this input.
        options: Vec<JitOption>,
        /// The input.
        data: HostIn<'a>,
    } -> LinkAddReply {
        /// `CUresult`.
        result: u32,
        /// The linker's information log so far, cut to fit into a reply.
        info_log: String,
        /// The same for errors.
        error_log: String,
    }

    /// `cuLinkComplete`. An image that fits `image` is written there. If it does not fit, the client asks
    /// again with more room.
    sync 0x050c link_complete: LinkComplete
        [order None, may_block Never, lane Main]
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
        [order None, may_block Never, lane Main]
    {
        /// The linker.
        link: LinkId,
    }
}
