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
    const ZERO: Term = Term { digits: 0, exponent: NOTHING, finite: true };

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
}

/// Digits moved up, then down by `down` places, cut off towards zero.
fn in_line(digits: i64, up: u32, down: i32) -> i64 {
    let magnitude = (digits.unsigned_abs() << up) >> down.min(63);
    if digits < 0 { -(magnitude as i64) } else { magnitude as i64 }
}

/// The sum of finite terms, before it is rounded: exact as an f64.
fn add(products: impl Iterator<Item = (Term, Term)> + Clone, factors: u32, start: Term, places: u32) -> f64 {
    let largest = products.clone().fold(start.exponent, |most, (a, b)| most.max(a.exponent + b.exponent));
    if largest < NOTHING / 2 {
        return 0.0;
    }
    let of_products = products.fold(0, |sum, (a, b)| {
        sum + in_line(a.digits * b.digits, KEPT - factors, largest - a.exponent - b.exponent)
    });
    let sum = of_products + in_line(start.digits, KEPT - places, largest - start.exponent);
    let unit = 1023 + largest - KEPT as i32;
    sum as f64 * f64::from_bits((unit as u64) << 52)
}

/// An f32 of a sum: cut off, but infinite from 2^128 on.
fn cut(sum: f64) -> f32 {
    if sum.abs() >= 2f64.powi(128) { (f64::INFINITY.copysign(sum)) as f32 } else { narrow(sum, flag::RZ) }
}

/// The bits of an f32, of which there is one NaN.
fn bits(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

/// What a row and a column come to with the number `start` (f32 or f16) added: bits of a `to`. Sums have `step` products; that
/// of the first is what the next is added to. `infinite` gives the sum where a number is none or infinite.
pub(crate) fn dot(
    row: &[Term],
    column: &[Term],
    (a, b): (Element, Element),
    (of, start): (Element, u64),
    to: Element,
    step: usize,
    infinite: impl FnOnce() -> f64,
) -> u64 {
    let first = Term::new(of, start);
    let all = row.iter().copied().zip(column.iter().copied());
    let factors = places(a) + places(b);
    let half = to == Element::F16;
    if !first.finite || all.clone().any(|(x, y)| !x.finite || !y.finite) {
        let sum = infinite();
        return if half { u64::from(to_f16(sum, 0)) } else { bits(sum as f32) };
    }
    if a.bits() == 8 {
        // Two products of 16, of every other pair of numbers, and then the number that they are added to.
        let part =
            |lower: bool| all.clone().enumerate().filter(move |(n, _)| (n % 4 < 2) == lower).map(|(_, p)| p);
        let one = cut(add(part(true), factors, Term::ZERO, 23));
        let both = cut(add(part(false), factors, Term::new(Element::F32, one.to_bits().into()), 23));
        let start =
            if of == Element::F16 { Element::F16.value(start) as f32 } else { f32::from_bits(start as u32) };
        let sum = both + start;
        return if half { u64::from(to_f16(sum.into(), 0)) } else { bits(sum) };
    }
    let (mut start, mut digits, mut sum) = (first, places(of), 0.0);
    for (x, y) in row.chunks(step).zip(column.chunks(step)) {
        sum = add(x.iter().copied().zip(y.iter().copied()), factors, start, digits);
        if cut(sum).is_infinite() {
            break;
        }
        (start, digits) = (Term::new(Element::F32, bits(cut(sum))), 23);
    }
    if half { u64::from(to_f16(sum, 0)) } else { bits(cut(sum)) }
}
