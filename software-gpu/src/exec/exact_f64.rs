//! f64 arithmetic in any rounding mode, implemented with integers.

use crate::exec::float::flag;

/// (-1)^`negative` x `digits` x 2^`exponent`. The lowest digit is sticky: it may stand for any smaller
/// non-zero value.
#[derive(Clone, Copy)]
struct Number {
    negative: bool,
    digits: u128,
    exponent: i32,
}

const FRACTION: u64 = (1 << 52) - 1;

/// A finite value.
fn number(x: f64) -> Number {
    let bits = x.to_bits();
    let (field, fraction) = ((bits >> 52 & 0x7ff) as i32, bits & FRACTION);
    let (digits, exponent) = if field == 0 { (fraction, -1074) } else { (fraction | 1 << 52, field - 1075) };
    Number { negative: bits >> 63 != 0, digits: u128::from(digits), exponent }
}

/// Normalized: the highest digit is bit 124.
fn normal(mut n: Number) -> Number {
    if n.digits != 0 {
        let shift = n.digits.leading_zeros() as i32 - 3;
        n.digits = if shift >= 0 { n.digits << shift } else { jam(n.digits, -shift) };
        n.exponent -= shift;
    }
    n
}

/// Shifts right; bits that are shifted out set the lowest digit.
fn jam(digits: u128, shift: i32) -> u128 {
    match shift {
        0 => digits,
        1..128 => digits >> shift | u128::from(digits << (128 - shift) != 0),
        _ => u128::from(digits != 0),
    }
}

fn down(flags: i64) -> bool {
    flags & flag::ROUND == flag::RM
}

fn round(n: Number, flags: i64) -> f64 {
    let sign = u64::from(n.negative) << 63;
    if n.digits == 0 {
        return f64::from_bits(sign);
    }
    let top = 127 - n.digits.leading_zeros() as i32;
    let lowest = (n.exponent + top - 52).max(-1074);
    let shift = lowest - n.exponent;
    let (kept, rest, half) = match shift {
        ..=0 => (n.digits << -shift, 0, 1),
        1..128 => (n.digits >> shift, n.digits & ((1 << shift) - 1), 1 << (shift - 1)),
        _ => (0, 1, 2),
    };
    let up = match flags & flag::ROUND {
        flag::RZ => false,
        flag::RM => n.negative && rest != 0,
        flag::RP => !n.negative && rest != 0,
        _ => rest > half || (rest == half && kept & 1 != 0),
    };
    let kept = kept as u64 + u64::from(up);
    let bits = if kept >= 1 << 52 { (((lowest + 1074) as u64) << 52) + kept } else { kept };
    if bits >= 0x7ff0_0000_0000_0000 {
        let finite = match flags & flag::ROUND {
            flag::RZ => true,
            flag::RM => !n.negative,
            flag::RP => n.negative,
            _ => false,
        };
        return f64::from_bits(sign | (0x7ff0_0000_0000_0000 - u64::from(finite)));
    }
    f64::from_bits(sign | bits)
}

fn sum(a: Number, b: Number, flags: i64) -> f64 {
    if a.digits == 0 && b.digits == 0 {
        let negative = if down(flags) { a.negative || b.negative } else { a.negative && b.negative };
        return f64::from_bits(u64::from(negative) << 63);
    }
    if a.digits == 0 || b.digits == 0 {
        return round(if a.digits == 0 { b } else { a }, flags);
    }
    let (a, b) = (normal(a), normal(b));
    let (big, small) = if a.exponent >= b.exponent { (a, b) } else { (b, a) };
    let other = jam(small.digits, big.exponent - small.exponent);
    if big.negative == small.negative {
        return round(Number { digits: big.digits + other, ..big }, flags);
    }
    match big.digits.cmp(&other) {
        std::cmp::Ordering::Equal => f64::from_bits(u64::from(down(flags)) << 63),
        std::cmp::Ordering::Greater => round(Number { digits: big.digits - other, ..big }, flags),
        std::cmp::Ordering::Less => {
            round(Number { negative: small.negative, digits: other - big.digits, ..big }, flags)
        }
    }
}

