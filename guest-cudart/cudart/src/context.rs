//! The device and context that a thread uses, and what a call needs before it reaches the driver.
//!
//! A thread starts on device 0. The process retains that device's primary context once, and each thread makes
//! it current at its first call that needs a context. After that a call costs one comparison: the driver
//! knows the thread's context, so a context that the program makes current through the driver API
//! (`cuCtxPushCurrent`, `cuCtxSetCurrent`) is used without asking for it. Only if the driver reports that no
//! context is current does the thread bind its device again and repeat the call.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::driver::{self, Driver};
use crate::error::{Error, Result};
use crate::types::{CUcontext, CUdevice};

/// The most devices that a process can use. CUDA shows at most 64 on any machine.
const MAX_DEVICES: usize = 256;

/// The device of a thread that has not chosen one.
const UNSET: c_int = -1;

struct Primary {
    context: AtomicPtr<libc::c_void>,
    retained: AtomicBool,
}

static PRIMARY: [Primary; MAX_DEVICES] =
    [const { Primary { context: AtomicPtr::new(ptr::null_mut()), retained: AtomicBool::new(false) } };
        MAX_DEVICES];

/// Counts `cudaDeviceReset`s. A thread that was bound before the latest one binds again.
static GENERATION: AtomicU32 = AtomicU32::new(1);

/// The [`GENERATION`] in which [`AFTER_RESET`] was last done.
static RENEWED: AtomicU32 = AtomicU32::new(1);

/// Makes again what a reset has destroyed, on the current device, and returns whether all is made.
static AFTER_RESET: OnceLock<fn(&Driver) -> Result<bool>> = OnceLock::new();

/// Serializes retaining and resetting primary contexts.
static CHANGING: Mutex<()> = Mutex::new(());

/// The devices of `cudaSetValidDevices` in order of preference; empty for all of them.
static VALID: Mutex<Vec<c_int>> = Mutex::new(Vec::new());

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(UNSET) };
    static BOUND: Cell<u32> = const { Cell::new(0) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call that does not use the driver.
#[inline]
pub(crate) fn raw(call: impl Fn(()) -> Result) -> Result {
    call(())
}

/// Runs a call that needs an initialized driver but no context.
#[inline]
pub(crate) fn init(call: impl Fn(&'static Driver) -> Result) -> Result {
    call(driver::initialized()?)
}

/// Runs a call that needs a current context. The call may run twice; in that case the first run only found
/// that no context was current.
#[inline]
pub(crate) fn ctx(call: impl Fn(&'static Driver) -> Result) -> Result {
    let driver = bound()?;
    match call(driver) {
        Err(error @ (Error::DEVICE_UNINITIALIZED | Error::CONTEXT_IS_DESTROYED)) => {
            if rebind(driver)? {
                call(driver)
            } else {
                Err(error)
            }
        }
        result => result,
    }
}

/// The driver, with a context current in this thread.
#[inline]
pub(crate) fn bound() -> Result<&'static Driver> {
    let driver = driver::initialized()?;
    if BOUND.get() != GENERATION.load(Ordering::Acquire) {
        rebind(driver)?;
    }
    Ok(driver)
}

/// Checks the thread's context again. Returns true if it had to bind one.
#[cold]
fn rebind(driver: &'static Driver) -> Result<bool> {
    let generation = GENERATION.load(Ordering::Acquire);
    let current = current_context(driver)?;
    let gone = !current.is_null()
        && PRIMARY
            .iter()
            .any(|p| p.context.load(Ordering::Acquire) == current && !p.retained.load(Ordering::Acquire));
    let unbound = current.is_null() || gone;
    if unbound {
        bind(driver, default_device())?;
    }
    renew(driver)?;
    BOUND.set(generation);
    Ok(unbound)
}

/// Counts resets.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Acquire)
}

/// Has `make` called when a thread uses a device again after a reset. Its context is current then. The call
/// returns whether it need not be called again, for another device, before the next reset.
pub(crate) fn after_reset(make: fn(&Driver) -> Result<bool>) {
    // There is one such function.
    let _ = AFTER_RESET.set(make);
}

fn renew(driver: &Driver) -> Result {
    let generation = generation();
    if RENEWED.load(Ordering::Acquire) == generation {
        return Ok(());
    }
    if AFTER_RESET.get().map_or(Ok(true), |make| make(driver))? {
        RENEWED.store(generation, Ordering::Release);
    }
    Ok(())
}

/// The thread's current context, or NULL.
pub(crate) fn current_context(driver: &Driver) -> Result<CUcontext> {
    let mut current = ptr::null_mut();
    // SAFETY: the context is written to a live local variable.
    unsafe { driver.cuCtxGetCurrent(&mut current)? };
    Ok(current)
}

/// The thread's current context, for a call that names it. If there is none, `ctx` binds one and repeats the
/// call.
pub(crate) fn required_context(driver: &Driver) -> Result<CUcontext> {
    let current = current_context(driver)?;
    if current.is_null() { Err(Error::DEVICE_UNINITIALIZED) } else { Ok(current) }
}

fn default_device() -> c_int {
    match DEVICE.get() {
        UNSET => lock(&VALID).first().copied().unwrap_or(0),
        device => device,
    }
}

/// Makes a device's primary context current in this thread.
fn bind(driver: &'static Driver, device: c_int) -> Result {
    let context = primary(driver, device)?;
    // SAFETY: this library has retained the context.
    unsafe { driver.cuCtxSetCurrent(context) }
}

/// Retains and returns a device's primary context.
pub(crate) fn primary(driver: &'static Driver, device: c_int) -> Result<CUcontext> {
    let slot = usize::try_from(device).ok().and_then(|at| PRIMARY.get(at)).ok_or(Error::INVALID_DEVICE)?;
    if !slot.retained.load(Ordering::Acquire) {
        let _turn = lock(&CHANGING);
        if !slot.retained.load(Ordering::Acquire) {
            let mut context = ptr::null_mut();
            // SAFETY: the context is written to a live local variable; the driver checks the device.
            unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, handle(driver, device)?) }.map_err(
                |error| {
                    // After a kernel fault the driver reports the fault's own error instead of making a new
                    // context in this process.
                    if error.is_fault() { Error::DEVICES_UNAVAILABLE } else { error }
                },
            )?;
            slot.context.store(context, Ordering::Release);
            slot.retained.store(true, Ordering::Release);
        }
    }
    Ok(slot.context.load(Ordering::Acquire))
}

