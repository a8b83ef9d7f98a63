// Programmatic dependent launch: kernels that may begin before the one ahead has ended, and wait for it in the middle; also by
// events that the kernel fires, and captured.
#define PROGRAM "programmatic_launch"
#include "common.h"
#include <vector>

constexpr int N = 1 << 14;

__global__ void stage(int *p, int factor, int addend) {
#if __CUDA_ARCH__ >= 900
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // Everything from here on sees what the kernel ahead has done.
    cudaGridDependencySynchronize();
    int value = p[i] * factor + addend;
    cudaTriggerProgrammaticLaunchCompletion();
    p[i] = value;
#endif
}

__global__ void put_number(int *p, int number) { *p = number; }

static void put(cudaStream_t stream, int *p, int factor, int addend) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = N / 256;
    config.blockDim = 256;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, stage, p, factor, addend));
}

static void check(cudaStream_t stream, int *p, unsigned want, const char *what) {
    std::vector<int> host(N);
    CHECK(cudaMemcpyAsync(host.data(), p, N * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int value : host) REQUIRE((unsigned)value == want, "%s: %d instead of %u", what, value, want);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaStream_t stream;
    int *p, *beside;
    CHECK(cudaMalloc(&beside, 4));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&p, N * 4));
    CHECK(cudaMemsetAsync(p, 0, N * 4, stream));
    unsigned want = 0;
    for (int i = 0; i < 50; i++) {
        put(stream, p, 3, i);
        want = want * 3 + i;
    }
    check(stream, p, want, "a chain of 50");

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 5; i++) put(stream, p, 5, i);
    CHECK(cudaStreamEndCapture(stream, &graph));
    // Each depends on the kernel ahead of it by that kernel's programmatic port, which is not told without a place for it.
    cudaGraphNode_t from[4], to[4];
    cudaGraphEdgeData data[4] = {};
    size_t edges = 4;
    CHECK(cudaGraphGetEdges(graph, from, to, data, &edges));
    REQUIRE(edges == 4, "a chain of 5 with %zu edges", edges);
    for (const cudaGraphEdgeData &edge : data)
        REQUIRE(edge.type == cudaGraphDependencyTypeProgrammatic && edge.from_port == cudaGraphKernelNodePortProgrammatic && edge.to_port == 0,
                "an edge of type %d from port %d to port %d", (int)edge.type, (int)edge.from_port, (int)edge.to_port);
    cudaError_t lossy = cudaGraphGetEdges(graph, from, to, nullptr, &edges);
    REQUIRE(lossy == cudaErrorLossyQuery, "edges without their data: %s", cudaGetErrorName(lossy));
    cudaGetLastError();
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 4; round++) {
        CHECK(cudaGraphLaunch(exec, stream));
        for (int i = 0; i < 5; i++) want = want * 5 + i;
    }
    check(stream, p, want, "a graph of 5, four times");
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // Behind anything else, such a launch waits for its end.
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemsetAsync(p, 0, N * 4, stream));
    put(stream, p, 2, 7);
    CHECK(cudaStreamEndCapture(stream, &graph));
    edges = 4;
    CHECK(cudaGraphGetEdges(graph, from, to, data, &edges));
    REQUIRE(edges == 1 && data[0].type == cudaGraphDependencyTypeDefault && data[0].from_port == cudaGraphKernelNodePortDefault,
            "%zu edges, the first of type %d from port %d", edges, (int)data[0].type, (int)data[0].from_port);
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    want = 7;
    check(stream, p, want, "a graph behind a fill");
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // An event that is done when the kernel's blocks have said so; another stream waits for it.
    cudaStream_t other;
    cudaEvent_t fired;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&fired, cudaEventDisableTiming));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
    attribute.val.launchCompletionEvent.event = fired;
    cudaLaunchConfig_t config = {};
    config.gridDim = N / 256;
    config.blockDim = 256;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, stage, p, 1, 1));
    CHECK(cudaStreamWaitEvent(other, fired, 0));
    CHECK(cudaStreamSynchronize(other));
    CHECK(cudaEventQuery(fired));
    check(stream, p, want + 1, "a launch with an event");
    want += 1;

    // Captured, such an event takes the other stream into the graph.
    cudaEvent_t joined;
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    for (cudaLaunchAttributeID id : {cudaLaunchAttributeLaunchCompletionEvent, cudaLaunchAttributeProgrammaticEvent}) {
        attribute = {};
        attribute.id = id;
        if (id == cudaLaunchAttributeProgrammaticEvent)
            attribute.val.programmaticEvent.event = fired;
        else
            attribute.val.launchCompletionEvent.event = fired;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        CHECK(cudaLaunchKernelEx(&config, stage, p, 1, 1));
        CHECK(cudaStreamWaitEvent(other, fired, 0));
        cudaStreamCaptureStatus status;
        CHECK(cudaStreamIsCapturing(other, &status));
        REQUIRE(status == cudaStreamCaptureStatusActive, "the other stream's capture is %d", (int)status);
        // It uses no data of the first kernel, which need not be done.
        put_number<<<1, 1, 0, other>>>(beside, 5);
        LAUNCHED();
        CHECK(cudaEventRecord(joined, other));
        CHECK(cudaStreamWaitEvent(stream, joined, 0));
        CHECK(cudaLaunchKernelEx(&config, stage, p, 3, 2));
        CHECK(cudaStreamEndCapture(stream, &graph));
        size_t nodes = 0;
        CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
        REQUIRE(nodes == 3, "a graph of %zu nodes", nodes);
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, stream));
        want = (want + 1) * 3 + 2;
        check(stream, p, want, "a graph with an event of a launch");
        int got = 0;
        CHECK(cudaMemcpy(&got, beside, 4, cudaMemcpyDeviceToHost));
        REQUIRE(got == 5, "the other stream's node left %d", got);
        CHECK(cudaMemset(beside, 0, 4));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    return pass("a chain, a graph, events");
}