fn product(a: f64, b: f64) -> Number {
    let (a, b) = (number(a), number(b));
    Number {
        negative: a.negative != b.negative,
        digits: a.digits * b.digits,
        exponent: a.exponent + b.exponent,
    }
}

/// `a * b + c`.
pub(crate) fn fma(a: f64, b: f64, c: f64, flags: i64) -> f64 {
    if !(a.is_finite() && b.is_finite() && c.is_finite()) {
        return a.mul_add(b, c);
    }
    sum(product(a, b), number(c), flags)
}

/// `a + b`.
pub(crate) fn add(a: f64, b: f64, flags: i64) -> f64 {
    if !(a.is_finite() && b.is_finite()) { a + b } else { sum(number(a), number(b), flags) }
}

/// `a * b`.
pub(crate) fn mul(a: f64, b: f64, flags: i64) -> f64 {
    if !(a.is_finite() && b.is_finite()) { a * b } else { round(product(a, b), flags) }
}

/// `a / b`.
pub(crate) fn div(a: f64, b: f64, flags: i64) -> f64 {
    if !(a.is_finite() && b.is_finite()) || b == 0.0 {
        return a / b;
    }
    let (a, b) = (normal(number(a)), number(b));
    let (quotient, rest) = (a.digits / b.digits, a.digits % b.digits);
    round(
        Number {
            negative: a.negative != b.negative,
            digits: quotient << 1 | u128::from(rest != 0),
            exponent: a.exponent - b.exponent - 1,
        },
        flags,
    )
}

/// The square root.
pub(crate) fn sqrt(a: f64, flags: i64) -> f64 {
    if !a.is_finite() || a <= 0.0 {
        return a.sqrt();
    }
    let n = normal(number(a));
    let n =
        if n.exponent & 1 != 0 { Number { digits: n.digits << 1, exponent: n.exponent - 1, ..n } } else { n };
    let root = n.digits.isqrt();
    let digits = root << 1 | u128::from(root * root != n.digits);
    round(Number { negative: false, digits, exponent: n.exponent / 2 - 1 }, flags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(ours: f64, host: f64) {
        assert!(
            ours.to_bits() == host.to_bits() || (ours.is_nan() && host.is_nan()),
            "{ours:e} and {host:e}"
        );
    }

    proptest! {
        #[test]
        fn rounding_to_nearest_matches_the_host(a: u64, b: u64, c: u64) {
            let (a, b, c) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
            same(add(a, b, 0), a + b);
            same(mul(a, b, 0), a * b);
            same(div(a, b, 0), a / b);
            same(sqrt(a, 0), a.sqrt());
            same(fma(a, b, c, 0), a.mul_add(b, c));
        }

        #[test]
        fn cancellation_matches_the_host(a in -4f64..4.0, b in -4f64..4.0, e in -60i32..4) {
            let c = -(a * b) * (1.0 + 2f64.powi(e));
            same(fma(a, b, c, 0), a.mul_add(b, c));
            same(add(a, -a * (1.0 + 2f64.powi(e)), 0), a - a * (1.0 + 2f64.powi(e)));
        }

        #[test]
        fn directed_roundings_enclose_the_nearest(a: u64, b: u64) {
            let (a, b) = (f64::from_bits(a), f64::from_bits(b));
            for f in [add, mul, div] {
                let (low, near, high) = (f(a, b, flag::RM), f(a, b, 0), f(a, b, flag::RP));
                if near.is_nan() {
                    continue;
                }
                prop_assert!(low <= near && near <= high, "{low:e} {near:e} {high:e}");
                prop_assert!(low == high || low.next_up() == high, "{low:e} {high:e}");
                let zero = f(a, b, flag::RZ);
                prop_assert_eq!(zero, if low >= 0.0 { low } else { high });
            }
        }
    }
}
