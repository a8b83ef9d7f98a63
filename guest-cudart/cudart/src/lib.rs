//! libcudart.so: the CUDA runtime API, as a library over the CUDA driver API.
//!
//! It knows nothing of rgpu: it opens `libcuda.so.1` and calls the functions that every libcuda exports, so every
//! handle it gives is the driver's own, and it runs over NVIDIA's libcuda as well (docs/decisions/0002).
//!
//! In reading order:
//! - `driver`: libcuda, opened once, its functions in one table; `types`: the structures of both APIs;
//! - `error`, `log`: the thread's last error; one-line messages;
//! - `context`: which device a thread uses, and what a call needs before it reaches the driver;
//! - `counts`: what functions lead to, counted by rgpu's libcuda where somebody asks for it;
//! - `registry`, `map`: what compiled programs register (fat binaries, kernels, variables), loaded at first use;
//! - `macros`: `api!`, the form in which every exported function is written; then the API's chapters, one module
//!   each.
//!
//! The names, arguments and meanings of the exported functions are those of NVIDIA's "CUDA Runtime API" manual; what
//! is said here of each is only what the manual does not say. The feature `v12` builds the ABI of CUDA 12.8.

#![allow(non_snake_case, non_camel_case_types, reason = "the names are CUDA's")]
#![allow(
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the contracts and signatures are CUDA's"
)]
#![recursion_limit = "512"]

#[macro_use]
mod macros;

mod context;
mod counts;
mod driver;
mod error;
mod log;
mod map;
mod registry;
mod types;

mod array;
mod copy;
mod copy3d;
mod device;
mod event;
mod external;
mod function;
mod graph;
mod graph_nodes;
mod interop;
mod launch;
#[cfg(feature = "v12")]
mod legacy12;
mod library;
mod memory;
mod misc;
mod pool;
mod properties;
mod stream;
mod symbol;
mod texture;

#[cfg(test)]
mod abi_tests;
#[cfg(test)]
mod test_utils;
