//! libcupti.so.13: the part of CUPTI's activity API that PyTorch's profiler (Kineto) uses.
//!
//! A program's calls are told by rgpu's libcuda (and libcudart, if it is rgpu's) through an [`Observer`](driver::Observer); what the devices did is told by the server, which has NVIDIA's CUPTI.
//! libcuda puts both together by the calls' correlation numbers. This library turns them into CUPTI's records, in the buffers of the program. It does nothing, and loads nothing, before its first
//! function is called: a program may have it loaded just in case.
//!
//! In reading order:
//! - `api`: the functions of the activity API, and `subscriber`: callbacks at calls
//! - `calls`: what happens when the program calls a function of CUDA; `names`: the numbers of these functions
//! - `clock`: the times in records, which a program may want by a clock of its own
//! - `buffers`: records on their way to the program
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
