//! Arrays, mipmapped arrays, and the textures and surfaces through which kernels read and write them.
//!
//! Only the device knows how an array's elements lie in memory, so copies name positions in the array.
//! Textures and surfaces are named by the number that kernels get (`CUtexObject`, `CUsurfObject`), which the
//! server's driver chooses. Values of `cuda.h`'s enumerations are sent unchanged.

use crate::handle::{ArrayId, ContextId, StreamId};
use crate::ops::copy::Pitched;
use crate::ops::ops;

crate::wire_struct! {
    /// `CUDA_ARRAY3D_DESCRIPTOR`: elements in each dimension, 0 for dimensions that the array does not have.
    pub struct ArrayShape {
        /// Elements of a row.
        width: u64,
        /// Rows; 0: one-dimensional.
        height: u64,
        /// Slices; with the flags `LAYERED` or `CUBEMAP`, layers or faces.
        depth: u64,
        /// `CUarray_format`.
        format: u32,
        /// Channels of an element.
        channels: u32,
        /// `CUDA_ARRAY3D_…`.
        flags: u32,
    }
}

/// `CUDA_ARRAY3D_…`.
pub mod flag {
    /// `depth` counts layers.
    pub const LAYERED: u32 = 0x01;
    /// Surfaces may be created for it.
    pub const SURFACE_LDST: u32 = 0x02;
    /// `depth` counts faces, six to a cube.
    pub const CUBEMAP: u32 = 0x04;
    /// `tex2Dgather` may be used on it.
    const TEXTURE_GATHER: u32 = 0x08;
    /// It has no memory until memory is mapped to it.
    pub const DEFERRED_MAPPING: u32 = 0x80;
    /// All flags that an array may have.
    pub const KNOWN: u32 = LAYERED | SURFACE_LDST | CUBEMAP | TEXTURE_GATHER | DEFERRED_MAPPING;
}

impl ArrayShape {
    /// Bytes of an element, for formats with 1, 2 or 4 numbers for each element.
    pub fn element_bytes(&self) -> Option<u64> {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return None,
        };
        matches!(self.channels, 1 | 2 | 4).then(|| channel * u64::from(self.channels))
    }

    /// Bytes of a row, rows, and slices (or layers, or faces).
    pub fn extent(&self) -> Option<[u64; 3]> {
        let row = self.width.checked_mul(self.element_bytes()?)?;
        (self.width > 0).then(|| [row, self.height.max(1), self.depth.max(1)])
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> Option<u64> {
        let [row, rows, slices] = self.extent()?;
        row.checked_mul(rows)?.checked_mul(slices)
    }

    /// Maximum levels of a mipmapped array of this shape: the last one has one element in each dimension.
    pub fn most_levels(&self) -> u32 {
        let layers = self.flags & (flag::LAYERED | flag::CUBEMAP) != 0;
        let longest = self.width.max(self.height).max(if layers { 0 } else { self.depth });
        longest.checked_ilog2().map_or(0, |halvings| halvings + 1)
    }

    /// Bytes of all elements of a mipmapped array of this shape with this many levels.
    pub fn bytes_of_levels(&self, levels: u32) -> Option<u64> {
        (0..levels.min(u64::BITS)).try_fold(0u64, |sum, level| sum.checked_add(self.level(level).bytes()?))
    }

    /// For a cube map: whether its faces are squares, and six of them, or with layers a multiple of six. True
    /// for everything else.
    pub fn is_whole_cubes(&self) -> bool {
        let cubes = match self.flags & flag::LAYERED {
            0 => self.depth == 6,
            _ => self.depth > 0 && self.depth.is_multiple_of(6),
        };
        self.flags & flag::CUBEMAP == 0 || (cubes && self.width == self.height)
    }

    /// The shape of a level of a mipmapped array of this shape.
    pub fn level(&self, level: u32) -> ArrayShape {
        let half = |size: u64| if size == 0 { 0 } else { (size.checked_shr(level).unwrap_or(0)).max(1) };
        let layers = self.flags & (flag::LAYERED | flag::CUBEMAP) != 0;
        // A one-dimensional layered array has no rows to halve.
        let depth = if layers { self.depth } else { half(self.depth) };
        ArrayShape { width: half(self.width), height: half(self.height), depth, ..self.clone() }
    }
}

