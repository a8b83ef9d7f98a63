//! What a session needs of a GPU: the interface between [`Session`](super::session::Session) and the two backends.
//!
//! The session has checked everything that a client can get wrong before it calls one of these: handles name what it made, ranges lie in the
//! session's memory, sizes are whole granules, quotas are charged. A backend contains only what its GPU does differently. It may refuse with
//! any [`Status`]; the session then undoes what it has noted and passes the status on.
//!
//! [`Gpu`] itself is about devices and contexts. Each chapter of operations has a trait of its own: [`GpuMemory`] and [`GpuHostMemory`], [`GpuStreams`],
//! [`GpuCopies`], [`GpuModules`], [`GpuGraphs`], [`GpuArrays`] and [`GpuTensorMaps`], [`GpuGreenContexts`].
//!
//! The dispatcher's thread makes all of these calls, one at a time. None of them may wait for work on the device.

mod array;
mod copy;
mod graph;
mod green;
mod memory;
mod module;
mod stream;

pub use array::{AnyArray, CopyEnd, GpuArrays, GpuTensorMaps, TextureSource};
pub use copy::{BoxCopy, Fill, GpuCopies, LineCopy};
pub use graph::{GpuGraphs, Node, NodeWork};
pub use green::{GpuGreenContexts, Split};
pub use memory::{GpuHostMemory, GpuMemory};
pub use module::{GpuModules, LinkInput, Loaded};
pub use stream::GpuStreams;

use std::sync::Arc;

use crate::driver::call::Result;
use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::MayBlock;
use protocol::ops::device::{DeviceInfoReply, PeerInfoReply};

use super::Unavailable;
use super::beside::Beside;
use super::output::Output;
use super::space::Space;
use super::streams::Streams;

/// The devices of one session.
pub trait Gpu:
    GpuMemory
    + GpuHostMemory
    + GpuStreams
    + GpuCopies
    + GpuModules
    + GpuGraphs
    + GpuArrays
    + GpuTensorMaps
    + GpuGreenContexts
    + Sized
    + Send
{
    /// The backend's name: `cuda` or `software`.
    const NAME: &'static str;

    /// What other threads than the dispatcher's may use.
    type Beside: Beside + 'static;

    /// Names of the devices, by ordinal.
    fn names(&self) -> Vec<String>;

    /// See [`Backend::warm`](super::Backend::warm).
    fn warm(&mut self) -> Result<Option<u64>, Unavailable>;

    /// A client has come. Called once, before its first command; perhaps from another thread than [`warm`](Gpu::warm) was.
    fn begin(&mut self, client: &Arc<dyn Client>);

    /// Whether the driver's call for a command may wait now, for what its entry says that it may wait for. `is_first_launch` says of a launch whether it is the first of its function.
    fn may_wait(&self, may_block: MayBlock, is_first_launch: impl FnOnce() -> bool) -> bool;

    /// What other threads may use, for those.
    fn beside(&self) -> &Arc<Self::Beside>;

    /// The client is gone: releases every thread that waits for it. Called once, after the last command; the process ends soon after.
    fn end(&mut self, streams: &mut Streams<Self::Stream>);

    /// What kernels have printed.
    fn output(&self) -> &Output;

    /// Makes a context ready for the calls that follow. A device's primary context is made when something enters it for the first time.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if there is none; its error if it has failed.
    fn enter(&mut self, context: ContextId) -> Result;

    /// `cuDriverGetVersion`.
    fn driver_version(&self) -> Result<u32>;

    /// Whether pageable memory of this client's may be read when the stream comes to the copy.
    fn reads_late(client: &dyn Client) -> bool;

    /// Describes a device to the client.
    fn describe(&mut self, device: u32, client: &dyn Client) -> Result<DeviceInfoReply>;

    /// What a device can do with another one's memory.
    fn describe_peer(&mut self, device: u32, peer: u32) -> Result<PeerInfoReply>;

    /// From now on the session has only these of its devices, in this order. It has made nothing on any of them, and the list names none twice.
    fn select(&mut self, devices: &[u32]) -> Result;

    /// Makes a context that is not a primary one.
    fn make_context(&mut self, context: ContextId, device: u32, flags: u32) -> Result;

    /// A context is about to go: whoever waits for its streams is released. What the session has in it is forgotten after this.
    fn retire_context(&mut self, context: ContextId);

    /// Forgets what belongs to a context that was retired.
    fn forget_context(&mut self, context: ContextId);

    /// A context that was made, and retired, goes.
    fn destroy_context(&mut self, context: ContextId) -> Result;

    /// A device is about to be reset. Memory without an address outlives it, and stays mapped.
    ///
    /// # Errors
    /// The primary context's error, if it cannot be reset any more.
    fn begin_reset(
        &mut self,
        device: u32,
        streams: &Streams<Self::Stream>,
        space: &Space<Self::Memory>,
    ) -> Result;

    /// Resets a device. Its contexts were retired and, but for the primary one, destroyed.
    fn reset(&mut self, device: u32) -> Result;

    /// A device was reset, and its window is empty.
    fn finish_reset(&mut self) -> Result {
        Ok(())
    }

    /// `cuDevicePrimaryCtxSetFlags`, for flags that are not about how the calling thread waits.
    fn set_primary_flags(&mut self, device: u32, flags: u32) -> Result;

    /// A limit of a context that was entered.
    fn limit(&mut self, context: ContextId, limit: u32) -> Result<u64>;

    /// Sets a limit of a context that was entered.
    fn set_limit(&mut self, context: ContextId, limit: u32, value: u64) -> Result;

    /// Bytes of device memory that a context takes for a limit of this value, beyond what every context takes.
    fn limit_bytes(&self, device: u32, limit: u32, value: u64) -> u64;

    /// Lets kernels of one context use the memory of another one's device.
    fn enable_peer(&mut self, _context: ContextId, _peer: ContextId) -> Result {
        Err(Status::NOT_SUPPORTED)
    }

    /// Takes that back.
    fn disable_peer(&mut self, _context: ContextId, _peer: ContextId) -> Result {
        Err(Status::NOT_SUPPORTED)
    }

    /// Called before the calls for which NVIDIA's driver may wait until the device is idle, so that a backend can imitate that for tests.
    fn before_waiting_call(&mut self, _streams: &Streams<Self::Stream>, _device: u32) -> Result {
        Ok(())
    }
}
