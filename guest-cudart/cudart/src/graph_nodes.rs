//! Graph nodes: adding them, and reading and changing their parameters, in a graph or in an executable graph.
//!
//! The two APIs describe most kinds of nodes alike. Three kinds differ: kernel nodes (the runtime names the
//! host stub), copy nodes (the runtime counts elements), and nodes that run in a context, which the driver
//! wants to know and the runtime leaves out.

use std::ffi::{c_uint, c_void};
use std::ptr;

use crate::arguments::{In, Out};
use crate::context::required_context;
use crate::copy_boxes::{of_bytes, of_parms, to_parms};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::registry;
use crate::types::{
    CUDA_EXT_SEM_SIGNAL_NODE_PARAMS, CUDA_EXT_SEM_WAIT_NODE_PARAMS, CUDA_HOST_NODE_PARAMS,
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUevent,
    CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeParams, CUlaunchAttributeValue, KernelNodeParams,
    Memcpy3DParms,
};
use crate::variable::{check_direction, place};

/// The driver's parameters of a kernel node in the current context.
fn kernel_to_driver(p: &KernelNodeParams) -> Result<CUDA_KERNEL_NODE_PARAMS> {
    Ok(CUDA_KERNEL_NODE_PARAMS {
        func: ptr::null_mut(),
        grid: p.grid,
        block: p.block,
        shared_mem_bytes: p.shared_mem_bytes,
        kernel_params: p.kernel_params,
        extra: p.extra,
        kern: registry::kernel(p.func)?,
        ctx: ptr::null_mut(),
    })
}

fn kernel_params(p: In<KernelNodeParams>) -> Result<CUDA_KERNEL_NODE_PARAMS> {
    kernel_to_driver(&p.get()?)
}

fn copy_params(d: &Driver, p: In<Memcpy3DParms>) -> Result<CUDA_MEMCPY3D> {
    of_parms(d, &p.get()?)
}

fn to_symbol(
    d: &Driver,
    symbol: *const c_void,
    src: *const c_void,
    count: usize,
    offset: usize,
    kind: c_uint,
) -> Result<CUDA_MEMCPY3D> {
    check_direction(kind, false)?;
    of_bytes(place(d, symbol, count, offset)?, src, count, kind)
}

fn from_symbol(
    d: &Driver,
    dst: *mut c_void,
    symbol: *const c_void,
    count: usize,
    offset: usize,
    kind: c_uint,
) -> Result<CUDA_MEMCPY3D> {
    check_direction(kind, true)?;
    of_bytes(dst, place(d, symbol, count, offset)?, count, kind)
}

