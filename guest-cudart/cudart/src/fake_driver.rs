//! A fake driver for tests. It has two devices, libraries with the kernel `known` and the variables
//! `variable` (16 bytes) and `managed`, and a record of the calls. Tests that use it run one at a time.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::context;
use crate::driver::{self, Driver};
use crate::types::{CUDA_KERNEL_NODE_PARAMS, CUcontext, CUdevice, CUevent, CUstream};

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const NO_BINARY_FOR_GPU: u32 = 209;
const INVALID_HANDLE: u32 = 400;
const NOT_FOUND: u32 = 500;

pub(crate) const MAX_THREADS: c_uint = 1024;
/// The most threads that a block of the kernel `known` can have.
pub(crate) const KERNEL_THREADS: c_uint = 512;
pub(crate) const MAX_SHARED: c_uint = 48 << 10;
/// The address of every allocation of the fake driver.
pub(crate) const MEMORY: usize = 0x7000_0000;
pub(crate) const KERNEL: usize = 0x5000;
pub(crate) const VARIABLE: usize = 0x6000;
pub(crate) const MANAGED: usize = 0x6800;
const LIBRARY: usize = 0x4000;
const FUNCTION: usize = 0x5800;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) calls: Vec<&'static str>,
    pub(crate) retained: HashMap<CUdevice, usize>,
    pub(crate) nodes: Vec<CUDA_KERNEL_NODE_PARAMS>,
    /// The result of `cuInit`.
    pub(crate) init: u32,
    /// The result of `cuLibraryLoadData`.
    pub(crate) load: u32,
    /// How far from [`MANAGED`] the managed variable is now, in bytes.
    pub(crate) managed_moves: usize,
}

// SAFETY: the pointers in node parameters are only compared.
unsafe impl Send for State {}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(f: impl FnOnce(&mut State) -> T) -> T {
    f(lock(&STATE).get_or_insert_default())
}

fn called(name: &'static str) {
    with(|state| state.calls.push(name));
}

/// Makes this test the only one that uses the fake driver, until dropped.
pub(crate) struct Fake {
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    pub(crate) fn new() -> Self {
        let turn = lock(&TURN);
        *lock(&STATE) = Some(State::default());
        context::reset_for_test();
        CURRENT.set(0);
        driver::install(table());
        Fake { _turn: turn }
    }

    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        with(f)
    }

    /// How often a function of the driver was called.
    pub(crate) fn count(&self, name: &str) -> usize {
        with(|state| state.calls.iter().filter(|&&call| call == name).count())
    }
}

/// The context that is current in this thread. Setting it has the effect of a program's `cuCtxSetCurrent`.
pub(crate) fn current() -> usize {
    CURRENT.get()
}

pub(crate) fn set_current(context: usize) {
    CURRENT.set(context);
}

/// The primary context of a device.
pub(crate) const fn primary(device: CUdevice) -> usize {
    0x1000 + device as usize
}

fn needs_context() -> u32 {
    if CURRENT.get() == 0 { INVALID_CONTEXT } else { SUCCESS }
}

unsafe extern "C" fn init(_flags: c_uint) -> u32 {
    with(|state| state.init)
}

unsafe extern "C" fn driver_version(out: *mut c_int) -> u32 {
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(13000) };
    SUCCESS
}

unsafe extern "C" fn device_get_count(out: *mut c_int) -> u32 {
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(2) };
    SUCCESS
}

unsafe extern "C" fn device_get(out: *mut CUdevice, ordinal: c_int) -> u32 {
    if !(0..2).contains(&ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(ordinal) };
    SUCCESS
}

unsafe extern "C" fn device_attribute(out: *mut c_int, attribute: c_uint, _device: CUdevice) -> u32 {
    let value = match attribute {
        1..=3 => MAX_THREADS,
        4 => 64,
        5 => 0x7fff_ffff,
        6 | 7 => 65535,
        _ => attribute,
    };
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(value.cast_signed()) };
    SUCCESS
}

unsafe extern "C" fn retain(out: *mut CUcontext, device: CUdevice) -> u32 {
    called("cuDevicePrimaryCtxRetain");
    with(|state| *state.retained.entry(device).or_default() += 1);
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(ptr::without_provenance_mut(primary(device))) };
    SUCCESS
}

