//! With `RGPU_STATS=1`, rgpu's libcuda counts the operations that each of this library's functions causes,
//! and with `RGPU_TRACE` it shows their calls in a timeline, if told when a function begins and ends; and it
//! passes that on to a profiler (libcupti), which may come at any time. A flag of libcuda's says whether it
//! wants to be told. No other libcuda has this table, so with those nothing is counted.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::driver::Driver;
use crate::types::CUuuid;

/// libcuda's table: its size, and functions.
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
    leave: unsafe extern "C" fn(u32),
    wanted: unsafe extern "C" fn() -> *const AtomicBool,
}

/// Names the kernel that a call launches: takes the name and the arguments of the function. NULL if it
/// launches none.
pub(crate) type KernelOf = unsafe extern "C" fn(*const c_char, *const c_void) -> *const c_char;

const ID: &[u8; 16] = b"rgpu counts call";

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// libcuda's flag: whether it wants to be told of calls.
static WANTED: AtomicPtr<AtomicBool> = AtomicPtr::new(std::ptr::null_mut());

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

/// A call of one of this library's functions, from its beginning to its end. `A` is a structure of the
/// function's arguments, with C's layout, which is kept for a profiler.
pub(crate) struct Inside<A> {
    call: &'static Call,
    /// Who was told that the call began.
    told: Cell<Option<&'static Table>>,
    arguments: UnsafeCell<MaybeUninit<A>>,
}

impl<A> Inside<A> {
    #[inline]
    pub fn new(call: &'static Call) -> Self {
        Inside { call, told: Cell::new(None), arguments: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Tells libcuda that this thread enters the function, unless it was told already, or nothing is counted,
    /// or another function of this library made the call.
    #[inline]
    pub fn enter(&self, arguments: impl FnOnce() -> A) {
        // SAFETY: `connect` alone stores the addresses, of a flag and a table in a library that is never
        // closed.
        let table = unsafe {
            match WANTED.load(Ordering::Acquire).as_ref() {
                Some(wanted) if wanted.load(Ordering::Relaxed) => TABLE.load(Ordering::Acquire).as_ref(),
                _ => None,
            }
        };
        if let Some(table) = table
            && self.told.get().is_none()
        {
            self.enter_counted(table, arguments());
        }
    }

    #[cold]
    fn enter_counted(&self, table: &'static Table, arguments: A) {
        let version = if cfg!(feature = "v12") { 12 } else { 13 };
        let Call { name, kernel, known } = self.call;
        // SAFETY: nobody else has a reference to the place: it is written once before it is told, and only
        // read from then on. The word and the name live as long as this library, and the arguments until
        // `leave`, which takes this.
        let told = unsafe {
            (*self.arguments.get()).write(arguments);
            (table.enter)(known, name.as_ptr(), self.arguments.get().cast(), *kernel, version)
        };
        if told != 0 {
            self.told.set(Some(table));
        }
    }

    /// Tells libcuda that this thread leaves the function, which returns `status`.
    #[inline]
    pub fn leave(self, status: c_int) {
        if let Some(table) = self.told.take() {
            // SAFETY: the table belongs to a library that is never closed.
            unsafe { (table.leave)(status.cast_unsigned()) }
        }
    }
}

/// Gets the driver's table, if it has one.
pub(crate) fn connect(driver: &Driver) {
    let mut table = std::ptr::null();
    // SAFETY: the table's address is written to a live local variable; the name has the 16 bytes of a
    // `CUuuid`.
    let found = unsafe { driver.cuGetExportTable(&mut table, ID.as_ptr().cast::<CUuuid>()) };
    // SAFETY: a driver that knows this ID returns its table or NULL; the first word of every export table is
    // its size.
    let whole = unsafe { table.cast::<Table>().as_ref() }.filter(|table| table.size == size_of::<Table>());
    if let (true, Some(whole)) = (found.is_ok(), whole) {
        TABLE.store(std::ptr::from_ref(whole).cast_mut(), Ordering::Release);
        // SAFETY: takes nothing.
        WANTED.store(unsafe { (whole.wanted)() }.cast_mut(), Ordering::Release);
    }
}
