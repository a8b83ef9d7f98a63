//! Copies and fills.

use protocol::Status;
use protocol::channel::MAX_PAYLOAD;
use protocol::data::{HostIn, HostOut};
use protocol::handle::StreamId;
use protocol::ops::Answer;
use protocol::ops::copy::*;
use protocol::wire::Bytes;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::{BoxCopy, Fill, Gpu, LineCopy};
use crate::driver::rows::Rows;

/// The effect of a copy or fill inside device memory, after checking it for a stream or graph of the device
/// `home`. `None`: nothing.
impl<G: Gpu> Session<G> {
    /// A contiguous copy.
    pub(super) fn checked_line(&self, op: &MemcpyDtoD, home: u32) -> Result<LineCopy> {
        let to = self.check_range(op.dst, op.len, home)?;
        let from = self.check_range(op.src, op.len, home)?;
        Ok(LineCopy { dst: op.dst, to, src: op.src, from, len: op.len })
    }

    /// A copy of a box.
    pub(super) fn checked_box(&self, op: &MemcpyDtoD3D, home: u32) -> Result<Option<BoxCopy>> {
        let (source, target) = (Rows::of(&op.src, op.extent), Rows::of(&op.dst, op.extent));
        let ((packed, from_span), (_, to_span)) = (source.sizes()?, target.sizes()?);
        let from = self.check_range(source.at, from_span, home)?;
        let to = self.check_range(target.at, to_span, home)?;
        Ok((packed > 0).then_some(BoxCopy { source, from, target, to }))
    }

    /// A fill.
    pub(super) fn checked_fill(&self, op: &Memset, home: u32) -> Result<Option<Fill>> {
        if !matches!(op.element, 1 | 2 | 4) || !op.dst.is_multiple_of(op.element.into()) {
            return Err(Status::INVALID_VALUE);
        }
        let width = op.width.checked_mul(op.element.into()).ok_or(Status::INVALID_VALUE)?;
        let pitch = if op.height > 1 { op.pitch } else { width };
        let rows = Rows { at: op.dst, pitch, slice: 0, width, height: op.height, depth: 1 };
        let (packed, span) = rows.sizes()?;
        let device = self.check_range(op.dst, span, home)?;
        let fill = Fill {
            address: op.dst,
            device,
            pitch,
            value: op.value,
            element: op.element,
            width: op.width,
            height: op.height,
        };
        Ok((packed > 0).then_some(fill))
    }
}

impl<G: Gpu> Session<G> {
    fn upload(&mut self, cx: &mut Call, stream: StreamId, to: Rows, src: HostIn<'_>) -> Result {
        let place = self.enter(cx, stream)?;
        let (packed, span) = to.sizes()?;
        if src.len() != packed {
            return Err(Status::INVALID_VALUE);
        }
        let device = self.check_range(to.at, span, G::device_at(&place))?;
        if packed == 0 {
            return Ok(());
        }
        let data = cx.input(src)?;
        self.gpu.upload(cx, &mut self.streams, &place, &to, device, data)
    }

    fn download(&mut self, cx: &mut Call, stream: StreamId, from: Rows, dst: HostOut) -> Result {
        let place = self.enter(cx, stream)?;
        let (packed, span) = from.sizes()?;
        if dst.0.len != packed {
            return Err(Status::INVALID_VALUE);
        }
        let device = self.check_range(from.at, span, G::device_at(&place))?;
        let sink = cx.output(dst)?;
        if packed == 0 {
            return Ok(());
        }
        self.gpu.download(cx, &mut self.streams, &place, &from, device, sink)
    }
}

impl<G: Gpu> CopyOps<Call> for Session<G> {
    fn memcpy_htod<'a>(&mut self, cx: &mut Call, op: MemcpyHtoD<'a>) -> Result {
        let to = Rows::line(op.dst, op.src.len());
        self.upload(cx, op.stream, to, op.src)
    }

    fn memcpy_dtoh(&mut self, cx: &mut Call, op: MemcpyDtoH) -> Result {
        let from = Rows::line(op.src, op.dst.0.len);
        self.download(cx, op.stream, from, op.dst)
    }

    fn memcpy_dtoh_inline(&mut self, cx: &mut Call, op: MemcpyDtoHInline) -> Reply<MemcpyDtoHInlineReply> {
        let place = self.enter(cx, op.stream)?;
        let len = op.len as usize;
        if len > MAX_PAYLOAD - 4 {
            return Err(Status::INVALID_VALUE);
        }
        let device = self.check_range(op.src, op.len.into(), G::device_at(&place))?;
        if len == 0 {
            return now(MemcpyDtoHInlineReply { bytes: Bytes(Vec::new()) });
        }
        self.gpu.download_inline(cx, &mut self.streams, &place, op.src, len, device)?;
        Ok(Answer::Later)
    }

    fn memcpy_dtod(&mut self, cx: &mut Call, op: MemcpyDtoD) -> Result {
        let place = self.enter_to_work(cx, op.stream)?;
        let copy = self.checked_line(&op, G::device_at(&place))?;
        self.gpu.copy_line(cx, &place, &copy)
    }

    fn memcpy_htod_3d<'a>(&mut self, cx: &mut Call, op: MemcpyHtoD3D<'a>) -> Result {
        self.upload(cx, op.stream, Rows::of(&op.dst, op.extent), op.src)
    }

    fn memcpy_dtoh_3d(&mut self, cx: &mut Call, op: MemcpyDtoH3D) -> Result {
        self.download(cx, op.stream, Rows::of(&op.src, op.extent), op.dst)
    }

    fn memcpy_dtod_3d(&mut self, cx: &mut Call, op: MemcpyDtoD3D) -> Result {
        let place = self.enter_to_work(cx, op.stream)?;
        match self.checked_box(&op, G::device_at(&place))? {
            Some(copy) => self.gpu.copy_box(cx, &place, &copy),
            None => Ok(()),
        }
    }

    fn memset(&mut self, cx: &mut Call, op: Memset) -> Result {
        let place = self.enter_to_work(cx, op.stream)?;
        match self.checked_fill(&op, G::device_at(&place))? {
            Some(fill) => self.gpu.fill(cx, &place, &fill),
            None => Ok(()),
        }
    }
}
