//! libcuda.so.1: the CUDA driver API over an rgpu session.
//!
//! It knows CUDA, and nothing of how bytes travel: that is `client`. Names, arguments and meanings of the exported functions are those of NVIDIA's "CUDA Driver API"
//! manual; what is said here of each is only what the manual does not say.
//!
//! In reading order:
//! - `macros`: the form in which every exported function is written; `types`: structures that programs pass;
//! - `state`: the process's devices; `device`, `context`, `limits`, `green`: what they answer; `error`: codes and their texts;
//! - `stream`, `stream_attributes`, `stream_memory`, `event`, `callback`: order; what has been done is read from the channel's progress words;
//! - `memory`, `host`, `managed`, `pointer`, `pool`, `host_pool`: memory of either side; `vmm`, `ipc`: memory apart from addresses, and of other processes; `copy`, `copy3d`, `batch`, `memset`: moving bytes;
//! - `image`, `module`, `library`, `link`, `function`, `launch`, `parameter_list`, `occupancy`: code;
//! - `graph`, `capture`: work described once and launched often; `late`: copies that must wait for what host functions write;
//! - `entry`, `export_table`, `integrity`, `compile_cache`: how other libraries find all this, and what the driver keeps for them;
//! - `later`: chapters of the API that are exported and refused.
//!
//! Handles are opaque words ([`client::handles`]); enumerations are plain integers, since a program may pass any number.

#![allow(non_snake_case, non_camel_case_types, reason = "the names are CUDA's")]
#![allow(
    missing_docs,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the contracts and signatures are CUDA's"
)]

#[macro_use]
mod macros;

pub mod array;
pub mod ipc;
pub mod managed;
pub mod pool_share;
pub mod tensor_map;
pub mod texture;
pub mod types;
mod visible;
pub mod vmm;

mod batch;
mod callback;
mod capture;
mod compile_cache;
mod context;
mod copy;
mod copy3d;
mod descriptor;
mod device;
mod entry;
mod error;
mod event;
mod export_table;
mod function;
mod graph;
mod green;
mod host;
mod host_pool;
mod image;
mod integrity;
mod late;
mod later;
mod launch;
mod library;
mod limits;
mod link;
mod memory;
mod memset;
mod misc;
mod module;
mod occupancy;
mod parameter_list;
mod peer;
mod pointer;
mod pool;
mod promise;
mod state;
mod stream;
mod stream_attributes;
mod stream_memory;

use std::sync::atomic::{AtomicBool, Ordering};

use client::{Status, log};

/// What an exported function comes to.
pub(crate) type Result<T = ()> = std::result::Result<T, Status>;

/// Codes that [`Status`] has no name for.
pub(crate) mod code {
    use client::Status;
    pub const PEER_ACCESS_UNSUPPORTED: Status = Status(217);
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

/// Distinguishes this libcuda from NVIDIA's. Its value is the version of the wire.
#[unsafe(no_mangle)]
pub static rgpu_libcuda: client::Version = client::VERSION;

#[inline]
pub(crate) fn finish(name: &str, result: Result) -> u32 {
    match result {
        Ok(()) => 0,
        Err(status) => failed(name, status),
    }
}

#[cold]
fn failed(name: &str, status: Status) -> u32 {
    if status != Status::NOT_READY {
        log::debug(format_args!("{name}: {status}"));
    }
    status.0
}

#[cold]
pub(crate) fn refuse(name: &str, said: &AtomicBool) -> u32 {
    if !said.swap(true, Ordering::Relaxed) {
        log::warn(format_args!("{name} is not supported by rgpu yet; it answers CUDA_ERROR_NOT_SUPPORTED"));
    }
    Status::NOT_SUPPORTED.0
}

/// `Err(NOT_SUPPORTED)` for a form of a supported function that cannot be served, with one line that says which.
#[cold]
pub(crate) fn refuse_form<T>(what: &str, said: &AtomicBool) -> Result<T> {
    if !said.swap(true, Ordering::Relaxed) {
        log::warn(format_args!("{what} is not supported by rgpu yet; it answers CUDA_ERROR_NOT_SUPPORTED"));
    }
    Err(Status::NOT_SUPPORTED)
}

/// `Err(INVALID_VALUE)` for a NULL pointer.
#[inline]
pub(crate) fn non_null<T: ?Sized>(pointer: *const T) -> Result {
    if pointer.is_null() { Err(Status::INVALID_VALUE) } else { Ok(()) }
}

/// Writes a result through a program's pointer.
///
/// # Safety
/// `to` is NULL, which is an invalid value, or may be written.
#[inline]
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result {
    non_null(to)?;
    // SAFETY: not NULL, and the caller says that it may be written.
    unsafe { to.write(value) };
    Ok(())
}
