//! Integer arithmetic, logic, shifts, comparisons and bit manipulation.

use crate::exec::float::flush;
use crate::exec::rows::{self, compare, get, put_pred};
use crate::machine::program::{Handler, Inst};
use crate::machine::row::LANES;
use crate::machine::warp::Flow;

/// The high half of a product.
trait Wide: Copy {
    fn mul_hi(self, other: Self) -> Self;
}
macro_rules! wide {
    ($($t:ty => $w:ty),*) => {$(impl Wide for $t {
        #[inline(always)]
        fn mul_hi(self, other: $t) -> $t {
            ((self as $w * other as $w) >> <$t>::BITS) as $t
        }
    })*};
}
wide!(u16 => u32, i16 => i32, u32 => u64, i32 => i64, u64 => u128, i64 => i128);

macro_rules! arithmetic {
    ($name:expr, $t:ty) => {
        Some(match $name {
            "add" => lanewise!(|a: $t, b: $t| a.wrapping_add(b)),
            "sub" => lanewise!(|a: $t, b: $t| a.wrapping_sub(b)),
            "mul.lo" => lanewise!(|a: $t, b: $t| a.wrapping_mul(b)),
            "mul.hi" => lanewise!(|a: $t, b: $t| a.mul_hi(b)),
            "mad.lo" => lanewise!(|a: $t, b: $t, c: $t| a.wrapping_mul(b).wrapping_add(c)),
            "mad.hi" => lanewise!(|a: $t, b: $t, c: $t| a.mul_hi(b).wrapping_add(c)),
            // PTX leaves division by zero undefined. On hardware the quotient is all ones and the remainder
            // is the dividend.
            "div" => lanewise!(|a: $t, b: $t| if b == 0 { !0 } else { a.wrapping_div(b) }),
            "rem" => lanewise!(|a: $t, b: $t| if b == 0 { a } else { a.wrapping_rem(b) }),
            "min" => lanewise!(|a: $t, b: $t| a.min(b)),
            "max" => lanewise!(|a: $t, b: $t| a.max(b)),
            "sad" => lanewise!(|a: $t, b: $t, c: $t| {
                c.wrapping_add(if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) })
            }),
            // Shifting by the width or more gives zero or copies of the sign.
            "shr" => lanewise!(|a: $t, b: u32| {
                if b < <$t>::BITS { a >> b } else { a >> (<$t>::BITS - 1) >> 1u32.min(<$t>::BITS - 1) }
            }),
            _ => return None,
        })
    };
}

macro_rules! signed {
    ($name:expr, $t:ty) => {
        Some(match $name {
            "abs" => lanewise!(|a: $t| a.wrapping_abs()),
            "neg" => lanewise!(|a: $t| a.wrapping_neg()),
            "min.relu" => lanewise!(|a: $t, b: $t| a.min(b).max(0)),
            "max.relu" => lanewise!(|a: $t, b: $t| a.max(b).max(0)),
            _ => return None,
        })
    };
}

