//! What a session needs of a GPU: the interface between [`Session`](super::session::Session) and the two backends.
//!
//! The session has checked everything that a client can get wrong before it calls one of these: handles name what it made, ranges lie in the
//! session's memory, sizes are whole granules, quotas are charged. A backend contains only what its GPU does differently. It may refuse with
//! any [`Status`]; the session then undoes what it has noted and passes the status on.
//!
//! The dispatcher's thread makes all of these calls, one at a time. None of them may wait for work on the device.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::{ContextId, StreamId, TicketId};
use protocol::ops::array::{ArrayShape, Resource, Sampling, View};
use protocol::ops::copy::Pitched;
use protocol::ops::device::{DeviceInfoReply, PeerInfoReply};
use protocol::ops::event::{EventElapsedReply, EventSynchronizeReply};
use protocol::ops::launch::{Launch, LaunchAttribute};
use protocol::ops::memory::{HostMap, HostMirror, HostMirrorReply};
use protocol::ops::module::{
    JitOption, ModuleGetGlobalReply, OccupancyAvailableShared, OccupancyMaxActiveBlocks,
    OccupancyMaxActiveClusters, OccupancyMaxPotentialClusterSize,
};
use protocol::ops::stream::MemoryOp;
use protocol::ops::texture::{TensorMapIm2col, TensorMapReplaceAddress, TensorMapTiled};
use protocol::ops::{Answer, MayBlock};

use super::Unavailable;
use super::beside::Beside;
use super::call::Call;
use super::output::Output;
use super::quota::Quota;
use super::rows::Rows;
use super::space::{Mapping, Space};
use super::streams::Streams;

/// The devices of one session.
pub trait Gpu:
    GpuMemory
    + GpuHostMemory
    + GpuStreams
    + GpuModules
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
    fn enter(&mut self, context: ContextId) -> Result<(), Status>;

    /// `cuDriverGetVersion`.
    fn driver_version(&self) -> Result<u32, Status>;

    /// Whether pageable memory of this client's may be read when the stream comes to the copy.
    fn reads_late(client: &dyn Client) -> bool;

    /// Everything that is told of a device.
    fn describe(&mut self, device: u32, client: &dyn Client) -> Result<DeviceInfoReply, Status>;

    /// What a device can do with another one's memory.
    fn describe_peer(&mut self, device: u32, peer: u32) -> Result<PeerInfoReply, Status>;

    /// From now on the session has only these of its devices, in this order. It has made nothing on any of them, and the list names none twice.
    fn select(&mut self, devices: &[u32]) -> Result<(), Status>;

    /// Makes a context that is not a primary one.
    fn make_context(&mut self, context: ContextId, device: u32, flags: u32) -> Result<(), Status>;

    /// A context is about to go: whoever waits for its streams is released. What the session has in it is forgotten after this.
    fn retire_context(&mut self, context: ContextId);

    /// Forgets what belongs to a context that was retired.
    fn forget_context(&mut self, context: ContextId);

    /// A context that was made, and retired, goes.
    fn destroy_context(&mut self, context: ContextId) -> Result<(), Status>;

    /// A device is about to be reset. Memory without an address outlives it, and stays mapped.
    ///
    /// # Errors
    /// The primary context's error, if it cannot be reset any more.
    fn begin_reset(
        &mut self,
        device: u32,
        streams: &Streams<Self::Stream>,
        space: &Space<Self::Memory>,
    ) -> Result<(), Status>;

    /// Resets a device. Its contexts were retired and, but for the primary one, destroyed.
    fn reset(&mut self, device: u32) -> Result<(), Status>;

    /// A device was reset, and its window is empty.
    fn finish_reset(&mut self) -> Result<(), Status> {
        Ok(())
    }

    /// `cuDevicePrimaryCtxSetFlags`, for flags that are not about how the calling thread waits.
    fn set_primary_flags(&mut self, device: u32, flags: u32) -> Result<(), Status>;

    /// A limit of a context that was entered.
    fn limit(&mut self, context: ContextId, limit: u32) -> Result<u64, Status>;

    /// Sets a limit of a context that was entered.
    fn set_limit(&mut self, context: ContextId, limit: u32, value: u64) -> Result<(), Status>;

    /// Lets kernels of one context use the memory of another one's device.
    fn enable_peer(&mut self, _context: ContextId, _peer: ContextId) -> Result<(), Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Takes that back.
    fn disable_peer(&mut self, _context: ContextId, _peer: ContextId) -> Result<(), Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Called before the calls for which NVIDIA's driver may wait until the device is idle, so that a backend can imitate that for tests.
    fn before_waiting_call(&mut self, _streams: &Streams<Self::Stream>, _device: u32) -> Result<(), Status> {
        Ok(())
    }
}

