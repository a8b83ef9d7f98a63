//! Modules, their functions and variables, launches, and the linker.

use std::borrow::Cow;

use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::launch::Launch;
use protocol::ops::module::{
    JitOption, ModuleGetGlobalReply, OccupancyAvailableShared, OccupancyMaxActiveBlocks,
    OccupancyMaxActiveClusters, OccupancyMaxPotentialClusterSize, Param,
};

use super::stream::GpuStreams;
use crate::driver::call::{Call, Result};
use crate::driver::streams::Streams;

/// The result of loading a module.
pub struct Loaded<M, F> {
    /// The module and its functions in the order of its table, or the reason why the image is refused.
    pub module: Result<(M, Vec<F>)>,
    /// Whether one of its kernels may print.
    pub prints: bool,
    /// Bytes of device memory that it takes, as far as known.
    pub bytes: u64,
    /// The compiler's messages, and its errors.
    pub logs: [String; 2],
}

/// An input of the linker.
pub struct LinkInput<'a> {
    /// A valid `CUjitInputType`.
    pub kind: u32,
    /// Its bytes. PTX ends with NUL.
    pub data: Vec<u8>,
    /// Its name, for messages.
    pub name: &'a str,
    /// Its options.
    pub options: &'a [JitOption],
}

/// Modules, their functions and variables, launches, and the linker. The contexts have been entered.
pub trait GpuModules: GpuStreams {
    /// A module.
    type Module: Send;
    /// A function of a module.
    type Function: Send;
    /// A linker with its inputs.
    type Link: Send;
    /// A place in a stream for a launch.
    type LaunchPlace;
    /// Maximum size of an image, in bytes.
    const MAX_IMAGE: u64;

    /// Loads an image. `functions`: whether to return its functions; otherwise those needed are
    /// [bound](GpuModules::bind_function) later.
    fn load_module(
        &mut self,
        context: ContextId,
        device: u32,
        image: Vec<u8>,
        options: &[JitOption],
        functions: bool,
    ) -> Result<Loaded<Self::Module, Self::Function>>;

    /// Finds a function by its name.
    ///
    /// # Errors
    /// `NOT_FOUND` if there is none, `INVALID_IMAGE` if its parameters differ.
    fn bind_function(
        &mut self,
        context: ContextId,
        module: &Self::Module,
        name: &str,
        params: &[Param],
    ) -> Result<Self::Function>;

    /// The wire form of a module's [`FunctionTable`](protocol::ops::module::FunctionTable).
    fn function_table<'a>(
        module: &'a Self::Module,
        functions: impl Iterator<Item = &'a Self::Function>,
    ) -> Cow<'a, [u8]>
    where
        Self::Function: 'a;

    /// Unloads a module that the session has removed from its table. Its kernels may still be running.
    fn unload_module(
        &mut self,
        streams: &mut Streams<Self::Stream>,
        context: ContextId,
        device: u32,
        module: Self::Module,
        functions: Vec<Self::Function>,
    ) -> Result;

    /// A variable of a module.
    fn module_global(
        &mut self,
        context: ContextId,
        module: &Self::Module,
        name: &str,
    ) -> Result<ModuleGetGlobalReply>;

    /// Sets an attribute of a function.
    fn set_function_attribute(
        &mut self,
        context: ContextId,
        function: &mut Self::Function,
        attribute: u32,
        value: i32,
    ) -> Result;

    /// A function's attributes, by number from 0.
    fn function_attributes(&mut self, context: ContextId, function: &Self::Function) -> Result<Vec<i32>>;

    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
    fn max_active_blocks(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyMaxActiveBlocks,
    ) -> Result<i32>;

    /// `cuOccupancyAvailableDynamicSMemPerBlock`.
    fn available_shared(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyAvailableShared,
    ) -> Result<u64>;

    /// `cuOccupancyMaxActiveClusters`.
    fn max_active_clusters(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyMaxActiveClusters,
    ) -> Result<i32>;

    /// `cuOccupancyMaxPotentialClusterSize`.
    fn max_cluster_size(
        &mut self,
        context: ContextId,
        function: &Self::Function,
        op: &OccupancyMaxPotentialClusterSize,
    ) -> Result<i32>;

    /// Like [`enter_stream`](GpuStreams::enter_stream), for launches, which are the most frequent operation.
    fn enter_to_launch(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<Self::LaunchPlace>;

    /// Enqueues a launch of a function of the place's context. Ignores the stream in `op`.
    fn launch(&mut self, place: &Self::LaunchPlace, function: &mut Self::Function, op: &Launch<'_>)
    -> Result;

    /// Makes a linker.
    fn make_link(&mut self, context: ContextId, options: &[JitOption]) -> Result<Self::Link>;

    /// Adds an input. Returns its result, and all of the linker's messages and errors so far.
    fn link_add(
        &mut self,
        context: ContextId,
        device: u32,
        link: &mut Self::Link,
        input: LinkInput<'_>,
    ) -> Result<(Status, [String; 2])>;

    /// Links, unless that was done before. Returns the same as [`link_add`](GpuModules::link_add).
    fn link_complete(
        &mut self,
        context: ContextId,
        device: u32,
        link: &mut Self::Link,
    ) -> Result<(Status, [String; 2])>;

    /// The linked image.
    fn link_image(link: &Self::Link) -> Option<&[u8]>;
}
