//! Lowers the syntax tree to the register machine.
//!
//! In reading order:
//! - `program`: the register machine
//! - `link`: links the files of a module, places its variables and lowers its functions
//! - `function`: one function's statements, registers and symbols
//! - `inst`: an instruction's modifiers and the choice of the module that lowers it; the modules after it
//!   lower instructions by family

mod access;
mod asynchronous;
mod control;
mod function;
mod inst;
pub(crate) mod link;
mod matrix;
pub(crate) mod program;
mod select;
mod texture;
mod video;

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::ptx::ast::{Function, Var};
use function::Symbol;
use program::{Builtin, Code};

/// The 32-bit registers that a block can have.
pub(crate) const BLOCK_REGISTERS: u32 = 1 << 16;
/// The most blocks in a cluster.
pub(crate) const MAX_CLUSTER: u32 = 16;

/// The width in bits of a value of type `ty`, or `None` if no value can have that type.
pub(crate) fn type_bits(ty: &str) -> Option<u32> {
    Some(match ty {
        "u8" | "s8" | "b8" => 8,
        "u16" | "s16" | "b16" | "f16" | "bf16" => 16,
        "u32" | "s32" | "b32" | "f32" | "f16x2" | "bf16x2" | "u16x2" | "s16x2" => 32,
        "u64" | "s64" | "b64" | "f64" | "texref" | "samplerref" | "surfref" => 64,
        "b128" => 128,
        "pred" => 1,
        _ => return None,
    })
}

/// The size and alignment of a variable in bytes.
pub(crate) fn layout(var: &Var<'_>) -> Result<(u64, u32)> {
    let bits = type_bits(var.ty).filter(|&b| b >= 8).ok_or_else(|| Error::InvalidPtx {
        line: var.line,
        message: format!("a variable of type .{}", var.ty),
    })?;
    let element = u64::from(bits / 8 * var.vector);
    let size = element.checked_mul(var.elements.unwrap_or(1)).filter(|&s| s < 1 << 40);
    let size = size
        .ok_or_else(|| Error::InvalidPtx { line: var.line, message: format!("{} is too large", var.name) })?;
    let align = var.align.max(element as u32);
    if !align.is_power_of_two() {
        return Err(Error::InvalidPtx {
            line: var.line,
            message: format!("alignment {align} of {}", var.name),
        });
    }
    Ok((size, align))
}

/// The symbols that all functions of a file see.
#[derive(Default)]
pub(crate) struct Context<'a> {
    pub symbols: HashMap<&'a str, Symbol<'a>>,
}

/// The function of the device runtime with this name.
fn builtin(name: &str) -> Option<Builtin> {
    Some(match name {
        "vprintf" => Builtin::Vprintf,
        "__assertfail" => Builtin::AssertFail,
        "malloc" => Builtin::Malloc,
        "free" => Builtin::Free,
        "cudaGraphSetConditional" => Builtin::SetCondition,
        "__cudaCDP2GetParameterBufferV2" => Builtin::ParameterBuffer,
        "__cudaCDP2LaunchDeviceV2" | "__cudaCDP2LaunchDeviceV2_ptsz" => Builtin::LaunchDevice,
        "__cudaCDP2GetLastError" => Builtin::GetLastError,
        "__cudaCDP2PeekAtLastError" => Builtin::PeekAtLastError,
        "__cudaCDP2StreamCreateWithFlags" => Builtin::MakeStream,
        "__cudaCDP2EventCreateWithFlags" => Builtin::MakeEvent,
        "__cudaCDP2MemcpyAsync" | "__cudaCDP2MemcpyAsync_ptsz" => Builtin::CopyAsync,
        "__cudaCDP2Memcpy2DAsync" | "__cudaCDP2Memcpy2DAsync_ptsz" => Builtin::CopyRowsAsync,
        "__cudaCDP2MemsetAsync" | "__cudaCDP2MemsetAsync_ptsz" => Builtin::FillAsync,
        "__cudaCDP2Memset2DAsync" | "__cudaCDP2Memset2DAsync_ptsz" => Builtin::FillRowsAsync,
        "__cudaCDP2GetDevice" => Builtin::TellDevice,
        "__cudaCDP2GetDeviceCount" => Builtin::TellDeviceCount,
        "__cudaCDP2RuntimeGetVersion" => Builtin::TellVersion,
        "__cudaCDP2GetErrorString" => Builtin::ErrorText,
        "__cudaCDP2GetErrorName" => Builtin::ErrorName,
        "__cudaCDP2Malloc" => Builtin::DeviceMalloc,
        "__cudaCDP2Free" => Builtin::DeviceFree,
        "__cudaCDP2StreamDestroy"
        | "__cudaCDP2EventDestroy"
        | "__cudaCDP2EventRecord"
        | "__cudaCDP2EventRecord_ptsz"
        | "__cudaCDP2EventRecordWithFlags"
        | "__cudaCDP2EventRecordWithFlags_ptsz"
        | "__cudaCDP2StreamWaitEvent"
        | "__cudaCDP2StreamWaitEvent_ptsz" => Builtin::KeepOrder,
        _ => return None,
    })
}

/// The code of a function without a body, which is one of the device runtime's.
fn code_without_body(f: &Function<'_>) -> Result<Code> {
    let mut at = 0u32;
    let mut place = |vars: &[Var<'_>]| -> Result<Vec<(u32, u32)>> {
        vars.iter()
            .map(|v| {
                let (size, align) = layout(v)?;
                at = at.next_multiple_of(align);
                let start = at;
                at += size as u32;
                Ok((start, size as u32))
            })
            .collect()
    };
    let params = place(&f.params)?;
    let returns = place(&f.returns)?;
    Ok(Code {
        name: f.name.into(),
        insts: Vec::new(),
        ext: Vec::new(),
        frame_bytes: 64,
        consts: Vec::new(),
        local_bytes: at.next_multiple_of(16),
        params,
        returns,
        builtin: builtin(f.name),
        unsupported: None,
    })
}
