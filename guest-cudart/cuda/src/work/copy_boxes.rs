//! Copies of rectangles and boxes.
//!
//! Between device memories they are one operation. Between host and device, rows without gaps on both sides
//! are one contiguous copy. Otherwise rows are packed into the arena chunk by chunk, and the device's side of
//! each chunk is a box. With pinned memory and an asynchronous copy, each row is a reference of its own: the
//! source must not be read before the stream reaches the copy.

use crate::abi::result::Result;
use crate::abi::types::{Memcpy3D, memory_type};
use crate::memory::address::{self, is_device};
use crate::memory::array::{self, End};
use crate::memory::pinned_regions::{self, REGIONS};
use crate::memory::transfer::{self, move_bytes};
use crate::memory::{managed, stream_ordered};
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Server, driver};
use crate::process::stream::Stream;
use crate::streams::capture_rules;
use crate::work::copy::{Copier, Mode, is_pinned};
use crate::work::server_copy::{self, Linear, Split};
use client::Status;
use client::data::{HostIn, HostOut};
use client::handle::StreamId;
use client::ops::copy::{MemcpyDtoD, MemcpyDtoD3D, MemcpyDtoH3D, MemcpyHtoD3D, Pitched};

/// One side of a copy: linear memory of either kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Side {
    device: bool,
    /// First byte.
    address: u64,
    pitch: u64,
    slice: u64,
}

/// The extent of a copy: bytes per row, rows, slices.
#[derive(Debug, Clone, Copy)]
struct Extent {
    width: u64,
    height: u64,
    depth: u64,
}

impl Side {
    /// Bytes from the first to the end of the last.
    fn span(&self, e: &Extent) -> Option<u64> {
        let slices = self.slice.checked_mul(e.depth - 1)?;
        let rows = self.pitch.checked_mul(e.height - 1)?;
        slices.checked_add(rows)?.checked_add(e.width)
    }

    /// Whether rows and slices follow each other without gaps.
    fn is_packed(&self, e: &Extent) -> bool {
        (e.height == 1 || self.pitch == e.width) && (e.depth == 1 || self.slice == e.width * e.height)
    }

