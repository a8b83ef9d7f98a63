//! Arrays, textures and surfaces.
//!
//! A client names arrays by its own IDs, but textures and surfaces by the GPU's handles, which kernels need;
//! handles that belong to other sessions are refused.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ArrayId, ContextId};
use protocol::ops::array::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::{AnyArray, CopyEnd, Gpu, GpuArrays, TextureSource};
use crate::driver::quota::Charge;
use crate::driver::rows::Rows;

/// `CUresourcetype`.
const OF_ARRAY: u32 = 0;
const OF_MIPMAPPED: u32 = 1;
const OF_LINEAR: u32 = 2;
const OF_ROWS: u32 = 3;

/// The session's arrays, textures and surfaces.
pub(super) struct Arrays<G: GpuArrays> {
    arrays: HashMap<u32, Array<G>>,
    /// Textures and surfaces by the GPU's handle.
    textures: Numbered,
    surfaces: Numbered,
}

struct Array<G: GpuArrays> {
    context: ContextId,
    shape: ArrayShape,
    kind: Kind<G>,
    /// For the elements; `None` for a level, whose elements belong to its mipmapped array.
    _charge: Option<Charge>,
}

enum Kind<G: GpuArrays> {
    Plain(G::Array),
    /// With this many levels, and a bit for each that has an ID.
    Mipmapped {
        native: G::Mipmapped,
        levels: u32,
        named: u64,
    },
    /// A level of the mipmapped array with this ID.
    Level {
        native: G::Array,
        of: u32,
        level: u32,
    },
}

impl<G: GpuArrays> Default for Arrays<G> {
    fn default() -> Self {
        Arrays { arrays: HashMap::new(), textures: HashMap::new(), surfaces: HashMap::new() }
    }
}

