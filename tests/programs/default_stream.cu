// The default stream: the legacy one waits for the blocking streams and they for it, one that does not block goes its own way;
// with per-thread default streams (the same file, compiled so) it is a stream like others.
#ifndef PROGRAM
#define PROGRAM "default_stream"
#endif
#include "common.h"
#include <cuda.h>

#include <atomic>

static std::atomic<bool> go;
static void CUDART_CB hold(void *) {
    while (!go) {}
}

__global__ void set(int *p, int value) { *p = value; }

// Whether work put on `behind` waits for what holds `ahead`.
static bool waits(cudaStream_t ahead, cudaStream_t behind, int *p, bool want) {
    cudaEvent_t done;
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    CHECK(cudaDeviceSynchronize());
    go = false;
    CHECK(cudaLaunchHostFunc(ahead, hold, nullptr));
    set<<<1, 1, 0, ahead>>>(p, 1);
    set<<<1, 1, 0, behind>>>(p + 1, 2);
    CHECK(cudaEventRecord(done, behind));
    // What waits would wait for ever; what is free to run has run before long.
    bool waited = true;
    for (int i = 0; i < (want ? 30 : 100000) && waited; i++) {
        cudaError_t status = cudaEventQuery(done);
        REQUIRE(status == cudaSuccess || status == cudaErrorNotReady, "%s", cudaGetErrorName(status));
        waited = status == cudaErrorNotReady;
        struct timespec nap = {0, 1000000};
        if (waited) nanosleep(&nap, nullptr);
    }
    if (waited && !want) {
        // Not even now? A call that the server answers shows whether it had seen the work at all.
        size_t free_bytes, total;
        CHECK(cudaMemGetInfo(&free_bytes, &total));
        struct timespec moment = {1, 0};
        nanosleep(&moment, nullptr);
        fprintf(stderr, "after another call the event is: %s; stream ahead: %s, stream behind: %s\n", cudaGetErrorName(cudaEventQuery(done)),
                cudaGetErrorName(cudaStreamQuery(ahead)), cudaGetErrorName(cudaStreamQuery(behind)));
    }
    go = true;
    CHECK(cudaEventSynchronize(done));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventDestroy(done));
    return waited;
}

// How the default stream comes to wait for the program: for a function or a word of its own, or of a stream that it waits for.
enum Hold { FUNCTION, WORD, GRAPH, OTHERS_FUNCTION, OTHERS_WORD, EVENT, HOLDS };

static cudaGraphExec_t graph_that_waits(int *word) {
    CUcontext context;
    REQUIRE(cuCtxGetCurrent(&context) == CUDA_SUCCESS, "no context");
    CUstreamBatchMemOpParams operation = {};
    operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = (CUdeviceptr)word;
    operation.waitValue.value = 1;
    operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    CUDA_BATCH_MEM_OP_NODE_PARAMS parameters = {};
    parameters.ctx = context;
    parameters.count = 1;
    parameters.paramArray = &operation;
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaGraphExec_t instance;
    CHECK(cudaGraphCreate(&graph, 0));
    REQUIRE(cuGraphAddBatchMemOpNode(&node, graph, nullptr, 0, &parameters) == CUDA_SUCCESS, "no node that waits");
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return instance;
}

