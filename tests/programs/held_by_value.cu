// A stream that a word of device memory holds, with long copies both ways behind it: other streams' copies go on, and one of them writes the word at last.
#define PROGRAM "held_by_value"
#include "common.h"

#include <cuda.h>

#define OK(call)                                                                              \
    do {                                                                                      \
        CUresult got_ = (call);                                                               \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);         \
    } while (0)

const int COPIES = 6;
const size_t SIZE = 8 << 20;

static unsigned char expected(size_t at, int copy) { return (unsigned char)(at * 7 + at / 4096 + copy * 31); }

int main() {
    unsigned char *device, *up, *down, *other, small[1000], back[1000];
    unsigned *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    CHECK(cudaMemset(word, 0, sizeof *word));
    CHECK(cudaMalloc(&device, COPIES * SIZE));
    CHECK(cudaMalloc(&other, SIZE));
    CHECK(cudaMallocHost(&up, COPIES * SIZE));
    CHECK(cudaMallocHost(&down, COPIES * SIZE));
    for (int copy = 0; copy < COPIES; copy++)
        for (size_t i = 0; i < SIZE; i++) up[copy * SIZE + i] = expected(i, copy);
    memset(down, 0, COPIES * SIZE);

    cudaStream_t held, free;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&free, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());

    OK(cuStreamWaitValue32(held, (CUdeviceptr)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    for (int copy = 0; copy < COPIES; copy++) {
        size_t at = copy * SIZE;
        CHECK(cudaMemcpyAsync(device + at, up + at, SIZE, cudaMemcpyHostToDevice, held));
        CHECK(cudaMemcpyAsync(down + at, device + at, SIZE, cudaMemcpyDeviceToHost, held));
    }
    // The other stream's copies, long and short, do not wait for any of that.
    for (int round = 0; round < 3; round++) {
        CHECK(cudaMemcpyAsync(other, up + round * SIZE, SIZE, cudaMemcpyHostToDevice, free));
        CHECK(cudaStreamSynchronize(free));
        for (size_t i = 0; i < sizeof small; i++) small[i] = expected(i, 100 + round);
        CHECK(cudaMemcpyAsync(other, small, sizeof small, cudaMemcpyHostToDevice, free));
        CHECK(cudaMemcpyAsync(back, other, sizeof back, cudaMemcpyDeviceToHost, free));
        CHECK(cudaStreamSynchronize(free));
        REQUIRE(memcmp(small, back, sizeof small) == 0, "round %d: the other stream's bytes came back changed", round);
    }
    REQUIRE(cudaStreamQuery(held) == cudaErrorNotReady, "the held stream went on by itself");
    REQUIRE(down[0] == 0 && down[COPIES * SIZE - 1] == 0, "the held stream has copied");

    OK(cuStreamWriteValue32(free, (CUdeviceptr)word, 1, 0));
    CHECK(cudaStreamSynchronize(held));
    for (int copy = 0; copy < COPIES; copy++)
        for (size_t i = 0; i < SIZE; i++)
            REQUIRE(down[copy * SIZE + i] == expected(i, copy), "copy %d, byte %zu", copy, i);
    return pass("%d copies each way", COPIES);
}
