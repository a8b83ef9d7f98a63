//! Kernel launches, and the configuration that `<<<…>>>` leaves for the host stub.
//!
//! The driver takes a `CUkernel` in place of a `CUfunction` and uses the current context. A launch is one map
//! lookup (none for code of nvcc 13, whose stubs keep the handle) and one call of the driver.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::arguments::{In, Out};
use crate::context;
use crate::driver::{DefaultStream, Driver};
use crate::error::{Error, Result};
use crate::registry;
use crate::types::{CUkernel, CUlaunchConfig, CUstream, Dim3, LaunchConfig};

/// How deeply `<<<…>>>` may nest in the arguments of its own kernel.
const DEPTH: usize = 64;

#[derive(Clone, Copy)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared_mem: usize,
    stream: CUstream,
}

struct Stack {
    depth: usize,
    entries: [Configuration; DEPTH],
}

const NONE: Dim3 = Dim3 { x: 0, y: 0, z: 0 };

thread_local! {
    static PENDING: UnsafeCell<Stack> = const { UnsafeCell::new(Stack {
        depth: 0,
        entries: [Configuration { grid: NONE, block: NONE, shared_mem: 0, stream: std::ptr::null_mut() }; DEPTH],
    }) };
}

fn with_pending<T>(change: impl FnOnce(&mut Stack) -> T) -> T {
    // SAFETY: the stack belongs to this thread, and `change` does not reenter: both callers only read and
    // write its entries.
    PENDING.with(|stack| change(unsafe { &mut *stack.get() }))
}

/// Leaves a configuration for the stub that follows. A result other than 0 means that the stub must not be
/// called.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Dim3,
    block: Dim3,
    shared_mem: usize,
    stream: CUstream,
) -> c_uint {
    with_pending(|stack| match stack.entries.get_mut(stack.depth) {
        Some(entry) => {
            *entry = Configuration { grid, block, shared_mem, stream };
            stack.depth += 1;
            0
        }
        None => 1,
    })
}

api! {
    raw fn __cudaPopCallConfiguration(grid: Out<Dim3>, block: Out<Dim3>, shared_mem: Out<usize>,
        stream: Out<CUstream>) |_d| {
        grid.required().and(block.required()).and(shared_mem.required()).and(stream.required())?;
        let top = with_pending(|stack| {
            stack.depth = stack.depth.checked_sub(1)?;
            Some(stack.entries[stack.depth])
        });
        let top = top.ok_or(Error::MISSING_CONFIGURATION)?;
        grid.put(top.grid)?;
        block.put(top.block)?;
        shared_mem.put(top.shared_mem)?;
        stream.put(top.stream)
    };

    raw unsafe fn cudaLaunchKernel/cudaLaunchKernel_ptsz(function: *const c_void, grid: Dim3, block: Dim3,
        args: *mut *mut c_void,
        shared_mem: usize, stream: CUstream) |_d, s| {
        launch(s, registry::kernel(function)?, grid, block, args, shared_mem, stream)
    };
    raw unsafe fn __cudaLaunchKernel/__cudaLaunchKernel_ptsz(kernel: CUkernel, grid: Dim3, block: Dim3,
        args: *mut *mut c_void,
        shared_mem: usize, stream: CUstream) |_d, s| {
        launch(s, registry::launched(kernel)?, grid, block, args, shared_mem, stream)
    };
    raw unsafe fn cudaLaunchCooperativeKernel/cudaLaunchCooperativeKernel_ptsz(function: *const c_void, grid: Dim3,
        block: Dim3,
        args: *mut *mut c_void, shared_mem: usize, stream: CUstream) |_d, s| {
        let kernel = registry::kernel(function)?;
        let shared = c_uint::try_from(shared_mem).map_err(|_| Error::INVALID_VALUE)?;
        context::ctx(|d| d.cuLaunchCooperativeKernel(
            s, kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, args))
            .map_err(|error| explain(error, grid, block))
    };
    raw unsafe fn cudaLaunchKernelExC/cudaLaunchKernelExC_ptsz(config: In<LaunchConfig>, function: *const c_void,
        args: *mut *mut c_void) |_d, s| {
        let config = config.get()?;
        let kernel = registry::kernel(function)?;
        let driver_config = driver_config(&config)?;
        context::ctx(|d| d.cuLaunchKernelEx(s, &driver_config, kernel, args, std::ptr::null_mut()))
            .map_err(|error| explain(error, config.grid, config.block))
    };
}

/// Names the kernel that a function launches. NULL if it launches none; no name if it is unknown.
pub(crate) unsafe extern "C" fn kernel_of(
    function: *const c_char,
    arguments: *const c_void,
) -> *const c_char {
    // SAFETY: a function's name, and arguments of that function.
    let launched = unsafe {
        let words = arguments.cast::<usize>();
        match CStr::from_ptr(function).to_bytes() {
            b"cudaLaunchKernel"
            | b"cudaLaunchKernel_ptsz"
            | b"__cudaLaunchKernel"
            | b"__cudaLaunchKernel_ptsz"
            | b"cudaLaunchCooperativeKernel"
            | b"cudaLaunchCooperativeKernel_ptsz" => *words,
            b"cudaLaunchKernelExC" | b"cudaLaunchKernelExC_ptsz" => *words.add(1),
            _ => return std::ptr::null(),
        }
    };
    registry::name_of(launched)
}

