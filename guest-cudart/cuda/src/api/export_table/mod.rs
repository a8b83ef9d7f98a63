//! `cuGetExportTable`: private function tables that NVIDIA's own libraries request by GUID. They are
//! undocumented; what is known of each was found by observing NVIDIA's libraries and is noted with the table.
//! Unknown tables are refused, and logged once on stderr.
//!
//! Most tables begin with their own size in bytes. A slot that nobody was seen to call returns
//! `CUDA_ERROR_NOT_SUPPORTED`.

mod activity;
pub(crate) mod compile_cache;
pub(crate) mod integrity;
mod runtime_hooks;

use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr};

use crate::abi::arguments::{In, Out, non_null, put};
use crate::abi::result::{Result, finish};
use crate::api::export_table::integrity::{Question, Seen};
use crate::process::context::{self, Stored};
use crate::process::device_attributes::attr;
use crate::process::driver;
use crate::streams::stream_table;
use client::activity::KernelOf;
use client::counters::{self, Call, RuntimeCall};
use client::{Status, lock, log};

/// A slot: a size or an address.
type Slot = *const c_void;

struct Table<const N: usize>([Slot; N]);

// SAFETY: only sizes and addresses of functions.
unsafe impl<const N: usize> Sync for Table<N> {}

extern "C" fn refused() -> u32 {
    Status::NOT_SUPPORTED.0
}

extern "C" fn nothing() -> u32 {
    0
}

/// A table with its size in the first slot. Slots not listed refuse calls.
const fn table<const N: usize>(slots: &[(usize, Slot)]) -> Table<N> {
    let mut table = [refused as *const c_void; N];
    table[0] = (N * size_of::<Slot>()) as Slot;
    let mut i = 0;
    while i < slots.len() {
        table[slots[i].0] = slots[i].1;
        i += 1;
    }
    Table(table)
}

/// The primary context of a device, without retaining it.
unsafe extern "C" fn primary(pctx: *mut usize, dev: i32) -> u32 {
    let result = (|| {
        let device = driver::device(dev)?;
        // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
        unsafe { put(pctx, device.primary.handle) }
    })();
    finish("primary context", result)
}

/// The current context.
unsafe extern "C" fn current(pctx: *mut usize) -> u32 {
    let handle = context::current().map_or(0, |_| context::current_handle());
    // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
    finish("current context", unsafe { put(pctx, handle) })
}

type Destructor = unsafe extern "C" fn(usize, *mut c_void, *mut c_void);

unsafe extern "C" fn storage_put(
    ctx: usize,
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
) -> u32 {
    let result = (|| {
        let context = context::of(ctx)?;
        lock(&context.storage).insert(key, Stored { value, destructor });
        Ok(())
    })();
    finish("context storage put", result)
}

unsafe extern "C" fn storage_delete(ctx: usize, key: usize) -> u32 {
    let result = (|| {
        let context = context::of(ctx)?;
        lock(&context.storage).remove(&key).map(|_| ()).ok_or(Status::INVALID_HANDLE)
    })();
    finish("context storage delete", result)
}

unsafe extern "C" fn storage_get(value: *mut usize, ctx: usize, key: usize) -> u32 {
    let result: Result = (|| {
        non_null(value)?;
        let context = context::of(ctx)?;
        let found =
            lock(&context.storage).get(&key).map(|stored| stored.value).ok_or(Status::INVALID_HANDLE)?;
        // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
        unsafe { put(value, found) }
    })();
    // A miss is the usual first answer, and not an error.
    result.err().map_or(0, |status| status.0)
}

/// Asks whether a context has a property that none was seen to have: no.
unsafe extern "C" fn context_check(_ctx: usize, result: *mut u32) -> u32 {
    // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
    let _ = unsafe { put(result, 0) };
    0
}

