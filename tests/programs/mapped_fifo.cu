// How a communication library's network thread and a kernel pass data through pinned memory: rings of slots in
// which one side writes a chunk and then a counter, for which the other side waits. The bytes are checked.
//
// Its argument is the direction, the bytes of a chunk and the number of chunks: `both-131072-12`, `out-…` (from the kernel), `in-…`.
#define PROGRAM "mapped_fifo"
#include "common.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

// Slots of each ring.
static const int SLOTS = 4;

// What one direction's sides share.
struct Ring {
    volatile unsigned *tail, *head;  // Chunks written, and chunks read, each in a page of its own.
    volatile int *size;              // Bytes of each slot's chunk, in the tail's page. The kernel sets it, and the program takes it away.
    unsigned long long *slots;
};

__host__ __device__ unsigned long long expected(unsigned step, int i, int salt) {
    return (step * 0x9e3779b97f4a7c15ull) ^ (i * 0xc2b2ae3d27d4eb4full) ^ salt;
}

// Sends `steps` chunks and receives as many, in turns.
__global__ void turns(Ring out, Ring in, int words, unsigned steps, bool sends, bool receives, unsigned *wrong) {
    for (unsigned step = 1; step <= steps; step++) {
        int slot = (step - 1) % SLOTS;
        if (sends) {
            if (threadIdx.x == 0) {
                while (*out.head + SLOTS < step) {
                }
            }
            __syncthreads();
            volatile unsigned long long *to = out.slots + (size_t)slot * words;
            for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = expected(step, i, 1);
            __threadfence_system();
            __syncthreads();
            if (threadIdx.x == 0) {
                out.size[slot] = words * 8;
                __threadfence_system();
                *out.tail = step;
            }
        }
        if (receives) {
            if (threadIdx.x == 0) {
                while (*in.tail < step) {
                }
                __threadfence_system();
            }
            __syncthreads();
            const volatile unsigned long long *from = in.slots + (size_t)slot * words;
            for (int i = threadIdx.x; i < words; i += blockDim.x)
                if (from[i] != expected(step, i, 2)) atomicAdd(wrong, 1);
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence_system();
                *in.head = step;
            }
        }
    }
}

// All of a ring is one allocation, as in NCCL.
static Ring make(size_t bytes) {
    char *memory;
    CHECK(cudaHostAlloc(&memory, 8192 + SLOTS * bytes, cudaHostAllocMapped));
    memset(memory, 0, 8192);
    return Ring{(volatile unsigned *)memory, (volatile unsigned *)(memory + 4096), (volatile int *)(memory + 64), (unsigned long long *)(memory + 8192)};
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    char way[8] = "both";
    int bytes = 128 << 10;
    unsigned steps = 12;
    if (!options.word.empty() && sscanf(options.word.c_str(), "%7[a-z]-%d-%u", way, &bytes, &steps) != 3) fail("needs an argument like both-131072-12");
    bool sends = strcmp(way, "in") != 0, receives = strcmp(way, "out") != 0;
    int words = bytes / 8;
    Ring out = make(bytes), in = make(bytes);
    unsigned *wrong, found = ~0u;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    turns<<<1, 32>>>(out, in, words, steps, sends, receives, wrong);
    CHECK(cudaGetLastError());
    auto begun = std::chrono::steady_clock::now();
    unsigned bad = 0;
    std::vector<unsigned long long> sent(words), received(words);
    for (unsigned step = 1; step <= steps; step++) {
        int slot = (step - 1) % SLOTS;
        if (sends) {
            while (*out.tail < step) std::this_thread::yield();
            std::atomic_thread_fence(std::memory_order_seq_cst);
            if (out.size[slot] != words * 8) bad++;
            memcpy(received.data(), out.slots + (size_t)slot * words, words * 8);
            for (int i = 0; i < words; i++) bad += received[i] != expected(step, i, 1);
            out.size[slot] = -1;
            std::atomic_thread_fence(std::memory_order_seq_cst);
            *out.head = step;
        }
        if (receives) {
            for (int i = 0; i < words; i++) sent[i] = expected(step, i, 2);
            while (*in.head + SLOTS < step) std::this_thread::yield();
            memcpy(in.slots + (size_t)slot * words, sent.data(), words * 8);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            *in.tail = step;
        }
    }
    CHECK(cudaDeviceSynchronize());
    double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "the kernel saw %u old words", found);
    REQUIRE(bad == 0, "the program saw %u old words", bad);
    CHECK(cudaFreeHost((void *)out.tail));
    CHECK(cudaFreeHost((void *)in.tail));
    CHECK(cudaFree(wrong));
    return pass("%u steps of %d bytes, %.2f ms each", steps, bytes, ms / steps);
}
