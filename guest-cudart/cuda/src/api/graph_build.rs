//! Making graphs: nodes, dependencies, clones.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, refuse_form};
use crate::abi::types::{
    BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, KernelNodeParams, KernelNodeParams1,
    MemAllocNodeParams, Memcpy3D, MemsetNodeParams,
};
use crate::graph::node_work::{Data, Kernel, Work, kind};
use crate::graph::{Edge, EdgeData, GRAPHS, Graph, conditional, edge_data, edges, node, of};
use crate::memory::graph_memory::GraphMemory;
use crate::memory::pool;
use crate::process::context;
use crate::process::driver::driver;
use crate::streams::event;
use crate::work::memory_operation::Operations;
use client::Status;

impl From<&KernelNodeParams1> for KernelNodeParams {
    fn from(p: &KernelNodeParams1) -> KernelNodeParams {
        let KernelNodeParams1 { func, grid, block, sharedMemBytes, kernelParams, extra } = *p;
        KernelNodeParams { func, grid, block, sharedMemBytes, kernelParams, extra, kern: 0, ctx: 0 }
    }
}

/// Adds a node and tells its handle.
unsafe fn add(
    to: *mut usize,
    graph: usize,
    before: *const usize,
    data: *const EdgeData,
    count: usize,
    work: impl FnOnce(&Arc<Graph>, &[Edge]) -> Result<Work>,
) -> Result {
    non_null(to)?;
    let graph = of(graph)?;
    // SAFETY: as many nodes, and as much data unless it is NULL, as the program says; the place is not NULL.
    unsafe {
        let before = edges(&graph, before, data, count)?;
        let work = work(&graph, &before)?;
        let id = graph.add(work, before)?;
        put(to, Graph::node(&graph, id)?)
    }
}

pub(crate) unsafe fn kernel(p: *const KernelNodeParams) -> Result<Work> {
    non_null(p)?;
    let driver = driver()?;
    // SAFETY: not NULL; what the program describes is its to vouch for.
    Ok(Work::Kernel(Arc::new(unsafe { Kernel::described(driver, &*p, Vec::new()) }?)))
}

pub(crate) unsafe fn host(p: *const HostNodeParams) -> Result<Work> {
    non_null(p)?;
    // SAFETY: not NULL, and the program says that it may be read.
    let p = unsafe { *p };
    Ok(Work::Host(p.function.ok_or(Status::INVALID_VALUE)?, Data(p.userData)))
}

pub(crate) fn child(handle: usize) -> Result<Work> {
    Ok(Work::Child(Arc::new(of(handle)?.copy(true)?)))
}

pub(crate) fn recorded(handle: usize) -> Result<Work> {
    event::of(handle)?;
    Ok(Work::Record(handle))
}

pub(crate) fn waited(handle: usize) -> Result<Work> {
    event::of(handle)?;
    Ok(Work::Wait(handle))
}

pub(crate) unsafe fn words(p: *const BatchMemOpNodeParams) -> Result<Work> {
    non_null(p)?;
    // SAFETY: not NULL, and the program says that it may be read.
    let p = unsafe { *p };
    if p.flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: as many operations as the program says.
    let operations = unsafe { Operations::described(driver()?, p.ctx, p.paramArray, p.count) }?;
    Ok(Work::Words(Arc::new(operations)))
}

/// An allocation that is to come behind others: its address is told at once.
unsafe fn alloc(graph: &Graph, before: &[Edge], p: *mut MemAllocNodeParams) -> Result<Work> {
    non_null(p)?;
    let driver = driver()?;
    // SAFETY: not NULL, and the program says that it may be read and written.
    let p = unsafe { &mut *p };
    if p.poolProps.allocType != 1 || p.poolProps.handleTypes != 0 || p.bytesize == 0 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: part of what was checked above.
    let device = unsafe { pool::location(&raw const p.poolProps.location) }?;
    // SAFETY: the program gives as many as it says.
    unsafe { pool::check_access(device as u32, p.accessDescs, p.accessDescCount) }?;
    let memory = GraphMemory::new(driver, graph, before, device as u32, p.bytesize as u64)?;
    p.dptr = memory.address;
    Ok(Work::Alloc(memory))
}

