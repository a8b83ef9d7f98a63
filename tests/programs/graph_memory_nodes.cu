// Memory that graphs allocate and free: inside one graph, from one launch to another, freed by the program, captured.
#define PROGRAM "graph_memory_nodes"
#include "common.h"

#include <atomic>
#include <unistd.h>

__global__ void start(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = value + i;
}

__global__ void sum(const int *data, int n, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(out, data[i]);
}

static int n;

static cudaGraphNode_t kernel(cudaGraph_t graph, cudaGraphNode_t after, void *function, void **arguments) {
    cudaKernelNodeParams params = {};
    params.func = function;
    params.gridDim = dim3((n + 127) / 128);
    params.blockDim = dim3(128);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, &after, 1, &params));
    return node;
}

static int *allocate(cudaGraph_t graph, cudaGraphNode_t *node) {
    cudaMemAllocNodeParams params = {};
    params.poolProps.allocType = cudaMemAllocationTypePinned;
    params.poolProps.location.type = cudaMemLocationTypeDevice;
    params.poolProps.location.id = 0;
    params.bytesize = n * sizeof(int);
    CHECK(cudaGraphAddMemAllocNode(node, graph, nullptr, 0, &params));
    REQUIRE(params.dptr != nullptr, "no address");
    cudaMemAllocNodeParams told;
    CHECK(cudaGraphMemAllocNodeGetParams(*node, &told));
    REQUIRE(told.dptr == params.dptr && told.bytesize == params.bytesize, "the node tells another allocation");
    return (int *)params.dptr;
}

