//! Copies of bytes in a row.
//!
//! ```text
//!  to the device    few bytes      in the record                           nothing waits
//!                   pageable       staged through the arena, in chunks     returns when the source has been read
//!                   pinned         a reference to the region               asynchronous as CUDA has it
//!  to the host      few bytes      in the answer
//!                   pageable       chunks through the arena: while one is copied out, the next are on their way
//!                   pinned         a reference to the region
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use crate::abi::result::Result;
use crate::abi::types::Memcpy3D;
use crate::abi::types::memory_type::{DEVICE, HOST};
use crate::graph::node_work::Work;
use crate::memory::managed::shared_blocks;
use crate::memory::pinned::REGIONS;
use crate::memory::{address, managed, pending_writes, pinned};
use crate::process::capture::Capture;
use crate::process::context::{Context, Lent};
use crate::process::driver::{Driver, driver};
use crate::process::stream::Stream;
use crate::process::{capture, context, copy_fences, stream};
use crate::work::host_function;
use crate::work::host_function::Function;
use client::arena::{Block, Owner};
use client::channel::MAX_PAYLOAD;
use client::counters::COUNTERS;
use client::data::{HostIn, HostOut};
use client::ops::Op;
use client::ops::copy::{MemcpyDtoD, MemcpyDtoH, MemcpyDtoHInline, MemcpyHtoD};
use client::ops::stream::{StreamSynchronize, StreamSynchronizeReply};
use client::session::Pending;
use client::{Status, counters};

/// Bytes that go inside the record: copied into the ring instead of the arena.
const INLINE: usize = 8 << 10;

/// Chunks under way at once when much is copied to pageable memory.
const DEPTH: usize = 4;

/// Chunks that a transfer is cut into, within bounds: the pipeline is full soon, and not interrupted often.
const CHUNKS: usize = 8;

const LEAST_CHUNK: usize = 256 << 10;

const MOST_CHUNK: usize = 8 << 20;

/// The same towards the device, where nothing is waited for but room: smaller chunks are free again sooner.
const MOST_CHUNK_TO_DEVICE: usize = 4 << 20;

/// Whether the call returns before the copy is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Sync,
    Async,
}

/// A copy's driver, stream and mode.
pub(crate) struct Copier {
    pub driver: &'static Driver,
    pub stream: Arc<Stream>,
    pub mode: Mode,
    /// It is this library's own: no call of the program's waits for it.
    pub own: bool,
    /// The last record that the stream had to pass when the copier was made.
    pub before: u64,
    /// The stream's context, where the thread has none.
    lent: Option<Lent>,
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.mode == Mode::Sync && !self.own {
            shared_blocks::after_wait(self.driver);
        }
    }
}

/// Bytes of one chunk of a transfer.
pub(crate) fn chunk(driver: &Driver, len: usize) -> usize {
    (len / CHUNKS).clamp(LEAST_CHUNK, MOST_CHUNK).min(driver.session.arena().largest())
}

/// Copies bytes that another process may be writing, or that it will read: between program memory and the arena.
///
/// # Safety
/// `from` may be read and `to` written for `len` bytes; they do not overlap.
pub(crate) unsafe fn move_bytes(from: *const u8, to: *mut u8, len: usize) {
    counters::add(&COUNTERS.copied_bytes, len as u64);
    // SAFETY: as the caller says.
    unsafe { client::staging::copy(from, to, len) };
}

/// A chunk on its way to the host. The answer is waited for before the block goes, whatever happens in between.
struct Flight<'s> {
    pending: Pending<'s, StreamSynchronizeReply>,
    block: Block<'s>,
    at: usize,
    len: usize,
}

impl Copier {
    /// A copier for the current context and the stream that a handle means there.
    pub fn new(handle: usize, per_thread: bool, mode: Mode) -> Result<Copier> {
        let (driver, context, lent) = context::ready_on(handle)?;
        let mut copier = Copier::on(driver, stream::any(driver, context, handle, per_thread)?, mode, false);
        copier.lent = lent;
        Ok(copier)
    }

