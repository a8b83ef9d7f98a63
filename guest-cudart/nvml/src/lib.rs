//! libnvidia-ml.so.1: NVML over an rgpu session.
//!
//! This crate knows the signatures of NVML's functions, but not how bytes travel; that is `client`. NVIDIA's
//! "NVML API" manual defines what a function means, and NVIDIA's library on the server produces the result:
//! nearly every function is one query of [`client::ops::nvml`], sent to the server with its arguments, and
//! returns the bytes that the library there wrote or its return code. Functions that would change a GPU
//! shared with others, or that concern the server's processes, are refused.
//!
//! In reading order:
//! - `state`: the session, from `nvmlInit` on; `error`: return codes and their texts
//! - `query`: sends a query of each form, and `macros`, which define the exported functions
//! - `system`: functions without a device, and finding devices; `device`: queries of a device; `process`:
//!   processes
//! - `affinity`: this machine's processors and memory; `event`: events
//! - `export_table`: what nvidia-smi needs in addition
//! - `unsupported`: the rest of `nvml.h`, exported but refused
//!
//! **A separate session.** A program that also uses CUDA has two sessions, each with its own worker on the
//! server: the libraries are separate files without shared state, and each works without the other.
//!
//! **Fork.** A child can use NVML: it opens a new session at its first call.

#![allow(non_snake_case, non_camel_case_types, reason = "the names are NVML's")]
#![allow(
    missing_docs,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the contracts and signatures are NVML's"
)]

#[macro_use]
mod macros;

mod affinity;
mod device;
mod error;
mod event;
mod export_table;
mod process;
mod query;
mod state;
mod system;
mod unsupported;

/// Distinguishes this library from NVIDIA's. Its value is the version of the wire.
#[unsafe(no_mangle)]
pub static rgpu_libnvml: client::Version = client::VERSION;
