//! Nodes from the structures in which programs describe them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::abi::arguments::non_null;
use crate::abi::result::{Result, refuse_form};
use crate::abi::types::{
    BatchMemOpNodeParams, Data, GraphNodeParams, HostNodeParams, KernelNodeParams, MemAllocNodeParams,
};
use crate::graph::node_work::{Kernel, Work, kind};
use crate::graph::{Edge, Graph, conditional, of};
use crate::memory::pool;
use crate::process::driver::driver;
use crate::streams::event;
use crate::work::memory_operation::Operations;
use client::Status;

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
pub(crate) unsafe fn alloc(graph: &Graph, before: &[Edge], p: *mut MemAllocNodeParams) -> Result<Work> {
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
    let memory = graph.allocate(driver, before, device as u32, p.bytesize as u64)?;
    p.dptr = memory.address;
    Ok(Work::Alloc(memory))
}

/// A node of any kind.
pub(crate) unsafe fn generic(graph: &Arc<Graph>, before: &[Edge], p: *mut GraphNodeParams) -> Result<Work> {
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
pub(crate) fn freed(address: u64) -> Result<Work> {
    if crate::memory::graph_memory::find(address).is_some() {
        Ok(Work::Free(address))
    } else {
        Err(Status::INVALID_VALUE)
    }
}
