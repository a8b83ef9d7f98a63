//! Copies.

use crate::abi::arguments::In;
use crate::abi::result::Result;
use crate::abi::types::memory_type::{DEVICE, HOST};
use crate::abi::types::{Memcpy2D, Memcpy3D};
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::memory::address::{self, is_device};
use crate::process::capture::Capture;
use crate::process::context::{self, Context};
use crate::process::driver::driver;
use crate::streams::capture_rules;
use crate::work::copy::{Copier, Mode};
use crate::work::copy_boxes;
use client::Status;

/// A copier for a synchronous copy between devices' memory, for which the host does not wait. Like every
/// synchronous copy it cannot be captured.
fn for_devices(per_thread: bool) -> Result<Copier> {
    let copier = Copier::new(0, per_thread, Mode::Async)?;
    capture_rules::forbid(&copier.stream)?;
    Ok(copier)
}

/// Puts a copy on the copier's stream, or adds it to the graph that the stream is captured into.
///
/// # Safety
/// The memory in the description belongs to the program for as long as the copy uses it.
unsafe fn copy_box(copier: &Copier, copy: &Memcpy3D, peer: bool) -> Result {
    if !copy_boxes::is_some(copy, peer)? {
        return Ok(());
    }
    if let Some(capture) = copier.capture()? {
        return record(copier, &capture, copy);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { copy_boxes::run(copier, copy) }
}

/// Adds a copy to the graph that the copier's stream is captured into.
fn record(copier: &Copier, capture: &Capture, copy: &Memcpy3D) -> Result {
    recording::add(capture, &copier.stream, Work::copy(copier.driver, copy)?)
}

/// Host to device, on the copier's stream or into the graph that it is captured into.
///
/// # Safety
/// As [`Copier::to_device`].
unsafe fn to_device(copier: &Copier, dst: u64, src: *const u8, len: usize) -> Result {
    let capture = if len == 0 { None } else { copier.capture()? };
    match capture {
        Some(capture) => record(copier, &capture, &line(DEVICE, dst, HOST, src as u64, len)),
        // SAFETY: guaranteed by the caller.
        _ => unsafe { copier.to_device(dst, src, len) },
    }
}

/// Device to host, in the same way.
///
/// # Safety
/// As [`Copier::to_host`].
unsafe fn to_host(copier: &Copier, dst: *mut u8, src: u64, len: usize) -> Result {
    let capture = if len == 0 { None } else { copier.capture()? };
    match capture {
        Some(capture) => record(copier, &capture, &line(HOST, dst as u64, DEVICE, src, len)),
        // SAFETY: guaranteed by the caller.
        _ => unsafe { copier.to_host(dst, src, len) },
    }
}

/// Host to host, in the same way.
///
/// # Safety
/// As [`Copier::on_host`].
unsafe fn on_host(copier: &Copier, dst: *mut u8, src: *const u8, len: usize) -> Result {
    let capture = if len == 0 { None } else { copier.capture()? };
    match capture {
        Some(capture) => record(copier, &capture, &line(HOST, dst as u64, HOST, src as u64, len)),
        // SAFETY: guaranteed by the caller.
        _ => unsafe { copier.on_host(dst, src, len) },
    }
}

/// Device to device, in the same way.
fn on_device(copier: &Copier, dst: u64, src: u64, len: usize) -> Result {
    let capture = if len == 0 { None } else { copier.capture()? };
    let Some(capture) = capture else {
        return copier.on_device(dst, src, len);
    };
    if copier.is_on_device(dst, src, len)? {
        record(copier, &capture, &line(DEVICE, dst, DEVICE, src, len))
    } else {
        // SAFETY: pinned memory of the program, or memory that no copy accepts.
        unsafe { unified(copier, dst, src, len) }
    }
}

/// Completes a copy between device memories, for which CUDA doesn't wait, if the program has
/// [asked](address::synchronizes) for that.
fn finish_on_devices(copier: &Copier, dst: u64, src: u64, len: usize) -> Result {
    let waits = |end| address::synchronizes(copier.driver, copier.stream.context, end);
    if len == 0 || copier.stream.capture().is_some() || !waits(dst) && !waits(src) {
        return Ok(());
    }
    copier.stream.synchronize()?;
    copier.has_waited();
    Ok(())
}

/// Between devices whose contexts the program passes.
fn between_peers(copier: &Copier, ends: [&'static Context; 2], dst: u64, src: u64, len: usize) -> Result {
    if copier.stream.capture().is_some() {
        return on_device(copier, dst, src, len);
    }
    copier.on_devices((dst, ends[0].server), (src, ends[1].server), len)
}

/// A copy that determines from the addresses where each end is: unified addressing.
///
/// # Safety
/// As for the resulting kind of copy.
unsafe fn unified(copier: &Copier, dst: u64, src: u64, len: usize) -> Result {
    if copier.stream.capture().is_none() || len == 0 {
        // SAFETY: guaranteed by the caller.
        return unsafe { copier.unified(dst, src, len) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (is_device(copier.driver, dst), is_device(copier.driver, src)) {
            (true, true) => on_device(copier, dst, src, len),
            (true, false) => to_device(copier, dst, src as *const u8, len),
            (false, true) => to_host(copier, dst as *mut u8, src, len),
            (false, false) => on_host(copier, dst as *mut u8, src as *const u8, len),
        }
    }
}

/// A contiguous copy as a graph node describes it.
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

/// The contexts passed to a peer copy, which must be alive. The addresses determine everything else.
fn peers(dst: usize, src: usize) -> Result<[&'static Context; 2]> {
    let of = |handle| if handle == 0 { Err(Status::INVALID_CONTEXT) } else { context::of(handle) };
    let both = [of(dst)?, of(src)?];
    if both.iter().any(|context| !context.is_alive()) {
        return Err(Status::CONTEXT_IS_DESTROYED);
    }
    Ok(both)
}

api! {
    unsafe fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds(copy: In<Memcpy2D>) |pt| {
        let copier = Copier::new(0, pt, Mode::Sync)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &Memcpy3D::from(&copy.get()?), false) }
    }

    unsafe fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds(copy: In<Memcpy2D>) |pt| {
        let copier = Copier::new(0, pt, Mode::Sync)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &Memcpy3D::from(&copy.get()?), false) }
    }

    unsafe fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz(copy: In<Memcpy2D>, stream: usize) |pt| {
        let copier = Copier::new(stream, pt, Mode::Async)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &Memcpy3D::from(&copy.get()?), false) }
    }

    unsafe fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds(copy: In<Memcpy3D>) |pt| {
        let copier = Copier::new(0, pt, Mode::Sync)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &copy.get()?, false) }
    }

    unsafe fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz(copy: In<Memcpy3D>, stream: usize) |pt| {
        let copier = Copier::new(stream, pt, Mode::Async)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &copy.get()?, false) }
    }

    unsafe fn cuMemcpy3DPeer / cuMemcpy3DPeer_ptds(copy: In<Memcpy3D>) |pt| {
        let copier = Copier::new(0, pt, Mode::Sync)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &copy.get()?, true) }
    }

    unsafe fn cuMemcpy3DPeerAsync / cuMemcpy3DPeerAsync_ptsz(copy: In<Memcpy3D>, stream: usize) |pt| {
        let copier = Copier::new(stream, pt, Mode::Async)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { copy_box(&copier, &copy.get()?, true) }
    }
}

