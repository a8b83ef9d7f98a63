//! Contiguous copies.
//!
//! ```text
//!  to the device    few bytes      in the record                           nothing waits
//!                   pageable       staged through the arena, in chunks     returns when the source has been read
//!                  pinned         a reference to the region               asynchronous, as in CUDA
//! to the host      few bytes      in the reply
//!                  pageable       chunks through the arena: while one is copied out, the next are in transit
//!                   pinned         a reference to the region
//! ```

use std::cell::Cell;
use std::sync::Arc;

use crate::abi::result::Result;
use crate::memory::address::{self, is_device};
use crate::memory::managed::{self, Order, mirror, shared_blocks};
use crate::memory::pinned_regions::{self, REACHING, REGIONS};
use crate::memory::transfer::{INLINE, MAX_INLINE_ANSWER, Transfer};
use crate::memory::{pending_writes, pinned};
use crate::process::capture::Capture;
use crate::process::context::Context;
use crate::process::driver::{Driver, Server};
use crate::process::fences;
use crate::process::stream::Stream;
use crate::streams::capture_rules;
use crate::streams::stream_table::{self, Lent};
use crate::work::host_function::{self, Function};
use crate::work::server_copy::{self, Linear, Part, Split};
use client::Status;
use client::activity;
use client::data::{HostIn, HostOut};
use client::ops::Op;
use client::ops::copy::{MemcpyDtoD, MemcpyDtoH, MemcpyHtoD, Pitched};
use client::seq::Seq;

/// Up to this many bytes, an asynchronous copy from pinned memory that starts at once reads them during the
/// call, so that a wait for the stream needs no answer. Reading more takes longer than most such waits.
const SHORT: usize = 32 << 10;

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
    /// Whether it is this library's own, so that no call of the program waits for it.
    pub own: bool,
    /// The last record that the stream had to pass when the copier was created.
    pub before: Option<Seq>,
    /// The last record that it has put on the stream.
    last: Cell<Option<Seq>>,
    /// Makes the stream's context current, if the thread has none.
    lent: Option<Lent>,
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.mode == Mode::Sync && !self.own {
            shared_blocks::after_wait(self.driver);
        }
    }
}

impl Copier {
    /// A copier for the current context and the stream that a handle names there.
    pub fn new(handle: usize, per_thread: bool, mode: Mode) -> Result<Copier> {
        let (driver, context, lent) = stream_table::ready_on(handle)?;
        let stream = match mode {
            Mode::Sync => stream_table::for_copy(context, handle, per_thread)?,
            Mode::Async => stream_table::any(context, handle, per_thread)?,
        };
        let mut copier = Copier::on(driver, stream, mode, false);
        copier.lent = lent;
        Ok(copier)
    }

    /// A copier for a stream. `own`: for this library's own copies.
    pub fn on(driver: &'static Driver, stream: Arc<Stream>, mode: Mode, own: bool) -> Copier {
        let before = stream.due();
        Copier { driver, stream, mode, own, before, last: Cell::new(None), lent: None }
    }

    /// The capture that the copy becomes part of, if any.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED` for a synchronous copy, which also invalidates the capture.
    pub fn capture(&self) -> Result<Option<Arc<Capture>>> {
        if self.mode == Mode::Sync {
            capture_rules::forbid(&self.stream)?;
        }
        Ok(self.stream.capture())
    }

    /// Waits, if the copy is synchronous.
    pub fn finish(&self) -> Result {
        if self.mode == Mode::Sync { self.stream.synchronize() } else { Ok(()) }
    }

    /// Called before the source of a copy to the device is read, here or by the server. A synchronous one
    /// waits if kernels may have written the same pages at another address: these get the bytes only when the
    /// program has waited.
    pub fn before_aliases(&self) -> Result {
        if self.mode == Mode::Async || self.own || !mirror::any_shared() {
            return Ok(());
        }
        self.stream.synchronize_as_operation()?;
        self.has_waited();
        Ok(())
    }

