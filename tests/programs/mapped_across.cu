// Pinned memory that a running kernel reads: the program stores values that lie in two pages, in both directions, over pages that it has touched before and others. The pages are of one allocation, and then of an array of which each half was registered.
#define PROGRAM "mapped_across"
#include "common.h"

#include <emmintrin.h>

#include <thread>

static const int PAGE_SIZE = 4096, PAGES = 64, HALF = PAGES / 2 * PAGE_SIZE, BYTES = 16;

__host__ __device__ unsigned char expected(int round, int boundary, int i) { return (unsigned char)(round * 31 + boundary * 7 + i); }

// Where the value lies that goes across the end of a page: from one to fifteen bytes before that end.
__host__ __device__ int place(int round, int boundary) { return boundary * PAGE_SIZE - (1 + (round + boundary) % (BYTES - 1)); }

__device__ unsigned char at(const volatile unsigned char *data, const volatile unsigned char *half, int n) { return n < HALF ? data[n] : half[n - HALF]; }

// Waits for each round's flag, checks all values and confirms the round. It gets the address of each half, so that both are memory that kernels use.
__global__ void check(const volatile int *flag, const volatile unsigned char *data, const volatile unsigned char *half, int rounds, volatile int *confirmed, int *wrong) {
    for (int round = 1; round <= rounds; round++) {
        if (threadIdx.x == 0) {
            while (*flag < round) {
            }
            __threadfence_system();
        }
        __syncthreads();
        for (int boundary = 1 + threadIdx.x; boundary < PAGES; boundary += blockDim.x)
            for (int i = 0; i < BYTES; i++)
                if (at(data, half, place(round, boundary) + i) != expected(round, boundary, i)) atomicAdd(wrong, 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            *confirmed = round;
        }
    }
}

static const int ROUNDS = 6;

static void store_all(unsigned char *data) {
    volatile int *flag, *confirmed;
    int *wrong, found = -1;
    CHECK(cudaHostAlloc((void **)&flag, PAGE_SIZE, cudaHostAllocMapped));
    CHECK(cudaHostAlloc((void **)&confirmed, PAGE_SIZE, cudaHostAllocMapped));
    *flag = *confirmed = 0;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    check<<<1, 32>>>((const int *)flag, data, data + HALF, ROUNDS, (int *)confirmed, wrong);
    CHECK(cudaGetLastError());
    for (int round = 1; round <= ROUNDS; round++) {
        for (int n = 1; n < PAGES; n++) {
            int boundary = round % 2 ? n : PAGES - n;
            unsigned char value[BYTES];
            for (int i = 0; i < BYTES; i++) value[i] = expected(round, boundary, i);
            unsigned char *to = data + place(round, boundary);
            // In every third round the second page is written to first, and in every third one both are read.
            if (round % 3 == 1) ((volatile unsigned char *)data)[boundary * PAGE_SIZE + 100] = (unsigned char)round;
            if (round % 3 == 2) REQUIRE(((volatile unsigned char *)to)[0] + ((volatile unsigned char *)to)[BYTES - 1] >= 0, "no sum");
            // One instruction, which needs both pages at the same time.
            _mm_storeu_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)value));
        }
        *flag = round;
        while (*confirmed < round) std::this_thread::yield();
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "the kernel saw %d wrong bytes", found);
    CHECK(cudaFreeHost((void *)flag));
    CHECK(cudaFreeHost((void *)confirmed));
    CHECK(cudaFree(wrong));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    unsigned char *data;
    CHECK(cudaHostAlloc((void **)&data, 2 * HALF, cudaHostAllocMapped));
    store_all(data);
    CHECK(cudaFreeHost(data));
    data = (unsigned char *)aligned_alloc(PAGE_SIZE, 2 * HALF);
    memset(data, 0, 2 * HALF);
    for (unsigned char *half : {data, data + HALF}) CHECK(cudaHostRegister(half, HALF, cudaHostRegisterMapped));
    store_all(data);
    for (unsigned char *half : {data, data + HALF}) CHECK(cudaHostUnregister(half));
    free(data);
    return pass("%d rounds", 2 * ROUNDS);
}
