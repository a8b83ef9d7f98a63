//! Whole graphs: their structure, instantiation, launching, and the objects that they keep alive. Nodes are
//! in `graph_nodes`.

use std::ffi::{c_char, c_uint, c_void};

#[cfg(not(feature = "v12"))]
use crate::types::CUgraphEdgeData;
use crate::types::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraph, CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphNode, CUhostFn,
    CUstream, CUuserObject,
};

api! {
    ctx cudaGraphCreate => cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    ctx cudaGraphDestroy => cuGraphDestroy(graph: CUgraph);
    ctx cudaGraphClone => cuGraphClone(clone: *mut CUgraph, original: CUgraph);
    ctx cudaGraphNodeFindInClone => cuGraphNodeFindInClone(node: *mut CUgraphNode, original: CUgraphNode,
        clone: CUgraph);
    ctx cudaGraphNodeGetType => cuGraphNodeGetType(node: CUgraphNode, kind: *mut c_uint);
    ctx cudaGraphGetNodes => cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
    ctx cudaGraphGetRootNodes => cuGraphGetRootNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
    ctx cudaGraphDestroyNode => cuGraphDestroyNode(node: CUgraphNode);
    ctx unsafe fn cudaGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: c_uint) |d| {
        /// Makes the driver describe nodes in the runtime's terms.
        const RUNTIME_TYPES: c_uint = 1 << 1;
        d.cuGraphDebugDotPrint(graph, path, flags | RUNTIME_TYPES)
    };

    ctx cudaGraphInstantiate => cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
    ctx cudaGraphInstantiateWithFlags => cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph,
        flags: u64);
    ctx cudaGraphInstantiateWithParams/cudaGraphInstantiateWithParams_ptsz => cuGraphInstantiateWithParams(
        exec: *mut CUgraphExec, graph: CUgraph, params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS);
    ctx cudaGraphExecGetFlags => cuGraphExecGetFlags(exec: CUgraphExec, flags: *mut u64);
    ctx cudaGraphExecUpdate => cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph,
        result: *mut CUgraphExecUpdateResultInfo);
    ctx cudaGraphExecDestroy => cuGraphExecDestroy(exec: CUgraphExec);
    ctx cudaGraphUpload/cudaGraphUpload_ptsz => cuGraphUpload(exec: CUgraphExec, stream: CUstream);
    ctx cudaGraphLaunch/cudaGraphLaunch_ptsz => cuGraphLaunch(exec: CUgraphExec, stream: CUstream);

    ctx cudaUserObjectCreate => cuUserObjectCreate(
        object: *mut CUuserObject, value: *mut c_void, destroy: CUhostFn, count: c_uint, flags: c_uint);
    ctx cudaUserObjectRetain => cuUserObjectRetain(object: CUuserObject, count: c_uint);
    ctx cudaUserObjectRelease => cuUserObjectRelease(object: CUuserObject, count: c_uint);
    ctx cudaGraphRetainUserObject => cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint,
        flags: c_uint);
    ctx cudaGraphReleaseUserObject => cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint);
}

#[cfg(not(feature = "v12"))]
api! {
    ctx cudaGraphGetEdges => cuGraphGetEdges_v2(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode,
        edges: *mut CUgraphEdgeData, count: *mut usize);
    ctx cudaGraphNodeGetDependencies => cuGraphNodeGetDependencies_v2(
        node: CUgraphNode, nodes: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: *mut usize);
    ctx cudaGraphNodeGetDependentNodes => cuGraphNodeGetDependentNodes_v2(
        node: CUgraphNode, nodes: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: *mut usize);
    ctx cudaGraphAddDependencies => cuGraphAddDependencies_v2(graph: CUgraph, from: *const CUgraphNode,
        to: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize);
    ctx cudaGraphRemoveDependencies => cuGraphRemoveDependencies_v2(graph: CUgraph, from: *const CUgraphNode,
        to: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize);
}
