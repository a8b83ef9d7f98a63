//! Reads textures and surfaces.
//!
//! `coordinate` finds texels and weights, `cube` the faces of cube maps, `filter` has the arithmetic, and
//! `sample` combines them for one thread; `surface` reads and writes surfaces. This module has the handlers
//! of `tex`, `tld4`, `txq` and `suq`.
//!
//! The extension at `r[0]` has four result rows (or NONE), then the rows of the coordinates, then those of
//! the level or of the two gradients. `r[1]` is the row of handles (64 bits), `r[2]` the predicate row that
//! reports resident memory (or NONE).

mod coordinate;
mod cube;
mod filter;
mod sample;
mod surface;

pub(crate) use surface::{SURFACE_LOAD, SURFACE_STORE};

use std::sync::Arc;

use crate::error::Fault;
use crate::exec::rows;
use crate::machine::program::{Handler, Inst, NONE};
use crate::machine::row::LANES;
use crate::machine::texture::{Image, Texture};
use crate::machine::warp::{Flow, Warp};
use sample::{Detail, Reader, TextureRead};

/// Fields of `imm`.
pub(crate) mod field {
    /// Number of dimensions, 1 to 3.
    pub const DIRECTIONS: i64 = 3;
    /// The first coordinate is a layer.
    pub const LAYERED: i64 = 4;
    /// Coordinates are integers.
    pub const WHOLE: i64 = 8;
    /// Gathers one channel of four texels (`tld4`); [`CHANNEL`] says which.
    pub const GATHER: i64 = 16;
    /// A cube map.
    pub const CUBE: i64 = 32;
    /// The level is given.
    pub const LEVEL: i64 = 64;
    /// Gradients are given.
    pub const GRADIENT: i64 = 128;
    pub const CHANNEL: u32 = 8;
    /// For surfaces: bytes per element, number of elements, and the mode outside (0: trap, 1: clamp, 2:
    /// zero).
    pub const BYTES: u32 = 16;
    pub const COUNT: u32 = 24;
    pub const OUTSIDE: u32 = 32;
}

fn texture(w: &mut Warp, handle: u64) -> Option<Arc<Texture>> {
    w.block().grid().hardware.textures.get(handle)
}

/// `tex` and `tld4`.
pub(crate) const SAMPLE: Handler = handler!(|w, i, m| sample(w, i, m));

unsafe fn sample(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    crate::exec::memory::refresh(w);
    // SAFETY: the lowering guarantees rows of 64 bits for handles and of 32 for coordinates and results.
    unsafe {
        let at = i.r[0] as usize;
        let has = |flag: i64| i.imm & flag != 0;
        let directions = (i.imm & field::DIRECTIONS) as usize;
        let layered = usize::from(has(field::LAYERED));
        let handles: [u64; LANES] = rows::get(w, i.r[1]);
        let mut out = [[0u32; LANES]; 4];
        let mut last: Option<(u64, Arc<Texture>)> = None;
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            if last.as_ref().is_none_or(|l| l.0 != handles[lane]) {
                let Some(found) = texture(w, handles[lane]) else {
                    let what = format!("{:#x} is not a texture", handles[lane]);
                    return w.set_fault(Fault::IllegalInstruction(what), lane);
                };
                last = Some((handles[lane], found));
            }
            let Some((_, texture)) = &last else { return Flow::Next };
            let word = |w: &Warp, n: usize| (*rows::row::<u32>(w, w.ext()[at + 4 + n]))[lane];
            let words = |w: &Warp, first: usize| {
                let mut words = [0u32; 3];
                for (d, value) in words.iter_mut().enumerate().take(directions) {
                    *value = word(w, first + d);
                }
                words
            };
            let layer = if layered != 0 { word(w, 0) } else { 0 };
            let point = words(w, layered);
            let more = layered + directions;
            let reader = Reader { texture, lane };
            let result = if has(field::GATHER) {
                reader.gather(w, point.map(f32::from_bits), (i.imm >> field::CHANNEL & 3) as usize)
            } else if has(field::WHOLE) {
                let level = if has(field::LEVEL) { word(w, more) } else { 0 };
                reader.fetch(w, point.map(|v| v as i32), directions, layer, level)
            } else {
                let detail = if has(field::LEVEL) {
                    Detail::Level(f32::from_bits(word(w, more)))
                } else if has(field::GRADIENT) {
                    Detail::Gradient([more, more + directions].map(|n| words(w, n).map(f32::from_bits)))
                } else {
                    Detail::Base
                };
                let point = point.map(f32::from_bits);
                let (cube, layered) = (has(field::CUBE), has(field::LAYERED));
                reader.sample(w, &TextureRead { directions, cube, layered, layer, point, detail })
            };
            let values = match result {
                Ok(values) => values,
                Err(fault) => return w.set_fault(fault, lane),
            };
            for n in 0..4 {
                out[n][lane] = values[n];
            }
        }
        for (n, row) in out.iter().enumerate() {
            let to = w.ext()[at + n];
            if to != NONE {
                rows::put(w, to, mask, row);
            }
        }
        if i.r[2] != NONE {
            rows::put_pred(w, i.r[2], mask, mask);
        }
    }
    Flow::Next
}

/// `txq` and `suq`: row `r[0]` (32 bits) = property `imm` of the handle in row `r[1]`.
pub(crate) const QUERY: Handler = handler!(|w, i, m| {
    let handles: [u64; LANES] = rows::get(w, i.r[1]);
    let mut out = [0u32; LANES];
    for lane in (0..LANES).filter(|l| m >> l & 1 != 0) {
        let Some(texture) = texture(w, handles[lane]) else {
            let what = format!("{:#x} is not a texture", handles[lane]);
            return w.set_fault(Fault::IllegalInstruction(what), lane);
        };
        // A texture has at least one level.
        let Image { size, layers, .. } = texture.levels[0];
        out[lane] = match i.imm {
            0..3 => size[i.imm as usize],
            3 => layers,
            4 => u32::from(texture.sampler.normalized),
            _ => texture.levels.len() as u32,
        };
    }
    rows::put(w, i.r[0], m, &out);
    Flow::Next
});