macro_rules! bits {
    ($name:expr, $t:ty) => {
        Some(match $name {
            "and" => lanewise!(|a: $t, b: $t| a & b),
            "or" => lanewise!(|a: $t, b: $t| a | b),
            "xor" => lanewise!(|a: $t, b: $t| a ^ b),
            "not" => lanewise!(|a: $t| !a),
            "cnot" => lanewise!(|a: $t| <$t>::from(a == 0)),
            "shl" => lanewise!(|a: $t, b: u32| if b < <$t>::BITS { a << b } else { 0 }),
            "shr" => lanewise!(|a: $t, b: u32| if b < <$t>::BITS { a >> b } else { 0 }),
            "mov" => lanewise!(|a: $t| a),
            "selp" => handler!(|w, i, m| {
                let (a, b): ([$t; LANES], [$t; LANES]) = (get(w, i.r[1]), get(w, i.r[2]));
                let p = rows::pred(w, i.r[3]);
                let mut out = [0; LANES];
                for l in 0..LANES {
                    out[l] = if p >> l & 1 != 0 { a[l] } else { b[l] };
                }
                rows::put(w, i.r[0], m, &out);
                Flow::Next
            }),
            "slct.s32" => lanewise!(|a: $t, b: $t, c: i32| if c >= 0 { a } else { b }),
            "slct.f32" => lanewise!(|a: $t, b: $t, c: f32| if c >= 0.0 { a } else { b }),
            "slct.ftz.f32" => lanewise!(|a: $t, b: $t, c: f32| if flush(c) >= 0.0 { a } else { b }),
            "popc" => lanewise!(|a: $t| a.count_ones()),
            "clz" => lanewise!(|a: $t| a.leading_zeros()),
            "brev" => lanewise!(|a: $t| a.reverse_bits()),
            "bfind.u" => lanewise!(|a: $t| { (<$t>::BITS - 1).wrapping_sub(a.leading_zeros()) }),
            "bfind.u.shiftamt" => lanewise!(|a: $t| { if a == 0 { u32::MAX } else { a.leading_zeros() } }),
            "bfind.s" => lanewise!(|a: $t| {
                let a = if a >> (<$t>::BITS - 1) != 0 { !a } else { a };
                (<$t>::BITS - 1).wrapping_sub(a.leading_zeros())
            }),
            "bfind.s.shiftamt" => lanewise!(|a: $t| {
                let a = if a >> (<$t>::BITS - 1) != 0 { !a } else { a };
                if a == 0 { u32::MAX } else { a.leading_zeros() }
            }),
            "bfe.u" => lanewise!(|a: $t, b: u32, c: u32| {
                let (pos, len) = field::<$t>(b, c);
                let v = if pos < <$t>::BITS { a >> pos } else { 0 };
                if len < <$t>::BITS { v & ((1 << len) - 1) } else { v }
            }),
            "bfe.s" => lanewise!(|a: $t, b: u32, c: u32| {
                let (pos, len) = field::<$t>(b, c);
                let last = <$t>::BITS - 1;
                let sign = if len == 0 { 0 } else { a >> (pos.saturating_add(len) - 1).min(last) & 1 };
                let v = if pos <= last { a >> pos } else { 0 };
                // Bits of the field beyond the word are copies of the sign.
                let there = if pos <= last { len.min(<$t>::BITS - pos) } else { 0 };
                let keep: $t = if there > last { !0 } else { (1 << there) - 1 };
                (v & keep) | if sign != 0 { !keep } else { 0 }
            }),
            "bfi" => lanewise!(|a: $t, b: $t, c: u32, d: u32| {
                let (pos, len) = field::<$t>(c, d);
                if pos >= <$t>::BITS || len == 0 {
                    return b;
                }
                let field: $t = if len >= <$t>::BITS { !0 } else { (1 << len) - 1 };
                (b & !(field << pos)) | ((a & field) << pos)
            }),
            _ => return None,
        })
    };
}

/// Arithmetic on a type (`u16`, `s64`, ...) with two or three sources of that type. `shr` takes its amount
/// from a u32 row.
pub(crate) fn arithmetic(name: &str, ty: &str) -> Option<Handler> {
    match ty {
        "u16" => arithmetic!(name, u16),
        "s16" => arithmetic!(name, i16).or_else(|| signed16(name)),
        "u32" => arithmetic!(name, u32),
        "s32" => arithmetic!(name, i32),
        "u64" => arithmetic!(name, u64),
        "s64" => arithmetic!(name, i64),
        _ => None,
    }
}

fn signed16(name: &str) -> Option<Handler> {
    signed!(name, i16)
}

/// Arithmetic that exists for signed types only.
pub(crate) fn signed(name: &str, ty: &str) -> Option<Handler> {
    match ty {
        "s16" => signed16(name),
        "s32" => signed!(name, i32),
        "s64" => signed!(name, i64),
        _ => None,
    }
}

/// Bit operations, moves and selections, by width.
pub(crate) fn bits(name: &str, width: u32) -> Option<Handler> {
    match width {
        8 => bits!(name, u8),
        16 => bits!(name, u16),
        32 => bits!(name, u32),
        64 => bits!(name, u64),
        128 => bits!(name, u128),
        _ => None,
    }
}

