//! What a linked module tells about its kernels and variables.

use crate::error::Unsupported;

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamInfo {
    /// Offset in the parameter block in bytes.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
}

/// A kernel's properties.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its name, as in the PTX (mangled).
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<ParamInfo>,
    /// Size of the parameter block in bytes.
    pub param_bytes: u32,
    /// Static shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Alignment of dynamic shared memory in bytes.
    pub dynamic_shared_alignment: u32,
    /// Local memory per thread in bytes, excluding called functions.
    pub local_bytes: u32,
    /// Bytes of constants in the module.
    pub constant_bytes: u32,
    /// Estimated 32-bit registers per thread.
    pub registers: u32,
    /// Maximum threads per block (`__launch_bounds__`, or the GPU's limit).
    pub max_threads: u32,
    /// Block dimensions that the kernel requires (`.reqntid`), or zeros.
    pub required_block: [u32; 3],
    /// Cluster dimensions that the kernel requires (`.reqnctapercluster`, `__cluster_dims__`), or zeros.
    pub required_cluster: [u32; 3],
    /// Whether each launch must give a cluster size (`.explicitcluster` without a required size).
    pub cluster_must_be_given: bool,
    /// Maximum blocks per cluster.
    pub max_cluster_blocks: u32,
    /// Architecture of the PTX's `.target` times ten, as `CU_FUNC_ATTRIBUTE_PTX_VERSION` reports it.
    pub ptx_version: u32,
    /// Why the kernel cannot be launched: it, or a function that it calls, uses something that this GPU does
    /// not implement.
    pub unsupported: Option<Unsupported>,
}

/// A global or constant variable of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalInfo {
    /// Its name.
    pub name: String,
    /// Device address, valid in all copies and fills.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Whether it is `__constant__`.
    pub constant: bool,
    /// Whether it is `__managed__`.
    pub managed: bool,
}
