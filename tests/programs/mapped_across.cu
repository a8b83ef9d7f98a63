// Pinned memory that a running kernel reads: the program stores values that lie in two pages, in both directions, over pages that it has touched before and others. The pages are of one allocation, and then of an array of which each half was registered. What the program and the kernel tell each other is in memory of the same kind.
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

// Page-locked memory of zeros: an allocation, or memory that was registered in equal pieces.
struct Locked {
    int size, pieces;
    unsigned char *at;

    Locked(int size, int pieces) : size(size), pieces(pieces) {
        if (pieces) at = (unsigned char *)aligned_alloc(PAGE_SIZE, size);
        else CHECK(cudaHostAlloc((void **)&at, size, cudaHostAllocMapped));
        memset(at, 0, size);
        for (int n = 0; n < pieces; n++) CHECK(cudaHostRegister(at + n * (size / pieces), size / pieces, cudaHostRegisterMapped));
    }
    ~Locked() {
        for (int n = 0; n < pieces; n++) CHECK(cudaHostUnregister(at + n * (size / pieces)));
        if (pieces) free(at);
        else CHECK(cudaFreeHost(at));
    }
};

static const int ROUNDS = 6;

static void store_all(bool registered) {
    Locked flags(PAGE_SIZE, registered ? 1 : 0), answers(PAGE_SIZE, registered ? 1 : 0), memory(2 * HALF, registered ? 2 : 0);
    volatile int *flag = (int *)flags.at, *confirmed = (int *)answers.at;
    unsigned char *data = memory.at;
    int *wrong, found = -1;
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
    CHECK(cudaFree(wrong));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    for (bool registered : {false, true}) store_all(registered);
    return pass("%d rounds each", ROUNDS);
}
