//! Fills.

use crate::context;
use crate::graph::Work;
use crate::state::Driver;
use crate::types::MemsetNodeParams;
use crate::{Result, memory, stream};
use client::Status;
use client::handle::StreamId;
use client::ops::copy::Memset;

/// A fill as an operation, checked; `None` when there is nothing to fill.
pub(crate) fn op(driver: &Driver, stream: StreamId, p: &MemsetNodeParams) -> Result<Option<Memset>> {
    let MemsetNodeParams { dst, pitch, value, elementSize: element, width, height } = *p;
    if width == 0 || height == 0 {
        return Ok(None);
    }
    if !matches!(element, 1 | 2 | 4)
        || dst == 0
        || !dst.is_multiple_of(element.into())
        || height > 1 && !pitch.is_multiple_of(element as usize)
    {
        return Err(Status::INVALID_VALUE);
    }
    let row = (width as u64).checked_mul(element.into()).ok_or(Status::INVALID_VALUE)?;
    if height > 1 && (pitch as u64) < row {
        return Err(Status::INVALID_VALUE);
    }
    let span = (pitch as u64)
        .checked_mul(height as u64 - 1)
        .and_then(|rows| rows.checked_add(row))
        .ok_or(Status::INVALID_VALUE)?;
    memory::check(driver, dst, if height > 1 { span } else { row })?;
    let (pitch, width, height) = (pitch as u64, width as u64, height as u64);
    Ok(Some(Memset { stream, dst, pitch, value, element, width, height }))
}

fn fill(
    dst: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
    handle: usize,
    per_thread: bool,
) -> Result {
    let (driver, context) = context::ready()?;
    let stream = stream::any(driver, context, handle, per_thread)?;
    let params = MemsetNodeParams { dst, pitch, value, elementSize: element, width, height };
    match (op(driver, stream.id, &params)?, stream.capture()) {
        (None, _) => Ok(()),
        (Some(_), Some(capture)) => capture.add(&stream, Work::Fill(params)),
        (Some(op), None) => stream.work(driver, &op),
    }
}

api! {
    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds(dst: u64, value: u8, n: usize) |pt| { fill(dst, 0, value.into(), 1, n, 1, 0, pt) }
    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds(dst: u64, value: u16, n: usize) |pt| { fill(dst, 0, value.into(), 2, n, 1, 0, pt) }
    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds(dst: u64, value: u32, n: usize) |pt| { fill(dst, 0, value, 4, n, 1, 0, pt) }

    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds(dst: u64, pitch: usize, value: u8, width: usize, height: usize) |pt| {
        fill(dst, pitch, value.into(), 1, width, height, 0, pt)
    }
    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds(dst: u64, pitch: usize, value: u16, width: usize, height: usize) |pt| {
        fill(dst, pitch, value.into(), 2, width, height, 0, pt)
    }
    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds(dst: u64, pitch: usize, value: u32, width: usize, height: usize) |pt| {
        fill(dst, pitch, value, 4, width, height, 0, pt)
    }

    fn cuMemsetD8Async / cuMemsetD8Async_ptsz(dst: u64, value: u8, n: usize, stream: usize) |pt| {
        fill(dst, 0, value.into(), 1, n, 1, stream, pt)
    }
    fn cuMemsetD16Async / cuMemsetD16Async_ptsz(dst: u64, value: u16, n: usize, stream: usize) |pt| {
        fill(dst, 0, value.into(), 2, n, 1, stream, pt)
    }
    fn cuMemsetD32Async / cuMemsetD32Async_ptsz(dst: u64, value: u32, n: usize, stream: usize) |pt| {
        fill(dst, 0, value, 4, n, 1, stream, pt)
    }

    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz(dst: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) |pt| {
        fill(dst, pitch, value.into(), 1, width, height, stream, pt)
    }
    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz(dst: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize) |pt| {
        fill(dst, pitch, value.into(), 2, width, height, stream, pt)
    }
    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz(dst: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize) |pt| {
        fill(dst, pitch, value, 4, width, height, stream, pt)
    }
}