    /// Called before the source of a copy to the device is read in this process: earlier work on the stream
    /// that may write it must be done. `pinned`: whether it is pinned memory, which the host cannot read in
    /// place, or which kernels are about to reach.
    pub fn before_reading(&self, pinned: bool) -> Result {
        match self.mode {
            Mode::Sync if self.own => Ok(()),
            Mode::Sync => pending_writes::settle_in_order(&self.stream),
            Mode::Async if pinned => {
                self.stream.synchronize_as_operation()?;
                // Kernels may have written the same pages at another address.
                self.has_waited();
                Ok(())
            }
            Mode::Async => Ok(()),
        }
    }

    /// Called after a copy to `dst` whose source has been read. Keeps the guarantees of a synchronous one.
    pub fn copied(&self, dst: u64) -> Result {
        if self.mode == Mode::Async || self.own {
            return Ok(());
        }
        let is_settled = || stream_table::is_settled(&self.stream);
        let is_watched = || stream_table::is_watched(&self.stream);
        fences::copied(&self.stream, self.before, self.last.get(), is_settled, is_watched)?;
        self.finish_shared(&[dst])
    }

    /// Called when the call has waited for the stream although the copy may be asynchronous, so that the
    /// program sees what the work before it has written.
    pub fn has_waited(&self) {
        if !self.own {
            shared_blocks::after_wait(self.driver);
        }
    }

    /// Puts a copy on the stream that writes the `len` bytes of device memory at `dst`. Returns the record's
    /// `seq`.
    pub fn put<'a, T: Op<'a>>(&self, op: &T, dst: u64, len: u64) -> Result<Seq> {
        let _order = self.order(dst, len)?;
        self.work(op)
    }

    /// Puts an operation on the stream. Returns the record's `seq`.
    pub fn work<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq> {
        let seq = self.stream.work(op)?;
        self.last.set(Some(seq));
        Ok(seq)
    }

    /// What must precede work that writes the `len` bytes at `dst`. A graph's launch has already done most of
    /// that for its copies.
    fn order(&self, dst: u64, len: u64) -> Result<Option<Order>> {
        if self.own { managed::before_telling().map(|()| None) } else { managed::before_work_on(dst, len) }
    }

