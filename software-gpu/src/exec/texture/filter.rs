//! The arithmetic of texture filtering, as observed on an H200 (`tests/h200/textures.rs` checks it).
//!
//! A weight is a multiple of 1/256. The product of two weights is rounded to the nearest such multiple, ties
//! up, and the neighbor gets the rest, so that all weights add up to 256. Integers are summed exactly and
//! rounded once, to 16 bits. Floating-point texels are truncated four bits below the last digit of the
//! largest one and summed exactly; the sum is rounded once to the format's digits, ties away from zero.

/// The most texels that contribute: two levels of eight.
pub(super) const MOST: usize = 16;

/// A share of the result in 1/256, and the plane of four texels with which it is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub weight: u32,
    pub plane: usize,
}

/// The product of two weights, rounded to 1/256.
pub(super) fn product(a: u32, b: u32) -> u32 {
    (a * b + 128) >> 8
}

/// The weights of a plane's four texels, which get `whole` of the 256 parts: first along x, then along y.
pub(super) fn plane(x: u32, y: u32, whole: u32) -> [u32; 4] {
    let right = product(x, whole);
    let left = whole - right;
    let lower_right = product(right, y);
    let upper_left = product(left, 256 - y);
    [upper_left, right - lower_right, left - upper_left, lower_right]
}

/// A floating-point format of texels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Float {
    pub digits: i32,
    /// The least exponent of a normal number.
    pub low: i32,
    /// Whether smaller numbers are flushed to zero.
    pub flushes: bool,
    /// NaN as an f32.
    pub nan: u32,
}

impl Float {
    pub const SINGLE: Float = Float { digits: 24, low: -126, flushes: true, nan: 0x7fff_ffff };
    pub const HALF: Float = Float { digits: 11, low: -14, flushes: false, nan: 0x7fff_e000 };

    /// A weighted sum of texels.
    pub fn blend(self, texels: &[(Share, f32)]) -> f32 {
        let counted = || texels.iter().filter(|(share, _)| share.weight != 0);
        // A texel with a share that rounds to zero still counts here.
        if texels.iter().any(|(_, v)| !v.is_finite()) {
            let sum: f32 = texels.iter().map(|(_, v)| v).filter(|v| !v.is_finite()).sum();
            return if sum.is_nan() { f32::from_bits(self.nan) } else { sum };
        }
        let mut sum = 0f64;
        let planes = texels.iter().map(|(share, _)| share.plane).max().unwrap_or(0);
        for plane in 0..=planes {
            let of_plane = || counted().filter(|(share, _)| share.plane == plane);
            let greatest =
                of_plane().map(|(_, v)| exponent(f64::from(*v))).max().unwrap_or(self.low).max(self.low);
            let unit = 2f64.powi(greatest - self.digits - 3);
            sum += of_plane()
                .map(|(share, v)| {
                    f64::from(share.weight) * ((self.flush(f64::from(*v)) / unit).trunc() * unit)
                })
                .sum::<f64>();
        }
        if sum == 0.0 {
            return if texels.iter().all(|(_, v)| v.is_sign_negative()) { -0.0 } else { 0.0 };
        }
        self.flush(round(sum / 256.0, self.digits, self.low)) as f32
    }

    fn flush(self, v: f64) -> f64 {
        if self.flushes && exponent(v) < self.low { 0f64.copysign(v) } else { v }
    }
}

fn exponent(v: f64) -> i32 {
    if v == 0.0 { i32::MIN } else { (v.to_bits() >> 52 & 0x7ff) as i32 - 1023 }
}

/// Rounds to a format, ties away from zero.
fn round(v: f64, digits: i32, low: i32) -> f64 {
    let unit = 2f64.powi(exponent(v).max(low) - digits + 1);
    (v / unit).round() * unit
}

