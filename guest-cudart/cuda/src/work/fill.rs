//! Fills.

use std::sync::Arc;

use crate::abi::result::Result;
use crate::abi::types::MemsetNodeParams;
use crate::memory::{address, managed, pinned_regions};
use crate::process::context::Context;
use crate::process::driver::{Driver, Server};
use crate::process::stream::Stream;
use crate::work::host_function::{self, Function};
use crate::work::server_copy;
use client::Status;
use client::handle::StreamId;
use client::ops::copy::Memset;

/// How a fill is done.
pub(crate) enum Fill {
    /// There is nothing to fill.
    Nothing,
    /// By the server that has the memory, in the context it belongs to.
    Server(Memset, &'static Context),
    /// By this process, because it is pinned memory.
    Here(Bytes),
}

impl Fill {
    /// How a fill is done now, after checking it. If several servers have a variable there, `near` decides.
    pub fn of(
        driver: &Driver,
        near: &'static Server,
        stream: StreamId,
        p: &MemsetNodeParams,
    ) -> Result<Fill> {
        if !address::is_reserved(driver, p.dst)
            && let Some(bytes) = pinned(p)?
        {
            return Ok(Fill::Here(bytes));
        }
        Ok(op(driver, near, stream, p)?.map_or(Fill::Nothing, |(op, home)| Fill::Server(op, home)))
    }

    /// Puts it on a stream.
    pub fn run(self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        match self {
            Fill::Nothing => Ok(()),
            Fill::Server(op, home) if !std::ptr::eq(home.server, stream.context.server) => {
                server_copy::on_other(driver, stream, home, false, move |stream| {
                    Fill::Server(Memset { stream: stream.id, ..op }, stream.context).run(driver, stream)
                })
            }
            Fill::Server(op, _) => {
                let span = op.pitch * op.height.saturating_sub(1) + op.width * u64::from(op.element);
                let _order = managed::before_work_on(op.dst, span)?;
                stream.work(&op).map(drop)
            }
            Fill::Here(bytes) => {
                let filled = Function::Own(Box::new(move || {
                    // SAFETY: pinned memory of the program, which promises that it may be written when the
                    // stream gets here.
                    unsafe { bytes.fill() }
                }));
                host_function::on(driver, stream.clone(), filled, std::ptr::null_mut())
            }
        }
    }
}

/// Whether this process or another server does a fill.
pub(crate) fn is_elsewhere(driver: &Driver, server: Option<&'static Server>, p: &MemsetNodeParams) -> bool {
    let near = server.unwrap_or_else(|| address::nearest(driver));
    match Fill::of(driver, near, StreamId(0), p) {
        Ok(Fill::Here(_)) => true,
        Ok(Fill::Server(_, home)) => server.is_some_and(|server| !std::ptr::eq(home.server, server)),
        Ok(Fill::Nothing) | Err(_) => false,
    }
}

/// A fill as an operation, after checking it. `None` if there is nothing to fill.
fn op(
    driver: &Driver,
    near: &'static Server,
    stream: StreamId,
    p: &MemsetNodeParams,
) -> Result<Option<(Memset, &'static Context)>> {
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
    let home = address::check_near(driver, near, dst, if height > 1 { span } else { row })?.context;
    let (pitch, width, height) = (pitch as u64, width as u64, height as u64);
    Ok(Some((Memset { stream, dst, pitch, value, element, width, height }, home)))
}

/// A fill of pinned memory.
pub(crate) struct Bytes(MemsetNodeParams);

impl Bytes {
    /// # Safety
    /// The memory is writable.
    unsafe fn fill(&self) {
        let p = &self.0;
        let value = p.value.to_le_bytes();
        for row in 0..p.height {
            for i in 0..p.width {
                let at = p.dst as usize + row * p.pitch + i * p.elementSize as usize;
                // SAFETY: inside the range that `pinned` found; the alignment is unknown, so the writes are
                // unaligned.
                unsafe {
                    std::ptr::copy_nonoverlapping(value.as_ptr(), at as *mut u8, p.elementSize as usize);
                }
            }
        }
    }
}

/// A fill of pinned memory, which this process does. `None` for other memory.
fn pinned(p: &MemsetNodeParams) -> Result<Option<Bytes>> {
    let Some((base, size, _)) = pinned_regions::REGIONS.find(p.dst as usize) else { return Ok(None) };
    let row = p.width.checked_mul(p.elementSize as usize);
    let span = p.pitch.checked_mul(p.height.saturating_sub(1)).and_then(|rows| rows.checked_add(row?));
    let inside = span.is_some_and(|span| span <= size - (p.dst as usize - base));
    let known = matches!(p.elementSize, 1 | 2 | 4) && p.dst.is_multiple_of(p.elementSize.into());
    let apart = p.height < 2 || row.is_some_and(|row| row <= p.pitch);
    if inside && known && apart { Ok(Some(Bytes(*p))) } else { Err(Status::INVALID_VALUE) }
}
