//! A GPU in software: runs PTX on CPU threads.
//!
//! ```text
//!  PTX text / fat binary ─▶ fatbin ─▶ ptx (parse) ─▶ lower (register machine) ─▶ exec (warps of 32 lanes)
//!                                                                                   ▲
//!  Gpu ── memory (windows, allocations) ── modules ── streams, events ── workers ───┘
//! ```
//!
//! - [`Gpu`] is the device: memory at addresses that the caller chooses, modules, streams, one sticky error.
//! - [`Module`] holds loaded PTX: [`Function`]s to launch, and globals.
//! - [`Stream`] runs launches and closures in order; [`Event`] marks points in a stream.
//!
//! The modules, in reading order: `fatbin` finds the PTX in a container; `ptx` parses it; `lower` links files
//! and turns each function into a compact register machine whose instructions work on a whole warp; `exec`
//! runs warps, blocks and barriers; `device` is the public interface.
//!
//! The crate depends on nothing else of rgpu and can be used alone, as `examples/vector_add.rs` does.

mod device;
mod error;
// A lane number indexes several rows at once, which an iterator over one of them would hide.
#[allow(clippy::needless_range_loop)]
mod exec;
mod fatbin;
mod lower;
mod ptx;

pub use device::copy::Plane;
pub use device::event::Event;
pub use device::gpu::{FaultSink, Gpu, GpuConfig, PrintfSink, Properties};
pub use device::launch::LaunchConfig;
pub use device::memory::{FIRST_ADDRESS, GRANULE, LAST_ADDRESS};
pub use device::module::{Function, FunctionInfo, GlobalInfo, Module, ParamInfo};
pub use device::stream::Stream;
pub use device::tensor_map::TensorMap;
pub use device::texture::{AddressMode, ChannelFormat, Image, Sampler};
pub use error::{Error, Fault, Location, Result, Unsupported};
pub use fatbin::mentions;