unsafe extern "C" fn release(device: CUdevice) -> u32 {
    with(|state| *state.retained.entry(device).or_default() -= 1);
    SUCCESS
}

unsafe extern "C" fn reset(_device: CUdevice) -> u32 {
    called("cuDevicePrimaryCtxReset_v2");
    SUCCESS
}

unsafe extern "C" fn ctx_set_current(context: CUcontext) -> u32 {
    called("cuCtxSetCurrent");
    CURRENT.set(context.addr());
    SUCCESS
}

unsafe extern "C" fn ctx_get_current(out: *mut CUcontext) -> u32 {
    called("cuCtxGetCurrent");
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(ptr::without_provenance_mut(CURRENT.get())) };
    SUCCESS
}

unsafe extern "C" fn ctx_get_device(out: *mut CUdevice) -> u32 {
    let context = CURRENT.get();
    if context == 0 {
        return INVALID_CONTEXT;
    }
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write((context & 1) as CUdevice) };
    SUCCESS
}

unsafe extern "C" fn ctx_synchronize() -> u32 {
    called("cuCtxSynchronize");
    needs_context()
}

unsafe extern "C" fn mem_alloc(out: *mut *mut c_void, size: usize) -> u32 {
    called("cuMemAlloc_v2");
    if size > 1 << 40 {
        return OUT_OF_MEMORY;
    }
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(ptr::without_provenance_mut(MEMORY)) };
    needs_context()
}

unsafe extern "C" fn pointer_attributes(
    _n: c_uint,
    _attributes: *mut c_uint,
    data: *mut *mut c_void,
    address: *mut c_void,
) -> u32 {
    if address.addr() >= MEMORY {
        // SAFETY: the library asks for the type, both addresses, "is managed" and the device, in this order.
        unsafe {
            data.read().cast::<c_uint>().write(2);
            data.add(1).read().cast::<*mut c_void>().write(address);
            data.add(4).read().cast::<c_int>().write(1);
        }
    }
    SUCCESS
}

unsafe extern "C" fn library_load(
    out: *mut *mut c_void,
    code: *const c_void,
    _jit: *mut c_uint,
    _jit_values: *mut *mut c_void,
    _jit_count: c_uint,
    _options: *mut c_uint,
    _values: *mut *mut c_void,
    _count: c_uint,
) -> u32 {
    called("cuLibraryLoadData");
    let answer = if code.is_null() { NO_BINARY_FOR_GPU } else { with(|state| state.load) };
    if answer == SUCCESS {
        // SAFETY: the library under test passes a live local variable.
        unsafe { out.write(ptr::without_provenance_mut(LIBRARY)) };
    }
    answer
}

unsafe extern "C" fn library_unload(_library: *mut c_void) -> u32 {
    called("cuLibraryUnload");
    SUCCESS
}

unsafe extern "C" fn library_kernel(
    out: *mut *mut c_void,
    _library: *mut c_void,
    name: *const c_char,
) -> u32 {
    called("cuLibraryGetKernel");
    // SAFETY: the library under test passes a C string and a live local variable.
    unsafe {
        if CStr::from_ptr(name) != c"known" {
            return NOT_FOUND;
        }
        out.write(ptr::without_provenance_mut(KERNEL));
    }
    SUCCESS
}

unsafe extern "C" fn library_global(
    out: *mut *mut c_void,
    size: *mut usize,
    _library: *mut c_void,
    name: *const c_char,
) -> u32 {
    // SAFETY: the library under test passes a live local variable.
    unsafe {
        if CStr::from_ptr(name) != c"variable" {
            return NOT_FOUND;
        }
        out.write(ptr::without_provenance_mut(VARIABLE));
        size.write(16);
    }
    SUCCESS
}

unsafe extern "C" fn library_managed(
    out: *mut *mut c_void,
    size: *mut usize,
    _library: *mut c_void,
    name: *const c_char,
) -> u32 {
    // SAFETY: the library under test passes a live local variable.
    unsafe {
        if CStr::from_ptr(name) != c"managed" {
            return NOT_FOUND;
        }
        out.write(ptr::without_provenance_mut(MANAGED + with(|state| state.managed_moves)));
        size.write(4);
    }
    SUCCESS
}