    /// A copier for a stream; `own`: for copies of this library's own.
    pub fn on(driver: &'static Driver, stream: Arc<Stream>, mode: Mode, own: bool) -> Copier {
        let before = stream.due();
        Copier { driver, stream, mode, own, before, lent: None }
    }

    /// The capture that the copy becomes part of.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED` for a copy that is waited for, which invalidates the capture.
    pub fn capture(&self) -> Result<Option<Arc<Capture>>> {
        if self.mode == Mode::Sync {
            capture::forbid(&self.stream)?;
        }
        Ok(self.stream.capture())
    }

    /// A synchronous copy is done when this returns.
    pub fn finish(&self) -> Result {
        if self.mode == Mode::Sync { self.stream.synchronize(self.driver) } else { Ok(()) }
    }

    /// After a copy to the device whose source has been read: what a synchronous one promises is kept.
    pub fn copied(&self) -> Result {
        if self.mode == Mode::Sync && !self.own {
            copy_fences::copied(self.driver, &self.stream, self.before)
        } else {
            Ok(())
        }
    }

    /// Puts a copy on the stream that writes device memory in the `len` bytes at `dst`; the `seq` of its record.
    pub fn put<'a, T: Op<'a>>(&self, op: &T, dst: u64, len: u64) -> Result<u64> {
        // This library's own copies are what gives managed memory to the device.
        let _order = if self.own { None } else { managed::before_work_on(dst, len)? };
        self.stream.work(self.driver, op)
    }

    /// Host to device.
    ///
    /// # Safety
    /// `src` may be read for `len` bytes: until the call returns if it is pageable, until the copy is done if it is pinned.
    pub unsafe fn to_device(&self, dst: u64, src: *const u8, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if let Some(capture) = self.capture()? {
            return capture
                .add(&self.stream, Work::copy(self.driver, &line(DEVICE, dst, HOST, src as u64, len))?);
        }
        if managed::is_here(src as u64) {
            return self.on_device(dst, src as u64, len);
        }
        if dst == 0 || src.is_null() || address::is_reserved(self.driver, src as u64) {
            return Err(Status::INVALID_VALUE);
        }
        if let Err(status) = address::check(self.driver, dst, len as u64) {
            // With unified addressing pinned memory is a device's as well.
            return if is_pinned(dst, len) {
                // SAFETY: as the caller says.
                unsafe { self.on_host(dst as *mut u8, src, len) }
            } else {
                Err(status)
            };
        }
        // SAFETY: as the caller says.
        unsafe { self.send(dst, src, len) }
    }

