// Instances that change: parameters of single nodes, a whole graph's at once, nodes switched off and on; what was launched before
// does what it did.
#define PROGRAM "graph_update"
#include "common.h"

#include <vector>

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

__global__ void multiply(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= value;
}

static int n;
static cudaStream_t stream;

static cudaKernelNodeParams params(void *function, void **arguments) {
    cudaKernelNodeParams p = {};
    p.func = function;
    p.gridDim = dim3((n + 63) / 64);
    p.blockDim = dim3(64);
    p.kernelParams = arguments;
    return p;
}

static void expect(const char *what, const int *device, int expected) {
    std::vector<int> host(n);
    CHECK(cudaMemcpyAsync(host.data(), device, n * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; i++) REQUIRE(host[i] == expected, "%s: element %d is %d and not %d", what, i, host[i], expected);
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    n = options.full ? 1 << 18 : 2000;
    int *a, *b;
    CHECK(cudaMalloc(&a, n * sizeof(int)));
    CHECK(cudaMalloc(&b, n * sizeof(int)));
    CHECK(cudaStreamCreate(&stream));

    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t fill, first, second, copy;
    cudaMemsetParams set = {};
    set.dst = a;
    set.elementSize = 4;
    set.width = n;
    set.height = 1;
    set.value = 1;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &set));
    int value = 2, seven = 7;
    void *arguments[] = {&a, &n, &value}, *others[] = {&a, &n, &seven};
    cudaKernelNodeParams adds = params((void *)add, arguments), multiplies = params((void *)multiply, others);
    CHECK(cudaGraphAddKernelNode(&first, graph, &fill, 1, &adds));
    CHECK(cudaGraphAddKernelNode(&second, graph, &first, 1, &multiplies));
    CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &second, 1, b, a, n * sizeof(int), cudaMemcpyDeviceToDevice));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    expect("as it was made", b, 21);

    // One node's parameters, many times; the graph itself stays as it is.
    for (value = 10; value < 30; value++) {
        CHECK(cudaGraphExecKernelNodeSetParams(exec, first, &adds));
        CHECK(cudaGraphLaunch(exec, stream));
        // The launch before is not changed any more.
        int wrong = 1000;
        void *later[] = {&a, &n, &wrong};
        cudaKernelNodeParams changed = params((void *)add, later);
        CHECK(cudaGraphExecKernelNodeSetParams(exec, first, &changed));
        expect("a kernel's parameters", b, 7 * (1 + value));
    }
    value = 3;
    CHECK(cudaGraphExecKernelNodeSetParams(exec, first, &adds));
    set.value = 5;
    CHECK(cudaGraphExecMemsetNodeSetParams(exec, fill, &set));
    CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec, copy, b, a, n / 2 * sizeof(int), cudaMemcpyDeviceToDevice));
    CHECK(cudaMemsetAsync(b, 0, n * sizeof(int), stream));
    CHECK(cudaGraphLaunch(exec, stream));
    expect("the filled array", a, 56);
    int ends[2];
    CHECK(cudaMemcpy(&ends[0], b, sizeof(int), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&ends[1], b + n - 1, sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(ends[0] == 56 && ends[1] == 0, "half a copy leaves %d and %d", ends[0], ends[1]);

    // Nodes switched off.
    unsigned on = 2;
    CHECK(cudaGraphNodeSetEnabled(exec, second, 0));
    CHECK(cudaGraphNodeGetEnabled(exec, second, &on));
    REQUIRE(on == 0, "a node that was switched off is %u", on);
    CHECK(cudaGraphLaunch(exec, stream));
    expect("without the second kernel", a, 8);
    CHECK(cudaGraphNodeSetEnabled(exec, fill, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    expect("without the fill", a, 11);
    CHECK(cudaGraphNodeSetEnabled(exec, fill, 1));
    CHECK(cudaGraphNodeSetEnabled(exec, second, 1));
    CHECK(cudaGraphLaunch(exec, stream));
    expect("with all", a, 56);

    // The graph's own nodes change, and the instance takes them over at once.
    value = 100;
    CHECK(cudaGraphKernelNodeSetParams(first, &adds));
    CHECK(cudaGraphKernelNodeSetParams(second, &adds));
    CHECK(cudaGraphLaunch(exec, stream));
    expect("before the update", a, 56);
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(exec, graph, &info));
    REQUIRE(info.result == cudaGraphExecUpdateSuccess, "the update's result is %d", (int)info.result);
    CHECK(cudaGraphLaunch(exec, stream));
    expect("after the update", a, 201);
    expect("the copy after it", b, 201);

    // A captured graph of the same shape.
    cudaGraph_t captured;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemsetAsync(b, 0, n * sizeof(int), stream));
    add<<<(n + 63) / 64, 64, 0, stream>>>(b, n, 4);
    multiply<<<(n + 127) / 128, 128, 0, stream>>>(b, n, 3);
    CHECK(cudaMemcpyAsync(a, b, n * sizeof(int), cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphExecUpdate(exec, captured, &info));
    CHECK(cudaGraphLaunch(exec, stream));
    expect("a captured graph's work", a, 12);

    // Another shape is refused, and the instance goes on as it was.
    cudaGraphNode_t extra;
    CHECK(cudaGraphAddEmptyNode(&extra, captured, nullptr, 0));
    EXPECT(cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdate(exec, captured, &info));
    REQUIRE(info.result == cudaGraphExecUpdateErrorTopologyChanged, "another shape is answered with %d", (int)info.result);
    CHECK(cudaGraphLaunch(exec, stream));
    expect("after a refused update", a, 12);
    CHECK(cudaGraphDestroy(captured));
    CHECK(cudaGraphExecDestroy(exec));

    // A cooperative kernel is no other, and an instance that has the nodes' priorities keeps them.
    cudaLaunchAttributeValue before = {}, wanted = {};
    CHECK(cudaGraphKernelNodeGetAttribute(first, cudaLaunchAttributeCooperative, &before));
    wanted.cooperative = 1;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphKernelNodeSetAttribute(first, cudaLaunchAttributeCooperative, &wanted));
    EXPECT(cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdate(exec, graph, &info));
    REQUIRE(info.result == cudaGraphExecUpdateErrorAttributesChanged && info.errorNode == first, "a cooperative kernel is answered with %d", (int)info.result);
    CHECK(cudaGraphKernelNodeSetAttribute(first, cudaLaunchAttributeCooperative, &before));
    CHECK(cudaGraphExecUpdate(exec, graph, &info));
    CHECK(cudaGraphExecDestroy(exec));
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, cudaGraphInstantiateFlagUseNodePriority));
    CHECK(cudaGraphKernelNodeGetAttribute(first, cudaLaunchAttributePriority, &before));
    wanted = {};
    wanted.priority = before.priority == greatest ? least : greatest;
    CHECK(cudaGraphKernelNodeSetAttribute(first, cudaLaunchAttributePriority, &wanted));
    if (wanted.priority != before.priority) {
        EXPECT(cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdate(exec, graph, &info));
        REQUIRE(info.result == cudaGraphExecUpdateErrorAttributesChanged, "another priority is answered with %d", (int)info.result);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return pass("kernels, fills, copies, switches, whole graphs");
}
