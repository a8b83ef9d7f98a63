//! The driver's linker: its inputs go to the server as they are added, and the image comes back when it is done.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::code::module::{Jit, Staging, read_file};
use crate::process::context;
use crate::process::driver::{Driver, driver};
use crate::work::copy;
use client::data::{HostIn, HostOut};
use client::handle::LinkId;
use client::handles::Slab;
use client::ops::module::{LinkAdd, LinkComplete, LinkCreate, LinkDestroy, jit_input};
use client::{Status, lock};

/// Inputs up to this many bytes go inside the record.
const INLINE: usize = 24 << 10;

/// Room for an image that is asked for at first.
const IMAGE: usize = 256 << 10;

/// Bytes of an input's name that go along.
const NAME: usize = 200;

/// A linker at work.
struct Link {
    id: LinkId,
    /// The program's options, with its buffers for messages, which it keeps as long as the linker.
    jit: Jit,
    /// The image, which the program may read as long as the linker is there.
    image: Mutex<Option<Box<[u8]>>>,
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            // A lost session has none.
            let _ = driver.session.append(&LinkDestroy { link: self.id });
        }
    }
}

static LINKS: Slab<Link> = Slab::new(17);

fn of(handle: usize) -> Result<(&'static Driver, Arc<Link>)> {
    let driver = driver()?;
    Ok((driver, LINKS.get(handle).ok_or(Status::INVALID_HANDLE)?))
}

unsafe fn create(count: u32, options: *const u32, values: *const *mut c_void, state: *mut usize) -> Result {
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

/// The beginning of a name.
fn cut(name: &str) -> &str {
    &name[..name.floor_char_boundary(NAME)]
}

fn add(handle: usize, kind: u32, data: &[u8], name: &str, jit: &Jit) -> Result {
    let (driver, link) = of(handle)?;
    if kind > jit_input::LAST || data.is_empty() || lock(&link.image).is_some() {
        return Err(Status::INVALID_VALUE);
    }
    let staged = if data.len() <= INLINE {
        None
    } else {
        let staging = Staging::new(driver, data.len())?;
        // SAFETY: the staging has room for as many bytes, and is nobody else's.
        unsafe { copy::move_bytes(data.as_ptr(), staging.ptr(), data.len()) };
        Some(staging)
    };
    let bytes =
        staged.as_ref().map_or(HostIn::Inline(data), |staging| HostIn::Range(staging.range(data.len())));
    let options = jit.options.clone();
    let answer = driver.session.call(&LinkAdd { link: link.id, kind, name: cut(name), options, data: bytes });
    if let Some(staging) = staged {
        staging.done(driver);
    }
    let reply = answer?;
    // SAFETY: the program keeps its buffers as long as the linker.
    unsafe { link.jit.report(&reply.info_log, &reply.error_log) };
    // SAFETY: the caller has read them from arrays that are still there.
    unsafe { jit.report(&reply.info_log, &reply.error_log) };
    Status(reply.result).ok()
}

/// Fetches the image, with room for as many bytes. `Err(Ok(size))`: there was less room than is needed.
fn fetch(driver: &'static Driver, link: &Link, room: usize) -> std::result::Result<Box<[u8]>, Result<usize>> {
    let staging = Staging::new(driver, room).map_err(Err)?;
    let answer = driver.session.call(&LinkComplete { link: link.id, image: HostOut(staging.range(room)) });
    let fetched = answer.map_err(Err).and_then(|reply| {
        // SAFETY: the program keeps its buffers as long as the linker.
        unsafe { link.jit.report(&reply.info_log, &reply.error_log) };
        Status(reply.result).ok().map_err(Err)?;
        let size = usize::try_from(reply.size).map_err(|_| Err(Status::UNKNOWN))?;
        if size > room {
            return Err(Ok(size));
        }
        // SAFETY: the host has written `size` bytes there before it answered.
        Ok(unsafe { std::slice::from_raw_parts(staging.ptr(), size) }.into())
    });
    staging.done(driver);
    fetched
}

unsafe fn complete(handle: usize, image: *mut *const c_void, size: *mut usize) -> Result {
    non_null(image)?;
    let (driver, link) = of(handle)?;
    let mut kept = lock(&link.image);
    if kept.is_none() {
        let fetched = match fetch(driver, &link, IMAGE) {
            Err(Ok(needed)) => fetch(driver, &link, needed),
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
        add(state, kind, std::slice::from_raw_parts(data, size), &name.to_string_lossy(), &jit)
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
        add(state, kind, &bytes, &path.to_string_lossy(), &jit)
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