    /// Checks that all of it is memory of its kind. Returns the context if it is device memory.
    fn check(&self, driver: &Driver, near: &'static Server, e: &Extent) -> Result<Option<&'static Context>> {
        let span = self.span(e).filter(|span| self.address.checked_add(*span).is_some());
        let span = span.ok_or(Status::INVALID_VALUE)?;
        if self.address == 0 {
            return Err(Status::INVALID_VALUE);
        }
        if self.device {
            address::check_near(driver, near, self.address, span).map(|found| Some(found.context))
        } else if address::is_reserved(driver, self.address)
            && !address::find(driver, self.address).is_some_and(|found| found.managed)
        {
            Err(Status::INVALID_VALUE)
        } else {
            Ok(None)
        }
    }

    /// Whether all of it is pinned memory that copies use as the host's.
    fn is_pinned(&self, driver: &Driver, e: &Extent) -> bool {
        !address::is_reserved(driver, self.address)
            && self.span(e).is_some_and(|span| is_pinned(self.address, span as usize))
    }

    fn row(&self, z: u64, y: u64) -> u64 {
        self.address + z * self.slice + y * self.pitch
    }

    /// The same as linear memory of a context.
    fn on(&self, context: &'static Context) -> Linear {
        Linear { context, place: self.pitched() }
    }

    fn pitched(&self) -> Pitched {
        Pitched { address: self.address, pitch: self.pitch, slice: self.slice }
    }
}

impl Copier {
    /// # Safety
    /// Host sides are readable or writable over their span, for as long as `copy`'s functions require.
    unsafe fn boxes(&self, dst: Side, src: Side, e: Extent) -> Result {
        if e.width == 0 || e.height == 0 || e.depth == 0 {
            return Ok(());
        }
        let to = dst.check(self.driver, self.server(), &e)?;
        let from = src.check(self.driver, self.server(), &e)?;
        let other = [to, from].into_iter().flatten().find(|context| !self.is_own(context));
        if let Some(other) = other {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.boxes_elsewhere(dst, src, e, other, [to, from]) };
        }
        let homes: Vec<_> = [to, from].into_iter().flatten().collect();
        let packed = dst.is_packed(&e) && src.is_packed(&e);
        let bytes = (e.width * e.height * e.depth) as usize;
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (dst.device, src.device) {
                (true, true) if packed => self.on_device(dst.address, src.address, bytes),
                (true, true) => {
                    let op = MemcpyDtoD3D {
                        stream: self.stream.id,
                        dst: dst.pitched(),
                        src: src.pitched(),
                        extent: [e.width, e.height, e.depth],
                    };
                    server_copy::by_default_streams(&self.stream, &homes, || {
                        self.put(&op, dst.address, dst.span(&e).ok_or(Status::INVALID_VALUE)?)?;
                        self.finish_shared(&[dst.address, src.address])
                    })
                }
                (true, false) if packed => self.to_device(dst.address, src.address as *const u8, bytes),
                (true, false) => self.rows_to_device(dst, src, e),
                (false, true) if packed => self.to_host(dst.address as *mut u8, src.address, bytes),
                (false, true) => self.rows_to_host(dst, src, e),
                (false, false) if packed => {
                    self.on_host(dst.address as *mut u8, src.address as *const u8, bytes)
                }
                (false, false) => {
                    self.stream.synchronize_as_operation()?;
                    self.has_waited();
                    for (z, y) in rows(&e) {
                        std::ptr::copy(
                            src.row(z, y) as *const u8,
                            dst.row(z, y) as *mut u8,
                            e.width as usize,
                        );
                    }
                    Ok(())
                }
            }
        }
    }

    /// A copy with one side on another server than the stream's.
    ///
    /// # Safety
    /// As [`boxes`](Self::boxes).
    unsafe fn boxes_elsewhere(
        &self,
        dst: Side,
        src: Side,
        e: Extent,
        other: &'static Context,
        ends: [Option<&'static Context>; 2],
    ) -> Result {
        if let [Some(to), Some(from)] = ends
            && !std::ptr::eq(to.server, from.server)
        {
            let span = |side: &Side| Ok((side.address, side.span(&e).ok_or(Status::INVALID_VALUE)?));
            let spans = [span(&dst)?, span(&src)?];
            let (to, from) = (dst.on(to), src.on(from));
            server_copy::between(self.driver, &self.stream, to, from, spans, split(&dst, &src, &e))?;
            return self.finish_managed(&[dst.address, src.address]);
        }
        let stays = [dst, src].iter().all(|side| side.device || self.pinned(side, &e));
        // SAFETY: the call waits unless the whole host side is pinned, so the memory stays.
        self.with_other(other, stays, move |copier| unsafe { copier.boxes(dst, src, e) })
    }

    /// The host's side as one region, if all of it is pinned and registered with the host.
    fn pinned(&self, side: &Side, e: &Extent) -> bool {
        side.span(e).is_some_and(|span| {
            REGIONS.range(self.stream.session(), side.address as usize, span as usize).is_some()
        })
    }

    unsafe fn rows_to_device(&self, dst: Side, src: Side, e: Extent) -> Result {
        let session = self.stream.session();
        let stream = self.stream.id;
        if self.pinned(&src, &e) {
            if self.mode == Mode::Async {
                for (z, y) in rows(&e) {
                    // SAFETY: a row inside the source, as the caller says.
                    unsafe { self.send(dst.row(z, y), src.row(z, y) as *const u8, e.width as usize) }?;
                }
                return Ok(());
            }
            self.stream.synchronize_as_operation()?;
            self.has_waited();
        } else {
            self.before_aliases()?;
            self.before_reading(REGIONS.any(src.address as usize).is_some())?;
        }
        for part in parts(&e, transfer::chunk(session, (e.width * e.height * e.depth) as usize) as u64) {
            let n = part.bytes() as usize;
            let block = session.arena().alloc_for(session, n, &self.transfer())?;
            for (i, (z, y)) in part.rows().enumerate() {
                // SAFETY: the row is inside the source, as the caller says, and its place inside the block.
                unsafe {
                    let from = (src.row(z, y) + part.x) as *const u8;
                    move_bytes(from, block.ptr().add(i * part.width as usize), part.width as usize);
                }
            }
            let op = MemcpyHtoD3D {
                stream,
                dst: Pitched { address: dst.row(part.z, part.y) + part.x, ..dst.pitched() },
                extent: [part.width, part.height, part.depth],
                src: HostIn::Range(block.range(n)),
            };
            let seq = self.put(&op, dst.address, dst.span(&e).ok_or(Status::INVALID_VALUE)?)?;
            block.release_after(seq, self.stream.unique());
        }
        self.copied(dst.address)
    }

    unsafe fn rows_to_host(&self, dst: Side, src: Side, e: Extent) -> Result {
        let session = self.stream.session();
        let stream = self.stream.id;
        if self.mode == Mode::Async && self.pinned(&dst, &e) {
            for (z, y) in rows(&e) {
                // SAFETY: a row inside the target, as the caller says.
                unsafe { self.receive(dst.row(z, y) as *mut u8, src.row(z, y), e.width as usize) }?;
            }
            return Ok(());
        }
        for part in parts(&e, transfer::chunk(session, (e.width * e.height * e.depth) as usize) as u64) {
            let n = part.bytes() as usize;
            let block = session.arena().alloc(session, n)?;
            let op = MemcpyDtoH3D {
                stream,
                src: Pitched { address: src.row(part.z, part.y) + part.x, ..src.pitched() },
                extent: [part.width, part.height, part.depth],
                dst: HostOut(block.range(n)),
            };
            self.stream.work(&op)?;
            let (pending, block) = self.transfer().ask_when_written(block)?;
            let seq = pending.seq();
            if let Err(status) = pending.wait() {
                return self.stream.context.settle(Err(status));
            }
            self.stream.is_synced(seq);
            for (i, (z, y)) in part.rows().enumerate() {
                // SAFETY: the row is inside the target, as the caller says, and its place inside the block.
                unsafe {
                    let to = (dst.row(z, y) + part.x) as *mut u8;
                    move_bytes(block.ptr().add(i * part.width as usize), to, part.width as usize);
                }
            }
        }
        self.has_waited();
        // The kernel that should have written the bytes may have been refused.
        self.stream.context.deferred()
    }
}

