// Graphs by the functions that other programs do not call: the first forms of the driver's, and what changes nodes of a graph or of an instance, a kind of node at a time.
#define PROGRAM "graph_forms"
#include "by_name.h"
#include "cases.h"

#include <unistd.h>

#define OK(call) expect_value(#call, 0, (long long)(call))

__device__ int symbol[4];

__global__ void add(int *out, int value) { *out += value; }

static int *words;  // of the device
static cudaStream_t stream;

static void zero() {
    CHECK(cudaMemset(words, 0, 16 * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
}

static int word(int i) {
    int value = 0;
    CHECK(cudaMemcpy(&value, words + i, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static void launch(cudaGraphExec_t exec) {
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
}

// The first form of a kernel node's parameters.
struct FirstKernel {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
};

static void kernels() {
    CUfunction function;
    OK(cudaGetFuncBySymbol((cudaFunction_t *)&function, (const void *)add));
    int value = 5, more = 7;
    int *out = words, *other = words + 1;
    void *first[] = {&out, &value}, *second[] = {&other, &more}, *third[] = {&out, &more};
    FirstKernel kernel = {function, {1, 1, 1}, {1, 1, 1}, 0, first, nullptr}, told = {};
    CUgraph graph;
    CUgraphNode nodes[2];
    OK(cuGraphCreate(&graph, 0));
    OK(named("cuGraphAddKernelNode", &nodes[0], graph, (CUgraphNode *)nullptr, (size_t)0, &kernel));
    kernel.parameters = second;
    OK(named("cuGraphAddKernelNode", &nodes[1], graph, (CUgraphNode *)nullptr, (size_t)0, &kernel));
    OK(named("cuGraphKernelNodeGetParams", nodes[0], &told));
    TRUE_THAT(told.function == function && told.grid[0] == 1 && *(int *)told.parameters[1] == 5);

    // Dependencies, in the form that has no data.
    OK(named("cuGraphAddDependencies", graph, &nodes[0], &nodes[1], (size_t)1));
    CUgraphNode from[2] = {}, to[2] = {};
    size_t count = 2;
    OK(named("cuGraphGetEdges", graph, from, to, &count));
    TRUE_THAT(count == 1 && from[0] == nodes[0] && to[0] == nodes[1]);
    count = 2;
    OK(named("cuGraphNodeGetDependencies", nodes[1], from, &count));
    TRUE_THAT(count == 1 && from[0] == nodes[0]);
    count = 2;
    OK(named("cuGraphNodeGetDependentNodes", nodes[0], to, &count));
    TRUE_THAT(count == 1 && to[0] == nodes[1]);
    OK(named("cuGraphRemoveDependencies", graph, &nodes[0], &nodes[1], (size_t)1));
    count = 0;
    OK(named("cuGraphGetEdges", graph, (CUgraphNode *)nullptr, (CUgraphNode *)nullptr, &count));
    IS(0, count);

    CUgraphExec exec;
    char log[64] = "x";
    CUgraphNode wrong = nullptr;
    zero();
    OK(named("cuGraphInstantiate", &exec, graph, &wrong, log, sizeof log));
    launch((cudaGraphExec_t)exec);
    TRUE_THAT(word(0) == 5 && word(1) == 7);
    kernel.parameters = third;
    OK(named("cuGraphExecKernelNodeSetParams", exec, nodes[0], &kernel));
    launch((cudaGraphExec_t)exec);
    TRUE_THAT(word(0) == 12 && word(1) == 14);
    OK(cuGraphExecDestroy(exec));
    OK(named("cuGraphKernelNodeSetParams", nodes[1], &kernel));
    OK(named("cuGraphInstantiate_v2", &exec, graph, &wrong, log, sizeof log));
    zero();
    // Two nodes beside each other add to one word only if they come one after the other.
    OK(cuGraphExecDestroy(exec));
    OK(named("cuGraphAddDependencies", graph, &nodes[0], &nodes[1], (size_t)1));
    OK(named("cuGraphInstantiate_v2", &exec, graph, (CUgraphNode *)nullptr, (char *)nullptr, (size_t)0));
    launch((cudaGraphExec_t)exec);
    IS(12, word(0));
    // A whole graph for another.
    kernel.parameters = second;
    OK(named("cuGraphKernelNodeSetParams", nodes[1], &kernel));
    CUgraphExecUpdateResult result;
    OK(named("cuGraphExecUpdate", exec, graph, &wrong, &result));
    IS(CU_GRAPH_EXEC_UPDATE_SUCCESS, result);
    launch((cudaGraphExec_t)exec);
    TRUE_THAT(word(0) == 17 && word(1) == 7);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
}

static int host_sum;

static void CUDART_CB on_host(void *data) { host_sum += *(int *)data; }

// Every kind by cudaGraphAddNode, cudaGraphNodeSetParams and cudaGraphExecNodeSetParams.
static void kinds() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t kernel, fill, copy, host, record, wait;
    cudaEvent_t events[2];
    for (cudaEvent_t &event : events) OK(cudaEventCreate(&event));
    OK(cudaGraphCreate(&graph, 0));
    int one = 1, ten = 10, hundred = 100, *out = words;
    void *with_one[] = {&out, &one}, *with_ten[] = {&out, &ten};
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = (void *)add;
    params.kernel.gridDim = params.kernel.blockDim = dim3(1);
    params.kernel.kernelParams = with_one;
    OK(cudaGraphAddNode(&kernel, graph, nullptr, nullptr, 0, &params));
    cudaGraphNodeParams filled = {};
    filled.type = cudaGraphNodeTypeMemset;
    filled.memset.dst = words + 4;
    filled.memset.elementSize = 4;
    filled.memset.value = 3;
    filled.memset.width = 2;
    filled.memset.height = 1;
    OK(cudaGraphAddNode(&fill, graph, &kernel, nullptr, 1, &filled));
    cudaGraphNodeParams copied = {};
    copied.type = cudaGraphNodeTypeMemcpy;
    copied.memcpy.copyParams.srcPtr = make_cudaPitchedPtr(words, 4, 4, 1);
    copied.memcpy.copyParams.dstPtr = make_cudaPitchedPtr(words + 8, 4, 4, 1);
    copied.memcpy.copyParams.extent = make_cudaExtent(4, 1, 1);
    copied.memcpy.copyParams.kind = cudaMemcpyDeviceToDevice;
    OK(cudaGraphAddNode(&copy, graph, &fill, nullptr, 1, &copied));
    cudaGraphNodeParams called = {};
    called.type = cudaGraphNodeTypeHost;
    called.host.fn = on_host;
    called.host.userData = &hundred;
    OK(cudaGraphAddNode(&host, graph, &copy, nullptr, 1, &called));
    OK(cudaGraphAddEventRecordNode(&record, graph, &host, 1, events[0]));
    OK(cudaGraphAddEventWaitNode(&wait, graph, &record, 1, events[0]));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    zero();
    launch(exec);
    TRUE_THAT(word(0) == 1 && word(4) == 3 && word(5) == 3 && word(8) == 1 && host_sum == 100);

    // The instance.
    params.kernel.kernelParams = with_ten;
    OK(cudaGraphExecNodeSetParams(exec, kernel, &params));
    filled.memset.value = 6;
    OK(cudaGraphExecNodeSetParams(exec, fill, &filled));
    copied.memcpy.copyParams.dstPtr = make_cudaPitchedPtr(words + 9, 4, 4, 1);
    OK(cudaGraphExecNodeSetParams(exec, copy, &copied));
    called.host.userData = &ten;
    OK(cudaGraphExecNodeSetParams(exec, host, &called));
    OK(cudaGraphExecEventRecordNodeSetEvent(exec, record, events[1]));
    OK(cudaGraphExecEventWaitNodeSetEvent(exec, wait, events[1]));
    launch(exec);
    TRUE_THAT(word(0) == 11 && word(4) == 6 && word(9) == 11 && word(8) == 1 && host_sum == 110);
    OK(cudaEventQuery(events[1]));
    cudaMemcpy3DParms box = {};
    box.srcPtr = make_cudaPitchedPtr(words + 4, 4, 4, 1);
    box.dstPtr = make_cudaPitchedPtr(words + 10, 4, 4, 1);
    box.extent = make_cudaExtent(4, 1, 1);
    box.kind = cudaMemcpyDeviceToDevice;
    OK(cudaGraphExecMemcpyNodeSetParams(exec, copy, &box));
    launch(exec);
    TRUE_THAT(word(0) == 21 && word(10) == 6 && word(9) == 11);
    OK(cudaGraphExecDestroy(exec));

    // The graph.
    params.kernel.kernelParams = with_ten;
    OK(cudaGraphNodeSetParams(kernel, &params));
    cudaMemsetParams nines = {};
    nines.dst = words + 4;
    nines.elementSize = 4;
    nines.value = 9;
    nines.width = 1;
    nines.height = 1;
    OK(cudaGraphMemsetNodeSetParams(fill, &nines));
    OK(cudaGraphMemcpyNodeSetParams(copy, &box));
    cudaHostNodeParams calls = {on_host, &one};
    OK(cudaGraphHostNodeSetParams(host, &calls));
    OK(cudaGraphEventRecordNodeSetEvent(record, events[1]));
    OK(cudaGraphEventWaitNodeSetEvent(wait, events[1]));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    zero();
    launch(exec);
    TRUE_THAT(word(0) == 10 && word(4) == 9 && word(5) == 0 && word(10) == 9 && host_sum == 121);
    OK(cudaGraphMemcpyNodeSetParams1D(copy, words + 11, words, 4, cudaMemcpyDeviceToDevice));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    launch(exec);
    TRUE_THAT(word(11) == 20);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    for (cudaEvent_t event : events) OK(cudaEventDestroy(event));
}

static void symbols() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t there, back;
    int values[4] = {1, 2, 3, 4}, others[2] = {50, 60};
    OK(cudaGraphCreate(&graph, 0));
    OK(cudaGraphAddMemcpyNodeToSymbol(&there, graph, nullptr, 0, symbol, values, sizeof values, 0, cudaMemcpyHostToDevice));
    OK(cudaGraphAddMemcpyNodeFromSymbol(&back, graph, &there, 1, words, symbol, sizeof values, 0, cudaMemcpyDeviceToDevice));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    zero();
    launch(exec);
    TRUE_THAT(word(0) == 1 && word(3) == 4);
    OK(cudaGraphExecMemcpyNodeSetParamsToSymbol(exec, there, symbol, others, sizeof others, 4, cudaMemcpyHostToDevice));
    OK(cudaGraphExecMemcpyNodeSetParamsFromSymbol(exec, back, words + 4, symbol, 8, 4, cudaMemcpyDeviceToDevice));
    launch(exec);
    TRUE_THAT(word(4) == 50 && word(5) == 60 && word(1) == 2);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphMemcpyNodeSetParamsToSymbol(there, symbol, others, sizeof others, 8, cudaMemcpyHostToDevice));
    OK(cudaGraphMemcpyNodeSetParamsFromSymbol(back, words, symbol, 16, 0, cudaMemcpyDeviceToDevice));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    launch(exec);
    TRUE_THAT(word(0) == 1 && word(1) == 50 && word(2) == 50 && word(3) == 60);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
}

static int destroyed;

static void CUDART_CB count(void *) { destroyed++; }

static void objects() {
    cudaUserObject_t object;
    cudaGraph_t graph;
    OK(cudaGraphCreate(&graph, 0));
    OK(cudaUserObjectCreate(&object, nullptr, count, 1, cudaUserObjectNoDestructorSync));
    OK(cudaUserObjectRetain(object, 2));
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    OK(cudaUserObjectRelease(object, 2));
    IS(0, destroyed);
    OK(cudaGraphDestroy(graph));
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 100000 && !*(volatile int *)&destroyed; i++) usleep(1000);
    IS(1, destroyed);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaMalloc(&words, 16 * sizeof(int)));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    kernels();
    kinds();
    symbols();
    objects();
    return verdict();
}