/// See [`integrity`].
unsafe extern "C" fn integrity_check(version: u32, unix_seconds: u64, result: *mut [u64; 2]) -> u32 {
    let devices: Vec<Seen> = driver::driver().map_or(Vec::new(), |driver| {
        let seen = |device: &driver::Device| Seen {
            uuid: device.info.uuid,
            pci: [
                device.attribute(attr::PCI_DOMAIN_ID),
                device.attribute(attr::PCI_BUS_ID),
                device.attribute(attr::PCI_DEVICE_ID),
            ],
        };
        driver.devices.iter().map(seen).collect()
    });
    let question = Question {
        driver_version: driver::driver().map_or(crate::process::driver::API_VERSION, |driver| driver.version),
        version,
        process: std::process::id(),
        // SAFETY: has no preconditions.
        thread: unsafe { libc::pthread_self() } as u32,
        addresses: [
            RUNTIME.0.as_ptr() as usize,
            INTEGRITY.0.as_ptr() as usize,
            integrity_check as *const () as usize,
        ],
        unix_seconds,
    };
    // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
    finish("integrity check", unsafe { put(result, integrity::answer(&question, &devices)) })
}

/// The number of a context; 0 for none. NULL here means no context, not the current one: cuBLAS asks before a
/// thread has a context, and treats an error as fatal.
unsafe extern "C" fn context_id(ctx: usize, id: *mut u64) -> u32 {
    let result = (|| {
        if ctx == 0 {
            // SAFETY: checked for NULL; the caller passes a place for a number.
            return unsafe { put(id, 0) };
        }
        let context = context::of(ctx)?;
        // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
        unsafe { put(id, context.unique) }
    })();
    finish("context id", result)
}

/// The number of a stream. 0 is the default stream: cuSOLVER asks for its number before it solves with a
/// factor (`cusolverDnDgetrs`), and fails without one.
unsafe extern "C" fn stream_id(_ctx: usize, stream: usize, id: *mut u64) -> u32 {
    let result = (|| {
        let unique = stream_table::ask(stream, false)?.1.unique();
        // SAFETY: `put` refuses NULL. Otherwise the caller, one of NVIDIA's libraries, passes a place for a
        // number.
        unsafe { put(id, unique) }
    })();
    finish("stream id", result)
}

unsafe extern "C" fn stream_through(_ctx: usize, stream: usize, out: *mut usize, per_thread: u32) -> u32 {
    let stream = if stream == 0 && per_thread != 0 { crate::process::stream::PER_THREAD } else { stream };
    // SAFETY: checked for NULL; otherwise the caller guarantees that it is writable.
    finish("stream", unsafe { put(out, stream) })
}

/// Calls back for each function of a module with the caller's argument, the function, and the module.
unsafe extern "C" fn each_function(
    _ctx: usize,
    module: usize,
    callback: Option<unsafe extern "C" fn(usize, usize, usize)>,
    user: usize,
) -> u32 {
    let result: Result = (|| {
        let callback = callback.ok_or(Status::INVALID_VALUE)?;
        let found = crate::code::module::MODULES.get(module).ok_or(Status::INVALID_HANDLE)?;
        for function in &found.functions {
            let handle = function.handle(&found)?;
            // SAFETY: the caller's function, called with the caller's own argument.
            unsafe { callback(user, handle, module) };
        }
        Ok(())
    })();
    // NVIDIA's driver doesn't return a status here: 1 means that there was something.
    u32::from(finish("functions of a module", result) == 0)
}

/// rgpu's own libcudart enters one of its functions. `known` is what the library caches for the function,
/// initially NULL; `kernel` names the kernel that a launch launches. A result other than 0 means that the
/// thread is inside until it calls [`runtime_leaves`].
unsafe extern "C" fn runtime_enters(
    known: *const AtomicPtr<Call>,
    name: *const c_char,
    arguments: *const c_void,
    kernel: Option<KernelOf>,
    version: u32,
) -> u32 {
    if known.is_null() || name.is_null() {
        return 0;
    }
    // SAFETY: the caller passes a place that lives as long as its library, and a NUL-terminated name. The
    // arguments stay until it leaves the function.
    u32::from(unsafe {
        let (known, name) = (&*known, CStr::from_ptr(name));
        counters::enter_runtime(&RuntimeCall { known, name, arguments, kernel, version, number: 0 })
    })
}

/// It leaves the function, which returns `status`.
extern "C" fn runtime_leaves(status: u32) {
    counters::leave_runtime(status);
}

static RUNTIME: Table<13> = table(&[(2, primary as Slot), (7, nothing as Slot), (12, nothing as Slot)]);

static CURRENT: Table<4> = table(&[(2, current as Slot)]);

static STORAGE: Table<4> =
    Table([storage_put as Slot, storage_delete as Slot, storage_get as Slot, std::ptr::null()]);

static CHECKS: Table<4> = table(&[(2, context_check as Slot), (3, nothing as Slot)]);