    /// As [`to_device`](Self::to_device), checked and outside a capture.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send(&self, dst: u64, src: *const u8, len: usize) -> Result {
        let stream = self.stream.id;
        let session = self.driver.session;
        if let Some(range) = REGIONS.range(src as usize, len) {
            let from = pending_writes::source(self.driver, &self.stream, range, src as usize, len)?;
            // Few bytes are cheaper in the record, but only where nothing may still be on its way into them.
            if !(self.mode == Mode::Sync && len <= INLINE && !self.stream.context.is_busy()) {
                let steady = pinned::steady();
                if REGIONS.range(src as usize, len).is_none() {
                    drop(steady);
                    return self.on_device(dst, src as u64, len);
                }
                self.put(&MemcpyHtoD { stream, dst, src: from }, dst, len as u64)?;
                drop(steady);
                return self.finish();
            }
        }
        if self.mode == Mode::Async && REGIONS.find(src as usize).is_some() {
            // Registered memory that the host cannot read in place: it is read here and now, so what comes before on the stream (a
            // host function may write it) must be over.
            self.stream.synchronize(self.driver)?;
        }
        if len <= INLINE {
            counters::add(&COUNTERS.copied_bytes, len as u64);
            // SAFETY: readable, as the caller says.
            let bytes = unsafe { std::slice::from_raw_parts(src, len) };
            self.put(&MemcpyHtoD { stream, dst, src: HostIn::Inline(bytes) }, dst, len as u64)?;
            return self.copied();
        }
        let chunk = chunk(self.driver, len).min(MOST_CHUNK_TO_DEVICE);
        let mut at = 0;
        while at < len {
            let n = chunk.min(len - at);
            let block = session.arena().alloc_for(session, n, &Staging(self))?;
            // SAFETY: the source's bytes at..at+n are inside it, and the block has n bytes.
            unsafe { move_bytes(src.add(at), block.ptr(), n) };
            let to = dst + at as u64;
            let op = MemcpyHtoD { stream, dst: to, src: HostIn::Range(block.range(n)) };
            let seq = self.put(&op, to, n as u64)?;
            block.release_after(seq, self.stream.unique());
            at += n;
        }
        self.copied()
    }

    /// Device to host.
    ///
    /// # Safety
    /// `dst` may be written for `len` bytes: until the call returns if it is pageable, until the copy is done if it is pinned.
    pub unsafe fn to_host(&self, dst: *mut u8, src: u64, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if let Some(capture) = self.capture()? {
            return capture
                .add(&self.stream, Work::copy(self.driver, &line(HOST, dst as u64, DEVICE, src, len))?);
        }
        if managed::is_here(dst as u64) {
            return self.on_device(dst as u64, src, len);
        }
        if src == 0 || dst.is_null() || address::is_reserved(self.driver, dst as u64) {
            return Err(Status::INVALID_VALUE);
        }
        if let Err(status) = address::check(self.driver, src, len as u64) {
            return if is_pinned(src, len) {
                // SAFETY: as the caller says.
                unsafe { self.on_host(dst, src as *const u8, len) }
            } else {
                Err(status)
            };
        }
        // SAFETY: as the caller says.
        unsafe { self.receive(dst, src, len) }
    }

    /// As [`to_host`](Self::to_host), checked and outside a capture.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn receive(&self, dst: *mut u8, src: u64, len: usize) -> Result {
        let session = self.driver.session;
        let stream = self.stream.id;
        let in_place = self.mode == Mode::Async || len > MAX_PAYLOAD - 4;
        if in_place && REGIONS.range(dst as usize, len).is_some() {
            let steady = pinned::steady();
            let Some(range) = REGIONS.range(dst as usize, len) else {
                drop(steady);
                return self.on_device(dst as u64, src, len);
            };
            let seq = self.stream.work(self.driver, &MemcpyDtoH { stream, src, dst: HostOut(range) })?;
            pending_writes::writes(self.driver, &self.stream, seq, dst as usize, len);
            drop(steady);
            return self.finish();
        }
        if len <= MAX_PAYLOAD - 4 {
            let pending = session.submit(&MemcpyDtoHInline { stream, src, len: len as u32 })?;
            let seq = pending.seq();
            let bytes = match pending.wait() {
                Ok(reply) => reply.bytes.0,
                Err(status) => return self.stream.context.settle(self.driver, Err(status)),
            };
            if bytes.len() != len {
                return Err(Status::UNKNOWN);
            }
            self.stream.is_synced(seq);
            // SAFETY: as the caller says; the lengths are equal.
            unsafe { move_bytes(bytes.as_ptr(), dst, len) };
            return Ok(());
        }
        let result = self.pipeline(src, len, &mut |at, block, n| {
            // SAFETY: the chunk at..at+n is inside the target, and the block has n bytes.
            unsafe { move_bytes(block, dst.add(at), n) }
        });
        self.stream.context.settle(self.driver, result)
    }

    /// Fetches `len` bytes through the arena, several chunks under way at once; `out` gets each: its place, its bytes, its length.
    fn pipeline(&self, src: u64, len: usize, out: &mut dyn FnMut(usize, *const u8, usize)) -> Result {
        let session = self.driver.session;
        let stream = self.stream.id;
        let chunk = chunk(self.driver, len);
        let mut flights: VecDeque<Flight<'_>> = VecDeque::with_capacity(DEPTH);
        let mut at = 0;
        while at < len || !flights.is_empty() {
            while at < len && flights.len() < DEPTH {
                let n = chunk.min(len - at);
                // Who has chunks under way waits for them, not for room or for a slot that others may hold.
                let block = if flights.is_empty() {
                    session.arena().alloc(session, n)?
                } else {
                    match session.arena().try_alloc(n, session.progress().released()) {
                        Some(block) if session.has_free_slot() => block,
                        _ => break,
                    }
                };
                let dst = HostOut(block.range(n));
                self.stream.work(self.driver, &MemcpyDtoH { stream, src: src + at as u64, dst })?;
                let pending = match session.submit(&StreamSynchronize { stream }) {
                    Ok(pending) => pending,
                    Err(status) => {
                        // The host may still write the block, and will not say when it has: it is lost with the session.
                        std::mem::forget(block);
                        return Err(status);
                    }
                };
                flights.push_back(Flight { pending, block, at, len: n });
                at += n;
            }
            let Some(Flight { pending, block, at, len }) = flights.pop_front() else { break };
            let seq = pending.seq();
            pending.wait()?;
            self.stream.is_synced(seq);
            out(at, block.ptr(), len);
        }
        Ok(())
    }

    /// Device to device, of one device or two: never waits.
    pub fn on_device(&self, dst: u64, src: u64, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if is_pinned(dst, len) || is_pinned(src, len) {
            // SAFETY: pinned memory of the program's, or none that a copy would accept.
            return unsafe { self.unified(dst, src, len) };
        }
        address::check(self.driver, dst, len as u64)?;
        address::check(self.driver, src, len as u64)?;
        if let Some(capture) = self.stream.capture() {
            return capture.add(&self.stream, Work::copy(self.driver, &line(DEVICE, dst, DEVICE, src, len))?);
        }
        let op = MemcpyDtoD { stream: self.stream.id, dst, src, len: len as u64 };
        self.put(&op, dst, len as u64).map(drop)
    }

    /// Host to host, in the stream's order: waits for the stream, as CUDA does with pageable memory, unless all of it is pinned.
    ///
    /// # Safety
    /// `src` may be read and `dst` written for `len` bytes.
    pub unsafe fn on_host(&self, dst: *mut u8, src: *const u8, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if let Some(capture) = self.capture()? {
            return capture
                .add(&self.stream, Work::copy(self.driver, &line(HOST, dst as u64, HOST, src as u64, len))?);
        }
        if dst.is_null() || src.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if self.mode == Mode::Async && is_pinned(dst as u64, len) && is_pinned(src as u64, len) {
            let (dst, src) = (dst as usize, src as usize);
            let copied = Function::Own(Box::new(move || {
                // SAFETY: pinned memory, which the program leaves alone until the stream has come past here.
                unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len) }
            }));
            return host_function::on(self.driver, self.stream.clone(), copied, std::ptr::null_mut());
        }
        self.stream.synchronize(self.driver)?;
        // SAFETY: as the caller says.
        unsafe { std::ptr::copy(src, dst, len) };
        Ok(())
    }

    /// A copy whose ends say by their addresses where they are: unified addressing.
    ///
    /// # Safety
    /// As for the copy that it turns out to be.
    pub unsafe fn unified(&self, dst: u64, src: u64, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe {
            match (is_device(self.driver, dst), is_device(self.driver, src)) {
                (true, true) => self.on_device(dst, src, len),
                (true, false) => self.to_device(dst, src as *const u8, len),
                (false, true) => self.to_host(dst as *mut u8, src, len),
                (false, false) => self.on_host(dst as *mut u8, src as *const u8, len),
            }
        }
    }
}

