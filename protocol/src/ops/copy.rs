//! Copies and fills. All are work on a stream.
//!
//! For a synchronous copy the client sends one of these and a [`crate::ops::stream::StreamSynchronize`]: two
//! records, one reply.

use crate::data::{HostIn, HostOut};
use crate::handle::StreamId;
use crate::ops::ops;
use crate::wire::Bytes;

crate::wire_struct! {
    /// A box of bytes in linear memory: `height × depth` rows of `width` bytes.
    pub struct Pitched {
        /// Address of the first byte.
        address: u64,
        /// Bytes from one row to the next.
        pitch: u64,
        /// Bytes from one slice to the next.
        slice: u64,
    }
}

ops! {
    /// Copies and fills.
    trait CopyOps;

    /// `cuMemcpyHtoDAsync`.
    async 0x0401 memcpy_htod: MemcpyHtoD<'a>
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Device address.
        dst: u64,
        /// Source.
        src: HostIn<'a>,
    }

    /// `cuMemcpyDtoHAsync`. The bytes are in the client's memory before any progress or reply that says the
    /// stream has passed this point.
    async 0x0402 memcpy_dtoh: MemcpyDtoH
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Device address.
        src: u64,
        /// Target.
        dst: HostOut,
    }

    /// `cuMemcpyDtoH` of a few bytes (at most [`crate::channel::MAX_PAYLOAD`] − 4). The reply has the bytes
    /// and comes when the stream has reached this point.
    sync 0x0403 memcpy_dtoh_inline: MemcpyDtoHInline
        [order Streams, may_block Stream, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Device address.
        src: u64,
        /// Bytes.
        len: u32,
    } -> MemcpyDtoHInlineReply {
        /// The bytes.
        bytes: Bytes,
    }

    /// `cuMemcpyDtoDAsync`, `cuMemcpyPeerAsync`, `cuMemcpyAsync` between devices of this session.
    async 0x0404 memcpy_dtod: MemcpyDtoD
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Target address.
        dst: u64,
        /// Source address.
        src: u64,
        /// Bytes.
        len: u64,
    }

    /// `cuMemcpy2DAsync`, `cuMemcpy3DAsync` from host to device; the source is packed, without gaps between
    /// rows or slices.
    async 0x0405 memcpy_htod_3d: MemcpyHtoD3D<'a>
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Target.
        dst: Pitched,
        /// Width in bytes, height in rows, depth in slices.
        extent: [u64; 3],
        /// Source: width × height × depth bytes.
        src: HostIn<'a>,
    }

    /// `cuMemcpy2DAsync`, `cuMemcpy3DAsync` from device to host; the target is packed.
    async 0x0406 memcpy_dtoh_3d: MemcpyDtoH3D
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Source.
        src: Pitched,
        /// Width in bytes, height in rows, depth in slices.
        extent: [u64; 3],
        /// Target: width × height × depth bytes.
        dst: HostOut,
    }

    /// `cuMemcpy2DAsync`, `cuMemcpy3DAsync` between device memories.
    async 0x0407 memcpy_dtod_3d: MemcpyDtoD3D
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Target.
        dst: Pitched,
        /// Source.
        src: Pitched,
        /// Width in bytes, height in rows, depth in slices.
        extent: [u64; 3],
    }

    /// `cuMemsetD8Async`, `…D16…`, `…D32…` and their `2D` forms.
    async 0x0408 memset: Memset
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Device address.
        dst: u64,
        /// Bytes from one row to the next; ignored for a single row.
        pitch: u64,
        /// Value, in the lowest `element` bytes.
        value: u32,
        /// Bytes of an element: 1, 2 or 4.
        element: u32,
        /// Elements in a row.
        width: u64,
        /// Rows.
        height: u64,
    }
}