/// Maximum arrays of a session, including levels that have an id; and maximum textures and surfaces.
pub const MOST: usize = 1 << 20;

crate::wire_struct! {
    /// One end of a copy from, to or between arrays.
    pub struct ArrayPlace {
        /// The array; `None`: linear memory.
        array: Option<ArrayId>,
        /// Position in the array: bytes in a row, row, slice.
        at: [u64; 3],
        /// The memory; ignored for an array.
        memory: Pitched,
    }
}

crate::wire_struct! {
    /// `CUDA_RESOURCE_DESC`: what a texture reads from.
    pub struct Resource {
        /// `CUresourcetype`: 0 array, 1 mipmapped array, 2 linear memory, 3 memory in rows.
        kind: u32,
        /// The array.
        array: ArrayId,
        /// The memory.
        address: u64,
        /// `CUarray_format` of the memory's elements.
        format: u32,
        /// Channels of an element.
        channels: u32,
        /// Elements of a row.
        width: u64,
        /// Rows; 1 for linear memory.
        height: u64,
        /// Bytes from one row to the next.
        pitch: u64,
    }
}

crate::wire_struct! {
    /// `CUDA_TEXTURE_DESC`: how a texture is read. Floating-point numbers travel as their bits.
    pub struct Sampling {
        /// `CUaddress_mode` in each direction.
        address: [u32; 3],
        /// `CUfilter_mode`.
        filter: u32,
        /// `CU_TRSF_…`.
        flags: u32,
        /// Maximum anisotropy.
        anisotropy: u32,
        /// `CUfilter_mode` between levels.
        level_filter: u32,
        /// Level bias.
        level_bias: u32,
        /// Minimum and maximum level.
        level_clamp: [u32; 2],
        /// Border color.
        border: [u32; 4],
    }
}

crate::wire_struct! {
    /// `CUDA_RESOURCE_VIEW_DESC`.
    pub struct View {
        /// `CUresourceViewFormat`.
        format: u32,
        /// Width, height, depth.
        extent: [u64; 3],
        /// First and last level.
        levels: [u32; 2],
        /// First and last layer.
        layers: [u32; 2],
    }
}

