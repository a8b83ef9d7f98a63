//! Where `RGPU_STATS=1`, rgpu's libcuda counts what this library's functions lead to, if they tell it when they begin and end. Another libcuda does not know of it, and nothing is counted.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::Driver;
use crate::types::CUuuid;

/// libcuda's table: its size, `enter` and `leave`.
#[repr(C)]
pub(crate) struct Table {
    size: usize,
    enter: unsafe extern "C" fn(*const AtomicPtr<c_void>, *const c_char) -> u32,
    leave: unsafe extern "C" fn(),
}

const ID: &[u8; 16] = b"rgpu counts call";

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

/// A function, and what libcuda keeps for it.
pub(crate) struct Call {
    name: &'static CStr,
    known: AtomicPtr<c_void>,
}

impl Call {
    pub const fn new(name: &'static CStr) -> Self {
        Call { name, known: AtomicPtr::new(std::ptr::null_mut()) }
    }
}

/// The thread is inside a function until this is dropped.
pub(crate) struct Inside(&'static Table);

impl Drop for Inside {
    fn drop(&mut self) {
        // SAFETY: a function of a library that is never closed.
        unsafe { (self.0.leave)() }
    }
}

/// Asks a driver for its table, if somebody wants counts.
pub(crate) fn ask(driver: &Driver) {
    if std::env::var_os("RGPU_STATS").is_none_or(|value| value != "1") {
        return;
    }
    let mut table = std::ptr::null();
    // SAFETY: the table's address is written to a live local variable; the name has the 16 bytes that a `CUuuid` is.
    let found = unsafe { driver.cuGetExportTable(&mut table, ID.as_ptr().cast::<CUuuid>()) };
    // SAFETY: a driver that knows the name has such a table; the first word of every table is its size.
    let whole = unsafe { table.cast::<Table>().as_ref() }.is_some_and(|t| t.size == size_of::<Table>());
    if found.is_ok() && whole {
        TABLE.store(table.cast_mut().cast(), Ordering::Release);
    }
}

/// Says that this thread enters a function; `None` if nobody counts, or if another function of this library called it.
#[inline]
pub(crate) fn enter(call: &'static Call) -> Option<Inside> {
    // SAFETY: stored by `ask` alone; the library that has it is never closed.
    let table = unsafe { TABLE.load(Ordering::Acquire).as_ref() }?;
    // SAFETY: the place and the name live as long as this library.
    let counted = unsafe { (table.enter)(&call.known, call.name.as_ptr()) };
    (counted != 0).then_some(Inside(table))
}
