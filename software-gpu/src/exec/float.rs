//! Arithmetic in f32 and f64.
//!
//! f32 arithmetic has a single NaN result. f64 arithmetic returns one of its NaN inputs, made quiet; the
//! choice is that of an H200. `.ftz` flushes a result that would be subnormal if rounded with an unlimited
//! exponent range.
//!
//! Round-to-nearest is the host's. The other f32 roundings go through f64 rounded to odd, which preserves the
//! information that is lost. The other f64 roundings use exact error terms.

use crate::exec::exact_f64;
use crate::exec::int::finish_setp;
use crate::exec::rows::{compare, map1_checked, map2_checked, map3_checked};
use crate::machine::program::Handler;

/// Flags in `imm` of a floating-point instruction.
pub(crate) mod flag {
    pub const FTZ: i64 = 1;
    pub const SAT: i64 = 2;
    pub const RZ: i64 = 4;
    pub const RM: i64 = 8;
    pub const RP: i64 = 12;
    pub const ROUND: i64 = 12;
    /// `min.NaN`, `max.NaN`: a NaN input is the result.
    pub const NAN: i64 = 16;
    /// `.xorsign.abs`.
    pub const XORSIGN: i64 = 32;
}

/// The NaN result of f32 arithmetic.
const NAN32: u32 = 0x7fff_ffff;
/// The NaN result of f64 arithmetic without NaN inputs.
const NAN64: u64 = 0xfff8_0000_0000_0000;
const QUIET64: u64 = 1 << 51;

/// Flushes subnormals to zero, keeping the sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

#[inline(always)]
fn canon(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(NAN32) } else { x }
}

/// The first NaN among the inputs, made quiet; without one, the NaN of invalid operations.
#[cold]
fn nan64(inputs: &[f64]) -> f64 {
    let nan = inputs.iter().find(|x| x.is_nan()).map_or(NAN64, |x| x.to_bits() | QUIET64);
    f64::from_bits(nan)
}

/// `x`, or the inputs' NaN if `x` is a NaN.
#[inline(always)]
pub(crate) fn pass_nan(x: f64, inputs: &[f64]) -> f64 {
    if x.is_nan() { nan64(inputs) } else { x }
}

