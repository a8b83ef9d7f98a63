// Memory operations of streams: waits for words of device memory and of pinned memory, writes of both, batches, and all of it in graphs.
#define PROGRAM "stream_memory"
#include "common.h"

#include <cuda.h>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);                                    \
    } while (0)
#define WANT(want, call)                                                                                                 \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == (want), "line %d: %s: expected %d, got %d", __LINE__, #call, (int)(want), (int)got_);            \
    } while (0)

__global__ void step(int *value, int factor, int addend) { *value = *value * factor + addend; }

static int read_int(const int *device) {
    int value;
    CHECK(cudaMemcpy(&value, device, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

struct Words {
    unsigned narrow[4];
    unsigned long long wide[2];
};

static CUstream a, b;
static CUdeviceptr words;
static int *value;

static CUdeviceptr narrow(int i) { return words + offsetof(Words, narrow) + 4 * i; }
static CUdeviceptr wide(int i) { return words + offsetof(Words, wide) + 8 * i; }

static Words fetch() {
    Words now;
    OK(cuMemcpyDtoH(&now, words, sizeof now));
    return now;
}

static CUstreamBatchMemOpParams op(CUstreamBatchMemOpType type, CUdeviceptr address, unsigned long long value, unsigned flags = 0) {
    CUstreamBatchMemOpParams op;
    memset(&op, 0, sizeof op);
    op.operation = type;
    if (type == CU_STREAM_MEM_OP_BARRIER) {
        op.memoryBarrier.flags = flags;
    } else {
        // Both forms have their parts in the same places.
        op.waitValue.address = address;
        op.waitValue.value64 = value;
        op.waitValue.flags = flags;
    }
    return op;
}

// One stream waits for what the other writes.
static void on_device() {
    OK(cuMemsetD8(words, 0, sizeof(Words)));
    CHECK(cudaMemset(value, 0, sizeof *value));
    CHECK(cudaDeviceSynchronize());
    OK(cuStreamWaitValue32(a, narrow(0), 3, CU_STREAM_WAIT_VALUE_GEQ));
    step<<<1, 1, 0, a>>>(value, 10, 5);
    LAUNCHED();
    WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
    step<<<1, 1, 0, b>>>(value, 1, 7);
    LAUNCHED();
    OK(cuStreamWriteValue32(b, narrow(0), 2, 0));
    OK(cuStreamSynchronize(b));
    WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
    OK(cuStreamWriteValue32(b, narrow(0), 3, 0));
    OK(cuStreamSynchronize(a));
    REQUIRE(read_int(value) == 75, "the stream that waited came to %d", read_int(value));

    // The other conditions, each unmet at first. A count that wraps is later than before.
    OK(cuMemsetD32(narrow(0), 0xfffffff0u, 1));
    OK(cuCtxSynchronize());
    OK(cuStreamWaitValue32(a, narrow(0), 4, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuStreamWaitValue32(a, narrow(1), 77, CU_STREAM_WAIT_VALUE_EQ));
    OK(cuStreamWaitValue64(a, wide(0), 1ull << 40, CU_STREAM_WAIT_VALUE_AND));
    OK(cuStreamWriteValue64(a, wide(1), 0x123456789abcdefull, 0));
    OK(cuStreamWriteValue32(b, narrow(0), 5, 0));
    OK(cuStreamWriteValue32(b, narrow(1), 77, 0));
    OK(cuStreamSynchronize(b));
    WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
    OK(cuStreamWriteValue64(b, wide(0), 3ull << 40, 0));
    OK(cuStreamSynchronize(a));
    Words now = fetch();
    REQUIRE(now.wide[1] == 0x123456789abcdefull, "a stream wrote %llx", now.wide[1]);
    int nor = 0;
    OK(cuDeviceGetAttribute(&nor, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 0));
    if (nor) {
        OK(cuMemsetD32(narrow(2), 0xffffffffu, 1));
        OK(cuCtxSynchronize());
        OK(cuStreamWaitValue32(a, narrow(2), 0xf0000000u, CU_STREAM_WAIT_VALUE_NOR));
        WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
        OK(cuStreamWriteValue32(b, narrow(2), 0xfffffffeu, 0));
        OK(cuStreamSynchronize(a));
    }
}

// The program writes what a stream waits for, and reads what a stream writes.
static void on_host() {
    volatile unsigned *pinned;
    OK(cuMemHostAlloc((void **)&pinned, 4096, CU_MEMHOSTALLOC_PORTABLE));
    memset((void *)pinned, 0, 4096);
    CUdeviceptr at = (CUdeviceptr)pinned;
    CHECK(cudaMemset(value, 0, sizeof *value));
    CHECK(cudaDeviceSynchronize());
    for (unsigned round = 1; round <= 20; round++) {
        OK(cuStreamWaitValue32(a, at, round, CU_STREAM_WAIT_VALUE_GEQ));
        step<<<1, 1, 0, a>>>(value, 2, (int)round);
        LAUNCHED();
        OK(cuStreamWriteValue32(a, at + 64, round, 0));
        OK(cuStreamWriteValue64(a, at + 128, (unsigned long long)round << 33, 0));
        WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
        REQUIRE(pinned[16] == round - 1, "round %u: a word has %u too early", round, pinned[16]);
        __sync_synchronize();
        pinned[0] = round;
        while (pinned[16] != round) {
        }
        OK(cuStreamSynchronize(a));
        REQUIRE(*(volatile unsigned long long *)(pinned + 32) == (unsigned long long)round << 33, "round %u: the wide word", round);
    }
    int want = 0;
    for (int round = 1; round <= 20; round++) want = want * 2 + round;
    REQUIRE(read_int(value) == want, "twenty rounds come to %d, not %d", read_int(value), want);

    // One stream waits for the program, another for that one.
    pinned[0] = 0;
    OK(cuMemsetD8(words, 0, sizeof(Words)));
    OK(cuCtxSynchronize());
    CUstreamBatchMemOpParams chain[] = {op(CU_STREAM_MEM_OP_WAIT_VALUE_32, at, 1), op(CU_STREAM_MEM_OP_WRITE_VALUE_32, narrow(0), 1),
                                        op(CU_STREAM_MEM_OP_WRITE_VALUE_32, at + 4, 9)};
    OK(cuStreamBatchMemOp(a, 3, chain, 0));
    OK(cuStreamWaitValue32(b, narrow(0), 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(cuStreamWriteValue32(b, narrow(1), 2, 0));
    WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
    pinned[0] = 1;
    OK(cuStreamSynchronize(b));
    OK(cuStreamSynchronize(a));
    REQUIRE(pinned[1] == 9 && fetch().narrow[1] == 2, "the chain ended with %u and %u", pinned[1], fetch().narrow[1]);

    // A copy behind a wait reads what is there when the wait is over; a copy on another stream is not held by it. Both kinds of words.
    volatile int *source = (volatile int *)pinned + 100;
    for (int round = 0; round < 2; round++) {
        pinned[0] = 0;
        source[0] = source[1] = -1;
        OK(cuMemsetD8(words, 0, sizeof(Words)));
        OK(cuCtxSynchronize());
        OK(cuStreamWaitValue32(a, round == 0 ? at : narrow(0), 1, CU_STREAM_WAIT_VALUE_EQ));
        CHECK(cudaMemcpyAsync(value, (void *)source, sizeof *value, cudaMemcpyHostToDevice, a));
        source[1] = 55 + round;
        CHECK(cudaMemcpyAsync((void *)narrow(3), (void *)(source + 1), sizeof(int), cudaMemcpyHostToDevice, b));
        OK(cuStreamSynchronize(b));
        WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
        source[0] = 42 + round;
        __sync_synchronize();
        if (round == 0)
            pinned[0] = 1;
        else
            OK(cuStreamWriteValue32(b, narrow(0), 1, 0));
        OK(cuStreamSynchronize(a));
        REQUIRE(read_int(value) == 42 + round && fetch().narrow[3] == 55u + round, "copies beside a wait brought %d and %u", read_int(value),
                fetch().narrow[3]);
    }
    OK(cuMemFreeHost((void *)pinned));

    // Mapped memory, by the address that the device has for it, in turn with a kernel.
    int *mapped;
    CUdeviceptr reached;
    OK(cuMemHostAlloc((void **)&mapped, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    OK(cuMemHostGetDevicePointer(&reached, mapped, 0));
    mapped[0] = 3;
    step<<<1, 1, 0, a>>>((int *)reached, 5, 1);
    LAUNCHED();
    OK(cuStreamWriteValue32(a, reached + 4, 17, 0));
    OK(cuStreamWriteValue64(a, reached + 8, 1ull << 36, 0));
    step<<<1, 1, 0, a>>>((int *)reached + 1, 1, 1);
    LAUNCHED();
    OK(cuStreamSynchronize(a));
    REQUIRE(mapped[0] == 16 && mapped[1] == 18 && mapped[2] == 0 && mapped[3] == 16, "mapped memory has %d %d %d %d", mapped[0], mapped[1],
            mapped[2], mapped[3]);
    OK(cuMemFreeHost(mapped));
}

static void batches() {
    OK(cuMemsetD8(words, 0, sizeof(Words)));
    OK(cuCtxSynchronize());
    CUstreamBatchMemOpParams all[] = {
        op(CU_STREAM_MEM_OP_WRITE_VALUE_32, narrow(0), 11), op(CU_STREAM_MEM_OP_WRITE_VALUE_64, wide(0), 1ull << 35 | 12),
        op(CU_STREAM_MEM_OP_BARRIER, 0, 0, CU_STREAM_MEMORY_BARRIER_TYPE_SYS),
        op(CU_STREAM_MEM_OP_WAIT_VALUE_32, narrow(0), 11, CU_STREAM_WAIT_VALUE_EQ),
        op(CU_STREAM_MEM_OP_WAIT_VALUE_64, wide(0), 1ull << 35, CU_STREAM_WAIT_VALUE_AND), op(CU_STREAM_MEM_OP_WRITE_VALUE_32, narrow(1), 13)};
    OK(cuStreamBatchMemOp(a, sizeof all / sizeof *all, all, 0));
    OK(cuStreamSynchronize(a));
    Words now = fetch();
    REQUIRE(now.narrow[0] == 11 && now.wide[0] == (1ull << 35 | 12) && now.narrow[1] == 13, "a batch wrote %u, %llu, %u", now.narrow[0],
            now.wide[0], now.narrow[1]);
    WANT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(a, 1, all, 1));
}

static void in_graphs() {
    OK(cuMemsetD8(words, 0, sizeof(Words)));
    CHECK(cudaMemset(value, 0, sizeof *value));
    CHECK(cudaDeviceSynchronize());
    // Captured.
    CUgraph graph;
    CUgraphExec exec;
    OK(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    step<<<1, 1, 0, a>>>(value, 1, 1);
    LAUNCHED();
    OK(cuStreamWriteValue32(a, narrow(0), 21, 0));
    step<<<1, 1, 0, a>>>(value, 2, 0);
    LAUNCHED();
    OK(cuStreamEndCapture(a, &graph));
    size_t count = 0;
    OK(cuGraphGetNodes(graph, nullptr, &count));
    REQUIRE(count == 3, "the captured graph has %zu nodes", count);
    OK(cuGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) OK(cuGraphLaunch(exec, a));
    OK(cuStreamSynchronize(a));
    REQUIRE(read_int(value) == 14 && fetch().narrow[0] == 21, "the captured graph came to %d and %u", read_int(value), fetch().narrow[0]);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));

    // Node by node: a batch that writes, one that waits for that (and has nothing to wait for by then), kernels at both ends.
    CHECK(cudaMemset(value, 0, sizeof *value));
    OK(cuMemsetD8(words, 0, sizeof(Words)));
    CHECK(cudaDeviceSynchronize());
    CUcontext context;
    OK(cuCtxGetCurrent(&context));
    cudaGraph_t runtime_graph;
    CHECK(cudaGraphCreate(&runtime_graph, 0));
    graph = runtime_graph;
    auto batch = [&](CUgraphNode *before, CUstreamBatchMemOpParams *ops, unsigned count) {
        CUDA_BATCH_MEM_OP_NODE_PARAMS params = {context, count, ops, 0};
        CUgraphNode node;
        OK(cuGraphAddBatchMemOpNode(&node, graph, before, before ? 1 : 0, &params));
        return node;
    };
    auto kernel = [&](CUgraphNode *before, int factor, int addend) {
        void *arguments[] = {&value, &factor, &addend};
        cudaKernelNodeParams params = {};
        params.func = (void *)step;
        params.gridDim = params.blockDim = dim3(1);
        params.kernelParams = arguments;
        cudaGraphNode_t node;
        CHECK(cudaGraphAddKernelNode(&node, runtime_graph, before, before ? 1 : 0, &params));
        return (CUgraphNode)node;
    };
    CUstreamBatchMemOpParams waits = op(CU_STREAM_MEM_OP_WAIT_VALUE_32, narrow(0), 1, CU_STREAM_WAIT_VALUE_EQ);
    CUstreamBatchMemOpParams writes[] = {op(CU_STREAM_MEM_OP_WRITE_VALUE_32, narrow(1), 5), op(CU_STREAM_MEM_OP_WRITE_VALUE_32, narrow(0), 1)};
    CUgraphNode first = kernel(nullptr, 1, 4), last = batch(&first, writes, 2), waiting = batch(&last, &waits, 1);
    kernel(&waiting, 3, 0);
    CUgraphNodeType type;
    OK(cuGraphNodeGetType(last, &type));
    REQUIRE(type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, "a batch node's type is %d", (int)type);
    CUDA_BATCH_MEM_OP_NODE_PARAMS told;
    OK(cuGraphBatchMemOpNodeGetParams(last, &told));
    REQUIRE(told.count == 2 && told.paramArray[0].writeValue.value == 5 && told.paramArray[1].writeValue.address == narrow(0),
            "a batch node's parameters are %u operations", told.count);
    OK(cuGraphInstantiate(&exec, graph, 0));
    OK(cuGraphLaunch(exec, a));
    OK(cuStreamSynchronize(a));
    REQUIRE(read_int(value) == 12 && fetch().narrow[1] == 5, "the graph came to %d and %u", read_int(value), fetch().narrow[1]);
    // The instance writes something else from now on; so does the graph.
    writes[0].writeValue.value = 6;
    CUDA_BATCH_MEM_OP_NODE_PARAMS changed = {context, 2, writes, 0};
    OK(cuGraphExecBatchMemOpNodeSetParams(exec, last, &changed));
    OK(cuMemsetD32(narrow(0), 0, 1));
    OK(cuGraphLaunch(exec, a));
    OK(cuStreamSynchronize(a));
    REQUIRE(read_int(value) == 48 && fetch().narrow[1] == 6, "the changed graph came to %d and %u", read_int(value), fetch().narrow[1]);
    writes[0].writeValue.value = 7;
    OK(cuGraphBatchMemOpNodeSetParams(last, &changed));
    OK(cuGraphBatchMemOpNodeGetParams(last, &told));
    REQUIRE(told.paramArray[0].writeValue.value == 7, "the changed node writes %u", told.paramArray[0].writeValue.value);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaFree(0));
    int there = 0;
    OK(cuDeviceGetAttribute(&there, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
    REQUIRE(there == 1, "the device has no memory operations of streams");
    CHECK(cudaMalloc(&value, sizeof *value));
    OK(cuMemAlloc(&words, sizeof(Words)));
    OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
    // Loaded before anything waits: loading may wait for the device.
    step<<<1, 1>>>(value, 0, 0);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    on_device();
    on_host();
    batches();
    in_graphs();
    return pass("%d", read_int(value));
}
