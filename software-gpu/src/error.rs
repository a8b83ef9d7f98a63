//! Errors, with a message that says what to do and the CUDA driver's number for each.

use std::sync::Arc;

/// Where in a program something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Name of the launched kernel (mangled, as in its PTX).
    pub kernel: String,
    /// Name of the executing function: the kernel or a function that it called.
    pub function: String,
    /// Line in the PTX text, from 1.
    pub ptx_line: u32,
    /// `blockIdx`.
    pub block: [u32; 3],
    /// `threadIdx` of the first affected thread.
    pub thread: [u32; 3],
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(
            f,
            "kernel {}, function {}, PTX line {}, block ({bx},{by},{bz}), thread ({tx},{ty},{tz})",
            self.kernel, self.function, self.ptx_line
        )
    }
}

/// What a kernel did wrong. A fault ends the kernel and fails every later operation on its GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An access outside every allocation, or across the end of one.
    #[error("illegal address: {access} of {size} bytes at {space} address {address:#x}")]
    IllegalAddress {
        /// "read", "write" or "atomic operation".
        access: &'static str,
        /// State space in PTX's terms: "global", "shared", "local", "const" or "param".
        space: &'static str,
        /// The address within that space.
        address: u64,
        /// Size of the access in bytes.
        size: u32,
    },
    /// An access at an address that is not a multiple of its size.
    #[error("misaligned address: {size} bytes at {space} address {address:#x}")]
    MisalignedAddress {
        /// State space in PTX's terms.
        space: &'static str,
        /// The address within that space.
        address: u64,
        /// Size of the access in bytes.
        size: u32,
    },
    /// `assert()` in device code.
    #[error("device-side assertion `{message}` failed in {function} at {file}:{line}")]
    Assert {
        /// The expression.
        message: String,
        /// Source file.
        file: String,
        /// Source line.
        line: u32,
        /// Source function.
        function: String,
    },
    /// `trap` or `__trap()`.
    #[error("trap instruction")]
    Trap,
    /// An indirect call or branch to an address that is no function or label.
    #[error("invalid program counter: {0}")]
    InvalidPc(String),
    /// The threads of a block wait for each other, and none can continue.
    #[error(
        "deadlock: every thread of the block waits at a barrier or a warp-wide instruction that cannot complete"
    )]
    Deadlock,
    /// The call depth, the local memory or the registers of all calls exceed their limit.
    #[error(
        "stack overflow: {bytes} bytes of local memory or registers are needed, {limit} are allowed per thread"
    )]
    StackOverflow {
        /// Bytes needed.
        bytes: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// An instruction with invalid operands, such as an undefined barrier number.
    #[error("illegal instruction: {0}")]
    IllegalInstruction(String),
    /// Stopped by [`crate::Gpu::cancel`].
    #[error("cancelled")]
    Cancelled,
}

/// Something in a function that this GPU does not implement. The function's module loads, but the function
/// cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// The function that contains it (mangled, as in its PTX).
    pub function: String,
    /// Line in the PTX text, from 1.
    pub line: u32,
    /// The instruction or directive.
    pub what: String,
}

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Unsupported { function, line, what } = self;
        write!(f, "{what} in function {function}, PTX line {line}, is not supported by the software GPU")
    }
}

