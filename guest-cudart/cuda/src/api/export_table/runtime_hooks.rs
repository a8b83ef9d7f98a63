//! The table by which NVIDIA's runtime, as a library or inside a program, tells of its functions' calls.
//! NVIDIA's CUPTI hears of them in this way; here rgpu's libcupti does.
//!
//! The runtime asks once for an array of flags, one for each function by its number in CUPTI's
//! `cupti_runtime_cbid.h`. It calls [`called`] at the beginning and the end of each function whose flag was
//! set at its beginning. NVIDIA documents none of this; it is the same in the runtimes of CUDA 12.0 to 13.5.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::{Slot, Table, table};
use crate::abi::arguments::put;
use client::counters::{self, Call, RuntimeCall};

/// Flags, and so functions. The runtime of CUDA 13.0 has 523.
const FLAGS: usize = 1024;
/// Words of another array, which the runtime fills and reads by itself, and how many it is told of.
const WORDS: usize = 16;
const TOLD_WORDS: usize = 14;

static WANTED: [AtomicU32; FLAGS] = [const { AtomicU32::new(0) }; FLAGS];
static OTHERS: [AtomicPtr<c_void>; WORDS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; WORDS];
/// What is kept for each function.
static CALLS: [AtomicPtr<Call>; FLAGS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; FLAGS];

/// What the runtime tells of a call.
#[repr(C)]
struct Told {
    /// Bytes of this structure.
    size: u32,
    _context: [u64; 3],
    _correlation_data: *mut u64,
    /// What the function returns, once it has ended: a `cudaError_t`.
    result: *const u32,
    /// The function's name.
    name: *const c_char,
    /// Its arguments, laid out as the structure `…_params` in NVIDIA's headers.
    arguments: *const c_void,
    _handles: [usize; 2],
    _number: u32,
    /// 0 at the function's beginning, 1 at its end.
    at_end: u32,
    /// The name of the kernel that it launches; NULL if it launches none.
    kernel: *const c_char,
    _rest: [usize; 3],
}

/// The size of [`Told`] in all runtimes that were looked at.
const SIZE: usize = 120;
const _: () = assert!(size_of::<Told>() == SIZE);

thread_local! {
    /// How many functions of the runtime this thread is in, by what it has told.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether libcuda was told that the thread has entered the outermost one.
    static ENTERED: Cell<bool> = const { Cell::new(false) };
    /// The name of the kernel that it launches.
    static KERNEL: Cell<*const c_char> = const { Cell::new(std::ptr::null()) };
}

/// Sets whether the runtime tells of its calls from now on.
pub(super) fn want(wanted: bool) {
    WANTED.iter().for_each(|flag| flag.store(wanted.into(), Ordering::Relaxed));
}

unsafe extern "C" fn flags(ptr: *mut *mut c_void, size: *mut usize) {
    // SAFETY: the caller passes two writable places.
    unsafe {
        let _ = put(ptr, WANTED.as_ptr().cast_mut().cast());
        let _ = put(size, FLAGS);
    }
}

unsafe extern "C" fn words(ptr: *mut *mut c_void, size: *mut usize) {
    // SAFETY: the caller passes two writable places.
    unsafe {
        let _ = put(ptr, OTHERS.as_ptr().cast_mut().cast());
        let _ = put(size, TOLD_WORDS);
    }
}

unsafe extern "C" fn kernel_of(_name: *const c_char, _arguments: *const c_void) -> *const c_char {
    KERNEL.try_with(Cell::get).unwrap_or(std::ptr::null())
}

/// A function of the runtime begins or ends.
unsafe extern "C" fn called(number: u32, told: *const Told) {
    // SAFETY: the runtime passes a structure that stays until this returns, which begins with its size.
    let told = unsafe {
        if told.is_null() || ((*told).size as usize) < SIZE {
            return;
        }
        &*told
    };
    let Some(known) = CALLS.get(number as usize).filter(|_| !told.name.is_null()) else { return };
    let Ok(depth) = DEPTH.try_with(Cell::get) else { return };
    if told.at_end == 0 {
        let _ = DEPTH.try_with(|kept| kept.set(depth + 1));
        if depth == 0 {
            let _ = KERNEL.try_with(|kernel| kernel.set(told.kernel));
            // SAFETY: the runtime passes a name that ends with NUL, and arguments that stay until it tells
            // that the function ends.
            let entered = unsafe {
                let (name, arguments) = (CStr::from_ptr(told.name), told.arguments);
                // The number names the function without the version.
                let (kernel, version) = (Some(kernel_of as client::activity::KernelOf), 13);
                counters::enter_runtime(&RuntimeCall { known, name, arguments, kernel, version, number })
            };
            let _ = ENTERED.try_with(|kept| kept.set(entered));
        }
        return;
    }
    let _ = DEPTH.try_with(|kept| kept.set(depth.saturating_sub(1)));
    if depth == 1 && ENTERED.try_with(Cell::take).unwrap_or(false) {
        // SAFETY: NULL, or the runtime's own place for what the function returns.
        counters::leave_runtime(unsafe { told.result.as_ref() }.copied().unwrap_or(0));
        let _ = KERNEL.try_with(|kernel| kernel.set(std::ptr::null()));
    }
}

pub(super) static HOOKS: Table<7> = table(&[(1, called as Slot), (2, flags as Slot), (6, words as Slot)]);

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the thread is after the runtime has told that a function begins or ends.
    fn tell(number: u32, size: usize, at_end: u32) -> u32 {
        let nothing = std::ptr::null();
        let told = Told {
            size: size as u32,
            _context: [0; 3],
            _correlation_data: std::ptr::null_mut(),
            result: &0,
            name: c"cudaMemset".as_ptr(),
            arguments: nothing,
            _handles: [0; 2],
            _number: number,
            at_end,
            kernel: nothing.cast(),
            _rest: [0; 3],
        };
        // SAFETY: a whole structure, whatever size it names.
        unsafe { called(number, &told) };
        DEPTH.get()
    }

    #[test]
    fn what_a_runtime_tells_in_an_unknown_form_is_left_alone() {
        // SAFETY: this is refused.
        unsafe { called(49, std::ptr::null()) };
        assert_eq!((tell(49, SIZE - 8, 0), tell(FLAGS as u32, SIZE, 0)), (0, 0));
        assert_eq!((tell(49, SIZE, 1), ENTERED.get()), (0, false), "an end without a beginning");
        assert_eq!((tell(49, SIZE, 0), tell(50, SIZE + 8, 0)), (1, 2));
        assert_eq!((tell(50, SIZE + 8, 1), tell(49, SIZE, 1)), (1, 0));
    }
}