/// Device memory.
pub trait GpuMemory {
    /// What backs a piece of a device's window.
    type Piece: Send;
    /// Memory without an address.
    type Memory: Send;

    /// What sizes and addresses of a device's memory are multiples of, in bytes.
    fn granule(&self, device: u32) -> u64;

    /// Whether a device's memory can be shared between processes.
    fn exports(&self, device: u32) -> bool;

    /// A device's number on this server: the same in every worker, whatever ordinal the device has in the session.
    fn number(&self, device: u32) -> u32;

    /// Free and total bytes of a device, before the session's quota.
    fn memory_info(&mut self, device: u32) -> Result<(u64, u64), Status>;

    /// Backs free addresses of a device's window, for every device that can reach its memory.
    fn back(&mut self, device: u32, address: u64, size: u64) -> Result<Self::Piece, Status>;

    /// Gives up a piece that [`back`](GpuMemory::back) made. The returned function takes its addresses away; it is called, by any thread, once nothing uses them.
    fn unback(
        &mut self,
        device: u32,
        address: u64,
        size: u64,
    ) -> impl FnOnce() -> Result<(), Status> + Send + 'static;

    /// An allocation stands in a device's window from now on.
    fn place(&mut self, _device: u32, _address: u64, _size: u64) -> Result<(), Status> {
        Ok(())
    }

    /// An allocation of a device's window is gone.
    fn release(&mut self, _device: u32, _address: u64) -> Result<(), Status> {
        Ok(())
    }

    /// Whether `len` bytes from `address`, outside all windows, are memory on a device that the session need not know of: a variable that the client has not asked for.
    fn knows(&self, _address: u64, _len: u64, _device: u32) -> bool {
        false
    }

    /// Reserves addresses of [`SPACE`](protocol::ops::memory::SPACE).
    fn reserve(&mut self, address: u64, size: u64) -> Result<(), Status>;

    /// Gives up what [`reserve`](GpuMemory::reserve) reserved. Nothing is mapped there.
    fn unreserve(&mut self, address: u64, size: u64) -> Result<(), Status>;

    /// Makes memory without an address. It can be exported if the device [exports](GpuMemory::exports).
    fn create(&mut self, device: u32, size: u64) -> Result<Self::Memory, Status>;

    /// Gives up memory to which nothing is mapped. `imported`: [`import`](GpuMemory::import) made it.
    fn destroy(&mut self, device: u32, size: u64, memory: Self::Memory, imported: bool)
    -> Result<(), Status>;

    /// Maps a part of memory at reserved addresses. No device may access it yet.
    fn map(
        &mut self,
        memory: &Self::Memory,
        device: u32,
        offset: u64,
        address: u64,
        size: u64,
    ) -> Result<(), Status>;

    /// Takes a mapping away. Devices that can access it no longer are removed from `access`.
    fn unmap(&mut self, address: u64, size: u64, access: &mut Vec<u32>) -> Result<(), Status>;

    /// Sets what a device may do with a mapping of `memory` at `address`: `flags` is 0 (nothing), 1 (read) or 3 (read and write).
    fn set_access(
        &mut self,
        memory: &Self::Memory,
        mapping: &Mapping,
        address: u64,
        device: u32,
        flags: u32,
    ) -> Result<(), Status>;

    /// A descriptor by which other processes [import](GpuMemory::import) memory.
    fn export(&mut self, memory: &Self::Memory) -> Result<OwnedFd, Status>;

    /// The same for a piece of a window.
    fn export_piece(&mut self, device: u32, address: u64, piece: &Self::Piece) -> Result<OwnedFd, Status>;

    /// Opens memory of a device that another worker exported.
    fn import(&mut self, device: u32, fd: OwnedFd) -> Result<Self::Memory, Status>;
}

/// Client memory that kernels use.
pub trait GpuHostMemory {
    /// Client memory that devices reach, or a mirror of it.
    type HostView: Send;