/// The driver's handle of a device ordinal.
///
/// # Errors
///
/// `cudaErrorInvalidDevice` if there is no such device.
pub(crate) fn handle(driver: &Driver, ordinal: c_int) -> Result<CUdevice> {
    let mut device = 0;
    // SAFETY: the handle is written to a live local variable.
    unsafe { driver.cuDeviceGet(&mut device, ordinal)? };
    Ok(device)
}

/// The number of devices. The driver is asked once, so a forked child still gets the answer although its
/// driver no longer works, as with NVIDIA's runtime.
pub(crate) fn device_count(driver: &Driver) -> Result<c_int> {
    static KNOWN: OnceLock<c_int> = OnceLock::new();
    if let Some(count) = KNOWN.get() {
        return Ok(*count);
    }
    let mut count = 0;
    // SAFETY: the count is written to a live local variable.
    unsafe { driver.cuDeviceGetCount(&mut count)? };
    if count > 0 { Ok(*KNOWN.get_or_init(|| count)) } else { Err(Error::NO_DEVICE) }
}

/// The device that the thread's calls use: that of its current context, else the one it chose, else the
/// default.
pub(crate) fn device(driver: &Driver) -> Result<c_int> {
    let mut device = 0;
    // SAFETY: the device is written to a live local variable.
    match unsafe { driver.cuCtxGetDevice(&mut device) } {
        Err(Error::DEVICE_UNINITIALIZED | Error::CONTEXT_IS_DESTROYED) => Ok(default_device()),
        result => result.map(|()| device),
    }
}

/// `cudaSetDevice`: chooses a device, initializes it and makes its primary context current.
pub(crate) fn set_device(driver: &'static Driver, device: c_int) -> Result {
    handle(driver, device)?;
    let generation = GENERATION.load(Ordering::Acquire);
    DEVICE.set(device);
    bind(driver, device)?;
    renew(driver)?;
    BOUND.set(generation);
    Ok(())
}

/// `cudaSetValidDevices`: the devices that threads start on if they choose none.
pub(crate) fn set_valid_devices(driver: &Driver, devices: &[c_int]) -> Result {
    for &device in devices {
        handle(driver, device)?;
    }
    *lock(&VALID) = devices.to_vec();
    Ok(())
}

/// The flags of a device's primary context.
pub(crate) fn flags(driver: &'static Driver, device: c_int) -> Result<c_uint> {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: both are written to live local variables.
    unsafe { driver.cuDevicePrimaryCtxGetState(handle(driver, device)?, &mut flags, &mut active)? };
    Ok(flags)
}

/// The flags of the thread's current context.
pub(crate) fn current_flags(driver: &Driver) -> Result<c_uint> {
    let mut flags = 0;
    // SAFETY: the flags are written to a live local variable.
    unsafe { driver.cuCtxGetFlags(&mut flags)? };
    Ok(flags)
}

