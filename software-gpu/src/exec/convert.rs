//! Conversions between types (`cvt`).

use crate::exec::float::{flag, flush, narrow};
use crate::exec::half::f8;
use crate::exec::half::{from_bf16, from_f16, to_bf16, to_f16};
use crate::exec::rows::{map1, map2, map3};
use crate::lower::program::Handler;

/// Further flags in `imm`: rounding to an integer.
pub(crate) mod integer {
    pub const RNI: i64 = 64;
    pub const RZI: i64 = 128;
    pub const RMI: i64 = 192;
    pub const RPI: i64 = 256;
    pub const MASK: i64 = 448;
    /// Negative results become zero.
    pub const RELU: i64 = 512;
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

fn exact_to_f64(v: i128, flags: i64) -> f64 {
    let nearest = v as f64;
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

fn exact_to_f32(v: i128, flags: i64) -> f32 {
    let nearest = v as f32;
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

macro_rules! int_to_int {
    ($s:ty, $dst:expr) => {{
        macro_rules! to {
            ($d:ty) => {
                handler!(|w, i, m| map1(w, i, m, |a: $s| {
                    if i.imm & SAT != 0 {
                        i128::from(a).clamp(i128::from(<$d>::MIN), i128::from(<$d>::MAX)) as $d
                    } else {
                        a as $d
                    }
                }))
            };
        }
        macro_rules! plain {
            ($d:ty) => {
                handler!(|w, i, m| map1(w, i, m, |a: $s| a as $d))
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
            ("f32", false) => handler!(|w, i, m| map1(w, i, m, |a: $s| a as f32)),
            ("f32", true) => {
                handler!(|w, i, m| map1(w, i, m, |a: $s| output32(exact_to_f32(i128::from(a), i.imm), i.imm)))
            }
            ("f64", false) => handler!(|w, i, m| map1(w, i, m, |a: $s| a as f64)),
            ("f64", true) => handler!(|w, i, m| map1(w, i, m, |a: $s| exact_to_f64(i128::from(a), i.imm))),
            ("f16", _) => handler!(|w, i, m| map1(w, i, m, |a: $s| {
                to_f16(exact_to_f64(i128::from(a), if i.imm & flag::ROUND == 0 { 0 } else { i.imm }), i.imm)
            })),
            ("bf16", _) => {
                handler!(|w, i, m| map1(w, i, m, |a: $s| to_bf16(exact_to_odd(i128::from(a)), i.imm)))
            }
            _ => return None,
        })
    }};
}

/// As f64, rounded to odd so that a further rounding is right.
fn exact_to_odd(v: i128) -> f64 {
    let down = exact_to_f64(v, flag::RZ);
    if down as i128 == v || down.to_bits() & 1 != 0 { down } else { f64::from_bits(down.to_bits() + 1) }
}

macro_rules! float_to_any {
    ($s:ty, $dst:expr, |$a:ident, $flags:ident| $widen:expr) => {{
        #[inline(always)]
        fn widen($a: $s, $flags: i64) -> f64 {
            $widen
        }
        Some(match $dst {
            "u8" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as u8)),
            "s8" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as i8)),
            "u16" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as u16)),
            "s16" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as i16)),
            "u32" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as u32)),
            "s32" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as i32)),
            "u64" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as u64)),
            "s64" => handler!(|w, i, m| map1(w, i, m, |a: $s| round_integer(widen(a, i.imm), i.imm) as i64)),
            "f32" => handler!(|w, i, m| map1(w, i, m, |a: $s| {
                output32(narrow(round_integer(widen(a, i.imm), i.imm), i.imm), i.imm)
            })),
            "f64" => handler!(|w, i, m| map1(w, i, m, |a: $s| {
                let x = round_integer(widen(a, i.imm), i.imm);
                if i.imm & SAT != 0 {
                    if x > 0.0 { x.min(1.0) } else { 0.0 }
                } else if x.is_nan() {
                    f64::from_bits(0x7fff_ffff_ffff_ffff)
                } else {
                    x
                }
            })),
            "f16" => handler!(|w, i, m| map1(w, i, m, |a: $s| to_f16(
                round_integer(widen(a, i.imm), i.imm),
                i.imm
            ))),
            "bf16" => handler!(|w, i, m| map1(w, i, m, |a: $s| to_bf16(
                round_integer(widen(a, i.imm), i.imm),
                i.imm
            ))),
            _ => return None,
        })
    }};
}

