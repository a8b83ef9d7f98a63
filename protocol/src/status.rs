//! The result of an operation: CUDA's `CUresult`.

use std::fmt;

/// A `CUresult` by number. It may be one that this release has no name for: whatever the server's driver
/// returned.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status($value);)*

            /// The name in `cuda.h` without its `CUDA_` or `CUDA_ERROR_` prefix, if this release knows it.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    /// `CUDA_SUCCESS`
    SUCCESS = 0;
    /// `CUDA_ERROR_INVALID_VALUE`
    INVALID_VALUE = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`
    OUT_OF_MEMORY = 2;
    /// `CUDA_ERROR_NOT_INITIALIZED`
    NOT_INITIALIZED = 3;
    /// `CUDA_ERROR_DEINITIALIZED`
    DEINITIALIZED = 4;
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE`; every call returns it once a session is lost
    DEVICE_UNAVAILABLE = 46;
    /// `CUDA_ERROR_NO_DEVICE`
    NO_DEVICE = 100;
    /// `CUDA_ERROR_INVALID_DEVICE`
    INVALID_DEVICE = 101;
    /// `CUDA_ERROR_INVALID_IMAGE`
    INVALID_IMAGE = 200;
    /// `CUDA_ERROR_INVALID_CONTEXT`
    INVALID_CONTEXT = 201;
    /// `CUDA_ERROR_MAP_FAILED`
    MAP_FAILED = 205;
    /// `CUDA_ERROR_ALREADY_MAPPED`
    ALREADY_MAPPED = 208;
    /// `CUDA_ERROR_NO_BINARY_FOR_GPU`
    NO_BINARY_FOR_GPU = 209;
    /// `CUDA_ERROR_NOT_MAPPED`
    NOT_MAPPED = 211;
    /// `CUDA_ERROR_INVALID_PTX`
    INVALID_PTX = 218;
    /// `CUDA_ERROR_INVALID_SOURCE`
    INVALID_SOURCE = 300;
    /// `CUDA_ERROR_FILE_NOT_FOUND`
    FILE_NOT_FOUND = 301;
    /// `CUDA_ERROR_OPERATING_SYSTEM`
    OPERATING_SYSTEM = 304;
    /// `CUDA_ERROR_INVALID_HANDLE`
    INVALID_HANDLE = 400;
    /// `CUDA_ERROR_ILLEGAL_STATE`
    ILLEGAL_STATE = 401;
    /// `CUDA_ERROR_NOT_FOUND`
    NOT_FOUND = 500;
    /// `CUDA_ERROR_NOT_READY`
    NOT_READY = 600;
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`
    ILLEGAL_ADDRESS = 700;
    /// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`
    LAUNCH_OUT_OF_RESOURCES = 701;
    /// `CUDA_ERROR_LAUNCH_TIMEOUT`
    LAUNCH_TIMEOUT = 702;
    /// `CUDA_ERROR_CONTEXT_IS_DESTROYED`
    CONTEXT_IS_DESTROYED = 709;
    /// `CUDA_ERROR_ASSERT`
    ASSERT = 710;
    /// `CUDA_ERROR_HARDWARE_STACK_ERROR`
    HARDWARE_STACK_ERROR = 714;
    /// `CUDA_ERROR_ILLEGAL_INSTRUCTION`
    ILLEGAL_INSTRUCTION = 715;
    /// `CUDA_ERROR_MISALIGNED_ADDRESS`
    MISALIGNED_ADDRESS = 716;
    /// `CUDA_ERROR_INVALID_ADDRESS_SPACE`
    INVALID_ADDRESS_SPACE = 717;
    /// `CUDA_ERROR_INVALID_PC`
    INVALID_PC = 718;
    /// `CUDA_ERROR_LAUNCH_FAILED`
    LAUNCH_FAILED = 719;
    /// `CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE`
    COOPERATIVE_LAUNCH_TOO_LARGE = 720;
    /// `CUDA_ERROR_NOT_PERMITTED`
    NOT_PERMITTED = 800;
    /// `CUDA_ERROR_NOT_SUPPORTED`
    NOT_SUPPORTED = 801;
    /// `CUDA_ERROR_UNKNOWN`
    UNKNOWN = 999;
}

impl Status {
    /// Whether this is `CUDA_SUCCESS`.
    pub fn is_success(self) -> bool {
        self == Status::SUCCESS
    }

    /// `Ok` for success, the status itself as the error otherwise.
    pub fn ok(self) -> Result<(), Status> {
        if self.is_success() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some("SUCCESS") => f.write_str("CUDA_SUCCESS"),
            Some(name) => write!(f, "CUDA_ERROR_{name}"),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({})", self.0)
    }
}

impl std::error::Error for Status {}