fn rows(e: &Extent) -> impl Iterator<Item = (u64, u64)> + use<> {
    let Extent { height, depth, .. } = *e;
    (0..depth).flat_map(move |z| (0..height).map(move |y| (z, y)))
}

/// A box inside the copied box: whole slices, whole rows of one slice, or part of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    x: u64,
    y: u64,
    z: u64,
    width: u64,
    height: u64,
    depth: u64,
}

impl Part {
    fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }

    fn rows(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let Part { y, z, height, depth, .. } = *self;
        (z..z + depth).flat_map(move |z| (y..y + height).map(move |y| (z, y)))
    }
}

/// Splits a box into parts of at most `most` bytes, in order.
fn parts(e: &Extent, most: u64) -> impl Iterator<Item = Part> + use<> {
    let e = *e;
    let slice = e.width.saturating_mul(e.height);
    let (mut x, mut y, mut z) = (0, 0, 0);
    std::iter::from_fn(move || {
        if z >= e.depth {
            return None;
        }
        let part = if slice <= most {
            let depth = (most / slice).min(e.depth - z);
            Part { x: 0, y: 0, z, width: e.width, height: e.height, depth }
        } else if e.width <= most {
            let height = (most / e.width).min(e.height - y);
            Part { x: 0, y, z, width: e.width, height, depth: 1 }
        } else {
            Part { x, y, z, width: most.min(e.width - x), height: 1, depth: 1 }
        };
        x = part.x + part.width;
        if x < e.width {
            return Some(part);
        }
        x = 0;
        y += part.height;
        if y >= e.height {
            y = 0;
            z += part.depth;
        }
        Some(part)
    })
}

/// Splits a copy between two servers into parts that fit into slots.
fn split(dst: &Side, src: &Side, e: &Extent) -> Split {
    let at = |side: &Side, part: &Part| side.row(part.z, part.y) + part.x;
    let piece = |part: Part| server_copy::Part {
        dst: at(dst, &part),
        src: at(src, &part),
        extent: [part.width, part.height, part.depth],
    };
    let parts = parts(e, server_copy::SLOT as u64).map(piece).collect();
    Split { extent: [e.width, e.height, e.depth], parts }
}

