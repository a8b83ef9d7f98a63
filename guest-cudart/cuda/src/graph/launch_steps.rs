//! Steps of a launch that this process enqueues itself.
//!
//! Pageable memory is written when the stream reaches the copy: the device writes pinned memory of the
//! instance, and a host function of this library copies the bytes from there. It is read when the graph is
//! launched, after everything before that may write it has finished; behind a function of this process, which
//! may wait for what the launching thread does next, it is read when the stream reaches the copy, if the
//! server fetches data that late.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::abi::types::Memcpy3D;
use crate::graph::node_work::Work;
use crate::graph::user_object::Held;
use crate::memory::pinned_regions::{HostTag, REGIONS};
use crate::memory::{pending_writes, pinned};
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::fences;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::{event, stream_table};
use crate::work::copy::{Copier, Mode};
use crate::work::copy_boxes;
use crate::work::fill::Fill;
use crate::work::host_function::{self, Function};
use client::seq::Seq;
use client::{Status, lock};

/// Pinned memory for the pageable side of a copy.
pub(crate) struct Bounce {
    address: usize,
    /// The last launch that uses it: a stream and its mark.
    last: Mutex<Option<(Arc<Stream>, Seq)>>,
}

impl Bounce {
    /// `None` if there is no memory.
    fn new(stream: &Stream, size: usize) -> Option<Arc<Bounce>> {
        let tag = HostTag { context: stream.context, flags: 0, buffer: unique_id() };
        let address = REGIONS.alloc(stream.session(), size, None, tag).ok()?;
        Some(Arc::new(Bounce { address, last: Mutex::default() }))
    }

    /// Records that a launch uses it until its stream passes a mark.
    pub fn used(&self, stream: Arc<Stream>, mark: Seq) {
        *lock(&self.last) = Some((stream, mark));
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        let Ok(driver) = driver() else { return };
        // The server may be reading or writing it.
        match lock(&self.last).take() {
            Some((stream, mark)) if !stream.has_passed(mark) => {
                pinned::remove_later(driver, vec![(self.address, stream, mark)]);
            }
            _ => pinned::remove(driver, self.address),
        }
    }
}

/// Enqueues a node's work. `beside` has the instance's streams in other contexts than its own.
pub(crate) fn run(
    driver: &'static Driver,
    stream: &Arc<Stream>,
    work: &Work,
    bounce: &mut Option<Arc<Bounce>>,
    beside: &mut Vec<Arc<Stream>>,
) -> Result {
    match work {
        Work::Host(function, data) => {
            host_function::on(driver, stream.clone(), Function::Host(*function), data.0)
        }
        Work::Wait(handle) => event::wait(stream, &*event::of(*handle)?),
        Work::Record(handle) => event::record_on(&*event::of(*handle)?, stream.clone()),
        Work::Words(words) => words.run(driver, stream),
        // SAFETY: the program vouches for the memory that it gave a graph to copy from and to, until the
        // launch is done.
        Work::Copy(copy) => unsafe { run_copy(driver, stream, copy, bounce) },
        Work::Fill(fill) => Fill::of(driver, stream.context.server, stream.id, fill)?.run(driver, stream),
        // It is of another context than the graphs on the server, as on another GPU.
        Work::Kernel(kernel) => {
            let own = stream_in(kernel.context(), beside)?;
            within(stream, &own, |own| own.work(&kernel.op(own.id)).map(drop))
        }
        // The server does it, or there is nothing to do.
        Work::Empty | Work::Child(_) | Work::Alloc(_) | Work::Free(_) | Work::Conditional(_) => Ok(()),
    }
}

/// An instance's stream in a context. No other instance uses it: they may be waiting for something.
pub(crate) fn stream_in(context: &'static Context, beside: &mut Vec<Arc<Stream>>) -> Result<Arc<Stream>> {
    let is_there =
        |own: &&Arc<Stream>| std::ptr::eq(own.context, context) && !own.finished.load(Ordering::Relaxed);
    if let Some(own) = beside.iter().find(is_there) {
        return Ok(own.clone());
    }
    let own = stream_table::unnamed(context)?;
    beside.push(own.clone());
    Ok(own)
}

/// Does something on a stream of another context, between what is before and after it on this one.
pub(crate) fn within(
    stream: &Arc<Stream>,
    own: &Arc<Stream>,
    work: impl FnOnce(&Arc<Stream>) -> Result,
) -> Result {
    fences::join(stream, own)?;
    work(own)?;
    fences::join(own, stream)
}

fn call(driver: &'static Driver, stream: &Arc<Stream>, own: impl FnOnce() + Send + 'static) -> Result {
    host_function::on(driver, stream.clone(), Function::Own(Box::new(own)), std::ptr::null_mut())
}

unsafe fn run_copy(
    driver: &'static Driver,
    stream: &Arc<Stream>,
    copy: &Memcpy3D,
    bounce: &mut Option<Arc<Bounce>>,
) -> Result {
    let copier = Copier::on(driver, stream.clone(), Mode::Async, true);
    if copy_boxes::is_on_host(copy) {
        let copy = *copy;
        return call(driver, stream, move || {
            // SAFETY: as the caller says. It was described well when it became a node's.
            let _ = unsafe { copy_boxes::on_host(driver, &copy) };
        });
    }
    let Some(pageable) = copy_boxes::pageable(driver, stream, copy)? else {
        // SAFETY: guaranteed by the caller.
        return unsafe { copy_boxes::run(&copier, copy) };
    };
    let (at, len) = pageable.span();
    // Pinned memory that cannot be named in place has rules of its own.
    let can_read_later = stream.context.server.reads_late && REGIONS.any(at).is_none();
    let bounces = pageable.to_host || can_read_later && pending_writes::is_behind_calls(stream);
    if bounces && bounce.is_none() {
        *bounce = Bounce::new(stream, pageable.len());
    }
    let Some(bounce) = bounce.clone().filter(|_| bounces) else {
        if pageable.to_host {
            return Err(Status::OUT_OF_MEMORY);
        }
        pending_writes::settle(driver, stream, at, len)?;
        // SAFETY: guaranteed by the caller.
        return unsafe { copy_boxes::run(&copier, copy) };
    };
    let packed = bounce.address;
    // SAFETY: the pinned memory has as many bytes, stays until the instance's last launch is done, and is
    // used by nothing else here in the stream's order; the rest as the caller says.
    unsafe {
        if pageable.to_host {
            copy_boxes::run(&copier, &copy_boxes::to_packed(copy, packed))?;
            call(driver, stream, move || pageable.unpack(bounce.address as *const u8))
        } else {
            call(driver, stream, move || pageable.pack(bounce.address as *mut u8))?;
            copy_boxes::run(&copier, &copy_boxes::from_packed(copy, packed))
        }
    }
}

/// Keeps values until the stream has reached this point.
pub(crate) fn after(driver: &'static Driver, stream: Arc<Stream>, held: Vec<Held>) {
    // If it cannot be enqueued, the session is lost and nothing runs any more.
    let _ = call(driver, &stream, move || drop(held));
}
