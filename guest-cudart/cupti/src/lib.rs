//! libcupti.so.13: the part of CUPTI's activity API that PyTorch's profiler (Kineto) uses.
//!
//! rgpu's libcuda (and libcudart, if it is rgpu's) reports a program's calls through an
//! [`Observer`](driver::Observer). The server, which has NVIDIA's CUPTI, reports what the devices did.
//! libcuda relates both by the calls' correlation numbers. This library converts them to CUPTI's records in
//! the program's buffers. It does nothing, and loads nothing, before its first function is called, because
//! programs may load it without using it.
//!
//! In reading order:
//! - `api`: the functions of the activity API, and `subscriber`: callbacks at calls
//! - `calls`: records of the program's CUDA calls; `names`: the numbers of CUDA's functions
//! - `clock`: the times in records, which may come from a clock of the program
//! - `buffers`: the program's buffers for records
//! - `driver`: libcuda's table
//! - `result`: result codes; `unsupported`: the rest of CUPTI, exported but refused

#![allow(non_snake_case, non_camel_case_types, reason = "the names are CUPTI's")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the contracts are CUPTI's")]

mod api;
mod buffers;
mod calls;
mod clock;
mod driver;
mod names;
mod result;
mod subscriber;
mod unsupported;

pub use result::cuptiGetResultString;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Distinguishes this library from NVIDIA's.
#[unsafe(no_mangle)]
pub static rgpu_libcupti: u32 = 1;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
