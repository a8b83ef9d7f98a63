//! Status codes, and the results of failed and unsupported functions.

use std::sync::atomic::{AtomicBool, Ordering};

use client::{Status, log};

/// The result of an exported function.
pub(crate) type Result<T = ()> = std::result::Result<T, Status>;

/// Codes that [`Status`] doesn't name.
pub(crate) mod code {
    use client::Status;
    pub const PEER_ACCESS_UNSUPPORTED: Status = Status(217);
    pub const UNSUPPORTED_EXEC_AFFINITY: Status = Status(224);
    pub const PEER_ACCESS_NOT_ENABLED: Status = Status(705);
    pub const HOST_MEMORY_ALREADY_REGISTERED: Status = Status(712);
    pub const HOST_MEMORY_NOT_REGISTERED: Status = Status(713);
    pub const ILLEGAL_STATE: Status = Status(401);
    pub const STREAM_CAPTURE_UNSUPPORTED: Status = Status(900);
    pub const STREAM_CAPTURE_INVALIDATED: Status = Status(901);
    pub const STREAM_CAPTURE_MERGE: Status = Status(902);
    pub const STREAM_CAPTURE_UNMATCHED: Status = Status(903);
    pub const STREAM_CAPTURE_UNJOINED: Status = Status(904);
    pub const STREAM_CAPTURE_ISOLATION: Status = Status(905);
    pub const STREAM_CAPTURE_IMPLICIT: Status = Status(906);
    pub const CAPTURED_EVENT: Status = Status(907);
    pub const STREAM_CAPTURE_WRONG_THREAD: Status = Status(908);
    pub const GRAPH_EXEC_UPDATE_FAILURE: Status = Status(910);
    pub const INVALID_CLUSTER_SIZE: Status = Status(912);
    pub const INVALID_RESOURCE_TYPE: Status = Status(914);
    pub const LOSSY_QUERY: Status = Status(402);
}

#[inline]
pub(crate) fn finish(name: &str, result: Result) -> u32 {
    match result {
        Ok(()) => 0,
        Err(status) => failed(name, status),
    }
}

#[cold]
pub(crate) fn failed(name: &str, status: Status) -> u32 {
    client::activity::failed(status.0);
    if status != Status::NOT_READY {
        log::debug(format_args!("{name}: {status}"));
    }
    status.0
}

#[cold]
pub(crate) fn refuse(name: &str, said: &AtomicBool) -> u32 {
    let say = if said.swap(true, Ordering::Relaxed) { log::unwritten } else { log::warn };
    say(format_args!("{name} is not supported by rgpu; it answers CUDA_ERROR_NOT_SUPPORTED"));
    Status::NOT_SUPPORTED.0
}

/// Returns `Err(NOT_SUPPORTED)` for an unsupported form of a supported function, and writes that once. The
/// program's log gets each.
#[cold]
pub(crate) fn refuse_form<T>(what: &str, said: &AtomicBool) -> Result<T> {
    Err(Status(refuse(what, said)))
}