api! {
    ctx unsafe fn cudaGraphAddKernelNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        p: In<KernelNodeParams>) |d| {
        d.cuGraphAddKernelNode_v2(node, graph, after, count, &kernel_params(p)?)
    };
    ctx unsafe fn cudaGraphKernelNodeGetParams(node: CUgraphNode, out: Out<KernelNodeParams>) |d| {
        out.required()?;
        let mut p = CUDA_KERNEL_NODE_PARAMS::default();
        d.cuGraphKernelNodeGetParams_v2(node, &mut p)?;
        out.put(KernelNodeParams {
            func: registry::host_function_of(d, p.kern, p.func),
            grid: p.grid,
            block: p.block,
            shared_mem_bytes: p.shared_mem_bytes,
            kernel_params: p.kernel_params,
            extra: p.extra,
        })
    };
    ctx unsafe fn cudaGraphKernelNodeSetParams(node: CUgraphNode, p: In<KernelNodeParams>) |d| {
        d.cuGraphKernelNodeSetParams_v2(node, &kernel_params(p)?)
    };
    ctx unsafe fn cudaGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, p: In<KernelNodeParams>) |d| {
        d.cuGraphExecKernelNodeSetParams_v2(exec, node, &kernel_params(p)?)
    };
    ctx cudaGraphKernelNodeCopyAttributes => cuGraphKernelNodeCopyAttributes(target: CUgraphNode,
        source: CUgraphNode);
    ctx cudaGraphKernelNodeGetAttribute => cuGraphKernelNodeGetAttribute(node: CUgraphNode, attribute: c_uint,
        value: *mut CUlaunchAttributeValue);
    ctx cudaGraphKernelNodeSetAttribute => cuGraphKernelNodeSetAttribute(node: CUgraphNode, attribute: c_uint,
        value: *const CUlaunchAttributeValue);

    ctx unsafe fn cudaGraphAddMemcpyNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        p: In<Memcpy3DParms>) |d| {
        d.cuGraphAddMemcpyNode(node, graph, after, count, &copy_params(d, p)?, required_context(d)?)
    };
    ctx unsafe fn cudaGraphAddMemcpyNode1D(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        dst: *mut c_void, src: *const c_void, bytes: usize, kind: c_uint) |d| {
        d.cuGraphAddMemcpyNode(node, graph, after, count, &of_bytes(dst, src, bytes, kind)?, required_context(d)?)
    };
    ctx unsafe fn cudaGraphAddMemcpyNodeToSymbol(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode,
        count: usize,
        symbol: *const c_void, src: *const c_void, bytes: usize, offset: usize, kind: c_uint) |d| {
        d.cuGraphAddMemcpyNode(node, graph, after, count, &to_symbol(d, symbol, src, bytes, offset, kind)?,
            required_context(d)?)
    };
    ctx unsafe fn cudaGraphAddMemcpyNodeFromSymbol(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode,
        count: usize,
        dst: *mut c_void, symbol: *const c_void, bytes: usize, offset: usize, kind: c_uint) |d| {
        d.cuGraphAddMemcpyNode(node, graph, after, count, &from_symbol(d, dst, symbol, bytes, offset, kind)?,
            required_context(d)?)
    };
    ctx unsafe fn cudaGraphMemcpyNodeGetParams(node: CUgraphNode, out: Out<Memcpy3DParms>) |d| {
        out.required()?;
        let mut copy = CUDA_MEMCPY3D::default();
        d.cuGraphMemcpyNodeGetParams(node, &mut copy)?;
        out.put(to_parms(d, &copy)?)
    };
    ctx unsafe fn cudaGraphMemcpyNodeSetParams(node: CUgraphNode, p: In<Memcpy3DParms>) |d| {
        d.cuGraphMemcpyNodeSetParams(node, &copy_params(d, p)?)
    };
    ctx unsafe fn cudaGraphMemcpyNodeSetParams1D(node: CUgraphNode, dst: *mut c_void, src: *const c_void, bytes: usize,
        kind: c_uint) |d| {
        d.cuGraphMemcpyNodeSetParams(node, &of_bytes(dst, src, bytes, kind)?)
    };
    ctx unsafe fn cudaGraphMemcpyNodeSetParamsToSymbol(node: CUgraphNode, symbol: *const c_void, src: *const c_void,
        bytes: usize, offset: usize, kind: c_uint) |d| {
        d.cuGraphMemcpyNodeSetParams(node, &to_symbol(d, symbol, src, bytes, offset, kind)?)
    };
    ctx unsafe fn cudaGraphMemcpyNodeSetParamsFromSymbol(node: CUgraphNode, dst: *mut c_void, symbol: *const c_void,
        bytes: usize, offset: usize, kind: c_uint) |d| {
        d.cuGraphMemcpyNodeSetParams(node, &from_symbol(d, dst, symbol, bytes, offset, kind)?)
    };
    ctx unsafe fn cudaGraphExecMemcpyNodeSetParams(exec: CUgraphExec, node: CUgraphNode, p: In<Memcpy3DParms>) |d| {
        d.cuGraphExecMemcpyNodeSetParams(exec, node, &copy_params(d, p)?, required_context(d)?)
    };
    ctx unsafe fn cudaGraphExecMemcpyNodeSetParams1D(exec: CUgraphExec, node: CUgraphNode, dst: *mut c_void,
        src: *const c_void, bytes: usize, kind: c_uint) |d| {
        d.cuGraphExecMemcpyNodeSetParams(exec, node, &of_bytes(dst, src, bytes, kind)?, required_context(d)?)
    };
    ctx unsafe fn cudaGraphExecMemcpyNodeSetParamsToSymbol(exec: CUgraphExec, node: CUgraphNode, symbol: *const c_void,
        src: *const c_void,
        bytes: usize, offset: usize, kind: c_uint) |d| {
        d.cuGraphExecMemcpyNodeSetParams(exec, node, &to_symbol(d, symbol, src, bytes, offset, kind)?,
            required_context(d)?)
    };
    ctx unsafe fn cudaGraphExecMemcpyNodeSetParamsFromSymbol(exec: CUgraphExec, node: CUgraphNode, dst: *mut c_void,
        symbol: *const c_void,
        bytes: usize, offset: usize, kind: c_uint) |d| {
        d.cuGraphExecMemcpyNodeSetParams(exec, node, &from_symbol(d, dst, symbol, bytes, offset, kind)?,
            required_context(d)?)
    };

    ctx unsafe fn cudaGraphAddMemsetNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        p: *const CUDA_MEMSET_NODE_PARAMS) |d| {
        d.cuGraphAddMemsetNode(node, graph, after, count, p, required_context(d)?)
    };
    ctx cudaGraphMemsetNodeGetParams => cuGraphMemsetNodeGetParams(node: CUgraphNode,
        p: *mut CUDA_MEMSET_NODE_PARAMS);
    ctx cudaGraphMemsetNodeSetParams => cuGraphMemsetNodeSetParams(node: CUgraphNode,
        p: *const CUDA_MEMSET_NODE_PARAMS);
    ctx unsafe fn cudaGraphExecMemsetNodeSetParams(exec: CUgraphExec, node: CUgraphNode,
        p: *const CUDA_MEMSET_NODE_PARAMS) |d| {
        d.cuGraphExecMemsetNodeSetParams(exec, node, p, required_context(d)?)
    };

    ctx cudaGraphAddHostNode => cuGraphAddHostNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode,
        count: usize, p: *const CUDA_HOST_NODE_PARAMS);
    ctx cudaGraphHostNodeGetParams => cuGraphHostNodeGetParams(node: CUgraphNode, p: *mut CUDA_HOST_NODE_PARAMS);
    ctx cudaGraphHostNodeSetParams => cuGraphHostNodeSetParams(node: CUgraphNode, p: *const CUDA_HOST_NODE_PARAMS);
    ctx cudaGraphExecHostNodeSetParams => cuGraphExecHostNodeSetParams(exec: CUgraphExec, node: CUgraphNode,
        p: *const CUDA_HOST_NODE_PARAMS);

    ctx cudaGraphAddChildGraphNode => cuGraphAddChildGraphNode(node: *mut CUgraphNode, graph: CUgraph,
        after: *const CUgraphNode, count: usize, child: CUgraph);
    ctx cudaGraphChildGraphNodeGetGraph => cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph);
    ctx cudaGraphExecChildGraphNodeSetParams => cuGraphExecChildGraphNodeSetParams(exec: CUgraphExec,
        node: CUgraphNode, child: CUgraph);
    ctx cudaGraphAddEmptyNode => cuGraphAddEmptyNode(node: *mut CUgraphNode, graph: CUgraph,
        after: *const CUgraphNode, count: usize);

    ctx cudaGraphAddEventRecordNode => cuGraphAddEventRecordNode(node: *mut CUgraphNode, graph: CUgraph,
        after: *const CUgraphNode, count: usize, event: CUevent);
    ctx cudaGraphEventRecordNodeGetEvent => cuGraphEventRecordNodeGetEvent(node: CUgraphNode, event: *mut CUevent);
    ctx cudaGraphEventRecordNodeSetEvent => cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent);
    ctx cudaGraphExecEventRecordNodeSetEvent => cuGraphExecEventRecordNodeSetEvent(exec: CUgraphExec,
        node: CUgraphNode, event: CUevent);
    ctx cudaGraphAddEventWaitNode => cuGraphAddEventWaitNode(node: *mut CUgraphNode, graph: CUgraph,
        after: *const CUgraphNode, count: usize, event: CUevent);
    ctx cudaGraphEventWaitNodeGetEvent => cuGraphEventWaitNodeGetEvent(node: CUgraphNode, event: *mut CUevent);
    ctx cudaGraphEventWaitNodeSetEvent => cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent);
    ctx cudaGraphExecEventWaitNodeSetEvent => cuGraphExecEventWaitNodeSetEvent(exec: CUgraphExec, node: CUgraphNode,
        event: CUevent);

    ctx cudaGraphAddExternalSemaphoresSignalNode => cuGraphAddExternalSemaphoresSignalNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        p: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
    ctx cudaGraphExternalSemaphoresSignalNodeGetParams => cuGraphExternalSemaphoresSignalNodeGetParams(
        node: CUgraphNode, p: *mut CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
    ctx cudaGraphExternalSemaphoresSignalNodeSetParams => cuGraphExternalSemaphoresSignalNodeSetParams(
        node: CUgraphNode, p: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
    ctx cudaGraphExecExternalSemaphoresSignalNodeSetParams => cuGraphExecExternalSemaphoresSignalNodeSetParams(
        exec: CUgraphExec, node: CUgraphNode, p: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
    ctx cudaGraphAddExternalSemaphoresWaitNode => cuGraphAddExternalSemaphoresWaitNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        p: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS);
    ctx cudaGraphExternalSemaphoresWaitNodeGetParams => cuGraphExternalSemaphoresWaitNodeGetParams(node: CUgraphNode,
        p: *mut CUDA_EXT_SEM_WAIT_NODE_PARAMS);
    ctx cudaGraphExternalSemaphoresWaitNodeSetParams => cuGraphExternalSemaphoresWaitNodeSetParams(node: CUgraphNode,
        p: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS);
    ctx cudaGraphExecExternalSemaphoresWaitNodeSetParams => cuGraphExecExternalSemaphoresWaitNodeSetParams(
        exec: CUgraphExec, node: CUgraphNode, p: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS);

    ctx cudaGraphAddMemAllocNode => cuGraphAddMemAllocNode(node: *mut CUgraphNode, graph: CUgraph,
        after: *const CUgraphNode, count: usize, p: *mut CUDA_MEM_ALLOC_NODE_PARAMS);
    ctx cudaGraphMemAllocNodeGetParams => cuGraphMemAllocNodeGetParams(node: CUgraphNode,
        p: *mut CUDA_MEM_ALLOC_NODE_PARAMS);
    ctx cudaGraphAddMemFreeNode => cuGraphAddMemFreeNode(node: *mut CUgraphNode, graph: CUgraph,
        after: *const CUgraphNode, count: usize, address: *mut c_void);
    ctx unsafe fn cudaGraphMemFreeNodeGetParams(node: CUgraphNode, address: *mut c_void) |d| {
        d.cuGraphMemFreeNodeGetParams(node, address.cast())
    };

    ctx cudaGraphNodeSetEnabled => cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, enabled: c_uint);
    ctx cudaGraphNodeGetEnabled => cuGraphNodeGetEnabled(exec: CUgraphExec, node: CUgraphNode, enabled: *mut c_uint);
    ctx unsafe fn cudaGraphConditionalHandleCreate(handle: *mut u64, graph: CUgraph, default: c_uint, flags: c_uint) |d| {
        d.cuGraphConditionalHandleCreate(handle, graph, required_context(d)?, default, flags)
    };
    ctx unsafe fn cudaGraphNodeSetParams(node: CUgraphNode, p: *mut CUgraphNodeParams) |d| {
        with_driver_params(d, p, |p| d.cuGraphNodeSetParams(node, p))
    };
    ctx unsafe fn cudaGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, p: *mut CUgraphNodeParams) |d| {
        with_driver_params(d, p, |p| d.cuGraphExecNodeSetParams(exec, node, p))
    };
}

