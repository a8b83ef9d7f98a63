//! The register machine that PTX is lowered to.
//!
//! An instruction works on the 32 lanes of a warp. Its operands are *rows*: 32 adjacent values of one width
//! at a byte offset in the function's frame (or, with [`CONST`] set, in the function's constants), so that
//! rustc vectorizes each operation over the lanes. A predicate's row is one word with a bit for each lane.
//!
//! An instruction refers to its operation by the [`Handler`] that executes it. A compiler to machine code
//! could use the handler's identity ([`Inst::op`]) and map rows to vector registers.

use std::sync::Arc;

use crate::error::Unsupported;
use crate::machine::address::FunctionAddresses;
use crate::machine::row::Line;
use crate::machine::warp::{Flow, Warp};

/// Operand bit: the row is one of the function's constants.
pub(crate) const CONST: u32 = 1 << 31;
/// Stands for an absent guard or operand.
pub(crate) const NONE: u32 = u32::MAX;

/// Executes an instruction for the lanes in the mask.
pub(crate) type ExecFn = unsafe fn(&mut Warp, &Inst, u32) -> Flow;

/// The implementations of an operation.
#[derive(Clone, Copy)]
pub(crate) struct Handler {
    /// For any CPU.
    pub base: ExecFn,
    /// For CPUs with AVX2 and FMA; on others the same as `base`.
    pub wide: ExecFn,
}

/// How an instruction affects control flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Runs its handler only.
    Plain,
    /// Runs its handler once all lanes of the member mask in row `r[5]` have arrived.
    Converge,
    /// Jumps to `r[0]`.
    Branch,
    /// Jumps to one of the targets in the extension `r[0]`, selected by row `r[1]`.
    BranchIndexed,
    /// Calls function `r[0]` with the arguments in the extension `r[1]`.
    Call,
    /// Calls the function whose address is in row `r[0]`, with the arguments in the extension `r[1]`.
    CallIndirect,
    /// Returns from a function or ends the kernel.
    Return,
    /// Ends the thread.
    Exit,
    /// `alloca`: address row `r[0]` (64 bits, or 32 if `r[2]` is 1), bytes in row `r[1]`, alignment `imm`.
    Alloca,
    /// `stacksave`: row `r[0]` (64 bits, or 32 if `r[2]` is 1).
    StackSave,
    /// `stackrestore`: row `r[0]` (64 bits, or 32 if `r[2]` is 1).
    StackRestore,
    /// A block barrier: number in row `r[0]`, thread count in row `r[1]` or [`NONE`], kind in `r[2]`.
    /// Reductions read the predicate row `r[3]` (negated if `imm` is 1) and write row `r[4]`.
    Barrier,
    /// `bar.warp.sync` with the member mask in row `r[5]`.
    WarpSync,
    /// `barrier.cluster.arrive`.
    ClusterArrive,
    /// `barrier.cluster.wait`.
    ClusterWait,
}

/// The values of `r[2]` in a [`Kind::Barrier`].
pub(crate) mod barrier {
    pub const SYNC: u32 = 0;
    pub const ARRIVE: u32 = 1;
    pub const RED_POPC: u32 = 2;
    pub const RED_AND: u32 = 3;
    pub const RED_OR: u32 = 4;
}

/// The roles of a [`Kind::Converge`]'s rows, so that it can run once for lanes at different instructions. The
/// upper half of [`Inst::flags`] is the argument of [`joint::roles`].
pub(crate) mod joint {
    /// The role of a row.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Role {
        No,
        In32,
        In64,
        /// A predicate, negated if the instruction's `imm` is 1.
        InPred,
        Out32,
        OutPred,
    }
    use Role::{In32, In64, InPred, No, Out32, OutPred};

    pub const SHUFFLE: u8 = 0;
    pub const VOTE: u8 = 1;
    pub const BALLOT: u8 = 2;
    pub const MATCH_32: u8 = 3;
    pub const MATCH_64: u8 = 4;
    pub const REDUX: u8 = 5;
    pub const ELECT: u8 = 6;
    /// All lanes must be at the same instruction.
    pub const ALIGNED: u8 = 7;

    /// The roles of the rows of an instruction with these flags.
    pub fn roles(flags: u8) -> [Role; 5] {
        ROLES[(flags >> 4) as usize % ROLES.len()]
    }

    const ROLES: [[Role; 5]; 8] = [
        [Out32, In32, In32, In32, OutPred],
        [OutPred, InPred, No, No, No],
        [Out32, InPred, No, No, No],
        [Out32, In32, OutPred, No, No],
        [Out32, In64, OutPred, No, No],
        [Out32, In32, No, No, No],
        [Out32, OutPred, No, No, No],
        [No; 5],
    ];
}

/// One instruction.
#[derive(Clone)]
pub(crate) struct Inst {
    pub exec: ExecFn,
    /// Rows, targets and small numbers, as the handler or kind defines them.
    pub r: [u32; 6],
    /// An immediate value, such as an address offset or flags.
    pub imm: i64,
    /// The predicate row that guards the instruction, or [`NONE`].
    pub guard: u32,
    pub guard_negated: bool,
    /// For a memory access, bit 0: the addresses in `r[4]` are 32 bits wide. For a [`Kind::Converge`], see
    /// [`joint`].
    pub flags: u8,
    pub kind: Kind,
    /// The line in the PTX.
    pub line: u32,
}

/// A lowered function.
pub(crate) struct Code {
    pub name: String,
    pub insts: Vec<Inst>,
    /// Longer operand lists, each as its length followed by its items.
    pub ext: Vec<u32>,
    /// Size of a frame in bytes, a multiple of 64.
    pub frame_bytes: u32,
    /// The constants' rows.
    pub consts: Vec<Line>,
    /// Local memory of a call in bytes, including its parameters; a multiple of 16.
    pub local_bytes: u32,
    /// Alignment of a call's local memory.
    pub local_align: u32,
    /// Offset and size of each parameter and each result in local memory. Empty for kernels.
    pub params: Vec<(u32, u32)>,
    pub returns: Vec<(u32, u32)>,
    /// The device runtime's function that this stands for.
    pub builtin: Option<Builtin>,
    /// Why the function cannot run; it then has no instructions.
    pub unsupported: Option<Unsupported>,
}

/// Functions of the device runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builtin {
    Vprintf,
    AssertFail,
    Malloc,
    Free,
    SetCondition,
    /// First of the functions by which kernels launch kernels.
    ParameterBuffer,
    LaunchDevice,
    GetLastError,
    PeekAtLastError,
    /// Creates a stream. It has no effect, because launches from a kernel run in order anyway.
    MakeStream,
    /// Creates an event, which must have timing disabled.
    MakeEvent,
    /// Destroys, records or waits for one. It has no effect, because launches run in order.
    KeepOrder,
    /// Copies and fills, linear and 2D.
    CopyAsync,
    CopyRowsAsync,
    FillAsync,
    FillRowsAsync,
    /// Values that the device runtime reports: the device, the number of devices, the version.
    TellDevice,
    TellDeviceCount,
    TellVersion,
    /// The text and name of an error.
    ErrorText,
    ErrorName,
    /// `cudaMalloc` and `cudaFree`, which use the heap of `malloc`.
    DeviceMalloc,
    DeviceFree,
}

/// A lowered module.
pub(crate) struct Program {
    pub functions: Vec<Arc<Code>>,
    /// The "addresses" of its functions.
    pub addresses: FunctionAddresses,
}
