//! Conversions between types (`cvt`).

use crate::exec::float::{flag, flush, flush_tiny, narrow};
use crate::exec::half::{f8, from_bf16, from_f16, to_bf16, to_f16};
use crate::machine::program::Handler;

/// Further flags in `imm`: rounding to an integer.
pub(crate) mod integer {
    pub const RNI: i64 = 64;
    pub const RZI: i64 = 128;
    pub const RMI: i64 = 192;
    pub const RPI: i64 = 256;
    pub const MASK: i64 = 448;
    /// Negative results become zero.
    pub const RELU: i64 = 512;
    /// Results beyond the largest finite number become that (tf32 only).
    pub const FINITE: i64 = 1024;
}

const SAT: i64 = flag::SAT;

#[inline(always)]
fn round_integer(x: f64, flags: i64) -> f64 {
    match flags & integer::MASK {
        integer::RNI => x.round_ties_even(),
        integer::RZI => x.trunc(),
        integer::RMI => x.floor(),
        integer::RPI => x.ceil(),
        _ => x,
    }
}

#[inline(always)]
fn input32(x: f32, flags: i64) -> f32 {
    if flags & flag::FTZ != 0 { flush(x) } else { x }
}

#[inline(always)]
fn output32(x: f32, flags: i64) -> f32 {
    let x = if flags & flag::FTZ != 0 { flush(x) } else { x };
    if flags & SAT != 0 {
        return if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    if x.is_nan() { f32::from_bits(0x7fff_ffff) } else { x }
}

/// Defines the conversion of an integer to a float, rounded as the flags say.
macro_rules! exact_to {
    ($name:ident, $float:ty) => {
        fn $name(v: i128, flags: i64) -> $float {
            let nearest = v as $float;
            let back = nearest as i128;
            let down = match flags & flag::ROUND {
                flag::RM => true,
                flag::RP => false,
                flag::RZ => v > 0,
                _ => return nearest,
            };
            if down && back > v {
                nearest.next_down()
            } else if !down && back < v {
                nearest.next_up()
            } else {
                nearest
            }
        }
    };
}

exact_to!(exact_to_f32, f32);
exact_to!(exact_to_f64, f64);

macro_rules! int_to_int {
    ($s:ty, $dst:expr) => {{
        macro_rules! to {
            ($d:ty) => {
                lanewise!(imm, |a: $s| {
                    if imm & SAT != 0 {
                        i128::from(a).clamp(i128::from(<$d>::MIN), i128::from(<$d>::MAX)) as $d
                    } else {
                        a as $d
                    }
                })
            };
        }
        macro_rules! plain {
            ($d:ty) => {
                lanewise!(|a: $s| a as $d)
            };
        }
        Some(match $dst {
            ("u8", true) => to!(u8),
            ("s8", true) => to!(i8),
            ("u16", true) => to!(u16),
            ("s16", true) => to!(i16),
            ("u32", true) => to!(u32),
            ("s32", true) => to!(i32),
            ("u64", true) => to!(u64),
            ("s64", true) => to!(i64),
            ("u8" | "s8" | "b8", _) => plain!(u8),
            ("u16" | "s16" | "b16", _) => plain!(u16),
            ("u32" | "s32" | "b32", _) => plain!(u32),
            ("u64" | "s64" | "b64", _) => plain!(u64),
            ("b128", _) => plain!(u128),
            ("f32", false) => lanewise!(|a: $s| a as f32),
            ("f32", true) => lanewise!(imm, |a: $s| output32(exact_to_f32(i128::from(a), imm), imm)),
            ("f64", false) => lanewise!(|a: $s| a as f64),
            ("f64", true) => lanewise!(imm, |a: $s| exact_to_f64(i128::from(a), imm)),
            ("f16", _) => lanewise!(imm, |a: $s| {
                to_f16(exact_to_f64(i128::from(a), if imm & flag::ROUND == 0 { 0 } else { imm }), imm)
            }),
            ("bf16", _) => lanewise!(imm, |a: $s| to_bf16(exact_to_odd(i128::from(a)), imm)),
            _ => return None,
        })
    }};
}

/// As f64, rounded to odd so that a second rounding is exact.
fn exact_to_odd(v: i128) -> f64 {
    let down = exact_to_f64(v, flag::RZ);
    if down as i128 == v || down.to_bits() & 1 != 0 { down } else { f64::from_bits(down.to_bits() + 1) }
}

/// A floating-point source of `cvt`: its value, and how it converts a NaN.
trait Source: Copy {
    fn value(self, flags: i64) -> f64;
    /// A NaN as f64, keeping its digits.
    fn nan64(self, flags: i64) -> u64;
    /// A NaN as f32.
    fn nan32(self) -> u32 {
        NAN32
    }
    /// A NaN as f16, then as bf16.
    fn nan16(self) -> [u16; 2] {
        [0x7fff; 2]
    }
    /// Whether converting a NaN to an integer of `bits` sets only the highest bit; otherwise the result is
    /// zero.
    fn nan_is_lowest(bits: u32) -> bool {
        bits == 64
    }
}

const NAN32: u32 = 0x7fff_ffff;
const QUIET: u64 = 1 << 51;

/// A NaN with these digits below a sign, shifted up by `shift`.
#[inline(always)]
fn widened_nan(digits: u64, negative: bool, shift: u32) -> u64 {
    u64::from(negative) << 63 | 0x7ff << 52 | digits << shift | QUIET
}

impl Source for f32 {
    #[inline(always)]
    fn value(self, flags: i64) -> f64 {
        f64::from(input32(self, flags))
    }
    fn nan64(self, flags: i64) -> u64 {
        // With `.ftz` it goes through an f32 operation, which has one NaN.
        let bits = if flags & flag::FTZ != 0 { NAN32 } else { self.to_bits() };
        widened_nan(u64::from(bits & 0x7f_ffff), bits >> 31 != 0, 29)
    }
}

impl Source for f64 {
    #[inline(always)]
    fn value(self, _flags: i64) -> f64 {
        self
    }
    fn nan64(self, _flags: i64) -> u64 {
        self.to_bits() | QUIET
    }
    fn nan32(self) -> u32 {
        let bits = self.nan64(0);
        (bits >> 32) as u32 & 0x8000_0000 | 0x7f80_0000 | (bits >> 29) as u32 & 0x7f_ffff
    }
    fn nan16(self) -> [u16; 2] {
        let bits = self.nan64(0);
        let sign = (bits >> 48) as u16 & 0x8000;
        [sign | 0x7c00 | (bits >> 42) as u16 & 0x3ff, sign | 0x7f80 | (bits >> 45) as u16 & 0x7f]
    }
    fn nan_is_lowest(_bits: u32) -> bool {
        true
    }
}

/// A register that contains an f16.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct F16Bits(u16);

impl Source for F16Bits {
    #[inline(always)]
    fn value(self, _flags: i64) -> f64 {
        from_f16(self.0)
    }
    fn nan64(self, _flags: i64) -> u64 {
        widened_nan(u64::from(self.0 & 0x3ff), self.0 >> 15 != 0, 42)
    }
}

/// A register that contains a bf16.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16Bits(u16);

impl Source for Bf16Bits {
    #[inline(always)]
    fn value(self, _flags: i64) -> f64 {
        from_bf16(self.0)
    }
    fn nan64(self, _flags: i64) -> u64 {
        widened_nan(u64::from(self.0 & 0x7f), self.0 >> 15 != 0, 45)
    }
    fn nan32(self) -> u32 {
        u32::from(self.0) << 16
    }
}

#[inline(always)]
fn rounded<S: Source>(a: S, flags: i64) -> f64 {
    round_integer(a.value(flags), flags)
}

/// A conversion to f64.
#[inline(always)]
fn to_f64<S: Source>(a: S, flags: i64) -> f64 {
    let x = rounded(a, flags);
    if flags & SAT != 0 {
        return if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    if x.is_nan() { f64::from_bits(a.nan64(flags)) } else { x }
}

/// A conversion to f32.
#[inline(always)]
fn to_f32<S: Source>(a: S, flags: i64) -> f32 {
    let x = rounded(a, flags);
    if x.is_nan() && flags & SAT == 0 {
        return f32::from_bits(a.nan32());
    }
    output32(flush_tiny(narrow(x, flags), x, flags), flags)
}

/// Whether the result of a conversion is the source's NaN.
#[inline(always)]
fn keeps_nan(x: f64, flags: i64) -> bool {
    x.is_nan() && flags & (SAT | integer::RELU) == 0
}

macro_rules! float_to_any {
    ($s:ty, $dst:expr) => {{
        macro_rules! integer {
            ($d:ty) => {
                lanewise!(imm, |a: $s| {
                    let x = rounded(a, imm);
                    if <$s as Source>::nan_is_lowest(<$d>::BITS) && x.is_nan() {
                        (1u64 << (<$d>::BITS - 1)) as $d
                    } else {
                        x as $d
                    }
                })
            };
        }
        Some(match $dst {
            "u8" => integer!(u8),
            "s8" => integer!(i8),
            "u16" => integer!(u16),
            "s16" => integer!(i16),
            "u32" => integer!(u32),
            "s32" => integer!(i32),
            "u64" => integer!(u64),
            "s64" => integer!(i64),
            "f32" => lanewise!(imm, |a: $s| to_f32(a, imm)),
            "f64" => lanewise!(imm, |a: $s| to_f64(a, imm)),
            "f16" => lanewise!(imm, |a: $s| {
                let x = rounded(a, imm);
                if keeps_nan(x, imm) { a.nan16()[0] } else { to_f16(x, imm) }
            }),
            "bf16" => lanewise!(imm, |a: $s| {
                let x = rounded(a, imm);
                if keeps_nan(x, imm) { a.nan16()[1] } else { to_bf16(x, imm) }
            }),
            _ => return None,
        })
    }};
}

/// The conversion from `src` to `dst`; `imm` contains the flags. `special` is set if there are any.
pub(crate) fn cvt(dst: &str, src: &str, special: bool) -> Option<Handler> {
    match src {
        "u8" => int_to_int!(u8, (dst, special)),
        "s8" => int_to_int!(i8, (dst, special)),
        "u16" => int_to_int!(u16, (dst, special)),
        "s16" => int_to_int!(i16, (dst, special)),
        "u32" => int_to_int!(u32, (dst, special)),
        "s32" => int_to_int!(i32, (dst, special)),
        "u64" if dst != "s64" || !special => int_to_int!(u64, (dst, special)),
        "u64" => Some(lanewise!(|a: u64| a.min(i64::MAX as u64))),
        "s64" => int_to_int!(i64, (dst, special)),
        "f32" => float_to_any!(f32, dst),
        "f64" => float_to_any!(f64, dst),
        "f16" => float_to_any!(F16Bits, dst),
        "bf16" => float_to_any!(Bf16Bits, dst),
        _ => None,
    }
}

/// `cvt` to tf32: `imm` has the rounding (RP stands for "to nearest, ties away", which keeps a NaN's digits),
/// RELU and FINITE. NVIDIA's assembler makes the latter of instructions that also lower a NaN by one digit.
pub(crate) const TF32: Handler = lanewise!(imm, |a: f32| {
    let bits = to_tf32(a, imm);
    let exceeds = bits & 0x7f80_0000 == 0x7f80_0000;
    if imm & integer::FINITE != 0 && exceeds { bits - 0x2000 } else { bits }
});

#[inline(always)]
fn to_tf32(a: f32, imm: i64) -> u32 {
    let bits = a.to_bits();
    if a.is_nan() {
        return if imm & flag::ROUND == flag::RP { bits & 0xffff_e000 } else { 0x7fff_e000 };
    }
    if imm & integer::RELU != 0 && bits >> 31 != 0 {
        return 0;
    }
    let lost = match imm & flag::ROUND {
        flag::RZ => 0,
        flag::RP => 0x1000,
        _ => 0xfff + (bits >> 13 & 1),
    };
    if a.is_infinite() { bits } else { (bits + lost) & 0xffff_e000 }
}

/// Replaces infinities of a 16-bit format, or of a pair, by the largest finite number: `.satfinite`.
pub(crate) fn finite(ty: &str) -> Option<Handler> {
    #[inline(always)]
    fn largest<const INFINITY: u16>(bits: u16) -> u16 {
        bits - u16::from(bits & 0x7fff == INFINITY)
    }
    macro_rules! finite {
        ($infinity:literal) => {
            lanewise!(|a: u16| largest::<$infinity>(a))
        };
        ($infinity:literal, pair) => {
            lanewise!(|a: u32| {
                let both = [a as u16, (a >> 16) as u16].map(|half| u32::from(largest::<$infinity>(half)));
                both[0] | both[1] << 16
            })
        };
    }
    Some(match ty {
        "f16" => finite!(0x7c00),
        "bf16" => finite!(0x7f80),
        "f16x2" => finite!(0x7c00, pair),
        "bf16x2" => finite!(0x7f80, pair),
        _ => return None,
    })
}

/// `cvt.pack.sat`: two integers; with `three`, the third source's lower part is shifted up above them.
pub(crate) fn pack(ty: &str, three: bool) -> Option<Handler> {
    Some(match (ty, three) {
        ("u8", true) => lanewise!(|a: i32, b: i32, c: u32| {
            c << 16 | (a.clamp(0, 255) as u32) << 8 | b.clamp(0, 255) as u32
        }),
        ("s8", true) => lanewise!(|a: i32, b: i32, c: u32| {
            c << 16 | u32::from(a.clamp(-128, 127) as u8) << 8 | u32::from(b.clamp(-128, 127) as u8)
        }),
        ("u16", false) => {
            lanewise!(|a: i32, b: i32| (a.clamp(0, 0xffff) as u32) << 16 | b.clamp(0, 0xffff) as u32)
        }
        ("s16", false) => lanewise!(|a: i32, b: i32| {
            u32::from(a.clamp(-0x8000, 0x7fff) as u16) << 16 | u32::from(b.clamp(-0x8000, 0x7fff) as u16)
        }),
        _ => return None,
    })
}

/// Conversions to and from pairs of 8-bit floats. The first of two sources goes to the upper half.
pub(crate) fn f8_pairs(dst: &str, src: &str) -> Option<Handler> {
    macro_rules! to {
        ($encode:path) => {
            match src {
                "f32" => lanewise!(imm, |a: f32, b: f32| {
                    u16::from($encode(f64::from(a), imm)) << 8 | u16::from($encode(f64::from(b), imm))
                }),
                "f16x2" => lanewise!(imm, |a: u32| {
                    u16::from($encode(from_f16((a >> 16) as u16), imm)) << 8
                        | u16::from($encode(from_f16(a as u16), imm))
                }),
                _ => return None,
            }
        };
    }
    macro_rules! from {
        ($decode:path) => {
            lanewise!(imm, |a: u16| {
                let part = |b: u16| {
                    let h = $decode(b as u8);
                    if imm & integer::RELU != 0 && h >> 15 != 0 { 0 } else { u32::from(h) }
                };
                part(a >> 8) << 16 | part(a & 0xff)
            })
        };
    }
    Some(match (dst, src) {
        ("e4m3x2", _) => to!(f8::encode_e4m3),
        ("e5m2x2", _) => to!(f8::encode_e5m2),
        ("f16x2", "e4m3x2") => from!(f8::decode_e4m3),
        ("f16x2", "e5m2x2") => from!(f8::decode_e5m2),
        _ => return None,
    })
}
