//! What a node does.

use std::sync::Arc;

use crate::abi::result::Result;
use crate::abi::types::{HostFn, KernelNodeParams, Memcpy3D, MemsetNodeParams, UserData, launch_attr};
use crate::code::function::Function;
use crate::code::library::{self, KERNELS};
use crate::graph::Graph;
use crate::graph::conditional::Conditional;
use crate::memory::address;
use crate::memory::graph_memory::{self, GraphMemory};
use crate::memory::pinned;
use crate::process::context::{self, Context};
use crate::process::driver::Driver;
use crate::work::copy_boxes::{self, OnDevice, Route};
use crate::work::fill::Fill;
use crate::work::launch;
use crate::work::memory_operation::Operations;
use client::Status;
use client::handle::StreamId;
use client::ops::Op;
use client::ops::graph::GraphConditional;
use client::ops::launch::{Launch, LaunchAttribute};

/// `CUgraphNodeType`.
pub(crate) mod kind {
    pub const KERNEL: u32 = 0;
    pub const MEMCPY: u32 = 1;
    pub const MEMSET: u32 = 2;
    pub const HOST: u32 = 3;
    pub const GRAPH: u32 = 4;
    pub const EMPTY: u32 = 5;
    pub const WAIT_EVENT: u32 = 6;
    pub const EVENT_RECORD: u32 = 7;
    pub const MEM_ALLOC: u32 = 10;
    pub const MEM_FREE: u32 = 11;
    pub const BATCH_MEM_OP: u32 = 12;
    pub const CONDITIONAL: u32 = 13;
}

/// What a node does.
#[derive(Clone)]
pub(crate) enum Work {
    Empty,
    Kernel(Arc<Kernel>),
    Copy(Memcpy3D),
    Fill(MemsetNodeParams),
    Host(HostFn, UserData),
    Child(Arc<Graph>),
    /// Waits for, or records, the event that the handle names when the graph is launched.
    Wait(usize),
    Record(usize),
    Alloc(Arc<GraphMemory>),
    Free(u64),
    /// Memory operations.
    Words(Arc<Operations>),
    Conditional(Arc<Conditional>),
}

impl Work {
    /// This work as a node's new work in place of `before`. Parameters of a kernel don't include attributes,
    /// so it keeps those.
    pub fn in_place_of(self, before: &Work) -> Work {
        match (before, self) {
            (Work::Kernel(before), Work::Kernel(work)) => {
                Work::Kernel(Arc::new(work.with_attributes(before.attributes.clone())))
            }
            (_, work) => work,
        }
    }
}

/// A launch, with everything that belongs to it.
pub(crate) struct Kernel {
    /// The function or the kernel, as the program named it.
    pub handle: usize,
    pub function: Arc<Function>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub attributes: Vec<LaunchAttribute>,
    params: Arc<Params>,
}

/// A kernel's parameters.
struct Params {
    bytes: Box<[u8]>,
    /// The address of each in `bytes`. The program gets them and may read them "until the node is destroyed
    /// or its parameters are modified" (`cuGraphKernelNodeGetParams`), so also after the node's attributes
    /// have changed.
    pointers: Box<[usize]>,
}

/// How a node's work is done.
pub(crate) enum Way {
    /// The server does it, as a node of a graph there: an operation's opcode and body.
    Server(u16, Vec<u8>),
    /// Nothing is done. The node exists for its dependencies.
    Nothing,
    /// This process enqueues it at each launch.
    Alone,
}

fn server<'a, T: Op<'a>>(op: &T) -> Way {
    let mut body = Vec::new();
    client::ops::encode(op, &mut body);
    Way::Server(T::INFO.opcode, body)
}

