//! How handlers read and write rows, the 32 lanes of an operand.

use crate::machine::program::{CONST, Inst};
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};

/// The row of an operand.
///
/// # Safety
///
/// `operand` is a row of `T` in the current frame or constants, as the lowering allocates them.
#[inline(always)]
pub(crate) unsafe fn row<T>(w: &Warp, operand: u32) -> *mut [T; LANES] {
    // SAFETY: the caller guarantees that the offset is inside the frame's or the constants' memory.
    unsafe { w.bases[(operand >> 31) as usize].add((operand & !CONST) as usize).cast() }
}

/// Reads the 32 values of an operand.
///
/// # Safety
///
/// As for [`row`].
#[inline(always)]
pub(crate) unsafe fn get<T: Copy>(w: &Warp, operand: u32) -> [T; LANES] {
    // SAFETY: the caller guarantees a row of `T`.
    unsafe { *row::<T>(w, operand) }
}

/// Writes the lanes in `mask`.
///
/// # Safety
///
/// As for [`row`]; `operand` is not a constant.
#[inline(always)]
pub(crate) unsafe fn put<T: Copy>(w: &Warp, operand: u32, mask: u32, values: &[T; LANES]) {
    // SAFETY: the caller guarantees a row of `T` that is not a constant.
    unsafe {
        let d = row::<T>(w, operand);
        if mask == u32::MAX {
            *d = *values;
        } else {
            for l in 0..LANES {
                if mask >> l & 1 != 0 {
                    (*d)[l] = values[l];
                }
            }
        }
    }
}

/// Reads the bits of a predicate.
///
/// # Safety
///
/// `operand` is a predicate row.
#[inline(always)]
pub(crate) unsafe fn pred(w: &Warp, operand: u32) -> u32 {
    // SAFETY: the caller guarantees a predicate row.
    unsafe { *w.bases[(operand >> 31) as usize].add((operand & !CONST) as usize).cast::<u32>() }
}

/// Writes the bits in `mask` of a predicate.
///
/// # Safety
///
/// `operand` is a predicate row and not a constant.
#[inline(always)]
pub(crate) unsafe fn put_pred(w: &Warp, operand: u32, mask: u32, bits: u32) {
    // SAFETY: the caller guarantees a predicate row that is not a constant.
    unsafe {
        let p = w.bases[0].add(operand as usize).cast::<u32>();
        *p = (*p & !mask) | (bits & mask);
    }
}

macro_rules! map {
    ($name:ident, $($x:ident: $X:ident = $n:literal),*) => {
        /// Applies `f` to each lane: sources in `r[1..]`, result in `r[0]`.
        ///
        /// # Safety
        ///
        /// The rows have the types of `f`.
        #[inline(always)]
        pub(crate) unsafe fn $name<$($X: Copy,)* D: Copy>(
            w: &Warp,
            i: &Inst,
            mask: u32,
            f: impl Fn($($X),*) -> D,
        ) -> Flow {
            // SAFETY: the caller guarantees the rows' types. The sources are copied first, because the
            // result's row may be one of them.
            unsafe {
                $(let $x: [$X; LANES] = get(w, i.r[$n]);)*
                let d = row::<D>(w, i.r[0]);
                if mask == u32::MAX {
                    for l in 0..LANES {
                        (*d)[l] = f($($x[l]),*);
                    }
                } else {
                    let old = *d;
                    for l in 0..LANES {
                        let value = f($($x[l]),*);
                        (*d)[l] = if mask >> l & 1 != 0 { value } else { old[l] };
                    }
                }
                Flow::Next
            }
        }
    };
}
map!(map1, a: A = 1);
map!(map2, a: A = 1, b: B = 2);
map!(map3, a: A = 1, b: B = 2, c: C = 3);
map!(map4, a: A = 1, b: B = 2, c: C = 3, e: E = 4);

macro_rules! checked {
    ($name:ident, $($x:ident: $X:ident = $n:literal),*) => {
        /// Like the plain map, but lanes whose result is `rare` are recomputed by `slow`, which keeps the
        /// usual case short and free of branches.
        ///
        /// # Safety
        ///
        /// The rows have the types of `f`.
        #[inline(always)]
        pub(crate) unsafe fn $name<$($X: Copy,)* D: Copy + Default>(
            w: &Warp,
            i: &Inst,
            mask: u32,
            f: impl Fn($($X),*) -> D,
            rare: impl Fn(D) -> bool,
            slow: impl Fn($($X),*) -> D,
        ) -> Flow {
            // SAFETY: the caller guarantees the rows' types.
            unsafe {
                $(let $x: [$X; LANES] = get(w, i.r[$n]);)*
                let mut out = [D::default(); LANES];
                let mut any = false;
                for l in 0..LANES {
                    out[l] = f($($x[l]),*);
                    any |= rare(out[l]);
                }
                if any {
                    for l in 0..LANES {
                        if rare(out[l]) {
                            out[l] = slow($($x[l]),*);
                        }
                    }
                }
                put(w, i.r[0], mask, &out);
                Flow::Next
            }
        }
    };
}
checked!(map1_checked, a: A = 1);
checked!(map2_checked, a: A = 1, b: B = 2);
checked!(map3_checked, a: A = 1, b: B = 2, c: C = 3);

/// The lanes for which `f` holds, as bits.
///
/// # Safety
///
/// The rows have the types `A` and `B`.
#[inline(always)]
pub(crate) unsafe fn compare<A: Copy, B: Copy>(w: &Warp, a: u32, b: u32, f: impl Fn(A, B) -> bool) -> u32 {
    // SAFETY: the caller guarantees the rows' types.
    unsafe {
        let a: [A; LANES] = get(w, a);
        let b: [B; LANES] = get(w, b);
        let mut bits = 0;
        for l in 0..LANES {
            bits |= u32::from(f(a[l], b[l])) << l;
        }
        bits
    }
}
