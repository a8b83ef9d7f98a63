//! Execution: a warp-wide interpreter of the register machine.
//!
//! `rows` reads and writes operands; most other modules contain the instructions' handlers, by family. They
//! do not use the modules that run them: `interpreter` runs a warp's instructions and keeps its threads
//! together where possible, and `cluster` runs the warps of a cluster's blocks.

/// Compiles a body twice, once for AVX2 and FMA.
macro_rules! handler {
    (|$w:ident, $i:ident, $m:ident| $body:expr) => {{
        #[allow(unused_variables, unused_unsafe)]
        unsafe fn base(
            $w: &mut $crate::machine::warp::Warp,
            $i: &$crate::machine::program::Inst,
            $m: u32,
        ) -> $crate::machine::warp::Flow {
            // SAFETY: the lowering gives each handler rows of the width that it works on, inside the frame.
            unsafe { $body }
        }
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt"))]
        #[allow(unused_variables, unused_unsafe)]
        unsafe fn wide(
            $w: &mut $crate::machine::warp::Warp,
            $i: &$crate::machine::program::Inst,
            $m: u32,
        ) -> $crate::machine::warp::Flow {
            // SAFETY: the lowering gives each handler rows of the width that it works on, inside the frame.
            unsafe { $body }
        }
        $crate::machine::program::Handler { base, wide }
    }};
}

/// A handler that applies a function to each lane: sources in `r[1..]`, result in `r[0]`. The function may
/// use the instruction's immediate, under the name that comes first.
macro_rules! lanewise {
    ($($imm:ident,)? |$a:ident $(: $A:ty)?| $f:expr) => {
        lanewise!(@ map1 [$($imm)?] |$a $(: $A)?| $f)
    };
    ($($imm:ident,)? |$a:ident $(: $A:ty)?, $b:ident $(: $B:ty)?| $f:expr) => {
        lanewise!(@ map2 [$($imm)?] |$a $(: $A)?, $b $(: $B)?| $f)
    };
    ($($imm:ident,)? |$a:ident $(: $A:ty)?, $b:ident $(: $B:ty)?, $c:ident $(: $C:ty)?| $f:expr) => {
        lanewise!(@ map3 [$($imm)?] |$a $(: $A)?, $b $(: $B)?, $c $(: $C)?| $f)
    };
    ($($imm:ident,)? |$a:ident: $A:ty, $b:ident: $B:ty, $c:ident: $C:ty, $d:ident: $D:ty| $f:expr) => {
        lanewise!(@ map4 [$($imm)?] |$a: $A, $b: $B, $c: $C, $d: $D| $f)
    };
    (@ $map:ident [$($imm:ident)?] $f:expr) => {
        handler!(|w, i, m| {
            $(let $imm = i.imm;)?
            $crate::exec::rows::$map(w, i, m, $f)
        })
    };
}

pub(crate) mod asynchronous;
pub(crate) mod atomic;
pub(crate) mod cluster;
pub(crate) mod convert;
pub(crate) mod device_runtime;
pub(crate) mod exact_f64;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod int;
mod interpreter;
pub(crate) mod matrix;
pub(crate) mod memory;
pub(crate) mod moves;
pub(crate) mod reduction;
pub(crate) mod rows;
pub(crate) mod special_register;
pub(crate) mod tensor_copy;
pub(crate) mod tensor_core;
pub(crate) mod texture;
pub(crate) mod vector_access;
pub(crate) mod video;
pub(crate) mod warp_ops;

use crate::machine::program::{ExecFn, Handler};

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