api! {
    unsafe fn cuMemcpy / cuMemcpy_ptds(dst: u64, src: u64, len: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { unified(&Copier::new(0, pt, Mode::Sync)?, dst, src, len) }
    }

    unsafe fn cuMemcpyAsync / cuMemcpyAsync_ptsz(dst: u64, src: u64, len: usize, stream: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { unified(&Copier::new(stream, pt, Mode::Async)?, dst, src, len) }
    }

    unsafe fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds(dst: u64, src: *const u8, len: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { to_device(&Copier::new(0, pt, Mode::Sync)?, dst, src, len) }
    }

    unsafe fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz(dst: u64, src: *const u8, len: usize, stream: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { to_device(&Copier::new(stream, pt, Mode::Async)?, dst, src, len) }
    }

    unsafe fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds(dst: *mut u8, src: u64, len: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { to_host(&Copier::new(0, pt, Mode::Sync)?, dst, src, len) }
    }

    unsafe fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz(dst: *mut u8, src: u64, len: usize, stream: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { to_host(&Copier::new(stream, pt, Mode::Async)?, dst, src, len) }
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds(dst: u64, src: u64, len: usize) |pt| {
        let copier = for_devices(pt)?;
        on_device(&copier, dst, src, len)?;
        finish_on_devices(&copier, dst, src, len)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz(dst: u64, src: u64, len: usize, stream: usize) |pt| {
        on_device(&Copier::new(stream, pt, Mode::Async)?, dst, src, len)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds(dst: u64, dst_ctx: usize, src: u64, src_ctx: usize, len: usize) |pt| {
        driver()?;
        let ends = peers(dst_ctx, src_ctx)?;
        let copier = for_devices(pt)?;
        between_peers(&copier, ends, dst, src, len)?;
        finish_on_devices(&copier, dst, src, len)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz(dst: u64, dst_ctx: usize, src: u64, src_ctx: usize, len: usize, stream: usize) |pt| {
        driver()?;
        let ends = peers(dst_ctx, src_ctx)?;
        between_peers(&Copier::new(stream, pt, Mode::Async)?, ends, dst, src, len)
    }
}