static INTEGRITY: Table<3> = table(&[(1, integrity_check as Slot)]);

static STREAMS: Table<93> =
    table(&[(4, context_id as Slot), (39, stream_id as Slot), (51, stream_through as Slot)]);

static FUNCTIONS: Table<99> = table(&[(7, each_function as Slot)]);

static REFUSING: Table<17> = table(&[]);

static COMPILE_CACHE: Table<7> = table(&[
    (1, compile_cache::make_key as Slot),
    (2, compile_cache::drop_key as Slot),
    (3, compile_cache::look_up as Slot),
    (4, compile_cache::keep as Slot),
    (6, compile_cache::give_back as Slot),
]);

/// Where it says whether libcudart's calls are wanted at the moment.
extern "C" fn runtime_wanted() -> *const AtomicBool {
    counters::are_calls_marked()
}

/// Requested by rgpu's libcudart, which tells of its calls while they are wanted.
static COUNTS: Table<4> =
    table(&[(1, runtime_enters as Slot), (2, runtime_leaves as Slot), (3, runtime_wanted as Slot)]);

/// Requested by NVIDIA's CUPTI when a program starts using it.
const OF_CUPTI: u128 = 0x2C8E0AD8_0710_AB4E_90DD_54719FE5F74B;

/// The table for a GUID, given as 16 bytes in memory order.
fn find(guid: &[u8; 16]) -> Option<*const c_void> {
    let table = match u128::from_be_bytes(*guid) {
        0x6BD5FB6C_5BF4_E74A_8987_D93912FD9DF9 => RUNTIME.0.as_ptr(),
        0xA094798C_2E74_2E74_93F2_0800200C0A66 => runtime_hooks::HOOKS.0.as_ptr(),
        0x42D85A81_23F6_CB47_8298_F6E78A3AECDC => CURRENT.0.as_ptr(),
        0xC693336E_1121_DF11_A8C3_68F355D89593 => STORAGE.0.as_ptr(),
        0x263E8860_7CD2_6143_92F6_BBD5006DFA7E => CHECKS.0.as_ptr(),
        0xD4082055_BDE6_704B_8D34_BA123C66E1F2 => INTEGRITY.0.as_ptr(),
        0x21318C60_9714_3248_8CA6_41FF7324C8F2 => STREAMS.0.as_ptr(),
        0x6E163FBE_B958_444D_835C_E182AFF1991E => FUNCTIONS.0.as_ptr(),
        0x1734DC26_800D_4745_8726_C0F1E7DD8BCA => REFUSING.0.as_ptr(),
        0xDA9151D3_3AE6_CC41_A5C0_4F26D533E328 => COMPILE_CACHE.0.as_ptr(),
        // "rgpu counts call".
        0x72677075_2063_6F75_6E74_732063616C6C => COUNTS.0.as_ptr(),
        // "rgpu device work".
        0x72677075_2064_6576_6963_6520776F726B => activity::ACTIVITY.0.as_ptr(),
        _ => return None,
    };
    Some(table.cast())
}

api! {
    fn cuGetExportTable(table: Out<*const c_void>, guid: In<[u8; 16]>) {
        static SAID: Mutex<Vec<[u8; 16]>> = Mutex::new(Vec::new());
        table.required()?;
        let guid = guid.get()?;
        let Some(found) = find(&guid) else {
            let mut said = lock(&SAID);
            if !said.contains(&guid) {
                said.push(guid);
                if u128::from_be_bytes(guid) == OF_CUPTI {
                    log::warn(format_args!(
                        "this program's profiler uses NVIDIA's CUPTI, which needs a GPU in this machine: start the program with LD_PRELOAD=FOLDER/libcupti.so.13, where FOLDER contains rgpu's libraries"
                    ));
                }
                log::info(format_args!("cuGetExportTable: unknown table {:032X}", u128::from_be_bytes(guid)));
            }
            table.put(std::ptr::null())?;
            return Err(Status::NOT_FOUND);
        };
        table.put(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_begins_with_its_size() {
        assert_eq!(RUNTIME.0[0] as usize, 13 * 8);
        assert_eq!(STREAMS.0[0] as usize, 744);
        assert_eq!(REFUSING.0[0] as usize, 136);
        assert_ne!(STORAGE.0[0] as usize, 32, "this one has no size word");
    }
}
