//! The driver: finds and opens `libcuda.so.1` once and keeps its functions in a table.
//!
//! A libcuda that the process has already loaded is used, since the program shares handles with it. Otherwise
//! it is looked for beside this library, so that rgpu's two libraries stay together wherever they are
//! installed, and then by the loader's own rules. Nothing here depends on which libcuda it is.

mod table;

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, Once, PoisonError};

pub(crate) use table::Driver;

use crate::error::{Error, Result};
use crate::{call_counts, properties};

/// Which stream a NULL stream means. Entry points with `_ptsz` or `_ptds` in their names mean the per-thread
/// default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultStream {
    Legacy,
    PerThread,
}

/// The CUDA version whose ABI this library has, in `cudaRuntimeGetVersion`'s notation.
pub(crate) const RUNTIME_VERSION: c_int = if cfg!(feature = "v12") { 12080 } else { 13000 };

static CURRENT: AtomicPtr<Driver> = AtomicPtr::new(ptr::null_mut());

/// The driver, opened and initialized. A failure is retried at the next call.
///
/// # Errors
///
/// `cudaErrorInsufficientDriver` without a libcuda, or with one older than this library's major version;
/// otherwise the error of `cuInit` (`cudaErrorNoDevice` if there is no GPU).
#[inline]
pub(crate) fn initialized() -> Result<&'static Driver> {
    let driver = CURRENT.load(Ordering::Acquire);
    if driver.is_null() {
        return open();
    }
    // SAFETY: `publish` stores a complete table, which is never freed.
    Ok(unsafe { &*driver })
}

#[cold]
fn open() -> Result<&'static Driver> {
    static OPENING: Mutex<()> = Mutex::new(());
    let _turn = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = CURRENT.load(Ordering::Acquire);
    if !driver.is_null() {
        // SAFETY: `publish` stores a complete table, which is never freed.
        return Ok(unsafe { &*driver });
    }
    let driver = load()?;
    let mut version: c_int = 0;
    // SAFETY: `cuInit` takes no pointer; the version is written to a live local variable.
    unsafe {
        driver.cuInit(0)?;
        driver.cuDriverGetVersion(&mut version)?;
    }
    if version / 1000 < RUNTIME_VERSION / 1000 {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::error(format_args!(
                "libcudart: libcuda.so.1 supports CUDA {}.{}; this library needs {} or newer",
                version / 1000,
                version % 1000 / 10,
                RUNTIME_VERSION / 1000
            ));
        });
        return Err(Error::INSUFFICIENT_DRIVER);
    }
    properties::read_all(&driver);
    call_counts::connect(&driver);
    Ok(publish(driver))
}

/// Makes a table the process's driver for good.
fn publish(driver: Box<Driver>) -> &'static Driver {
    let driver = Box::leak(driver);
    CURRENT.store(driver, Ordering::Release);
    driver
}

/// Makes a fake table the process's driver.
#[cfg(test)]
pub(crate) fn install(driver: Driver) -> &'static Driver {
    publish(Box::new(driver))
}

/// The driver's version, even if `cuInit` fails; 0 without a libcuda, as for `cudaDriverGetVersion`.
pub(crate) fn version() -> Result<c_int> {
    let mut version: c_int = 0;
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: `publish` stores a complete table, which is never freed; the version is written to a live local
    // variable.
    unsafe {
        if let Some(driver) = current.as_ref() {
            driver.cuDriverGetVersion(&mut version)?;
        } else if let Ok(driver) = load() {
            driver.cuDriverGetVersion(&mut version)?;
        }
    }
    Ok(version)
}

/// Opens libcuda and fills a table without calling any function.
fn load() -> Result<Box<Driver>> {
    let library = dlopen_driver().ok_or(Error::INSUFFICIENT_DRIVER)?;
    Ok(Box::new(Driver::resolve(|name| {
        // SAFETY: `dlopen` returned the handle, which is never closed; the name ends with NUL.
        unsafe { libc::dlsym(library, name.as_ptr()) }
    })))
}

