//! Reads images of device code, which nvcc makes and CUDA's loading functions take.
//!
//! - [`fatbin`]: fat binaries: containers of machine code and PTX for several architectures
//! - [`cubin`]: machine code: its kernels, their parameters, and what they need of a multiprocessor
//!
//! The images are untrusted. A damaged image is an error; an image of an unknown kind is refused, so that the
//! caller can ask NVIDIA's driver.

pub mod cubin;
pub mod fatbin;
