//! `cudaDeviceProp`, gathered from a device's attributes.
//!
//! The structures of 12.8 and 13.0 differ by the fields that 13 removed and added. CUDA 11's, which
//! `cudaGetDeviceProperties` still fills in CUDA 12, is the first part of 12's.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use crate::arguments::{In, Out};
use crate::context;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::types::{CUdevice, CUuuid};

/// Declares the structure, with the driver attributes that fill each field; `[]` for fields that are filled
/// otherwise.
macro_rules! properties {
    ($($(#[$meta:meta])* $field:ident: $ty:ty = [$($attribute:literal),*],)*) => {
        /// `struct cudaDeviceProp`.
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct DeviceProp {
            $($(#[$meta])* pub $field: $ty,)*
        }

        /// The fields and their offsets, for comparison with the header.
        #[cfg(test)]
        pub(crate) const FIELDS: &[(&str, usize)] =
            &[$($(#[$meta])* (stringify!($field), std::mem::offset_of!(DeviceProp, $field)),)*];

        /// Fills the fields that come from attributes with the values that `get` returns.
        fn fill(prop: &mut DeviceProp, get: &mut dyn FnMut(c_uint) -> Result<c_int>) -> Result {
            $($(#[$meta])* {
                let values: &[c_int] = &[$(get($attribute)?),*];
                prop.$field.take(values);
            })*
            Ok(())
        }
    };
}

/// A field that comes from attributes. A negative attribute in an unsigned field is invalid and becomes 0.
trait Field {
    fn take(&mut self, values: &[c_int]);
}

impl Field for c_int {
    fn take(&mut self, values: &[c_int]) {
        if let [value] = values {
            *self = *value;
        }
    }
}

impl Field for c_uint {
    fn take(&mut self, values: &[c_int]) {
        if let [value] = values {
            *self = c_uint::try_from(*value).unwrap_or(0);
        }
    }
}

impl Field for usize {
    fn take(&mut self, values: &[c_int]) {
        if let [value] = values {
            *self = usize::try_from(*value).unwrap_or(0);
        }
    }
}

impl<const N: usize> Field for [c_int; N] {
    fn take(&mut self, values: &[c_int]) {
        if values.len() == N {
            self.copy_from_slice(values);
        }
    }
}

impl<const N: usize> Field for [c_char; N] {
    fn take(&mut self, _values: &[c_int]) {}
}

impl Field for CUuuid {
    fn take(&mut self, _values: &[c_int]) {}
}

properties! {
    name: [c_char; 256] = [],
    uuid: CUuuid = [],
    luid: [c_char; 8] = [],
    luid_device_node_mask: c_uint = [],
    total_global_mem: usize = [],
    shared_mem_per_block: usize = [8],
    regs_per_block: c_int = [12],
    warp_size: c_int = [10],
    mem_pitch: usize = [11],
    max_threads_per_block: c_int = [1],
    max_threads_dim: [c_int; 3] = [2, 3, 4],
    max_grid_size: [c_int; 3] = [5, 6, 7],
    #[cfg(feature = "v12")] clock_rate: c_int = [13],
    total_const_mem: usize = [9],
    major: c_int = [75],
    minor: c_int = [76],
    texture_alignment: usize = [14],
    texture_pitch_alignment: usize = [51],
    #[cfg(feature = "v12")] device_overlap: c_int = [15],
    multi_processor_count: c_int = [16],
    #[cfg(feature = "v12")] kernel_exec_timeout_enabled: c_int = [17],
    integrated: c_int = [18],
    can_map_host_memory: c_int = [19],
    #[cfg(feature = "v12")] compute_mode: c_int = [20],
    max_texture1d: c_int = [21],
    max_texture1d_mipmap: c_int = [77],
    #[cfg(feature = "v12")] max_texture1d_linear: c_int = [69],
    max_texture2d: [c_int; 2] = [22, 23],
    max_texture2d_mipmap: [c_int; 2] = [73, 74],
    max_texture2d_linear: [c_int; 3] = [70, 71, 72],
    max_texture2d_gather: [c_int; 2] = [45, 46],
    max_texture3d: [c_int; 3] = [24, 25, 26],
    max_texture3d_alt: [c_int; 3] = [47, 48, 49],
    max_texture_cubemap: c_int = [52],
    max_texture1d_layered: [c_int; 2] = [42, 43],
    max_texture2d_layered: [c_int; 3] = [27, 28, 29],
    max_texture_cubemap_layered: [c_int; 2] = [53, 54],
    max_surface1d: c_int = [55],
    max_surface2d: [c_int; 2] = [56, 57],
    max_surface3d: [c_int; 3] = [58, 59, 60],
    max_surface1d_layered: [c_int; 2] = [61, 62],
    max_surface2d_layered: [c_int; 3] = [63, 64, 65],
    max_surface_cubemap: c_int = [66],
    max_surface_cubemap_layered: [c_int; 2] = [67, 68],
    surface_alignment: usize = [30],
    concurrent_kernels: c_int = [31],
    eccenabled: c_int = [32],
    pci_bus_id: c_int = [33],
    pci_device_id: c_int = [34],
    pci_domain_id: c_int = [50],
    tcc_driver: c_int = [35],
    async_engine_count: c_int = [40],
    unified_addressing: c_int = [41],
    #[cfg(feature = "v12")] memory_clock_rate: c_int = [36],
    memory_bus_width: c_int = [37],
    l2cache_size: c_int = [38],
    persisting_l2cache_max_size: c_int = [108],
    max_threads_per_multi_processor: c_int = [39],
    stream_priorities_supported: c_int = [78],
    global_l1cache_supported: c_int = [79],
    local_l1cache_supported: c_int = [80],
    shared_mem_per_multiprocessor: usize = [81],
    regs_per_multiprocessor: c_int = [82],
    managed_memory: c_int = [83],
    is_multi_gpu_board: c_int = [84],
    multi_gpu_board_group_id: c_int = [85],
    host_native_atomic_supported: c_int = [86],
    #[cfg(feature = "v12")] single_to_double_precision_perf_ratio: c_int = [87],
    pageable_memory_access: c_int = [88],
    concurrent_managed_access: c_int = [89],
    compute_preemption_supported: c_int = [90],
    can_use_host_pointer_for_registered_mem: c_int = [91],
    cooperative_launch: c_int = [95],
    #[cfg(feature = "v12")] cooperative_multi_device_launch: c_int = [96],
    shared_mem_per_block_optin: usize = [97],
    pageable_memory_access_uses_host_page_tables: c_int = [100],
    direct_managed_mem_access_from_host: c_int = [101],
    max_blocks_per_multi_processor: c_int = [106],
    access_policy_max_window_size: c_int = [109],
    reserved_shared_mem_per_block: usize = [111],
    host_register_supported: c_int = [99],
    sparse_cuda_array_supported: c_int = [112],
    host_register_read_only_supported: c_int = [113],
    timeline_semaphore_interop_supported: c_int = [114],
    memory_pools_supported: c_int = [115],
    gpu_direct_rdmasupported: c_int = [116],
    gpu_direct_rdmaflush_writes_options: c_uint = [117],
    gpu_direct_rdmawrites_ordering: c_int = [118],
    memory_pool_supported_handle_types: c_uint = [119],
    deferred_mapping_cuda_array_supported: c_int = [121],
    ipc_event_supported: c_int = [125],
    cluster_launch: c_int = [120],
    unified_function_pointers: c_int = [129],
    #[cfg(feature = "v12")] reserved: [c_int; 63] = [],
    #[cfg(not(feature = "v12"))] device_numa_config: c_int = [130],
    #[cfg(not(feature = "v12"))] device_numa_id: c_int = [131],
    #[cfg(not(feature = "v12"))] mps_enabled: c_int = [133],
    #[cfg(not(feature = "v12"))] host_numa_id: c_int = [134],
    #[cfg(not(feature = "v12"))] gpu_pci_device_id: c_uint = [139],
    #[cfg(not(feature = "v12"))] gpu_pci_subsystem_id: c_uint = [140],
    #[cfg(not(feature = "v12"))] host_numa_multinode_ipc_supported: c_int = [143],
    #[cfg(not(feature = "v12"))] reserved: [c_int; 56] = [],
}

const _: () = assert!(size_of::<DeviceProp>() == if cfg!(feature = "v12") { 1032 } else { 1008 });

/// The size in bytes of CUDA 11's structure, which `cudaGetDeviceProperties` fills in CUDA 12.
#[cfg(feature = "v12")]
pub(crate) const SIZE_IN_11: usize = 728;
#[cfg(feature = "v12")]
const _: () = assert!(std::mem::offset_of!(DeviceProp, host_register_supported) == SIZE_IN_11);

/// The properties of every device when the driver was initialized.
static KNOWN: OnceLock<Vec<DeviceProp>> = OnceLock::new();

/// Reads the properties of all devices, so that a forked child still gets them although its driver no longer
/// works, as with NVIDIA's runtime.
pub(crate) fn read_all(d: &Driver) {
    let count = context::device_count(d).unwrap_or(0);
    if let Ok(all) = (0..count).map(|ordinal| query(d, ordinal)).collect() {
        KNOWN.get_or_init(|| all);
    }
}

/// The properties of a device.
pub(crate) fn of(d: &Driver, ordinal: c_int) -> Result<DeviceProp> {
    match KNOWN.get() {
        Some(all) => {
            let found = usize::try_from(ordinal).ok().and_then(|place| all.get(place));
            found.copied().ok_or(Error::INVALID_DEVICE)
        }
        None => query(d, ordinal),
    }
}

fn query(d: &Driver, ordinal: c_int) -> Result<DeviceProp> {
    let device: CUdevice = context::handle(d, ordinal)?;
    // SAFETY: the structure consists of integers, for which zero is a value.
    let mut prop: DeviceProp = unsafe { std::mem::zeroed() };
    fill(&mut prop, &mut |attribute| {
        let mut value = 0;
        // SAFETY: the output is a live local variable.
        match unsafe { d.cuDeviceGetAttribute(&mut value, attribute, device) } {
            // The driver is older than this attribute.
            Err(Error::INVALID_VALUE) => Ok(0),
            answer => answer.map(|()| value),
        }
    })?;
    // SAFETY: the outputs are fields of a live local structure; the name's length is passed along.
    unsafe {
        d.cuDeviceGetName(prop.name.as_mut_ptr(), prop.name.len() as c_int, device)?;
        d.cuDeviceGetUuid_v2(&mut prop.uuid, device)?;
        d.cuDeviceTotalMem_v2(&mut prop.total_global_mem, device)?;
    }
    Ok(prop)
}

#[cfg(not(feature = "v12"))]
api! {
    init fn cudaGetDeviceProperties(out: Out<DeviceProp>, device: c_int) |d| {
        out.required()?;
        out.put(of(d, device)?)
    };
}

#[cfg(feature = "v12")]
api! {
    init fn cudaGetDeviceProperties_v2(out: Out<DeviceProp>, device: c_int) |d| {
        out.required()?;
        out.put(of(d, device)?)
    };
    init unsafe fn cudaGetDeviceProperties(out: *mut u8, device: c_int) |d| {
        if out.is_null() { return Err(Error::INVALID_VALUE) }
        let prop = of(d, device)?;
        out.copy_from_nonoverlapping(std::ptr::from_ref(&prop).cast(), SIZE_IN_11);
        Ok(())
    };
}

api! {
    init fn cudaChooseDevice(out: Out<c_int>, wanted: In<DeviceProp>) |d| {
        out.required()?;
        let wanted = wanted.get()?;
        let mut best: Option<(usize, c_int)> = None;
        for device in 0..context::device_count(d)? {
            let score = matches(&of(d, device)?, &wanted);
            if best.is_none_or(|(most, _)| score > most) { best = Some((score, device)) }
        }
        out.put(best.ok_or(Error::NO_DEVICE)?.1)
    };
}

/// How many of the non-zero fields in `wanted` the device satisfies.
fn matches(has: &DeviceProp, wanted: &DeviceProp) -> usize {
    let capability = |prop: &DeviceProp| prop.major * 100 + prop.minor;
    [
        wanted.major != 0 && capability(has) >= capability(wanted),
        wanted.total_global_mem != 0 && has.total_global_mem >= wanted.total_global_mem,
        wanted.shared_mem_per_block != 0 && has.shared_mem_per_block >= wanted.shared_mem_per_block,
        wanted.regs_per_block != 0 && has.regs_per_block >= wanted.regs_per_block,
        wanted.multi_processor_count != 0 && has.multi_processor_count >= wanted.multi_processor_count,
        wanted.max_threads_per_block != 0 && has.max_threads_per_block >= wanted.max_threads_per_block,
        wanted.integrated != 0 && has.integrated == wanted.integrated,
        wanted.managed_memory != 0 && has.managed_memory != 0,
    ]
    .into_iter()
    .filter(|&met| met)
    .count()
}