impl<G: GpuArrays> Arrays<G> {
    /// Checks that the session may have another one, of any kind.
    fn may_grow(&self) -> Result {
        let most = self.arrays.len().max(self.textures.len()).max(self.surfaces.len());
        if most >= MOST { Err(Status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// Whether there are none of any kind.
    pub(super) fn is_empty(&self) -> bool {
        self.arrays.is_empty() && self.textures.is_empty() && self.surfaces.is_empty()
    }

    fn get(&self, id: ArrayId) -> Result<&Array<G>> {
        self.arrays.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    /// An array with elements of its own, and its shape.
    fn plain(&self, id: ArrayId) -> Result<(&G::Array, &ArrayShape)> {
        let array = self.get(id)?;
        match &array.kind {
            Kind::Plain(native) | Kind::Level { native, .. } => Ok((native, &array.shape)),
            Kind::Mipmapped { .. } => Err(Status::INVALID_HANDLE),
        }
    }

    /// Which levels of a mipmapped array have an ID.
    fn named_mut(&mut self, mipmapped: u32) -> Option<&mut u64> {
        match self.arrays.get_mut(&mipmapped)? {
            Array { kind: Kind::Mipmapped { named, .. }, .. } => Some(named),
            _ => None,
        }
    }
}

/// Devices and contexts of textures or surfaces, by the GPU's handle. Contexts may use the same handles.
type Numbered = HashMap<u64, Vec<(u32, ContextId)>>;

/// Removes a context's texture or surface with a handle from its table. Returns its device.
fn take(table: &mut Numbered, context: ContextId, handle: u64) -> Result<u32> {
    let all = table.get_mut(&handle).ok_or(Status::INVALID_HANDLE)?;
    let at = all.iter().position(|(_, of)| *of == context).ok_or(Status::INVALID_HANDLE)?;
    let (device, _) = all.swap_remove(at);
    if all.is_empty() {
        table.remove(&handle);
    }
    Ok(device)
}

/// Whether a box is inside an array.
fn inside(shape: &ArrayShape, at: [u64; 3], extent: [u64; 3]) -> bool {
    shape
        .extent()
        .is_some_and(|whole| (0..3).all(|d| at[d].checked_add(extent[d]).is_some_and(|end| end <= whole[d])))
}

impl<G: Gpu> Session<G> {
    /// Drops a context's arrays, and everything made from them.
    pub(super) fn forget_arrays(&mut self, context: ContextId) {
        self.arrays.arrays.retain(|_, array| array.context != context);
        for table in [&mut self.arrays.textures, &mut self.arrays.surfaces] {
            for (handle, all) in table.iter_mut() {
                for (device, _) in all.extract_if(.., |(_, of)| *of == context) {
                    self.gpu.forget_texture(device, *handle);
                }
            }
            table.retain(|_, all| !all.is_empty());
        }
    }

    /// One end of a copy, after checking it.
    fn copy_end<'a>(
        &'a self,
        end: &'a ArrayPlace,
        extent: [u64; 3],
        home: u32,
    ) -> Result<CopyEnd<'a, G::Array>> {
        let Some(id) = end.array else {
            let span = Rows::of(&end.memory, extent).sizes()?.1;
            let device = self.check_range(end.memory.address, span, home)?;
            return Ok(CopyEnd::Memory { memory: &end.memory, device });
        };
        let (array, shape) = self.arrays.plain(id)?;
        // A copy to an array without memory would fail the context.
        if shape.flags & flag::DEFERRED_MAPPING != 0 || !inside(shape, end.at, extent) {
            return Err(Status::INVALID_VALUE);
        }
        Ok(CopyEnd::Array { array, shape, at: end.at })
    }

    /// What a texture reads, after checking it.
    fn texture_source<'a>(&'a self, context: ContextId, r: &'a Resource) -> Result<TextureSource<'a, G>> {
        match r.kind {
            OF_ARRAY | OF_MIPMAPPED => {
                let Array { context: of, shape, kind, .. } = self.arrays.get(r.array)?;
                if *of != context {
                    return Err(Status::INVALID_HANDLE);
                }
                match kind {
                    Kind::Plain(array) | Kind::Level { native: array, .. } if r.kind == OF_ARRAY => {
                        Ok(TextureSource::Array { array, shape })
                    }
                    Kind::Mipmapped { native: array, levels, .. } if r.kind == OF_MIPMAPPED => {
                        Ok(TextureSource::Mipmapped { array, shape, levels: *levels })
                    }
                    _ => Err(Status::INVALID_VALUE),
                }
            }
            OF_LINEAR | OF_ROWS => {
                let shape = ArrayShape {
                    width: r.width,
                    height: r.height,
                    depth: 0,
                    format: r.format,
                    channels: r.channels,
                    flags: 0,
                };
                let [row, rows, _] = shape.extent().ok_or(Status::INVALID_VALUE)?;
                let pitch = if r.kind == OF_LINEAR { row } else { r.pitch };
                let memory = Rows { at: r.address, pitch, slice: 0, width: row, height: rows, depth: 1 };
                memory.sizes()?;
                // The texture may be longer than the memory that it begins in: a kernel reaches no more by it
                // than by a pointer.
                self.check_range(r.address, 1, self.device_of(context)?)?;
                Ok(TextureSource::Memory { resource: r, memory, is_linear: r.kind == OF_LINEAR })
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

impl<G: Gpu> ArrayOps<Call> for Session<G> {
    fn array_create(&mut self, cx: &mut Call, op: ArrayCreate) -> Reply<ArrayCreateReply> {
        cx.context = op.context;
        self.arrays.may_grow()?;
        if self.arrays.arrays.contains_key(&op.array.0)
            || op.shape.flags & !flag::KNOWN != 0
            || op.levels > op.shape.most_levels()
        {
            return Err(Status::INVALID_VALUE);
        }
        let bytes = self.gpu.array_bytes(&op.shape, op.levels)?;
        let device = self.device_of(op.context)?;
        let deferred = op.shape.flags & flag::DEFERRED_MAPPING != 0;
        let charge = self.quota.charge(self.memory_of(device), if deferred { 0 } else { bytes })?;
        self.gpu.enter(op.context)?;
        let kind = if op.levels == 0 {
            Kind::Plain(self.gpu.make_array(op.context, &op.shape, bytes)?)
        } else {
            let native = self.gpu.make_mipmapped(op.context, &op.shape, op.levels, bytes)?;
            Kind::Mipmapped { native, levels: op.levels, named: 0 }
        };
        let array = Array { context: op.context, shape: op.shape, kind, _charge: Some(charge) };
        self.arrays.arrays.insert(op.array.0, array);
        now(ArrayCreateReply {})
    }

    fn array_level(&mut self, cx: &mut Call, op: ArrayLevel) -> Reply<ArrayLevelReply> {
        self.arrays.may_grow()?;
        let whole = self.arrays.get(op.mipmapped)?;
        cx.context = whole.context;
        let Kind::Mipmapped { native, levels, named } = &whole.kind else {
            return Err(Status::INVALID_HANDLE);
        };
        // Each level can have only one ID, so there are never more IDs than levels.
        let is_new = op.level < *levels && named >> op.level & 1 == 0;
        if !is_new || self.arrays.arrays.contains_key(&op.array.0) {
            return Err(Status::INVALID_VALUE);
        }
        self.gpu.enter(cx.context)?;
        let native = self.gpu.array_level(cx.context, native, &whole.shape, op.level)?;
        let kind = Kind::Level { native, of: op.mipmapped.0, level: op.level };
        let level = Array { context: whole.context, shape: whole.shape.level(op.level), kind, _charge: None };
        self.arrays.arrays.insert(op.array.0, level);
        if let Some(named) = self.arrays.named_mut(op.mipmapped.0) {
            *named |= 1 << op.level;
        }
        now(ArrayLevelReply {})
    }

    fn array_destroy(&mut self, cx: &mut Call, op: ArrayDestroy) -> Result {
        cx.context = self.arrays.get(op.array)?.context;
        self.gpu.enter(cx.context)?;
        let array = self.arrays.arrays.remove(&op.array.0).ok_or(Status::INVALID_HANDLE)?;
        match array.kind {
            Kind::Plain(native) => self.gpu.destroy_array(cx.context, native),
            Kind::Mipmapped { native, .. } => {
                let destroyed = self.gpu.destroy_mipmapped(cx.context, native);
                let of_it = |kind: &Kind<G>| matches!(kind, Kind::Level { of, .. } if *of == op.array.0);
                self.arrays.arrays.retain(|_, other| !of_it(&other.kind));
                destroyed
            }
            // Its elements belong to the mipmapped array.
            Kind::Level { of, level, .. } => {
                if let Some(named) = self.arrays.named_mut(of) {
                    *named &= !(1 << level);
                }
                Ok(())
            }
        }
    }

    fn memcpy_array(&mut self, cx: &mut Call, op: MemcpyArray) -> Result {
        let place = self.enter_to_work(cx, op.stream)?;
        if op.extent.contains(&0) {
            return Ok(());
        }
        let home = G::device_at(&place);
        let src = self.copy_end(&op.src, op.extent, home)?;
        let dst = self.copy_end(&op.dst, op.extent, home)?;
        self.gpu.copy_array(cx, &place, &src, &dst, op.extent)
    }

    fn texture_create(&mut self, cx: &mut Call, op: TextureCreate) -> Reply<TextureCreateReply> {
        cx.context = op.context;
        self.arrays.may_grow()?;
        self.gpu.enter(op.context)?;
        let device = self.device_of(op.context)?;
        let source = self.texture_source(op.context, &op.resource)?;
        let texture = self.gpu.make_texture(op.context, &source, &op.sampling, op.view.as_ref())?;
        self.arrays.textures.entry(texture).or_default().push((device, op.context));
        now(TextureCreateReply { texture })
    }

    fn texture_destroy(&mut self, cx: &mut Call, op: TextureDestroy) -> Result {
        cx.context = op.context;
        let device = take(&mut self.arrays.textures, op.context, op.texture)?;
        self.gpu.enter(op.context)?;
        self.gpu.destroy_texture(op.context, device, op.texture)
    }

    fn surface_create(&mut self, cx: &mut Call, op: SurfaceCreate) -> Reply<SurfaceCreateReply> {
        cx.context = op.context;
        self.arrays.may_grow()?;
        self.gpu.enter(op.context)?;
        if self.arrays.get(op.array)?.context != op.context {
            return Err(Status::INVALID_VALUE);
        }
        let device = self.device_of(op.context)?;
        let (array, shape) = self.arrays.plain(op.array)?;
        let surface = self.gpu.make_surface(op.context, array, shape)?;
        self.arrays.surfaces.entry(surface).or_default().push((device, op.context));
        now(SurfaceCreateReply { surface })
    }

    fn surface_destroy(&mut self, cx: &mut Call, op: SurfaceDestroy) -> Result {
        cx.context = op.context;
        let device = take(&mut self.arrays.surfaces, op.context, op.surface)?;
        self.gpu.enter(op.context)?;
        self.gpu.destroy_surface(op.context, device, op.surface)
    }

    fn texture_linear_width(
        &mut self,
        cx: &mut Call,
        op: TextureLinearWidth,
    ) -> Reply<TextureLinearWidthReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        now(TextureLinearWidthReply { width: self.gpu.linear_width(op.device, op.format, op.channels)? })
    }

    fn array_requirements(&mut self, cx: &mut Call, op: ArrayRequirements) -> Reply<ArrayRequirementsReply> {
        let array = self.arrays.get(op.array)?;
        cx.context = array.context;
        let device = self.device_of(cx.context)?;
        let (any, levels) = match &array.kind {
            Kind::Plain(native) | Kind::Level { native, .. } => (AnyArray::Plain(native), 1),
            Kind::Mipmapped { native, levels, .. } => (AnyArray::Mipmapped(native), *levels),
        };
        let (size, alignment) = self.gpu.array_requirements(cx.context, device, any, &array.shape, levels)?;
        now(ArrayRequirementsReply { size, alignment })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_that_reaches_out_of_the_array_is_not_inside() {
        let shape = ArrayShape { width: 8, height: 4, depth: 0, format: 0x20, channels: 1, flags: 0 };
        assert!(inside(&shape, [0, 0, 0], [32, 4, 1]));
        assert!(inside(&shape, [28, 3, 0], [4, 1, 1]));
        for (at, extent) in [
            ([4, 0, 0], [32, 4, 1]),
            ([0, 1, 0], [32, 4, 1]),
            ([0, 0, 1], [1, 1, 1]),
            ([u64::MAX, 0, 0], [2, 1, 1]),
            ([0, 0, 0], [33, 1, 1]),
        ] {
            assert!(!inside(&shape, at, extent), "{at:?} {extent:?}");
        }
    }
}