/// A copier's stream, as whose work blocks of the arena are used.
pub(crate) struct Staging<'c>(pub &'c Copier);

impl Owner for Staging<'_> {
    fn id(&self) -> u64 {
        self.0.stream.unique()
    }

    fn mark(&self) -> Result {
        self.0.stream.mark(self.0.driver).map(drop)
    }

    fn has_passed(&self, seq: u64) -> bool {
        self.0.stream.has_passed(self.0.driver, seq)
    }
}

/// Whether a range is one of pinned memory.
fn is_pinned(address: u64, len: usize) -> bool {
    REGIONS.find(address as usize).is_some_and(|(base, size, _)| len <= size - (address as usize - base))
}

/// A copy of bytes in a row, as a graph's node describes it.
fn line(dst_kind: u32, dst: u64, src_kind: u32, src: u64, len: usize) -> Memcpy3D {
    Memcpy3D {
        srcMemoryType: src_kind,
        srcHost: if src_kind == HOST { src as usize } else { 0 },
        srcDevice: if src_kind == HOST { 0 } else { src },
        srcPitch: len,
        srcHeight: 1,
        dstMemoryType: dst_kind,
        dstHost: if dst_kind == HOST { dst as usize } else { 0 },
        dstDevice: if dst_kind == HOST { 0 } else { dst },
        dstPitch: len,
        dstHeight: 1,
        WidthInBytes: len,
        Height: 1,
        Depth: 1,
        ..Memcpy3D::default()
    }
}

