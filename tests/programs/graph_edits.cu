// Graphs that lose nodes and dependencies: in a child graph and in a conditional node's, conditional nodes themselves, dependencies with data, and what
// a graph with memory nodes refuses (CUDA Driver API, cuGraphRemoveDependencies, cuGraphDestroyNode, cuGraphAddMemFreeNode); and fills of page-locked
// memory, which is a device's as well (unified addressing).
#define PROGRAM "graph_edits"
#include "by_name.h"
#include "cases.h"

#define OK(call) expect_value(#call, 0, (long long)(call))

__global__ void add(int *out, int value) { *out += value; }

static cudaStream_t stream;
static int *word;  // of page-locked memory

static cudaGraphNode_t adds(cudaGraph_t graph, cudaGraphNode_t after, int value) {
    void *arguments[] = {&word, &value};
    cudaKernelNodeParams params = {};
    params.func = (void *)add;
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after ? &after : nullptr, after ? 1 : 0, &params));
    return node;
}

static cudaGraph_t empty_graph() {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    return graph;
}

static size_t nodes_of(cudaGraph_t graph) {
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    return nodes;
}

// What one launch adds to the word.
static int run(cudaGraph_t graph) {
    *word = 0;
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(exec));
    return *word;
}

// "Changes to the graph will be reflected in the node, and the node retains ownership of the graph" (cuGraphChildGraphNodeGetGraph).
static void child_graphs() {
    cudaGraph_t inner = empty_graph(), outer = empty_graph(), part;
    adds(inner, nullptr, 1);
    cudaGraphNode_t child;
    CHECK(cudaGraphAddChildGraphNode(&child, outer, nullptr, 0, inner));
    OK(cudaGraphChildGraphNodeGetGraph(child, &part));
    cudaGraphNode_t first;
    size_t count = 1;
    CHECK(cudaGraphGetNodes(part, &first, &count));
    adds(part, first, 10);
    IS(11, run(outer));
    OK(cudaGraphDestroyNode(first));
    IS(10, run(outer));
    IS(1, run(inner));
    CHECK(cudaGraphDestroy(inner));
    CHECK(cudaGraphDestroy(outer));
}

static cudaGraphNode_t choice(cudaGraph_t graph, cudaGraphConditionalHandle handle, cudaGraphNode_t after, cudaGraph_t *body) {
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddNode(&node, graph, after ? &after : nullptr, nullptr, after ? 1 : 0, &params));
    *body = params.conditional.phGraph_out[0];
    return node;
}

// "One or more conditional handles are not associated with conditional nodes."
static void unused(cudaGraph_t graph) {
    cudaGraphExec_t exec = nullptr;
    RETURNS(cudaErrorInvalidValue, cudaGraphInstantiate(&exec, graph, 0));
    cudaGraphInstantiateParams params = {};
    RETURNS(cudaErrorInvalidValue, cudaGraphInstantiateWithParams(&exec, graph, &params));
    IS(cudaGraphInstantiateConditionalHandleUnused, params.result_out);
}

