// A copy from page-locked memory is work of its stream: the program may write the source while a kernel or a wait that it holds up is before the copy.
#define PROGRAM "late_sources"
#include "common.h"

#include <cuda.h>

const size_t SIZE = 3 << 20;

// Ends when the program has set the word.
__global__ void until(volatile int *word) {
    while (*word == 0) {
    }
}

enum Form { COPY, OTHER_STREAM, ROWS, GRAPH, WAIT, WAITING_GRAPH, FORMS };

int main() {
    const char *names[] = {"a copy", "a copy on a stream behind it", "rows", "a graph's copy", "a copy behind a wait", "a copy behind a graph that waits"};
    unsigned char *source, *target;
    int *word, *device_word;
    CHECK(cudaHostAlloc(&word, sizeof(int), cudaHostAllocMapped));
    CHECK(cudaMalloc(&device_word, sizeof(int)));
    CHECK(cudaMallocHost(&source, SIZE));
    CHECK(cudaMalloc(&target, SIZE));
    cudaStream_t held, behind, beside;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&behind, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    CUcontext context;
    REQUIRE(cuCtxGetCurrent(&context) == CUDA_SUCCESS, "no context");

    cudaGraph_t copying, waiting;
    cudaGraphNode_t node;
    cudaGraphExec_t copy, wait;
    CHECK(cudaGraphCreate(&copying, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&node, copying, nullptr, 0, target, source, SIZE, cudaMemcpyHostToDevice));
    CHECK(cudaGraphInstantiate(&copy, copying, 0));
    CUstreamBatchMemOpParams operation = {};
    operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = (CUdeviceptr)device_word;
    operation.waitValue.value = 1;
    operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    CUDA_BATCH_MEM_OP_NODE_PARAMS parameters = {};
    parameters.ctx = context;
    parameters.count = 1;
    parameters.paramArray = &operation;
    CHECK(cudaGraphCreate(&waiting, 0));
    REQUIRE(cuGraphAddBatchMemOpNode(&node, waiting, nullptr, 0, &parameters) == CUDA_SUCCESS, "no node that waits");
    CHECK(cudaGraphInstantiate(&wait, waiting, 0));

    for (int form = 0; form < FORMS; form++) {
        bool waits = form == WAIT || form == WAITING_GRAPH;
        memset(source, 1, SIZE);
        *word = 0;
        CHECK(cudaMemset(device_word, 0, sizeof(int)));
        CHECK(cudaMemset(target, 0, SIZE));
        CHECK(cudaDeviceSynchronize());
        if (form == WAIT) REQUIRE(cuStreamWaitValue32(held, (CUdeviceptr)device_word, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS, "no wait");
        if (form == WAITING_GRAPH) CHECK(cudaGraphLaunch(wait, held));
        if (!waits) until<<<1, 1, 0, held>>>(word);
        switch (form) {
        case ROWS:
            CHECK(cudaMemcpy2DAsync(target, SIZE / 8, source, SIZE / 8, SIZE / 8 - 1, 8, cudaMemcpyHostToDevice, held));
            break;
        case GRAPH:
            CHECK(cudaGraphLaunch(copy, held));
            break;
        case OTHER_STREAM:
            CHECK(cudaEventRecord(event, held));
            CHECK(cudaStreamWaitEvent(behind, event));
            CHECK(cudaMemcpyAsync(target, source, SIZE, cudaMemcpyHostToDevice, behind));
            break;
        default:
            CHECK(cudaMemcpyAsync(target, source, SIZE, cudaMemcpyHostToDevice, held));
        }
        // The answer to this comes behind the copy's data, if that was sent ahead.
        CHECK(cudaMemsetAsync(device_word, 0, sizeof(int), beside));
        CHECK(cudaStreamSynchronize(beside));
        memset(source, 2, SIZE);
        if (waits) REQUIRE(cuStreamWriteValue32(beside, (CUdeviceptr)device_word, 1, 0) == CUDA_SUCCESS, "no write");
        else __atomic_store_n(word, 1, __ATOMIC_SEQ_CST);
        CHECK(cudaDeviceSynchronize());
        unsigned char found[2] = {};
        CHECK(cudaMemcpy(found, target, 1, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(found + 1, target + SIZE - 2, 1, cudaMemcpyDeviceToHost));
        REQUIRE(found[0] == 2 && found[1] == 2, "%s: the device has %d and %d", names[form], found[0], found[1]);
    }
    return pass("%d forms", (int)FORMS);
}