/// One side of a program's description.
struct Described {
    kind: u32,
    host: usize,
    device: u64,
    array: usize,
    x: usize,
    y: usize,
    z: usize,
    pitch: usize,
    /// Rows per slice; 0 in the flat form.
    height: usize,
}

impl Described {
    fn end(&self, driver: &Driver, e: &Extent) -> Result<Place> {
        if self.kind == memory_type::ARRAY {
            let at = [self.x as u64, self.y as u64, self.z as u64];
            return Ok(Place::Not(End::Array(array::of(self.array)?, at)));
        }
        self.side(driver, e).map(Place::Side)
    }

    fn side(&self, driver: &Driver, e: &Extent) -> Result<Side> {
        let (device, base) = match self.kind {
            // A program may describe managed memory as host memory; it is copied as device memory.
            memory_type::HOST => (managed::is_here(self.host as u64), self.host as u64),
            memory_type::DEVICE => (true, self.device),
            memory_type::UNIFIED => (is_device(driver, self.device), self.device),
            _ => return Err(Status::INVALID_VALUE),
        };
        // A pitch of 0 means that rows follow each other.
        let pitch = if self.pitch == 0 {
            (self.x as u64).checked_add(e.width).ok_or(Status::INVALID_VALUE)?
        } else {
            self.pitch as u64
        };
        let height = if self.height == 0 {
            (self.y as u64).checked_add(e.height).ok_or(Status::INVALID_VALUE)?
        } else {
            self.height as u64
        };
        if pitch < (self.x as u64).saturating_add(e.width)
            || e.depth > 1 && height < (self.y as u64).saturating_add(e.height)
        {
            return Err(Status::INVALID_VALUE);
        }
        let slice = pitch.checked_mul(height).ok_or(Status::INVALID_VALUE)?;
        let place = (self.z as u64)
            .checked_mul(slice)
            .and_then(|at| at.checked_add((self.y as u64).checked_mul(pitch)?))
            .and_then(|at| at.checked_add(self.x as u64))
            .and_then(|at| at.checked_add(base))
            .ok_or(Status::INVALID_VALUE)?;
        if base == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let mut side = Side { device, address: place, pitch, slice };
        // With unified addressing, pinned memory also has a device address.
        side.device &= self.kind != memory_type::DEVICE || !side.is_pinned(driver, e);
        Ok(side)
    }
}

/// One end of a copy: linear memory, or an array.
enum Place {
    Side(Side),
    Not(End),
}

impl Copier {
    /// # Safety
    /// As [`Copier::boxes`].
    unsafe fn between(&self, dst: &Described, src: &Described, e: Extent) -> Result {
        // SAFETY: guaranteed by the caller.
        unsafe { self.between_ends(dst.end(self.driver, &e)?, src.end(self.driver, &e)?, e) }
    }

    /// # Safety
    /// As [`Copier::boxes`].
    unsafe fn between_ends(&self, dst: Place, src: Place, e: Extent) -> Result {
        let extent = [e.width, e.height, e.depth];
        let mut homes = Vec::new();
        if matches!((&dst, &src), (Place::Not(_), _) | (_, Place::Not(_))) {
            let ends = [self.home(&dst, &e)?, self.home(&src, &e)?];
            homes.extend(ends.into_iter().flatten());
            if ends.iter().flatten().any(|context| !self.is_own(context)) {
                // SAFETY: guaranteed by the caller.
                return unsafe { self.arrays_elsewhere(dst, src, e, ends) };
            }
        }
        let memory = |side: &Side| {
            let span = side.span(&e).ok_or(Status::INVALID_VALUE)?;
            address::check_near(self.driver, self.server(), side.address, span)?;
            Ok::<_, Status>(End::Device(side.pitched()))
        };
        let packed = |memory: &Pitched| Side {
            device: true,
            address: memory.address,
            pitch: memory.pitch,
            slice: memory.slice,
        };
        // SAFETY: guaranteed by the caller.
        let copy = || unsafe {
            match (dst, src) {
                (Place::Side(dst), Place::Side(src)) => self.boxes(dst, src, e),
                (Place::Not(dst), Place::Not(src)) => self.with_array(&dst, &src, extent),
                (Place::Not(dst), Place::Side(src)) if src.device => {
                    self.with_array(&dst, &memory(&src)?, extent)
                }
                (Place::Side(dst), Place::Not(src)) if dst.device => {
                    self.with_array(&memory(&dst)?, &src, extent)
                }
                (Place::Not(dst), Place::Side(src)) => self.by_way_of(extent, |between| {
                    self.boxes(packed(between), src, e)?;
                    self.with_array(&dst, &End::Device(between.clone()), extent)?;
                    self.copied(between.address)
                }),
                (Place::Side(dst), Place::Not(src)) => self.by_way_of(extent, |between| {
                    self.with_array(&End::Device(between.clone()), &src, extent)?;
                    self.boxes(dst, packed(between), e)
                }),
            }
        };
        server_copy::by_default_streams(&self.stream, &homes, copy)
    }
}

