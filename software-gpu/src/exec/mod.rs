//! Execution: a warp-wide interpreter of the register machine.
//!
//! `warp` runs a warp's instructions and keeps its threads together where it can; `block` has what the warps of a
//! block share; `cluster` runs them, with those of other blocks of their cluster. The other modules hold the handlers of instructions, by role.

/// Two functions with the same body, one of them compiled for AVX2 and FMA.
macro_rules! handler {
    (|$w:ident, $i:ident, $m:ident| $body:expr) => {{
        #[allow(unused_variables, unused_unsafe)]
        unsafe fn base(
            $w: &mut $crate::exec::warp::Warp,
            $i: &$crate::lower::program::Inst,
            $m: u32,
        ) -> $crate::lower::program::Flow {
            // SAFETY: the lowering gives each handler rows of the width it works on, inside the frame.
            unsafe { $body }
        }
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt"))]
        #[allow(unused_variables, unused_unsafe)]
        unsafe fn wide(
            $w: &mut $crate::exec::warp::Warp,
            $i: &$crate::lower::program::Inst,
            $m: u32,
        ) -> $crate::lower::program::Flow {
            // SAFETY: as in `base`.
            unsafe { $body }
        }
        $crate::lower::program::Handler { base, wide }
    }};
}

pub(crate) mod asynchronous;
pub(crate) mod atomic;
pub(crate) mod block;
pub(crate) mod builtin;
pub(crate) mod cluster;
pub(crate) mod convert;
pub(crate) mod exact;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod int;
pub(crate) mod matrix;
pub(crate) mod memory;
pub(crate) mod moves;
pub(crate) mod reduction;
pub(crate) mod rows;
pub(crate) mod special;
pub(crate) mod tensor;
pub(crate) mod tensor_copy;
pub(crate) mod texture;
pub(crate) mod video;
pub(crate) mod warp;
pub(crate) mod warp_ops;
pub(crate) mod whole;

use crate::lower::program::{ExecFn, Handler};

/// The implementation of a handler for this CPU.
pub(crate) fn select(handler: Handler) -> ExecFn {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("popcnt")
    {
        return handler.wide;
    }
    handler.base
}
