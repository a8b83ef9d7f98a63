// libcu++ in kernels: atomics of every scope and order, barriers that are split in two, semaphores, and pipelines that
// load while they work.
#define PROGRAM "sync_primitives"
#include "common.h"
#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/semaphore>
#include <vector>

__device__ cuda::atomic<int, cuda::thread_scope_device> total;
__device__ cuda::atomic<unsigned long long, cuda::thread_scope_system> most;

__global__ void atomics(int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    total.fetch_add(i, cuda::std::memory_order_relaxed);
    most.fetch_max((unsigned long long)i * 3, cuda::std::memory_order_relaxed);
    __shared__ cuda::atomic<int, cuda::thread_scope_block> turn;
    if (threadIdx.x == 0) turn = 0;
    __syncthreads();
    // Warps pass a token in order.
    int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        while (turn.load(cuda::std::memory_order_acquire) != warp) {}
        out[blockIdx.x * 8 + warp] = warp == 0 ? 1 : out[blockIdx.x * 8 + warp - 1] * 2 + 1;
        turn.store(warp + 1, cuda::std::memory_order_release);
    }
    cuda::atomic_ref<int, cuda::thread_scope_device> cell(out[1000]);
    int seen = cell.load();
    while (!cell.compare_exchange_weak(seen, seen + 2)) {}
}

__global__ void barriers(const int *in, int *out, int rounds) {
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    __shared__ int values[128];
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    int mine = in[threadIdx.x];
    for (int round = 0; round < rounds; round++) {
        values[threadIdx.x] = mine;
        auto token = barrier.arrive();
        // Something else between arriving and waiting.
        mine = mine * 2 + round;
        barrier.wait(std::move(token));
        mine += values[(threadIdx.x + 1) % blockDim.x];
        barrier.arrive_and_wait();
    }
    out[threadIdx.x] = mine;
}

__global__ void semaphores(int *inside, int *worst) {
    __shared__ cuda::counting_semaphore<cuda::thread_scope_block, 2> room;
    if (threadIdx.x == 0) new (&room) cuda::counting_semaphore<cuda::thread_scope_block, 2>(2);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < 5; i++) {
            room.acquire();
            int now = atomicAdd(inside, 1) + 1;
            atomicMax(worst, now);
            atomicAdd(worst + 1, 1);
            atomicSub(inside, 1);
            room.release();
        }
    }
}

constexpr int STAGES = 2, TILE = 64;

__global__ void pipelined(const int *in, int *out, int tiles) {
    __shared__ alignas(16) int buffer[STAGES][TILE];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES> state;
    auto block = cooperative_groups::this_thread_block();
    auto pipeline = cuda::make_pipeline(block, &state);
    int fetched = 0, sum = 0;
    for (int tile = 0; tile < tiles; tile++) {
        for (; fetched < tiles && fetched < tile + STAGES; fetched++) {
            pipeline.producer_acquire();
            cuda::memcpy_async(block, buffer[fetched % STAGES], in + fetched * TILE, sizeof(int) * TILE, pipeline);
            pipeline.producer_commit();
        }
        pipeline.consumer_wait();
        sum += buffer[tile % STAGES][(threadIdx.x * 7 + tile) % TILE];
        pipeline.consumer_release();
    }
    out[threadIdx.x] = sum;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int blocks = 6, threads = 256, tiles = 20;
    Random random(options.seed);
    std::vector<int> host(tiles * TILE), got(1001);
    for (int &value : host) value = (int)random.below(1000);
    int *in, *out;
    CHECK(cudaMalloc(&in, host.size() * 4));
    CHECK(cudaMalloc(&out, got.size() * 4));
    CHECK(cudaMemcpy(in, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(out, 0, got.size() * 4));
    atomics<<<blocks, threads>>>(out);
    CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
    int n = blocks * threads, sum = 0;
    unsigned long long greatest = 0;
    CHECK(cudaMemcpyFromSymbol(&sum, total, 4));
    CHECK(cudaMemcpyFromSymbol(&greatest, most, 8));
    REQUIRE(sum == n * (n - 1) / 2 && greatest == (n - 1) * 3ull, "the sum is %d, the greatest %llu", sum, greatest);
    REQUIRE(got[1000] == n * 2, "by exchanges: %d", got[1000]);
    for (int i = 0; i < blocks * 8; i++) REQUIRE(got[i] == (2 << i % 8) - 1, "the token of warp %d is %d", i, got[i]);

    const int rounds = 6;
    barriers<<<1, 128>>>(in, out, rounds);
    CHECK(cudaMemcpy(got.data(), out, 128 * 4, cudaMemcpyDeviceToHost));
    std::vector<int> values(host.begin(), host.begin() + 128);
    for (int round = 0; round < rounds; round++) {
        std::vector<int> before = values;
        for (int i = 0; i < 128; i++) values[i] = before[i] * 2 + round + before[(i + 1) % 128];
    }
    for (int i = 0; i < 128; i++) REQUIRE(got[i] == values[i], "behind the barriers thread %d has %d, not %d", i, got[i], values[i]);

    CHECK(cudaMemset(out, 0, 12));
    semaphores<<<1, 256>>>(out, out + 1);
    CHECK(cudaMemcpy(got.data(), out, 12, cudaMemcpyDeviceToHost));
    REQUIRE(got[0] == 0 && got[1] >= 1 && got[1] <= 2 && got[2] == 40, "a room for two: %d left, %d at once, %d visits", got[0], got[1], got[2]);

    pipelined<<<1, TILE>>>(in, out, tiles);
    CHECK(cudaMemcpy(got.data(), out, TILE * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < TILE; i++) {
        int want = 0;
        for (int tile = 0; tile < tiles; tile++) want += host[tile * TILE + (i * 7 + tile) % TILE];
        REQUIRE(got[i] == want, "the pipeline gave thread %d %d, not %d", i, got[i], want);
    }
    return pass("atomics, barriers, a semaphore, a pipeline of %d tiles", tiles);
}
