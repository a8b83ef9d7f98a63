//! Copies and fills.

use host_bridge::endpoint::Sink;

use super::GpuStreams;
use crate::driver::call::{Call, Input, Result};
use crate::driver::rows::Rows;
use crate::driver::streams::Streams;

/// A copy of bytes in a line. Both ranges lie in memory that the devices reach.
#[derive(Debug, Clone, Copy)]
pub struct LineCopy {
    /// Where to.
    pub dst: u64,
    /// The device through which that is reached.
    pub to: u32,
    /// Where from.
    pub src: u64,
    /// The device through which that is reached.
    pub from: u32,
    /// Bytes; perhaps none.
    pub len: u64,
}

/// A copy of a box that is not empty. Both boxes have the same width, height and depth.
#[derive(Debug, Clone, Copy)]
pub struct BoxCopy {
    /// Where from.
    pub source: Rows,
    /// The device through which that is reached.
    pub from: u32,
    /// Where to.
    pub target: Rows,
    /// The device through which that is reached.
    pub to: u32,
}

/// A fill that is not empty.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// The first element's address, a multiple of its size.
    pub address: u64,
    /// The device through which it is reached.
    pub device: u32,
    /// Bytes from one row to the next.
    pub pitch: u64,
    /// What each element becomes.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element: u32,
    /// Elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
}

/// Copies and fills. Device memory lies in the session's ranges, and is reached through the device that is named; client memory is as long as the device's. Nothing is empty.
pub trait GpuCopies: GpuStreams {
    /// Enqueues a copy from the client to a device. The data may still be on its way.
    fn upload(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        to: &Rows,
        device: u32,
        data: Input<'_>,
    ) -> Result;

    /// Enqueues a copy from a device to the client.
    fn download(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        from: &Rows,
        device: u32,
        sink: Sink,
    ) -> Result;

    /// Answers the call, a [`MemcpyDtoHInline`](protocol::ops::copy::MemcpyDtoHInline), with `len` bytes when the stream has come there.
    fn download_inline(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        from: u64,
        len: usize,
        device: u32,
    ) -> Result;

    /// Enqueues a copy inside device memory.
    fn copy_line(&mut self, cx: &Call, place: &Self::Place, copy: &LineCopy) -> Result;

    /// Enqueues a copy of a box inside device memory.
    fn copy_box(&mut self, cx: &Call, place: &Self::Place, copy: &BoxCopy) -> Result;

    /// Enqueues a fill.
    fn fill(&mut self, cx: &Call, place: &Self::Place, fill: &Fill) -> Result;
}
