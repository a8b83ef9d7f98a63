//! The device runtime's functions, which PTX declares without a body.

use crate::error::Result;
use crate::lower::types::Placement;
use crate::machine::program::{Builtin, Code};
use crate::machine::properties::MAX_LOCAL;
use crate::ptx::ast::{Function, Var};

/// The function of the device runtime with this name.
pub(super) fn builtin(name: &str) -> Option<Builtin> {
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
pub(super) fn code_without_body(f: &Function<'_>) -> Result<Code> {
    let mut local = Placement::new("local memory", f.name, MAX_LOCAL);
    let mut place = |vars: &[Var<'_>]| -> Result<Vec<(u32, u32)>> {
        vars.iter().map(|v| local.place_variable(v)).collect()
    };
    let params = place(&f.params)?;
    let returns = place(&f.returns)?;
    Ok(Code {
        name: f.name.into(),
        insts: Vec::new(),
        ext: Vec::new(),
        frame_bytes: 64,
        consts: Vec::new(),
        local_bytes: local.size.next_multiple_of(16),
        local_align: local.align,
        params,
        returns,
        builtin: builtin(f.name),
        unsupported: None,
    })
}
