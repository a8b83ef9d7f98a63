//! Images of device code, as nvcc makes them and CUDA's loading functions take them.
//!
//! - [`fatbin`]: fat binaries: containers of machine code and PTX for several architectures
//! - [`cubin`]: machine code: its kernels, their parameters, and what they need of a multiprocessor
//!
//! Everything here reads bytes that may be anything. What is damaged is an error; what is merely unknown is
//! "unknown", so that a caller can ask somebody who knows.

pub mod cubin;
pub mod fatbin;
