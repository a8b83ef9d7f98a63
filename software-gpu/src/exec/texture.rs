//! Reading textures and surfaces.
//!
//! The extension at `r[0]` has four result rows (or NONE), then the coordinates' rows; `r[1]` is the row of handles (64 bits).
//! Weights of linear filtering have 8 bits of fraction, as the CUDA manual says of the hardware.

use std::sync::Arc;

use crate::device::texture::{AddressMode, ChannelFormat, Image, Texture};
use crate::error::Fault;
use crate::exec::half::from_f16;
use crate::exec::memory::{Global, Place};
use crate::exec::rows::{self, LANES};
use crate::exec::warp::Warp;
use crate::lower::program::{Flow, Handler, Inst, NONE};

/// Fields of `imm`.
pub(crate) mod field {
    /// Directions, 1 to 3.
    pub const DIRECTIONS: i64 = 3;
    /// The first coordinate is a layer.
    pub const LAYERED: i64 = 4;
    /// Coordinates are whole numbers.
    pub const WHOLE: i64 = 8;
    /// Gathers one channel of four texels (`tld4`); which one is at [`CHANNEL`].
    pub const GATHER: i64 = 16;
    pub const CHANNEL: u32 = 8;
    /// Of a surface: bytes of an element, its number of elements, and what happens outside (0: trap, 1: clamp, 2: zero).
    pub const BYTES: u32 = 16;
    pub const COUNT: u32 = 24;
    pub const OUTSIDE: u32 = 32;
}

/// A texel's channels: numbers to filter, or the bits of whole ones.
#[derive(Clone, Copy)]
enum Texel {
    Floats([f32; 4]),
    Bits([u32; 4]),
}

struct Reader<'a> {
    texture: &'a Texture,
    lane: usize,
    layer: u32,
}

