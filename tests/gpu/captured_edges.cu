// On what captured launches with programmatic stream serialization depend: how many edges, and the type and ports of each. It prints what it finds; natively
// that is what NVIDIA's driver makes of such captures, the last two as rgpu-server does them. Needs CUDA 13 and a GPU of compute capability 9.0.
//
//   nvcc -cudart shared -arch=native -o captured_edges captured_edges.cu

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define CHECK(call)                                                                \
    do {                                                                           \
        cudaError_t status = (call);                                               \
        if (status != cudaSuccess)                                                 \
            printf("%s: %s\n", #call, cudaGetErrorName(status)), exit(1);          \
    } while (0)

__global__ void nothing() {}

static cudaStream_t stream, other;
static cudaEvent_t event;

static void overlap(cudaStream_t on)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    config.stream = on;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, nothing));
}

static void wait(cudaStream_t waits, cudaStream_t ahead)
{
    CHECK(cudaEventRecord(event, ahead));
    CHECK(cudaStreamWaitEvent(waits, event, 0));
}

static void show(const char *what, cudaGraph_t graph)
{
    cudaGraphNode_t from[8], to[8];
    cudaGraphEdgeData data[8] = {};
    size_t count = 8;
    CHECK(cudaGraphGetEdges(graph, from, to, data, &count));
    printf("%s: %zu edges\n", what, count);
    for (size_t i = 0; i < count; i++) {
        cudaGraphNodeType kind;
        CHECK(cudaGraphNodeGetType(from[i], &kind));
        printf("  from a node of type %d: type %d, from port %d, to port %d\n", (int)kind, (int)data[i].type, (int)data[i].from_port, (int)data[i].to_port);
    }
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

template <typename Enqueue> static void captured(const char *what, Enqueue enqueue)
{
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    enqueue();
    CHECK(cudaStreamEndCapture(stream, &graph));
    show(what, graph);
}

static void captured_behind(const char *what, size_t nodes)
{
    cudaGraph_t graph, same;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaKernelNodeParams params = {};
    params.func = (void *)nothing;
    params.gridDim = params.blockDim = dim3(1);
    cudaGraphNode_t before[2];
    for (size_t i = 0; i < nodes; i++)
        CHECK(cudaGraphAddKernelNode(&before[i], graph, nullptr, 0, &params));
    CHECK(cudaStreamBeginCaptureToGraph(stream, graph, before, nullptr, nodes, cudaStreamCaptureModeRelaxed));
    overlap(stream);
    CHECK(cudaStreamEndCapture(stream, &same));
    show(what, graph);
}

int main()
{
    char *memory;
    CHECK(cudaMalloc(&memory, 4));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    captured("behind a kernel", [] {
        nothing<<<1, 1, 0, stream>>>();
        overlap(stream);
    });
    captured("behind a fill", [&] {
        CHECK(cudaMemsetAsync(memory, 0, 4, stream));
        overlap(stream);
    });
    captured("behind a kernel of another stream", [] {
        nothing<<<1, 1, 0, stream>>>();
        wait(other, stream);
        overlap(other);
        wait(stream, other);
    });
    captured("behind a kernel, and one of another stream", [] {
        wait(other, stream);
        nothing<<<1, 1, 0, other>>>();
        nothing<<<1, 1, 0, stream>>>();
        wait(stream, other);
        overlap(stream);
    });
    captured_behind("behind one kernel of the graph", 1);
    captured_behind("behind two kernels of the graph", 2);
    return 0;
}
