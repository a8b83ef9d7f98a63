//! Launches. They are checked here before they are appended, and errors get CUDA's status codes.

use std::ffi::c_void;

use crate::abi::arguments::non_null;
use crate::abi::result::{Result, code};
use crate::abi::types::{LaunchAttr, LaunchConfig, launch_attr};
use crate::code::function::{Function, func};
use crate::process::device_attributes::attr;
use crate::process::driver::{Device, Driver};
use crate::process::fences;
use client::Status;
use client::ops::launch::{LaunchAttribute, PASSED_ON};

/// Cluster size in blocks that every device of the architecture supports.
const PORTABLE_CLUSTER: u32 = 8;

/// The shape of a launch.
pub(crate) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

/// Checks a launch's shape against the device and the function.
fn check(device: &Device, function: &Function, shape: &Shape) -> Result {
    let within = |sizes: &[u32; 3], first: usize| {
        sizes
            .iter()
            .enumerate()
            .all(|(i, size)| *size != 0 && u64::from(*size) <= device.attribute(first + i).max(0) as u64)
    };
    if !within(&shape.grid, attr::MAX_GRID_DIM_X) || !within(&shape.block, attr::MAX_BLOCK_DIM_X) {
        return Err(Status::INVALID_VALUE);
    }
    let threads: u64 = shape.block.iter().map(|n| u64::from(*n)).product();
    if threads > device.attribute(attr::MAX_THREADS_PER_BLOCK).max(0) as u64 {
        return Err(Status::INVALID_VALUE);
    }
    function.has_code()?;
    function.ready()?;
    let most = function.attribute(func::MAX_THREADS_PER_BLOCK);
    if most > 0 && threads > most as u64 {
        // Either there are too few registers, or the kernel was compiled for fewer threads
        // (__launch_bounds__).
        let warps = threads.div_ceil(32).next_multiple_of(4);
        let registers = warps * (function.attribute(func::NUM_REGS).max(0) as u64 * 32).next_multiple_of(256);
        let available = device.attribute(attr::MAX_REGISTERS_PER_BLOCK).max(0) as u64;
        return Err(if registers > available {
            Status::LAUNCH_OUT_OF_RESOURCES
        } else {
            Status::INVALID_VALUE
        });
    }
    let dynamic = function.attribute(func::MAX_DYNAMIC_SHARED_SIZE_BYTES);
    if u64::from(shape.shared) > dynamic.max(0) as u64 {
        return Err(Status::INVALID_VALUE);
    }
    Ok(())
}

/// Gathers the parameter block from one pointer per parameter.
unsafe fn gather(function: &Function, params: *const *const c_void, block: &mut Vec<u8>) -> Result {
    block.clear();
    block.resize(function.params_size, 0);
    if function.params.is_empty() {
        return Ok(());
    }
    non_null(params)?;
    for (i, param) in function.params.iter().enumerate() {
        // SAFETY: the program passes one pointer per parameter, each to as many bytes as the parameter has.
        unsafe {
            let from = *params.add(i);
            non_null(from)?;
            let to = &mut block[param.offset as usize..param.offset as usize + param.size as usize];
            std::ptr::copy_nonoverlapping(from.cast(), to.as_mut_ptr(), to.len());
        }
    }
    Ok(())
}

/// Reads the parameter block from `extra`: pairs of a key and a value.
unsafe fn unpack(function: &Function, extra: *const *mut c_void, block: &mut Vec<u8>) -> Result {
    const END: usize = 0;
    const BUFFER: usize = 1;
    const SIZE: usize = 2;
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), std::ptr::null::<usize>());
    let mut at = 0;
    loop {
        // SAFETY: the program ends the array with END; every other key has a value.
        let key = unsafe { *extra.add(at) } as usize;
        if key == END {
            break;
        }
        // SAFETY: the entry after a key other than END is its value.
        let value = unsafe { *extra.add(at + 1) };
        match key {
            BUFFER => buffer = value.cast(),
            SIZE => size = value.cast(),
            _ => return Err(Status::INVALID_VALUE),
        }
        at += 2;
    }
    block.clear();
    if function.params_size == 0 {
        return Ok(());
    }
    non_null(buffer)?;
    non_null(size)?;
    // A buffer may be shorter than the parameters (NCCL passes only the used part of a large structure): the
    // rest is zero. NVIDIA's driver refuses a longer one with this status.
    // SAFETY: not NULL; the program passes a buffer and its size.
    unsafe {
        let given = *size;
        if given > function.params_size {
            return Err(Status::LAUNCH_OUT_OF_RESOURCES);
        }
        block.extend_from_slice(std::slice::from_raw_parts(buffer, given));
    }
    block.resize(function.params_size, 0);
    Ok(())
}