impl Reader<'_> {
    fn place(&self, w: &mut Warp, at: [u32; 3]) -> Result<*mut u8, Fault> {
        let image = &self.texture.image;
        let plane = u64::from(at[2]) + u64::from(self.layer) * u64::from(image.size[2]);
        let address = image
            .address
            .wrapping_add(u64::from(at[0]) * image.texel_bytes())
            .wrapping_add(u64::from(at[1]).wrapping_mul(image.row_pitch))
            .wrapping_add(plane.wrapping_mul(image.slice_pitch));
        let size = image.texel_bytes() as u32;
        let outside = Fault::IllegalAddress { access: "read", space: "texture", address, size };
        Global::find(w, self.lane, address, size).ok_or(outside)
    }

    /// A texel inside the image.
    fn texel(&self, w: &mut Warp, at: [u32; 3]) -> Result<Texel, Fault> {
        let p = self.place(w, at)?;
        let Image { format, channels, .. } = self.texture.image;
        let bytes = format.bits() as usize / 8;
        let mut raw = [0u32; 4];
        for (n, value) in raw.iter_mut().enumerate().take(channels as usize) {
            let mut b = [0u8; 4];
            // SAFETY: `place` answers for the bytes of a texel.
            unsafe { std::ptr::copy_nonoverlapping(p.add(n * bytes), b.as_mut_ptr(), bytes) };
            *value = u32::from_le_bytes(b);
        }
        let normalized = self.texture.sampler.normalized_read && format.bits() < 32;
        let one = |raw: u32| match format {
            ChannelFormat::Float(16) => from_f16(raw as u16) as f32,
            ChannelFormat::Float(_) => f32::from_bits(raw),
            ChannelFormat::Unsigned(n) => raw as f32 / ((1u64 << n) - 1) as f32,
            ChannelFormat::Signed(n) => {
                let v = (raw << (32 - n)) as i32 >> (32 - n);
                (v as f32 / ((1u64 << (n - 1)) - 1) as f32).max(-1.0)
            }
        };
        Ok(match format {
            ChannelFormat::Unsigned(_) if !normalized => Texel::Bits(raw),
            ChannelFormat::Signed(n) if !normalized => {
                Texel::Bits(raw.map(|v| ((v << (32 - n)) as i32 >> (32 - n)) as u32))
            }
            _ => {
                let mut out = [0.0; 4];
                for n in 0..channels as usize {
                    out[n] = one(raw[n]);
                }
                // A channel that is not there is 0, the last of them 1.
                if channels < 4 {
                    out[3] = 1.0;
                }
                Texel::Floats(out)
            }
        })
    }

    /// Where a texel's coordinate lies in the image, or `None` on the border.
    fn wrap(&self, at: i64, direction: usize) -> Option<u32> {
        let size = i64::from(self.texture.image.size[direction]);
        let sampler = &self.texture.sampler;
        let mode = match sampler.address[direction] {
            AddressMode::Wrap | AddressMode::Mirror if !sampler.normalized => AddressMode::Clamp,
            mode => mode,
        };
        Some(match mode {
            AddressMode::Wrap => at.rem_euclid(size) as u32,
            AddressMode::Clamp => at.clamp(0, size - 1) as u32,
            AddressMode::Mirror => {
                let at = at.rem_euclid(2 * size);
                at.min(2 * size - 1 - at) as u32
            }
            AddressMode::Border if (0..size).contains(&at) => at as u32,
            AddressMode::Border => return None,
        })
    }

    fn texel_or_border(&self, w: &mut Warp, at: [i64; 3], directions: usize) -> Result<Texel, Fault> {
        let mut inside = [0u32; 3];
        for d in 0..directions {
            match self.wrap(at[d], d) {
                Some(x) => inside[d] = x,
                None => {
                    let border = self.texture.sampler.border;
                    let whole = !matches!(self.texture.image.format, ChannelFormat::Float(_))
                        && !self.texture.sampler.normalized_read;
                    return Ok(if whole {
                        Texel::Bits(border.map(|v| v as i64 as u32))
                    } else {
                        Texel::Floats(border)
                    });
                }
            }
        }
        self.texel(w, inside)
    }

    /// The texture at a point.
    fn sample(&self, w: &mut Warp, point: [f32; 3], directions: usize) -> Result<Texel, Fault> {
        let sampler = &self.texture.sampler;
        let mut x = [0f64; 3];
        for d in 0..directions {
            let size = f64::from(self.texture.image.size[d]);
            let p = f64::from(point[d]);
            let p = if p.is_nan() { 0.0 } else { p };
            x[d] = (if sampler.normalized { p * size } else { p }).clamp(-1e15, 1e15);
        }
        if !sampler.linear {
            return self.texel_or_border(w, x.map(|v| v.floor() as i64), directions);
        }
        let mut base = [0i64; 3];
        let mut weight = [0f32; 3];
        for d in 0..directions {
            let at = x[d] - 0.5;
            let fixed = ((at - at.floor()) * 256.0).round_ties_even();
            base[d] = at.floor() as i64 + (fixed / 256.0) as i64;
            weight[d] = (fixed % 256.0 / 256.0) as f32;
        }
        let mut sum = [0f32; 4];
        for corner in 0..1usize << directions {
            let mut at = base;
            let mut share = 1.0;
            for d in 0..directions {
                let next = corner >> d & 1 != 0;
                at[d] += i64::from(next);
                share *= if next { weight[d] } else { 1.0 - weight[d] };
            }
            if share == 0.0 {
                continue;
            }
            match self.texel_or_border(w, at, directions)? {
                Texel::Floats(v) => (0..4).for_each(|n| sum[n] += share * v[n]),
                Texel::Bits(_) => {
                    return self.texel_or_border(w, x.map(|v| v.floor() as i64), directions);
                }
            }
        }
        Ok(Texel::Floats(sum))
    }
}

fn texture(w: &mut Warp, handle: u64) -> Option<Arc<Texture>> {
    w.block().run().gpu.textures.get(handle)
}

/// `tex` and `tld4`.
pub(crate) const SAMPLE: Handler = handler!(|w, i, m| sample(w, i, m));

