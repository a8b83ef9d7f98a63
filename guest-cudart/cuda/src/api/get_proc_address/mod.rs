//! `cuGetProcAddress`: how other libraries look up functions.
//!
//! A name refers to several functions, each from some CUDA version on and possibly with a form for the
//! per-thread default stream. `entry_table` lists them all.

use std::ffi::c_void;

use crate::abi::arguments::{Out, Text};
use crate::abi::result::Result;
use crate::api::get_proc_address::table::ENTRIES;
use crate::process::driver::API_VERSION;
use client::Status;

/// One function: the requested name, the first version for which the name means it, its address, and the
/// address of its form for the per-thread default stream.
struct Entry {
    name: &'static str,
    version: i32,
    function: *const c_void,
    per_thread: *const c_void,
}

// SAFETY: the addresses are of functions.
unsafe impl Sync for Entry {}

macro_rules! entries {
    ($($name:ident $version:literal $symbol:ident $($per_thread:ident)?;)*) => {
        use super::Entry;

        pub(crate) mod symbols {
            unsafe extern "C" {
                $(pub fn $symbol();)*
                $($(pub fn $per_thread();)?)*
            }
        }

        pub(crate) static ENTRIES: &[Entry] = &[$(Entry {
            name: stringify!($name),
            version: $version,
            function: symbols::$symbol as *const std::ffi::c_void,
            per_thread: entries!(@address $($per_thread)?),
        }),*];
    };
    (@address) => { std::ptr::null() };
    (@address $symbol:ident) => { symbols::$symbol as *const std::ffi::c_void };
}

mod table;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`. 1 is the legacy stream; 0 is the default, which is the
/// same.
const PER_THREAD: u64 = 2;
/// The first version that has such forms.
const PER_THREAD_SINCE: i32 = 7000;

/// `CUdriverProcAddressQueryResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Query {
    Success = 0,
    Missing = 1,
    VersionNotSufficient = 2,
}

/// The newest function of this name that is no newer than `version`. If the per-thread form is requested for
/// a version before there were such forms, a name that has one is not found, not even as an older function
/// without one.
fn find(name: &str, version: i32, flags: u64) -> (*const c_void, Query) {
    let first = ENTRIES.partition_point(|entry| entry.name < name);
    let forms = || ENTRIES[first..].iter().take_while(|entry| entry.name == name);
    if forms().next().is_none() {
        return (std::ptr::null(), Query::Missing);
    }
    let per_thread = flags & PER_THREAD != 0 && forms().any(|entry| !entry.per_thread.is_null());
    match forms().take_while(|entry| entry.version <= version).last() {
        Some(entry) if !per_thread => (entry.function, Query::Success),
        Some(entry) if version >= PER_THREAD_SINCE => {
            let address = if entry.per_thread.is_null() { entry.function } else { entry.per_thread };
            (address, Query::Success)
        }
        _ => (std::ptr::null(), Query::VersionNotSufficient),
    }
}

fn get(symbol: Text, pfn: Out<*const c_void>, version: i32, flags: u64) -> Result<Query> {
    symbol.required()?;
    pfn.required()?;
    if version > crate::process::driver::driver().map_or(API_VERSION, |driver| driver.version)
        || flags & !3 != 0
    {
        return Err(Status::INVALID_VALUE);
    }
    let name = symbol.get()?.to_str().unwrap_or("");
    let (address, found) = find(name, version, flags);
    if found != Query::Success {
        client::log::debug(format_args!("cuGetProcAddress: {name:?} of version {version}: {found:?}"));
    }
    pfn.put(address)?;
    Ok(found)
}

api! {
    fn cuGetProcAddress_v2 / cuGetProcAddress_v2_ptsz(
        symbol: Text, pfn: Out<*const c_void>, version: i32, flags: u64, status: Out<u32>
    ) |pt| {
        let flags = if flags == 0 && pt { PER_THREAD } else { flags };
        let found = get(symbol, pfn, version, flags)?;
        status.put_if_wanted(found as u32);
        Ok(())
    }

    fn cuGetProcAddress(symbol: Text, pfn: Out<*const c_void>, version: i32, flags: u64) {
        match get(symbol, pfn, version, flags)? {
            Query::Success => Ok(()),
            _ => Err(Status::NOT_FOUND),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::table::symbols;
    use super::*;

    #[test]
    fn entries_are_in_order() {
        assert!(ENTRIES.windows(2).all(|w| (w[0].name, w[0].version) < (w[1].name, w[1].version)));
    }

    #[test]
    fn the_version_chooses_the_form() {
        let at = |name, version, flags| find(name, version, flags).0;
        assert_eq!(at("cuMemAlloc", 12000, 0), symbols::cuMemAlloc_v2 as *const c_void);
        assert_eq!(at("cuMemAlloc", 2000, 0), symbols::cuMemAlloc as *const c_void);
        assert_eq!(at("cuCtxCreate", 11040, 0), symbols::cuCtxCreate_v3 as *const c_void);
        assert_eq!(at("cuCtxCreate", 13000, 0), symbols::cuCtxCreate_v4 as *const c_void);
        assert_eq!(at("cuMemcpyHtoD", 13000, 2), symbols::cuMemcpyHtoD_v2_ptds as *const c_void);
        assert_eq!(at("cuLaunchKernel", 12000, 2), symbols::cuLaunchKernel_ptsz as *const c_void);
        assert_eq!(at("cuMemAlloc", 13000, 2), symbols::cuMemAlloc_v2 as *const c_void);
    }

    #[test]
    fn unknown_names_differ_from_functions_that_are_too_new() {
        assert_eq!(find("cuLibraryGetKernel", 11000, 0).1, Query::VersionNotSufficient);
        assert_eq!(find("cuLaunchKernel", 4000, 2).1, Query::VersionNotSufficient);
        assert_eq!(find("cuLaunchKernel", 4000, 0).1, Query::Success);
        assert_eq!(find("cuMemAlloc", 4000, 2).1, Query::Success);
        for version in [2000, 3020, 4000] {
            assert_eq!(find("cuMemcpyHtoD", version, 2), (std::ptr::null(), Query::VersionNotSufficient));
        }
        assert_eq!(find("cuNoSuchThing", 13000, 0).1, Query::Missing);
        assert_eq!(find("", 13000, 0).1, Query::Missing);
    }
}
