//! Arrays, textures, surfaces and tensor maps.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::array::{ArrayShape, Resource, Sampling, View};
use protocol::ops::copy::Pitched;
use protocol::ops::texture::{TensorMapIm2col, TensorMapReplaceAddress, TensorMapTiled};

use super::GpuStreams;
use crate::driver::call::{Call, Result};
use crate::driver::rows::Rows;

/// One end of a copy that concerns an array. It lies inside.
pub enum CopyEnd<'a, A> {
    /// A box in an array that has its memory.
    Array {
        /// The array.
        array: &'a A,
        /// Its shape.
        shape: &'a ArrayShape,
        /// Where the box begins: byte of a row, row, slice.
        at: [u64; 3],
    },
    /// Rows of memory.
    Memory {
        /// Where they are.
        memory: &'a Pitched,
        /// The device through which they are reached.
        device: u32,
    },
}

/// What a texture is of.
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
    /// Memory of the session's.
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
    /// One that has elements of its own, or a level.
    Plain(&'a G::Array),
    /// A mipmapped one.
    Mipmapped(&'a G::Mipmapped),
}

/// Arrays, textures and surfaces. Contexts were entered.
pub trait GpuArrays: GpuStreams {
    /// An array, or a level of a mipmapped one.
    type Array: Send;
    /// A mipmapped array.
    type Mipmapped: Send;

    /// Bytes that an array of this shape takes, with so many levels; 0 levels: it is not mipmapped.
    ///
    /// # Errors
    /// Whatever the GPU says of a shape that its arrays cannot have.
    fn array_bytes(&self, shape: &ArrayShape, levels: u32) -> Result<u64>;

    /// Makes an array that takes `bytes`; none yet if its memory is mapped later.
    fn make_array(&mut self, context: ContextId, shape: &ArrayShape, bytes: u64) -> Result<Self::Array>;

    /// The same for a mipmapped array.
    fn make_mipmapped(
        &mut self,
        context: ContextId,
        shape: &ArrayShape,
        levels: u32,
        bytes: u64,
    ) -> Result<Self::Mipmapped>;

    /// A level of a mipmapped array whose first level has this shape. It goes with the mipmapped array.
    fn array_level(
        &mut self,
        context: ContextId,
        array: &Self::Mipmapped,
        shape: &ArrayShape,
        level: u32,
    ) -> Result<Self::Array>;

    /// An array that is no level is out of the session's table. The client has waited for the work that uses it.
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

    /// Makes a texture; the number by which kernels know it.
    fn make_texture(
        &self,
        context: ContextId,
        source: &TextureSource<'_, Self>,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64>;

    /// A texture is out of the session's table.
    fn destroy_texture(&mut self, context: ContextId, device: u32, texture: u64) -> Result;

    /// Makes a surface; the number by which kernels know it.
    fn make_surface(&self, context: ContextId, array: &Self::Array, shape: &ArrayShape) -> Result<u64>;

    /// A surface is out of the session's table.
    fn destroy_surface(&mut self, context: ContextId, device: u32, surface: u64) -> Result;

    /// The context of a texture or a surface is gone.
    fn forget_texture(&mut self, _device: u32, _handle: u64) {}

    /// Texels that a texture of linear memory can have.
    fn linear_width(&mut self, device: u32, format: u32, channels: u32) -> Result<u64>;

    /// Bytes, and their alignment, of the memory that an array of so many levels needs.
    fn array_requirements(
        &self,
        context: ContextId,
        device: u32,
        array: AnyArray<'_, Self>,
        shape: &ArrayShape,
        levels: u32,
    ) -> Result<(u64, u64)>;
}

/// Tensor maps. Contexts were entered, and the lists of a request have the lengths that its rank says.
pub trait GpuTensorMaps {
    /// `cuTensorMapEncodeTiled`.
    fn tensor_map_tiled(&self, op: &TensorMapTiled) -> Result<[u8; 128]>;

    /// `cuTensorMapEncodeIm2col`.
    fn tensor_map_im2col(&self, _op: &TensorMapIm2col) -> Result<[u8; 128]> {
        Err(Status::NOT_SUPPORTED)
    }

    /// `cuTensorMapReplaceAddress`.
    fn tensor_map_replace_address(&self, op: &TensorMapReplaceAddress) -> Result<[u8; 128]>;
}
