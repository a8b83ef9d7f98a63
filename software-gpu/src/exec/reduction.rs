//! The element operations of reducing bulk copies (`cp.reduce.async.bulk`). Each is atomic by itself.

use crate::exec::atomic::{Cell, add_f32, add_f64, half_add};
use crate::exec::half::{Bf16, F16, extreme};

/// A reduction: the element size in bytes, and the operation that combines a destination element with a
/// source element.
#[derive(Clone, Copy)]
pub(crate) struct Reduction {
    name: &'static str,
    ty: &'static str,
    pub bytes: usize,
    /// # Safety
    ///
    /// Both pointers are valid for `bytes`, and the first is a multiple of `bytes`.
    pub apply: unsafe fn(*mut u8, *const u8),
}

macro_rules! reduction {
    ($name:literal, $ty:literal, $t:ty, $f:expr) => {
        Reduction {
            name: $name,
            ty: $ty,
            bytes: size_of::<$t>(),
            apply: |to, from| {
                // SAFETY: the caller upholds the contract of `apply`.
                unsafe {
                    let b = from.cast::<$t>().read_unaligned();
                    <$t>::update(to, |x| $f(x, b));
                }
            },
        }
    };
}

const ALL: [Reduction; 28] = [
    reduction!("add", "u32", u32, u32::wrapping_add),
    reduction!("add", "s32", u32, u32::wrapping_add),
    reduction!("add", "u64", u64, u64::wrapping_add),
    reduction!("add", "f32", u32, |x, b| add_f32(x, b, true)),
    reduction!("add", "f64", u64, |x, b| add_f64(x, b, false)),
    reduction!("add.noftz", "f16", u16, half_add::<F16>),
    reduction!("add.noftz", "bf16", u16, half_add::<Bf16>),
    reduction!("min", "u32", u32, std::cmp::min),
    reduction!("min", "s32", u32, |x: u32, b: u32| (x as i32).min(b as i32) as u32),
    reduction!("min", "u64", u64, std::cmp::min),
    reduction!("min", "s64", u64, |x: u64, b: u64| (x as i64).min(b as i64) as u64),
    reduction!("min", "f16", u16, |x, b| extreme::<F16>(x, b, 0, false)),
    reduction!("min", "bf16", u16, |x, b| extreme::<Bf16>(x, b, 0, false)),
    reduction!("max", "u32", u32, std::cmp::max),
    reduction!("max", "s32", u32, |x: u32, b: u32| (x as i32).max(b as i32) as u32),
    reduction!("max", "u64", u64, std::cmp::max),
    reduction!("max", "s64", u64, |x: u64, b: u64| (x as i64).max(b as i64) as u64),
    reduction!("max", "f16", u16, |x, b| extreme::<F16>(x, b, 0, true)),
    reduction!("max", "bf16", u16, |x, b| extreme::<Bf16>(x, b, 0, true)),
    reduction!("inc", "u32", u32, |x: u32, b: u32| if x >= b { 0 } else { x + 1 }),
    reduction!("dec", "u32", u32, |x: u32, b: u32| if x == 0 || x > b { b } else { x - 1 }),
    reduction!("and", "b32", u32, |x: u32, b: u32| x & b),
    reduction!("or", "b32", u32, |x: u32, b: u32| x | b),
    reduction!("xor", "b32", u32, |x: u32, b: u32| x ^ b),
    reduction!("and", "b64", u64, |x: u64, b: u64| x & b),
    reduction!("or", "b64", u64, |x: u64, b: u64| x | b),
    reduction!("xor", "b64", u64, |x: u64, b: u64| x ^ b),
    reduction!("add", "s64", u64, u64::wrapping_add),
];

/// The number of a reduction for [`numbered`], from 1 on.
pub(crate) fn find(name: &str, ty: &str) -> Option<i64> {
    ALL.iter().position(|r| r.name == name && r.ty == ty).map(|n| n as i64 + 1)
}

/// The reduction with a number; `None` is a plain copy.
pub(crate) fn numbered(number: i64) -> Option<Reduction> {
    ALL.get(usize::try_from(number).ok()?.checked_sub(1)?).copied()
}
