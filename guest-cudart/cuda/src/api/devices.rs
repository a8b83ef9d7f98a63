//! Devices: everything was asked for once, in `cuInit`.

use std::ffi::{CStr, c_char};
use std::sync::atomic::Ordering;

use crate::abi::arguments::put;
use crate::abi::result::Result;
use crate::abi::types::DevProp;
use crate::process::driver;
use crate::process::driver::{device, driver};
use client::Status;

/// `CUdevice_attribute` numbers that are used here.
pub(crate) mod attr {
    pub const MAX_THREADS_PER_BLOCK: usize = 1;
    pub const MAX_BLOCK_DIM_X: usize = 2;
    pub const MAX_GRID_DIM_X: usize = 5;
    pub const MAX_SHARED_MEMORY_PER_BLOCK: usize = 8;
    pub const TOTAL_CONSTANT_MEMORY: usize = 9;
    pub const WARP_SIZE: usize = 10;
    pub const MAX_PITCH: usize = 11;
    pub const MAX_REGISTERS_PER_BLOCK: usize = 12;
    pub const CLOCK_RATE: usize = 13;
    pub const TEXTURE_ALIGNMENT: usize = 14;
    pub const MULTIPROCESSOR_COUNT: usize = 16;
    pub const INTEGRATED: usize = 18;
    pub const CAN_MAP_HOST_MEMORY: usize = 19;
    pub const PCI_BUS_ID: usize = 33;
    pub const PCI_DEVICE_ID: usize = 34;
    pub const MAX_THREADS_PER_MULTIPROCESSOR: usize = 39;
    pub const UNIFIED_ADDRESSING: usize = 41;
    pub const PCI_DOMAIN_ID: usize = 50;
    pub const COMPUTE_CAPABILITY_MAJOR: usize = 75;
    pub const COMPUTE_CAPABILITY_MINOR: usize = 76;
    pub const CAN_USE_STREAM_MEM_OPS_V1: usize = 92;
    pub const CAN_USE_64_BIT_STREAM_MEM_OPS_V1: usize = 93;
    pub const CAN_USE_STREAM_WAIT_VALUE_NOR_V1: usize = 94;
    pub const COOPERATIVE_LAUNCH: usize = 95;
    pub const COOPERATIVE_MULTI_DEVICE_LAUNCH: usize = 96;
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: usize = 97;
    pub const CAN_FLUSH_REMOTE_WRITES: usize = 98;
    pub const HOST_REGISTER_SUPPORTED: usize = 99;
    pub const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: usize = 103;
    pub const MEMORY_POOLS_SUPPORTED: usize = 115;
    pub const MEMPOOL_SUPPORTED_HANDLE_TYPES: usize = 119;
    pub const CAN_USE_64_BIT_STREAM_MEM_OPS: usize = 122;
    pub const CAN_USE_STREAM_WAIT_VALUE_NOR: usize = 123;
    pub const IPC_EVENT_SUPPORTED: usize = 125;
    pub const HOST_MEMORY_POOLS_SUPPORTED: usize = 144;
}

/// The device may have these and a program behind rgpu has not: what a driver says of its own machine does not hold for the program's, and chapters of the API that are refused are not to be
/// announced. A program that asks before it uses them is told so.
const NOT_HERE: &[usize] = &[
    86,  // HOST_NATIVE_ATOMIC_SUPPORTED
    88,  // PAGEABLE_MEMORY_ACCESS
    89,  // CONCURRENT_MANAGED_ACCESS
    91, // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: kernels find host pointers among their parameters; whoever is told 0 asks for the address, and so reaches what structures hold
    98, // CAN_FLUSH_REMOTE_WRITES
    100, // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    101, // DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
    104, // HANDLE_TYPE_WIN32_HANDLE_SUPPORTED
    105, // HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED
    110, // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    112, // SPARSE_CUDA_ARRAY_SUPPORTED
    114, // TIMELINE_SEMAPHORE_INTEROP_SUPPORTED
    116, // GPU_DIRECT_RDMA_SUPPORTED
    117, // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    118, // GPU_DIRECT_RDMA_WRITES_ORDERING
    121, // DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED
    124, // DMA_BUF_SUPPORTED
    128, // HANDLE_TYPE_FABRIC_SUPPORTED
    129, // UNIFIED_FUNCTION_POINTERS
    132, // MULTICAST_SUPPORTED
    136, // MEM_DECOMPRESS_ALGORITHM_MASK
    137, // MEM_DECOMPRESS_MAXIMUM_LENGTH
    141, // HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    142, // HOST_NUMA_MEMORY_POOLS_SUPPORTED
    143, // HOST_NUMA_MULTINODE_IPC_SUPPORTED
    145, // HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    146, // HOST_ALLOC_DMA_BUF_SUPPORTED
    147, // ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED
];

