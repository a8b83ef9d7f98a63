// Eight host threads on one context: own streams, own buffers, shared counters, and last errors that are each
// thread's own. Compiled a second time with --default-stream per-thread.
#ifndef PROGRAM
#define PROGRAM "threads"
#endif
#include "common.h"

#include <atomic>
#include <thread>
#include <vector>

constexpr int THREADS = 8;

__global__ void advance(unsigned *data, int n, unsigned factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * factor + 1;
}

__global__ void count(unsigned *counter) {
    if (threadIdx.x % 32 == 0) atomicAdd(counter, 1);
}

static unsigned *shared_counter;
static std::atomic<int> ready{0};

static void work(int index, uint64_t seed, int n, int rounds, bool own_stream) {
    Random random(seed + index);
    CHECK(cudaSetDevice(0));
    ready++;
    while (ready < THREADS) std::this_thread::yield();

    cudaStream_t stream = 0;
    if (own_stream) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<unsigned> input(n), output(n);
    for (int round = 0; round < rounds; round++) {
        random.fill(input.data(), n * sizeof(unsigned));
        unsigned *device;
        CHECK(cudaMalloc(&device, n * sizeof(unsigned)));
        CHECK(cudaMemcpyAsync(device, input.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice, stream));
        const int launches = 5;
        for (int i = 0; i < launches; i++) {
            advance<<<(n + 127) / 128, 128, 0, stream>>>(device, n, 2 * index + 3);
            LAUNCHED();
            count<<<1, 64, 0, stream>>>(shared_counter);
            LAUNCHED();
        }
        if (index % 2 == 0) {
            // This thread's mistake must not become another thread's last error.
            void *never;
            cudaError_t status = cudaMalloc(&never, (size_t)1 << 60);
            REQUIRE(status == cudaErrorMemoryAllocation, "thread %d: 2^60 bytes were not refused: %s", index,
                    cudaGetErrorName(status));
            std::this_thread::yield();
            REQUIRE(cudaPeekAtLastError() == cudaErrorMemoryAllocation, "thread %d lost its last error", index);
            REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation, "thread %d lost its last error", index);
        }
        REQUIRE(cudaGetLastError() == cudaSuccess, "thread %d sees another's error", index);
        CHECK(cudaMemcpyAsync(output.data(), device, n * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < n; i++) {
            unsigned want = input[i];
            for (int launch = 0; launch < launches; launch++) want = want * (2 * index + 3) + 1;
            REQUIRE(output[i] == want, "thread %d: element %d is %u, not %u", index, i, output[i], want);
        }
        CHECK(cudaFree(device));
    }
    if (own_stream) CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = options.full ? 1 << 20 : 700, rounds = options.full ? 20 : 3;
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    const bool own_stream = false;
#else
    const bool own_stream = true;
#endif
    CHECK(cudaMalloc(&shared_counter, sizeof(unsigned)));
    CHECK(cudaMemset(shared_counter, 0, sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++) threads.emplace_back(work, i, options.seed, n, rounds, own_stream);
    for (std::thread &thread : threads) thread.join();
    unsigned counted;
    CHECK(cudaMemcpy(&counted, shared_counter, sizeof counted, cudaMemcpyDeviceToHost));
    REQUIRE(counted == (unsigned)(THREADS * rounds * 5 * 2), "%u warps were counted, not %d", counted, THREADS * rounds * 10);
    CHECK(cudaFree(shared_counter));
    return pass("%d threads, %d rounds", THREADS, rounds);
}
