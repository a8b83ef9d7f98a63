//! How an H200's tensor cores add products of small floating-point numbers.
//!
//! The terms of a sum are the products and the addend. All are exact. They are aligned to the largest one,
//! truncated 25 bits below its highest bit, and added. The result is truncated to an f32 or rounded to the
//! nearest f16. The exponent of a product is the sum of the factors' exponents, even if its significand
//! reaches one bit higher.

use crate::exec::float::{flag, narrow};
use crate::exec::half::{f8, to_f16};
use crate::exec::matrix::Element;

/// How many bits below the largest term's highest bit are kept.
const KEPT: u32 = 25;
/// An exponent lower than any number's.
const NOTHING: i32 = -10_000;

/// A term of a sum: its significand as an integer, and the exponent of its highest bit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Term {
    digits: i64,
    exponent: i32,
    finite: bool,
}

/// Fraction bits of a format.
fn places(element: Element) -> u32 {
    match element {
        Element::F32 => 23,
        Element::Bf16 => 7,
        _ => 10,
    }
}

impl Term {
    /// A number of a format. 8-bit formats are converted to f16 first, as on the GPU.
    pub fn new(element: Element, bits: u64) -> Term {
        let bits = bits as u32;
        let (bits, exponent_bits) = match element {
            Element::F32 | Element::Bf16 => (bits, 8),
            Element::Tf32 => (bits >> 13, 8),
            Element::E4m3 => (f8::decode_e4m3(bits as u8).into(), 5),
            Element::E5m2 => (f8::decode_e5m2(bits as u8).into(), 5),
            _ => (bits, 5),
        };
        let places = places(element);
        let fraction = i64::from(bits & ((1 << places) - 1));
        let highest = (1 << exponent_bits) - 1;
        let code = (bits >> places) as i32 & highest;
        let digits = if code == 0 { fraction } else { fraction | 1 << places };
        let negative = bits >> (places + exponent_bits) & 1 != 0;
        Term {
            digits: if negative { -digits } else { digits },
            exponent: if digits == 0 { NOTHING } else { code.max(1) - (highest >> 1) },
            finite: code != highest,
        }
    }

    /// The value of a term with `places` fraction bits.
    fn value(self, places: u32) -> f64 {
        let magnitude = self.digits.unsigned_abs();
        let value = match self.finite {
            _ if magnitude == 0 => 0.0,
            true => magnitude as f64 * 2f64.powi(self.exponent - places as i32),
            false if magnitude == 1 << places => f64::INFINITY,
            false => f64::NAN,
        };
        if self.digits < 0 { -value } else { value }
    }
}

/// The significand shifted up by `up` and down by `down` bits, truncated towards zero.
fn in_line(digits: i64, up: u32, down: i32) -> i64 {
    let magnitude = (digits.unsigned_abs() << up) >> down.min(63);
    if digits < 0 { -(magnitude as i64) } else { magnitude as i64 }
}

/// The sum of products, whose factors have this many fraction bits, and an addend: not yet rounded, and exact
/// as an f64.
fn add(
    products: impl Iterator<Item = (Term, Term)> + Clone,
    (a, b): (u32, u32),
    (of, start): (Element, u64),
) -> f64 {
    let (start, start_places) = (Term::new(of, start), places(of));
    if !start.finite || products.clone().any(|(x, y)| !x.finite || !y.finite) {
        return products.fold(start.value(start_places), |sum, (x, y)| sum + x.value(a) * y.value(b));
    }
    let largest = products.clone().fold(start.exponent, |most, (x, y)| most.max(x.exponent + y.exponent));
    if largest < NOTHING / 2 {
        return 0.0;
    }
    let of_products = products.fold(0, |sum, (x, y)| {
        sum + in_line(x.digits * y.digits, KEPT - a - b, largest - x.exponent - y.exponent)
    });
    let sum = of_products + in_line(start.digits, KEPT - start_places, largest - start.exponent);
    let unit = 1023 + largest - KEPT as i32;
    sum as f64 * f64::from_bits((unit as u64) << 52)
}

/// A sum truncated to f32; infinite from 2^128 on. There is one NaN.
fn cut(sum: f64) -> u64 {
    let huge = sum.abs() >= 2f64.powi(128);
    bits(if huge { f64::INFINITY.copysign(sum) as f32 } else { narrow(sum, flag::RZ) })
}

fn bits(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

/// The dot product of a row and a column plus `start` (f32 or f16), as the bits of a `to`. It is computed in
/// sums of `step` products, each of which is the addend of the next.
pub(crate) fn dot(
    row: &[Term],
    column: &[Term],
    (a, b): (Element, Element),
    (of, start): (Element, u64),
    to: Element,
    step: usize,
) -> u64 {
    let factors = (places(a), places(b));
    let half = to == Element::F16;
    let round = |sum: f64| if half { u64::from(to_f16(sum, 0)) } else { cut(sum) };
    let all = row.iter().copied().zip(column.iter().copied());
    if a.bits() == 8 {
        // One sum of the first two of every four products and one of the last two, then the addend.
        let part = |lower: bool| {
            all.clone().enumerate().filter(move |(n, _)| (n % 4 < 2) == lower).map(|(_, pair)| pair)
        };
        let one = round(add(part(true), factors, (to, 0)));
        let sum = round(add(part(false), factors, (to, one)));
        let sum = to.value(sum) + of.value(start);
        return if half { u64::from(to_f16(sum, 0)) } else { bits(sum as f32) };
    }
    let (mut sum, mut start) = (0, (of, start));
    for (x, y) in row.chunks(step).zip(column.chunks(step)) {
        sum = round(add(x.iter().copied().zip(y.iter().copied()), factors, start));
        start = (to, sum);
    }
    sum
}
