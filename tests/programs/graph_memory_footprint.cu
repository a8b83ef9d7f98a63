// How much memory graphs take that allocate: addresses are used again inside a graph, memory by graphs that do not run at the same time, and none of it while the program has something there. What
// the driver tells of it, and what trimming gives back.
#define PROGRAM "graph_memory_footprint"
#include "common.h"

static const size_t Size = 64 << 20;
static const int Graphs = 4;

// The first and the last word: the rest of so much memory would only take time.
__global__ void write_ends(int *data, size_t words, int value) {
    data[0] = value;
    data[words - 1] = -value;
}

__global__ void read_ends(const int *data, size_t words, int *out) {
    atomicAdd(&out[0], data[0]);
    atomicAdd(&out[1], data[words - 1]);
}

// A little more work for whoever runs beside it.
__global__ void wait_a_while(int *out, int rounds) {
    int sum = 0;
    for (int i = 0; i < rounds; i++) sum += i ^ out[2];
    if (sum == 12345) out[2] = sum;
}

static size_t told(cudaGraphMemAttributeType what) {
    unsigned long long bytes = 0;
    CHECK(cudaDeviceGetGraphMemAttribute(0, what, &bytes));
    return bytes;
}

static void footprint(const char *what) {
    printf("%s: %zu MiB\n", what, told(cudaGraphMemAttrReservedMemCurrent) >> 20);
}

static int *allocate(cudaGraph_t graph, cudaGraphNode_t *node, cudaGraphNode_t *after, size_t bytes = Size) {
    cudaMemAllocNodeParams params = {};
    params.poolProps.allocType = cudaMemAllocationTypePinned;
    params.poolProps.location.type = cudaMemLocationTypeDevice;
    params.bytesize = bytes;
    CHECK(cudaGraphAddMemAllocNode(node, graph, after, after ? 1 : 0, &params));
    return (int *)params.dptr;
}

static void kernel(cudaGraph_t graph, cudaGraphNode_t *node, void *function, void **arguments) {
    cudaKernelNodeParams params = {};
    params.func = function;
    params.gridDim = dim3(1);
    params.blockDim = dim3(1);
    params.kernelParams = arguments;
    cudaGraphNode_t after = *node;
    CHECK(cudaGraphAddKernelNode(node, graph, &after, 1, &params));
}

struct Made {
    cudaGraphExec_t exec;
    int *data;
};

