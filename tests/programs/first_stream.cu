// The first stream that does not wait for the default stream comes behind the copies that have returned, and not behind what the default stream does after them.
#define PROGRAM "first_stream"
#include "common.h"

#include <vector>

const int SIZE = 4 << 20;
const int TAIL = 64;

// Counts in `wrong` what does not hold the value.
__global__ void check(const int *a, int n, int value, int *wrong) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (a[i] != value) atomicAdd(wrong, 1);
}

// Ends when another stream has set the word.
__global__ void until(volatile int *word) {
    while (*word == 0) {
    }
}

int main() {
    int *copied, *row, *wrong, *word;
    CHECK(cudaMalloc(&copied, SIZE * sizeof(int)));
    CHECK(cudaMalloc(&row, TAIL * sizeof(int)));
    CHECK(cudaMalloc(&wrong, sizeof(int)));
    CHECK(cudaMalloc(&word, sizeof(int)));
    CHECK(cudaMemset(copied, 0, SIZE * sizeof(int)));
    CHECK(cudaMemset(row, 0, TAIL * sizeof(int)));
    CHECK(cudaMemset(wrong, 0, sizeof(int)));
    // Both kernels are loaded before one of them waits for the other stream.
    int one = 1;
    CHECK(cudaMemcpy(word, &one, sizeof one, cudaMemcpyHostToDevice));
    until<<<1, 1>>>(word);
    check<<<1, TAIL>>>(copied, TAIL, 0, wrong);
    CHECK(cudaMemset(word, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());

    std::vector<int> host(SIZE, 7);
    CHECK(cudaMemcpy(copied, host.data(), SIZE * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(row, host.data(), TAIL * sizeof(int), cudaMemcpyHostToDevice));
    until<<<1, 1>>>(word);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check<<<1, TAIL, 0, stream>>>(copied + SIZE - TAIL, TAIL, 7, wrong);
    check<<<1, TAIL, 0, stream>>>(row, TAIL, 7, wrong);
    CHECK(cudaMemcpyAsync(word, &one, sizeof one, cudaMemcpyHostToDevice, stream));
    CHECK(cudaDeviceSynchronize());
    int found = -1;
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "%d values were not there yet", found);
    return pass("a stream behind two copies");
}
