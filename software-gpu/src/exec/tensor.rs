//! How an H200's tensor cores add the products of small floating-point numbers.
//!
//! A sum's terms, the products and the number that they are added to, are exact, put in line with the largest of them, cut off 25
//! bits below its highest place, and added. What comes out is cut off to an f32, or rounded to the nearest f16. The exponent of
//! a product is the sum of its factors', although its digits may reach one place higher.

use crate::exec::float::{flag, narrow};
use crate::exec::half::{f8, to_f16};
use crate::exec::matrix::Element;

/// Places below the largest term's highest that are kept.
const KEPT: u32 = 25;
/// An exponent below any that a number has.
const NOTHING: i32 = -10_000;

/// A number as a sum takes it: whole digits, and the exponent of its highest place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Term {
    digits: i64,
    exponent: i32,
    finite: bool,
}

/// Places that a format has after the point.
fn places(element: Element) -> u32 {
    match element {
        Element::F32 => 23,
        Element::Bf16 => 7,
        _ => 10,
    }
}

impl Term {
    /// A number of a format. Those of 8 bits become f16 before, as they do on the GPU.
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

    /// What it is worth, if its format has `places` after the point.
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

/// Digits moved up, then down by `down` places, cut off towards zero.
fn in_line(digits: i64, up: u32, down: i32) -> i64 {
    let magnitude = (digits.unsigned_abs() << up) >> down.min(63);
    if digits < 0 { -(magnitude as i64) } else { magnitude as i64 }
}

/// The sum of products, of factors with so many places each, and a number: before it is rounded, and exact as an f64.
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

/// An f32 of a sum: cut off, but infinite from 2^128 on. There is one NaN.
fn cut(sum: f64) -> u64 {
    let huge = sum.abs() >= 2f64.powi(128);
    bits(if huge { f64::INFINITY.copysign(sum) as f32 } else { narrow(sum, flag::RZ) })
}

fn bits(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

/// What a row and a column come to with the number `start` (f32 or f16) added: bits of a `to`. Sums have `step` products; that
/// of the first is what the next is added to.
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
        // Of the first two and of the last two of every four; then the number that they are added to.
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
