//! What CUDA 12 exports and CUDA 13 does not: functions under older names, in older forms, and with the
//! suffixes `_v2` and `_v3`.

use std::ffi::{c_int, c_uint};
use std::ptr;

use crate::arguments::{Array, Count, Out};
use crate::context;
use crate::error::{Error, Result};
use crate::event::elapsed_time;
use crate::graph_nodes::with_driver_params;
use crate::registry;
use crate::types::{
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUDA_LAUNCH_PARAMS,
    CUdeviceptr, CUevent, CUexternalSemaphore, CUgraph, CUgraphEdgeData, CUgraphNode, CUgraphNodeParams,
    CUmemLocation, CUstream, LaunchParams,
};

/// `cudaCpuDeviceId`.
const CPU: c_int = -1;

/// The location that a device number stands for in functions older than `CUmemLocation`.
fn location(device: c_int) -> CUmemLocation {
    const DEVICE: c_uint = 1;
    const HOST: c_uint = 2;
    if device == CPU {
        CUmemLocation { kind: HOST, id: 0 }
    } else {
        CUmemLocation { kind: DEVICE, id: device }
    }
}

api! {
    ctx fn cudaEventElapsedTime_v2(milliseconds: Out<f32>, start: CUevent, end: CUevent) |d| {
        elapsed_time(d, milliseconds, start, end)
    };

    ctx unsafe fn cudaMemPrefetchAsync/cudaMemPrefetchAsync_ptsz(address: CUdeviceptr, count: usize, device: c_int,
        stream: CUstream) |d, s| {
        d.cuMemPrefetchAsync_v2(s, address, count, location(device), 0, stream)
    };
    ctx cudaMemPrefetchAsync_v2/cudaMemPrefetchAsync_v2_ptsz => cuMemPrefetchAsync_v2(
        address: CUdeviceptr, count: usize, location: CUmemLocation, flags: c_uint, stream: CUstream);
    ctx unsafe fn cudaMemAdvise(address: CUdeviceptr, count: usize, advice: c_uint, device: c_int) |d| {
        d.cuMemAdvise_v2(address, count, advice, location(device))
    };
    ctx cudaMemAdvise_v2 => cuMemAdvise_v2(address: CUdeviceptr, count: usize, advice: c_uint,
        location: CUmemLocation);

    ctx unsafe fn cudaStreamGetCaptureInfo/cudaStreamGetCaptureInfo_ptsz(stream: CUstream, status: *mut c_uint,
        id: *mut u64) |d, s| {
        d.cuStreamGetCaptureInfo_v3(s, stream, status, id, ptr::null_mut(), ptr::null_mut(), ptr::null_mut(),
            ptr::null_mut())
    };
    ctx unsafe fn cudaStreamGetCaptureInfo_v2/cudaStreamGetCaptureInfo_v2_ptsz(stream: CUstream, status: *mut c_uint,
        id: *mut u64,
        graph: *mut CUgraph, dependencies: *mut *const CUgraphNode, count: *mut usize) |d, s| {
        d.cuStreamGetCaptureInfo_v3(s, stream, status, id, graph, dependencies, ptr::null_mut(), count)
    };
    ctx cudaStreamGetCaptureInfo_v3/cudaStreamGetCaptureInfo_v3_ptsz => cuStreamGetCaptureInfo_v3(stream: CUstream,
        status: *mut c_uint,
        id: *mut u64, graph: *mut CUgraph, dependencies: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData,
            count: *mut usize);
    ctx unsafe fn cudaStreamUpdateCaptureDependencies/cudaStreamUpdateCaptureDependencies_ptsz(
        stream: CUstream, dependencies: *mut CUgraphNode, count: usize, flags: c_uint) |d, s| {
        d.cuStreamUpdateCaptureDependencies_v2(s, stream, dependencies, ptr::null(), count, flags)
    };
    ctx cudaStreamUpdateCaptureDependencies_v2/cudaStreamUpdateCaptureDependencies_v2_ptsz => cuStreamUpdateCaptureDependencies_v2(
        stream: CUstream, dependencies: *mut CUgraphNode, edges: *const CUgraphEdgeData, count: usize, flags: c_uint);

    ctx unsafe fn cudaGraphAddDependencies(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
        count: usize) |d| {
        d.cuGraphAddDependencies_v2(graph, from, to, ptr::null(), count)
    };
    ctx cudaGraphAddDependencies_v2 => cuGraphAddDependencies_v2(graph: CUgraph, from: *const CUgraphNode,
        to: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize);
    ctx unsafe fn cudaGraphRemoveDependencies(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
        count: usize) |d| {
        d.cuGraphRemoveDependencies_v2(graph, from, to, ptr::null(), count)
    };
    ctx cudaGraphRemoveDependencies_v2 => cuGraphRemoveDependencies_v2(graph: CUgraph, from: *const CUgraphNode,
        to: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize);
    ctx unsafe fn cudaGraphGetEdges(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, count: *mut usize) |d| {
        d.cuGraphGetEdges_v2(graph, from, to, ptr::null_mut(), count)
    };
    ctx cudaGraphGetEdges_v2 => cuGraphGetEdges_v2(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode,
        edges: *mut CUgraphEdgeData, count: *mut usize);
    ctx unsafe fn cudaGraphNodeGetDependencies(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) |d| {
        d.cuGraphNodeGetDependencies_v2(node, nodes, ptr::null_mut(), count)
    };
    ctx cudaGraphNodeGetDependencies_v2 => cuGraphNodeGetDependencies_v2(
        node: CUgraphNode, nodes: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: *mut usize);
    ctx unsafe fn cudaGraphNodeGetDependentNodes(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) |d| {
        d.cuGraphNodeGetDependentNodes_v2(node, nodes, ptr::null_mut(), count)
    };
    ctx cudaGraphNodeGetDependentNodes_v2 => cuGraphNodeGetDependentNodes_v2(
        node: CUgraphNode, nodes: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: *mut usize);
    ctx unsafe fn cudaGraphAddNode(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        p: *mut CUgraphNodeParams) |d| {
        with_driver_params(d, p, |p| d.cuGraphAddNode_v2(node, graph, after, ptr::null(), count, p))
    };
    ctx unsafe fn cudaGraphAddNode_v2(node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode,
        edges: *const CUgraphEdgeData,
        count: usize, p: *mut CUgraphNodeParams) |d| {
        with_driver_params(d, p, |p| d.cuGraphAddNode_v2(node, graph, after, edges, count, p))
    };

    ctx cudaSignalExternalSemaphoresAsync_v2/cudaSignalExternalSemaphoresAsync_v2_ptsz => cuSignalExternalSemaphoresAsync(
        semaphores: *const CUexternalSemaphore, params: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, count: c_uint,
            stream: CUstream);
    ctx cudaWaitExternalSemaphoresAsync_v2/cudaWaitExternalSemaphoresAsync_v2_ptsz => cuWaitExternalSemaphoresAsync(
        semaphores: *const CUexternalSemaphore, params: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, count: c_uint,
            stream: CUstream);
    ctx unsafe fn cudaSignalExternalSemaphoresAsync/cudaSignalExternalSemaphoresAsync_ptsz(
        semaphores: *const CUexternalSemaphore, params: Array<SignalParamsV1>, count: Count<c_uint>, stream: CUstream) |d,
            s| {
        params.required()?;
        let params: Vec<Params> = params.entries(count)?.iter().map(Params::signal).collect();
        d.cuSignalExternalSemaphoresAsync(s, semaphores, params.as_ptr().cast(), params.len() as c_uint, stream)
    };
    ctx unsafe fn cudaWaitExternalSemaphoresAsync/cudaWaitExternalSemaphoresAsync_ptsz(
        semaphores: *const CUexternalSemaphore, params: Array<WaitParamsV1>, count: Count<c_uint>, stream: CUstream) |d, s| {
        params.required()?;
        let params: Vec<Params> = params.entries(count)?.iter().map(Params::wait).collect();
        d.cuWaitExternalSemaphoresAsync(s, semaphores, params.as_ptr().cast(), params.len() as c_uint, stream)
    };

    ctx unsafe fn cudaLaunchCooperativeKernelMultiDevice(list: Array<LaunchParams>, count: Count<c_uint>,
        flags: c_uint) |d| {
        list.required()?;
        let mut launches = list.entries(count)?.iter().map(driver_launch).collect::<Result<Vec<_>>>()?;
        if launches.is_empty() { return Err(Error::INVALID_VALUE) }
        d.cuLaunchCooperativeKernelMultiDevice(launches.as_mut_ptr(), launches.len() as c_uint, flags)
    };

    init fn cudaThreadExit() |d| context::reset(d);
    ctx cudaThreadSynchronize => cuCtxSynchronize();
    ctx cudaThreadSetLimit => cuCtxSetLimit(limit: c_uint, value: usize);
    ctx cudaThreadGetLimit => cuCtxGetLimit(value: *mut usize, limit: c_uint);
    ctx cudaThreadGetCacheConfig => cuCtxGetCacheConfig(config: *mut c_uint);
    ctx cudaThreadSetCacheConfig => cuCtxSetCacheConfig(config: c_uint);
    // These converted doubles for GPUs without double precision. On every GPU since, NVIDIA's functions do
    // nothing either.
    raw fn cudaSetDoubleForDevice(_value: *mut f64) |_d| Ok(());
    raw fn cudaSetDoubleForHost(_value: *mut f64) |_d| Ok(());
}

