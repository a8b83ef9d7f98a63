//! f16 and bf16: their encodings, and arithmetic in f64 rounded once.

use crate::exec::convert::integer;
use crate::exec::float::{add_odd, flag};
use crate::machine::program::Handler;

/// The value of an f16.
#[inline(always)]
pub(crate) fn from_f16(h: u16) -> f64 {
    let (sign, exponent, fraction) = (h >> 15, h >> 10 & 31, h & 0x3ff);
    let magnitude = match exponent {
        0 => f64::from(fraction) * 2f64.powi(-24),
        31 if fraction == 0 => f64::INFINITY,
        31 => f64::NAN,
        _ => f64::from_bits((u64::from(exponent) + 1008) << 52 | u64::from(fraction) << 42),
    };
    if sign != 0 { -magnitude } else { magnitude }
}

/// The value of a bf16.
#[inline(always)]
pub(crate) fn from_bf16(h: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(h) << 16))
}

/// Rounds the magnitude of a finite `x` to a multiple of `ulp`, a power of two.
fn to_multiple(x: f64, ulp: f64, flags: i64) -> f64 {
    let q = x / ulp;
    let r = match flags & flag::ROUND {
        flag::RZ => q.trunc(),
        flag::RM => q.floor(),
        flag::RP => q.ceil(),
        _ => q.round_ties_even(),
    };
    r * ulp
}

/// Rounds to a format with `digits` significand bits, lowest exponent `low` and largest finite value `max`.
fn round(x: f64, digits: i32, low: i32, max: f64, flags: i64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(low);
    let r = to_multiple(x, 2f64.powi(exponent - digits + 1), flags);
    if r.abs() <= max {
        return if r == 0.0 { 0f64.copysign(x) } else { r };
    }
    let away = match flags & flag::ROUND {
        flag::RZ => false,
        flag::RM => x < 0.0,
        flag::RP => x > 0.0,
        _ => true,
    };
    (if away { f64::INFINITY } else { max }).copysign(x)
}

