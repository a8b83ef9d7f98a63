//! Moves between rows of different widths, and between address spaces.

use crate::exec::half::{to_bf16, to_f16};
use crate::exec::memory;
use crate::exec::rows::{get, put, put_pred};
use crate::machine::address::{LOCAL_WINDOW, PARAM_WINDOW, RANK, SHARED_WINDOW, WINDOW_SIZE};
use crate::machine::program::Handler;
use crate::machine::row::LANES;
use crate::machine::warp::Flow;
use crate::ptx::ast::Space;

/// Extracts `part` bits at bit `imm` of `whole`.
pub(crate) fn extract(part: u32, whole: u32) -> Option<Handler> {
    macro_rules! extract {
        ($p:ty, $w:ty) => {
            lanewise!(imm, |a: $w| (a >> imm) as $p)
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

/// `r[0]` = `r[2]` with `part` bits at bit `imm` replaced by `r[1]` and the bits above cleared; -1 means bit
/// 0.
pub(crate) fn insert(part: u32, whole: u32) -> Option<Handler> {
    macro_rules! insert {
        ($p:ty, $w:ty) => {
            lanewise!(imm, |a: $p, b: $w| if imm < 0 { <$w>::from(a) } else { b | <$w>::from(a) << imm })
        };
    }
    Some(match (part, whole) {
        (8, 16) => insert!(u8, u16),
        (8, 32) => insert!(u8, u32),
        (8, 64) => insert!(u8, u64),
        (16, 32) => insert!(u16, u32),
        (16, 64) => insert!(u16, u64),
        (32, 64) => insert!(u32, u64),
        (64, 128) => insert!(u64, u128),
        (32, 128) => insert!(u32, u128),
        _ => return None,
    })
}

/// `cvt.f16x2.f32` and similar: the first source goes to the upper half.
pub(crate) fn pack_halves(bf16: bool) -> Handler {
    if bf16 {
        lanewise!(imm, |a: f32, b: f32| {
            u32::from(to_bf16(f64::from(a), imm)) << 16 | u32::from(to_bf16(f64::from(b), imm))
        })
    } else {
        lanewise!(imm, |a: f32, b: f32| {
            u32::from(to_f16(f64::from(a), imm)) << 16 | u32::from(to_f16(f64::from(b), imm))
        })
    }
}

/// Predicate `r[0]`: whether the generic address `r[1]` is in the space of window `imm` (0: global). `r[2]`
/// is 1 for this block's shared memory only.
pub(crate) const IS_SPACE: Handler = handler!(|w, i, m| {
    let a: [u64; LANES] = get(w, i.r[1]);
    let mut bits = 0;
    for l in 0..LANES {
        let space = match memory::space_of(a[l]) {
            Space::Shared if i.r[2] == 1 && memory::rank_of(w, a[l]) != w.block().rank => continue,
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

/// A rank that no block has, but whose addresses fit in 32 bits.
const NO_RANK: u32 = 254;

/// `mapa`: `r[0]` = the shared or generic address `r[1]` in the block whose rank is `r[2]` (32 bits).
pub(crate) fn mapa(bits: u32) -> Option<Handler> {
    macro_rules! mapa {
        ($t:ty) => {
            lanewise!(|a: $t, rank: u32| {
                let (window, offset) = (u64::from(a) / WINDOW_SIZE * WINDOW_SIZE, u64::from(a) % RANK);
                (window + offset + (u64::from(rank.min(NO_RANK)) + 1) * RANK) as $t
            })
        };
    }
    match bits {
        32 => Some(mapa!(u32)),
        64 => Some(mapa!(u64)),
        _ => None,
    }
}

/// `getctarank`: `r[0]` (32 bits) = the rank of the block whose shared memory contains address `r[1]`.
pub(crate) fn rank(bits: u32) -> Option<Handler> {
    macro_rules! rank {
        ($t:ty) => {
            handler!(|w, i, m| {
                let a: [$t; LANES] = get(w, i.r[1]);
                let ranks = a.map(|a| memory::rank_of(w, u64::from(a)));
                put(w, i.r[0], m, &ranks);
                Flow::Next
            })
        };
    }
    match bits {
        32 => Some(rank!(u32)),
        64 => Some(rank!(u64)),
        _ => None,
    }
}

/// `r[0]` = `r[1]` + `imm`: converts between a space's addresses and generic ones.
pub(crate) const OFFSET: Handler = lanewise!(imm, |a: u64| a.wrapping_add(imm as u64));
