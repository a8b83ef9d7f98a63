//! Moves between rows of different widths, and between address spaces.

use crate::exec::half::{to_bf16, to_f16};
use crate::exec::memory;
use crate::exec::rows::{LANES, get, map1, map2, put_pred};
use crate::lower::program::{Flow, Handler, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::ptx::ast::Space;

/// Takes `part` bits at bit `imm` out of `whole`.
pub(crate) fn extract(part: u32, whole: u32) -> Option<Handler> {
    macro_rules! extract {
        ($p:ty, $w:ty) => {
            handler!(|w, i, m| map1(w, i, m, |a: $w| (a >> i.imm) as $p))
        };
    }
    Some(match (part, whole) {
        (8, 16) => extract!(u8, u16),
        (8, 32) => extract!(u8, u32),
        (16, 32) => extract!(u16, u32),
        (16, 64) => extract!(u16, u64),
        (32, 64) => extract!(u32, u64),
        (64, 128) => extract!(u64, u128),
        (32, 128) => extract!(u32, u128),
        _ => return None,
    })
}

/// `r[0]` = `r[2]` with `part` bits at bit `imm` set to `r[1]`, the rest above zero; -1 begins with bit 0.
pub(crate) fn insert(part: u32, whole: u32) -> Option<Handler> {
    macro_rules! insert {
        ($p:ty, $w:ty) => {
            handler!(|w, i, m| map2(w, i, m, |a: $p, b: $w| {
                if i.imm < 0 { <$w>::from(a) } else { b | <$w>::from(a) << i.imm }
            }))
        };
    }
    Some(match (part, whole) {
        (8, 16) => insert!(u8, u16),
        (8, 32) => insert!(u8, u32),
        (16, 32) => insert!(u16, u32),
        (16, 64) => insert!(u16, u64),
        (32, 64) => insert!(u32, u64),
        (64, 128) => insert!(u64, u128),
        (32, 128) => insert!(u32, u128),
        _ => return None,
    })
}

/// `cvt.f16x2.f32` and its like: the first source goes to the upper half.
pub(crate) fn pack_halves(bf16: bool) -> Handler {
    if bf16 {
        handler!(|w, i, m| map2(w, i, m, |a: f32, b: f32| {
            u32::from(to_bf16(f64::from(a), i.imm)) << 16 | u32::from(to_bf16(f64::from(b), i.imm))
        }))
    } else {
        handler!(|w, i, m| map2(w, i, m, |a: f32, b: f32| {
            u32::from(to_f16(f64::from(a), i.imm)) << 16 | u32::from(to_f16(f64::from(b), i.imm))
        }))
    }
}

/// Predicate `r[0]`: whether the generic address `r[1]` is in the space of window `imm` (0: global).
pub(crate) const IS_SPACE: Handler = handler!(|w, i, m| {
    let a: [u64; LANES] = get(w, i.r[1]);
    let mut bits = 0;
    for l in 0..LANES {
        let space = match memory::space_of(a[l]) {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param => PARAM_WINDOW,
            _ => 0,
        };
        bits |= u32::from(space == i.imm as u64) << l;
    }
    put_pred(w, i.r[0], m, bits);
    Flow::Next
});

/// `r[0]` = `r[1]` + `imm`: between a space's addresses and generic ones.
pub(crate) const OFFSET: Handler = handler!(|w, i, m| map1(w, i, m, |a: u64| a.wrapping_add(i.imm as u64)));
