//! The linker.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::code::image::read_file;
use crate::code::jit_options::Jit;
use crate::code::linker;
use crate::code::linker::{IMAGE, LINKS, Link};
use crate::process::context;
use crate::process::driver::driver;
use client::handle::LinkId;
use client::ops::module::LinkCreate;
use client::{Status, lock};

pub(crate) unsafe fn create(
    count: u32,
    options: *const u32,
    values: *const *mut c_void,
    state: *mut usize,
) -> Result {
    static IDS: AtomicU32 = AtomicU32::new(1);
    non_null(state)?;
    let (driver, context) = context::ready()?;
    // SAFETY: as many as the program says.
    let jit = unsafe { Jit::parse(count, options, values) }?;
    let id = LinkId(IDS.fetch_add(1, Ordering::Relaxed));
    driver.session.call(&LinkCreate { context: context.id, link: id, options: jit.options.clone() })?;
    let link = Link { id, jit, image: Mutex::default() };
    let handle = LINKS.insert(Arc::new(link)).ok_or(Status::OUT_OF_MEMORY)?;
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(state, handle) }
}

pub(crate) unsafe fn complete(handle: usize, image: *mut *const c_void, size: *mut usize) -> Result {
    non_null(image)?;
    let (driver, link) = linker::of(handle)?;
    let mut kept = lock(&link.image);
    if kept.is_none() {
        let fetched = match linker::fetch(driver, &link, IMAGE) {
            Err(Ok(needed)) => linker::fetch(driver, &link, needed),
            other => other,
        };
        *kept = Some(fetched.map_err(|error| error.err().unwrap_or(Status::UNKNOWN))?);
    }
    let bytes = kept.as_deref().unwrap_or_default();
    // SAFETY: checked above not to be NULL; the program says that they may be written.
    unsafe {
        put(image, bytes.as_ptr().cast())?;
        if size.is_null() { Ok(()) } else { put(size, bytes.len()) }
    }
}

api! {
    fn cuLinkCreate_v2(count: u32, options: *const u32, values: *const *mut c_void, state: *mut usize) {
        create(count, options, values, state)
    }
    alias cuLinkCreate = cuLinkCreate_v2(count: u32, options: *const u32, values: *const *mut c_void, state: *mut usize);

    fn cuLinkAddData_v2(
        state: usize, kind: u32, data: *const u8, size: usize, name: *const c_char, count: u32, options: *const u32,
        values: *const *mut c_void
    ) {
        non_null(data)?;
        let jit = Jit::parse(count, options, values)?;
        let name = if name.is_null() { c"" } else { CStr::from_ptr(name) };
        linker::add(state, kind, std::slice::from_raw_parts(data, size), &name.to_string_lossy(), &jit)
    }
    alias cuLinkAddData = cuLinkAddData_v2(
        state: usize, kind: u32, data: *const u8, size: usize, name: *const c_char, count: u32, options: *const u32,
        values: *const *mut c_void
    );

    fn cuLinkAddFile_v2(
        state: usize, kind: u32, path: *const c_char, count: u32, options: *const u32, values: *const *mut c_void
    ) {
        non_null(path)?;
        let path = CStr::from_ptr(path);
        let jit = Jit::parse(count, options, values)?;
        // The file's own bytes; PTX gets its NUL from whoever reads it as text.
        let mut bytes = read_file(path)?;
        bytes.pop();
        linker::add(state, kind, &bytes, &path.to_string_lossy(), &jit)
    }
    alias cuLinkAddFile = cuLinkAddFile_v2(
        state: usize, kind: u32, path: *const c_char, count: u32, options: *const u32, values: *const *mut c_void
    );

    fn cuLinkComplete(state: usize, image: *mut *const c_void, size: *mut usize) {
        complete(state, image, size)
    }

    fn cuLinkDestroy(state: usize) {
        driver()?;
        LINKS.remove(state).map(drop).ok_or(Status::INVALID_HANDLE)
    }
}