impl Copier {
    /// The context of an end, if it is device memory.
    fn home(&self, end: &Place, e: &Extent) -> Result<Option<&'static Context>> {
        match end {
            Place::Not(End::Array(array, _)) => Ok(Some(array.context)),
            Place::Not(End::Device(_)) => Ok(None),
            Place::Side(side) => side.check(self.driver, self.server(), e),
        }
    }

    /// A copy with an array, and with one end on another server than the stream's.
    ///
    /// # Safety
    /// As [`Copier::boxes`].
    unsafe fn arrays_elsewhere(
        &self,
        dst: Place,
        src: Place,
        e: Extent,
        ends: [Option<&'static Context>; 2],
    ) -> Result {
        capture_rules::refuse(&self.stream)?;
        let driver = self.driver;
        let [Some(to), Some(from)] = ends else {
            let home = ends.into_iter().flatten().next().ok_or(Status::INVALID_VALUE)?;
            let pinned =
                |end: &Place| !matches!(end, Place::Side(side) if !side.device && !self.pinned(side, &e));
            let stays = pinned(&dst) && pinned(&src);
            // SAFETY: the call waits unless the whole host side is pinned, so the memory stays.
            return self.with_other(home, stays, move |copier| unsafe { copier.between_ends(dst, src, e) });
        };
        if std::ptr::eq(to.server, from.server) {
            // SAFETY: neither end is host memory.
            return self.with_other(to, true, move |copier| unsafe { copier.between_ends(dst, src, e) });
        }
        let linear = |end: &Place| if let Place::Side(side) = end { side.address } else { 0 };
        let linear = [linear(&dst), linear(&src)];
        let ends = [server_copy::alive(driver, to), server_copy::alive(driver, from)];
        server_copy::across(driver, &self.stream, &ends, move || {
            let copiers = [Copier::beside(driver, ends[0])?, Copier::beside(driver, ends[1])?];
            let (to, from) = (Flat::of(&copiers[0], dst, &e)?, Flat::of(&copiers[1], src, &e)?);
            from.read_array(&copiers[1], &e)?;
            copiers[1].stream.synchronize()?;
            let spans = [to.span(&e)?, from.span(&e)?];
            let split = split(&to.side, &from.side, &e);
            server_copy::carry(to.side.on(ends[0]), from.side.on(ends[1]), spans, split)?;
            to.write_array(&copiers[0], &e)?;
            copiers[0].stream.synchronize()
        })?;
        self.finish_managed(&linear)
    }

    /// A copier for this library's own work in a context.
    fn beside(driver: &'static Driver, context: &'static Context) -> Result<Copier> {
        Ok(Copier::on(driver, server_copy::stream_of(context)?, Mode::Sync, true))
    }
}

/// An end of a copy between servers as linear memory: an array is replaced by temporary memory.
struct Flat<'c> {
    side: Side,
    array: Option<End>,
    copier: &'c Copier,
}