/// The conversion from `src` to `dst`; `imm` holds the flags. `special` says that there are any.
pub(crate) fn cvt(dst: &str, src: &str, special: bool) -> Option<Handler> {
    match src {
        "u8" => int_to_int!(u8, (dst, special)),
        "s8" => int_to_int!(i8, (dst, special)),
        "u16" => int_to_int!(u16, (dst, special)),
        "s16" => int_to_int!(i16, (dst, special)),
        "u32" => int_to_int!(u32, (dst, special)),
        "s32" => int_to_int!(i32, (dst, special)),
        "u64" if dst != "s64" || !special => int_to_int!(u64, (dst, special)),
        "u64" => Some(handler!(|w, i, m| map1(w, i, m, |a: u64| a.min(i64::MAX as u64)))),
        "s64" => int_to_int!(i64, (dst, special)),
        "f32" => float_to_any!(f32, dst, |a, flags| f64::from(input32(a, flags))),
        "f64" => float_to_any!(f64, dst, |a, _flags| a),
        "f16" => float_to_any!(u16, dst, |a, _flags| from_f16(a)),
        "bf16" => float_to_any!(u16, dst, |a, _flags| from_bf16(a)),
        _ => None,
    }
}

/// `cvt` to tf32: `imm` has the rounding (RP stands for "to nearest, ties away") and RELU.
pub(crate) const TF32: Handler = handler!(|w, i, m| map1(w, i, m, |a: f32| {
    let bits = a.to_bits();
    if a.is_nan() {
        return 0x7fff_ffff;
    }
    if i.imm & integer::RELU != 0 && bits >> 31 != 0 {
        return 0;
    }
    let lost = match i.imm & flag::ROUND {
        flag::RZ => 0,
        flag::RP => 0x1000,
        _ => 0xfff + (bits >> 13 & 1),
    };
    if a.is_infinite() { bits } else { (bits + lost) & 0xffff_e000 }
}));

/// `cvt.pack.sat`: two whole numbers, and with `three` what is below them before, shifted up.
pub(crate) fn pack(ty: &str, three: bool) -> Option<Handler> {
    Some(match (ty, three) {
        ("u8", true) => handler!(|w, i, m| map3(w, i, m, |a: i32, b: i32, c: u32| {
            c << 16 | (a.clamp(0, 255) as u32) << 8 | b.clamp(0, 255) as u32
        })),
        ("s8", true) => handler!(|w, i, m| map3(w, i, m, |a: i32, b: i32, c: u32| {
            c << 16 | u32::from(a.clamp(-128, 127) as u8) << 8 | u32::from(b.clamp(-128, 127) as u8)
        })),
        ("u16", false) => handler!(|w, i, m| map2(w, i, m, |a: i32, b: i32| {
            (a.clamp(0, 0xffff) as u32) << 16 | b.clamp(0, 0xffff) as u32
        })),
        ("s16", false) => handler!(|w, i, m| map2(w, i, m, |a: i32, b: i32| {
            u32::from(a.clamp(-0x8000, 0x7fff) as u16) << 16 | u32::from(b.clamp(-0x8000, 0x7fff) as u16)
        })),
        _ => return None,
    })
}

/// Conversions to and from pairs of 8-bit floats; of two sources the first goes to the upper half.
pub(crate) fn eights(dst: &str, src: &str) -> Option<Handler> {
    macro_rules! to {
        ($encode:path) => {
            match src {
                "f32" => handler!(|w, i, m| map2(w, i, m, |a: f32, b: f32| {
                    u16::from($encode(f64::from(a), i.imm)) << 8 | u16::from($encode(f64::from(b), i.imm))
                })),
                "f16x2" => handler!(|w, i, m| map1(w, i, m, |a: u32| {
                    u16::from($encode(from_f16((a >> 16) as u16), i.imm)) << 8
                        | u16::from($encode(from_f16(a as u16), i.imm))
                })),
                _ => return None,
            }
        };
    }
    macro_rules! from {
        ($decode:path) => {
            handler!(|w, i, m| map1(w, i, m, |a: u16| {
                let part = |b: u16| {
                    let h = $decode(b as u8);
                    if i.imm & integer::RELU != 0 && h >> 15 != 0 { 0 } else { u32::from(h) }
                };
                part(a >> 8) << 16 | part(a & 0xff)
            }))
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