#[cfg(not(feature = "v12"))]
api! {
    ctx unsafe fn cudaGraphAddNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode,
        edges: *const crate::types::CUgraphEdgeData,
        count: usize, p: *mut CUgraphNodeParams) |d| {
        with_driver_params(d, p, |p| d.cuGraphAddNode_v2(node, graph, after, edges, count, p))
    };
}

/// `CUgraphNodeType`: the kinds whose parameters differ between the APIs.
mod node {
    pub(super) const KERNEL: u32 = 0;
    pub(super) const MEMCPY: u32 = 1;
    pub(super) const MEMSET: u32 = 2;
    pub(super) const CONDITIONAL: u32 = 13;
}

/// Where the copy begins in a `cudaMemcpyNodeParams`, in words of 8 bytes. The runtime puts flags and three
/// reserved integers before it; the driver puts flags, one reserved integer and the context there, also 16
/// bytes.
const COPY_AT: usize = 2;
/// The word of a memset's parameters where the driver has the context.
const MEMSET_CONTEXT: usize = 5;
/// The word of a conditional node's parameters where the driver has the context, after the runtime's own
/// words.
const CONDITIONAL_CONTEXT: usize = 3;

/// Calls the driver with its own form of a node's parameters, and copies back what the driver wrote into it
/// (the address of an allocation, the graphs of a conditional node).
pub(crate) unsafe fn with_driver_params(
    d: &Driver,
    p: *mut CUgraphNodeParams,
    call: impl FnOnce(*mut CUgraphNodeParams) -> Result,
) -> Result {
    // SAFETY: the caller passes the program's parameters or NULL.
    let p = unsafe { p.as_mut() }.ok_or(Error::INVALID_VALUE)?;
    let mut driver = *p;
    let words = driver.body.as_mut_ptr();
    // SAFETY: the union begins with parameters of the node's kind and is as large as the largest kind in
    // either API: a `KernelNodeParams`, a `CUDA_KERNEL_NODE_PARAMS`, or a copy after two words.
    unsafe {
        match p.kind {
            node::KERNEL => {
                let kernel = kernel_to_driver(&*p.body.as_ptr().cast::<KernelNodeParams>())?;
                words.cast::<CUDA_KERNEL_NODE_PARAMS>().write(kernel);
            }
            node::MEMCPY => {
                let copy = of_parms(d, &*p.body.as_ptr().add(COPY_AT).cast::<Memcpy3DParms>())?;
                words.add(1).cast::<*mut c_void>().write(required_context(d)?);
                words.add(COPY_AT).cast::<CUDA_MEMCPY3D>().write(copy);
            }
            node::MEMSET => words.add(MEMSET_CONTEXT).cast::<*mut c_void>().write(required_context(d)?),
            _ => {}
        }
    }
    if p.kind == node::CONDITIONAL {
        return conditional(d, p, driver, call);
    }
    call(&mut driver)?;
    if !matches!(p.kind, node::KERNEL | node::MEMCPY | node::MEMSET) {
        *p = driver;
    }
    Ok(())
}

