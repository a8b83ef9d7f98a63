//! What a session needs from a GPU: the interface between [`Session`](super::session::Session) and the two
//! backends.
//!
//! Before the session calls any of this, it has checked everything that a client can get wrong: handles
//! exist, ranges are in the session's memory, sizes are whole granules, quotas are charged. A backend
//! contains only what is specific to its GPU. It may refuse with any [`Status`]. The session then undoes its
//! own changes and passes the status on.
//!
//! [`Gpu`] itself covers devices and contexts. Each chapter of operations has its own trait: [`GpuMemory`]
//! and [`GpuHostMemory`], [`GpuStreams`], [`GpuCopies`], [`GpuModules`], [`GpuGraphs`], [`GpuArrays`] and
//! [`GpuTensorMaps`], [`GpuGreenContexts`], [`GpuActivity`].
//!
//! The dispatcher's thread makes all these calls, one at a time, except those of a [`Carrier`]. None of them
//! may wait for work on the device.

mod activity;
mod array;
mod copy;
mod graph;
mod green;
mod memory;
mod module;
mod stream;

pub use activity::GpuActivity;
pub use array::{AnyArray, CopyEnd, GpuArrays, GpuTensorMaps, TextureSource};
pub use copy::{BoxCopy, Carrier, Fill, GpuCopies, LineCopy, Preparer, Progress};
pub use graph::{GpuGraphs, Node, NodeWork};
pub use green::{GpuGreenContexts, Split};
pub use memory::{Block, GpuHostMemory, GpuMemory};
pub use module::{GpuModules, LinkInput, Loaded};
pub use stream::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, GpuStreams, STREAM_NON_BLOCKING};

use std::sync::Arc;

use crate::driver::call::Result;
use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::device::{DeviceInfoReply, PeerInfoReply};

use super::beside::Beside;
use super::output::Output;
use super::space::Space;
use super::streams::Streams;

/// `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED`: what [`Gpu::enable_peer`] answers for a device that the other one
/// cannot access.
pub const PEER_ACCESS_UNSUPPORTED: Status = Status(217);
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`: what [`Gpu::enable_peer`] answers the second time.
pub const PEER_ACCESS_ALREADY_ENABLED: Status = Status(704);
/// `CUDA_ERROR_PEER_ACCESS_NOT_ENABLED`: what [`Gpu::disable_peer`] answers if there is nothing to revoke.
pub const PEER_ACCESS_NOT_ENABLED: Status = Status(705);

/// Why a worker cannot serve.
#[derive(Debug)]
pub struct Unavailable {
    /// In one line.
    pub reason: String,
    /// A device has too little memory for a context, until something else ends.
    pub full: bool,
}

impl From<String> for Unavailable {
    fn from(reason: String) -> Unavailable {
        Unavailable { reason, full: false }
    }
}

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
    + GpuActivity
    + Sized
    + Send
{
    /// The backend's name: `cuda` or `software`.
    const NAME: &'static str;

    /// The part that threads other than the dispatcher's may use.
    type Beside: Beside + 'static;

    /// Whether the devices run an image's machine code instead of its PTX.
    const RUNS_MACHINE_CODE: bool;

    /// Names of the devices, by ordinal.
    fn names(&self) -> Vec<String>;

    /// See [`Backend::reaches_pageable_memory`](super::Backend::reaches_pageable_memory).
    fn reaches_pageable_memory(&self) -> bool;

    /// See [`Backend::warm`](super::Backend::warm).
    fn warm(&mut self) -> Result<Option<u64>, Unavailable>;

    /// A client has connected. Called once, before its first command, possibly on another thread than
    /// [`warm`](Gpu::warm).
    fn begin(&mut self, client: &Arc<dyn Client>);

    /// The part that other threads may use.
    fn beside(&self) -> &Arc<Self::Beside>;

    /// The client has left: releases every thread that waits for it. Called once, after the last command; the
    /// process ends soon after.
    fn end(&mut self, streams: &mut Streams<Self::Stream>);

    /// What kernels have printed.
    fn output(&self) -> &Output;

    /// Makes a context current for the following calls. A device's primary context is created when it is
    /// first entered.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if there is no such context; the context's error if it has failed.
    fn enter(&mut self, context: ContextId) -> Result;

    /// `cuDriverGetVersion`.
    fn driver_version(&self) -> Result<u32>;

    /// Whether this client's pageable memory may be read as late as when the stream reaches the copy.
    fn reads_late(client: &dyn Client) -> bool;

    /// Describes a device to the client.
    fn describe(&mut self, device: u32) -> Result<DeviceInfoReply>;

    /// Describes what a device can do with another one's memory.
    fn describe_peer(&mut self, device: u32, peer: u32) -> Result<PeerInfoReply>;

    /// Reduces the session's devices to these, in this order. The session has made nothing on any device, and
    /// no device is listed twice. It has only these from now on, also if an error is returned.
    fn select(&mut self, devices: &[u32], windows: &[u32]) -> Result;

    /// Creates a context that is not a primary one.
    fn make_context(&mut self, context: ContextId, device: u32, flags: u32) -> Result;

    /// Called before a context is destroyed. Ends all waits for its streams. The session then drops what it
    /// has in the context.
    fn retire_context(&mut self, context: ContextId);

    /// Drops everything in a retired context.
    fn forget_context(&mut self, context: ContextId);

    /// Destroys a retired context that is not a primary one.
    fn destroy_context(&mut self, context: ContextId) -> Result;

    /// Called before a device is reset. Memory without an address survives and stays mapped.
    ///
    /// # Errors
    /// The primary context's error, if it can no longer be reset.
    fn begin_reset(
        &mut self,
        device: u32,
        streams: &mut Streams<Self::Stream>,
        space: &Space<Self::Memory>,
    ) -> Result;

    /// Resets a device. Its contexts were retired and, except for the primary one, destroyed.
    fn reset(&mut self, device: u32) -> Result;

    /// A device was reset, and its window is empty.
    fn finish_reset(&mut self) -> Result {
        Ok(())
    }

    /// `cuDevicePrimaryCtxSetFlags`, without the flags for how the calling thread waits.
    fn set_primary_flags(&mut self, device: u32, flags: u32) -> Result;

    /// A limit of the entered context.
    fn limit(&mut self, context: ContextId, limit: u32) -> Result<u64>;

    /// Sets a limit of the entered context.
    fn set_limit(&mut self, context: ContextId, limit: u32, value: u64) -> Result;

    /// `cuCtxResetPersistingL2Cache` in the entered context.
    fn reset_persisting_cache(&mut self, context: ContextId) -> Result;

    /// Device memory in bytes that a context takes for a limit of this value, beyond what every context
    /// takes.
    fn limit_bytes(&self, device: u32, limit: u32, value: u64) -> u64;

    /// Lets kernels of one context use the memory of another context's device.
    fn enable_peer(&mut self, _context: ContextId, _peer: ContextId) -> Result {
        Err(Status::NOT_SUPPORTED)
    }

    /// Revokes that access.
    fn disable_peer(&mut self, _context: ContextId, _peer: ContextId) -> Result {
        Err(Status::NOT_SUPPORTED)
    }

    /// Called before calls in which NVIDIA's driver may wait until the device is idle, so that a backend can
    /// imitate that for tests.
    fn before_waiting_call(&mut self, _streams: &Streams<Self::Stream>, _device: u32) -> Result {
        Ok(())
    }
}