/// Clamps to [0, 1]; NaN becomes 0.
#[inline(always)]
fn saturate(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// `x`, which is `exact` rounded, or zero if the flags ask to flush it.
#[inline(always)]
pub(crate) fn flush_tiny(x: f32, exact: f64, flags: i64) -> f32 {
    const SCALE: f64 = (1u64 << 63) as f64;
    const SMALLEST: f64 = f32::MIN_POSITIVE as f64;
    if flags & flag::FTZ == 0 || exact.is_nan() || exact.abs() >= SMALLEST {
        return x;
    }
    // Scaled up, so that results below the smallest normal number keep as many digits as normal ones.
    let tiny = f64::from(narrow(exact * SCALE, flags).abs()) < SMALLEST * SCALE;
    if tiny { 0f32.copysign(x) } else { x }
}

/// The result `x`, which is `exact` (or a value rounded to odd) rounded, with the flags applied.
#[inline(always)]
fn finish(x: f32, exact: f64, flags: i64) -> f32 {
    clamp(flush_tiny(x, exact, flags), flags)
}

#[inline(always)]
fn clamp(x: f32, flags: i64) -> f32 {
    let x = canon(x);
    if flags & flag::SAT != 0 { saturate(x) } else { x }
}

#[inline(always)]
fn start(x: f32, flags: i64) -> f32 {
    if flags & flag::FTZ != 0 { flush(x) } else { x }
}

/// `sum`, rounded to odd, where `error` is its difference from the exact value.
#[inline(always)]
fn to_odd(sum: f64, error: f64) -> f64 {
    if error == 0.0 || error.is_nan() || !sum.is_finite() || sum.to_bits() & 1 != 0 {
        return sum;
    }
    if sum == 0.0 {
        return error;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// The sum, rounded to odd.
#[inline(always)]
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let s = a + b;
    let t = s - a;
    let error = (a - (s - t)) + (b - t);
    to_odd(s, error)
}

/// The product of two numbers of at most 26 bits is exact; with the addend, rounded to odd.
#[inline(always)]
pub(crate) fn fma_odd(a: f32, b: f32, c: f32) -> f64 {
    add_odd(f64::from(a) * f64::from(b), f64::from(c))
}

/// Rounds to f32 in the direction given by `flags`.
pub(crate) fn narrow(x: f64, flags: i64) -> f32 {
    let nearest = x as f32;
    let round = flags & flag::ROUND;
    if round == 0 || x.is_nan() || x.is_infinite() {
        return nearest;
    }
    let back = f64::from(nearest);
    if back == x {
        return nearest;
    }
    let down = match round {
        flag::RM => true,
        flag::RP => false,
        _ => x > 0.0,
    };
    if down {
        if back > x { nearest.next_down() } else { nearest }
    } else if back < x {
        nearest.next_up()
    } else {
        nearest
    }
}

/// Corrects the sign of the sum `x` of `a` and `b` if it is exactly zero. When rounding down, it is negative,
/// except for a sum of two positive zeros.
fn zero_sign(x: f32, a: f64, b: f64, flags: i64) -> f32 {
    let zeros = a == 0.0 && b == 0.0;
    let negative = if zeros { a.is_sign_negative() || b.is_sign_negative() } else { x == 0.0 && a == -b };
    if negative && flags & flag::ROUND == flag::RM { -0.0 } else { x }
}

fn add_slow(a: f32, b: f32, flags: i64) -> f32 {
    let (a, b) = (start(a, flags), start(b, flags));
    let (wa, wb) = (f64::from(a), f64::from(b));
    let exact = add_odd(wa, wb);
    finish(zero_sign(narrow(exact, flags), wa, wb, flags), exact, flags)
}

fn mul_slow(a: f32, b: f32, flags: i64) -> f32 {
    let exact = f64::from(start(a, flags)) * f64::from(start(b, flags));
    finish(narrow(exact, flags), exact, flags)
}

fn fma_slow(a: f32, b: f32, c: f32, flags: i64) -> f32 {
    let (a, b, c) = (start(a, flags), start(b, flags), start(c, flags));
    let p = f64::from(a) * f64::from(b);
    let exact = fma_odd(a, b, c);
    finish(zero_sign(narrow(exact, flags), p, f64::from(c), flags), exact, flags)
}

fn div_slow(a: f32, b: f32, flags: i64) -> f32 {
    let (a, b) = (start(a, flags), start(b, flags));
    let q = f64::from(a) / f64::from(b);
    let rest = (-q).mul_add(f64::from(b), f64::from(a));
    let error = if b < 0.0 { -rest } else { rest };
    let exact = to_odd(q, error);
    finish(narrow(exact, flags), exact, flags)
}

/// `div.approx` multiplies by the reciprocal, which is flushed: for divisors beyond 2^126 it is zero.
fn div_approx(a: f32, b: f32, flags: i64) -> f32 {
    const LARGEST: f32 = f32::from_bits(0x7e80_0000);
    if b.is_finite() && b.abs() > LARGEST {
        return mul_slow(a, 0f32.copysign(b), flags);
    }
    div_slow(a, b, flags)
}

fn sqrt_slow(a: f32, flags: i64) -> f32 {
    let a = start(a, flags);
    let s = f64::from(a).sqrt();
    let exact = to_odd(s, (-s).mul_add(s, f64::from(a)));
    finish(narrow(exact, flags), exact, flags)
}

/// The smaller of two numbers, or the larger one.
#[inline(always)]
fn extreme32<const LARGER: bool>(a: f32, b: f32, flags: i64) -> f32 {
    let (a, b) = (start(a, flags), start(b, flags));
    let (x, y) = if flags & flag::XORSIGN != 0 { (a.abs(), b.abs()) } else { (a, b) };
    let r = if x.is_nan() || y.is_nan() {
        if flags & flag::NAN != 0 || (x.is_nan() && y.is_nan()) {
            f32::from_bits(NAN32)
        } else if x.is_nan() {
            y
        } else {
            x
        }
    } else if x == y {
        // Minus zero is less than plus zero.
        let (x, y) = (x.to_bits(), y.to_bits());
        f32::from_bits(if LARGER { x & y } else { x | y })
    } else if (x < y) != LARGER {
        x
    } else {
        y
    };
    xorsign(r, a, b, flags)
}

#[inline(always)]
fn xorsign(r: f32, a: f32, b: f32, flags: i64) -> f32 {
    if flags & flag::XORSIGN == 0 || r.is_nan() {
        return r;
    }
    f32::from_bits(r.to_bits() | ((a.to_bits() ^ b.to_bits()) & 0x8000_0000))
}

/// The smaller of two numbers, or the larger one.
#[inline(always)]
fn extreme64<const LARGER: bool>(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        pass_nan(b, &[b])
    } else if b.is_nan() {
        a
    } else if a == b {
        let (x, y) = (a.to_bits(), b.to_bits());
        f64::from_bits(if LARGER { x & y } else { x | y })
    } else if (a < b) != LARGER {
        a
    } else {
        b
    }
}

/// Whether a result may have been rounded up from below the smallest normal number.
#[inline(always)]
fn smallest(x: f32) -> bool {
    x.abs() == f32::MIN_POSITIVE
}

/// f32 operations have separate handlers for no flags and for FTZ; other flags are read from `imm`.
pub(crate) fn f32_op(name: &str, flags: i64) -> Option<Handler> {
    const FTZ: i64 = flag::FTZ;
    Some(match (name, flags) {
        ("add", 0) => lanewise!(|a: f32, b: f32| canon(a + b)),
        ("sub", 0) => lanewise!(|a: f32, b: f32| canon(a - b)),
        ("mul", 0) => lanewise!(|a: f32, b: f32| canon(a * b)),
        ("fma", 0) => lanewise!(|a: f32, b: f32, c: f32| canon(a.mul_add(b, c))),
        ("div", 0) => lanewise!(|a: f32, b: f32| canon(a / b)),
        // The compiler may return any NaN for the root of a negative number, so the NaN is selected with
        // integer operations.
        ("sqrt", 0) => handler!(|w, i, m| map1_checked(
            w,
            i,
            m,
            |a: f32| a.sqrt().to_bits(),
            |bits: u32| bits & 0x7fff_ffff > 0x7f80_0000,
            |_| NAN32
        )),
        ("rcp", 0) => lanewise!(|a: f32| canon(1.0 / a)),
        ("add", FTZ) => lanewise!(|a: f32, b: f32| canon(flush(flush(a) + flush(b)))),
        ("sub", FTZ) => lanewise!(|a: f32, b: f32| canon(flush(flush(a) - flush(b)))),
        ("mul", FTZ) => handler!(|w, i, m| map2_checked(
            w,
            i,
            m,
            |a: f32, b: f32| canon(flush(flush(a) * flush(b))),
            smallest,
            |a, b| mul_slow(a, b, FTZ)
        )),
        ("fma", FTZ) => handler!(|w, i, m| map3_checked(
            w,
            i,
            m,
            |a: f32, b: f32, c: f32| canon(flush(flush(a).mul_add(flush(b), flush(c)))),
            smallest,
            |a, b, c| fma_slow(a, b, c, FTZ)
        )),
        ("add", _) => lanewise!(imm, |a, b| add_slow(a, b, imm)),
        ("sub", _) => lanewise!(imm, |a, b: f32| add_slow(a, -b, imm)),
        ("mul", _) => lanewise!(imm, |a, b| mul_slow(a, b, imm)),
        ("fma", _) => lanewise!(imm, |a, b, c| fma_slow(a, b, c, imm)),
        ("div", _) => lanewise!(imm, |a, b| div_slow(a, b, imm)),
        ("sqrt", _) => lanewise!(imm, |a| sqrt_slow(a, imm)),
        ("rcp", _) => lanewise!(imm, |a| div_slow(1.0, a, imm)),
        ("min", _) => lanewise!(imm, |a, b| extreme32::<false>(a, b, imm)),
        ("max", _) => lanewise!(imm, |a, b| extreme32::<true>(a, b, imm)),
        ("min3", _) => lanewise!(imm, |a, b, c| extreme32::<false>(extreme32::<false>(a, b, imm), c, imm)),
        ("max3", _) => lanewise!(imm, |a, b, c| extreme32::<true>(extreme32::<true>(a, b, imm), c, imm)),
        ("abs", _) => lanewise!(imm, |a| canon(start(f32::abs(a), imm))),
        ("neg", _) => lanewise!(imm, |a: f32| canon(start(-a, imm))),
        ("copysign", _) => lanewise!(|a: f32, b: f32| b.copysign(a)),
        ("rcp.approx", _) => lanewise!(imm, |a| div_slow(1.0, a, imm)),
        ("div.full", _) => lanewise!(imm, |a, b| div_slow(a, b, imm)),
        ("div.approx", _) => lanewise!(imm, |a, b| div_approx(a, b, imm)),
        ("sqrt.approx", _) => lanewise!(imm, |a| sqrt_slow(a, imm)),
        ("rsqrt.approx", _) => lanewise!(imm, |a| approx(a, imm, |x| 1.0 / x.sqrt())),
        ("sin.approx", _) => lanewise!(imm, |a| approx(a, imm, f64::sin)),
        ("cos.approx", _) => lanewise!(imm, |a| approx(a, imm, f64::cos)),
        ("lg2.approx", _) => lanewise!(imm, |a| approx(a, imm, f64::log2)),
        ("ex2.approx", _) => lanewise!(imm, |a| approx(a, imm, f64::exp2)),
        ("tanh.approx", _) => lanewise!(imm, |a| approx(a, imm, f64::tanh)),
        _ => return None,
    })
}

#[inline(always)]
fn approx(a: f32, flags: i64, f: impl Fn(f64) -> f64) -> f32 {
    // PTX leaves it open whether approximations detect tiny values before rounding. Skipping that keeps this
    // free of branches.
    clamp(start(f(f64::from(start(a, flags))) as f32, flags), flags)
}

/// f64 operations; `imm` contains the rounding.
pub(crate) fn f64_op(name: &str, flags: i64) -> Option<Handler> {
    Some(match (name, flags) {
        ("add", 0) => {
            handler!(|w, i, m| map2_checked(w, i, m, |a: f64, b| a + b, f64::is_nan, |a, b| nan64(&[b, a])))
        }
        ("sub", 0) => {
            handler!(|w, i, m| map2_checked(w, i, m, |a: f64, b| a - b, f64::is_nan, |a, b| nan64(&[b, a])))
        }
        ("mul", 0) => {
            handler!(|w, i, m| map2_checked(w, i, m, |a: f64, b| a * b, f64::is_nan, |a, b| nan64(&[b, a])))
        }
        ("fma", 0) => {
            handler!(|w, i, m| map3_checked(w, i, m, f64::mul_add, f64::is_nan, |a, b, c| nan64(&[b, c, a])))
        }
        ("div", 0) => {
            handler!(|w, i, m| map2_checked(w, i, m, |a: f64, b| a / b, f64::is_nan, |a, b| nan64(&[a, b])))
        }
        ("sqrt", 0) => handler!(|w, i, m| map1_checked(w, i, m, f64::sqrt, f64::is_nan, |a| nan64(&[a]))),
        ("rcp", 0) => {
            handler!(|w, i, m| map1_checked(w, i, m, |a: f64| 1.0 / a, f64::is_nan, |a| nan64(&[a])))
        }
        ("add", _) => lanewise!(imm, |a, b| pass_nan(exact_f64::add(a, b, imm), &[b, a])),
        ("sub", _) => lanewise!(imm, |a, b: f64| pass_nan(exact_f64::add(a, -b, imm), &[b, a])),
        ("fma", _) => lanewise!(imm, |a, b, c| pass_nan(exact_f64::fma(a, b, c, imm), &[b, c, a])),
        ("mul", _) => lanewise!(imm, |a, b| pass_nan(exact_f64::mul(a, b, imm), &[b, a])),
        ("div", _) => lanewise!(imm, |a, b| pass_nan(exact_f64::div(a, b, imm), &[a, b])),
        ("sqrt", _) => lanewise!(imm, |a| pass_nan(exact_f64::sqrt(a, imm), &[a])),
        ("rcp", _) => lanewise!(imm, |a| pass_nan(exact_f64::div(1.0, a, imm), &[a])),
        ("min", _) => lanewise!(|a, b| extreme64::<false>(a, b)),
        ("max", _) => lanewise!(|a, b| extreme64::<true>(a, b)),
        ("abs", _) => lanewise!(|a: f64| pass_nan(a.abs(), &[a])),
        ("neg", _) => lanewise!(|a: f64| pass_nan(-a, &[a])),
        ("copysign", _) => lanewise!(|a: f64, b: f64| b.copysign(a)),
        // Without `.ftz`, the hardware does not use a lookup table.
        ("rsqrt.approx", 0) => lanewise!(|a| pass_nan(rsqrt(a), &[a])),
        // Only the upper 32 bits of the source and result matter.
        ("rcp.approx", _) => lanewise!(|a| approx64(a, |x| 1.0 / x)),
        ("rsqrt.approx", _) => lanewise!(|a| approx64(a, |x| 1.0 / x.sqrt())),
        _ => return None,
    })
}

/// The reciprocal square root, rounded to nearest except for values very close to the midpoint of two
/// numbers.
fn rsqrt(x: f64) -> f64 {
    if !x.is_normal() || x < 0.0 {
        // A subnormal has full precision once scaled, and its root is not subnormal.
        const SCALE: f64 = (1u64 << 54) as f64;
        return if x.is_subnormal() && x > 0.0 {
            rsqrt(x * SCALE) * (1u64 << 27) as f64
        } else {
            1.0 / x.sqrt()
        };
    }
    let y = 1.0 / x.sqrt();
    // The difference between the square and the exact value, using an exact product.
    let high = x * y;
    let low = x.mul_add(y, -high);
    let lacking = (-high).mul_add(y, 1.0) - low * y;
    y.mul_add(0.5 * lacking, y)
}

#[inline(always)]
fn approx64(a: f64, f: impl Fn(f64) -> f64) -> f64 {
    const HIGH: u64 = 0xffff_ffff_0000_0000;
    let a = f64::from_bits(a.to_bits() & HIGH);
    let tiny = a.abs() < f64::MIN_POSITIVE;
    let a = if tiny { 0f64.copysign(a) } else { a };
    let r = f(a);
    let r = if r.abs() < f64::MIN_POSITIVE { 0f64.copysign(r) } else { r };
    if r.is_nan() { f64::from_bits(0x7fff_ffff_0000_0000) } else { f64::from_bits(r.to_bits() & HIGH) }
}

macro_rules! setp {
    ($cmp:expr, $t:ty, |$x:ident| $prep:expr) => {{
        macro_rules! test {
            ($a:ident, $b:ident, $e:expr) => {
                handler!(|w, i, m| {
                    let bits = compare(w, i.r[2], i.r[3], |$a: $t, $b: $t| {
                        let prepare = |$x: $t| $prep;
                        let ($a, $b) = (prepare($a), prepare($b));
                        $e
                    });
                    finish_setp(w, i, m, bits)
                })
            };
        }
        Some(match $cmp {
            "eq" => test!(a, b, a == b),
            "ne" => test!(a, b, a.partial_cmp(&b).is_some_and(|o| o.is_ne())),
            "lt" => test!(a, b, a < b),
            "le" => test!(a, b, a <= b),
            "gt" => test!(a, b, a > b),
            "ge" => test!(a, b, a >= b),
            "equ" => test!(a, b, a.partial_cmp(&b).is_none_or(|o| o.is_eq())),
            "neu" => test!(a, b, a != b),
            "ltu" => test!(a, b, a.partial_cmp(&b).is_none_or(|o| o.is_lt())),
            "leu" => test!(a, b, a.partial_cmp(&b).is_none_or(|o| o.is_le())),
            "gtu" => test!(a, b, a.partial_cmp(&b).is_none_or(|o| o.is_gt())),
            "geu" => test!(a, b, a.partial_cmp(&b).is_none_or(|o| o.is_ge())),
            "num" => test!(a, b, !a.is_nan() && !b.is_nan()),
            "nan" => test!(a, b, a.is_nan() || b.is_nan()),
            _ => return None,
        })
    }};
}

/// Comparison of floats; see [`finish_setp`].
pub(crate) fn setp(cmp: &str, ty: &str, ftz: bool) -> Option<Handler> {
    match (ty, ftz) {
        ("f32", false) => setp!(cmp, f32, |x| x),
        ("f32", true) => setp!(cmp, f32, |x| flush(x)),
        ("f64", _) => setp!(cmp, f64, |x| x),
        _ => None,
    }
}

/// `testp`: source in `r[2]`; the result is like a comparison's.
pub(crate) fn testp(test: &str, ty: &str) -> Option<Handler> {
    macro_rules! tests {
        ($t:ty) => {{
            macro_rules! test {
                ($f:expr) => {
                    handler!(|w, i, m| {
                        let bits = compare(w, i.r[2], i.r[2], |a: $t, _: $t| $f(a));
                        finish_setp(w, i, m, bits)
                    })
                };
            }
            Some(match test {
                "finite" => test!(<$t>::is_finite),
                "infinite" => test!(<$t>::is_infinite),
                "number" => test!(|a: $t| !a.is_nan()),
                "notanumber" => test!(<$t>::is_nan),
                // On hardware a zero counts as normal.
                "normal" => test!(|a: $t| a.is_normal() || a == 0.0),
                "subnormal" => test!(<$t>::is_subnormal),
                _ => return None,
            })
        }};
    }
    match ty {
        "f32" => tests!(f32),
        "f64" => tests!(f64),
        _ => None,
    }
}