/// A conditional node: handle, type and size, and the graphs that the driver makes; for the driver, the
/// context follows.
fn conditional(
    d: &Driver,
    p: &mut CUgraphNodeParams,
    mut driver: CUgraphNodeParams,
    call: impl FnOnce(*mut CUgraphNodeParams) -> Result,
) -> Result {
    driver.body[CONDITIONAL_CONTEXT] = required_context(d)?.addr() as u64;
    call(&mut driver)?;
    p.body[..CONDITIONAL_CONTEXT].copy_from_slice(&driver.body[..CONDITIONAL_CONTEXT]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::fake_driver::{self, Fake};

    fn driver() -> &'static Driver {
        crate::context::bound().unwrap()
    }

    /// The words of a node's parameters as the driver gets them.
    fn seen_by_driver(p: &mut CUgraphNodeParams) -> Result<[u64; 29]> {
        let mut seen = [0; 29];
        // SAFETY: the description is a live local variable; the driver's form is valid during the call.
        unsafe {
            with_driver_params(driver(), p, |p| {
                seen = (*p).body;
                Ok(())
            })?;
        }
        Ok(seen)
    }

    #[test]
    fn a_memset_node_gets_the_current_context_without_showing_it_to_the_program() {
        let _fake = Fake::new();
        let mut p = CUgraphNodeParams { kind: node::MEMSET, ..CUgraphNodeParams::default() };
        p.body[..5].copy_from_slice(&[0x7000, 64, 5 | 4 << 32, 16, 1]);
        let seen = seen_by_driver(&mut p).unwrap();
        assert_eq!(seen[..6], [0x7000, 64, 5 | 4 << 32, 16, 1, fake_driver::primary(0) as u64]);
        assert_eq!(p.body[MEMSET_CONTEXT], 0);
    }

    #[test]
    fn a_copy_node_counts_bytes_and_follows_its_context() {
        let _fake = Fake::new();
        let mut p = CUgraphNodeParams { kind: node::MEMCPY, ..CUgraphNodeParams::default() };
        let rows = |address: usize| crate::types::PitchedPtr {
            ptr: ptr::without_provenance_mut(address),
            pitch: 64,
            xsize: 64,
            ysize: 2,
        };
        let extent = crate::types::Extent { width: 48, height: 2, depth: 1 };
        let copy = Memcpy3DParms {
            src_ptr: rows(0x1000),
            dst_ptr: rows(0x2000),
            extent,
            kind: 1,
            ..Memcpy3DParms::default()
        };
        // SAFETY: the copy lies inside the union, after its two words.
        unsafe { p.body.as_mut_ptr().add(COPY_AT).cast::<Memcpy3DParms>().write(copy) };
        let seen = seen_by_driver(&mut p).unwrap();
        assert_eq!(seen[1], fake_driver::primary(0) as u64);
        // SAFETY: the driver's copy starts at the same word as the runtime's.
        let driver = unsafe { *seen.as_ptr().add(COPY_AT).cast::<CUDA_MEMCPY3D>() };
        assert_eq!((driver.src_host.addr(), driver.dst_device.addr()), (0x1000, 0x2000));
        assert_eq!((driver.width_in_bytes, driver.height, driver.depth), (48, 2, 1));
    }

    #[test]
    fn a_kernel_node_of_an_unregistered_function_is_refused() {
        let _fake = Fake::new();
        let mut p = CUgraphNodeParams { kind: node::KERNEL, ..CUgraphNodeParams::default() };
        p.body[0] = 0x1234;
        assert_eq!(seen_by_driver(&mut p).err(), Some(Error::INVALID_RESOURCE_HANDLE));
    }
}
