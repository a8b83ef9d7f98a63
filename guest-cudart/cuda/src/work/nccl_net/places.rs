//! Where a message's bytes are, and how they get into host memory and back.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::memory::address;
use crate::memory::pinned_regions::REGIONS;
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use crate::work::server_copy::{SLOT, Slots, alive};
use client::data::{HostIn, HostOut};
use client::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use client::seq::Seq;
use client::{Status, lock};

/// Slots per connection.
const SLOTS: usize = 4;
/// Size of what is copied at a time, in bytes. Less than a slot has, so that copies and the socket overlap.
const PART: usize = SLOT / 4;

/// Memory that NCCL has registered.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// Device memory, and the context that it is used in.
    Device(&'static Context),
    /// The same, named for the direct connection.
    Named(&'static Context),
    /// Memory that this process reads and writes.
    Host,
}

impl Place {
    /// What is at an address. `device`: NCCL says that it is device memory.
    pub fn of(driver: &'static Driver, at: u64, device: bool) -> Result<Place> {
        if !device {
            return Ok(Place::Host);
        }
        let found = address::find(driver, at).ok_or(Status::INVALID_VALUE)?;
        // The CPU has managed memory at the same address.
        Ok(if found.managed { Place::Host } else { Place::Device(alive(driver, found.context)) })
    }
}

/// The plugin's stream of a context for what it sends and stages. It waits for no other stream: a collective's
/// kernel is running and waits for this. For the same reason it has the highest priority: streams of one
/// priority share a few hardware queues. It need not be ordered behind
/// [fences](crate::process::fences) either: the kernel that filled the memory is.
pub(crate) fn stream_of(context: &'static Context) -> Result<Arc<Stream>> {
    static STREAMS: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
    let mut streams = lock(&STREAMS);
    streams.retain(|stream| !stream.is_finished());
    if let Some(found) = streams.iter().find(|stream| std::ptr::eq(stream.context, context)) {
        return Ok(Arc::clone(found));
    }
    let stream = stream_table::unnamed_first(context)?;
    // Now, because a stream's first use may take longer.
    stream.mark()?;
    streams.push(Arc::clone(&stream));
    Ok(stream)
}

/// Whether a stream has passed a mark.
///
/// # Errors
/// Its context's, if something before has failed.
pub(crate) fn has_passed(stream: &Stream, mark: Seq) -> Result<bool> {
    if !stream.has_passed(mark) {
        stream.session().check()?;
        return Ok(false);
    }
    if stream.is_finished() {
        return Err(Status::CONTEXT_IS_DESTROYED);
    }
    if stream.context.has_error() { Err(Status::UNKNOWN) } else { Ok(true) }
}

/// The page-locked memory through which a connection's device memory goes.
#[derive(Default)]
pub(crate) struct Stage {
    slots: Option<Slots>,
    free: Vec<usize>,
    /// Copies in their order.
    under_way: VecDeque<Part>,
}

/// A copy between a device and a slot.
struct Part {
    stream: Arc<Stream>,
    mark: Seq,
    slot: usize,
    len: usize,
}

impl Stage {
    fn slot(&mut self, context: &'static Context) -> Result<Option<usize>> {
        if self.slots.is_none() {
            let slots = Slots::take(context, SLOTS)?;
            self.free.clone_from(&slots.0);
            self.slots = Some(slots);
        }
        Ok(self.free.pop())
    }

    /// Begins to copy up to `len` bytes of device memory to a slot. Returns how many; 0 if there is no room.
    pub fn begin_to_host(&mut self, context: &'static Context, src: u64, len: usize) -> Result<usize> {
        let Some(slot) = self.slot(context)? else { return Ok(0) };
        let (stream, len) = (stream_of(context)?, len.min(PART));
        let range = REGIONS.range(stream.session(), slot, len).ok_or(Status::OUT_OF_MEMORY)?;
        stream.work(&MemcpyDtoH { stream: stream.id, src, dst: HostOut(range) })?;
        let mark = stream.mark()?;
        self.under_way.push_back(Part { stream, mark, slot, len });
        Ok(len)
    }

    /// Appends the bytes of the oldest copy to `out`, if it is done. Returns how many.
    pub fn end_to_host(&mut self, out: &mut Vec<u8>) -> Result<usize> {
        let Some(Part { slot, len, .. }) = self.pop()? else { return Ok(0) };
        // SAFETY: page-locked memory that only this connection uses, and no device writes it any more.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(slot as *const u8, len) });
        Ok(len)
    }

    /// Begins to copy bytes from the host to the device, as many as there is room for. Returns how many, and a
    /// mark behind the copy.
    pub fn begin_to_device(
        &mut self,
        context: &'static Context,
        dst: u64,
        bytes: impl FnOnce(usize) -> Vec<u8>,
    ) -> Result<Option<(usize, Arc<Stream>, Seq)>> {
        while self.pop()?.is_some() {}
        let Some(slot) = self.slot(context)? else { return Ok(None) };
        let stream = stream_of(context)?;
        let bytes = bytes(PART);
        let len = bytes.len();
        // SAFETY: a slot has that much room, only this connection uses it, and no device reads it any more.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot as *mut u8, len) };
        let range = REGIONS.range(stream.session(), slot, len).ok_or(Status::OUT_OF_MEMORY)?;
        stream.work(&MemcpyHtoD { stream: stream.id, dst, src: HostIn::Range(range) })?;
        let mark = stream.mark()?;
        self.under_way.push_back(Part { stream: Arc::clone(&stream), mark, slot, len });
        Ok(Some((len, stream, mark)))
    }

    /// The oldest copy, if it is done.
    fn pop(&mut self) -> Result<Option<Part>> {
        match self.under_way.front() {
            Some(part) if has_passed(&part.stream, part.mark)? => {}
            _ => return Ok(None),
        }
        Ok(self.under_way.pop_front().inspect(|part| self.free.push(part.slot)))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The slots are used again when no server uses them any more. A lost server doesn't.
        for part in &self.under_way {
            let _ = part.stream.session().wait_progress(|| part.stream.has_passed(part.mark));
        }
    }
}