/// Whether an address is one of device memory: in a window, or a module's variable.
pub(crate) fn is_device(driver: &Driver, address: u64) -> bool {
    address::is_reserved(driver, address) || address::find(driver, address).is_some()
}

/// The contexts that a peer copy names must be live ones; the addresses say the rest.
pub(crate) fn peers(dst: usize, src: usize) -> Result<[&'static Context; 2]> {
    let of = |handle| if handle == 0 { Err(Status::INVALID_CONTEXT) } else { context::of(handle) };
    let both = [of(dst)?, of(src)?];
    if both.iter().any(|context| !context.is_alive()) {
        return Err(Status::CONTEXT_IS_DESTROYED);
    }
    Ok(both)
}

api! {
    fn cuMemcpy / cuMemcpy_ptds(dst: u64, src: u64, len: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.unified(dst, src, len)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz(dst: u64, src: u64, len: usize, stream: usize) |pt| {
        Copier::new(stream, pt, Mode::Async)?.unified(dst, src, len)
    }

    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds(dst: u64, src: *const u8, len: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.to_device(dst, src, len)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz(dst: u64, src: *const u8, len: usize, stream: usize) |pt| {
        Copier::new(stream, pt, Mode::Async)?.to_device(dst, src, len)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds(dst: *mut u8, src: u64, len: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.to_host(dst, src, len)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz(dst: *mut u8, src: u64, len: usize, stream: usize) |pt| {
        Copier::new(stream, pt, Mode::Async)?.to_host(dst, src, len)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds(dst: u64, src: u64, len: usize) |pt| {
        Copier::new(0, pt, Mode::Async)?.on_device(dst, src, len)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz(dst: u64, src: u64, len: usize, stream: usize) |pt| {
        Copier::new(stream, pt, Mode::Async)?.on_device(dst, src, len)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds(dst: u64, dst_ctx: usize, src: u64, src_ctx: usize, len: usize) |pt| {
        driver()?;
        peers(dst_ctx, src_ctx)?;
        Copier::new(0, pt, Mode::Async)?.on_device(dst, src, len)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz(dst: u64, dst_ctx: usize, src: u64, src_ctx: usize, len: usize, stream: usize) |pt| {
        driver()?;
        peers(dst_ctx, src_ctx)?;
        Copier::new(stream, pt, Mode::Async)?.on_device(dst, src, len)
    }
}