/// `mul.wide` and `mad.wide`, by source type.
pub(crate) fn wide(mad: bool, ty: &str) -> Option<Handler> {
    Some(match (mad, ty) {
        (false, "u16") => lanewise!(|a: u16, b: u16| u32::from(a) * u32::from(b)),
        (false, "s16") => lanewise!(|a: i16, b: i16| i32::from(a) * i32::from(b)),
        (false, "u32") => lanewise!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
        (false, "s32") => lanewise!(|a: i32, b: i32| i64::from(a) * i64::from(b)),
        (true, "u16") => {
            lanewise!(|a: u16, b: u16, c: u32| { (u32::from(a) * u32::from(b)).wrapping_add(c) })
        }
        (true, "s16") => {
            lanewise!(|a: i16, b: i16, c: i32| { (i32::from(a) * i32::from(b)).wrapping_add(c) })
        }
        (true, "u32") => {
            lanewise!(|a: u32, b: u32, c: u64| { (u64::from(a) * u64::from(b)).wrapping_add(c) })
        }
        (true, "s32") => {
            lanewise!(|a: i32, b: i32, c: i64| { (i64::from(a) * i64::from(b)).wrapping_add(c) })
        }
        _ => return None,
    })
}

/// `mul24` and `mad24`.
pub(crate) fn mul24(name: &str) -> Option<Handler> {
    #[inline(always)]
    fn u(a: u32, b: u32) -> u64 {
        u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)
    }
    #[inline(always)]
    fn s(a: u32, b: u32) -> i64 {
        i64::from((a << 8) as i32 >> 8) * i64::from((b << 8) as i32 >> 8)
    }
    Some(match name {
        "mul24.lo.u32" => lanewise!(|a: u32, b: u32| u(a, b) as u32),
        "mul24.hi.u32" => lanewise!(|a: u32, b: u32| (u(a, b) >> 16) as u32),
        "mul24.lo.s32" => lanewise!(|a: u32, b: u32| s(a, b) as u32),
        "mul24.hi.s32" => lanewise!(|a: u32, b: u32| (s(a, b) >> 16) as u32),
        "mad24.lo.u32" => lanewise!(|a: u32, b: u32, c: u32| (u(a, b) as u32).wrapping_add(c)),
        "mad24.lo.s32" => lanewise!(|a: u32, b: u32, c: u32| (s(a, b) as u32).wrapping_add(c)),
        "mad24.hi.u32" => lanewise!(|a: u32, b: u32, c: u32| ((u(a, b) >> 16) as u32).wrapping_add(c)),
        "mad24.hi.s32" => lanewise!(|a: u32, b: u32, c: u32| ((s(a, b) >> 16) as u32).wrapping_add(c)),
        _ => return None,
    })
}

#[inline(always)]
fn prmt_bytes(a: u32, b: u32, selectors: [u32; 4]) -> u32 {
    let pool = u64::from(a) | u64::from(b) << 32;
    let mut out = 0;
    for (n, s) in selectors.into_iter().enumerate() {
        let byte = (pool >> ((s & 7) * 8)) as u32 & 0xff;
        let byte = if s & 8 != 0 { if byte & 0x80 != 0 { 0xff } else { 0 } } else { byte };
        out |= byte << (n * 8);
    }
    out
}

#[inline(always)]
fn dot(a: u32, b: u32, signed_a: bool, signed_b: bool) -> u32 {
    let byte = |v: u32, n: u32, signed: bool| {
        let b = (v >> (8 * n)) as u8;
        if signed { i32::from(b as i8) } else { i32::from(b) }
    };
    (0..4).fold(0i32, |s, n| s.wrapping_add(byte(a, n, signed_a).wrapping_mul(byte(b, n, signed_b)))) as u32
}

#[inline(always)]
fn dot2(a: u32, b: u32, high: bool, signed_a: bool, signed_b: bool) -> u32 {
    (0..2).fold(0i32, |s, n| {
        let h = (a >> (16 * n)) as u16;
        let h = if signed_a { i32::from(h as i16) } else { i32::from(h) };
        let byte = (b >> (8 * (n + if high { 2 } else { 0 }))) as u8;
        let byte = if signed_b { i32::from(byte as i8) } else { i32::from(byte) };
        s.wrapping_add(h.wrapping_mul(byte))
    }) as u32
}