impl Kernel {
    pub fn new(
        handle: usize,
        function: Arc<Function>,
        shape: launch::Shape,
        attributes: Vec<LaunchAttribute>,
        params: &[u8],
    ) -> Kernel {
        let bytes: Box<[u8]> = params.into();
        let base = bytes.as_ptr() as usize;
        let pointers = function.params.iter().map(|param| base + param.offset as usize).collect();
        let launch::Shape { grid, block, shared } = shape;
        let params = Arc::new(Params { bytes, pointers });
        Kernel { handle, function, grid, block, shared, attributes, params }
    }

    /// The kernel that a node's parameters describe, checked like a launch.
    ///
    /// # Safety
    /// What the parameters point to may be read.
    pub unsafe fn described(
        driver: &'static Driver,
        p: &KernelNodeParams,
        attributes: Vec<LaunchAttribute>,
    ) -> Result<Kernel> {
        let (handle, function) = match (p.func, p.kern) {
            (0, 0) => return Err(Status::INVALID_VALUE),
            (0, kern) => {
                let kernel = KERNELS.get(kern).ok_or(Status::INVALID_HANDLE)?;
                (kern, kernel.in_context(context::of(p.ctx)?)?)
            }
            // With a function, the kernel and the context are ignored: NVIDIA's runtime and cuda-api-wrappers
            // leave arbitrary bytes there.
            (func, _) => (func, library::of(func)?),
        };
        let shape = launch::Shape { grid: p.grid, block: p.block, shared: p.sharedMemBytes };
        launch::check_all(driver, &function, &shape, &attributes)?;
        let mut block = Vec::new();
        // SAFETY: guaranteed by the caller.
        unsafe { launch::parameters(&function, p.kernelParams, p.extra, &mut block) }?;
        pinned::reach(driver, function.context, &block);
        Ok(Kernel::new(handle, function, shape, attributes, &block))
    }

    /// The same kernel with other attributes.
    pub fn with_attributes(&self, attributes: Vec<LaunchAttribute>) -> Kernel {
        let (function, params) = (self.function.clone(), self.params.clone());
        Kernel { function, attributes, params, ..*self }
    }

    /// Whether it may begin before the kernel ahead of it has ended.
    pub fn overlaps(&self) -> bool {
        let is_set = |attribute: &LaunchAttribute| {
            attribute.id == launch_attr::PROGRAMMATIC_STREAM_SERIALIZATION && attribute.value[..4] != [0; 4]
        };
        self.attributes.iter().any(is_set)
    }

    /// The same kernel, for which [`overlaps`](Self::overlaps) is as given.
    pub fn overlapping(self: &Arc<Kernel>, overlaps: bool) -> Arc<Kernel> {
        if self.overlaps() == overlaps {
            return self.clone();
        }
        let mut attributes = self.attributes.clone();
        attributes.retain(|attribute| attribute.id != launch_attr::PROGRAMMATIC_STREAM_SERIALIZATION);
        if overlaps {
            let mut value = [0; 64];
            value[0] = 1;
            attributes.push(LaunchAttribute { id: launch_attr::PROGRAMMATIC_STREAM_SERIALIZATION, value });
        }
        Arc::new(self.with_attributes(attributes))
    }

    /// The parameters that the program gets.
    pub fn describe(&self) -> KernelNodeParams {
        // NVIDIA's runtime recognizes its kernels only by the kernel's handle.
        let (func, kern) = match KERNELS.get(self.handle) {
            Some(_) => (0, self.handle),
            None => (self.handle, library::kernel_of(&self.function).unwrap_or(0)),
        };
        KernelNodeParams {
            func,
            grid: self.grid,
            block: self.block,
            sharedMemBytes: self.shared,
            kernelParams: self.params.pointers.as_ptr().cast(),
            extra: std::ptr::null(),
            kern,
            ctx: self.function.context.handle,
        }
    }

    /// Whether it is a kernel of a context.
    pub fn is_of(&self, context: &Context) -> bool {
        std::ptr::eq(self.function.context, context)
    }