/// The H200's sRGB transfer function for each byte in 1/16384. About eight digits are accurate.
pub(super) const SRGB: [u16; 256] = [
    0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 66, 72, 78, 85, 92, 99, 107, 115, 123, 131, 140, 150,
    159, 169, 180, 190, 201, 213, 224, 236, 250, 262, 276, 290, 304, 318, 332, 348, 364, 380, 396, 412, 430,
    448, 466, 484, 504, 524, 544, 564, 584, 604, 624, 648, 672, 692, 716, 740, 764, 788, 816, 840, 864, 896,
    920, 944, 976, 1000, 1032, 1064, 1088, 1120, 1152, 1184, 1216, 1248, 1280, 1312, 1352, 1384, 1416, 1456,
    1488, 1528, 1560, 1600, 1640, 1672, 1712, 1752, 1792, 1832, 1872, 1920, 1952, 2000, 2048, 2080, 2128,
    2176, 2224, 2272, 2320, 2368, 2416, 2464, 2512, 2560, 2608, 2656, 2704, 2752, 2816, 2864, 2912, 2976,
    3024, 3072, 3136, 3184, 3248, 3296, 3360, 3424, 3472, 3536, 3600, 3664, 3712, 3776, 3840, 3904, 3968,
    4032, 4096, 4160, 4224, 4288, 4352, 4416, 4512, 4576, 4640, 4704, 4768, 4864, 4928, 4992, 5056, 5152,
    5216, 5280, 5376, 5440, 5536, 5600, 5696, 5760, 5824, 5920, 6016, 6080, 6176, 6240, 6336, 6400, 6496,
    6592, 6688, 6752, 6848, 6944, 7008, 7104, 7200, 7296, 7392, 7488, 7584, 7680, 7744, 7872, 7936, 8064,
    8128, 8256, 8320, 8448, 8512, 8640, 8768, 8832, 8960, 9024, 9152, 9280, 9344, 9472, 9600, 9664, 9792,
    9920, 9984, 10112, 10240, 10304, 10432, 10560, 10688, 10816, 10880, 11008, 11136, 11264, 11392, 11456,
    11584, 11712, 11840, 11968, 12096, 12224, 12352, 12480, 12608, 12736, 12864, 12992, 13120, 13248, 13376,
    13504, 13632, 13760, 13888, 14016, 14144, 14272, 14400, 14528, 14656, 14848, 14976, 15104, 15232, 15360,
    15488, 15616, 15744, 16000, 16128, 16256, 16384,
];

/// An integer of 8 or 16 bits that represents a number from 0 (or -1) to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fraction {
    pub bits: u32,
    pub signed: bool,
}

impl Fraction {
    /// The integer that represents 1.
    fn one(self) -> i64 {
        (1 << (self.bits - u32::from(self.signed))) - 1
    }

    /// The integer nearest to `v`, ties up.
    pub fn of(self, v: f32) -> i32 {
        let least = if self.signed { -1.0 } else { 0.0 };
        (f64::from(v).clamp(least, 1.0) * self.one() as f64 + 0.5).floor() as i32
    }

    /// A weighted sum of them.
    pub fn blend(self, texels: &[(Share, i32)]) -> f32 {
        let sum: i64 = texels.iter().map(|(share, v)| i64::from(share.weight) * i64::from(*v)).sum();
        let top = Fraction { bits: 16, ..self }.one();
        let wide = match (self.bits, self.signed) {
            (8, false) => (sum * 257 + 128) >> 8,
            // An H200 is sometimes one lower; see the README.
            (8, true) => (2 * sum * top + 127 * 256).div_euclid(2 * 127 * 256),
            _ => (sum + 128) >> 8,
        };
        self.value(wide.clamp(-top, top), top)
    }

    /// The integer's value as a float.
    pub fn read(self, v: i32) -> f32 {
        self.value(i64::from(v).max(-self.one()), self.one())
    }

    fn value(self, v: i64, one: i64) -> f32 {
        v as f32 / one as f32
    }
}
