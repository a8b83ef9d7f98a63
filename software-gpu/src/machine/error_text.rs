//! Names and texts of the errors that the device runtime can return, for kernels that ask for them.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::machine::memory::Memory;

/// The text, and the name, of an error that CUDA does not know.
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

/// The strings that kernels were given: the address in module memory, by error and whether it is the name.
#[derive(Default)]
pub(crate) struct ErrorTexts(Mutex<HashMap<(u32, bool), u64>>);

impl ErrorTexts {
    /// The address of an error's name or text; 0 if there is no memory for it.
    pub fn address(&self, memory: &Memory, code: u32, name: bool) -> u64 {
        let known = ALL.iter().find(|(number, ..)| *number == code);
        let text = known.map_or(UNRECOGNIZED, |(_, short, long)| if name { short } else { long });
        // All unknown errors share one string.
        let key = (known.map_or(u32::MAX, |k| k.0), name);
        let mut given = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(address) = given.get(&key) {
            return *address;
        }
        let bytes = [text.as_bytes(), b"\0"].concat();
        let Ok(address) = memory.allocate_module(bytes.len() as u64) else { return 0 };
        if memory.write(address, &bytes).is_err() {
            return 0;
        }
        given.insert(key, address);
        address
    }
}