    /// Lets devices reach client memory in place, at the client's own address. The context was entered. The command's output is not taken yet.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` where client memory cannot be mapped: the client asks for a mirror then.
    fn map_host(&mut self, _cx: &mut Call, _op: HostMap) -> Result<Self::HostView, Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Makes memory at a range that no other view touches, which devices reach there and [`Beside`] reads and writes. The context was
    /// entered. Charges `quota` for it; the charge goes with the mirror.
    fn mirror_host(
        &mut self,
        cx: &mut Call,
        op: &HostMirror,
        quota: &Quota,
    ) -> Result<(Self::HostView, Answer<HostMirrorReply>), Status>;

    /// Takes away a view that was made in the context `of`. The client has waited for the work that used it. `context` is the command's.
    fn unmap_host(&mut self, context: ContextId, of: ContextId, view: Self::HostView) -> Result<(), Status>;

    /// A view's context is gone, and the view with it.
    fn forget_host(&mut self, view: Self::HostView);
}

/// Streams, and events on them.
///
/// Methods that take a stream's number find the stream in the table. Those that enqueue something take a [`Place`](GpuStreams::Place).
pub trait GpuStreams {
    /// A stream.
    type Stream: Send;
    /// A place in a stream, to enqueue at. Its context is the one that was entered last.
    type Place;
    /// An event.
    type Event: Send;
    /// A memory operation of a stream, as the GPU takes it.
    type MemoryOp;
    /// Whether events can be shared between processes. Where not, their methods are never called.
    const SHARES_EVENTS: bool;

    /// The legacy default stream of a context.
    fn default_stream(&mut self, context: ContextId, device: u32) -> Result<Self::Stream, Status>;

    /// Makes a stream in a context that was entered.
    fn make_stream(
        &mut self,
        id: StreamId,
        context: ContextId,
        flags: u32,
        priority: i32,
    ) -> Result<Self::Stream, Status>;

    /// Takes a stream, which is not a default stream, out of the table. Its work still completes.
    fn destroy_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<(), Status>;

    /// The place in a stream where the next operation goes, in its order with its context's legacy default stream. Sets the call's context.
    fn enter_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<Self::Place, Status>;

    /// The device of a place; 0 where the GPU reaches all of the session's memory from any of its devices.
    fn device_at(place: &Self::Place) -> u32;

    /// Answers the call when everything on the stream is done. Sets the call's context.
    fn synchronize_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<(), Status>;

    /// Answers the call when everything on all streams of a context is done.
    fn synchronize_context(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        context: ContextId,
    ) -> Result<(), Status>;

    /// Calls `end` when everything that is enqueued on a device by now is done, or never will be: then its argument says why. `seq` is the command's.
    fn after_device(
        &mut self,
        streams: &mut Streams<Self::Stream>,
        device: u32,
        seq: u64,
        end: impl FnOnce(Status) + Send + 'static,
    );

    /// Raises the stream's progress word to the call's number when everything on it is done. Sets the call's context.
    fn mark_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<(), Status>;

    /// What follows waits for an event's last record.
    fn wait_event(&mut self, place: &Self::Place, event: &Self::Event, flags: u32) -> Result<(), Status>;

    /// What follows waits until the client signals `ticket`, which [`Gpu::Beside`] knows from then on.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for a ticket that something waits for already.
    fn wait_for_client(
        &mut self,
        cx: &Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        ticket: TicketId,
    ) -> Result<(), Status>;

    /// A memory operation as the GPU takes it. It is valid, and its word, if it has one, is the session's, reached through `device`.
    fn memory_op(&self, op: &MemoryOp, device: u32) -> Result<Self::MemoryOp, Status>;

    /// Enqueues memory operations.
    fn memory_ops(
        &mut self,
        cx: &Call,
        place: &Self::Place,
        operations: Vec<Self::MemoryOp>,
    ) -> Result<(), Status>;

