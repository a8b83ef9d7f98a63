// Pinned memory that a running kernel reads: it sees what the program writes to one page before what the program then writes to another, whichever page the program touched first.
#define PROGRAM "mapped_order"
#include "common.h"

#include <atomic>
#include <thread>

__host__ __device__ int expected(int round, int i) { return round * 1000003 + i; }

// Waits for each round's flag, checks the data and confirms the round.
__global__ void check(const volatile int *flag, const volatile int *data, int n, int rounds, volatile int *confirmed, int *wrong) {
    for (int round = 1; round <= rounds; round++) {
        if (threadIdx.x == 0) {
            while (*flag < round) {
            }
            __threadfence_system();
        }
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            if (data[i] != expected(round, i)) atomicAdd(wrong, 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            *confirmed = round;
        }
    }
}

static volatile int *page() {
    int *memory;
    CHECK(cudaHostAlloc(&memory, 4096, cudaHostAllocMapped));
    for (int i = 0; i < 1024; i++) memory[i] = 0;
    return memory;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 12000, rounds = 30;
    volatile int *flag = page(), *confirmed = page();
    int *data, *wrong, found = -1;
    CHECK(cudaHostAlloc(&data, n * sizeof *data, cudaHostAllocMapped));
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    check<<<1, 32>>>((const int *)flag, data, n, rounds, (int *)confirmed, wrong);
    CHECK(cudaGetLastError());
    for (int round = 1; round <= rounds; round++) {
        // The flag's page first, so that it can already be written when the data is.
        if (round % 3) flag[1] = round;
        for (int i = 0; i < n; i++) {
            data[i] = expected(round, i);
            // And in between.
            if (round % 3 == 2 && i == n / 2) flag[2] = round;
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);
        flag[0] = round;
        while (*confirmed < round) std::this_thread::yield();
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "the kernel saw %d values of an earlier round", found);
    CHECK(cudaFreeHost((void *)flag));
    CHECK(cudaFreeHost((void *)confirmed));
    CHECK(cudaFreeHost(data));
    CHECK(cudaFree(wrong));
    return pass("%d rounds", rounds);
}