fn driver_launch(p: &LaunchParams) -> Result<CUDA_LAUNCH_PARAMS> {
    Ok(CUDA_LAUNCH_PARAMS {
        function: registry::kernel(p.func)?,
        grid: p.grid,
        block: p.block,
        shared_mem_bytes: c_uint::try_from(p.shared_mem).map_err(|_| Error::INVALID_VALUE)?,
        stream: p.stream,
        kernel_params: p.args,
    })
}

/// `cudaExternalSemaphoreSignalParams_v1`: a fence's value, a synchronization object, a key.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SignalParamsV1 {
    values: [u64; 3],
    flags: c_uint,
}
const _: () = assert!(size_of::<SignalParamsV1>() == 32);

/// `cudaExternalSemaphoreWaitParams_v1`: the same, and how long to wait for the key.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct WaitParamsV1 {
    values: [u64; 3],
    timeout_ms: c_uint,
    /// Padding: in C, the key and its timeout are a structure of 16 bytes.
    _padding: c_uint,
    flags: c_uint,
}
const _: () = assert!(size_of::<WaitParamsV1>() == 40);

/// The current form of both: 72 bytes of values, flags, reserved words.
#[repr(C)]
struct Params {
    values: [u64; 9],
    flags: c_uint,
    reserved: [c_uint; 16],
}
const _: () = assert!(size_of::<Params>() == 144);

impl Params {
    fn new(values: [u64; 3], fourth: u64, flags: c_uint) -> Self {
        let [fence, object, key] = values;
        Params { values: [fence, object, key, fourth, 0, 0, 0, 0, 0], flags, reserved: [0; 16] }
    }

    fn signal(p: &SignalParamsV1) -> Self {
        Params::new(p.values, 0, p.flags)
    }

    fn wait(p: &WaitParamsV1) -> Self {
        Params::new(p.values, u64::from(p.timeout_ms), p.flags)
    }
}