/// A node of any kind.
unsafe fn generic(graph: &Arc<Graph>, before: &[Edge], p: *mut GraphNodeParams) -> Result<Work> {
    non_null(p)?;
    // SAFETY: the body begins with the structure of the node's kind, and is as large as the largest.
    unsafe {
        let body = (*p).body.as_mut_ptr();
        match (*p).kind {
            kind::MEM_ALLOC => alloc(graph, before, body.cast()),
            kind::MEM_FREE => freed(*body),
            kind::CONDITIONAL => conditional::described(graph, body.cast()),
            _ => described(p),
        }
    }
}

/// What a node of a kind that has parameters to change does.
pub(crate) unsafe fn described(p: *const GraphNodeParams) -> Result<Work> {
    static SAID: AtomicBool = AtomicBool::new(false);
    non_null(p)?;
    // SAFETY: as in `generic`.
    unsafe {
        let body = (*p).body.as_ptr();
        match (*p).kind {
            kind::KERNEL => kernel(body.cast()),
            // Flags and the context come first.
            kind::MEMCPY => Work::copy(driver()?, body.add(2).cast()),
            kind::MEMSET => Work::fill(driver()?, body.cast()),
            kind::HOST => host(body.cast()),
            kind::GRAPH => child(*body as usize),
            kind::EMPTY => Ok(Work::Empty),
            kind::WAIT_EVENT => waited(*body as usize),
            kind::EVENT_RECORD => recorded(*body as usize),
            kind::MEM_ALLOC | kind::MEM_FREE | kind::CONDITIONAL => Err(Status::NOT_SUPPORTED),
            kind::BATCH_MEM_OP => words(body.cast()),
            8 | 9 => refuse_form("a graph's node for semaphores", &SAID),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

/// A free of what some graph allocates.
fn freed(address: u64) -> Result<Work> {
    if crate::memory::graph_memory::find(address).is_some() {
        Ok(Work::Free(address))
    } else {
        Err(Status::INVALID_VALUE)
    }
}

/// The numbers of both ends of dependencies between nodes of a graph.
///
/// # Safety
/// `from` and `to` may be read for `count` nodes.
unsafe fn pairs(
    graph: &Arc<Graph>,
    from: *const usize,
    to: *const usize,
    count: usize,
) -> Result<Vec<(u64, u64)>> {
    // SAFETY: as the caller says.
    let ends = unsafe {
        crate::graph::nodes(graph, from, count)?.into_iter().zip(crate::graph::nodes(graph, to, count)?)
    };
    Ok(ends.collect())
}

/// Adds dependencies, with what is said of each.
///
/// # Safety
/// As of [`pairs`]; `data` may be read for as many, unless it is NULL.
unsafe fn connect(
    graph: usize,
    from: *const usize,
    to: *const usize,
    data: *const EdgeData,
    count: usize,
) -> Result {
    let graph = of(graph)?;
    // SAFETY: as the caller says.
    let ends = unsafe { pairs(&graph, from, to, count) }?.into_iter().enumerate();
    // SAFETY: as above.
    let edges = ends.map(|(i, (from, to))| Ok((from, to, unsafe { edge_data(data, i) }?)));
    graph.connect(&edges.collect::<Result<Vec<_>>>()?)
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

    fn cuGraphDestroy(handle: usize) {
        if of(handle)?.part {
            return Err(Status::INVALID_VALUE);
        }
        GRAPHS.remove(handle).ok_or(Status::INVALID_VALUE)?.clear();
        Ok(())
    }

    fn cuGraphClone(to: *mut usize, graph: usize) {
        non_null(to)?;
        put(to, Graph::handle(&Arc::new(of(graph)?.copy(false)?))?)
    }

    fn cuGraphNodeFindInClone(to: *mut usize, original: usize, clone: usize) {
        non_null(to)?;
        let (graph, id) = node(original)?;
        let clone = of(clone)?;
        if clone.origin != Some(graph.unique) {
            return Err(Status::INVALID_VALUE);
        }
        put(to, Graph::node(&clone, id)?)
    }

    fn cuGraphDestroyNode(handle: usize) {
        let (graph, id) = node(handle)?;
        graph.remove(id)
    }

    fn cuGraphAddEmptyNode(node: *mut usize, graph: usize, before: *const usize, count: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| Ok(Work::Empty))
    }

    fn cuGraphAddKernelNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const KernelNodeParams1) {
        non_null(p)?;
        add(node, graph, before, std::ptr::null(), count, |_, _| kernel(&KernelNodeParams::from(&*p)))
    }

    fn cuGraphAddKernelNode_v2(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const KernelNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |_, _| kernel(p))
    }

    fn cuGraphAddMemcpyNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const Memcpy3D, ctx: usize) {
        context::of(ctx)?;
        add(node, graph, before, std::ptr::null(), count, |_, _| Work::copy(driver()?, p))
    }

    fn cuGraphAddMemsetNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const MemsetNodeParams, ctx: usize) {
        context::of(ctx)?;
        add(node, graph, before, std::ptr::null(), count, |_, _| Work::fill(driver()?, p))
    }

    fn cuGraphAddHostNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const HostNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |_, _| host(p))
    }

    fn cuGraphAddChildGraphNode(node: *mut usize, graph: usize, before: *const usize, count: usize, part: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| child(part))
    }

    fn cuGraphAddBatchMemOpNode(
        node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const BatchMemOpNodeParams
    ) {
        add(node, graph, before, std::ptr::null(), count, |_, _| words(p))
    }

    fn cuGraphAddEventRecordNode(node: *mut usize, graph: usize, before: *const usize, count: usize, event: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| recorded(event))
    }

    fn cuGraphAddEventWaitNode(node: *mut usize, graph: usize, before: *const usize, count: usize, event: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| waited(event))
    }

    fn cuGraphAddMemAllocNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *mut MemAllocNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |graph, before| alloc(graph, before, p))
    }

    fn cuGraphAddMemFreeNode(node: *mut usize, graph: usize, before: *const usize, count: usize, address: u64) {
        add(node, graph, before, std::ptr::null(), count, |_, _| freed(address))
    }

    fn cuGraphAddNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *mut GraphNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |graph, before| generic(graph, before, p))
    }

    fn cuGraphAddNode_v2(
        node: *mut usize, graph: usize, before: *const usize, data: *const EdgeData, count: usize, p: *mut GraphNodeParams
    ) {
        add(node, graph, before, data, count, |graph, before| generic(graph, before, p))
    }

    fn cuGraphAddDependencies(graph: usize, from: *const usize, to: *const usize, count: usize) {
        connect(graph, from, to, std::ptr::null(), count)
    }

    fn cuGraphAddDependencies_v2(graph: usize, from: *const usize, to: *const usize, data: *const EdgeData, count: usize) {
        connect(graph, from, to, data, count)
    }

    fn cuGraphRemoveDependencies(graph: usize, from: *const usize, to: *const usize, count: usize) {
        let graph = of(graph)?;
        graph.disconnect(&pairs(&graph, from, to, count)?)
    }

    fn cuGraphRemoveDependencies_v2(graph: usize, from: *const usize, to: *const usize, data: *const EdgeData, count: usize) {
        // Whatever is said of them: NVIDIA's driver does not look at the data, of which its manual says that it must match.
        let _ = data;
        let graph = of(graph)?;
        graph.disconnect(&pairs(&graph, from, to, count)?)
    }
}
