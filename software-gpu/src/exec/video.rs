//! Video instructions: on two halves or four bytes of words side by side, and on single values selected from
//! words.

use crate::machine::program::Handler;

/// Fields of `imm`. The lowest four bits are the operation.
pub(crate) mod field {
    pub const ADD: i64 = 0;
    pub const SUB: i64 = 1;
    pub const AVERAGE: i64 = 2;
    pub const DIFFERENCE: i64 = 3;
    pub const MIN: i64 = 4;
    pub const MAX: i64 = 5;
    /// Comparisons: equal, not equal, less, less or equal, greater, greater or equal.
    pub const EQ: i64 = 6;
    /// Operations on single values only.
    pub const SHIFT_LEFT: i64 = 12;
    pub const SHIFT_RIGHT: i64 = 13;
    pub const PRODUCT: i64 = 14;
    pub const OPERATION: i64 = 15;
    /// Works on four bytes instead of two halves.
    pub const BYTES: i64 = 16;
    pub const SIGNED_A: i64 = 32;
    pub const SIGNED_B: i64 = 64;
    pub const SIGNED_RESULT: i64 = 128;
    pub const SATURATE: i64 = 256;
    /// The results are added to the third operand.
    pub const SUM: i64 = 512;

    /// For side-by-side operations: which parts are computed (4 bits), and for each part of either operand,
    /// which of the eight parts of both operands it is (3 bits each).
    pub const MASK: u32 = 16;
    pub const CHOICE_A: u32 = 20;
    pub const CHOICE_B: u32 = 32;

    /// For single values: takes the minimum or maximum of the result and the third operand.
    pub const SECOND_MIN: i64 = 1 << 10;
    pub const SECOND_MAX: i64 = 1 << 11;
    /// The selected part of a word (3 bits); see [`super::Part`].
    pub const PART_A: u32 = 12;
    pub const PART_B: u32 = 15;
    pub const PART_RESULT: u32 = 18;
    /// Takes shift amounts modulo 32; otherwise larger amounts count as 32.
    pub const WRAP: i64 = 1 << 21;
    /// Adds one to the sum with a product.
    pub const PLUS_ONE: i64 = 1 << 22;
    /// Subtracts the product from the third operand, or the reverse.
    pub const MINUS_PRODUCT: i64 = 1 << 23;
    pub const MINUS_C: i64 = 1 << 24;
    /// How many bits a sum with a product is shifted to the right (4 bits).
    pub const SCALE: u32 = 25;
}

/// A part of a word, or all of it: number of bits, and first bit.
fn part(code: i64) -> (u32, u32) {
    match code & 7 {
        n @ 1..=4 => (8, (n as u32 - 1) * 8),
        n @ 5..=6 => (16, (n as u32 - 5) * 16),
        _ => (32, 0),
    }
}

/// The number in some bits of a word, from bit `at` on.
fn number(word: u64, width: u32, at: u32, signed: bool) -> i64 {
    let v = (word >> at << (64 - width)) as i64;
    if signed { v >> (64 - width) } else { (v as u64 >> (64 - width)) as i64 }
}

/// The smallest and largest number with this many bits.
fn limits(width: u32, signed: bool) -> (i64, i64) {
    if signed { (-(1 << (width - 1)), (1 << (width - 1)) - 1) } else { (0, (1 << width) - 1) }
}

/// The operations that both kinds have.
fn operation(which: i64, x: i64, y: i64) -> i64 {
    match which {
        field::ADD => x + y,
        field::SUB => x - y,
        field::AVERAGE => (x + y + i64::from(x + y >= 0)) >> 1,
        field::DIFFERENCE => (x - y).abs(),
        field::MIN => x.min(y),
        field::MAX => x.max(y),
        compare => {
            i64::from([x == y, x != y, x < y, x <= y, x > y, x >= y][(compare - field::EQ) as usize % 6])
        }
    }
}

/// Row `r[0]` = the operation on parts of `r[1]` and `r[2]`. `r[3]` is used for [`field::SUM`] and for parts
/// that are not computed.
pub(crate) const SIDE_BY_SIDE: Handler = lanewise!(imm, |a: u32, b: u32, c: u32| parts(imm, a, b, c));

fn parts(imm: i64, a: u32, b: u32, c: u32) -> u32 {
    let width = if imm & field::BYTES != 0 { 8 } else { 16 };
    let both = u64::from(a) | u64::from(b) << 32;
    let (low, high) = limits(width, imm & field::SIGNED_RESULT != 0);
    let (mut out, mut sum) = (c, c);
    for n in 0..32 / width {
        if imm >> (field::MASK + n) & 1 == 0 {
            continue;
        }
        let chosen = |at: u32, signed: i64| {
            let index = (imm >> (at + 3 * n) & 7) as u32;
            number(both, width, index * width, imm & signed != 0)
        };
        let x = chosen(field::CHOICE_A, field::SIGNED_A);
        let y = chosen(field::CHOICE_B, field::SIGNED_B);
        let v = operation(imm & field::OPERATION, x, y);
        let v = if imm & field::SATURATE != 0 { v.clamp(low, high) } else { v };
        let field = (u32::MAX >> (32 - width)) << (n * width);
        out = (out & !field) | ((v as u32) << (n * width) & field);
        sum = sum.wrapping_add(v as u32);
    }
    if imm & field::SUM != 0 { sum } else { out }
}