/// Every error of this crate. Cloning is cheap, because a GPU's sticky error is returned to many callers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument is out of range. Nothing was done.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// The GPU has no memory left. Nothing was done.
    #[error("out of memory: {requested} bytes asked for, {free} of {total} free")]
    OutOfMemory {
        /// Bytes requested.
        requested: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of the GPU's memory.
        total: u64,
    },
    /// The host could not provide memory or address space for the GPU's memory.
    #[error("the host refused {what}: {error}")]
    Host {
        /// What was requested.
        what: String,
        /// The operating system's error.
        error: String,
    },
    /// A range given by the host is not entirely inside one allocation.
    #[error("no allocation holds {size} bytes at {address:#x}")]
    NotAllocated {
        /// Device address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// The image is neither PTX nor a fat binary.
    #[error("not a device program: {0}")]
    InvalidImage(String),
    /// The image contains no PTX that this GPU can run (only machine code, or a newer architecture).
    #[error("no PTX for this GPU: {0}")]
    NoBinaryForGpu(String),
    /// PTX with a syntax error or an inconsistency.
    #[error("PTX line {line}: {message}")]
    InvalidPtx {
        /// Line from 1.
        line: u32,
        /// What is wrong.
        message: String,
    },
    /// Valid PTX that uses something this GPU does not implement.
    #[error("PTX line {line}: not supported by the software GPU: {what}")]
    UnsupportedPtx {
        /// Line from 1.
        line: u32,
        /// The instruction or directive.
        what: String,
    },
    /// The kernel uses something that this GPU does not implement. Nothing was launched.
    #[error("kernel {kernel} cannot be launched: {reason}")]
    UnsupportedFunction {
        /// Name of the kernel.
        kernel: String,
        /// What it uses, and where.
        reason: Unsupported,
    },
    /// A name that the module does not define.
    #[error("the module has no {kind} named {name}")]
    NotFound {
        /// "function" or "global".
        kind: &'static str,
        /// The name asked for.
        name: String,
    },
    /// A launch needs more threads or shared memory than the function or the GPU allows.
    #[error("launch out of resources: {0}")]
    LaunchOutOfResources(String),
    /// A cooperative launch has more blocks than can be resident at once.
    #[error("cooperative launch of {blocks} blocks, {limit} fit")]
    CooperativeLaunchTooLarge {
        /// Blocks of the launch.
        blocks: u64,
        /// Blocks that can be resident.
        limit: u64,
    },
    /// A grid that cannot be divided into clusters of this size.
    #[error("invalid clusters: {0}")]
    InvalidClusterSize(String),
    /// The time of an event that has none: it was never recorded, or timing is disabled.
    #[error("the event has no time: {0}")]
    NoTime(&'static str),
    /// A kernel fault. Sticky: every later operation on the GPU returns it.
    #[error("{fault} ({location})")]
    Kernel {
        /// What the kernel did.
        fault: Fault,
        /// Where.
        location: Arc<Location>,
    },
    /// The GPU was told to break down ([`crate::Gpu::break_down`]) with this `CUresult`. Sticky.
    #[error("the GPU has failed (CUresult {0})")]
    Breakdown(u32),
    /// A closure passed to [`crate::Stream::enqueue`] failed. Sticky.
    #[error("stream operation: {0}")]
    Operation(Arc<Error>),
}

impl Error {
    /// The `CUresult` that the CUDA driver gives for this error.
    pub fn cuda_code(&self) -> u32 {
        match self {
            Error::InvalidArgument(_) | Error::NotAllocated { .. } => 1,
            Error::OutOfMemory { .. } | Error::Host { .. } => 2,
            Error::InvalidImage(_) => 200,
            Error::NoBinaryForGpu(_) | Error::UnsupportedFunction { .. } => 209,
            Error::InvalidPtx { .. } | Error::UnsupportedPtx { .. } => 218,
            Error::NotFound { .. } => 500,
            Error::NoTime(_) => 400,
            Error::LaunchOutOfResources(_) => 701,
            Error::CooperativeLaunchTooLarge { .. } => 720,
            Error::InvalidClusterSize(_) => 912,
            Error::Breakdown(code) => *code,
            Error::Operation(e) => e.cuda_code(),
            Error::Kernel { fault, .. } => match fault {
                Fault::IllegalAddress { .. } => 700,
                Fault::Assert { .. } => 710,
                Fault::IllegalInstruction(_) => 715,
                Fault::MisalignedAddress { .. } => 716,
                Fault::InvalidPc(_) => 718,
                Fault::Trap | Fault::Deadlock | Fault::Cancelled => 719,
                Fault::StackOverflow { .. } => 700,
            },
        }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