/// Other 32-bit operations. `name` includes the relevant modifiers.
pub(crate) fn special32(name: &str) -> Option<Handler> {
    Some(match name {
        "lop3" => lanewise!(imm, |a: u32, b: u32, c: u32| {
            let lut = imm as u32;
            let mut out = 0;
            for n in 0..8u32 {
                let pick = |v: u32, bit: u32| if n >> bit & 1 != 0 { v } else { !v };
                let term = pick(a, 2) & pick(b, 1) & pick(c, 0);
                out |= if lut >> n & 1 != 0 { term } else { 0 };
            }
            out
        }),
        "shf.l.wrap" => lanewise!(|a: u32, b: u32, c: u32| {
            (((u64::from(b) << 32 | u64::from(a)) << (c & 31)) >> 32) as u32
        }),
        "shf.l.clamp" => lanewise!(|a: u32, b: u32, c: u32| {
            (((u64::from(b) << 32 | u64::from(a)) << c.min(32)) >> 32) as u32
        }),
        "shf.r.wrap" => {
            lanewise!(|a: u32, b: u32, c: u32| { ((u64::from(b) << 32 | u64::from(a)) >> (c & 31)) as u32 })
        }
        "shf.r.clamp" => {
            lanewise!(|a: u32, b: u32, c: u32| { ((u64::from(b) << 32 | u64::from(a)) >> c.min(32)) as u32 })
        }
        "prmt" => lanewise!(|a: u32, b: u32, c: u32| {
            prmt_bytes(a, b, [c & 15, c >> 4 & 15, c >> 8 & 15, c >> 12 & 15])
        }),
        "prmt.f4e" => lanewise!(|a: u32, b: u32, c: u32| {
            let n = c & 3;
            prmt_bytes(a, b, [n, n + 1, n + 2, n + 3])
        }),
        "prmt.b4e" => lanewise!(|a: u32, b: u32, c: u32| {
            let n = c & 3;
            prmt_bytes(a, b, [n, (n + 7) & 7, (n + 6) & 7, (n + 5) & 7])
        }),
        "prmt.rc8" => lanewise!(|a: u32, b: u32, c: u32| {
            let n = c & 3;
            prmt_bytes(a, b, [n, n, n, n])
        }),
        "prmt.ecl" => lanewise!(|a: u32, b: u32, c: u32| {
            let n = c & 3;
            prmt_bytes(a, b, [n, n.max(1), n.max(2), 3])
        }),
        "prmt.ecr" => lanewise!(|a: u32, b: u32, c: u32| {
            let n = c & 3;
            prmt_bytes(a, b, [0, n.min(1), n.min(2), n.min(3)])
        }),
        "prmt.rc16" => lanewise!(|a: u32, b: u32, c: u32| {
            let n = (c & 1) * 2;
            prmt_bytes(a, b, [n, n + 1, n, n + 1])
        }),
        "add.sat" => lanewise!(|a: i32, b: i32| a.saturating_add(b)),
        "sub.sat" => lanewise!(|a: i32, b: i32| a.saturating_sub(b)),
        "mad.hi.sat" => lanewise!(|a: i32, b: i32, c: i32| a.mul_hi(b).saturating_add(c)),
        "bmsk.clamp" => lanewise!(|a: u32, b: u32| {
            if a >= 32 || b == 0 {
                return 0;
            }
            let field = if b >= 32 { u32::MAX } else { (1 << b) - 1 };
            field << a
        }),
        "bmsk.wrap" => lanewise!(|a: u32, b: u32| ((1u32 << (b & 31)) - 1) << (a & 31)),
        "szext.clamp.u32" => lanewise!(|a: u32, b: u32| { if b >= 32 { a } else { a & ((1 << b) - 1) } }),
        "szext.clamp.s32" => lanewise!(|a: i32, b: u32| match b {
            0 => 0,
            1..32 => a << (32 - b) >> (32 - b),
            _ => a,
        }),
        "szext.wrap.u32" => lanewise!(|a: u32, b: u32| a & ((1 << (b & 31)) - 1)),
        "szext.wrap.s32" => lanewise!(|a: i32, b: u32| match b & 31 {
            0 => 0,
            n => a << (32 - n) >> (32 - n),
        }),
        "fns" => lanewise!(|mask: u32, base: u32, offset: i32| find_nth_set(mask, base, offset)),
        "dp4a.u32.u32" => lanewise!(|a, b, c: u32| dot(a, b, false, false).wrapping_add(c)),
        "dp4a.u32.s32" => lanewise!(|a, b, c: u32| dot(a, b, false, true).wrapping_add(c)),
        "dp4a.s32.u32" => lanewise!(|a, b, c: u32| dot(a, b, true, false).wrapping_add(c)),
        "dp4a.s32.s32" => lanewise!(|a, b, c: u32| dot(a, b, true, true).wrapping_add(c)),
        // `imm`: bit 0 is set for the high bytes, bit 1 if the first source is signed, bit 2 if the second
        // is.
        "dp2a" => lanewise!(imm, |a, b, c: u32| {
            dot2(a, b, imm & 1 != 0, imm & 2 != 0, imm & 4 != 0).wrapping_add(c)
        }),
        "add.u16x2" => lanewise!(|a: u32, b: u32| {
            (a & 0xffff).wrapping_add(b) & 0xffff | ((a >> 16).wrapping_add(b >> 16) << 16)
        }),
        "min.u16x2" => {
            lanewise!(|a: u32, b: u32| { u32::from((a as u16).min(b as u16)) | (a >> 16).min(b >> 16) << 16 })
        }
        "max.u16x2" => {
            lanewise!(|a: u32, b: u32| { u32::from((a as u16).max(b as u16)) | (a >> 16).max(b >> 16) << 16 })
        }
        "min.s16x2" | "min.relu.s16x2" => lanewise!(imm, |a: u32, b: u32| pairs(a, b, imm != 0, i16::min)),
        "max.s16x2" | "max.relu.s16x2" => lanewise!(imm, |a: u32, b: u32| pairs(a, b, imm != 0, i16::max)),
        _ => return None,
    })
}