unsafe fn sample(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    crate::exec::memory::refresh(w);
    // SAFETY: the lowering gives rows of 64 bits for handles and of 32 for coordinates and results.
    unsafe {
        let at = i.r[0] as usize;
        let directions = (i.imm & field::DIRECTIONS) as usize;
        let layered = i.imm & field::LAYERED != 0;
        let handles: [u64; LANES] = rows::get(w, i.r[1]);
        let mut out = [[0u32; LANES]; 4];
        let mut last: Option<(u64, Arc<Texture>)> = None;
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            if last.as_ref().is_none_or(|l| l.0 != handles[lane]) {
                let Some(found) = texture(w, handles[lane]) else {
                    let what = format!("{:#x} is no texture", handles[lane]);
                    return w.set_fault(Fault::IllegalInstruction(what), lane);
                };
                last = Some((handles[lane], found));
            }
            let Some((_, texture)) = &last else { return Flow::Next };
            let coordinate = |w: &Warp, n: usize| (*rows::row::<u32>(w, w.code().ext[at + 4 + n]))[lane];
            let layer = if layered { coordinate(w, 0).min(texture.image.layers - 1) } else { 0 };
            let reader = Reader { texture, lane, layer };
            let mut words = [0u32; 3];
            for d in 0..directions {
                words[d] = coordinate(w, d + usize::from(layered));
            }
            let result = if i.imm & field::GATHER != 0 {
                gather(&reader, w, words.map(f32::from_bits), (i.imm >> field::CHANNEL & 3) as usize)
            } else if i.imm & field::WHOLE != 0 {
                fetch(&reader, w, words.map(|v| v as i32), directions)
            } else {
                reader.sample(w, words.map(f32::from_bits), directions)
            };
            let values = match result {
                Ok(Texel::Floats(v)) => v.map(f32::to_bits),
                Ok(Texel::Bits(v)) => v,
                Err(fault) => return w.set_fault(fault, lane),
            };
            for n in 0..4 {
                out[n][lane] = values[n];
            }
        }
        for (n, row) in out.iter().enumerate() {
            let to = w.code().ext[at + n];
            if to != NONE {
                rows::put(w, to, mask, row);
            }
        }
    }
    Flow::Next
}

/// By whole coordinates: neither filtered nor normalised; outside is zero.
fn fetch(reader: &Reader<'_>, w: &mut Warp, at: [i32; 3], directions: usize) -> Result<Texel, Fault> {
    let size = reader.texture.image.size;
    let outside = (0..directions).any(|d| at[d] < 0 || at[d] as u32 >= size[d]);
    if outside { Ok(Texel::Bits([0; 4])) } else { reader.texel(w, at.map(|v| v as u32)) }
}

/// One channel of the four texels that linear filtering would look at, counter-clockwise from the lower left.
fn gather(reader: &Reader<'_>, w: &mut Warp, point: [f32; 3], channel: usize) -> Result<Texel, Fault> {
    let sampler = &reader.texture.sampler;
    let mut base = [0i64; 3];
    for d in 0..2 {
        let size = f64::from(reader.texture.image.size[d]);
        let p = f64::from(point[d]) * if sampler.normalized { size } else { 1.0 };
        base[d] = (p.clamp(-1e15, 1e15) - 0.5).floor() as i64;
    }
    let mut out = [0u32; 4];
    for (n, (dx, dy)) in [(0, 1), (1, 1), (1, 0), (0, 0)].into_iter().enumerate() {
        let texel = reader.texel_or_border(w, [base[0] + dx, base[1] + dy, 0], 2)?;
        out[n] = match texel {
            Texel::Floats(v) => v[channel].to_bits(),
            Texel::Bits(v) => v[channel],
        };
    }
    Ok(Texel::Bits(out))
}

/// `suld.b` and, with `STORE`, `sust.b`: the first coordinate counts bytes.
pub(crate) const SURFACE_LOAD: Handler = handler!(|w, i, m| surface::<false>(w, i, m));
/// See [`SURFACE_LOAD`].
pub(crate) const SURFACE_STORE: Handler = handler!(|w, i, m| surface::<true>(w, i, m));

