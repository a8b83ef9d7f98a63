//! One thread's texture read: level, layer, face, texels and their combination.

use super::coordinate::{Axis, Pair};
use super::cube;
use super::filter::{Float, Fraction, MOST, SRGB, Share, plane, product};
use crate::error::Fault;
use crate::exec::float::flag;
use crate::exec::half;
use crate::exec::memory::{Global, Place};
use crate::machine::texture::{AddressMode, ChannelFormat, Image, Texture};
use crate::machine::warp::Warp;

/// Four channels, as stored in registers.
pub(super) type Bits = [u32; 4];

/// The levels that an instruction reads.
#[derive(Debug, Clone, Copy)]
pub(super) enum Detail {
    /// The first level.
    Base,
    Level(f32),
    /// How far the coordinates move between this thread and its neighbors in each screen direction.
    Gradient([[f32; 3]; 2]),
}

/// The operands of a texture read.
#[derive(Debug, Clone, Copy)]
pub(super) struct TextureRead {
    /// 1 to 3; a cube map's direction counts as 3.
    pub directions: usize,
    pub cube: bool,
    pub layered: bool,
    /// Layer or cube index.
    pub layer: u32,
    pub point: [f32; 3],
    pub detail: Detail,
}

/// How texels become values.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// They are returned unchanged.
    Whole,
    Fraction(Fraction),
    Srgb,
    Float(Float),
}

/// A texel that contributes to a result.
#[derive(Debug, Clone, Copy)]
enum Texel {
    Stored(Bits),
    Border,
}

/// A level and a layer in it.
#[derive(Clone, Copy)]
struct Slice<'a> {
    image: &'a Image,
    layer: u32,
}

pub(super) struct Reader<'a> {
    pub texture: &'a Texture,
    pub lane: usize,
}

/// The bits of an f16's value as f32; NaNs keep their digits.
fn half_bits(h: u16) -> u32 {
    let (sign, exponent, fraction) =
        (u32::from(h >> 15) << 31, u32::from(h >> 10 & 31), u32::from(h & 0x3ff));
    sign | match (exponent, fraction) {
        (0, _) => (fraction as f32 * 2f32.powi(-24)).to_bits(),
        (31, _) => 0x7f80_0000 | fraction << 13,
        _ => (exponent + 112) << 23 | fraction << 13,
    }
}

fn extend(v: u32, bits: u32) -> i32 {
    (v << (32 - bits)) as i32 >> (32 - bits)
}