    /// Transfers on its stream that ignore pinned and managed memory.
    pub fn transfer(&self) -> Transfer<'_> {
        Transfer { stream: &self.stream }
    }

    /// Host to device.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes: until the call returns if it is pageable, until the copy is done if
    /// it is pinned.
    pub unsafe fn to_device(&self, dst: u64, src: *const u8, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if managed::is_here(src as u64) {
            return self.on_device(dst, src as u64, len);
        }
        if dst == 0 || src.is_null() || address::is_reserved(self.driver, src as u64) {
            return Err(Status::INVALID_VALUE);
        }
        let home = match address::check_near(self.driver, self.server(), dst, len as u64) {
            Ok(found) => found.context,
            // With unified addressing, pinned memory also has a device address.
            // SAFETY: the caller meets the same requirements.
            Err(_) if is_pinned(dst, len) => return unsafe { self.on_host(dst as *mut u8, src, len) },
            Err(status) => return Err(status),
        };
        if !self.is_own(home) {
            let src = src as usize;
            return self.with_other(home, is_pinned(src as u64, len), move |copier| {
                // SAFETY: as the caller says: pageable memory is read before the call returns.
                unsafe { copier.send(dst, src as *const u8, len) }
            });
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.send(dst, src, len) }
    }

    /// As [`to_device`](Self::to_device), checked and outside a capture.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send(&self, dst: u64, src: *const u8, len: usize) -> Result {
        let (session, stream) = (self.stream.session(), self.stream.id);
        let mut is_read_now = false;
        self.before_aliases()?;
        REACHING.wait(src as u64);
        while let Some(range) = REGIONS.range(session, src as usize, len) {
            let read_in_place = || pinned::read_in_place(self.driver, self.stream.context, src as u64);
            let from =
                pending_writes::source(self.driver, &self.stream, range, src as usize, len, read_in_place)?;
            // The record is cheaper for few bytes, but only if nothing pending may still write them. The
            // program need not wait for an asynchronous copy whose source has been read.
            is_read_now = match self.mode {
                Mode::Sync => len <= INLINE && !self.stream.context.is_busy(),
                Mode::Async => {
                    len <= SHORT && matches!(from, HostIn::Range(_)) && self.stream.starts_at_once()
                }
            };
            if is_read_now {
                break;
            }
            let steady = pinned_regions::steady(session);
            if REGIONS.range(session, src as usize, len).is_none() {
                // Kernels are about to reach it.
                drop(steady);
                REACHING.wait(src as u64);
                continue;
            }
            let op = MemcpyHtoD { stream, dst, src: from };
            let order = self.order(dst, len as u64)?;
            if pending_writes::is_unheld(&self.stream) {
                self.last.set(Some(self.stream.unheld_work(&op)?));
            } else {
                self.work(&op)?;
            }
            drop(order);
            drop(steady);
            return self.finish();
        }
        let pinned = REGIONS.any(src as usize).is_some();
        let in_place = pinned && REGIONS.find(src as usize).is_some();
        if pinned && !in_place && Self::has_become_a_mirror(src as u64) {
            return self.on_device(dst, src as u64, len);
        }
        if self.mode == Mode::Sync || !is_read_now {
            self.before_reading(pinned)?;
        }
        if !in_place {
            activity::copies_pageable();
        }
        // SAFETY: guaranteed by the caller.
        let last = unsafe { self.transfer().send(dst, src, len, |dst, len| self.order(dst, len)) }?;
        self.last.set(last);
        if managed::is_here(dst) {
            self.stream.host_sees_last_work();
        }
        self.copied(dst)
    }

    /// Called when pinned memory cannot be used in place any more. Waits until that is decided, and returns
    /// whether kernels use it now.
    #[cold]
    fn has_become_a_mirror(address: u64) -> bool {
        REACHING.wait(address);
        mirror::is_here(address)
    }

    /// Device to host.
    ///
    /// # Safety
    /// `dst` is writable for `len` bytes: until the call returns if it is pageable, until the copy is done if
    /// it is pinned.
    pub unsafe fn to_host(&self, dst: *mut u8, src: u64, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if managed::is_here(dst as u64) {
            return self.on_device(dst as u64, src, len);
        }
        if src == 0 || dst.is_null() || address::is_reserved(self.driver, dst as u64) {
            return Err(Status::INVALID_VALUE);
        }
        let home = match address::check_near(self.driver, self.server(), src, len as u64) {
            Ok(found) => found.context,
            // SAFETY: guaranteed by the caller.
            Err(_) if is_pinned(src, len) => return unsafe { self.on_host(dst, src as *const u8, len) },
            Err(status) => return Err(status),
        };
        if !self.is_own(home) {
            let dst = dst as usize;
            return self.with_other(home, is_pinned(dst as u64, len), move |copier| {
                // SAFETY: as the caller says: pageable memory is written before the call returns.
                unsafe { copier.receive(dst as *mut u8, src, len) }
            });
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.receive(dst, src, len) }
    }

    /// As [`to_host`](Self::to_host), checked and outside a capture.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn receive(&self, dst: *mut u8, src: u64, len: usize) -> Result {
        let stream = self.stream.id;
        let session = self.stream.session();
        let in_place = self.mode == Mode::Async || len > MAX_INLINE_ANSWER;
        if in_place && REACHING.wait(dst as u64) && mirror::is_here(dst as u64) {
            return self.on_device(dst as u64, src, len);
        }
        while in_place && REGIONS.range(session, dst as usize, len).is_some() {
            let steady = pinned_regions::steady(session);
            let Some(range) = REGIONS.range(session, dst as usize, len) else {
                drop(steady);
                if Self::has_become_a_mirror(dst as u64) {
                    return self.on_device(dst as u64, src, len);
                }
                continue;
            };
            let seq = self.stream.work(&MemcpyDtoH { stream, src, dst: HostOut(range) })?;
            pending_writes::writes(&self.stream, seq, dst as usize, len);
            drop(steady);
            return self.finish();
        }
        if REGIONS.find(dst as usize).is_none() {
            activity::copies_pageable();
        }
        // SAFETY: guaranteed by the caller.
        let received = unsafe { self.transfer().receive(dst, src, len) };
        self.has_waited();
        // The kernel that should have written the bytes may have been refused.
        self.stream.context.settle(received)
    }

    /// Device to device, on one device or two. Waits only for a synchronous copy of memory that
    /// the host [sees at once](managed::is_seen_at_once), or for which the program has
    /// [asked](address::synchronizes) for that.
    pub fn on_device(&self, dst: u64, src: u64, len: usize) -> Result {
        self.on_devices((dst, self.server()), (src, self.server()), len)
    }

    /// The same with the servers of the addresses given, for addresses that exist on several.
    pub fn on_devices(
        &self,
        (dst, dst_near): (u64, &'static Server),
        (src, src_near): (u64, &'static Server),
        len: usize,
    ) -> Result {
        if len == 0 {
            return Ok(());
        }
        if is_pinned(dst, len) || is_pinned(src, len) {
            // SAFETY: pinned memory of the program, or memory that no copy accepts.
            return unsafe { self.unified(dst, src, len) };
        }
        let to = address::check_near(self.driver, dst_near, dst, len as u64)?.context;
        let from = address::check_near(self.driver, src_near, src, len as u64)?.context;
        let op = MemcpyDtoD { stream: self.stream.id, dst, src, len: len as u64 };
        if self.is_own(to) && self.is_own(from) {
            return server_copy::by_default_streams(&self.stream, &[to, from], || {
                self.put(&op, dst, len as u64)?;
                self.finish_shared(&[dst, src])
            });
        }
        if std::ptr::eq(to.server, from.server) {
            return self.with_other(to, true, move |copier| copier.on_device(dst, src, len));
        }
        let ends = [(to, dst), (from, src)];
        let [to, from] = ends.map(|(context, address)| {
            let len = len as u64;
            Linear { context, place: Pitched { address, pitch: len, slice: len } }
        });
        let part = |at: usize| {
            let n = server_copy::SLOT.min(len - at) as u64;
            Part { dst: dst + at as u64, src: src + at as u64, extent: [n, 1, 1] }
        };
        let parts = (0..len).step_by(server_copy::SLOT).map(part).collect();
        let split = Split { extent: [len as u64, 1, 1], parts };
        let spans = [(dst, len as u64), (src, len as u64)];
        server_copy::between(self.driver, &self.stream, to, from, spans, split)?;
        self.finish_managed(&[dst, src])
    }

    /// Called after a copy between servers was put on the stream. As [`finish_shared`](Self::finish_shared),
    /// and if either address is managed memory, because the host accesses that memory without asking. (Within
    /// one server the host's pages are taken during the call; here a thread does that later.)
    pub fn finish_managed(&self, ends: &[u64]) -> Result {
        let managed = |end: &u64| address::find(self.driver, *end).is_some_and(|found| found.managed);
        if ends.iter().any(managed) { self.finish() } else { self.finish_shared(ends) }
    }

    /// Called after a copy was put on the stream of the server that has both ends. If the host sees the
    /// memory at either address [at once](managed::is_seen_at_once), or the program has
    /// [asked](address::synchronizes) for that, a synchronous copy is completed now.
    pub fn finish_shared(&self, ends: &[u64]) -> Result {
        let at_once = |end: &u64| {
            managed::is_seen_at_once(*end) || address::synchronizes(self.driver, self.stream.context, *end)
        };
        if ends.iter().any(at_once) { self.finish() } else { Ok(()) }
    }

    /// The stream's server.
    pub fn server(&self) -> &'static Server {
        self.stream.context.server
    }

    /// Whether memory of a context is on the stream's server.
    pub fn is_own(&self, home: &Context) -> bool {
        std::ptr::eq(home.server, self.server())
    }

    /// Runs `work` with a copier for another server when the stream reaches it. Waits if the copy is
    /// synchronous, or if the process's memory isn't guaranteed to stay after the call (`stays` is false).
    pub fn with_other(
        &self,
        home: &'static Context,
        stays: bool,
        work: impl FnOnce(&Copier) -> Result + Send + 'static,
    ) -> Result {
        let driver = self.driver;
        let now = self.mode == Mode::Sync || !stays;
        let done = server_copy::on_other(driver, &self.stream, home, now, move |stream| {
            work(&Copier::on(driver, stream.clone(), Mode::Sync, true))
        });
        if now {
            self.has_waited();
        }
        done
    }

    /// Checks that both ends are device memory. Returns false if one is pinned memory.
    pub fn is_on_device(&self, dst: u64, src: u64, len: usize) -> Result<bool> {
        if is_pinned(dst, len) || is_pinned(src, len) {
            return Ok(false);
        }
        address::check_near(self.driver, self.server(), dst, len as u64)?;
        address::check_near(self.driver, self.server(), src, len as u64)?;
        Ok(true)
    }

    /// Host to host, in stream order. Waits for the stream, as natively, also if all of it is pinned.
    ///
    /// # Safety
    /// `src` is readable and `dst` writable for `len` bytes.
    pub unsafe fn on_host(&self, dst: *mut u8, src: *const u8, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        if dst.is_null() || src.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // What a graph's launch puts on the stream is not waited for.
        if self.own && self.mode == Mode::Async && is_pinned(dst as u64, len) && is_pinned(src as u64, len) {
            let (dst, src) = (dst as usize, src as usize);
            let copied = Function::Own(Box::new(move || {
                // SAFETY: pinned memory, which the program leaves alone until the stream has passed this
                // point.
                unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len) }
            }));
            return host_function::on(self.driver, self.stream.clone(), copied, std::ptr::null_mut());
        }
        self.stream.synchronize_as_operation()?;
        self.has_waited();
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy(src, dst, len) };
        Ok(())
    }

    /// A copy that determines from the addresses where each end is: unified addressing.
    ///
    /// # Safety
    /// As for the resulting kind of copy.
    pub unsafe fn unified(&self, dst: u64, src: u64, len: usize) -> Result {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
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

/// Whether a range is pinned memory.
pub(crate) fn is_pinned(address: u64, len: usize) -> bool {
    REGIONS.find(address as usize).is_some_and(|(base, size, _)| len <= size - (address as usize - base))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pinned_regions::HostTag;
    use crate::process::ids::unique_id;
    use crate::process::stream::NON_BLOCKING;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};
    use client::ops::stream::StreamMark;

    #[test]
    fn pinned_memory_that_kernels_are_about_to_reach_is_read_behind_earlier_work() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, 0, false));
        let memory = Box::leak(vec![0_u8; 4096].into_boxed_slice()).as_ptr() as usize;
        let tag = HostTag { context, flags: 0, buffer: unique_id() };
        REGIONS.register(context.session(), memory, 4096, tag).unwrap();
        REGIONS.set_elsewhere(memory, true);
        // Such as a copy to that memory.
        stream.work(&StreamMark { stream: stream.id }).unwrap();
        let before = server.session.last_seq();
        let copies = std::thread::spawn(move || {
            let copier = Copier::on(driver, stream, Mode::Async, false);
            // SAFETY: readable, and never freed.
            unsafe { copier.send(1 << 40, memory as *const u8, 64) }
        });
        // The copy if it does not wait, and otherwise what it waits for: the server never gets there.
        while server.session.last_seq() == before {
            std::thread::yield_now();
        }
        server.lose();
        assert!(copies.join().unwrap().is_err(), "it was read before");
    }
}