    /// Sets an attribute of a stream. Sets the call's context, as the next two do.
    fn set_stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
        attribute: &LaunchAttribute,
    ) -> Result<(), Status>;

    /// An attribute of a stream.
    fn stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
        attribute: u32,
    ) -> Result<[u8; 64], Status>;

    /// Sets all attributes of `to` to those of `from`, a stream of the same context.
    fn copy_stream_attributes(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        from: StreamId,
        to: StreamId,
    ) -> Result<(), Status>;

    /// Makes an event in a context that was entered.
    fn make_event(&mut self, context: ContextId, flags: u32) -> Result<Self::Event, Status>;

    /// An event is out of the session's table.
    fn destroy_event(&mut self, context: ContextId, event: Self::Event) -> Result<(), Status>;

    /// Records an event of the place's context, and raises the stream's progress word to the call's number when that is reached: first the word, then the event, so that whoever
    /// learns that the event is reached finds the word there.
    fn record_event(
        &mut self,
        cx: &Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        event: &mut Self::Event,
        flags: u32,
    ) -> Result<(), Status>;

    /// Answers the call, an [`EventSynchronize`](protocol::ops::event::EventSynchronize) in the event's context, when its last record is done.
    fn synchronize_event(
        &mut self,
        cx: &Call,
        event: &Self::Event,
    ) -> Result<Answer<EventSynchronizeReply>, Status>;

    /// Answers the call with the time between the last records of two events. The call's context is that of `end`.
    fn elapsed(
        &mut self,
        cx: &Call,
        start: &Self::Event,
        end: &Self::Event,
    ) -> Result<Answer<EventElapsedReply>, Status>;

    /// The handle by which other processes open an event. Only an event that was made for it has one.
    fn export_event(&mut self, _event: &Self::Event) -> Result<Vec<u8>, Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Opens an event that another worker exported, in a context that was entered.
    fn import_event(&mut self, _context: ContextId, _handle: Vec<u8>) -> Result<Self::Event, Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Whether an event's last record is done. Its context was entered.
    fn query_event(&mut self, _context: ContextId, _event: &Self::Event) -> Result<bool, Status> {
        Err(Status::NOT_SUPPORTED)
    }
}

/// One end of a copy that concerns an array. It lies inside.
pub enum CopyEnd<'a, A> {
    /// A box in an array that has its memory.
    Array {
        /// The array.
        array: &'a A,
        /// Its shape.
        shape: &'a ArrayShape,
        /// Where the box begins: byte of a row, row, slice.
        at: [u64; 3],
    },
    /// Rows of memory.
    Memory {
        /// Where they are.
        memory: &'a Pitched,
        /// The device through which they are reached.
        device: u32,
    },
}

/// What a texture is of.
pub enum TextureSource<'a, G: GpuArrays + ?Sized> {
    /// An array, or a level of a mipmapped one.
    Array {
        /// The array.
        array: &'a G::Array,
        /// Its shape.
        shape: &'a ArrayShape,
    },
    /// A mipmapped array.
    Mipmapped {
        /// The array.
        array: &'a G::Mipmapped,
        /// The shape of its first level.
        shape: &'a ArrayShape,
        /// How many levels it has.
        levels: u32,
    },
    /// Memory of the session's.
    Memory {
        /// As the client describes it.
        resource: &'a Resource,
        /// Its rows.
        memory: Rows,
        /// Whether it has one dimension.
        is_linear: bool,
    },
}