fn dlopen_driver() -> Option<*mut c_void> {
    let beside = own_path().and_then(|own| {
        let path = Path::new(OsStr::from_bytes(own.to_bytes())).parent()?.join("libcuda.so.1");
        CString::new(path.as_os_str().as_bytes()).ok()
    });
    let open = |path: &CStr, how: c_int| {
        // SAFETY: the path ends with NUL. Opening the library runs its initializers, which is intended.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | how) };
        (!handle.is_null())
            .then(|| log::debug(format_args!("libcudart: the driver is {}", path.to_string_lossy())))
            .map(|()| handle)
    };
    let found = open(c"libcuda.so.1", libc::RTLD_NOLOAD)
        .or_else(|| beside.as_deref().and_then(|path| open(path, 0)))
        .or_else(|| open(c"libcuda.so.1", 0));
    if found.is_none() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::error(format_args!(
                "libcudart: no libcuda.so.1 beside {} and none on the loader's path: install rgpu's guest libraries, \
                 or add their folder to LD_LIBRARY_PATH",
                own_path().map_or("this library".into(), |path| path.to_string_lossy())
            ));
        });
    }
    found
}

/// The path of the file that contains this code.
fn own_path() -> Option<&'static CStr> {
    // SAFETY: a `Dl_info` is plain data of pointers, for which zero is valid; `dladdr` only fills it in. The
    // name belongs to the loader and lives as long as the library, and so as long as this code can run.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let here = own_path as fn() -> Option<&'static CStr> as *const c_void;
        if libc::dladdr(here, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(CStr::from_ptr(info.dli_fname))
    }
}

/// The result of calling a function that this libcuda does not have. Each one is logged once.
#[cold]
fn missing(name: &str, logged: &AtomicBool) -> Result {
    if !logged.swap(true, Ordering::Relaxed) {
        log::warn(format_args!(
            "libcudart: libcuda.so.1 has no {name}: calls that need it answer cudaErrorNotSupported"
        ));
    }
    Err(Error::NOT_SUPPORTED)
}

/// Declares the table: `plain` functions, and `streamed` ones, which have a variant for the per-thread
/// default stream.
macro_rules! driver_table {
    (
        plain { $($name:ident($($arg:ident: $ty:ty),*);)* }
        streamed { $($sname:ident/$pt:literal($($sarg:ident: $sty:ty),*);)* }
    ) => {
        /// The driver's functions by symbol name; `None` for those that a libcuda lacks.
        ///
        /// Each has a method of the same name, which is unsafe for the reasons that the C function is.
        #[derive(Clone)]
        pub(crate) struct Driver {
            $(pub(crate) $name: Option<unsafe extern "C" fn($($ty),*) -> u32>,)*
            $(pub(crate) $sname: [Option<unsafe extern "C" fn($($sty),*) -> u32>; 2],)*
        }

        #[allow(dead_code, reason = "each version of the runtime API uses its own part of the driver's")]
        impl Driver {
            /// Fills a table with the address that `find` returns for each symbol; NULL if there is none.
            pub(crate) fn resolve(find: impl Fn(&CStr) -> *mut c_void) -> Self {
                let find = |name: &str| {
                    CStr::from_bytes_with_nul(name.as_bytes()).map_or(ptr::null_mut(), &find)
                };
                // SAFETY: NULL becomes `None`; any other address is that of the C function of this name,
                // whose signature in cuda.h is the one in this table.
                unsafe {
                    Driver {
                        $($name: std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($ty),*) -> u32>>(
                            find(concat!(stringify!($name), "\0"))),)*
                        $($sname: [
                            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($sty),*) -> u32>>(
                                find(concat!(stringify!($sname), "\0"))),
                            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($sty),*) -> u32>>(
                                find(concat!($pt, "\0"))),
                        ],)*
                    }
                }
            }

            $(
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "these are CUDA's signatures")]
                pub(crate) unsafe fn $name(&self $(, $arg: $ty)*) -> Result {
                    static SAID: AtomicBool = AtomicBool::new(false);
                    match self.$name {
                        // SAFETY: the caller upholds the C function's requirements.
                        Some(function) => from_driver(unsafe { function($($arg),*) }),
                        None => missing(stringify!($name), &SAID),
                    }
                }
            )*
            $(
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "these are CUDA's signatures")]
                pub(crate) unsafe fn $sname(&self, default: DefaultStream $(, $sarg: $sty)*) -> Result {
                    static SAID: AtomicBool = AtomicBool::new(false);
                    match self.$sname[default as usize] {
                        // SAFETY: the caller upholds the C function's requirements.
                        Some(function) => from_driver(unsafe { function($($sarg),*) }),
                        None => missing(if default == DefaultStream::Legacy { stringify!($sname) } else { $pt }, &SAID),
                    }
                }
            )*
        }
    };
}
use driver_table;