#[inline(always)]
fn pairs(a: u32, b: u32, relu: bool, f: impl Fn(i16, i16) -> i16) -> u32 {
    let half = |a: u32, b: u32| {
        let v = f(a as u16 as i16, b as u16 as i16);
        u32::from((if relu { v.max(0) } else { v }) as u16)
    };
    half(a, b) | half(a >> 16, b >> 16) << 16
}

/// Position and length of a bit field. For 32 bits the hardware has one instruction, which uses a byte of
/// each; for 64 bits it needs several, which use all bits.
#[inline(always)]
fn field<T>(position: u32, length: u32) -> (u32, u32) {
    let mask = if size_of::<T>() == 8 { u32::MAX } else { 0xff };
    (position & mask, length & mask)
}

fn find_nth_set(mask: u32, base: u32, offset: i32) -> u32 {
    if base > 31 {
        return u32::MAX;
    }
    if offset == 0 {
        return if mask >> base & 1 != 0 { base } else { u32::MAX };
    }
    // An H200's code for this instruction overflows when it negates this value.
    if offset == i32::MIN {
        return 0;
    }
    let (mut position, step) = (base as i32, offset.signum());
    let mut left = offset.unsigned_abs();
    while (0..32).contains(&position) {
        if mask >> position & 1 != 0 {
            left -= 1;
            if left == 0 {
                return position as u32;
            }
        }
        position += step;
    }
    u32::MAX
}

