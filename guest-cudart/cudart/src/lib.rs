//! libcudart.so: the CUDA runtime API as a library over the CUDA driver API.
//!
//! It knows nothing of rgpu's sessions. It opens `libcuda.so.1` and calls functions that every libcuda
//! exports, so all its handles are the driver's own and it also works over NVIDIA's libcuda
//! (docs/decisions/0002).
//!
//! In reading order:
//! - `driver`: opens libcuda once and keeps its functions in a table; `types`: the structures of both APIs
//! - `error`: error numbers and the thread's last error
//! - `context`: the device a thread uses, and what a call needs before it reaches the driver
//! - `call_counts`: reports to rgpu's libcuda which function caused an operation, for `RGPU_STATS=1`
//! - `registry`, `address_map`: what compiled programs register (fat binaries, kernels, variables), loaded at
//!   first use
//! - `arguments`: the types of the pointers that programs pass
//! - `macros`: `api!`, which defines every exported function
//! - then one module for each chapter of the API, and `unsupported` for functions that cannot be served
//!
//! NVIDIA's "CUDA Runtime API" manual defines the names, arguments and meanings of the exported functions;
//! comments here add only what the manual leaves out. The feature `v12` builds the ABI of CUDA 12.8 instead
//! of 13.0.

#![allow(non_snake_case, non_camel_case_types, reason = "the names are CUDA's")]
#![allow(
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the contracts and signatures are CUDA's"
)]
#![recursion_limit = "512"]

#[macro_use]
mod macros;

mod address_map;
mod arguments;
mod call_counts;
mod context;
mod driver;
mod error;
mod registry;
mod types;

mod array;
mod copy;
mod copy_boxes;
#[cfg(feature = "v12")]
mod cuda12;
mod device;
mod event;
mod external;
mod function;
mod graph;
mod graph_nodes;
mod last_error;
mod launch;
mod library;
mod memory;
mod pool;
mod properties;
mod stream;
mod texture;
mod unsupported;
mod variable;
mod version;

#[cfg(test)]
mod abi_tests;
#[cfg(test)]
mod fake_driver;
