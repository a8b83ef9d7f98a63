//! Tensor maps: descriptors of tensors in device memory, which kernels take by value.
//!
//! The driver encodes a tensor map by arithmetic that depends on the device, so the server's driver does it.
//! Addresses are the session's device addresses. Values of `cuda.h`'s enumerations are sent unchanged; a
//! server refuses those that its driver does not know.

use crate::handle::ContextId;
use crate::ops::ops;

crate::wire_struct! {
    /// The parameters that all tensor maps have in common.
    pub struct Tensor {
        /// `CUtensorMapDataType`.
        data_type: u32,
        /// First element's address.
        address: u64,
        /// Elements in each dimension.
        sizes: Vec<u64>,
        /// Bytes from one element to the next, in each dimension but the first.
        strides: Vec<u64>,
        /// Step in each dimension, in elements.
        steps: Vec<u32>,
        /// `CUtensorMapInterleave`.
        interleave: u32,
        /// `CUtensorMapSwizzle`.
        swizzle: u32,
        /// `CUtensorMapL2promotion`.
        l2_promotion: u32,
        /// `CUtensorMapFloatOOBfill`.
        fill: u32,
    }
}

ops! {
    /// Tensor maps.
    trait TextureOps;

    /// `cuTensorMapEncodeTiled`.
    sync 0x0b01 tensor_map_tiled: TensorMapTiled
        [order None, may_block Never, lane Main]
    {
        /// Context of the device that will use it.
        context: ContextId,
        /// The tensor.
        tensor: Tensor,
        /// Elements of a box in each dimension.
        box_sizes: Vec<u32>,
    } -> TensorMapTiledReply {
        /// `CUtensorMap`.
        map: [u8; 128],
    }

    /// `cuTensorMapEncodeIm2col`.
    sync 0x0b02 tensor_map_im2col: TensorMapIm2col
        [order None, may_block Never, lane Main]
    {
        /// Context of the device that will use it.
        context: ContextId,
        /// The tensor.
        tensor: Tensor,
        /// Lower corner of the box of pixels, two dimensions fewer than the tensor has.
        lower: Vec<i32>,
        /// Upper corner.
        upper: Vec<i32>,
        /// Channels for each pixel.
        channels: u32,
        /// Pixels for each column.
        pixels: u32,
    } -> TensorMapIm2colReply {
        /// `CUtensorMap`.
        map: [u8; 128],
    }

    /// `cuTensorMapReplaceAddress`.
    sync 0x0b03 tensor_map_replace_address: TensorMapReplaceAddress
        [order None, may_block Never, lane Main]
    {
        /// Context of the device that will use it.
        context: ContextId,
        /// `CUtensorMap`.
        map: [u8; 128],
        /// First element's new address.
        address: u64,
    } -> TensorMapReplaceAddressReply {
        /// `CUtensorMap`.
        map: [u8; 128],
    }

    /// `cuTensorMapEncodeIm2colWide`.
    sync 0x0b04 tensor_map_im2col_wide: TensorMapIm2colWide
        [order None, may_block Never, lane Main, since 8]
    {
        /// Context of the device that will use it.
        context: ContextId,
        /// The tensor, of three dimensions or more.
        tensor: Tensor,
        /// Offsets of the box's left and right corners.
        corners: [i32; 2],
        /// Channels for each pixel.
        channels: u32,
        /// Pixels for each column.
        pixels: u32,
        /// `CUtensorMapIm2ColWideMode`.
        mode: u32,
    } -> TensorMapIm2colWideReply {
        /// `CUtensorMap`.
        map: [u8; 128],
    }
}
