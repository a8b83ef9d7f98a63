//! libnvidia-ml.so.1: NVML over an rgpu session.
//!
//! It knows NVML's functions by their shapes, and nothing of how bytes travel: that is `client`. What a function means is
//! NVIDIA's "NVML API" manual's matter, and its answer that of NVIDIA's library on the server: nearly every function is one
//! question of [`client::ops::nvml`], put to the server with its arguments and answered with the bytes that the library
//! there wrote, or with its status. What would change a GPU that others share, and what names this machine's processors
//! or the server's processes, is refused.
//!
//! In reading order:
//! - `state`: the session, from `nvmlInit` on; `error`: statuses and their texts;
//! - `shape`: how a question of each shape is asked, and `macros`, the form in which every function is written;
//! - `system`: what belongs to no device, and finding devices; `device`: the questions; `process`: processes;
//! - `event`: events;
//! - `export_table`: what nvidia-smi asks for besides;
//! - `refused`: the rest of `nvml.h`, exported and refused.
//!
//! **A session of its own.** A program that uses CUDA as well has two sessions, each with its worker on the server: the
//! libraries are separate files that share no state, and either may be there without the other. So the process list is
//! that of this session, in which no kernel ever runs: it is empty, as it is for a program in a container.
//!
//! **Fork.** NVML may be used in a child: it connects anew at its first call.

#![allow(non_snake_case, non_camel_case_types, reason = "the names are NVML's")]
#![allow(
    missing_docs,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the contracts and signatures are NVML's"
)]

#[macro_use]
mod macros;

mod device;
mod error;
mod event;
mod export_table;
mod process;
mod refused;
mod shape;
mod state;
mod system;

/// Distinguishes this library from NVIDIA's. Its value is the version of the wire.
#[unsafe(no_mangle)]
pub static rgpu_libnvml: client::Version = client::VERSION;