static int take(int *out) {
    int result;
    CHECK(cudaMemcpy(&result, out, sizeof result, cudaMemcpyDeviceToHost));
    CHECK(cudaMemset(out, 0, sizeof result));
    return result;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    n = options.full ? 1 << 14 : 1000;
    int *out, value = 1, total = n * (n - 1) / 2;
    CHECK(cudaMalloc(&out, sizeof *out));
    CHECK(cudaMemset(out, 0, sizeof *out));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));

    // Allocated, used and freed in one graph.
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t alloc, node, release;
    int *memory = allocate(graph, &alloc);
    void *starts[] = {&memory, &n, &value}, *sums[] = {&memory, &n, &out};
    node = kernel(graph, alloc, (void *)start, starts);
    node = kernel(graph, node, (void *)sum, sums);
    CHECK(cudaGraphAddMemFreeNode(&release, graph, &node, 1, memory));
    void *told;
    CHECK(cudaGraphMemFreeNodeGetParams(release, &told));
    REQUIRE(told == memory, "the free names another address");
    cudaGraph_t clone;
    EXPECT(cudaErrorNotSupported, cudaGraphClone(&clone, graph));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    int result = take(out);
    REQUIRE(result == 3 * (total + n), "three launches come to %d", result);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // Allocated by one graph, used by another, freed by a third, and in turn by the program.
    cudaGraph_t makes, uses, frees;
    CHECK(cudaGraphCreate(&makes, 0));
    memory = allocate(makes, &alloc);
    kernel(makes, alloc, (void *)start, starts);
    CHECK(cudaGraphCreate(&uses, 0));
    CHECK(cudaGraphAddEmptyNode(&node, uses, nullptr, 0));
    kernel(uses, node, (void *)sum, sums);
    CHECK(cudaGraphCreate(&frees, 0));
    CHECK(cudaGraphAddMemFreeNode(&release, frees, nullptr, 0, memory));
    cudaGraphExec_t make, use, end;
    CHECK(cudaGraphInstantiate(&make, makes, 0));
    CHECK(cudaGraphInstantiate(&use, uses, 0));
    CHECK(cudaGraphInstantiate(&end, frees, 0));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaGraphLaunch(make, stream));
        // Not again before it was freed.
        EXPECT(cudaErrorInvalidValue, cudaGraphLaunch(make, stream));
        CHECK(cudaGraphLaunch(use, stream));
        if (round == 0) CHECK(cudaGraphLaunch(end, stream));
        if (round == 1) CHECK(cudaFreeAsync(memory, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (round == 2) CHECK(cudaFree(memory));
    }
    result = take(out);
    REQUIRE(result == 3 * (total + n), "memory that goes from graph to graph comes to %d", result);
    for (cudaGraphExec_t each : {make, use, end}) CHECK(cudaGraphExecDestroy(each));
    for (cudaGraph_t each : {makes, uses, frees}) CHECK(cudaGraphDestroy(each));

    // Captured, and freed by each new launch.
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    int *captured;
    CHECK(cudaMallocAsync((void **)&captured, n * sizeof(int), stream));
    start<<<(n + 127) / 128, 128, 0, stream>>>(captured, n, 5);
    sum<<<(n + 127) / 128, 128, 0, stream>>>(captured, n, out);
    CHECK(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    REQUIRE(nodes == 3, "%zu captured nodes", nodes);
    CHECK(cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    for (int i = 0; i < 4; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    result = take(out);
    REQUIRE(result == 4 * (total + 5 * n), "four captured launches come to %d", result);
    // What a launch leaves is the program's, also without the graph.
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    int last;
    CHECK(cudaMemcpy(&last, captured + n - 1, sizeof last, cudaMemcpyDeviceToHost));
    REQUIRE(last == 5 + n - 1, "the memory that was left holds %d", last);
    CHECK(cudaFree(captured));

    // Launched for the first time behind a function that waits for this thread.
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMallocAsync((void **)&captured, n * sizeof(int), stream));
    start<<<(n + 127) / 128, 128, 0, stream>>>(captured, n, 2);
    sum<<<(n + 127) / 128, 128, 0, stream>>>(captured, n, out);
    CHECK(cudaFreeAsync(captured, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaDeviceSynchronize());
    std::atomic<bool> go{false};
    CHECK(cudaLaunchHostFunc(stream, [](void *go) { while (!((std::atomic<bool> *)go)->load()) usleep(100); }, &go));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    go = true;
    CHECK(cudaStreamSynchronize(stream));
    int behind = take(out);
    REQUIRE(behind == 2 * (total + 2 * n), "two launches behind a function come to %d", behind);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // Captured allocations of different sizes in turn, which may get the same addresses, each filled and copied to.
    const size_t large = 2 << 20, half = 1 << 20, small = 1 << 18;
    int *source, *first, *second, *third, three = 3;
    CHECK(cudaMalloc(&source, n * sizeof(int)));
    start<<<(n + 127) / 128, 128>>>(source, n, three);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    auto add_up = [&](const int *from) { sum<<<(n + 127) / 128, 128, 0, stream>>>(from, n, out); };
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMallocAsync((void **)&first, large, stream));
    CHECK(cudaMemsetAsync(first, 1, large, stream));
    CHECK(cudaMemcpyAsync((char *)first + half + small, source, n * sizeof(int), cudaMemcpyDeviceToDevice, stream));
    add_up(first);
    add_up((int *)((char *)first + half + small));
    CHECK(cudaFreeAsync(first, stream));
    CHECK(cudaMallocAsync((void **)&second, half, stream));
    CHECK(cudaMallocAsync((void **)&third, small, stream));
    CHECK(cudaMemsetAsync(second, 0, half, stream));
    CHECK(cudaMemsetAsync(third, 2, small, stream));
    CHECK(cudaMemcpyAsync(second, source, n * sizeof(int), cudaMemcpyDeviceToDevice, stream));
    add_up(second);
    add_up(third);
    CHECK(cudaFreeAsync(second, stream));
    CHECK(cudaFreeAsync(third, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    unsigned found = take(out), each = (unsigned)n * 0x03030303u + 2u * (total + three * n);
    REQUIRE(found == 2 * each, "allocations of different sizes come to %u, not %u", found, 2 * each);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFree(source));

    CHECK(cudaDeviceGraphMemTrim(0));
    unsigned long long used = 1;
    CHECK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &used));
    REQUIRE(used == 0, "%llu bytes are still used by graphs", used);
    return pass("%d, %d", 3 * (total + n), result);
}
