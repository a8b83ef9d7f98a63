//! The register machine that PTX is lowered to.
//!
//! An instruction works on the 32 lanes of a warp. Its operands are *rows*: 32 values of one width, next to each
//! other, at a byte offset in the frame of the function (or, with [`CONST`] set, in the function's constants), so
//! that rustc vectorises each operation over the lanes. A predicate's row is one word, a bit for each lane.
//!
//! An instruction names its operation by the [`Handler`] that executes it; a compiler to machine code would
//! look at the same handlers' identity ([`Inst::op`]) and translate rows to vector registers.

use std::sync::Arc;

use crate::error::Unsupported;
use crate::exec::warp::Warp;

/// Operand bit: the row is one of the function's constants.
pub(crate) const CONST: u32 = 1 << 31;
/// No guard, no operand.
pub(crate) const NONE: u32 = u32::MAX;

/// First generic address of a block's shared memory.
pub(crate) const SHARED_WINDOW: u64 = 0x0100_0000_0000;
/// First generic address of a thread's local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x0110_0000_0000;
/// First generic address of a kernel's parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x0120_0000_0000;
/// "Addresses" of functions: 16 apart.
pub(crate) const FUNCTION_WINDOW: u64 = 0x0130_0000_0000;
/// Size of each of these windows.
pub(crate) const WINDOW_SIZE: u64 = 0x0010_0000_0000;
/// Where shared memory begins that is the system's own (`%reserved_smem_offset_begin`), beyond all that a kernel can have; and
/// how much there is.
pub(crate) const RESERVED: u64 = 1 << 20;
pub(crate) const RESERVED_BYTES: u64 = 1 << 10;
/// Shared addresses beyond this are of a block of the cluster: that whose rank, plus one, is what this many fit into them.
pub(crate) const RANK: u64 = 1 << 24;

/// What the interpreter does after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Flow {
    /// Goes on with the next one.
    Next,
    /// Stops: the warp's fault is set.
    Fault,
}

/// Executes an instruction for the lanes of the mask.
pub(crate) type ExecFn = unsafe fn(&mut Warp, &Inst, u32) -> Flow;

/// An operation's implementations.
#[derive(Clone, Copy)]
pub(crate) struct Handler {
    /// For any CPU.
    pub base: ExecFn,
    /// For a CPU with AVX2 and FMA; the same as `base` elsewhere.
    pub wide: ExecFn,
}

/// How an instruction takes part in control flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only its handler matters.
    Plain,
    /// Only its handler matters, but all lanes of the member mask in row `r[5]` must be there first.
    Converge,
    /// To `r[0]`.
    Branch,
    /// To one of the targets in the extension `r[0]`, chosen by row `r[1]`.
    BranchIndexed,
    /// Function `r[0]`, arguments in the extension `r[1]`.
    Call,
    /// Function address in row `r[0]`, arguments in the extension `r[1]`.
    CallIndirect,
    /// From a function, or from the kernel.
    Return,
    /// Ends the thread.
    Exit,
    /// `alloca`: address row `r[0]` (64 bits, or 32 if `r[2]` is 1), bytes in row `r[1]`, alignment `imm`.
    Alloca,
    /// `stacksave`: row `r[0]` (64 bits, or 32 if `r[2]` is 1).
    StackSave,
    /// `stackrestore`: row `r[0]`, as above.
    StackRestore,
    /// A block barrier: number in row `r[0]`, thread count in row `r[1]` or [`NONE`]; `r[2]` says which kind;
    /// reductions take the predicate row `r[3]` (negated if `imm` is 1) and write row `r[4]`.
    Barrier,
    /// `bar.warp.sync` with the member mask in row `r[5]`.
    WarpSync,
    /// `barrier.cluster.arrive`.
    ClusterArrive,
    /// `barrier.cluster.wait`.
    ClusterWait,
}

/// Values of `r[2]` of a [`Kind::Barrier`].
pub(crate) mod barrier {
    pub const SYNC: u32 = 0;
    pub const ARRIVE: u32 = 1;
    pub const RED_POPC: u32 = 2;
    pub const RED_AND: u32 = 3;
    pub const RED_OR: u32 = 4;
}

/// What the rows of a [`Kind::Converge`] are, for executing it for lanes at several places together. The upper half of
/// [`Inst::flags`] is the argument of [`joint::roles`]'s table.
pub(crate) mod joint {
    /// What a row is.
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
    /// Only for lanes at the same instruction.
    pub const ALIGNED: u8 = 7;

    /// What the rows of an instruction with these flags are.
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
    /// Rows, targets and small numbers, as the handler or kind defines.
    pub r: [u32; 6],
    /// An immediate: address offset, flags.
    pub imm: i64,
    /// Predicate row that guards it, or [`NONE`].
    pub guard: u32,
    pub guard_negated: bool,
    /// Of a memory access: bit 0, addresses in `r[4]` are 32-bit rows. Of a [`Kind::Converge`]: see [`joint`].
    pub flags: u8,
    pub kind: Kind,
    /// PTX line.
    pub line: u32,
}

/// A row-aligned piece of register memory.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);

/// A function, lowered.
pub(crate) struct Code {
    pub name: String,
    pub insts: Vec<Inst>,
    /// Longer operand lists: the length, then the items.
    pub ext: Vec<u32>,
    /// Bytes of a frame, a multiple of 64.
    pub frame_bytes: u32,
    /// The constants' rows.
    pub consts: Vec<Line>,
    /// Local memory of a call, in bytes, with its parameters; a multiple of 16.
    pub local_bytes: u32,
    /// Offset and size of each parameter and each result in the local memory (functions only).
    pub params: Vec<(u32, u32)>,
    pub returns: Vec<(u32, u32)>,
    /// What stands in for a function that the device runtime defines.
    pub builtin: Option<Builtin>,
    /// Why it cannot run, if it cannot: it has no instructions then.
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
    /// Those by which kernels launch kernels.
    ParameterBuffer,
    LaunchDevice,
    GetLastError,
    PeekAtLastError,
    /// Makes a stream: a name for an order that launches have anyway.
    MakeStream,
    /// Makes an event, which must not measure times.
    MakeEvent,
    /// What is done to either.
    KeepOrder,
    /// Copies and fills, of bytes and of rows.
    CopyAsync,
    CopyRowsAsync,
    FillAsync,
    FillRowsAsync,
    /// Words that the device runtime tells: the device, how many there are, its version.
    TellDevice,
    TellDeviceCount,
    TellVersion,
    /// The text and the name of an error.
    ErrorText,
    ErrorName,
    /// `cudaMalloc` and `cudaFree`: the heap of `malloc`.
    DeviceMalloc,
    DeviceFree,
}

/// A module, lowered.
pub(crate) struct Program {
    pub functions: Vec<Arc<Code>>,
}