    /// The context whose kernel it is.
    pub fn context(&self) -> &'static Context {
        self.function.context
    }

    /// How it is launched on a stream, or in a graph on the server: stream 0.
    pub fn op(&self, stream: StreamId) -> Launch<'_> {
        Launch {
            function: self.function.known_id(),
            stream,
            grid: self.grid,
            block: self.block,
            dynamic_shared: self.shared,
            attributes: self.attributes.clone(),
            params: &self.params.bytes,
        }
    }
}

impl Work {
    /// `CUgraphNodeType`.
    pub fn kind(&self) -> u32 {
        match self {
            Work::Kernel(_) => kind::KERNEL,
            Work::Copy(_) => kind::MEMCPY,
            Work::Fill(_) => kind::MEMSET,
            Work::Host(..) => kind::HOST,
            Work::Child(_) => kind::GRAPH,
            Work::Empty => kind::EMPTY,
            Work::Wait(_) => kind::WAIT_EVENT,
            Work::Record(_) => kind::EVENT_RECORD,
            Work::Alloc(_) => kind::MEM_ALLOC,
            Work::Free(_) => kind::MEM_FREE,
            Work::Words(_) => kind::BATCH_MEM_OP,
            Work::Conditional(_) => kind::CONDITIONAL,
        }
    }

    /// How the work is done in a context.
    ///
    /// # Errors
    /// The error that the same work would get on a stream now.
    pub fn way(&self, driver: &Driver, context: &'static Context) -> Result<Way> {
        Ok(match self {
            Work::Kernel(kernel) if !kernel.is_of(context) => {
                if !std::ptr::eq(kernel.function.context.server, context.server) {
                    return refuse_form!("a graph with kernels of several servers");
                }
                Way::Alone
            }
            Work::Kernel(kernel) => server(&kernel.op(StreamId(0))),
            Work::Fill(fill) => match Fill::of(driver, context.server, StreamId(0), fill)? {
                Fill::Server(_, home) if !std::ptr::eq(home.server, context.server) => Way::Alone,
                Fill::Server(op, _) => server(&op),
                Fill::Nothing => Way::Nothing,
                Fill::Here(_) => Way::Alone,
            },
            Work::Copy(copy) => match copy_boxes::route(driver, context.server, copy)? {
                Route::Nothing => Way::Nothing,
                Route::Here => Way::Alone,
                Route::Server(OnDevice::Line(op)) => server(&op),
                Route::Server(OnDevice::Box(op)) => server(&op),
            },
            Work::Empty | Work::Child(_) | Work::Alloc(_) | Work::Free(_) => Way::Nothing,
            Work::Host(..) | Work::Wait(_) | Work::Record(_) => Way::Alone,
            Work::Words(words) => words.op().map_or(Way::Alone, |op| server(&op)),
            Work::Conditional(node) => {
                Way::Server(<GraphConditional as Op>::INFO.opcode, node.first.0.to_le_bytes().to_vec())
            }
        })
    }

    /// Memory of graphs that the node copies or fills.
    pub fn graph_memory(&self) -> impl Iterator<Item = Arc<GraphMemory>> {
        let addresses = match self {
            Work::Copy(copy) => [copy.dstDevice, copy.srcDevice],
            Work::Fill(fill) => [fill.dst, 0],
            _ => [0; 2],
        };
        addresses.into_iter().filter_map(|address| graph_memory::at(address, 1))
    }

    /// A copy, checked as on a stream. A node's description has no contexts.
    pub fn copy(driver: &Driver, copy: &Memcpy3D) -> Result<Work> {
        let copy = Memcpy3D { reserved0: 0, reserved1: 0, ..copy_boxes::resolve(driver, copy)? };
        copy_boxes::route(driver, address::nearest(driver), &copy)?;
        Ok(Work::Copy(copy))
    }

    /// A fill, checked as on a stream.
    pub fn fill(driver: &Driver, fill: &MemsetNodeParams) -> Result<Work> {
        Fill::of(driver, address::nearest(driver), StreamId(0), fill)?;
        Ok(Work::Fill(*fill))
    }
}
