//! The machine: the state that instructions work on, and what an instruction is. Nothing here knows which
//! instructions there are.
//!
//! In reading order; each uses only those before it:
//! - `address_pool`, `memory`: global memory
//! - `texture`, `tensor_map`: descriptions of what lies there
//! - `error_text`: strings that kernels are given
//! - `properties`, `hardware`: a GPU as its kernels see it
//! - `launcher`: what a launch is made of, and what a kernel can start that runs after it
//! - `address`, `row`, `local_memory`: the other memory
//! - `grid`, `block`, `warp`: the state that all threads of a launch share, those of a cluster and of a
//!   block, and those of a warp
//! - `program`: the register machine's instructions, which are functions of a warp

pub(crate) mod address;
mod address_pool;
pub(crate) mod block;
pub(crate) mod error_text;
pub(crate) mod grid;
pub(crate) mod hardware;
pub(crate) mod launcher;
pub(crate) mod local_memory;
pub(crate) mod memory;
pub(crate) mod program;
pub(crate) mod properties;
pub(crate) mod row;
pub(crate) mod tensor_map;
pub(crate) mod texture;
pub(crate) mod warp;
