//! libcuda.so.1: the CUDA driver API over an rgpu session.
//!
//! This crate knows CUDA; the `client` crate knows how bytes travel. The exported functions have the names,
//! arguments and meanings of NVIDIA's "CUDA Driver API" manual; comments here add only what the manual leaves
//! out.
//!
//! The crate has eight chapters. Each uses only those above it in this list (`xtask/src/structure.rs` checks
//! this; docs/decisions/0029 gives the reasons):
//!
//! - [`abi`]: structures of `cuda.h`, argument types, status codes, and the macro that exports functions;
//! - `process`: the session and its devices, contexts, and the state of their streams;
//! - `streams`: streams and events by handle, and what a capture forbids;
//! - `memory`: device, pinned, managed, virtual and pooled memory, and how bytes travel;
//! - `code`: images, modules, libraries, functions;
//! - `work`: the operations on streams: copies, fills, launches, host functions, memory operations;
//! - `graph`: graphs, their instances, and recording into them;
//! - `api`: the exported functions, one module for each chapter of the manual.
//!
//! ```text
//!  cuMemcpyAsync ─▶ api::copies ─▶ work::copy ─▶ memory::transfer ─▶ process::stream ─▶ client::session ─▶ the ring
//!                        └─▶ graph::recording, while the stream is being captured
//! ```
//!
//! To add a function, write it in its module in `api`, remove its name from `api/unsupported.rs`, and check
//! that `exports/libcuda.txt` and `api/get_proc_address/table.rs` list it.
//!
//! Handles are opaque words ([`client::handles`]). Enumerations are plain integers, since a program may pass
//! any value.

#![allow(non_snake_case, non_camel_case_types, reason = "the names are CUDA's")]
#![allow(
    missing_docs,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the contracts and signatures are CUDA's"
)]

#[macro_use]
pub mod abi;

mod api;
mod code;
mod graph;
mod memory;
mod process;
mod streams;
mod work;

/// A symbol that NVIDIA's libcuda does not have. Its value is rgpu's wire version.
#[unsafe(no_mangle)]
pub static rgpu_libcuda: client::Version = client::VERSION;