#[inline(always)]
fn clamp(x: f64, flags: i64) -> f64 {
    if flags & flag::SAT != 0 {
        return if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    // A NaN stays a NaN; minus zero becomes zero.
    if flags & integer::RELU != 0 && x <= 0.0 { 0.0 } else { x }
}

/// Returns zero if the flags ask for it and `x`, rounded to `digits` with an unlimited exponent range, would
/// be subnormal.
#[inline(always)]
fn flush_tiny(x: f64, digits: i32, smallest: i32, flags: i64) -> f64 {
    let limit = 2f64.powi(smallest);
    if flags & flag::FTZ == 0 || x.is_nan() || x.abs() >= limit {
        return x;
    }
    if round(x, digits, -1000, 1.0, flags).abs() < limit { 0f64.copysign(x) } else { x }
}

/// Encodes as f16. The value may have been rounded to odd before, but not otherwise.
pub(crate) fn to_f16(x: f64, flags: i64) -> u16 {
    let x = flush_tiny(clamp(x, flags), 11, -14, flags);
    if x.is_nan() {
        return 0x7fff;
    }
    let r = round(x, 11, -14, 65504.0, flags);
    let sign = if r.is_sign_negative() { 0x8000 } else { 0 };
    let a = r.abs();
    let bits = if a.is_infinite() {
        0x7c00
    } else if a < 2f64.powi(-14) {
        (a * 2f64.powi(24)) as u16
    } else {
        ((a.to_bits() >> 42) - (1008 << 10)) as u16
    };
    sign | bits
}

/// Encodes as bf16.
pub(crate) fn to_bf16(x: f64, flags: i64) -> u16 {
    let x = flush_tiny(clamp(x, flags), 8, -126, flags);
    if x.is_nan() {
        return 0x7fff;
    }
    let max = f64::from(f32::from_bits(0x7f7f_0000));
    let r = round(x, 8, -126, max, flags) as f32;
    (r.to_bits() >> 16) as u16
}

/// What arithmetic needs to know of the two formats.
pub(crate) trait Half {
    /// The exponent's bits, which are also the bits of infinity.
    const INFINITY: u16;
    fn decode(h: u16) -> f64;
    fn encode(x: f64, flags: i64) -> u16;
}
pub(crate) struct F16;
pub(crate) struct Bf16;
impl Half for F16 {
    const INFINITY: u16 = 0x7c00;
    #[inline(always)]
    fn decode(h: u16) -> f64 {
        from_f16(h)
    }
    #[inline(always)]
    fn encode(x: f64, flags: i64) -> u16 {
        to_f16(x, flags)
    }
}
impl Half for Bf16 {
    const INFINITY: u16 = 0x7f80;
    #[inline(always)]
    fn decode(h: u16) -> f64 {
        from_bf16(h)
    }
    #[inline(always)]
    fn encode(x: f64, flags: i64) -> u16 {
        to_bf16(x, flags)
    }
}

#[inline(always)]
fn input<H: Half>(h: u16, flags: i64) -> f64 {
    let subnormal = flags & flag::FTZ != 0 && h & H::INFINITY == 0;
    H::decode(if subnormal { h & 0x8000 } else { h })
}

fn add<H: Half>(a: u16, b: u16, flags: i64) -> u16 {
    H::encode(add_odd(input::<H>(a, flags), input::<H>(b, flags)), flags)
}
fn sub<H: Half>(a: u16, b: u16, flags: i64) -> u16 {
    H::encode(add_odd(input::<H>(a, flags), -input::<H>(b, flags)), flags)
}
fn mul<H: Half>(a: u16, b: u16, flags: i64) -> u16 {
    H::encode(input::<H>(a, flags) * input::<H>(b, flags), flags)
}
fn fma<H: Half>(a: u16, b: u16, c: u16, flags: i64) -> u16 {
    H::encode(add_odd(input::<H>(a, flags) * input::<H>(b, flags), input::<H>(c, flags)), flags)
}

fn unary<H: Half>(a: u16, flags: i64, f: impl Fn(f64) -> f64) -> u16 {
    H::encode(f(input::<H>(a, flags)), flags)
}

/// Replaces the sign of `h` using `sign`. NaNs become the canonical one, and subnormals zero if the flags say
/// so.
#[inline(always)]
fn with_sign<H: Half>(h: u16, flags: i64, sign: impl Fn(u16) -> u16) -> u16 {
    let size = h & 0x7fff;
    if size > H::INFINITY {
        return 0x7fff;
    }
    let flushed = flags & flag::FTZ != 0 && size & H::INFINITY == 0;
    sign(h) & 0x8000 | if flushed { 0 } else { size }
}

/// `r[0]` (f32) = the half `r[1]`, or the lower or upper half of the pair `r[1]`.
pub(crate) fn widen(bf16: bool, pair: bool, high: bool) -> Handler {
    match (bf16, pair, high) {
        (false, false, _) => lanewise!(imm, |a: u16| input::<F16>(a, imm) as f32),
        (true, false, _) => lanewise!(|a: u16| from_bf16(a) as f32),
        (false, true, false) => lanewise!(imm, |a: u32| input::<F16>(a as u16, imm) as f32),
        (true, true, false) => lanewise!(|a: u32| from_bf16(a as u16) as f32),
        (false, true, true) => lanewise!(imm, |a: u32| input::<F16>((a >> 16) as u16, imm) as f32),
        (true, true, true) => lanewise!(|a: u32| from_bf16((a >> 16) as u16) as f32),
    }
}

/// The 8-bit formats, which are stored in pairs.
pub(crate) mod f8 {
    use super::{clamp, round, to_f16};

    /// Decodes to f16, exactly.
    pub fn decode_e4m3(b: u8) -> u16 {
        let (exponent, fraction) = (b >> 3 & 15, b & 7);
        let x = match (exponent, fraction) {
            (15, 7) => f64::NAN,
            (0, f) => f64::from(f) * 2f64.powi(-9),
            (e, f) => (1.0 + f64::from(f) / 8.0) * 2f64.powi(i32::from(e) - 7),
        };
        if x.is_nan() { 0x7fff } else { to_f16(if b & 0x80 != 0 { -x } else { x }, 0) }
    }

    /// Decodes to f16, exactly: it is an f16's upper half.
    pub fn decode_e5m2(b: u8) -> u16 {
        if b & 0x7f > 0x7c { 0x7fff } else { u16::from(b) << 8 }
    }

    /// Encodes, rounding to nearest; larger values become the largest finite one.
    pub fn encode_e4m3(x: f64, flags: i64) -> u8 {
        encode(clamp(x, flags), 4, -6, 448.0, 3)
    }

    /// Like [`encode_e4m3`].
    pub fn encode_e5m2(x: f64, flags: i64) -> u8 {
        encode(clamp(x, flags), 3, -14, 57344.0, 2)
    }

    fn encode(x: f64, digits: i32, low: i32, max: f64, fraction: u32) -> u8 {
        if x.is_nan() {
            return 0x7f;
        }
        let r = round(x, digits, low, max, 0);
        let sign = if r.is_sign_negative() { 0x80 } else { 0 };
        let a = r.abs().min(max);
        if a < 2f64.powi(low) {
            return sign | (a * 2f64.powi(digits - 1 - low)) as u8;
        }
        let bits = a.to_bits();
        let exponent = (bits >> 52) as i32 - 1023 - low + 1;
        sign | (exponent as u8) << fraction | (bits >> (52 - fraction)) as u8 & ((1 << fraction) - 1)
    }
}

pub(crate) fn extreme<H: Half>(a: u16, b: u16, flags: i64, max: bool) -> u16 {
    let (mut x, mut y) = (input::<H>(a, flags), input::<H>(b, flags));
    let sign = if flags & flag::XORSIGN != 0 { (a ^ b) & 0x8000 } else { 0 };
    if flags & flag::XORSIGN != 0 {
        (x, y) = (x.abs(), y.abs());
    }
    if x.is_nan() || y.is_nan() {
        if flags & flag::NAN != 0 || (x.is_nan() && y.is_nan()) {
            return 0x7fff;
        }
        return H::encode(if x.is_nan() { y } else { x }, 0) | sign;
    }
    let first = if x == y { x.is_sign_positive() == max } else { (x > y) == max };
    H::encode(if first { x } else { y }, 0) | sign
}

#[inline(always)]
fn both(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

macro_rules! ops {
    ($name:expr, $h:ty) => {
        Some(match $name {
            ("add", false) => lanewise!(imm, |a, b| add::<$h>(a, b, imm)),
            ("sub", false) => lanewise!(imm, |a, b| sub::<$h>(a, b, imm)),
            ("mul", false) => lanewise!(imm, |a, b| mul::<$h>(a, b, imm)),
            ("fma", false) => lanewise!(imm, |a, b, c| fma::<$h>(a, b, c, imm)),
            ("min", false) => lanewise!(imm, |a, b| extreme::<$h>(a, b, imm, false)),
            ("max", false) => lanewise!(imm, |a, b| extreme::<$h>(a, b, imm, true)),
            ("tanh.approx", false) => lanewise!(imm, |a| unary::<$h>(a, imm, f64::tanh)),
            ("ex2.approx", false) => lanewise!(imm, |a| unary::<$h>(a, imm, f64::exp2)),
            ("tanh.approx", true) => {
                lanewise!(imm, |a| both(a, 0, |a, _| unary::<$h>(a, imm, f64::tanh)))
            }
            ("ex2.approx", true) => lanewise!(imm, |a| both(a, 0, |a, _| unary::<$h>(a, imm, f64::exp2))),
            ("abs", false) => lanewise!(imm, |a| with_sign::<$h>(a, imm, |_| 0)),
            ("neg", false) => lanewise!(imm, |a| with_sign::<$h>(a, imm, |h| !h)),
            ("add", true) => lanewise!(imm, |a, b| both(a, b, |a, b| add::<$h>(a, b, imm))),
            ("sub", true) => lanewise!(imm, |a, b| both(a, b, |a, b| sub::<$h>(a, b, imm))),
            ("mul", true) => lanewise!(imm, |a, b| both(a, b, |a, b| mul::<$h>(a, b, imm))),
            ("fma", true) => lanewise!(imm, |a: u32, b: u32, c: u32| {
                let low = fma::<$h>(a as u16, b as u16, c as u16, imm);
                let high = fma::<$h>((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16, imm);
                u32::from(low) | u32::from(high) << 16
            }),
            ("min", true) => lanewise!(imm, |a, b| both(a, b, |a, b| extreme::<$h>(a, b, imm, false))),
            ("max", true) => lanewise!(imm, |a, b| both(a, b, |a, b| extreme::<$h>(a, b, imm, true))),
            ("abs", true) => lanewise!(imm, |a| both(a, 0, |a, _| with_sign::<$h>(a, imm, |_| 0))),
            ("neg", true) => lanewise!(imm, |a| both(a, 0, |a, _| with_sign::<$h>(a, imm, |h| !h))),
            _ => return None,
        })
    };
}

/// Arithmetic on `f16`, `f16x2`, `bf16` and `bf16x2`; `imm` holds the flags.
pub(crate) fn op(name: &str, ty: &str) -> Option<Handler> {
    match ty {
        "f16" => ops!((name, false), F16),
        "f16x2" => ops!((name, true), F16),
        "bf16" => ops!((name, false), Bf16),
        "bf16x2" => ops!((name, true), Bf16),
        _ => None,
    }
}