impl Flat<'_> {
    fn of<'c>(copier: &'c Copier, end: Place, e: &Extent) -> Result<Flat<'c>> {
        let array = match end {
            Place::Side(side) => return Ok(Flat { side, array: None, copier }),
            Place::Not(array) => array,
        };
        array.check([e.width, e.height, e.depth])?;
        let bytes = e.width.checked_mul(e.height).and_then(|n| n.checked_mul(e.depth));
        let (bytes, context) = (bytes.ok_or(Status::INVALID_VALUE)?, copier.stream.context);
        let address = stream_ordered::alloc(copier.driver, context, context.device, bytes, 0)?;
        let side = Side { device: true, address, pitch: e.width, slice: e.width * e.height };
        Ok(Flat { side, array: Some(array), copier })
    }

    fn span(&self, e: &Extent) -> Result<(u64, u64)> {
        Ok((self.side.address, self.side.span(e).ok_or(Status::INVALID_VALUE)?))
    }

    fn read_array(&self, copier: &Copier, e: &Extent) -> Result {
        let Some(array) = &self.array else { return Ok(()) };
        copier.with_array(&End::Device(self.side.pitched()), array, [e.width, e.height, e.depth])
    }

    fn write_array(&self, copier: &Copier, e: &Extent) -> Result {
        let Some(array) = &self.array else { return Ok(()) };
        copier.with_array(array, &End::Device(self.side.pitched()), [e.width, e.height, e.depth])
    }
}

impl Drop for Flat<'_> {
    fn drop(&mut self) {
        if self.array.is_some() {
            // What cannot be freed is freed with the session.
            let _ = stream_ordered::free_in_order(
                self.copier.driver,
                self.side.address,
                self.copier.stream.clone(),
            );
        }
    }
}

/// The two sides of a description, and the extent.
fn described(c: &Memcpy3D) -> (Described, Described, Extent) {
    let dst = Described {
        kind: c.dstMemoryType,
        host: c.dstHost,
        device: c.dstDevice,
        array: c.dstArray,
        x: c.dstXInBytes,
        y: c.dstY,
        z: c.dstZ,
        pitch: c.dstPitch,
        height: c.dstHeight,
    };
    let src = Described {
        kind: c.srcMemoryType,
        host: c.srcHost,
        device: c.srcDevice,
        array: c.srcArray,
        x: c.srcXInBytes,
        y: c.srcY,
        z: c.srcZ,
        pitch: c.srcPitch,
        height: c.srcHeight,
    };
    (dst, src, Extent { width: c.WidthInBytes as u64, height: c.Height as u64, depth: c.Depth as u64 })
}

/// Checks a program's description by itself. Returns false if there is nothing to copy.
pub(crate) fn is_some(c: &Memcpy3D, peer: bool) -> Result<bool> {
    // The reserved fields are the contexts of the peer form. CUDA's manual wants them to be NULL, but
    // NVIDIA's driver takes descriptions with contexts there, as cuda-api-wrappers makes them.
    if c.srcLOD != 0 || c.dstLOD != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if c.WidthInBytes == 0 || c.Height == 0 || c.Depth == 0 {
        return Ok(false);
    }
    if peer {
        for (kind, handle) in [(c.dstMemoryType, c.reserved1), (c.srcMemoryType, c.reserved0)] {
            if kind == memory_type::DEVICE && !context::of(handle)?.is_alive() {
                return Err(Status::CONTEXT_IS_DESTROYED);
            }
        }
    }
    Ok(true)
}

/// Puts a copy that [is not empty](is_some) on the copier's stream, which must not be in a capture.
///
/// # Safety
/// As [`Copier::boxes`].
pub(crate) unsafe fn run(copier: &Copier, c: &Memcpy3D) -> Result {
    let (dst, src, e) = described(c);
    // SAFETY: guaranteed by the caller.
    unsafe { copier.between(&dst, &src, e) }
}

/// A copy inside device memory, as an operation.
pub(crate) enum OnDevice {
    Line(MemcpyDtoD),
    Box(MemcpyDtoD3D),
}

/// The description with unified addresses resolved, managed memory always described as device memory, and
/// pinned memory that kernels have not reached as the host's.
pub(crate) fn resolve(driver: &Driver, c: &Memcpy3D) -> Result<Memcpy3D> {
    let mut c = *c;
    let (dst, src, e) = described(&c);
    let copies = is_some(&c, false)?;
    for (side, kind, host, device) in [
        (src, &mut c.srcMemoryType, &mut c.srcHost, &mut c.srcDevice),
        (dst, &mut c.dstMemoryType, &mut c.dstHost, &mut c.dstDevice),
    ] {
        if *kind == memory_type::DEVICE && copies {
            if !side.side(driver, &e)?.device {
                (*kind, *host) = (memory_type::HOST, *device as usize);
            }
        } else if *kind == memory_type::UNIFIED {
            if is_device(driver, *device) {
                *kind = memory_type::DEVICE;
            } else {
                (*kind, *host) = (memory_type::HOST, *device as usize);
            }
        } else if *kind == memory_type::HOST && managed::is_here(*host as u64) {
            (*kind, *device) = (memory_type::DEVICE, *host as u64);
        }
    }
    Ok(c)
}