unsafe fn surface<const STORE: bool>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    crate::exec::memory::refresh(w);
    // SAFETY: the lowering gives rows of 64 bits for handles, of 32 for coordinates, and of the elements' width for values.
    unsafe {
        let at = i.r[0] as usize;
        let directions = (i.imm & field::DIRECTIONS) as usize;
        let layered = i.imm & field::LAYERED != 0;
        let (bytes, count) = ((i.imm >> field::BYTES & 255) as usize, (i.imm >> field::COUNT & 255) as usize);
        let outside_is = i.imm >> field::OUTSIDE & 3;
        let handles: [u64; LANES] = rows::get(w, i.r[1]);
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            let Some(texture) = texture(w, handles[lane]) else {
                let what = format!("{:#x} is no surface", handles[lane]);
                return w.set_fault(Fault::IllegalInstruction(what), lane);
            };
            let image = texture.image;
            let coordinate = |w: &Warp, n: usize| (*rows::row::<u32>(w, w.code().ext[at + 4 + n]))[lane];
            let layer = if layered { coordinate(w, 0) } else { 0 };
            let mut x = [0i64; 3];
            for d in 0..directions {
                x[d] = i64::from(coordinate(w, d + usize::from(layered)) as i32);
            }
            let size = (bytes * count) as i64;
            let limit = [
                i64::from(image.size[0]) * image.texel_bytes() as i64 - (size - 1),
                i64::from(image.size[1]),
                i64::from(image.size[2]),
            ];
            let mut outside = layer >= image.layers || (0..directions).any(|d| x[d] < 0 || x[d] >= limit[d]);
            if outside && outside_is == 1 {
                for d in 0..directions {
                    x[d] = x[d].clamp(0, (limit[d] - 1).max(0));
                }
                x[0] -= x[0] % size;
                outside = layer >= image.layers;
            }
            let plane = (x[2] as u64).wrapping_add(u64::from(layer) * u64::from(image.size[2]));
            let address = image
                .address
                .wrapping_add(x[0] as u64)
                .wrapping_add((x[1] as u64).wrapping_mul(image.row_pitch))
                .wrapping_add(plane.wrapping_mul(image.slice_pitch));
            let fault = Fault::IllegalAddress {
                access: if STORE { "write" } else { "read" },
                space: "surface",
                address,
                size: size as u32,
            };
            if outside && outside_is == 0 {
                return w.set_fault(fault, lane);
            }
            if x[0] % size != 0 {
                let fault = Fault::MisalignedAddress { space: "surface", address, size: size as u32 };
                return w.set_fault(fault, lane);
            }
            let place = if outside { None } else { Global::find(w, lane, address, size as u32) };
            if place.is_none() && !outside {
                return w.set_fault(fault, lane);
            }
            for n in 0..count {
                let row = w.code().ext[at + n];
                if row == NONE {
                    continue;
                }
                // Registers of 8 bits' values are of 16.
                let width = bytes.max(2);
                let cell = rows::row::<u8>(w, row).cast::<u8>().add(lane * width);
                match place {
                    Some(p) if STORE => std::ptr::copy_nonoverlapping(cell, p.add(n * bytes), bytes),
                    Some(p) => {
                        std::ptr::write_bytes(cell, 0, width);
                        std::ptr::copy_nonoverlapping(p.add(n * bytes), cell, bytes);
                    }
                    None if !STORE => std::ptr::write_bytes(cell, 0, width),
                    None => {}
                }
            }
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
            let what = format!("{:#x} is no texture", handles[lane]);
            return w.set_fault(Fault::IllegalInstruction(what), lane);
        };
        let Image { size, layers, .. } = texture.image;
        out[lane] = match i.imm {
            0..3 => size[i.imm as usize],
            3 => layers,
            4 => u32::from(texture.sampler.normalized),
            _ => 1,
        };
    }
    rows::put(w, i.r[0], m, &out);
    Flow::Next
});
