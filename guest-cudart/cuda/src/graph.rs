//! Graphs: lists of operations with what each depends on. They live here; the server hears of one when it is instantiated.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::context::{self, Context};
use crate::module::Staging;
use crate::state::{Driver, driver};
use crate::stream;
use crate::{Result, non_null, put, refuse_form};
use client::data::HostIn;
use client::handle::GraphId;
use client::handles::Slab;
use client::ops::Op;
use client::ops::copy::Memset;
use client::ops::graph::{GraphDestroy, GraphInstantiate, GraphLaunch, GraphNode, GraphNodes, GraphUpload};
use client::ops::launch::Launch;
use client::wire::{Bytes, Wire, Writer};
use client::{Status, lock};

/// Descriptions up to this many bytes go inside the record.
const INLINE: usize = 24 << 10;

/// `CUgraphInstantiate_flags`.
mod flag {
    pub const UPLOAD: u64 = 2;
    pub const DEVICE_LAUNCH: u64 = 4;
    pub const ALL: u64 = 15;
}

/// A graph.
pub(crate) struct Graph {
    pub context: &'static Context,
    nodes: Mutex<Vec<Node>>,
    handle: OnceLock<usize>,
}

struct Node {
    opcode: u16,
    body: Vec<u8>,
    dependencies: Vec<u32>,
    handle: OnceLock<usize>,
}

/// What a node's handle names.
struct NodeName {
    graph: Weak<Graph>,
    index: u32,
}

/// An instantiated graph.
struct Exec {
    id: GraphId,
    context: &'static Context,
    flags: u64,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InstantiateParams {
    flags: u64,
    stream: usize,
    error_node: usize,
    result: u32,
}

static GRAPHS: Slab<Graph> = Slab::new(9);
static EXECS: Slab<Exec> = Slab::new(10);
static NODES: Slab<NodeName> = Slab::new(11);

impl Graph {
    pub fn new(context: &'static Context) -> Graph {
        Graph { context, nodes: Mutex::default(), handle: OnceLock::new() }
    }

    /// Adds a node; its index.
    pub fn add(&self, opcode: u16, body: Vec<u8>, dependencies: Vec<u32>) -> Result<u32> {
        let mut nodes = lock(&self.nodes);
        let index = u32::try_from(nodes.len()).map_err(|_| Status::OUT_OF_MEMORY)?;
        nodes.push(Node { opcode, body, dependencies, handle: OnceLock::new() });
        Ok(index)
    }

    /// The nodes that no other depends on.
    pub fn leaves(&self) -> Vec<u32> {
        let nodes = lock(&self.nodes);
        let mut leaf = vec![true; nodes.len()];
        for dependency in nodes.iter().flat_map(|node| &node.dependencies) {
            leaf[*dependency as usize] = false;
        }
        (0..).zip(leaf).filter(|(_, leaf)| *leaf).map(|(index, _)| index).collect()
    }

    /// The graph's handle.
    pub fn handle(this: &Arc<Graph>) -> Result<usize> {
        if let Some(handle) = this.handle.get() {
            return Ok(*handle);
        }
        let made = GRAPHS.insert(this.clone()).ok_or(Status::OUT_OF_MEMORY)?;
        let kept = *this.handle.get_or_init(|| made);
        if kept != made {
            GRAPHS.remove(made);
        }
        Ok(kept)
    }

    /// A node's handle.
    pub fn node(this: &Arc<Graph>, index: u32) -> Result<usize> {
        let nodes = lock(&this.nodes);
        let node = nodes.get(index as usize).ok_or(Status::INVALID_VALUE)?;
        if let Some(handle) = node.handle.get() {
            return Ok(*handle);
        }
        let name = NodeName { graph: Arc::downgrade(this), index };
        let made = NODES.insert(Arc::new(name)).ok_or(Status::OUT_OF_MEMORY)?;
        Ok(*node.handle.get_or_init(|| made))
    }