/// The kinds of memory at both ends of a [resolved](resolve) copy, as CUDA knows them. Pinned memory is the
/// host's, although a copy that was resolved after kernels have reached it describes it as device memory.
pub(crate) fn kinds(c: &Memcpy3D) -> [u32; 2] {
    [(c.dstMemoryType, c.dstDevice), (c.srcMemoryType, c.srcDevice)].map(|(kind, address)| match kind {
        memory_type::DEVICE if pinned_regions::find(address).is_some() => memory_type::HOST,
        kind => kind,
    })
}

/// A [resolved](resolve) copy as the program described it: with pinned memory as the host's where it said so.
/// Resolving leaves the host's address in place.
pub(crate) fn told(c: &Memcpy3D) -> Memcpy3D {
    let mut c = *c;
    for (kind, host, device) in
        [(&mut c.srcMemoryType, c.srcHost, c.srcDevice), (&mut c.dstMemoryType, c.dstHost, c.dstDevice)]
    {
        if *kind == memory_type::DEVICE && host as u64 == device && pinned_regions::find(device).is_some() {
            *kind = memory_type::HOST;
        }
    }
    c
}

/// Whether both sides of a [resolved](resolve) copy are host memory.
pub(crate) fn is_on_host(c: &Memcpy3D) -> bool {
    c.dstMemoryType == memory_type::HOST && c.srcMemoryType == memory_type::HOST
}

/// Whether both sides of a [resolved](resolve) copy are linear device memory.
pub(crate) fn is_on_device(c: &Memcpy3D) -> bool {
    c.dstMemoryType == memory_type::DEVICE && c.srcMemoryType == memory_type::DEVICE
}

/// Whether a server can do a copy by itself: both sides are linear memory of its devices.
pub(crate) fn is_on_server(server: &'static Server, c: &Memcpy3D) -> bool {
    let is_its = |driver: &Driver, address| {
        address::find_near(driver, server, address)
            .is_none_or(|found| std::ptr::eq(found.context.server, server))
    };
    is_on_device(c)
        && driver().is_ok_and(|driver| {
            driver.servers.len() == 1 || is_its(driver, c.dstDevice) && is_its(driver, c.srcDevice)
        })
}

/// How a copy is done.
pub(crate) enum Route {
    /// There is nothing to copy.
    Nothing,
    /// By this process, which takes part in it.
    Here,
    /// By the server: both sides are device memory.
    Server(OnDevice),
}

/// How a graph's copy is done, after checking it.
pub(crate) fn route(driver: &Driver, server: &'static Server, c: &Memcpy3D) -> Result<Route> {
    let (dst, src, e) = described(c);
    if !is_some(c, false)? {
        return Ok(Route::Nothing);
    }
    let extent = [e.width, e.height, e.depth];
    let mut own = true;
    for side in [&dst, &src] {
        match side.end(driver, &e)? {
            Place::Not(end) => end.check(extent)?,
            Place::Side(side) => {
                let home = side.check(driver, server, &e)?;
                own &= home.is_none_or(|home| std::ptr::eq(home.server, server));
            }
        }
    }
    if !own || !is_on_device(c) {
        return Ok(Route::Here);
    }
    let (dst, src) = (dst.side(driver, &e)?, src.side(driver, &e)?);
    let stream = StreamId(0);
    Ok(Route::Server(if dst.is_packed(&e) && src.is_packed(&e) {
        let len = e.width * e.height * e.depth;
        OnDevice::Line(MemcpyDtoD { stream, dst: dst.address, src: src.address, len })
    } else {
        OnDevice::Box(MemcpyDtoD3D { stream, dst: dst.pitched(), src: src.pitched(), extent })
    }))
}

/// Pageable memory, which the GPU's host cannot access, as the source or target of a graph's copy.
pub(crate) struct Pageable {
    pub to_host: bool,
    side: Side,
    extent: Extent,
}

impl Pageable {
    /// Size in bytes, packed.
    pub fn len(&self) -> usize {
        (self.extent.width * self.extent.height * self.extent.depth) as usize
    }