ops! {
    /// Arrays, textures and surfaces.
    trait ArrayOps;

    /// `cuArray3DCreate`, and with levels `cuMipmappedArrayCreate`.
    sync 0x0c01 array_create: ArrayCreate
        [order None, may_block Never, lane Main]
    {
        /// Context of its device.
        context: ContextId,
        /// Its id.
        array: ArrayId,
        /// Its shape.
        shape: ArrayShape,
        /// Levels of a mipmapped array; 0: a plain array.
        levels: u32,
    } -> ArrayCreateReply {}

    /// `cuMipmappedArrayGetLevel`. The level is destroyed with its mipmapped array.
    sync 0x0c02 array_level: ArrayLevel
        [order None, may_block Never, lane Main]
    {
        /// The mipmapped array.
        mipmapped: ArrayId,
        /// Which level.
        level: u32,
        /// The level's id.
        array: ArrayId,
    } -> ArrayLevelReply {}

    /// `cuArrayDestroy`, `cuMipmappedArrayDestroy`. For a level, only its id is freed. No work that uses the
    /// array may be pending.
    async 0x0c03 array_destroy: ArrayDestroy
        [order Earlier, may_block Never, lane Main]
    {
        /// The array.
        array: ArrayId,
    }

    /// `cuMemcpy3DAsync` with an array at one end or both.
    async 0x0c04 memcpy_array: MemcpyArray
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// Target.
        dst: ArrayPlace,
        /// Source.
        src: ArrayPlace,
        /// Width in bytes, height in rows, depth in slices.
        extent: [u64; 3],
    }

    /// `cuTexObjectCreate`.
    sync 0x0c05 texture_create: TextureCreate
        [order None, may_block Never, lane Main]
    {
        /// Context of its device.
        context: ContextId,
        /// What it reads from.
        resource: Resource,
        /// How it reads.
        sampling: Sampling,
        /// Which part of it is visible.
        view: Option<View>,
    } -> TextureCreateReply {
        /// `CUtexObject`.
        texture: u64,
    }

    /// `cuTexObjectDestroy`. No work that uses it may be pending.
    async 0x0c06 texture_destroy: TextureDestroy
        [order Earlier, may_block Never, lane Main]
    {
        /// Context of the texture. Contexts may use the same handles.
        context: ContextId,
        /// `CUtexObject`.
        texture: u64,
    }

    /// `cuSurfObjectCreate`.
    sync 0x0c07 surface_create: SurfaceCreate
        [order None, may_block Never, lane Main]
    {
        /// Context of its device.
        context: ContextId,
        /// The array.
        array: ArrayId,
    } -> SurfaceCreateReply {
        /// `CUsurfObject`.
        surface: u64,
    }

    /// `cuSurfObjectDestroy`. No work that uses it may be pending.
    async 0x0c08 surface_destroy: SurfaceDestroy
        [order Earlier, may_block Never, lane Main]
    {
        /// Context of the surface. Contexts may use the same handles.
        context: ContextId,
        /// `CUsurfObject`.
        surface: u64,
    }

    /// `cuDeviceGetTexture1DLinearMaxWidth`.
    sync 0x0c09 texture_linear_width: TextureLinearWidth
        [order None, may_block Never, lane Main]
    {
        /// Ordinal of the device.
        device: u32,
        /// `CUarray_format`.
        format: u32,
        /// Channels of an element.
        channels: u32,
    } -> TextureLinearWidthReply {
        /// Elements.
        width: u64,
    }

    /// `cuArrayGetMemoryRequirements`, `cuMipmappedArrayGetMemoryRequirements`: the memory that must be
    /// mapped to an array without memory.
    sync 0x0c0a array_requirements: ArrayRequirements
        [order None, may_block Never, lane Main]
    {
        /// The array.
        array: ArrayId,
    } -> ArrayRequirementsReply {
        /// Bytes.
        size: u64,
        /// Bytes.
        alignment: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(width: u64, height: u64, depth: u64, flags: u32) -> ArrayShape {
        ArrayShape { width, height, depth, format: 0x20, channels: 1, flags }
    }

    #[test]
    fn levels_halve_every_dimension_but_layers() {
        let sizes = |s: &ArrayShape, level| {
            let l = s.level(level);
            [l.width, l.height, l.depth]
        };
        assert_eq!(sizes(&shape(40, 24, 9, 0), 3), [5, 3, 1]);
        assert_eq!(sizes(&shape(40, 24, 9, flag::LAYERED), 3), [5, 3, 9]);
        assert_eq!(sizes(&shape(40, 0, 9, flag::LAYERED), 9), [1, 0, 9]);
        assert_eq!(sizes(&shape(16, 16, 6, flag::CUBEMAP), 1), [8, 8, 6]);
        assert_eq!(sizes(&shape(40, 24, 9, 0), u32::MAX), [1, 1, 1]);
    }

    #[test]
    fn the_last_level_has_one_element_in_each_direction() {
        for (s, most) in [
            (shape(1, 0, 0, 0), 1),
            (shape(40, 24, 9, 0), 6),
            (shape(3, 2, 100, 0), 7),
            (shape(3, 2, 100, flag::LAYERED), 2),
            (shape(u64::MAX, 0, 0, 0), 64),
        ] {
            assert_eq!(s.most_levels(), most, "{s:?}");
        }
    }

    #[test]
    fn all_levels_are_counted() {
        assert_eq!(shape(8, 0, 0, 0).bytes_of_levels(4), Some((8 + 4 + 2 + 1) * 4));
        assert_eq!(shape(4, 4, 6, flag::CUBEMAP).bytes_of_levels(3), Some((16 + 4 + 1) * 6 * 4));
        assert_eq!(shape(u64::MAX, 0, 0, 0).bytes_of_levels(2), None);
    }

    #[test]
    fn cubes_have_six_square_faces() {
        let layered = flag::LAYERED | flag::CUBEMAP;
        assert!(shape(8, 8, 6, flag::CUBEMAP).is_whole_cubes() && shape(8, 8, 12, layered).is_whole_cubes());
        for other in
            [shape(8, 8, 5, flag::CUBEMAP), shape(8, 8, 12, flag::CUBEMAP), shape(8, 4, 6, flag::CUBEMAP)]
        {
            assert!(!other.is_whole_cubes(), "{other:?}");
        }
        assert!(!shape(8, 8, 0, layered).is_whole_cubes() && !shape(8, 8, 7, layered).is_whole_cubes());
    }
}
