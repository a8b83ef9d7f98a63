// A program that ends while its streams are held up, and says so before: by a host function that does not return, by a wait that nobody meets, by work behind both.
#define PROGRAM "exit_held"
#include "common.h"

#include <cuda.h>
#include <unistd.h>

__global__ void touch(int *at) { *at += 1; }

static void CUDART_CB never(void *) {
    for (;;) pause();
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *at;
    CUdeviceptr word;
    cudaStream_t held, waiting;
    CHECK(cudaMalloc(&at, sizeof *at));
    CHECK(cudaMemset(at, 0, sizeof *at));
    touch<<<1, 1>>>(at);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(cuMemAlloc(&word, 4) == CUDA_SUCCESS && cuMemsetD32(word, 0, 1) == CUDA_SUCCESS, "a word");
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
    REQUIRE(cuStreamWaitValue32(waiting, word, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS, "a wait");
    touch<<<1, 1, 0, waiting>>>(at);
    CHECK(cudaLaunchHostFunc(held, never, nullptr));
    touch<<<1, 1, 0, held>>>(at);
    REQUIRE(cudaStreamQuery(held) == cudaErrorNotReady && cudaStreamQuery(waiting) == cudaErrorNotReady, "a stream is not held");
    return pass("with two streams held");
}
