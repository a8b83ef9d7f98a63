//! Copies and fills.

use std::sync::Arc;

use host_bridge::endpoint::{Mapped, Region, Sink};
use protocol::Status;

use super::stream::GpuStreams;
use crate::driver::call::{Call, End, Input, Result};
use crate::driver::rows::Rows;
use crate::driver::store::Way;
use crate::driver::streams::Streams;

/// A contiguous copy. Both ranges are in memory that the devices can access.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LineCopy {
    /// The target's address.
    pub dst: u64,
    /// The device that accesses it.
    pub to: u32,
    /// The source's address.
    pub src: u64,
    /// The device that accesses it.
    pub from: u32,
    /// Number of bytes; may be 0.
    pub len: u64,
}

/// A copy of a box that is not empty. Both boxes have the same width, height and depth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoxCopy {
    /// The source.
    pub source: Rows,
    /// The device that accesses it.
    pub from: u32,
    /// The target.
    pub target: Rows,
    /// The device that accesses it.
    pub to: u32,
}

/// A fill that is not empty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fill {
    /// The first element's address, a multiple of its size.
    pub address: u64,
    /// The device that accesses it.
    pub device: u32,
    /// Bytes from one row to the next.
    pub pitch: u64,
    /// The new value of each element.
    pub value: u32,
    /// Size of an element in bytes: 1, 2 or 4.
    pub element: u32,
    /// Elements per row.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
}

/// Copies pieces of a direct connection to memory of one kind, or from it, in any thread. If that is device
/// memory, it has a stream of its own, which waits for nothing.
pub trait Carrier: Send + Sync {
    /// Copies between `bytes` and as many bytes of `rows`, from this offset in its packed bytes on. `rows` is
    /// memory that was checked, and `bytes` is a connection's buffer, which only this process can use, and
    /// which nobody uses until `end` is called. When the copy is done, or never will be, it publishes `seq`
    /// as the progress of the stream for which it was made (0: it does not) and calls `end`. Copies end in
    /// the order of these calls.
    fn carry(&self, rows: &Rows, offset: u64, bytes: Mapped, seq: u64, end: End);
}

/// Publishes that a stream has reached a command, or why it never will, in any thread.
pub type Progress = Box<dyn Fn(u64, Status) + Send + Sync>;

/// See [`GpuCopies::preparer`].
pub type Preparer = Box<dyn Fn(&Arc<Region>) + Send>;

/// Copies and fills. Device memory is inside the session's ranges and is accessed through the given device.
/// Client memory has the same size as the device memory. Only a [`copy_line`](Self::copy_line) may be empty.
pub trait GpuCopies: GpuStreams {
    /// Enqueues a copy from the client to a device. The data may still be arriving.
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

    /// What publishes progress of the place's stream, which was entered.
    fn progress(&mut self, place: &Self::Place) -> Progress;

    /// What makes page-locked memory of this process ready for copies, in any thread: it may wait for work on
    /// the device.
    fn preparer(&mut self, place: &Self::Place) -> Result<Preparer>;

    /// What copies pieces this way, in memory that is accessed through `device`. The place's stream was
    /// entered; only its progress is used.
    fn carrier(&mut self, place: &Self::Place, device: u32, way: Way) -> Result<Arc<dyn Carrier>>;

    /// Answers the call, a [`MemcpyDtoHInline`](protocol::ops::copy::MemcpyDtoHInline), with `len` bytes when
    /// the stream has reached it.
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