/// An array of either kind.
pub enum AnyArray<'a, G: GpuArrays + ?Sized> {
    /// One that has elements of its own, or a level.
    Plain(&'a G::Array),
    /// A mipmapped one.
    Mipmapped(&'a G::Mipmapped),
}

/// Arrays, textures and surfaces. Contexts were entered.
pub trait GpuArrays: GpuStreams {
    /// An array, or a level of a mipmapped one.
    type Array: Send;
    /// A mipmapped array.
    type Mipmapped: Send;

    /// Bytes that an array of this shape takes, with so many levels; 0 levels: it is not mipmapped.
    ///
    /// # Errors
    /// Whatever the GPU says of a shape that its arrays cannot have.
    fn array_bytes(&self, shape: &ArrayShape, levels: u32) -> Result<u64, Status>;

    /// Makes an array that takes `bytes`; none yet if its memory is mapped later.
    fn make_array(
        &mut self,
        context: ContextId,
        shape: &ArrayShape,
        bytes: u64,
    ) -> Result<Self::Array, Status>;

    /// The same for a mipmapped array.
    fn make_mipmapped(
        &mut self,
        context: ContextId,
        shape: &ArrayShape,
        levels: u32,
        bytes: u64,
    ) -> Result<Self::Mipmapped, Status>;

    /// A level of a mipmapped array whose first level has this shape. It goes with the mipmapped array.
    fn array_level(
        &mut self,
        context: ContextId,
        array: &Self::Mipmapped,
        shape: &ArrayShape,
        level: u32,
    ) -> Result<Self::Array, Status>;

    /// An array that is no level is out of the session's table. The client has waited for the work that uses it.
    fn destroy_array(&mut self, context: ContextId, array: Self::Array) -> Result<(), Status>;

    /// The same for a mipmapped array.
    fn destroy_mipmapped(&mut self, context: ContextId, array: Self::Mipmapped) -> Result<(), Status>;

    /// Enqueues a copy of a box that is not empty.
    fn copy_array(
        &self,
        cx: &Call,
        place: &Self::Place,
        src: &CopyEnd<'_, Self::Array>,
        dst: &CopyEnd<'_, Self::Array>,
        extent: [u64; 3],
    ) -> Result<(), Status>;

    /// Makes a texture; the number by which kernels know it.
    fn make_texture(
        &self,
        context: ContextId,
        source: &TextureSource<'_, Self>,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64, Status>;

    /// A texture is out of the session's table.
    fn destroy_texture(&mut self, context: ContextId, device: u32, texture: u64) -> Result<(), Status>;

    /// Makes a surface; the number by which kernels know it.
    fn make_surface(
        &self,
        context: ContextId,
        array: &Self::Array,
        shape: &ArrayShape,
    ) -> Result<u64, Status>;

    /// A surface is out of the session's table.
    fn destroy_surface(&mut self, context: ContextId, device: u32, surface: u64) -> Result<(), Status>;

    /// The context of a texture or a surface is gone.
    fn forget_texture(&mut self, _device: u32, _handle: u64) {}

    /// Texels that a texture of linear memory can have.
    fn linear_width(&mut self, device: u32, format: u32, channels: u32) -> Result<u64, Status>;

    /// Bytes, and their alignment, of the memory that an array of so many levels needs.
    fn array_requirements(
        &self,
        context: ContextId,
        device: u32,
        array: AnyArray<'_, Self>,
        shape: &ArrayShape,
        levels: u32,
    ) -> Result<(u64, u64), Status>;
}

/// Tensor maps. Contexts were entered, and the lists of a request have the lengths that its rank says.
pub trait GpuTensorMaps {
    /// `cuTensorMapEncodeTiled`.
    fn tensor_map_tiled(&self, op: &TensorMapTiled) -> Result<[u8; 128], Status>;

    /// `cuTensorMapEncodeIm2col`.
    fn tensor_map_im2col(&self, _op: &TensorMapIm2col) -> Result<[u8; 128], Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// `cuTensorMapReplaceAddress`.
    fn tensor_map_replace_address(&self, op: &TensorMapReplaceAddress) -> Result<[u8; 128], Status>;
}

/// Green contexts, and the parts of devices that they have.
pub trait GpuGreenContexts: GpuStreams {
    /// A part of a device, a value.
    type Part: Clone + PartialEq + Send;
    /// A descriptor of parts.
    type PartDescriptor: Send;
    /// A green context.
    type Green: Send;

    /// A part as the client sees it: its kind, 0 for none, and what its kind tells.
    fn tell_part(part: &Self::Part) -> (u32, [u32; 3]);

    /// All of a device that is of a kind.
    fn device_part(&mut self, device: u32, kind: u32) -> Result<Self::Part, Status>;

    /// All of a green context that is of a kind.
    fn green_part(&mut self, green: &Self::Green, kind: u32) -> Result<Self::Part, Status>;

    /// Splits a part: how many groups of at least `least` there are, these groups, and what is left. `groups` is how many are wanted at most; `None` asks only how many there would be.
    fn split_part(
        &mut self,
        part: &Self::Part,
        groups: Option<u32>,
        flags: u32,
        least: u32,
    ) -> Result<(u32, Vec<Self::Part>, Self::Part), Status>;

    /// Describes parts together.
    fn describe_parts(&mut self, parts: Vec<Self::Part>) -> Result<Self::PartDescriptor, Status>;

    /// Makes a green context.
    fn make_green(
        &mut self,
        device: u32,
        descriptor: &Self::PartDescriptor,
        flags: u32,
    ) -> Result<Self::Green, Status>;

    /// A green context is out of the session's table, and has no streams.
    fn destroy_green(&mut self, device: u32, green: Self::Green) -> Result<(), Status>;

    /// The device of a green context is about to be reset. Its streams are forgotten.
    fn forget_green(&mut self, green: Self::Green);

    /// Makes a stream in a green context.
    fn green_stream(
        &mut self,
        id: StreamId,
        device: u32,
        green: &Self::Green,
        priority: i32,
    ) -> Result<Self::Stream, Status>;
}

/// What came of a module's load.
pub struct Loaded<M, F> {
    /// The module and its functions, in the order of its table; or the status that the image is refused with.
    pub module: Result<(M, Vec<F>), Status>,
    /// Whether a kernel of it may print.
    pub prints: bool,
    /// What the compiler says: its messages, its errors.
    pub logs: [String; 2],
}

/// An input of the linker.
pub struct LinkInput<'a> {
    /// `CUjitInputType`, one that exists.
    pub kind: u32,
    /// Its bytes. PTX ends in a NUL.
    pub data: Vec<u8>,
    /// Its name, for messages.
    pub name: &'a str,
    /// Its options.
    pub options: &'a [JitOption],
}

/// Modules, their functions and variables, launches, and the linker. Contexts were entered.
pub trait GpuModules: GpuStreams {
    /// A module.
    type Module: Send;
    /// A function of a module.
    type Function: Send;
    /// A linker at work.
    type Link: Send;
    /// A place in a stream for a launch.
    type LaunchPlace;
    /// Most bytes of an image.
    const MAX_IMAGE: u64;

    /// Loads an image.
    fn load_module(
        &mut self,
        context: ContextId,
        device: u32,
        image: Vec<u8>,
        options: &[JitOption],
    ) -> Result<Loaded<Self::Module, Self::Function>, Status>;

    /// The wire form of a module's [`FunctionTable`](protocol::ops::module::FunctionTable).
    fn function_table<'a>(
        module: &'a Self::Module,
        functions: impl Iterator<Item = &'a Self::Function>,
    ) -> Cow<'a, [u8]>
    where
        Self::Function: 'a;

    /// A module is out of the session's table. Its kernels may still run.
    fn unload_module(
        &mut self,
        streams: &mut Streams<Self::Stream>,
        context: ContextId,
        device: u32,
        module: Self::Module,
        functions: Vec<Self::Function>,
    ) -> Result<(), Status>;

    /// A variable of a module.
    fn module_global(
        &mut self,
        context: ContextId,
        module: &Self::Module,
        name: &str,
    ) -> Result<ModuleGetGlobalReply, Status>;

    /// Sets an attribute of a function.
    fn set_function_attribute(
        &mut self,
        context: ContextId,
        function: &mut Self::Function,
        attribute: u32,
        value: i32,
    ) -> Result<(), Status>;

    /// A function's attributes, by number from 0.
    fn function_attributes(
        &mut self,
        context: ContextId,
        function: &Self::Function,
    ) -> Result<Vec<i32>, Status>;

    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
    fn max_active_blocks(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyMaxActiveBlocks,
    ) -> Result<i32, Status>;

    /// `cuOccupancyAvailableDynamicSMemPerBlock`.
    fn available_shared(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyAvailableShared,
    ) -> Result<u64, Status>;

    /// `cuOccupancyMaxActiveClusters`.
    fn max_active_clusters(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyMaxActiveClusters,
    ) -> Result<i32, Status>;

    /// `cuOccupancyMaxPotentialClusterSize`.
    fn max_cluster_size(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyMaxPotentialClusterSize,
    ) -> Result<i32, Status>;

    /// As [`enter_stream`](GpuStreams::enter_stream), for a launch: the most frequent of all operations.
    fn enter_to_launch(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<Self::LaunchPlace, Status>;

    /// Enqueues a launch of a function of the place's context. The stream in `op` says nothing.
    fn launch(
        &mut self,
        place: &Self::LaunchPlace,
        function: &mut Self::Function,
        op: &Launch<'_>,
    ) -> Result<(), Status>;

    /// Makes a linker.
    fn make_link(&mut self, context: ContextId, options: &[JitOption]) -> Result<Self::Link, Status>;

    /// Adds an input: its result and what the linker has said until now, messages and errors.
    fn link_add(
        &mut self,
        context: ContextId,
        device: u32,
        link: &mut Self::Link,
        input: LinkInput<'_>,
    ) -> Result<(Status, [String; 2]), Status>;

    /// Links, if that is not done yet; answers as [`link_add`](GpuModules::link_add).
    fn link_complete(
        &mut self,
        context: ContextId,
        device: u32,
        link: &mut Self::Link,
    ) -> Result<(Status, [String; 2]), Status>;

    /// The image that came of it.
    fn link_image(link: &Self::Link) -> Option<&[u8]>;
}