    fn describe(&self) -> Vec<u8> {
        let nodes = lock(&self.nodes)
            .iter()
            .map(|node| GraphNode {
                opcode: node.opcode,
                dependencies: node.dependencies.clone(),
                body: Bytes(node.body.clone()),
            })
            .collect();
        let mut bytes = Vec::new();
        GraphNodes { nodes }.put(&mut Writer(&mut bytes));
        bytes
    }
}

fn of(handle: usize) -> Result<Arc<Graph>> {
    driver()?;
    GRAPHS.get(handle).ok_or(Status::INVALID_VALUE)
}

fn exec(handle: usize) -> Result<(&'static Driver, Arc<Exec>)> {
    let driver = driver()?;
    Ok((driver, EXECS.get(handle).ok_or(Status::INVALID_VALUE)?))
}

fn instantiate(graph: usize, flags: u64) -> Result<usize> {
    static IDS: AtomicU32 = AtomicU32::new(1);
    static SAID: AtomicBool = AtomicBool::new(false);
    let graph = of(graph)?;
    let driver = driver()?;
    driver.session.check()?;
    if flags & !flag::ALL != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if flags & flag::DEVICE_LAUNCH != 0 {
        return refuse_form("a graph that kernels launch", &SAID);
    }
    let bytes = graph.describe();
    let id = GraphId(IDS.fetch_add(1, Ordering::Relaxed));
    let request = |nodes| GraphInstantiate {
        context: graph.context.id,
        graph: id,
        flags: flags & !flag::UPLOAD,
        nodes,
    };
    if bytes.len() <= INLINE {
        driver.session.call(&request(HostIn::Inline(&bytes)))?;
    } else {
        let staging = Staging::new(driver, bytes.len())?;
        // SAFETY: the staging has room for as many bytes, and is nobody else's.
        unsafe { crate::copy::move_bytes(bytes.as_ptr(), staging.ptr(), bytes.len()) };
        let answer = driver.session.call(&request(HostIn::Range(staging.range(bytes.len()))));
        staging.done(driver);
        answer?;
    }
    EXECS.insert(Arc::new(Exec { id, context: graph.context, flags })).ok_or(Status::OUT_OF_MEMORY)
}

/// Appends something that an instantiated graph does on a stream.
fn on_stream<T: for<'a> Op<'a>>(
    handle: usize,
    stream: usize,
    per_thread: bool,
    op: impl FnOnce(GraphId, &stream::Stream) -> T,
) -> Result {
    let (driver, exec) = exec(handle)?;
    let (_, context) = context::ready()?;
    let stream = stream::of(driver, context, stream, per_thread)?;
    if !std::ptr::eq(stream.context, exec.context) {
        return Err(Status::INVALID_VALUE);
    }
    stream.worked(driver.session.append(&op(exec.id, &stream))?);
    Ok(())
}

/// A context's instantiated graphs are gone with it.
pub(crate) fn forget(driver: &Driver, context: &'static Context, with_server: bool) {
    for exec in EXECS.remove_where(|exec| std::ptr::eq(exec.context, context)) {
        if !with_server {
            // A lost session has no graphs.
            let _ = driver.session.append(&GraphDestroy { graph: exec.id });
        }
    }
}

/// Writes handles of the nodes that `which` picks, as many as there is room for, and their number.
unsafe fn list(
    graph: &Arc<Graph>,
    which: impl Fn(&Node) -> bool,
    to: *mut usize,
    count: *mut usize,
) -> Result {
    non_null(count)?;
    let picked: Vec<u32> =
        (0..).zip(lock(&graph.nodes).iter()).filter(|(_, node)| which(node)).map(|(i, _)| i).collect();
    // SAFETY: not NULL, as checked; the program gives room for as many handles as it says.
    unsafe {
        if to.is_null() {
            return put(count, picked.len());
        }
        let room = *count;
        for i in 0..room {
            let handle = picked.get(i).map_or(Ok(0), |index| Graph::node(graph, *index))?;
            put(to.add(i), handle)?;
        }
        put(count, room.min(picked.len()))
    }
}

api! {
    fn cuGraphCreate(graph: *mut usize, flags: u32) {
        non_null(graph)?;
        let (_, context) = context::ready()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        put(graph, Graph::handle(&Arc::new(Graph::new(context)))?)
    }

    fn cuGraphDestroy(graph: usize) {
        driver()?;
        let graph = GRAPHS.remove(graph).ok_or(Status::INVALID_VALUE)?;
        for node in lock(&graph.nodes).iter() {
            if let Some(handle) = node.handle.get() {
                NODES.remove(*handle);
            }
        }
        Ok(())
    }

    fn cuGraphAddEmptyNode(node: *mut usize, graph: usize, dependencies: *const usize, count: usize) {
        non_null(node)?;
        let graph = of(graph)?;
        let mut before = Vec::new();
        for i in 0..count {
            non_null(dependencies)?;
            let name = NODES.get(*dependencies.add(i)).ok_or(Status::INVALID_VALUE)?;
            if !name.graph.upgrade().is_some_and(|of| Arc::ptr_eq(&of, &graph)) || before.contains(&name.index) {
                return Err(Status::INVALID_VALUE);
            }
            before.push(name.index);
        }
        let index = graph.add(0, Vec::new(), before)?;
        put(node, Graph::node(&graph, index)?)
    }

    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        list(&of(graph)?, |_| true, nodes, count)
    }

