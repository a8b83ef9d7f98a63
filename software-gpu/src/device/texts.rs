//! The names and texts of errors, for kernels that ask for them: those that the device runtime can answer.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::device::memory::Memory;

/// Of what CUDA does not know. A name is the same.
const UNRECOGNIZED: &str = "unrecognized error code";

/// Number, name, text.
const ALL: [(u32, &str, &str); 20] = [
    (0, "cudaSuccess", "no error"),
    (1, "cudaErrorInvalidValue", "invalid argument"),
    (2, "cudaErrorMemoryAllocation", "out of memory"),
    (3, "cudaErrorInitializationError", "initialization error"),
    (9, "cudaErrorInvalidConfiguration", "invalid configuration argument"),
    (21, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"),
    (65, "cudaErrorLaunchMaxDepthExceeded", "launch would exceed maximum depth of nested launches"),
    (
        69,
        "cudaErrorLaunchPendingCountExceeded",
        "launch failed because launch would exceed cudaLimitDevRuntimePendingLaunchCount",
    ),
    (98, "cudaErrorInvalidDeviceFunction", "invalid device function"),
    (100, "cudaErrorNoDevice", "no CUDA-capable device is detected"),
    (101, "cudaErrorInvalidDevice", "invalid device ordinal"),
    (400, "cudaErrorInvalidResourceHandle", "invalid resource handle"),
    (600, "cudaErrorNotReady", "device not ready"),
    (700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    (701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"),
    (719, "cudaErrorLaunchFailure", "unspecified launch failure"),
    (800, "cudaErrorNotPermitted", "operation not permitted"),
    (801, "cudaErrorNotSupported", "operation not supported"),
    (
        912,
        "cudaErrorInvalidClusterSize",
        "a kernel launch error has occurred due to cluster misconfiguration",
    ),
    (999, "cudaErrorUnknown", "unknown error"),
];

/// Those that kernels were given, by number and whether it is the name: addresses in the memory of modules.
#[derive(Default)]
pub(crate) struct Texts(Mutex<HashMap<(u32, bool), u64>>);

impl Texts {
    /// The address of a name or a text; 0 if there is no memory for it.
    pub fn address(&self, memory: &Memory, code: u32, name: bool) -> u64 {
        let known = ALL.iter().find(|(number, ..)| *number == code);
        let text = known.map_or(UNRECOGNIZED, |(_, short, long)| if name { short } else { long });
        // All that is not known is one text.
        let key = (known.map_or(u32::MAX, |k| k.0), name);
        let mut given = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(address) = given.get(&key) {
            return *address;
        }
        let bytes = [text.as_bytes(), b"\0"].concat();
        let Ok(address) = memory.allocate_module(bytes.len() as u64) else { return 0 };
        let Ok(host) = memory.host_range(address, bytes.len() as u64) else { return 0 };
        // SAFETY: `host_range` answers for the bytes, which nobody else has yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, bytes.len()) };
        given.insert(key, address);
        address
    }
}