#[inline]
unsafe fn launch(
    s: DefaultStream,
    kernel: CUkernel,
    grid: Dim3,
    block: Dim3,
    args: *mut *mut c_void,
    shared_mem: usize,
    stream: CUstream,
) -> Result {
    let shared = c_uint::try_from(shared_mem).map_err(|_| Error::INVALID_VALUE)?;
    let launched = context::ctx(|d| {
        // SAFETY: the caller upholds the requirements of `cudaLaunchKernel`.
        unsafe {
            d.cuLaunchKernel(
                s,
                kernel,
                grid.x,
                grid.y,
                grid.z,
                block.x,
                block.y,
                block.z,
                shared,
                stream,
                args,
                std::ptr::null_mut(),
            )
        }
    });
    launched.map_err(|error| explain(error, grid, block))
}

/// The driver's form of a launch configuration. The attributes have the same layout.
pub(crate) fn driver_config(config: &LaunchConfig) -> Result<CUlaunchConfig> {
    Ok(CUlaunchConfig {
        grid: config.grid,
        block: config.block,
        shared_mem_bytes: c_uint::try_from(config.dynamic_smem_bytes).map_err(|_| Error::INVALID_VALUE)?,
        stream: config.stream,
        attrs: config.attrs,
        num_attrs: config.num_attrs,
    })
}

/// The error of a failed launch. The driver has one error for all bad values, and so has CUDA 13's runtime.
/// CUDA 12's runtime has a separate error for a grid or block outside the device's limits.
#[cold]
fn explain(error: Error, grid: Dim3, block: Dim3) -> Error {
    if !cfg!(feature = "v12") || error != Error::INVALID_VALUE {
        return error;
    }
    match context::bound().and_then(|d| fits(d, grid, block)) {
        Ok(false) => Error::INVALID_CONFIGURATION,
        _ => error,
    }
}

/// Whether the device supports this grid and block size for any kernel at all.
fn fits(d: &'static Driver, grid: Dim3, block: Dim3) -> Result<bool> {
    const MAX_THREADS: c_uint = 1;
    const MAX_BLOCK: c_uint = 2;
    const MAX_GRID: c_uint = 5;
    let device = context::handle(d, context::device(d)?)?;
    let limit = |attribute| {
        let mut value: c_int = 0;
        // SAFETY: the output is a live local variable.
        unsafe { d.cuDeviceGetAttribute(&mut value, attribute, device)? };
        Ok(value.unsigned_abs())
    };
    for (at, size) in [block.x, block.y, block.z].into_iter().enumerate() {
        if size == 0 || size > limit(MAX_BLOCK + at as c_uint)? {
            return Ok(false);
        }
    }
    for (at, size) in [grid.x, grid.y, grid.z].into_iter().enumerate() {
        if size == 0 || size > limit(MAX_GRID + at as c_uint)? {
            return Ok(false);
        }
    }
    let threads = u64::from(block.x) * u64::from(block.y) * u64::from(block.z);
    Ok(threads <= u64::from(limit(MAX_THREADS)?))
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::fake_driver::{Fake, KERNEL, KERNEL_THREADS, MAX_SHARED};

    const ONE: Dim3 = Dim3 { x: 1, y: 1, z: 1 };

    fn launch_with(grid: Dim3, block: Dim3, shared: usize) -> c_int {
        // SAFETY: the fake driver does not look at arguments.
        unsafe {
            __cudaLaunchKernel(
                ptr::without_provenance_mut(KERNEL),
                grid,
                block,
                ptr::null_mut(),
                shared,
                ptr::null_mut(),
            )
        }
    }

    /// `cudaErrorInvalidConfiguration` in CUDA 12, `cudaErrorInvalidValue` in CUDA 13.
    const BAD_CONFIGURATION: c_int = if cfg!(feature = "v12") { 9 } else { 1 };

    #[test]
    fn a_grid_or_block_beyond_the_device_limits_gets_its_cuda_version_s_error() {
        let _fake = Fake::new();
        assert_eq!(launch_with(ONE, ONE, 0), 0);
        assert_eq!(launch_with(ONE, Dim3 { x: 2048, ..ONE }, 0), BAD_CONFIGURATION);
        assert_eq!(launch_with(ONE, Dim3 { x: 64, y: 64, z: 1 }, 0), BAD_CONFIGURATION);
        assert_eq!(launch_with(Dim3 { x: 0, ..ONE }, ONE, 0), BAD_CONFIGURATION);
    }

    #[test]
    fn more_threads_than_the_kernel_allows_are_an_invalid_value() {
        let _fake = Fake::new();
        // Within the device's limits but above the fake kernel's.
        assert_eq!(launch_with(ONE, Dim3 { x: KERNEL_THREADS + 1, ..ONE }, 0), 1);
    }

    #[test]
    fn too_much_shared_memory_is_an_invalid_value() {
        let _fake = Fake::new();
        assert_eq!(launch_with(ONE, ONE, MAX_SHARED as usize + 1), 1);
        assert_eq!(launch_with(ONE, ONE, 1 << 32), 1);
    }

    #[test]
    fn configurations_nest() {
        let _fake = Fake::new();
        let push = |x| __cudaPushCallConfiguration(Dim3 { x, ..ONE }, ONE, 0, ptr::null_mut());
        let pop = || {
            let (mut grid, mut block, mut shared, mut stream): (_, _, _, CUstream) =
                (ONE, ONE, 0, ptr::null_mut());
            // SAFETY: the outputs are live local variables.
            let answer = unsafe {
                __cudaPopCallConfiguration(
                    (&mut grid).into(),
                    (&mut block).into(),
                    (&mut shared).into(),
                    (&mut stream).into(),
                )
            };
            (answer, grid.x)
        };
        assert_eq!((push(7), push(8)), (0, 0));
        assert_eq!((pop(), pop()), ((0, 8), (0, 7)));
        assert_eq!(pop().0, 52);
    }
}
