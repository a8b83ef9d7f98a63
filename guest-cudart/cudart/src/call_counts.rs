//! With `RGPU_STATS=1`, rgpu's libcuda counts the operations that each of this library's functions causes,
//! and with `RGPU_TRACE` it shows their calls in a timeline, if told when a function begins and ends; and it
//! passes that on to a profiler (libcupti). No other libcuda has this table, so with those nothing is
//! counted.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::Driver;
use crate::types::CUuuid;

/// libcuda's table: its size, and the functions `enter` and `leave`.
#[repr(C)]
pub(crate) struct Table {
    size: usize,
    enter: unsafe extern "C" fn(
        *const AtomicPtr<c_void>,
        *const c_char,
        *const c_void,
        Option<KernelOf>,
        u32,
    ) -> u32,
    leave: unsafe extern "C" fn(),
}

/// Names the kernel that a call launches: takes the name and the arguments of the function. NULL if it
/// launches none.
pub(crate) type KernelOf = unsafe extern "C" fn(*const c_char, *const c_void) -> *const c_char;

const ID: &[u8; 16] = b"rgpu counts call";

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

/// One exported function, and the word that libcuda keeps for it.
pub(crate) struct Call {
    name: &'static CStr,
    kernel: Option<KernelOf>,
    known: AtomicPtr<c_void>,
}

impl Call {
    pub const fn new(name: &'static CStr, kernel: Option<KernelOf>) -> Self {
        Call { name, kernel, known: AtomicPtr::new(std::ptr::null_mut()) }
    }
}

/// Marks the thread as inside a function until dropped.
pub(crate) struct Inside<'a> {
    table: &'static Table,
    /// The function's arguments.
    arguments: PhantomData<&'a ()>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // SAFETY: the table belongs to a library that is never closed.
        unsafe { (self.table.leave)() }
    }
}

/// Whether the program has loaded a libcupti, and so may want to know of its calls.
fn has_profiler() -> bool {
    // SAFETY: a name that ends with NUL. Nothing is loaded that is not there, and what is there stays.
    unsafe { !libc::dlopen(c"libcupti.so.13".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD).is_null() }
}

/// Gets the driver's table if counts are wanted, or a profiler may want to know of calls.
pub(crate) fn connect(driver: &Driver) {
    let counts = std::env::var_os("RGPU_STATS").is_some_and(|value| value == "1");
    if !counts && std::env::var_os("RGPU_TRACE").is_none_or(|folder| folder.is_empty()) && !has_profiler() {
        return;
    }
    let mut table = std::ptr::null();
    // SAFETY: the table's address is written to a live local variable; the name has the 16 bytes of a
    // `CUuuid`.
    let found = unsafe { driver.cuGetExportTable(&mut table, ID.as_ptr().cast::<CUuuid>()) };
    // SAFETY: a driver that knows this ID returns its table or NULL; the first word of every export table is
    // its size.
    let whole = unsafe { table.cast::<Table>().as_ref() }.is_some_and(|t| t.size == size_of::<Table>());
    if found.is_ok() && whole {
        TABLE.store(table.cast_mut().cast(), Ordering::Release);
    }
}

/// Tells libcuda that this thread enters a function. Returns `None` if nothing is counted or if another
/// function of this library made the call. `arguments` makes a structure of the function's arguments, with
/// C's layout, which is kept in `place` for a profiler.
#[inline]
pub(crate) fn enter<'a, A>(
    call: &'static Call,
    place: &'a mut MaybeUninit<A>,
    arguments: impl FnOnce() -> A,
) -> Option<Inside<'a>> {
    // SAFETY: `connect` alone stores the address, of a table in a library that is never closed.
    let table = unsafe { TABLE.load(Ordering::Acquire).as_ref() }?;
    enter_counted(table, call, std::ptr::from_mut(place.write(arguments())).cast())
}

#[cold]
fn enter_counted<'a>(
    table: &'static Table,
    call: &'static Call,
    arguments: *const c_void,
) -> Option<Inside<'a>> {
    let version = if cfg!(feature = "v12") { 12 } else { 13 };
    // SAFETY: the word and the name live as long as this library, and `enter` keeps the arguments borrowed as
    // long as the result lives.
    let counted = unsafe { (table.enter)(&call.known, call.name.as_ptr(), arguments, call.kernel, version) };
    (counted != 0).then_some(Inside { table, arguments: PhantomData })
}