/// `cudaDeviceReset`: destroys everything that the process has on the thread's device.
pub(crate) fn reset(driver: &'static Driver) -> Result {
    let device = device(driver)?;
    let slot = usize::try_from(device).ok().and_then(|at| PRIMARY.get(at)).ok_or(Error::INVALID_DEVICE)?;
    let device = handle(driver, device)?;
    let _turn = lock(&CHANGING);
    let mut primary = slot.context.load(Ordering::Acquire);
    let was_current = current_context(driver)? == primary;
    let was_retained = slot.retained.swap(false, Ordering::AcqRel);
    // SAFETY: the driver reported this device, and this library releases the context as often as it retained
    // it.
    unsafe {
        if was_current {
            driver.cuCtxSetCurrent(ptr::null_mut())?;
        }
        if was_retained {
            driver.cuDevicePrimaryCtxRelease_v2(device)?;
        }
        let refused = driver.cuDevicePrimaryCtxReset_v2(device).err();
        if let Some(error) = refused.filter(|error| *error == Error::NOT_PERMITTED) {
            // There are green contexts, and all is as it was.
            if was_retained {
                driver.cuDevicePrimaryCtxRetain(&mut primary, device)?;
                slot.retained.store(true, Ordering::Release);
            }
            if was_current {
                driver.cuCtxSetCurrent(primary)?;
            }
            return Err(error);
        }
        refused.map_or(Ok(()), Err)?;
    }
    GENERATION.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

/// Drops every retained context and this thread's choice, so that the next test starts afresh.
#[cfg(test)]
pub(crate) fn reset_for_test() {
    for slot in &PRIMARY {
        slot.context.store(ptr::null_mut(), Ordering::Release);
        slot.retained.store(false, Ordering::Release);
    }
    let before = GENERATION.fetch_add(1, Ordering::AcqRel);
    RENEWED.store(before + 1, Ordering::Release);
    DEVICE.set(UNSET);
    lock(&VALID).clear();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        cudaDeviceReset, cudaDeviceSynchronize, cudaGetDevice, cudaGetDeviceCount, cudaSetDevice,
    };
    use crate::fake_driver::{self, Fake};
    use crate::last_error::{cudaGetLastError, cudaPeekAtLastError};

    fn device_of_thread() -> c_int {
        let mut device = -1;
        // SAFETY: the output is a live local variable.
        assert_eq!(unsafe { cudaGetDevice((&mut device).into()) }, 0);
        device
    }

    fn synchronize() -> c_int {
        // SAFETY: the function takes nothing.
        unsafe { cudaDeviceSynchronize() }
    }

    fn set(device: c_int) -> c_int {
        // SAFETY: the function takes any number.
        unsafe { cudaSetDevice(device) }
    }

    #[test]
    fn the_first_call_binds_device_0_and_later_ones_do_not_ask_again() {
        let fake = Fake::new();
        assert_eq!(synchronize(), 0);
        assert_eq!(fake_driver::current(), fake_driver::primary(0));
        let asked = fake.count("cuCtxGetCurrent");
        assert_eq!(synchronize(), 0);
        assert_eq!(fake.count("cuDevicePrimaryCtxRetain"), 1);
        assert_eq!(fake.count("cuCtxGetCurrent"), asked);
    }

    #[test]
    fn counting_devices_creates_no_context() {
        let fake = Fake::new();
        let mut count = 0;
        // SAFETY: the output is a live local variable.
        assert_eq!(unsafe { cudaGetDeviceCount((&mut count).into()) }, 0);
        assert_eq!((count, fake.count("cuDevicePrimaryCtxRetain")), (2, 0));
    }

    #[test]
    fn an_invalid_ordinal_is_refused_and_changes_nothing() {
        let _fake = Fake::new();
        assert_eq!(set(1), 0);
        assert_eq!(set(7), 101);
        assert_eq!(cudaPeekAtLastError(), 101);
        assert_eq!(cudaGetLastError(), 101);
        assert_eq!(device_of_thread(), 1);
    }

    #[test]
    fn each_thread_has_its_own_device() {
        let _fake = Fake::new();
        assert_eq!(set(1), 0);
        std::thread::spawn(|| assert_eq!(device_of_thread(), 0)).join().unwrap();
        assert_eq!(device_of_thread(), 1);
    }

    #[test]
    fn a_context_made_current_by_the_program_is_used() {
        let fake = Fake::new();
        assert_eq!(set(0), 0);
        fake_driver::set_current(0x2001);
        assert_eq!(device_of_thread(), 1);
        let bound = fake.count("cuCtxSetCurrent");
        assert_eq!(synchronize(), 0);
        assert_eq!((fake_driver::current(), fake.count("cuCtxSetCurrent")), (0x2001, bound));
    }

    #[test]
    fn a_thread_left_without_a_context_is_bound_again() {
        let _fake = Fake::new();
        assert_eq!(set(1), 0);
        fake_driver::set_current(0);
        assert_eq!(synchronize(), 0);
        assert_eq!(fake_driver::current(), fake_driver::primary(1));
    }

    #[test]
    fn other_threads_retain_the_context_again_after_a_reset() {
        let fake = Fake::new();
        assert_eq!(synchronize(), 0);
        // SAFETY: the function takes nothing.
        std::thread::spawn(|| assert_eq!(unsafe { cudaDeviceReset() }, 0)).join().unwrap();
        assert_eq!(fake.with(|state| state.retained[&0]), 0);
        assert_eq!(synchronize(), 0);
        assert_eq!(fake.with(|state| state.retained[&0]), 1);
    }
}