/// The attributes of a launch, or of an occupancy query.
///
/// # Safety
/// The array has as many entries as the configuration says.
pub(crate) unsafe fn attributes(config: &LaunchConfig) -> Result<Vec<LaunchAttribute>> {
    let mut out = Vec::new();
    if config.numAttrs == 0 {
        return Ok(out);
    }
    non_null(config.attrs)?;
    for i in 0..config.numAttrs as usize {
        // SAFETY: guaranteed by the caller.
        let LaunchAttr { id, value, .. } = unsafe { *config.attrs.add(i) };
        match id {
            launch_attr::IGNORE => {}
            // Events are recorded after the launch, see `events`.
            launch_attr::PROGRAMMATIC_EVENT | launch_attr::LAUNCH_COMPLETION_EVENT => {}
            launch_attr::DEVICE_UPDATABLE_KERNEL_NODE => {
                return refuse_form!("a launch attribute that names a graph node");
            }
            launch_attr::NVLINK_UTIL_CENTRIC_SCHEDULING => check_nvlink_hint(&value.0)?,
            _ if PASSED_ON.contains(&id) => out.push(LaunchAttribute { id, value: value.0 }),
            // A launch that the server refuses would only be told by a later call.
            _ => return Err(Status::INVALID_VALUE),
        }
    }
    Ok(out)
}

/// Checks the hint about NVLink, which is only that, and is not sent.
pub(crate) fn check_nvlink_hint(value: &[u8; 64]) -> Result {
    let hint = value.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if hint > 1 { Err(Status::INVALID_VALUE) } else { Ok(()) }
}

/// A grid must consist of whole clusters, of the size that the function was compiled for, if any. More than
/// eight blocks per cluster need the function's permission.
fn check_clusters(function: &Function, attributes: &[LaunchAttribute], grid: &[u32; 3]) -> Result {
    let own = [func::REQUIRED_CLUSTER_WIDTH, func::REQUIRED_CLUSTER_HEIGHT, func::REQUIRED_CLUSTER_DEPTH]
        .map(|number| function.attribute(number).max(0) as u32);
    let given = attributes.iter().find(|attribute| attribute.id == launch_attr::CLUSTER_DIMENSION);
    let size = match given {
        Some(given) => {
            [0, 4, 8].map(|at| given.value[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)))
        }
        None if own[0] != 0 => own,
        None => return Ok(()),
    };
    let blocks = size.iter().fold(1, |all: u32, n| all.saturating_mul(*n));
    let portable = function.attribute(func::NON_PORTABLE_CLUSTER_SIZE_ALLOWED) == 0;
    if (0..3).any(|i| size[i] == 0 || !grid[i].is_multiple_of(size[i]))
        || own[0] != 0 && size != own
        || portable && blocks > PORTABLE_CLUSTER
    {
        return Err(code::INVALID_CLUSTER_SIZE);
    }
    Ok(())
}

/// Checks everything about a launch except its parameters, and notes which of its effects the host can see.
pub(crate) fn check_all(
    driver: &Driver,
    function: &Function,
    shape: &Shape,
    attributes: &[LaunchAttribute],
) -> Result {
    let device = driver.devices.get(function.context.device as usize).ok_or(Status::INVALID_DEVICE)?;
    check(device, function, shape)?;
    check_clusters(function, attributes, &shape.grid)?;
    function.id()?;
    function.context.limits.will_need(function.stack());
    if function.prints {
        fences::host_sees();
    }
    Ok(())
}

/// The parameter block of a launch, in either form.
///
/// # Safety
/// What the pointers point to is readable, for as many bytes as the function takes.
pub(crate) unsafe fn parameters(
    function: &Function,
    params: *const *const c_void,
    extra: *const *mut c_void,
    block: &mut Vec<u8>,
) -> Result {
    if !params.is_null() && !extra.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { if extra.is_null() { gather(function, params, block) } else { unpack(function, extra, block) } }
}