    /// First byte, and size up to the end of the last.
    pub fn span(&self) -> (usize, usize) {
        (self.side.address as usize, self.side.span(&self.extent).unwrap_or(0) as usize)
    }

    /// Copies packed bytes to their places.
    ///
    /// # Safety
    /// `packed` has [`len`](Self::len) bytes, and the program's memory is as described.
    pub unsafe fn unpack(&self, packed: *const u8) {
        let width = self.extent.width as usize;
        for (n, (z, y)) in rows(&self.extent).enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { move_bytes(packed.add(n * width), self.side.row(z, y) as *mut u8, width) };
        }
    }

    /// Copies bytes from their places, and packs them.
    ///
    /// # Safety
    /// As for [`unpack`](Self::unpack).
    pub unsafe fn pack(&self, packed: *mut u8) {
        let width = self.extent.width as usize;
        for (n, (z, y)) in rows(&self.extent).enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { move_bytes(self.side.row(z, y) as *const u8, packed.add(n * width), width) };
        }
    }
}

/// The pageable side of a [resolved](resolve) copy, if exactly one side is host memory.
pub(crate) fn pageable(driver: &Driver, stream: &Stream, c: &Memcpy3D) -> Result<Option<Pageable>> {
    let (dst, src, extent) = described(c);
    let to_host = dst.kind == memory_type::HOST;
    if to_host == (src.kind == memory_type::HOST) {
        return Ok(None);
    }
    let side = if to_host { &dst } else { &src }.side(driver, &extent)?;
    let span = side.span(&extent).ok_or(Status::INVALID_VALUE)?;
    let pinned = REGIONS.range(stream.session(), side.address as usize, span as usize).is_some();
    Ok((!pinned).then_some(Pageable { to_host, side, extent }))
}

/// The same copy with the packed bytes at `packed` as its target.
pub(crate) fn to_packed(c: &Memcpy3D, packed: usize) -> Memcpy3D {
    let dst = Memcpy3D { dstXInBytes: 0, dstY: 0, dstZ: 0, ..*c };
    Memcpy3D { dstHost: packed, dstPitch: c.WidthInBytes, dstHeight: c.Height, ..dst }
}

/// The same copy with the packed bytes at `packed` as its source.
pub(crate) fn from_packed(c: &Memcpy3D, packed: usize) -> Memcpy3D {
    let src = Memcpy3D { srcXInBytes: 0, srcY: 0, srcZ: 0, ..*c };
    Memcpy3D { srcHost: packed, srcPitch: c.WidthInBytes, srcHeight: c.Height, ..src }
}

/// Copies from host memory to host memory immediately.
///
/// # Safety
/// Both are readable and writable as described.
pub(crate) unsafe fn on_host(driver: &Driver, c: &Memcpy3D) -> Result {
    let (dst, src, e) = described(c);
    let (dst, src) = (dst.side(driver, &e)?, src.side(driver, &e)?);
    for (z, y) in rows(&e) {
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy(src.row(z, y) as *const u8, dst.row(z, y) as *mut u8, e.width as usize) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_the_box_once_and_stay_small(width in 1u64..40, height in 1u64..12, depth in 1u64..6, most in 1u64..300) {
            let e = Extent { width, height, depth };
            let mut seen = vec![0u8; (width * height * depth) as usize];
            for part in parts(&e, most) {
                prop_assert!(part.bytes() <= most);
                for (z, y) in part.rows() {
                    for x in part.x..part.x + part.width {
                        seen[((z * height + y) * width + x) as usize] += 1;
                    }
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }

        #[test]
        fn packed_means_that_every_row_is_where_bytes_in_a_row_have_it(
            width in 1u64..6, height in 1u64..4, depth in 1u64..4, pitch_gap in 0u64..2, slice_gap in 0u64..2
        ) {
            let e = Extent { width, height, depth };
            let pitch = width + pitch_gap;
            let side = Side { device: true, address: 100, pitch, slice: pitch * height + slice_gap };
            let in_a_row = rows(&e).enumerate().all(|(i, (z, y))| side.row(z, y) == 100 + i as u64 * width);
            prop_assert_eq!(side.is_packed(&e), in_a_row);
        }
    }
}