static void hold_default_stream(Hold by, cudaStream_t other, cudaStream_t free_one, int *p, int *word, cudaGraphExec_t graph) {
    cudaEvent_t event;
    switch (by) {
    case FUNCTION:
        CHECK(cudaLaunchHostFunc(cudaStreamLegacy, hold, nullptr));
        break;
    case WORD:
        REQUIRE(cuStreamWaitValue32(CU_STREAM_LEGACY, (CUdeviceptr)word, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS, "no wait");
        break;
    case GRAPH:
        CHECK(cudaGraphLaunch(graph, cudaStreamLegacy));
        break;
    case OTHERS_FUNCTION:
        CHECK(cudaLaunchHostFunc(other, hold, nullptr));
        set<<<1, 1, 0, cudaStreamLegacy>>>(p, 1);
        break;
    case OTHERS_WORD:
        REQUIRE(cuStreamWaitValue32(other, (CUdeviceptr)word, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS, "no wait");
        set<<<1, 1, 0, cudaStreamLegacy>>>(p, 1);
        break;
    default:
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CHECK(cudaLaunchHostFunc(free_one, hold, nullptr));
        CHECK(cudaEventRecord(event, free_one));
        CHECK(cudaStreamWaitEvent(cudaStreamLegacy, event, 0));
        CHECK(cudaEventDestroy(event));
    }
}

// What a blocking stream was given before the default stream is done, by query and by wait, although the default stream waits for the host.
static void goes_ahead(cudaStream_t stream, cudaStream_t other, cudaStream_t free_one, int *p) {
    const char *names[] = {"a function", "a word", "a graph that waits for a word", "another stream's function", "another stream's word", "an event behind a function"};
    int *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    cudaGraphExec_t graph = graph_that_waits(word);
    for (int by = 0; by < HOLDS; by++) {
        for (bool query : {true, false}) {
            go = false;
            CHECK(cudaMemset(word, 0, sizeof *word));
            CHECK(cudaDeviceSynchronize());
            set<<<1, 1, 0, stream>>>(p, 1);
            hold_default_stream(Hold(by), other, free_one, p, word, graph);
            cudaError_t status = cudaErrorNotReady;
            if (!query) status = cudaStreamSynchronize(stream);
            for (int i = 0; i < 100000 && status == cudaErrorNotReady; i++) {
                status = cudaStreamQuery(stream);
                struct timespec nap = {0, 1000000};
                if (status == cudaErrorNotReady) nanosleep(&nap, nullptr);
            }
            REQUIRE(status == cudaSuccess, "%s, held by %s: %s", query ? "query" : "wait", names[by], cudaGetErrorName(status));
            go = true;
            if (by == WORD || by == GRAPH || by == OTHERS_WORD) set<<<1, 1, 0, free_one>>>(word, 1);
            CHECK(cudaDeviceSynchronize());
        }
    }
    CHECK(cudaGraphExecDestroy(graph));
    CHECK(cudaFree(word));
}

static std::atomic<int> from;
static void CUDART_CB give(void *) {
    struct timespec moment = {0, 30000000};
    nanosleep(&moment, nullptr);
    from = 7;
}

// A copy from host to host in a blocking stream comes after what the default stream was given before.
static void copies_behind(cudaStream_t stream) {
    int to = 0;
    CHECK(cudaStreamSynchronize(stream));
    from = 1;
    CHECK(cudaLaunchHostFunc(cudaStreamLegacy, give, nullptr));
    CHECK(cudaMemcpyAsync(&to, &from, sizeof to, cudaMemcpyHostToHost, stream));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(to == 7, "the copy is %d", to);
}

static volatile int *written;
static std::atomic<int> seen;
static void CUDART_CB see(void *) {
    seen = *written;
}

__global__ void until(volatile int *flag) {
    while (*flag == 0) {
    }
}

// A host function on `behind` comes after a kernel on `ahead`, which waits for one on `free_one`.
static void function_waits(cudaStream_t ahead, cudaStream_t behind, cudaStream_t free_one) {
    int *pinned, *pinned_there, *flag;
    CHECK(cudaHostAlloc(&pinned, sizeof *pinned, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&pinned_there, pinned, 0));
    CHECK(cudaMalloc(&flag, sizeof *flag));
    // All kernels are loaded before one has to run beside another.
    set<<<1, 1>>>(flag, 1);
    until<<<1, 1>>>(flag);
    set<<<1, 1>>>(flag, 0);
    CHECK(cudaDeviceSynchronize());
    written = pinned;
    *written = 0;
    seen = -1;
    until<<<1, 1, 0, ahead>>>(flag);
    set<<<1, 1, 0, ahead>>>(pinned_there, 1);
    CHECK(cudaLaunchHostFunc(behind, see, nullptr));
    struct timespec moment = {0, 30000000};
    nanosleep(&moment, nullptr);
    set<<<1, 1, 0, free_one>>>(flag, 1);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(seen == 1, "the function behind the kernel saw %d", seen.load());
    CHECK(cudaFree(flag));
    CHECK(cudaFreeHost(pinned));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *p;
    CHECK(cudaMalloc(&p, 8));
    set<<<1, 1>>>(p, 0);
    cudaStream_t blocking, free_one, other;
    CHECK(cudaStreamCreate(&blocking));
    CHECK(cudaStreamCreate(&other));
    CHECK(cudaStreamCreateWithFlags(&free_one, cudaStreamNonBlocking));
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    const bool zero_is_legacy = false;
#else
    const bool zero_is_legacy = true;
#endif
    struct { const char *what; cudaStream_t ahead, behind; bool want; } pairs[] = {
        {"blocking, then legacy", blocking, cudaStreamLegacy, true},
        {"legacy, then blocking", cudaStreamLegacy, blocking, true},
        {"free, then legacy", free_one, cudaStreamLegacy, false},
        {"legacy, then free", cudaStreamLegacy, free_one, false},
        {"per thread, then legacy", cudaStreamPerThread, cudaStreamLegacy, true},
        {"legacy, then per thread", cudaStreamLegacy, cudaStreamPerThread, true},
        {"blocking, then per thread", blocking, cudaStreamPerThread, false},
        {"per thread, then free", cudaStreamPerThread, free_one, false},
        {"blocking, then blocking", blocking, other, false},
        {"blocking, then default", blocking, nullptr, zero_is_legacy},
        {"default, then blocking", nullptr, blocking, zero_is_legacy},
        {"free, then default", free_one, nullptr, false},
    };
    for (auto &pair : pairs) {
        bool waited = waits(pair.ahead, pair.behind, p, pair.want);
        REQUIRE(waited == pair.want, "%s: it %s", pair.what, waited ? "waited" : "did not wait");
    }
    goes_ahead(blocking, other, free_one, p);
    goes_ahead(cudaStreamPerThread, other, free_one, p);
    copies_behind(blocking);
    copies_behind(cudaStreamPerThread);
    function_waits(cudaStreamLegacy, blocking, free_one);
    function_waits(cudaStreamLegacy, cudaStreamPerThread, free_one);
    function_waits(blocking, cudaStreamLegacy, free_one);
    int got[2];
    CHECK(cudaMemcpy(got, p, sizeof got, cudaMemcpyDeviceToHost));
    REQUIRE(got[0] == 1 && got[1] == 2, "%d %d", got[0], got[1]);
    return pass("%zu pairs of streams", sizeof pairs / sizeof *pairs);
}