macro_rules! carry {
    ($name:expr, $t:ty) => {
        Some(match $name {
            "add" => handler!(|w, i, m| with_carry::<$t>(w, i, m, |a, b, _, c| {
                let (s, o) = a.overflowing_add(b);
                let (s, p) = s.overflowing_add(<$t>::from(c));
                (s, o | p)
            })),
            "sub" => handler!(|w, i, m| with_carry::<$t>(w, i, m, |a, b, _, c| {
                // The flag is the carry of `a + !b + 1`: set if nothing was borrowed.
                let borrowed = i.imm & 1 != 0 && !c;
                let (s, o) = a.overflowing_sub(b);
                let (s, p) = s.overflowing_sub(<$t>::from(borrowed));
                (s, !(o | p))
            })),
            _ => return None,
        })
    };
}

macro_rules! mad_carry {
    ($name:expr, $t:ty, $s:ty) => {
        Some(match $name {
            "mad.lo" => handler!(|w, i, m| with_carry::<$t>(w, i, m, |a, b, c, carry| {
                let (s, o) = a.wrapping_mul(b).overflowing_add(c);
                let (s, p) = s.overflowing_add(<$t>::from(carry));
                (s, o | p)
            })),
            "mad.hi" => handler!(|w, i, m| with_carry::<$t>(w, i, m, |a, b, c, carry| {
                let (s, o) = ((a as $s).mul_hi(b as $s) as $t).overflowing_add(c);
                let (s, p) = s.overflowing_add(<$t>::from(carry));
                (s, o | p)
            })),
            _ => return None,
        })
    };
}

/// Bit 0 of `imm`: uses the carry; bit 1: sets it. The carry is predicate row `r[4]`.
///
/// # Safety
///
/// The rows contain `T`.
#[inline(always)]
unsafe fn with_carry<T: Copy>(
    w: &mut crate::machine::warp::Warp,
    i: &Inst,
    mask: u32,
    f: impl Fn(T, T, T, bool) -> (T, bool),
) -> Flow {
    // SAFETY: the caller guarantees rows of `T`. Without a third source, the lowering repeats the second.
    unsafe {
        let (a, b, c): ([T; LANES], [T; LANES], [T; LANES]) =
            (get(w, i.r[1]), get(w, i.r[2]), get(w, i.r[3]));
        let carry = if i.imm & 1 != 0 { rows::pred(w, i.r[4]) } else { 0 };
        let mut out = a;
        let mut bits = 0;
        for l in 0..LANES {
            let (v, o) = f(a[l], b[l], c[l], carry >> l & 1 != 0);
            out[l] = v;
            bits |= u32::from(o) << l;
        }
        rows::put(w, i.r[0], mask, &out);
        if i.imm & 2 != 0 {
            put_pred(w, i.r[4], mask, bits);
        }
        Flow::Next
    }
}

/// Extended-precision arithmetic.
pub(crate) fn carry(name: &str, ty: &str) -> Option<Handler> {
    match (name, ty) {
        ("add" | "sub", "u32" | "s32") => carry!(name, u32),
        ("add" | "sub", "u64" | "s64") => carry!(name, u64),
        (_, "u32") => mad_carry!(name, u32, u32),
        (_, "s32") => mad_carry!(name, u32, i32),
        (_, "u64") => mad_carry!(name, u64, u64),
        (_, "s64") => mad_carry!(name, u64, i64),
        _ => None,
    }
}

/// How a comparison's result is combined with a predicate: `imm` of a setp.
pub(crate) mod combine {
    pub const NONE: i64 = 0;
    pub const AND: i64 = 1;
    pub const OR: i64 = 2;
    pub const XOR: i64 = 3;
    /// Negates the other predicate.
    pub const NOT: i64 = 4;
}

/// Writes a comparison's result to `r[0]`, and its complement to `r[1]` unless that is NONE; combined with
/// predicate `r[4]`.
///
/// # Safety
///
/// The rows are predicates.
#[inline(always)]
pub(crate) unsafe fn finish_setp(w: &crate::machine::warp::Warp, i: &Inst, mask: u32, bits: u32) -> Flow {
    // SAFETY: the caller guarantees predicate rows.
    unsafe {
        let (mut p, mut q) = (bits, !bits);
        if i.imm != combine::NONE {
            let other = rows::pred(w, i.r[4]);
            let other = if i.imm & combine::NOT != 0 { !other } else { other };
            let join = |v: u32| match i.imm & 3 {
                combine::AND => v & other,
                combine::OR => v | other,
                _ => v ^ other,
            };
            (p, q) = (join(p), join(q));
        }
        if i.r[0] != crate::machine::program::NONE {
            put_pred(w, i.r[0], mask, p);
        }
        if i.r[1] != crate::machine::program::NONE {
            put_pred(w, i.r[1], mask, q);
        }
        Flow::Next
    }
}

