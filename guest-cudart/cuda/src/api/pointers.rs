//! Unified addressing: the attributes of pointers.

use std::ffi::c_void;

use crate::abi::arguments::{Array, Count, non_null, put};
use crate::abi::result::Result;
use crate::memory::virtual_memory::POSIX_FD;
use crate::memory::{
    address, device_memory, host_pool, managed, pinned, pinned_regions, pool, virtual_memory,
};
use crate::process::driver::{Driver, driver};
use client::{Status, lock};

/// What a pointer refers to.
enum Behind {
    Device(device_memory::Found),
    Host {
        base: usize,
        size: usize,
        tag: pinned_regions::HostTag,
        /// Handle of its pool, or 0.
        pool: usize,
    },
    /// Pageable, or nothing.
    Nothing,
}

fn behind(driver: &Driver, pointer: u64) -> Behind {
    match pinned_regions::find(pointer) {
        Some((_, _, tag)) if let Some((base, live)) = host_pool::find(pointer) => {
            let tag = pinned_regions::HostTag { buffer: live.buffer, ..tag };
            Behind::Host { base, size: live.size as usize, tag, pool: live.handle }
        }
        Some((base, size, tag)) => Behind::Host { base, size, tag, pool: 0 },
        None => address::find(driver, pointer).map_or(Behind::Nothing, Behind::Device),
    }
}

/// The kinds of handle with which an allocation, or its pool if it is of one (not 0), can be exported.
fn handle_types(pointer: u64, pool: usize) -> u32 {
    if pool == 0 {
        return virtual_memory::handle_types(pointer);
    }
    let is_shared = pool::of(pool).is_ok_and(|(_, pool)| pool.name.is_some());
    if is_shared { POSIX_FD } else { 0 }
}

/// The value of an attribute, in its own type.
enum Value {
    Word(u64),
    Number(u32),
    /// The program's variable stays as it is.
    Unchanged,
}

impl Value {
    /// The manual says "boolean"; callers, including NVIDIA's runtime, pass an int.
    fn flag(value: bool) -> Value {
        Value::Number(value.into())
    }

    /// # Safety
    /// `to` is NULL, or has room for the attribute's type.
    unsafe fn put(self, to: *mut c_void) -> Result {
        // SAFETY: room for the value, as the caller promises.
        unsafe {
            match self {
                Value::Word(word) => put(to.cast(), word),
                Value::Number(number) => put(to.cast(), number),
                Value::Unchanged => non_null(to),
            }
        }
    }
}

/// One attribute. `false`: the pointer has no such attribute, and the value is what is told when several are
/// asked for at once.
fn attribute(driver: &Driver, number: u32, pointer: u64) -> Result<(Value, bool)> {
    use Value::{Number, Unchanged, Word};
    let behind = behind(driver, pointer);
    let (context, buffer) = match &behind {
        Behind::Device(found) => (found.context, found.buffer),
        Behind::Host { tag, .. } => (tag.context, tag.buffer),
        Behind::Nothing => {
            let value = match number {
                // Host memory has the same address on the host; NVIDIA's runtime relies on this.
                4 => Word(pointer),
                // As NVIDIA's driver does.
                11 => Unchanged,
                1 | 3 | 7 | 12 | 14 | 17 | 18 | 19 | 20 => Word(0),
                2 | 16 => Number(0),
                9 => Number(-2i32 as u32),
                6 | 8 | 10 | 13 | 15 | 21 => Value::flag(false),
                _ => return Err(Status::INVALID_VALUE),
            };
            return Ok((value, false));
        }
    };
    let device = matches!(behind, Behind::Device(_));
    let managed = matches!(&behind, Behind::Device(found) if found.managed && !managed::is_beside(pointer));
    let pool = match &behind {
        Behind::Device(found) => found.pool,
        Behind::Host { pool, .. } => *pool,
        Behind::Nothing => 0,
    };
    let value = match number {
        // A pool's memory belongs to a device, not a context, and so does cuMemCreate's.
        1 if pool != 0 || device && virtual_memory::is_mapped(pointer) => Word(0),
        1 => Word(context.handle as u64),
        2 => Number(if device { 2 } else { 1 }),
        3 if device => Word(pointer),
        4 if !device || managed => Word(pointer),
        // A device accesses pinned memory at the same address.
        3 if pinned::is_reached(context.server, pointer) => Word(pointer),
        // The host cannot access device memory.
        3 | 4 => return Ok((Word(0), false)),
        6 => Value::flag(matches!(&behind, Behind::Device(found) if found.sync_memops)),
        7 => Word(buffer),
        8 => Value::flag(managed),
        9 => Number(context.device),
        10 => Value::flag(matches!(&behind, Behind::Device(found) if found.is_exportable(driver))),
        11 | 19 => Word(match &behind {
            Behind::Device(found) => found.base,
            Behind::Host { base, .. } => *base as u64,
            Behind::Nothing => 0,
        }),
        12 | 18 => Word(match &behind {
            Behind::Device(found) => found.size,
            Behind::Host { size, .. } => *size as u64,
            Behind::Nothing => 0,
        }),
        13 => Value::flag(true),
        14 => Word(handle_types(pointer, pool).into()),
        // GPUDirect RDMA and decompression are not supported.
        15 | 21 => Value::flag(false),
        16 => Number(3),
        17 => Word(pool as u64),
        20 => Word(buffer),
        _ => return Err(Status::INVALID_VALUE),
    };
    Ok((value, true))
}

api! {
    unsafe fn cuPointerGetAttribute(data: *mut c_void, number: u32, pointer: u64) {
        let driver = driver()?;
        non_null(data)?;
        match attribute(driver, number, pointer)? {
            // SAFETY: there is room for the attribute's type, by CUDA's manual.
            (value, true) => unsafe { value.put(data) },
            // For an unknown pointer, and then nothing is written.
            (_, false) => Err(Status::INVALID_VALUE),
        }
    }

    unsafe fn cuPointerGetAttributes(count: Count<u32>, numbers: Array<u32>, data: Array<*mut c_void>, pointer: u64) {
        let driver = driver()?;
        if count.get() == 0 {
            return Err(Status::INVALID_VALUE);
        }
        for (number, data) in numbers.entries(count)?.iter().zip(data.entries(count)?) {
            non_null(*data)?;
            // SAFETY: there is room for the attribute's type, by CUDA's manual.
            unsafe { attribute(driver, *number, pointer)?.0.put(*data) }?;
        }
        Ok(())
    }

    unsafe fn cuPointerSetAttribute(value: *const c_void, number: u32, pointer: u64) {
        let driver = driver()?;
        non_null(value)?;
        // SYNC_MEMOPS is the only one that can be set.
        if number != 6 {
            return Err(Status::INVALID_VALUE);
        }
        let found = address::find(driver, pointer).ok_or(Status::INVALID_VALUE)?;
        let device = device_memory::device_of(driver, pointer).ok_or(Status::INVALID_VALUE)?;
        if let Some(tag) = lock(device.memory_of(pointer)).tag_mut(found.base) {
            // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: an int.
            tag.sync_memops = unsafe { value.cast::<u32>().read() } != 0;
            address::sync_memops();
        }
        Ok(())
    }
}
