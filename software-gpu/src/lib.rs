//! A GPU in software: runs PTX on CPU threads.
//!
//! ```text
//!  PTX text / fat binary ─▶ fatbin ─▶ ptx (parse) ─▶ lower (to the register machine) ─▶ program
//!                                                                                          │
//!  device: Gpu ── modules, streams, events, launches ── workers ─▶ exec (interpreter) ◀────┘
//!                                                                    │ one function per instruction
//!  machine: memory ── grid ── block ── warp of 32 lanes ◀────────────┘
//! ```
//!
//! - [`Gpu`] is the device: memory at addresses that the caller chooses, modules, streams, one sticky error.
//! - [`Module`] holds loaded PTX: [`Function`]s to launch, and globals.
//! - [`Stream`] runs launches and closures in order; [`Event`] marks points in a stream.
//!
//! The modules, in reading order; each uses only those before it: `fatbin` finds the PTX in a container;
//! `ptx` parses it; `machine` is a register machine whose instructions work on a whole warp: what they work
//! on, and what an instruction is; `exec` has the functions that execute them, and runs warps and clusters;
//! `lower` links files and chooses a function for each instruction; `device` is the public interface.
//!
//! The crate depends on nothing else of rgpu and can be used alone, as `examples/vector_add.rs` does.

mod device;
mod error;
// A lane number indexes several rows at once, which an iterator over one of them would hide.
#[allow(clippy::needless_range_loop)]
mod exec;
mod fatbin;
mod lower;
mod machine;
mod ptx;

pub use device::event::Event;
pub use device::gpu::Gpu;
pub use device::module::{Function, Module};
pub use device::stream::Stream;
pub use error::{Error, Fault, Location, Result, Unsupported};
pub use fatbin::mentions;
pub use lower::info::{FunctionInfo, GlobalInfo, ParamInfo};
pub use machine::launcher::LaunchConfig;
pub use machine::memory::{FIRST_ADDRESS, GRANULE, LAST_ADDRESS, Plane};
pub use machine::properties::{FaultSink, GpuConfig, PrintfSink, Properties};
pub use machine::tensor_map::TensorMap;
pub use machine::texture::{AddressMode, ChannelFormat, Image, Sampler};
