// Attributes of streams: access policy windows, how the host waits, memory synchronization domains; set, told, copied.
#define PROGRAM "stream_attributes"
#include "common.h"

#include <vector>

__global__ void fill(int *values, int n, int first) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] = first + i;
}

static cudaStreamAttrValue get(cudaStream_t stream, cudaStreamAttrID id) {
    cudaStreamAttrValue value;
    memset(&value, 0xff, sizeof value);
    CHECK(cudaStreamGetAttribute(stream, id, &value));
    return value;
}

static void run(cudaStream_t stream, int *values, int n, int first) {
    fill<<<(n + 255) / 256, 256, 0, stream>>>(values, n, first);
    LAUNCHED();
    CHECK(cudaStreamSynchronize(stream));
    int ends[2];
    CHECK(cudaMemcpy(ends, values, sizeof *ends, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(ends + 1, values + n - 1, sizeof *ends, cudaMemcpyDeviceToHost));
    REQUIRE(ends[0] == first && ends[1] == first + n - 1, "a kernel wrote %d to %d", ends[0], ends[1]);
}

static int priority_of(cudaGraphNode_t node) {
    cudaKernelNodeAttrValue value;
    memset(&value, 0xff, sizeof value);
    CHECK(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributePriority, &value));
    return value.priority;
}

// Captured kernels get the priority of the stream on which they were launched.
static void captured_priorities(int *values, int least, int greatest) {
    cudaStream_t high, low;
    cudaEvent_t fork, join;
    CHECK(cudaStreamCreateWithPriority(&high, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamCreateWithPriority(&low, cudaStreamNonBlocking, least));
    for (cudaEvent_t *event : {&fork, &join}) CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(high, cudaStreamCaptureModeThreadLocal));
    fill<<<1, 1, 0, high>>>(values, 1, 1);
    CHECK(cudaEventRecord(fork, high));
    CHECK(cudaStreamWaitEvent(low, fork, 0));
    fill<<<1, 2, 0, low>>>(values, 2, 2);
    CHECK(cudaEventRecord(join, low));
    CHECK(cudaStreamWaitEvent(high, join, 0));
    LAUNCHED();
    CHECK(cudaStreamEndCapture(high, &graph));
    size_t count = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    REQUIRE(count == 2, "%zu captured nodes", count);
    for (cudaGraphNode_t node : nodes) {
        cudaKernelNodeParams params;
        CHECK(cudaGraphKernelNodeGetParams(node, &params));
        int wanted = params.blockDim.x == 1 ? greatest : least;
        REQUIRE(priority_of(node) == wanted, "a kernel captured on a stream of priority %d has %d", wanted, priority_of(node));
    }
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagUseNodePriority));
    CHECK(cudaGraphLaunch(exec, low));
    CHECK(cudaStreamSynchronize(low));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    for (cudaEvent_t event : {fork, join}) CHECK(cudaEventDestroy(event));
    for (cudaStream_t stream : {high, low}) CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 1 << 18;
    int *values;
    CHECK(cudaMalloc(&values, n * sizeof *values));
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream, other;
    CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamCreate(&other));

    REQUIRE(get(stream, cudaStreamAttributePriority).priority == greatest, "a stream's priority is told as %d",
            get(stream, cudaStreamAttributePriority).priority);
    REQUIRE(get(stream, cudaStreamAttributeMemSyncDomain).memSyncDomain == cudaLaunchMemSyncDomainDefault, "a new stream's domain");

    // A window over the first half, a part of which is to stay in the cache.
    int most;
    CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxAccessPolicyWindowSize, 0));
    cudaStreamAttrValue value = {};
    value.accessPolicyWindow.base_ptr = values;
    value.accessPolicyWindow.num_bytes = most < (int)(n * sizeof *values / 2) ? most : n * sizeof *values / 2;
    value.accessPolicyWindow.hitRatio = 0.5f;
    value.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
    value.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
    CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value));
    run(stream, values, n, 100);
    cudaAccessPolicyWindow window = get(stream, cudaStreamAttributeAccessPolicyWindow).accessPolicyWindow;
    REQUIRE(window.hitProp == cudaAccessPropertyPersisting && window.missProp == cudaAccessPropertyStreaming, "a window is told as %d, %d",
            (int)window.hitProp, (int)window.missProp);

    value = {};
    value.syncPolicy = cudaSyncPolicyBlockingSync;
    CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeSynchronizationPolicy, &value));
    REQUIRE(get(stream, cudaStreamAttributeSynchronizationPolicy).syncPolicy == cudaSyncPolicyBlockingSync, "the way to wait is told otherwise");
    run(stream, values, n, 200);

    int domains;
    CHECK(cudaDeviceGetAttribute(&domains, cudaDevAttrMemSyncDomainCount, 0));
    if (domains > 1) {
        value = {};
        value.memSyncDomain = cudaLaunchMemSyncDomainRemote;
        CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeMemSyncDomain, &value));
        value = {};
        value.memSyncDomainMap.default_ = 0;
        value.memSyncDomainMap.remote = domains - 1;
        CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeMemSyncDomainMap, &value));
        REQUIRE(get(stream, cudaStreamAttributeMemSyncDomain).memSyncDomain == cudaLaunchMemSyncDomainRemote, "a domain is told otherwise");
        cudaLaunchMemSyncDomainMap map = get(stream, cudaStreamAttributeMemSyncDomainMap).memSyncDomainMap;
        REQUIRE(map.default_ == 0 && map.remote == domains - 1, "domains are told as %d, %d", map.default_, map.remote);
        run(stream, values, n, 300);
    }

    CHECK(cudaStreamCopyAttributes(other, stream));
    REQUIRE(get(other, cudaStreamAttributeSynchronizationPolicy).syncPolicy == cudaSyncPolicyBlockingSync, "a copied way to wait");
    window = get(other, cudaStreamAttributeAccessPolicyWindow).accessPolicyWindow;
    REQUIRE(window.hitProp == cudaAccessPropertyPersisting, "a copied window has %d", (int)window.hitProp);
    run(other, values, n, 400);

    // Captured kernels run with their stream's attributes.
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    fill<<<n / 256, 256, 0, stream>>>(values, n, 500);
    LAUNCHED();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    int first;
    CHECK(cudaMemcpy(&first, values, sizeof first, cudaMemcpyDeviceToHost));
    REQUIRE(first == 500, "a captured kernel wrote %d", first);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(other));
    captured_priorities(values, least, greatest);
    return pass("%d", first);
}
