//! Video instructions: the two halves or four bytes of words, side by side.

use crate::exec::rows::map3;
use crate::lower::program::Handler;

/// Fields of `imm`; the operation is in the lowest four bits.
pub(crate) mod field {
    pub const ADD: i64 = 0;
    pub const SUB: i64 = 1;
    pub const AVERAGE: i64 = 2;
    pub const DIFFERENCE: i64 = 3;
    pub const MIN: i64 = 4;
    pub const MAX: i64 = 5;
    /// Comparisons: equal, not equal, less, less or equal, greater, greater or equal.
    pub const EQ: i64 = 6;
    pub const OPERATION: i64 = 15;
    /// Four bytes, else two halves.
    pub const BYTES: i64 = 16;
    pub const SIGNED_A: i64 = 32;
    pub const SIGNED_B: i64 = 64;
    pub const SIGNED_RESULT: i64 = 128;
    pub const SATURATE: i64 = 256;
    /// The parts' results are added to the third operand.
    pub const SUM: i64 = 512;
}

/// Row `r[0]` = the operation on `r[1]` and `r[2]`, with `r[3]` for [`field::SUM`].
pub(crate) const SIDE_BY_SIDE: Handler =
    handler!(|w, i, m| map3(w, i, m, |a: u32, b: u32, c: u32| parts(i.imm, a, b, c)));

fn parts(imm: i64, a: u32, b: u32, c: u32) -> u32 {
    let width = if imm & field::BYTES != 0 { 8 } else { 16 };
    let part = |word: u32, at: u32, signed: bool| {
        let v = word >> at << (32 - width);
        if signed { i64::from(v as i32 >> (32 - width)) } else { i64::from(v >> (32 - width)) }
    };
    let (low, high) = match imm & field::SIGNED_RESULT != 0 {
        true => (-(1i64 << (width - 1)), (1i64 << (width - 1)) - 1),
        false => (0, (1i64 << width) - 1),
    };
    let (mut out, mut sum) = (0u32, c);
    for at in (0..32).step_by(width as usize) {
        let x = part(a, at, imm & field::SIGNED_A != 0);
        let y = part(b, at, imm & field::SIGNED_B != 0);
        let v = match imm & field::OPERATION {
            field::ADD => x + y,
            field::SUB => x - y,
            field::AVERAGE => (x + y + i64::from(x + y >= 0)) >> 1,
            field::DIFFERENCE => (x - y).abs(),
            field::MIN => x.min(y),
            field::MAX => x.max(y),
            compare => {
                i64::from([x == y, x != y, x < y, x <= y, x > y, x >= y][(compare - field::EQ) as usize % 6])
            }
        };
        let v = if imm & field::SATURATE != 0 { v.clamp(low, high) } else { v };
        out |= (v as u32 & (u32::MAX >> (32 - width))) << at;
        sum = sum.wrapping_add(v as u32);
    }
    if imm & field::SUM != 0 { sum } else { out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_bytes_are_summed() {
        let sum = field::DIFFERENCE | field::BYTES | field::SUM;
        assert_eq!(parts(sum, 0x01ff_0080, 0x0300_017f, 10), 10 + 2 + 255 + 1 + 1);
        assert_eq!(parts(field::DIFFERENCE | field::BYTES, 0x01ff_0080, 0x0300_017f, 0), 0x02ff_0101);
    }

    #[test]
    fn halves_saturate_to_the_type_of_the_result() {
        let signed = field::SIGNED_A | field::SIGNED_B | field::SIGNED_RESULT | field::SATURATE;
        assert_eq!(parts(field::ADD | signed, 0x7fff_8000, 0x0001_ffff, 0), 0x7fff_8000);
        assert_eq!(parts(field::SUB | field::SATURATE, 0x0001_0005, 0x0002_0003, 0), 0x0000_0002);
        assert_eq!(parts(field::AVERAGE | signed, 0xfffd_0003, 0xfffe_0002, 0), 0xfffd_0003);
        assert_eq!(parts((field::EQ + 4) | field::BYTES, 0x01ff_0080, 0x00ff_0181, 0), 0x0100_0000);
    }
}