/// Row `r[0]` = the operation on single values from `r[1]` and `r[2]`, combined with `r[3]`.
pub(crate) const SINGLE: Handler = lanewise!(imm, |a: u32, b: u32, c: u32| single(imm, a, b, c));

fn single(imm: i64, a: u32, b: u32, c: u32) -> u32 {
    let has = |flag: i64| imm & flag != 0;
    let value = |word: u32, code: i64, signed: bool| {
        let (width, at) = part(code);
        number(word.into(), width, at, signed)
    };
    let x = value(a, imm >> field::PART_A, has(field::SIGNED_A));
    let y = value(b, imm >> field::PART_B, has(field::SIGNED_B));
    let which = imm & field::OPERATION;
    if which == field::PRODUCT {
        return product(imm, x, y, c);
    }
    let amount = if has(field::WRAP) { y & 31 } else { y.min(32) };
    let v = match which {
        field::SHIFT_LEFT => x << amount,
        field::SHIFT_RIGHT => x >> amount,
        _ => operation(which, x, y),
    };
    let (width, at) = part(imm >> field::PART_RESULT);
    let signed = has(field::SIGNED_RESULT);
    let (_, high) = limits(width, signed);
    let v = match has(field::SATURATE) {
        // A right shift saturates to a whole word.
        true if width == 32 || which == field::SHIFT_RIGHT => {
            let (low, high) = limits(32, signed);
            v.clamp(low, high)
        }
        // An H200 treats negative values as too large for part of a word.
        true => (v as u64).min(high as u64) as i64,
        false => v,
    };
    let (word, third) = (v as u32, number(c.into(), 32, 0, signed));
    if width < 32 {
        let field = (u32::MAX >> (32 - width)) << at;
        // An H200 puts the upper half of the result into the upper half.
        let moved = if width == 16 { 0 } else { at };
        return (c & !field) | (word << moved & field);
    }
    // The comparison uses the value before truncation.
    let smaller = if signed { v < third } else { (v as u64) < third as u64 };
    match () {
        () if has(field::SUM) => word.wrapping_add(c),
        () if has(field::SECOND_MIN) => {
            if smaller {
                word
            } else {
                c
            }
        }
        () if has(field::SECOND_MAX) => {
            if smaller {
                c
            } else {
                word
            }
        }
        () => word,
    }
}

/// `vmad`: a product and a sum, exact until shifted.
fn product(imm: i64, x: i64, y: i64, c: u32) -> u32 {
    let has = |flag: i64| imm & flag != 0;
    let minus = has(field::MINUS_PRODUCT) || has(field::MINUS_C);
    let signed = has(field::SIGNED_A) || has(field::SIGNED_B) || minus;
    let third = if signed { i128::from(c as i32) } else { i128::from(c) };
    let exact = i128::from(x) * i128::from(y);
    let sum = match () {
        () if has(field::PLUS_ONE) => exact + third + 1,
        () if has(field::MINUS_PRODUCT) => third - exact,
        () if has(field::MINUS_C) => exact - third,
        () => exact + third,
    };
    let scaled = sum >> (imm >> field::SCALE & 15);
    let (low, high) = limits(32, signed);
    let result = if has(field::SATURATE) { scaled.clamp(low.into(), high.into()) } else { scaled };
    result as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every part, with each operand's own parts.
    const PLAIN: i64 = 15 << field::MASK | 0o3210 << field::CHOICE_A;
    const BYTES: i64 = PLAIN | field::BYTES | 0o7654 << field::CHOICE_B;
    const HALVES: i64 = PLAIN | 0o32 << field::CHOICE_B;

    #[test]
    fn differences_of_bytes_are_summed() {
        let sum = field::DIFFERENCE | BYTES | field::SUM;
        assert_eq!(parts(sum, 0x01ff_0080, 0x0300_017f, 10), 10 + 2 + 255 + 1 + 1);
        assert_eq!(parts(field::DIFFERENCE | BYTES, 0x01ff_0080, 0x0300_017f, 0), 0x02ff_0101);
    }

    #[test]
    fn halves_saturate_to_the_result_type() {
        let signed = HALVES | field::SIGNED_A | field::SIGNED_B | field::SIGNED_RESULT | field::SATURATE;
        assert_eq!(parts(field::ADD | signed, 0x7fff_8000, 0x0001_ffff, 0), 0x7fff_8000);
        assert_eq!(parts(field::SUB | HALVES | field::SATURATE, 0x0001_0005, 0x0002_0003, 0), 0x0000_0002);
        assert_eq!(parts(field::AVERAGE | signed, 0xfffd_0003, 0xfffe_0002, 0), 0xfffd_0003);
        assert_eq!(parts((field::EQ + 4) | BYTES, 0x01ff_0080, 0x00ff_0181, 0), 0x0100_0000);
    }

    #[test]
    fn a_sum_saturates_to_its_destination_part() {
        let byte = field::ADD | field::SATURATE | 2 << field::PART_RESULT;
        assert_eq!(single(byte, 200, 100, 0x1122_3344), 0x1122_ff44);
        assert_eq!(single(field::SUB | field::SATURATE, 1, 2, 0), 0);
        assert_eq!(single(field::SUB | 6 << field::PART_A, 0x0005_0001, 2, 0), 3);
    }
}
