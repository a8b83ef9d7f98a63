//! The linker.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::arguments::{Array, Count, Out, Text};
use crate::abi::result::Result;
use crate::code::image::read_file;
use crate::code::jit_options::Jit;
use crate::code::linker::{self, IMAGE, LINKS, Link};
use crate::process::context;
use crate::process::driver::driver;
use client::handle::LinkId;
use client::ops::module::LinkCreate;
use client::{Status, lock};

pub(crate) unsafe fn create(
    count: u32,
    options: *const u32,
    values: *const *mut c_void,
    state: Out<usize>,
) -> Result {
    static IDS: AtomicU32 = AtomicU32::new(1);
    state.required()?;
    let (_, context) = context::ready()?;
    // SAFETY: the program passes `count` options.
    let jit = unsafe { Jit::parse(count, options, values) }?;
    let id = LinkId(IDS.fetch_add(1, Ordering::Relaxed));
    context.session().call(&LinkCreate { context: context.id, link: id, options: jit.options.clone() })?;
    let link = Link { id, session: context.session(), jit, image: Mutex::default() };
    let handle = LINKS.insert(Arc::new(link)).ok_or(Status::OUT_OF_MEMORY)?;
    state.put(handle)
}

fn complete(handle: usize, image: Out<*const c_void>, size: Out<usize>) -> Result {
    image.required()?;
    let link = linker::of(handle)?;
    let mut kept = lock(&link.image);
    if kept.is_none() {
        let fetched = match linker::fetch(&link, IMAGE) {
            Err(Ok(needed)) => linker::fetch(&link, needed),
            other => other,
        };
        *kept = Some(fetched.map_err(|error| error.err().unwrap_or(Status::UNKNOWN))?);
    }
    let bytes = kept.as_deref().unwrap_or_default();
    image.put(bytes.as_ptr().cast())?;
    size.put_if_wanted(bytes.len());
    Ok(())
}

api! {
    unsafe fn cuLinkCreate_v2(count: u32, options: *const u32, values: *const *mut c_void, state: Out<usize>) {
        // SAFETY: the program passes `count` options, by CUDA's manual.
        unsafe { create(count, options, values, state) }
    }
    alias cuLinkCreate = cuLinkCreate_v2(count: u32, options: *const u32, values: *const *mut c_void, state: Out<usize>);

    unsafe fn cuLinkAddData_v2(
        state: usize, kind: u32, data: Array<u8>, size: Count, name: Text, count: u32, options: *const u32,
        values: *const *mut c_void
    ) {
        data.required()?;
        // SAFETY: the program passes `count` options, by CUDA's manual.
        let jit = unsafe { Jit::parse(count, options, values) }?;
        linker::add(state, kind, data.entries(size)?, &name.or_empty().to_string_lossy(), &jit)
    }
    alias cuLinkAddData = cuLinkAddData_v2(
        state: usize, kind: u32, data: Array<u8>, size: Count, name: Text, count: u32, options: *const u32,
        values: *const *mut c_void
    );

    unsafe fn cuLinkAddFile_v2(
        state: usize, kind: u32, path: Text, count: u32, options: *const u32, values: *const *mut c_void
    ) {
        let path = path.get()?;
        // SAFETY: the program passes `count` options, by CUDA's manual.
        let jit = unsafe { Jit::parse(count, options, values) }?;
        // The file's own bytes; whoever reads PTX as text adds the NUL.
        let mut bytes = read_file(path)?;
        bytes.pop();
        linker::add(state, kind, &bytes, &path.to_string_lossy(), &jit)
    }
    alias cuLinkAddFile = cuLinkAddFile_v2(
        state: usize, kind: u32, path: Text, count: u32, options: *const u32, values: *const *mut c_void
    );

    fn cuLinkComplete(state: usize, image: Out<*const c_void>, size: Out<usize>) {
        complete(state, image, size)
    }

    fn cuLinkDestroy(state: usize) {
        driver()?;
        LINKS.remove(state).map(drop).ok_or(Status::INVALID_HANDLE)
    }
}