    fn cuGraphGetRootNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        list(&of(graph)?, |node| node.dependencies.is_empty(), nodes, count)
    }

    fn cuGraphNodeGetType(node: usize, kind: *mut u32) {
        driver()?;
        let name = NODES.get(node).ok_or(Status::INVALID_VALUE)?;
        let graph = name.graph.upgrade().ok_or(Status::INVALID_VALUE)?;
        let opcode = lock(&graph.nodes).get(name.index as usize).ok_or(Status::INVALID_VALUE)?.opcode;
        // CU_GRAPH_NODE_TYPE_KERNEL, …MEMCPY, …MEMSET, …EMPTY.
        put(kind, match opcode {
            0 => 5,
            opcode if opcode == <Launch as Op>::INFO.opcode => 0,
            opcode if opcode == <Memset as Op>::INFO.opcode => 2,
            _ => 1,
        })
    }

    fn cuGraphInstantiateWithFlags(made: *mut usize, graph: usize, flags: u64) {
        non_null(made)?;
        if flags & flag::UPLOAD != 0 {
            return Err(Status::INVALID_VALUE);
        }
        put(made, instantiate(graph, flags)?)
    }

    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz(made: *mut usize, graph: usize, params: *mut InstantiateParams) |pt| {
        non_null(made)?;
        non_null(params)?;
        (*params).error_node = 0;
        // CUDA_GRAPH_INSTANTIATE_ERROR, until it is otherwise.
        (*params).result = 1;
        let handle = instantiate(graph, (*params).flags)?;
        if (*params).flags & flag::UPLOAD != 0 {
            on_stream(handle, (*params).stream, pt, |graph, stream| GraphUpload { graph, stream: stream.id })?;
        }
        (*params).result = 0;
        put(made, handle)
    }

    fn cuGraphExecGetFlags(handle: usize, flags: *mut u64) {
        put(flags, exec(handle)?.1.flags)
    }

    fn cuGraphUpload / cuGraphUpload_ptsz(handle: usize, stream: usize) |pt| {
        on_stream(handle, stream, pt, |graph, stream| GraphUpload { graph, stream: stream.id })
    }

    fn cuGraphLaunch / cuGraphLaunch_ptsz(handle: usize, stream: usize) |pt| {
        on_stream(handle, stream, pt, |graph, stream| GraphLaunch { graph, stream: stream.id })
    }

    fn cuGraphExecDestroy(handle: usize) {
        let driver = driver()?;
        let exec = EXECS.remove(handle).ok_or(Status::INVALID_VALUE)?;
        driver.session.append(&GraphDestroy { graph: exec.id }).map(|_| ())
    }
}