macro_rules! setp {
    ($cmp:expr, $t:ty) => {
        Some(match $cmp {
            "eq" => {
                handler!(|w, i, m| finish_setp(w, i, m, compare(w, i.r[2], i.r[3], |a: $t, b: $t| a == b)))
            }
            "ne" => {
                handler!(|w, i, m| finish_setp(w, i, m, compare(w, i.r[2], i.r[3], |a: $t, b: $t| a != b)))
            }
            "lt" | "lo" => {
                handler!(|w, i, m| finish_setp(w, i, m, compare(w, i.r[2], i.r[3], |a: $t, b: $t| a < b)))
            }
            "le" | "ls" => {
                handler!(|w, i, m| finish_setp(w, i, m, compare(w, i.r[2], i.r[3], |a: $t, b: $t| a <= b)))
            }
            "gt" | "hi" => {
                handler!(|w, i, m| finish_setp(w, i, m, compare(w, i.r[2], i.r[3], |a: $t, b: $t| a > b)))
            }
            "ge" | "hs" => {
                handler!(|w, i, m| finish_setp(w, i, m, compare(w, i.r[2], i.r[3], |a: $t, b: $t| a >= b)))
            }
            _ => return None,
        })
    };
}

/// Comparison of integers in `r[2]` and `r[3]`; see [`finish_setp`].
pub(crate) fn setp(cmp: &str, ty: &str) -> Option<Handler> {
    match ty {
        "u16" | "b16" => setp!(cmp, u16),
        "s16" => setp!(cmp, i16),
        "u32" | "b32" => setp!(cmp, u32),
        "s32" => setp!(cmp, i32),
        "u64" | "b64" => setp!(cmp, u64),
        "s64" => setp!(cmp, i64),
        _ => None,
    }
}

/// Operations on predicates `r[1]` and `r[2]`; bits 0 and 1 of `imm` negate them.
pub(crate) fn predicate(name: &str) -> Option<Handler> {
    macro_rules! op {
        (|$a:ident, $b:ident| $e:expr) => {
            handler!(|w, i, m| {
                let $a = rows::pred(w, i.r[1]) ^ if i.imm & 1 != 0 { u32::MAX } else { 0 };
                let $b = rows::pred(w, i.r[2]) ^ if i.imm & 2 != 0 { u32::MAX } else { 0 };
                put_pred(w, i.r[0], m, $e);
                Flow::Next
            })
        };
    }
    Some(match name {
        "and" => op!(|a, b| a & b),
        "or" => op!(|a, b| a | b),
        "xor" => op!(|a, b| a ^ b),
        "not" => op!(|a, _b| !a),
        "mov" => op!(|a, _b| a),
        _ => return None,
    })
}

/// `r[0]` (32 bits) = predicate `r[1]` ? low half of `imm` : high half of `imm`; for `set` and lop3's
/// predicates.
pub(crate) const FROM_PRED_32: Handler = handler!(|w, i, m| {
    let p = rows::pred(w, i.r[1]);
    let mut out = [0u32; LANES];
    for (l, v) in out.iter_mut().enumerate() {
        *v = if p >> l & 1 != 0 { i.imm as u32 } else { 0 };
    }
    rows::put(w, i.r[0], m, &out);
    Flow::Next
});

/// Like [`FROM_PRED_32`], for 16 bits.
pub(crate) const FROM_PRED_16: Handler = handler!(|w, i, m| {
    let p = rows::pred(w, i.r[1]);
    let mut out = [0u16; LANES];
    for (l, v) in out.iter_mut().enumerate() {
        *v = if p >> l & 1 != 0 { i.imm as u16 } else { 0 };
    }
    rows::put(w, i.r[0], m, &out);
    Flow::Next
});