// Allocates, writes a number at both ends, reads it back into sums, and frees again if it shall.
static Made make(int value, int *out, bool frees, int rounds = 0) {
    cudaGraph_t graph;
    cudaGraphNode_t node;
    Made made;
    size_t words = Size / sizeof(int);
    CHECK(cudaGraphCreate(&graph, 0));
    made.data = allocate(graph, &node, nullptr);
    void *writes[] = {&made.data, &words, &value}, *reads[] = {&made.data, &words, &out}, *waits[] = {&out, &rounds};
    kernel(graph, &node, (void *)write_ends, writes);
    if (rounds) kernel(graph, &node, (void *)wait_a_while, waits);
    kernel(graph, &node, (void *)read_ends, reads);
    cudaGraphNode_t release;
    if (frees) CHECK(cudaGraphAddMemFreeNode(&release, graph, &node, 1, made.data));
    CHECK(cudaGraphInstantiate(&made.exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return made;
}

static void expect_sums(int *out, int value) {
    int sums[2];
    CHECK(cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost));
    REQUIRE(sums[0] == value && sums[1] == -value, "the sums are %d and %d, not %d", sums[0], sums[1], value);
    CHECK(cudaMemset(out, 0, sizeof sums));
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *out;
    CHECK(cudaMalloc(&out, 3 * sizeof *out));
    CHECK(cudaMemset(out, 0, 3 * sizeof *out));
    CHECK(cudaDeviceSynchronize());
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    footprint("at first");

    {
        cudaGraph_t graph;
        cudaGraphNode_t alloc, release, beside;
        CHECK(cudaGraphCreate(&graph, 0));
        int *first = allocate(graph, &alloc, nullptr);
        CHECK(cudaGraphAddMemFreeNode(&release, graph, &alloc, 1, first));
        int *second = allocate(graph, &alloc, &release);
        REQUIRE(second == first, "what comes behind a free has other addresses");
        int *third = allocate(graph, &beside, &release, Size / 2);
        REQUIRE(third + Size / 8 <= second || third >= second + Size / 4, "allocations beside each other share addresses");
        CHECK(cudaGraphAddMemFreeNode(&release, graph, &beside, 1, third));
        CHECK(cudaGraphAddMemFreeNode(&release, graph, &alloc, 1, second));
        CHECK(cudaGraphDestroy(graph));
    }

    // Graphs on one stream take turns.
    Made made[Graphs];
    int sum = 0;
    for (int i = 0; i < Graphs; i++) made[i] = make(i + 1, out, true);
    for (int i = 0; i < Graphs; i++)
        for (int j = 0; j < i; j++) REQUIRE(made[i].data != made[j].data, "two graphs have the same addresses");
    footprint("with instances that were not launched");
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < Graphs; i++) {
            CHECK(cudaGraphLaunch(made[i].exec, stream));
            if (i < 2) footprint(round ? "launched again" : i ? "another on the same stream" : "the first launch");
            sum += i + 1;
        }
    CHECK(cudaStreamSynchronize(stream));
    footprint("all of them, twice");
    expect_sums(out, sum);
    CHECK(cudaDeviceGraphMemTrim(0));
    footprint("trimmed, with the instances still there");
    REQUIRE(told(cudaGraphMemAttrUsedMemCurrent) == 0, "%zu bytes are used", told(cudaGraphMemAttrUsedMemCurrent));
    REQUIRE(told(cudaGraphMemAttrReservedMemHigh) >= Size, "%zu bytes at most", told(cudaGraphMemAttrReservedMemHigh));
    unsigned long long zero = 0;
    CHECK(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrReservedMemHigh, &zero));
    CHECK(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &zero));
    REQUIRE(told(cudaGraphMemAttrReservedMemHigh) == 0, "%zu bytes at most since", told(cudaGraphMemAttrReservedMemHigh));
    CHECK(cudaGraphLaunch(made[2].exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    footprint("launched after that");
    expect_sums(out, 3);
    for (Made &each : made) CHECK(cudaGraphExecDestroy(each.exec));

    // Graphs on several streams, whose memory is their own while they run.
    cudaStream_t streams[Graphs];
    sum = 0;
    for (int i = 0; i < Graphs; i++) {
        made[i] = make(100 * (i + 1), out, true, 20000);
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < Graphs; i++) {
            CHECK(cudaGraphLaunch(made[(i + round) % Graphs].exec, streams[i]));
            sum += 100 * (i + 1);
        }
    for (int i = 0; i < Graphs; i++) CHECK(cudaStreamSynchronize(streams[i]));
    expect_sums(out, sum);
    for (int i = 0; i < Graphs; i++) {
        CHECK(cudaGraphExecDestroy(made[i].exec));
        CHECK(cudaStreamDestroy(streams[i]));
    }
    CHECK(cudaDeviceGraphMemTrim(0));
    footprint("trimmed, without the instances");

    // Memory that the program keeps is nobody else's.
    for (int i = 0; i < Graphs; i++) made[i] = make(i + 10, out, false);
    Made other = make(77, out, true);
    for (int i = 0; i < Graphs; i++) {
        CHECK(cudaGraphLaunch(made[i].exec, stream));
        footprint("one more that keeps its memory");
    }
    CHECK(cudaGraphLaunch(other.exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_sums(out, 10 + 11 + 12 + 13 + 77);
    for (int i = 0; i < Graphs; i++) {
        int ends[2];
        CHECK(cudaMemcpy(&ends[0], made[i].data, sizeof(int), cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(&ends[1], made[i].data + Size / sizeof(int) - 1, sizeof(int), cudaMemcpyDeviceToHost));
        REQUIRE(ends[0] == i + 10 && ends[1] == -(i + 10), "graph %d's memory holds %d and %d", i, ends[0], ends[1]);
    }
    CHECK(cudaGraphExecDestroy(other.exec));
    CHECK(cudaDeviceGraphMemTrim(0));
    footprint("trimmed, and kept all the same");
    // Freed in a stream's order, at once, by another graph, and without its own instance.
    CHECK(cudaFreeAsync(made[0].data, stream));
    CHECK(cudaFree(made[1].data));
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaGraphExec_t frees;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemFreeNode(&node, graph, nullptr, 0, made[2].data));
    CHECK(cudaGraphInstantiate(&frees, graph, 0));
    CHECK(cudaGraphLaunch(frees, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(made[3].exec));
    CHECK(cudaFree(made[3].data));
    footprint("freed");
    CHECK(cudaDeviceGraphMemTrim(0));
    footprint("trimmed");
    // And allocated again, with another's memory.
    CHECK(cudaGraphLaunch(made[0].exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_sums(out, 10);
    CHECK(cudaFreeAsync(made[0].data, stream));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphExecDestroy(made[i].exec));
    CHECK(cudaGraphExecDestroy(frees));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaDeviceGraphMemTrim(0));
    footprint("at last");
    return pass("%d graphs", Graphs);
}
