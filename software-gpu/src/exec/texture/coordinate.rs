//! Converts coordinates to texels and the weights between them.
//!
//! A normalized coordinate is truncated after 21 binary digits (22 and 23 in large images) before it is
//! multiplied by the size. For linear filtering, the position is then rounded to 1/256 of a texel, ties up.
//! Subnormals and NaNs count as zero, and so do infinities where the image repeats.

use crate::machine::texture::AddressMode;

/// Two texels along one dimension and the weight of the second in 1/256. Each is inside the image or `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub texels: [Option<u32>; 2],
    pub weight: u32,
}

/// How one dimension of a level is addressed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub size: u32,
    pub mode: AddressMode,
    pub normalized: bool,
}

impl Axis {
    /// Binary digits of a normalized coordinate.
    fn digits(self) -> u32 {
        match self.size {
            ..=8192 => 21,
            8193..=65536 => 22,
            _ => 23,
        }
    }

    /// The effective mode: without normalized coordinates nothing repeats.
    fn mode(self) -> AddressMode {
        match self.mode {
            AddressMode::Wrap | AddressMode::Mirror if !self.normalized => AddressMode::Clamp,
            mode => mode,
        }
    }

    /// The position in texels, in units of 2^-`.1`.
    fn position(self, x: f32) -> (i128, u32) {
        // Larger than any image, and small enough not to overflow.
        const FAR: f64 = (1u64 << 40) as f64;
        let x = f64::from(if x.is_nan() || x.is_subnormal() { 0.0 } else { x });
        if !self.normalized {
            // Further digits do not matter, because the following steps round down to a multiple of 1/512.
            let cut = (x.clamp(-FAR, FAR) * 2f64.powi(40)).floor();
            return (cut as i128, 40);
        }
        let x = match self.mode() {
            AddressMode::Wrap | AddressMode::Mirror if x.is_infinite() => 0.0,
            // Exact, because two repetitions are the same place.
            AddressMode::Wrap | AddressMode::Mirror => x % 2.0,
            _ => x.clamp(-FAR, FAR),
        };
        let digits = self.digits();
        ((x * 2f64.powi(digits as i32)).floor() as i128 * i128::from(self.size), digits)
    }

    /// The index of a texel in the image, or `None` for the border.
    fn inside(self, at: i128) -> Option<u32> {
        let size = i128::from(self.size);
        Some(match self.mode() {
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

    /// The nearest texel.
    pub fn nearest(self, x: f32) -> Option<u32> {
        let (at, digits) = self.position(x);
        self.inside(at >> digits)
    }

    /// The position of the first texel and the weight of the second, ignoring the image's edges.
    pub fn between(self, x: f32) -> (i128, u32) {
        let (at, digits) = self.position(x);
        let mut fixed = self.fixed(at, digits);
        if self.mode() == AddressMode::Clamp {
            fixed = fixed.clamp(0, i128::from(self.size - 1) << 8);
        }
        (fixed >> 8, (fixed & 255) as u32)
    }

    /// The texels that linear filtering would read if there were no edges.
    pub fn neighbours(self, x: f32) -> [Option<u32>; 2] {
        let (at, digits) = self.position(x);
        let at = self.fixed(at, digits) >> 8;
        [self.inside(at), self.inside(at + 1)]
    }

    /// A position relative to texel centers, in 1/256.
    fn fixed(self, at: i128, digits: u32) -> i128 {
        // Half a unit is added for rounding.
        ((at << 8) - (128 << digits) + (1 << (digits - 1))) >> digits
    }

    /// The texels that linear filtering reads.
    pub fn pair(self, x: f32) -> Pair {
        let (at, weight) = self.between(x);
        Pair { texels: [self.inside(at), self.inside(at + 1)], weight }
    }
}