impl Reader<'_> {
    fn kind(&self) -> Kind {
        let sampler = &self.texture.sampler;
        match self.format() {
            ChannelFormat::Float(16) => Kind::Float(Float::HALF),
            ChannelFormat::Float(_) => Kind::Float(Float::SINGLE),
            _ if sampler.srgb => Kind::Srgb,
            ChannelFormat::Unsigned(bits) if sampler.normalized_read && bits < 32 => {
                Kind::Fraction(Fraction { bits, signed: false })
            }
            ChannelFormat::Signed(bits) if sampler.normalized_read && bits < 32 => {
                Kind::Fraction(Fraction { bits, signed: true })
            }
            _ => Kind::Whole,
        }
    }

    fn base(&self) -> &Image {
        // A texture has at least one level.
        &self.texture.levels[0]
    }

    fn format(&self) -> ChannelFormat {
        self.base().format
    }

    fn channels(&self) -> usize {
        self.base().channels as usize
    }

    /// The bits of a texel inside the image.
    fn stored(&self, w: &mut Warp, slice: Slice<'_>, at: [u32; 3]) -> Result<Bits, Fault> {
        let image = slice.image;
        let layer = u64::from(at[2]) + u64::from(slice.layer) * u64::from(image.size[2]);
        let address = image
            .address
            .wrapping_add(u64::from(at[0]) * image.texel_bytes())
            .wrapping_add(u64::from(at[1]).wrapping_mul(image.row_pitch))
            .wrapping_add(layer.wrapping_mul(image.slice_pitch));
        let size = image.texel_bytes() as u32;
        let outside = Fault::IllegalAddress { access: "read", space: "texture", address, size };
        let p = Global::find(w, self.lane, address, size).ok_or(outside)?;
        let bytes = image.format.bits() as usize / 8;
        let mut out = [0; 4];
        for (n, value) in out.iter_mut().enumerate().take(image.channels as usize) {
            let mut b = [0u8; 4];
            // SAFETY: `find` has checked the bytes of a texel.
            unsafe { std::ptr::copy_nonoverlapping(p.add(n * bytes), b.as_mut_ptr(), bytes) };
            *value = u32::from_le_bytes(b);
        }
        Ok(out)
    }

    /// A stored channel as a float.
    fn float(&self, raw: u32) -> u32 {
        if self.format() == ChannelFormat::Float(16) { half_bits(raw as u16) } else { raw }
    }

    /// A stored channel as a signed integer.
    fn whole(&self, raw: u32) -> i32 {
        match self.format() {
            ChannelFormat::Signed(bits) => extend(raw, bits),
            _ => raw as i32,
        }
    }

    /// The border color as a texel: the channels that the format has; for integers, the float's lowest bits.
    fn border(&self) -> Bits {
        let colour = self.texture.sampler.border;
        let mut out = [0; 4];
        for (n, value) in out.iter_mut().enumerate().take(self.channels()) {
            let v = colour[n];
            *value = match (self.kind(), self.format()) {
                (Kind::Fraction(f), _) => f.of(v) as u32 & (u32::MAX >> (32 - f.bits)),
                (Kind::Srgb, _) => Fraction { bits: 8, signed: false }.of(v) as u32,
                (_, ChannelFormat::Float(16)) => {
                    let bits = half::to_f16(f64::from(v.clamp(-65504.0, 65504.0)), flag::RZ);
                    u32::from(bits)
                }
                (_, ChannelFormat::Unsigned(bits) | ChannelFormat::Signed(bits)) => {
                    v.to_bits() & (u32::MAX >> (32 - bits))
                }
                _ => v.to_bits(),
            };
        }
        out
    }

    /// The value of a single texel.
    fn read(&self, texel: Bits) -> Bits {
        let mut out = [0; 4];
        for (n, value) in out.iter_mut().enumerate().take(self.channels()) {
            let raw = texel[n];
            *value = match self.kind() {
                Kind::Whole => self.whole(raw) as u32,
                Kind::Fraction(f) => f.read(self.whole(raw)).to_bits(),
                Kind::Srgb if n < 3 => srgb(raw).to_bits(),
                Kind::Srgb => Fraction { bits: 8, signed: false }.read(raw as i32).to_bits(),
                Kind::Float(_) => self.float(raw),
            };
        }
        out
    }

    /// The value of several texels.
    fn blend(&self, texels: &[(Share, Texel)]) -> Bits {
        let border = self.border();
        let mut out = [0; 4];
        for (n, value) in out.iter_mut().enumerate().take(self.channels()) {
            let floats = |of: &dyn Fn(u32) -> f32, format: Float| {
                let mut list = [(Share { weight: 0, plane: 0 }, 0f32); MOST];
                for (entry, (share, texel)) in list.iter_mut().zip(texels) {
                    let v = match texel {
                        Texel::Stored(bits) => of(bits[n]),
                        Texel::Border => of(border[n]),
                    };
                    *entry = (*share, v);
                }
                format.blend(&list[..texels.len()]).to_bits()
            };
            let fractions = |f: Fraction| {
                let mut list = [(Share { weight: 0, plane: 0 }, 0i32); MOST];
                for (entry, (share, texel)) in list.iter_mut().zip(texels) {
                    let v = match texel {
                        Texel::Stored(bits) => self.whole(bits[n]),
                        Texel::Border => self.whole(border[n]),
                    };
                    *entry = (*share, v);
                }
                f.blend(&list[..texels.len()]).to_bits()
            };
            *value = match self.kind() {
                Kind::Float(format) => floats(&|raw| f32::from_bits(self.float(raw)), format),
                Kind::Srgb if n < 3 => floats(&srgb, Float::HALF),
                Kind::Srgb => fractions(Fraction { bits: 8, signed: false }),
                Kind::Fraction(f) => fractions(f),
                // The host refuses to filter integers.
                Kind::Whole => 0,
            };
        }
        out
    }

    fn axis(&self, image: &Image, direction: usize) -> Axis {
        let sampler = &self.texture.sampler;
        Axis { size: image.size[direction], mode: sampler.address[direction], normalized: sampler.normalized }
    }

    /// Like [`Reader::axis`], for a face of a cube map.
    fn face_axis(&self, image: &Image, direction: usize) -> Axis {
        let mode = if self.texture.sampler.seamless {
            AddressMode::Clamp
        } else {
            self.texture.sampler.address[direction]
        };
        Axis { mode, normalized: true, ..self.axis(image, direction) }
    }

    /// Reads the texture at `look`.
    pub fn sample(&self, w: &mut Warp, look: &TextureRead) -> Result<Bits, Fault> {
        let base = *self.base();
        let mut look = *look;
        if self.texture.sampler.anisotropic && matches!(look.detail, Detail::Gradient(_)) {
            return Err(Fault::IllegalInstruction(
                "gradients in an anisotropic texture are not implemented".into(),
            ));
        }
        if look.cube {
            if !base.layers.is_multiple_of(6) {
                return Err(Fault::IllegalInstruction(
                    "a texture that is not a cube map was read as one".into(),
                ));
            }
            look.detail = match look.detail {
                Detail::Gradient(change) => Detail::Gradient(change.map(|change| {
                    let [s, t] = cube::moves(look.point, change);
                    [s as f32, t as f32, 0.0]
                })),
                other => other,
            };
            let on = cube::face(look.point);
            look.layer = look.layer.min(base.layers / 6 - 1) * 6 + on.face;
            look.point = [on.at[0], on.at[1], 0.0];
            look.directions = 2;
        }
        look.layer = look.layer.min(base.layers - 1);
        let level = self.level(&look);
        let top = self.texture.levels.len() - 1;
        let (mut first, mut share) = (level as usize >> 8, level & 255);
        if !self.texture.sampler.mip_linear {
            (first, share) = ((level as usize + 128) >> 8, 0);
        }
        let slice = |level: usize| Slice { image: &self.texture.levels[level.min(top)], layer: look.layer };
        if share == 0 && !self.texture.sampler.linear {
            return match self.nearest(w, slice(first), &look)? {
                Texel::Stored(bits) => Ok(self.read(bits)),
                _ => Ok(self.read(self.border())),
            };
        }
        let mut texels = Gathered { list: [(Share { weight: 0, plane: 0 }, Texel::Border); MOST], count: 0 };
        for (n, whole) in [256 - share, share].into_iter().enumerate().filter(|(_, whole)| *whole != 0) {
            self.gather_level(w, slice(first + n), &look, whole, 2 * n, &mut texels)?;
        }
        let counted = &texels.list[..texels.count];
        Ok(self.blend(counted))
    }

    /// The texel nearest to the point.
    fn nearest(&self, w: &mut Warp, slice: Slice<'_>, look: &TextureRead) -> Result<Texel, Fault> {
        let mut at = [0; 3];
        for d in 0..look.directions {
            let axis = if look.cube { self.face_axis(slice.image, d) } else { self.axis(slice.image, d) };
            match axis.nearest(look.point[d]) {
                Some(x) => at[d] = x,
                None => return Ok(Texel::Border),
            }
        }
        Ok(Texel::Stored(self.stored(w, slice, at)?))
    }

    /// Adds the texels that a level contributes, with `whole` of the 256 parts.
    fn gather_level(
        &self,
        w: &mut Warp,
        slice: Slice<'_>,
        look: &TextureRead,
        whole: u32,
        first_plane: usize,
        out: &mut Gathered,
    ) -> Result<(), Fault> {
        if !self.texture.sampler.linear {
            let texel = self.nearest(w, slice, look)?;
            out.add(Share { weight: whole, plane: first_plane }, texel);
            return Ok(());
        }
        if look.cube && self.texture.sampler.seamless {
            return self.gather_face(w, slice, look, whole, first_plane, out);
        }
        let [x, row] = [0, 1]
            .map(|d| if look.cube { self.face_axis(slice.image, d) } else { self.axis(slice.image, d) });
        let x = x.pair(look.point[0]);
        let y = match look.directions {
            // A 1D image is a 2D image whose second coordinate is zero, unless it is layered.
            1 if look.layered => Pair { texels: [Some(0); 2], weight: 0 },
            1 => row.pair(0.0),
            _ => row.pair(look.point[1]),
        };
        let z = match look.directions {
            3 => self.axis(slice.image, 2).pair(look.point[2]),
            _ => Pair { texels: [Some(0); 2], weight: 0 },
        };
        let front = product(256 - z.weight, whole);
        for (n, whole) in [front, whole - front].into_iter().enumerate() {
            let weights = plane(x.weight, y.weight, whole);
            for (corner, weight) in weights.into_iter().enumerate() {
                if [x, y, z]
                    .into_iter()
                    .zip([corner & 1, corner >> 1, n])
                    .any(|(p, n)| n == 1 && p.weight == 0)
                {
                    continue;
                }
                let texel = match (x.texels[corner & 1], y.texels[corner >> 1], z.texels[n]) {
                    (Some(x), Some(y), Some(z)) => Texel::Stored(self.stored(w, slice, [x, y, z])?),
                    _ => Texel::Border,
                };
                out.add(Share { weight, plane: first_plane + n }, texel);
            }
        }
        Ok(())
    }

    /// Like [`Reader::gather_level`], for a cube map's face that continues beyond its edges.
    fn gather_face(
        &self,
        w: &mut Warp,
        slice: Slice<'_>,
        look: &TextureRead,
        whole: u32,
        plane_number: usize,
        out: &mut Gathered,
    ) -> Result<(), Fault> {
        let size = slice.image.size[0];
        let axis = Axis { size, mode: AddressMode::Border, normalized: true };
        let [(x, right), (y, lower)] = [0, 1].map(|d| axis.between(look.point[d]));
        let first = slice.layer - slice.layer % 6;
        for (corner, weight) in plane(right, lower, whole).into_iter().enumerate() {
            if weight == 0 {
                continue;
            }
            let at = [x as i64 + (corner as i64 & 1), y as i64 + (corner as i64 >> 1)];
            let last = i64::from(size) - 1;
            let outside = at.map(|c| c < 0 || c > last);
            let inside = at.map(|c| c.clamp(0, last) as u32);
            let own = [inside[0], inside[1], 0];
            let over = |w: &mut Warp, at: [i64; 2]| {
                let (face, [x, y]) = cube::beyond(slice.layer % 6, at, size);
                self.stored(w, Slice { layer: first + face, ..slice }, [x, y, 0])
            };
            let mut add = |weight: u32, texel: Bits| {
                out.add(Share { weight, plane: plane_number }, Texel::Stored(texel));
            };
            match outside {
                [false, false] => add(weight, self.stored(w, slice, own)?),
                // Three faces meet in a corner: the other two get a third each, this one the rest.
                [true, true] => {
                    let third = (weight + 1) / 3;
                    add(weight - 2 * third, self.stored(w, slice, own)?);
                    add(third, over(w, [at[0], i64::from(inside[1])])?);
                    add(third, over(w, [i64::from(inside[0]), at[1]])?);
                }
                _ => add(weight, over(w, at)?),
            }
        }
        Ok(())
    }

    /// The level to read, in 1/256.
    fn level(&self, look: &TextureRead) -> u32 {
        // Truncates towards zero; NaN becomes zero.
        let fixed = |v: f32| (f64::from(v) * 256.0) as i64;
        let sampler = &self.texture.sampler;
        let wanted = match look.detail {
            Detail::Base => 0,
            Detail::Level(level) => fixed(level).saturating_add(fixed(sampler.level_bias)),
            Detail::Gradient(change) => {
                self.extent(look.directions, change).saturating_add(fixed(sampler.level_bias))
            }
        };
        let [least, most] = sampler.level_range.map(fixed);
        let top = (self.texture.levels.len() as i64 - 1) << 8;
        wanted.min(most).max(least).clamp(0, top) as u32
    }

    /// The logarithm, in 1/256, of the longer axis of the ellipse that a pixel covers in texels.
    fn extent(&self, directions: usize, change: [[f32; 3]; 2]) -> i64 {
        let size = self.base().size;
        let scaled = |n: usize, d: usize| {
            let v = f64::from(change[n][d]);
            if v.is_nan() { 0.0 } else { v * f64::from(size[d]) }
        };
        let dot = |a: usize, b: usize| (0..directions).map(|d| scaled(a, d) * scaled(b, d)).sum::<f64>();
        let (a, b, c) = (dot(0, 0), dot(1, 1), dot(0, 1));
        if !(a + b).is_finite() {
            return i64::from(i32::MAX);
        }
        let square = (a + b + ((a - b) * (a - b) + 4.0 * c * c).sqrt()) / 2.0;
        if square > 0.0 { (square.log2() * 128.0).floor() as i64 } else { i64::from(i32::MIN) }
    }

    /// Reads by integer coordinates: not filtered, not normalized; zero outside.
    pub fn fetch(
        &self,
        w: &mut Warp,
        at: [i32; 3],
        directions: usize,
        layer: u32,
        level: u32,
    ) -> Result<Bits, Fault> {
        let Some(image) = self.texture.levels.get(level as usize) else { return Ok([0; 4]) };
        let outside = (0..directions).any(|d| at[d] < 0 || at[d] as u32 >= image.size[d]);
        if outside || layer >= image.layers {
            return Ok([0; 4]);
        }
        let bits = self.stored(w, Slice { image, layer }, at.map(|v| v as u32))?;
        Ok(self.read(bits))
    }

    /// One channel of the four texels that linear filtering would read, counter-clockwise from the lower
    /// left.
    pub fn gather(&self, w: &mut Warp, point: [f32; 3], channel: usize) -> Result<Bits, Fault> {
        let image = *self.base();
        let [x, y] = [0, 1].map(|d| self.axis(&image, d).neighbours(point[d]));
        let mut out = [0; 4];
        for (n, (right, lower)) in [(0, 1), (1, 1), (1, 0), (0, 0)].into_iter().enumerate() {
            let texel = match (x[right], y[lower]) {
                (Some(x), Some(y)) => self.stored(w, Slice { image: &image, layer: 0 }, [x, y, 0])?,
                _ => self.border(),
            };
            out[n] = self.read(texel)[channel];
        }
        Ok(out)
    }
}

fn srgb(raw: u32) -> f32 {
    f32::from(SRGB[raw as usize & 255]) / 16384.0
}

/// Texels and their weights.
struct Gathered {
    list: [(Share, Texel); MOST],
    count: usize,
}

impl Gathered {
    fn add(&mut self, share: Share, texel: Texel) {
        self.list[self.count] = (share, texel);
        self.count += 1;
    }
}
