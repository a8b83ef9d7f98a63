//! Fills.

use crate::abi::result::Result;
use crate::abi::types::MemsetNodeParams;
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::memory::address;
use crate::memory::managed::{self, shared_blocks};
use crate::streams::stream_table;
use crate::work::fill::Fill;

pub(crate) fn fill(
    dst: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
    handle: Option<usize>,
    per_thread: bool,
) -> Result {
    let (driver, context, _lent) = stream_table::ready_on(handle.unwrap_or(0))?;
    let stream = stream_table::any(context, handle.unwrap_or(0), per_thread)?;
    let params = MemsetNodeParams { dst, pitch, value, elementSize: element, width, height };
    let fill = Fill::of(driver, stream.context.server, stream.id, &params)?;
    if let (Some(capture), false) = (stream.capture(), matches!(fill, Fill::Nothing)) {
        return recording::add(&capture, &stream, Work::Fill(params));
    }
    // For host memory, including memory that the host sees at once, and for memory of which the program has
    // asked that, this is the form that waits.
    let waits = handle.is_none()
        && (matches!(fill, Fill::Here(_))
            || managed::is_seen_at_once(dst)
            || address::synchronizes(driver, stream.context, dst));
    fill.run(driver, &stream)?;
    if !waits {
        return Ok(());
    }
    let result = stream.synchronize();
    shared_blocks::after_wait(driver);
    result
}

api! {
    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds(dst: u64, value: u8, n: usize) |pt| { fill(dst, 0, value.into(), 1, n, 1, None, pt) }
    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds(dst: u64, value: u16, n: usize) |pt| { fill(dst, 0, value.into(), 2, n, 1, None, pt) }
    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds(dst: u64, value: u32, n: usize) |pt| { fill(dst, 0, value, 4, n, 1, None, pt) }

    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds(dst: u64, pitch: usize, value: u8, width: usize, height: usize) |pt| {
        fill(dst, pitch, value.into(), 1, width, height, None, pt)
    }
    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds(dst: u64, pitch: usize, value: u16, width: usize, height: usize) |pt| {
        fill(dst, pitch, value.into(), 2, width, height, None, pt)
    }
    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds(dst: u64, pitch: usize, value: u32, width: usize, height: usize) |pt| {
        fill(dst, pitch, value, 4, width, height, None, pt)
    }

    fn cuMemsetD8Async / cuMemsetD8Async_ptsz(dst: u64, value: u8, n: usize, stream: usize) |pt| {
        fill(dst, 0, value.into(), 1, n, 1, Some(stream), pt)
    }
    fn cuMemsetD16Async / cuMemsetD16Async_ptsz(dst: u64, value: u16, n: usize, stream: usize) |pt| {
        fill(dst, 0, value.into(), 2, n, 1, Some(stream), pt)
    }
    fn cuMemsetD32Async / cuMemsetD32Async_ptsz(dst: u64, value: u32, n: usize, stream: usize) |pt| {
        fill(dst, 0, value, 4, n, 1, Some(stream), pt)
    }

    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz(dst: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) |pt| {
        fill(dst, pitch, value.into(), 1, width, height, Some(stream), pt)
    }
    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz(dst: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize) |pt| {
        fill(dst, pitch, value.into(), 2, width, height, Some(stream), pt)
    }
    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz(dst: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize) |pt| {
        fill(dst, pitch, value, 4, width, height, Some(stream), pt)
    }
}