/// The highest attribute of `cuda.h` 13.0.
const LAST: usize = 147;

/// Corrects what the server's driver says for what is so on this side. Every attribute of this API has a value, as with any driver (NVIDIA's runtime library does not start
/// otherwise): of what the server says nothing, the device has 0.
pub(crate) fn complete_attributes(attributes: &mut Vec<Option<i32>>) {
    if attributes.len() <= LAST {
        attributes.resize(LAST + 1, None);
    }
    for value in &mut attributes[1..=LAST] {
        value.get_or_insert(0);
    }
    // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, where memory can be exported so.
    let pool_handles = attributes[attr::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR].unwrap_or(0).clamp(0, 1);
    let mut set = |number: usize, value| {
        if let Some(place) = attributes.get_mut(number).filter(|place| place.is_some()) {
            *place = Some(value);
        }
    };
    for number in NOT_HERE {
        set(*number, 0);
    }
    set(attr::INTEGRATED, 0);
    set(attr::COOPERATIVE_MULTI_DEVICE_LAUNCH, 0);
    // In place, or by turns: see `host`.
    set(attr::CAN_MAP_HOST_MEMORY, 1);
    set(attr::UNIFIED_ADDRESSING, 1);
    set(attr::HOST_REGISTER_SUPPORTED, 1);
    set(attr::MEMORY_POOLS_SUPPORTED, 1);
    set(attr::HOST_MEMORY_POOLS_SUPPORTED, 1);
    set(attr::MEMPOOL_SUPPORTED_HANDLE_TYPES, pool_handles);
    // No NUMA node of this machine is near the GPU: −1 says so.
    set(131, -1);
    set(134, -1);
}

/// Writes text with its NUL, cut to `len` bytes.
unsafe fn put_text(to: *mut c_char, len: i32, text: &str) -> Result {
    let len = usize::try_from(len).ok().filter(|len| *len > 0).ok_or(Status::INVALID_VALUE)?;
    crate::abi::arguments::non_null(to)?;
    let n = text.len().min(len - 1);
    // SAFETY: the program says that `len` bytes may be written at `to`; n + 1 ≤ len.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, n);
        to.add(n).write(0);
    }
    Ok(())
}

fn pci_bus_id(pci: &[u32; 3]) -> String {
    // Four digits of the domain, as NVIDIA's driver writes it; more only where there are more.
    format!("{:04X}:{:02X}:{:02X}.0", pci[0], pci[1], pci[2])
}

/// `[domain]:[bus]:[device].[function]`, `[domain]:[bus]:[device]` or `[bus]:[device].[function]`, all hexadecimal.
fn parse_pci_bus_id(text: &str) -> Option<[u32; 3]> {
    let (address, function) =
        text.split_once('.').map_or((text, "0"), |(address, function)| (address, function));
    if u32::from_str_radix(function, 16).ok()? != 0 {
        return None;
    }
    let parts: Vec<u32> = address
        .split(':')
        .map(|part| u32::from_str_radix(part, 16))
        .collect::<std::result::Result<_, _>>()
        .ok()?;
    match parts[..] {
        [domain, bus, device] => Some([domain, bus, device]),
        [bus, device] => Some([0, bus, device]),
        _ => None,
    }
}

api! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        driver::init().map(|_| ())
    }

    fn cuDriverGetVersion(version: *mut i32) {
        // Answered before `cuInit` and without a server: the version of the API that this library has.
        put(version, driver().map_or(crate::api::get_proc_address::API_VERSION, |driver| driver.version))
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        crate::abi::arguments::non_null(device)?;
        driver::device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetCount(count: *mut i32) {
        let driver = driver()?;
        put(count, driver.devices.len() as i32)
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, dev: i32) {
        put_text(name, len, &device(dev)?.info.name)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], dev: i32) {
        put(uuid, device(dev)?.info.uuid)
    }
    alias cuDeviceGetUuid = cuDeviceGetUuid_v2(uuid: *mut [u8; 16], dev: i32);

    fn cuDeviceGetLuid(luid: *mut c_char, mask: *mut u32, dev: i32) {
        // A name that only Windows gives to devices.
        let _ = (luid, mask);
        device(dev)?;
        Err(Status::NOT_SUPPORTED)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: i32) {
        let total = device(dev)?.info.total_memory;
        put(bytes, total as usize)
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, dev: i32) {
        crate::abi::arguments::non_null(value)?;
        let device = device(dev)?;
        let found = device.attributes.get(attribute as usize).copied().flatten();
        if found.is_none() {
            client::log::debug(format_args!("device attribute {attribute} is not known to the server"));
        }
        put(value, found.ok_or(Status::INVALID_VALUE)?)
    }

    fn cuDeviceGetProperties(prop: *mut DevProp, dev: i32) {
        let d = device(dev)?;
        let three = |first: usize| [d.attribute(first), d.attribute(first + 1), d.attribute(first + 2)];
        put(prop, DevProp {
            maxThreadsPerBlock: d.attribute(attr::MAX_THREADS_PER_BLOCK),
            maxThreadsDim: three(attr::MAX_BLOCK_DIM_X),
            maxGridSize: three(attr::MAX_GRID_DIM_X),
            sharedMemPerBlock: d.attribute(attr::MAX_SHARED_MEMORY_PER_BLOCK),
            totalConstantMemory: d.attribute(attr::TOTAL_CONSTANT_MEMORY),
            SIMDWidth: d.attribute(attr::WARP_SIZE),
            memPitch: d.attribute(attr::MAX_PITCH),
            regsPerBlock: d.attribute(attr::MAX_REGISTERS_PER_BLOCK),
            clockRate: d.attribute(attr::CLOCK_RATE),
            textureAlign: d.attribute(attr::TEXTURE_ALIGNMENT),
        })
    }

    fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, dev: i32) {
        let device = device(dev)?;
        crate::abi::arguments::non_null(minor)?;
        put(major, device.attribute(attr::COMPUTE_CAPABILITY_MAJOR))?;
        put(minor, device.attribute(attr::COMPUTE_CAPABILITY_MINOR))
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, len: i32, dev: i32) {
        put_text(text, len, &pci_bus_id(&device(dev)?.info.pci))
    }

    fn cuDeviceGetByPCIBusId(dev: *mut i32, text: *const c_char) {
        crate::abi::arguments::non_null(dev)?;
        crate::abi::arguments::non_null(text)?;
        let driver = driver()?;
        let wanted = CStr::from_ptr(text).to_str().ok().and_then(parse_pci_bus_id).ok_or(Status::INVALID_VALUE)?;
        let found = driver.devices.iter().find(|device| device.info.pci == wanted).ok_or(Status::INVALID_DEVICE)?;
        put(dev, found.ordinal as i32)
    }

    fn cuDeviceGetExecAffinitySupport(value: *mut i32, kind: u32, dev: i32) {
        device(dev)?;
        if kind != 0 {
            return Err(Status::INVALID_VALUE);
        }
        put(value, 0)
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, dev: i32) {
        crate::abi::arguments::non_null(context)?;
        let device = device(dev)?;
        driver()?.session.check()?;
        device.primary.retain();
        put(context, device.primary.handle)
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: i32) {
        let device = device(dev)?;
        device.primary.release()
    }
    alias cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease_v2(dev: i32);

    fn cuDevicePrimaryCtxReset_v2(dev: i32) {
        device(dev)?.primary.reset()
    }
    alias cuDevicePrimaryCtxReset = cuDevicePrimaryCtxReset_v2(dev: i32);

    fn cuDevicePrimaryCtxSetFlags_v2(dev: i32, flags: u32) {
        device(dev)?.primary.set_flags(flags)
    }
    alias cuDevicePrimaryCtxSetFlags = cuDevicePrimaryCtxSetFlags_v2(dev: i32, flags: u32);

    fn cuDevicePrimaryCtxGetState(dev: i32, flags: *mut u32, active: *mut i32) {
        let primary = device(dev)?.primary;
        crate::abi::arguments::non_null(active)?;
        put(flags, primary.flags.load(Ordering::Relaxed))?;
        put(active, primary.is_alive().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bus_id_is_read_as_it_is_written() {
        assert_eq!(parse_pci_bus_id(&pci_bus_id(&[0, 0x9a, 1])), Some([0, 0x9a, 1]));
        assert_eq!(parse_pci_bus_id("9a:00.0"), Some([0, 0x9a, 0]));
        for wrong in ["", "x", "1:2:3:4", "0:0:0.1", "99999999999:0:0"] {
            assert_eq!(parse_pci_bus_id(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn every_attribute_of_the_api_has_a_value_and_what_is_not_here_has_none() {
        let mut attributes = vec![None; 120];
        attributes[10] = Some(32);
        attributes[89] = Some(1);
        complete_attributes(&mut attributes);
        assert_eq!((attributes[10], attributes[89], attributes[147]), (Some(32), Some(0), Some(0)));
        assert_eq!(attributes[0], None);
    }
}
