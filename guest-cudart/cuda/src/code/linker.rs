//! The driver's linker. Inputs are sent to the server as they are added; the finished image is fetched.

use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::code::jit_options::Jit;
use crate::memory::staging::Staging;
use crate::memory::transfer;
use crate::process::driver::driver;
use client::data::{HostIn, HostOut};
use client::handle::LinkId;
use client::handles::Slab;
use client::ops::module::{LinkAdd, LinkComplete, LinkDestroy, jit_input};
use client::session::Session;
use client::{Status, lock};

/// Inputs up to this size in bytes are sent inside the record.
const INLINE: usize = 24 << 10;
/// Space first offered for an image, in bytes.
pub(crate) const IMAGE: usize = 256 << 10;
/// Bytes of an input's name that are sent.
const NAME: usize = 200;

/// A linker in use.
pub(crate) struct Link {
    pub id: LinkId,
    pub session: &'static Session,
    /// The program's options, with its message buffers, which the program keeps as long as the linker.
    pub jit: Jit,
    /// The image, which the program may read as long as the linker exists.
    pub image: Mutex<Option<Box<[u8]>>>,
}

impl Drop for Link {
    fn drop(&mut self) {
        // After the session is lost there are no linkers.
        let _ = self.session.append(&LinkDestroy { link: self.id });
    }
}

pub(crate) static LINKS: Slab<Link> = Slab::new(17);

pub(crate) fn of(handle: usize) -> Result<Arc<Link>> {
    driver()?;
    LINKS.get(handle).ok_or(Status::INVALID_HANDLE)
}

/// The beginning of a name, up to [`NAME`] bytes.
fn cut(name: &str) -> &str {
    &name[..name.floor_char_boundary(NAME)]
}

pub(crate) fn add(handle: usize, kind: u32, data: &[u8], name: &str, jit: &Jit) -> Result {
    let link = of(handle)?;
    if kind > jit_input::LAST || data.is_empty() || lock(&link.image).is_some() {
        return Err(Status::INVALID_VALUE);
    }
    let staged = if data.len() <= INLINE {
        None
    } else {
        let staging = Staging::new(link.session, data.len())?;
        // SAFETY: the staging memory has this many bytes and belongs only to this call.
        unsafe { transfer::move_bytes(data.as_ptr(), staging.ptr(), data.len()) };
        Some(staging)
    };
    let bytes =
        staged.as_ref().map_or(HostIn::Inline(data), |staging| HostIn::Range(staging.range(data.len())));
    let options = jit.options.clone();
    let answer = link.session.call(&LinkAdd { link: link.id, kind, name: cut(name), options, data: bytes });
    drop(staged);
    let reply = answer?;
    // SAFETY: the program keeps its buffers as long as the linker.
    unsafe { link.jit.report(&reply.info_log, &reply.error_log) };
    // SAFETY: the caller read them from arrays that still exist.
    unsafe { jit.report(&reply.info_log, &reply.error_log) };
    Status(reply.result).ok()
}

/// Fetches the image into `room` bytes. Returns `Err(Ok(size))` if it needs more.
pub(crate) fn fetch(link: &Link, room: usize) -> std::result::Result<Box<[u8]>, Result<usize>> {
    let staging = Staging::new(link.session, room).map_err(Err)?;
    let answer = link.session.call(&LinkComplete { link: link.id, image: HostOut(staging.range(room)) });
    answer.map_err(Err).and_then(|reply| {
        // SAFETY: the program keeps its buffers as long as the linker.
        unsafe { link.jit.report(&reply.info_log, &reply.error_log) };
        Status(reply.result).ok().map_err(Err)?;
        let size = usize::try_from(reply.size).map_err(|_| Err(Status::UNKNOWN))?;
        if size > room {
            return Err(Ok(size));
        }
        // SAFETY: the host wrote `size` bytes there before it answered.
        Ok(unsafe { std::slice::from_raw_parts(staging.ptr(), size) }.into())
    })
}
