//! Arrays, textures, surfaces and tensor maps.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::array::{ArrayShape, Resource, Sampling, View};
use protocol::ops::copy::Pitched;
use protocol::ops::texture::{TensorMapIm2col, TensorMapIm2colWide, TensorMapReplaceAddress, TensorMapTiled};

use super::stream::GpuStreams;
use crate::driver::call::{Call, Result};
use crate::driver::rows::Rows;

/// One end of a copy with an array. The session has checked that it is in bounds.
pub enum CopyEnd<'a, A> {
    /// A box in an array that has memory.
    Array {
        /// The array.
        array: &'a A,
        /// Its shape.
        shape: &'a ArrayShape,
        /// Where the box begins: byte in the row, row, slice.
        at: [u64; 3],
    },
    /// Rows of memory.
    Memory {
        /// Where they are.
        memory: &'a Pitched,
        /// The device through which they are accessed.
        device: u32,
    },
}

/// What a texture reads.
pub enum TextureSource<'a, G: GpuArrays + ?Sized> {
    /// An array, or a level of a mipmapped one.
    Array {
        /// The array.
        array: &'a G::Array,
        /// Its shape.
        shape: &'a ArrayShape,
    },
    /// A mipmapped array.
    Mipmapped {
        /// The array.
        array: &'a G::Mipmapped,
        /// The shape of its first level.
        shape: &'a ArrayShape,
        /// How many levels it has.
        levels: u32,
    },
    /// Memory of the session.
    Memory {
        /// As the client describes it.
        resource: &'a Resource,
        /// Its rows.
        memory: Rows,
        /// Whether it has one dimension.
        is_linear: bool,
    },
}

/// An array of either kind.
pub enum AnyArray<'a, G: GpuArrays + ?Sized> {
    /// One with its own elements, or a level.
    Plain(&'a G::Array),
    /// A mipmapped one.
    Mipmapped(&'a G::Mipmapped),
}

/// Arrays, textures and surfaces. The contexts have been entered.
pub trait GpuArrays: GpuStreams {
    /// An array, or a level of a mipmapped one.
    type Array: Send;
    /// A mipmapped array.
    type Mipmapped: Send;

    /// Size in bytes of an array of this shape and number of levels; 0 levels means that it is not mipmapped.
    ///
    /// # Errors
    /// The GPU's error for a shape that it does not support.
    fn array_bytes(&self, shape: &ArrayShape, levels: u32) -> Result<u64>;

    /// Makes an array of `bytes` bytes, or without memory if its memory is mapped later.
    fn make_array(&mut self, context: ContextId, shape: &ArrayShape, bytes: u64) -> Result<Self::Array>;

    /// The same for a mipmapped array.
    fn make_mipmapped(
        &mut self,
        context: ContextId,
        shape: &ArrayShape,
        levels: u32,
        bytes: u64,
    ) -> Result<Self::Mipmapped>;

    /// A level of a mipmapped array whose first level has this shape. It lives as long as the mipmapped
    /// array.
    fn array_level(
        &mut self,
        context: ContextId,
        array: &Self::Mipmapped,
        shape: &ArrayShape,
        level: u32,
    ) -> Result<Self::Array>;

    /// Destroys an array that is not a level and that the session has removed from its table. The client has
    /// waited for the work that uses it.
    fn destroy_array(&mut self, context: ContextId, array: Self::Array) -> Result;

    /// The same for a mipmapped array.
    fn destroy_mipmapped(&mut self, context: ContextId, array: Self::Mipmapped) -> Result;

    /// Enqueues a copy of a box that is not empty.
    fn copy_array(
        &self,
        cx: &Call,
        place: &Self::Place,
        src: &CopyEnd<'_, Self::Array>,
        dst: &CopyEnd<'_, Self::Array>,
        extent: [u64; 3],
    ) -> Result;

    /// Makes a texture. Returns the handle that kernels use.
    fn make_texture(
        &self,
        context: ContextId,
        source: &TextureSource<'_, Self>,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64>;

    /// Destroys a texture that the session has removed from its table.
    fn destroy_texture(&mut self, context: ContextId, device: u32, texture: u64) -> Result;

    /// Makes a surface. Returns the handle that kernels use.
    fn make_surface(&self, context: ContextId, array: &Self::Array, shape: &ArrayShape) -> Result<u64>;

    /// Destroys a surface that the session has removed from its table.
    fn destroy_surface(&mut self, context: ContextId, device: u32, surface: u64) -> Result;

    /// The context of a texture or surface no longer exists.
    fn forget_texture(&mut self, _device: u32, _handle: u64) {}

    /// Maximum number of texels in a texture of linear memory.
    fn linear_width(&mut self, device: u32, format: u32, channels: u32) -> Result<u64>;

    /// Size in bytes and alignment of the memory that an array with this many levels needs.
    fn array_requirements(
        &self,
        context: ContextId,
        device: u32,
        array: AnyArray<'_, Self>,
        shape: &ArrayShape,
        levels: u32,
    ) -> Result<(u64, u64)>;
}

/// Tensor maps. The contexts have been entered, and a request's lists have the lengths required by its rank.
pub trait GpuTensorMaps {
    /// `cuTensorMapEncodeTiled`.
    fn tensor_map_tiled(&self, op: &TensorMapTiled) -> Result<[u8; 128]>;

    /// `cuTensorMapEncodeIm2col`.
    fn tensor_map_im2col(&self, _op: &TensorMapIm2col) -> Result<[u8; 128]> {
        Err(Status::NOT_SUPPORTED)
    }

    /// `cuTensorMapEncodeIm2colWide`.
    fn tensor_map_im2col_wide(&self, _op: &TensorMapIm2colWide) -> Result<[u8; 128]> {
        Err(Status::NOT_SUPPORTED)
    }

    /// `cuTensorMapReplaceAddress`.
    fn tensor_map_replace_address(&self, op: &TensorMapReplaceAddress) -> Result<[u8; 128]>;
}
