//! Streams: creating, ordering, attributes, host functions and capture.

use std::ffi::{c_int, c_uint, c_void};

use crate::types::{
    CUdeviceptr, CUevent, CUgraph, CUgraphEdgeData, CUgraphNode, CUhostFn, CUlaunchAttributeValue, CUstream,
    CUstreamCallback,
};

api! {
    ctx unsafe fn cudaStreamCreate(stream: *mut CUstream) |d| d.cuStreamCreate(stream, 0);
    ctx cudaStreamCreateWithFlags => cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    ctx cudaStreamCreateWithPriority => cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint,
        priority: c_int);
    ctx cudaStreamDestroy => cuStreamDestroy_v2(stream: CUstream);
    ctx cudaStreamGetPriority/cudaStreamGetPriority_ptsz => cuStreamGetPriority(stream: CUstream,
        priority: *mut c_int);
    ctx cudaStreamGetFlags/cudaStreamGetFlags_ptsz => cuStreamGetFlags(stream: CUstream, flags: *mut c_uint);
    ctx cudaStreamGetId/cudaStreamGetId_ptsz => cuStreamGetId(stream: CUstream, id: *mut u64);
    ctx cudaStreamGetDevice/cudaStreamGetDevice_ptsz => cuStreamGetDevice(stream: CUstream, device: *mut c_int);
    ctx cudaStreamCopyAttributes/cudaStreamCopyAttributes_ptsz => cuStreamCopyAttributes(target: CUstream,
        source: CUstream);
    ctx cudaStreamGetAttribute/cudaStreamGetAttribute_ptsz => cuStreamGetAttribute(
        stream: CUstream, attribute: c_uint, value: *mut CUlaunchAttributeValue);
    ctx cudaStreamSetAttribute/cudaStreamSetAttribute_ptsz => cuStreamSetAttribute(
        stream: CUstream, attribute: c_uint, value: *const CUlaunchAttributeValue);
    ctx cudaStreamWaitEvent/cudaStreamWaitEvent_ptsz => cuStreamWaitEvent(stream: CUstream, event: CUevent,
        flags: c_uint);
    ctx cudaStreamAddCallback/cudaStreamAddCallback_ptsz => cuStreamAddCallback(
        stream: CUstream, callback: CUstreamCallback, user_data: *mut c_void, flags: c_uint);
    ctx cudaLaunchHostFunc/cudaLaunchHostFunc_ptsz => cuLaunchHostFunc(
        stream: CUstream, function: CUhostFn, user_data: *mut c_void);
    ctx cudaStreamSynchronize/cudaStreamSynchronize_ptsz => cuStreamSynchronize(stream: CUstream);
    ctx cudaStreamQuery/cudaStreamQuery_ptsz => cuStreamQuery(stream: CUstream);
    ctx cudaStreamAttachMemAsync/cudaStreamAttachMemAsync_ptsz => cuStreamAttachMemAsync(
        stream: CUstream, address: CUdeviceptr, length: usize, flags: c_uint);

    ctx cudaStreamBeginCapture/cudaStreamBeginCapture_ptsz => cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
    ctx cudaStreamBeginCaptureToGraph/cudaStreamBeginCaptureToGraph_ptsz => cuStreamBeginCaptureToGraph(
        stream: CUstream, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const CUgraphEdgeData,
        count: usize, mode: c_uint);
    ctx cudaThreadExchangeStreamCaptureMode => cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    ctx cudaStreamEndCapture/cudaStreamEndCapture_ptsz => cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    ctx cudaStreamIsCapturing/cudaStreamIsCapturing_ptsz => cuStreamIsCapturing(stream: CUstream,
        status: *mut c_uint);
}

#[cfg(not(feature = "v12"))]
api! {
    ctx cudaStreamGetCaptureInfo/cudaStreamGetCaptureInfo_ptsz => cuStreamGetCaptureInfo_v3(
        stream: CUstream, status: *mut c_uint, id: *mut u64, graph: *mut CUgraph,
        dependencies: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData, count: *mut usize);
    ctx cudaStreamUpdateCaptureDependencies/cudaStreamUpdateCaptureDependencies_ptsz =>
        cuStreamUpdateCaptureDependencies_v2(stream: CUstream, dependencies: *mut CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize, flags: c_uint);
}