static void conditional_nodes() {
    cudaGraph_t graph = empty_graph(), body[3];
    cudaGraphConditionalHandle handle[3];
    for (auto &each : handle) CHECK(cudaGraphConditionalHandleCreate(&each, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNode_t goes = choice(graph, handle[0], nullptr, &body[0]);
    choice(graph, handle[1], goes, &body[1]);
    adds(body[0], nullptr, 1);
    adds(body[1], nullptr, 10);
    // One inside the one that goes.
    choice(body[0], handle[2], nullptr, &body[2]);
    adds(body[2], nullptr, 100);
    OK(cudaGraphDestroyNode(goes));
    IS(1, nodes_of(graph));
    // A node of a conditional node's graph goes as any other.
    OK(cudaGraphDestroyNode(adds(body[1], nullptr, 1000)));
    IS(1, nodes_of(body[1]));
    // The conditions of what has gone have no nodes now, and a graph must not have such conditions.
    unused(graph);
    CHECK(cudaGraphDestroy(graph));

    graph = empty_graph();
    CHECK(cudaGraphConditionalHandleCreate(&handle[0], graph, 1, cudaGraphCondAssignDefault));
    adds(graph, nullptr, 1);
    unused(graph);
    choice(graph, handle[0], nullptr, &body[0]);
    adds(body[0], nullptr, 10);
    IS(11, run(graph));
    CHECK(cudaGraphDestroy(graph));
}

// "Specifying an edge that does not exist in the graph, with data matching edgeData, results in an error." Which data that is, is not looked at.
static void dependencies() {
    cudaGraph_t graph = empty_graph();
    cudaGraphNode_t from = adds(graph, nullptr, 1), to = adds(graph, nullptr, 1);
    CUgraphEdgeData data = {};
    data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    OK(named("cuGraphAddDependencies_v2", graph, &from, &to, &data, (size_t)1));
    CUgraphEdgeData other = {};
    OK(named("cuGraphRemoveDependencies_v2", graph, &from, &to, &other, (size_t)1));
    OK(named("cuGraphAddDependencies_v2", graph, &from, &to, &data, (size_t)1));
    OK(named("cuGraphRemoveDependencies_v2", graph, &from, &to, (CUgraphEdgeData *)nullptr, (size_t)1));
    IS(CUDA_ERROR_INVALID_VALUE, named("cuGraphRemoveDependencies_v2", graph, &from, &to, &data, (size_t)1));
    CHECK(cudaGraphDestroy(graph));
}

// "Dependencies cannot be removed from graphs which contain allocation or free nodes"; "nodes which belong to a graph which contains allocation or free
// nodes cannot be destroyed"; an allocation is freed once in a graph.
static void memory_nodes() {
    cudaGraph_t graph = empty_graph();
    cudaMemAllocNodeParams params = {};
    params.poolProps.allocType = cudaMemAllocationTypePinned;
    params.poolProps.location.type = cudaMemLocationTypeDevice;
    params.bytesize = 1024;
    cudaGraphNode_t alloc, frees, again, plain = adds(graph, nullptr, 1);
    CHECK(cudaGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &params));
    cudaGraphNode_t after = adds(graph, alloc, 1);
    CHECK(cudaGraphAddMemFreeNode(&frees, graph, &after, 1, params.dptr));
    IS(CUDA_ERROR_INVALID_VALUE, cuGraphAddMemFreeNode(&again, graph, &frees, 1, (CUdeviceptr)params.dptr));
    IS(CUDA_ERROR_INVALID_VALUE, cuGraphAddMemFreeNode(&again, graph, nullptr, 0, (CUdeviceptr)word));
    IS(CUDA_ERROR_NOT_SUPPORTED, named("cuGraphRemoveDependencies", graph, &alloc, &after, (size_t)1));
    for (cudaGraphNode_t node : {alloc, frees, after, plain}) IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphDestroyNode(node));
    IS(4, nodes_of(graph));
    // Dependencies are added as ever.
    OK(named("cuGraphAddDependencies", graph, &plain, &alloc, (size_t)1));
    IS(2, run(graph));
    CHECK(cudaGraphDestroy(graph));
}

static void fills() {
    unsigned char *bytes;
    CHECK(cudaMallocHost(&bytes, 256));
    memset(bytes, 0, 256);
    cudaGraph_t graph = empty_graph(), captured;
    cudaMemsetParams fill = {};
    fill.dst = bytes;
    fill.value = 0x11;
    fill.elementSize = 1;
    fill.width = 8;
    fill.height = 4;
    fill.pitch = 16;
    cudaGraphNode_t node, beyond;
    OK(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &fill));
    cudaGraphExec_t exec;
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 256; i++) IS(i < 64 && i % 16 < 8 ? 0x11 : 0, bytes[i]);
    // A fill of rows keeps its shape.
    fill.dst = bytes + 128;
    fill.width = 4;
    RETURNS(cudaErrorInvalidValue, cudaGraphExecMemsetNodeSetParams(exec, node, &fill));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    memset(bytes, 0, 256);
    // Changed, left out, done again.
    graph = empty_graph();
    fill.value = 0x4455;
    fill.elementSize = 2;
    fill.width = 3;
    fill.height = 1;
    OK(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &fill));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    fill.value = 0x2233;
    OK(cudaGraphExecMemsetNodeSetParams(exec, node, &fill));
    OK(cudaGraphNodeSetEnabled(exec, node, 0));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
    IS(0, bytes[128]);
    OK(cudaGraphNodeSetEnabled(exec, node, 1));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
    for (int i = 128; i < 136; i++) IS(i >= 134 ? 0 : i % 2 ? 0x22 : 0x33, bytes[i]);
    fill.dst = bytes + 255;
    RETURNS(cudaErrorInvalidValue, cudaGraphAddMemsetNode(&beyond, graph, nullptr, 0, &fill));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    OK(cudaMemsetAsync(bytes + 200, 0x44, 8, stream));
    CHECK(cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphInstantiate(&exec, captured, 0));
    IS(0, bytes[200]);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(bytes[199] == 0 && bytes[200] == 0x44 && bytes[207] == 0x44 && bytes[208] == 0);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(captured));
    CHECK(cudaFreeHost(bytes));
    cudaGetLastError();
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMallocHost(&word, sizeof *word));
    child_graphs();
    conditional_nodes();
    dependencies();
    memory_nodes();
    fills();
    return verdict();
}
