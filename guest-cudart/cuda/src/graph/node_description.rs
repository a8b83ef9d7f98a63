//! Nodes from the structures in which programs describe them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::arguments::{In, InOut, non_null};
use crate::abi::result::Result;
use crate::abi::types::{
    BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, KernelNodeParams, MemAccessDesc,
    MemAllocNodeParams, UserData,
};
use crate::graph::node_work::{Kernel, Work, kind};
use crate::graph::{Edge, Graph, conditional, of};
use crate::memory::pool;
use crate::process::driver::{self, driver};
use crate::streams::event;
use crate::work::memory_operation::Operations;
use client::Status;

/// A launch.
///
/// # Safety
/// The structure points to the kernel's parameters as CUDA's manual requires.
pub(crate) unsafe fn kernel(p: In<KernelNodeParams>) -> Result<Work> {
    let p = p.get()?;
    // SAFETY: guaranteed by the caller.
    Ok(Work::Kernel(Arc::new(unsafe { Kernel::described(driver()?, &p, Vec::new()) }?)))
}

/// A host function.
pub(crate) fn host(p: In<HostNodeParams>) -> Result<Work> {
    let p = p.get()?;
    Ok(Work::Host(p.function.ok_or(Status::INVALID_VALUE)?, UserData(p.userData)))
}

/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`. NVIDIA's driver takes all other values for `…_CLONE`.
const MOVE: u32 = 1;

/// A child graph of a new node, which has a copy of the graph or takes the graph itself.
fn new_child(graph: &Arc<Graph>, handle: usize, ownership: u32) -> Result<Work> {
    if ownership != MOVE {
        return copied_child(handle);
    }
    let moved = of(handle)?;
    moved.may_move_into(graph)?;
    Ok(Work::Child(moved))
}

/// A child graph of a new node, with a copy of a graph.
pub(crate) fn copied_child(handle: usize) -> Result<Work> {
    of(handle)?.not_moved()?;
    child(handle)
}

/// A child graph with a copy of a graph.
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

/// Memory operations.
///
/// # Safety
/// The structure points to as many operations as it says.
pub(crate) unsafe fn words(p: In<BatchMemOpNodeParams>) -> Result<Work> {
    let p = p.get()?;
    if p.flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    let operations = unsafe { Operations::described(driver()?, p.ctx, p.paramArray, p.count) }?;
    Ok(Work::Words(Arc::new(operations)))
}

/// An allocation node that depends on others. Its address is known at once.
///
/// # Safety
/// The structure points to as many access descriptions as it says.
pub(crate) unsafe fn alloc(graph: &Graph, before: &[Edge], to: InOut<MemAllocNodeParams>) -> Result<Work> {
    let mut p = to.get()?;
    let driver = driver()?;
    if p.poolProps.allocType != 1 || p.poolProps.handleTypes != 0 || p.bytesize == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let device = pool::location(p.poolProps.location)?;
    let mut given = BTreeMap::new();
    if p.accessDescCount != 0 {
        non_null(p.accessDescs)?;
        if p.accessDescCount > isize::MAX as usize / size_of::<MemAccessDesc>() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not NULL, and as many as the caller says, whose bytes fit into the address space.
        let access = unsafe { std::slice::from_raw_parts(p.accessDescs, p.accessDescCount) };
        given.extend(pool::check_access(Some(driver::device(device)?), access)?);
    }
    let access = pool::access_of_others(device as u32, &given);
    let memory = graph.allocate(driver, before, device as u32, &access, p.bytesize as u64)?;
    p.dptr = memory.address;
    to.put(p)?;
    Ok(Work::Alloc(memory))
}

/// A node of any kind.
///
/// # Safety
/// The body contains the structure of the node's kind, whose pointers are as CUDA's manual requires.
pub(crate) unsafe fn generic(
    graph: &Arc<Graph>,
    before: &[Edge],
    to: InOut<GraphNodeParams>,
) -> Result<Work> {
    let mut p = to.get()?;
    let first = p.body[0];
    let body: *mut u64 = p.body.as_mut_ptr();
    // SAFETY: the body begins with the structure of the node's kind, and is as large as the largest.
    let work = unsafe {
        match p.kind {
            kind::MEM_ALLOC => alloc(graph, before, InOut::from(&mut *body.cast())),
            kind::MEM_FREE => freed(first),
            kind::CONDITIONAL => conditional::described(graph, &mut *body.cast()),
            // The ownership follows the handle.
            kind::GRAPH => new_child(graph, first as usize, p.body[1] as u32),
            _ => described(In::from(&p)),
        }
    }?;
    // These two kinds return something to the program.
    if matches!(p.kind, kind::MEM_ALLOC | kind::CONDITIONAL) {
        to.put(p)?;
    }
    Ok(work)
}

/// The work of a node whose parameters can be changed, by its kind.
///
/// # Safety
/// As for [`generic`].
pub(crate) unsafe fn described(p: In<GraphNodeParams>) -> Result<Work> {
    let p = p.get()?;
    let first = p.body[0];
    let body = p.body.as_ptr();
    // SAFETY: the body begins with the structure of the node's kind, and is as large as the largest.
    unsafe {
        match p.kind {
            kind::KERNEL => kernel(In::from(&*body.cast())),
            // Flags and the context come first.
            kind::MEMCPY => Work::copy(driver()?, &*body.add(2).cast()),
            kind::MEMSET => Work::fill(driver()?, &*body.cast()),
            kind::HOST => host(In::from(&*body.cast())),
            kind::GRAPH => child(first as usize),
            kind::EMPTY => Ok(Work::Empty),
            kind::WAIT_EVENT => waited(first as usize),
            kind::EVENT_RECORD => recorded(first as usize),
            kind::MEM_ALLOC | kind::MEM_FREE | kind::CONDITIONAL => Err(Status::NOT_SUPPORTED),
            kind::BATCH_MEM_OP => words(In::from(&*body.cast())),
            8 | 9 => refuse_form!("a graph's node for semaphores"),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

/// A free of memory that a graph allocates.
pub(crate) fn freed(address: u64) -> Result<Work> {
    if crate::memory::graph_memory::find(address).is_some() {
        Ok(Work::Free(address))
    } else {
        Err(Status::INVALID_VALUE)
    }
}
