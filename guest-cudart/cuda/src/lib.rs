//! libcuda.so.1: the CUDA driver API over an rgpu session.
//!
//! It knows CUDA, and nothing of how bytes travel: that is `client`. Names, arguments and meanings of the exported functions are those of NVIDIA's "CUDA Driver API"
//! manual; what is said here of each is only what the manual does not say.
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
pub mod abi;

mod api;
mod code;
mod graph;
mod memory;
mod process;
mod streams;
mod work;

/// Distinguishes this libcuda from NVIDIA's. Its value is the version of the wire.
#[unsafe(no_mangle)]
pub static rgpu_libcuda: client::Version = client::VERSION;