unsafe extern "C" fn kernel_function(out: *mut *mut c_void, kernel: *mut c_void) -> u32 {
    if kernel.addr() != KERNEL {
        return INVALID_HANDLE;
    }
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(ptr::without_provenance_mut(FUNCTION)) };
    SUCCESS
}

unsafe extern "C" fn elapsed_time(_out: *mut f32, _start: CUevent, _end: CUevent) -> u32 {
    INVALID_HANDLE
}

unsafe extern "C" fn kernel_attribute(
    out: *mut c_int,
    _attribute: c_uint,
    _kernel: *mut c_void,
    _device: CUdevice,
) -> u32 {
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(KERNEL_THREADS.cast_signed()) };
    SUCCESS
}

unsafe extern "C" fn launch(
    kernel: *mut c_void,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    _stream: CUstream,
    _args: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    called("cuLaunchKernel");
    if CURRENT.get() == 0 {
        return INVALID_CONTEXT;
    }
    let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
    let good =
        kernel.addr() == KERNEL && gx * gy * gz > 0 && threads > 0 && threads <= u64::from(KERNEL_THREADS);
    if good && shared <= MAX_SHARED { SUCCESS } else { INVALID_VALUE }
}

unsafe extern "C" fn stream_query(_stream: CUstream) -> u32 {
    called("cuStreamQuery");
    600
}

unsafe extern "C" fn stream_query_per_thread(_stream: CUstream) -> u32 {
    called("cuStreamQuery_ptsz");
    SUCCESS
}

unsafe extern "C" fn copy_to_device(_dst: *mut c_void, _src: *const c_void, _count: usize) -> u32 {
    called("cuMemcpyHtoD_v2");
    SUCCESS
}

unsafe extern "C" fn add_kernel_node(
    out: *mut *mut c_void,
    _graph: *mut c_void,
    _after: *const *mut c_void,
    _count: usize,
    params: *const CUDA_KERNEL_NODE_PARAMS,
) -> u32 {
    // SAFETY: the library under test passes live local variables.
    unsafe {
        let params = *params;
        out.write(ptr::without_provenance_mut(with(|state| {
            state.nodes.push(params);
            state.nodes.len()
        })));
    }
    SUCCESS
}

unsafe extern "C" fn kernel_node_params(node: *mut c_void, out: *mut CUDA_KERNEL_NODE_PARAMS) -> u32 {
    // SAFETY: the library under test passes a live local variable.
    unsafe { out.write(with(|state| state.nodes[node.addr() - 1])) };
    SUCCESS
}

/// The fake driver's table. It lacks every function that is not listed.
fn table() -> Driver {
    Driver {
        cuInit: Some(init),
        cuDriverGetVersion: Some(driver_version),
        cuDeviceGetCount: Some(device_get_count),
        cuDeviceGet: Some(device_get),
        cuDeviceGetAttribute: Some(device_attribute),
        cuDevicePrimaryCtxRetain: Some(retain),
        cuDevicePrimaryCtxRelease_v2: Some(release),
        cuDevicePrimaryCtxReset_v2: Some(reset),
        cuCtxSetCurrent: Some(ctx_set_current),
        cuCtxGetCurrent: Some(ctx_get_current),
        cuCtxGetDevice: Some(ctx_get_device),
        cuCtxSynchronize: Some(ctx_synchronize),
        cuMemAlloc_v2: Some(mem_alloc),
        cuPointerGetAttributes: Some(pointer_attributes),
        cuLibraryLoadData: Some(library_load),
        cuLibraryUnload: Some(library_unload),
        cuLibraryGetKernel: Some(library_kernel),
        cuLibraryGetGlobal: Some(library_global),
        cuLibraryGetManaged: Some(library_managed),
        cuKernelGetAttribute: Some(kernel_attribute),
        cuKernelGetFunction: Some(kernel_function),
        cuEventElapsedTime_v2: Some(elapsed_time),
        cuLaunchKernel: [Some(launch), None],
        cuStreamQuery: [Some(stream_query), Some(stream_query_per_thread)],
        cuMemcpyHtoD_v2: [Some(copy_to_device), None],
        cuGraphAddKernelNode_v2: Some(add_kernel_node),
        cuGraphKernelNodeGetParams_v2: Some(kernel_node_params),
        ..Driver::resolve(|_| ptr::null_mut())
    }
}
