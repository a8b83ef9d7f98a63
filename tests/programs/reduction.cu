// Sums and maxima over warps (shuffles), blocks (shared memory) and the grid (atomics), and a stream compaction by
// ballot.
#define PROGRAM "reduction"
#include "common.h"

#include <algorithm>
#include <cmath>
#include <vector>

constexpr unsigned ALL = 0xffffffffu;

__device__ unsigned warp_sum(unsigned value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(ALL, value, offset);
    return value;
}

__device__ float warp_sum_butterfly(float value) {
    for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(ALL, value, mask);
    return value;
}

__global__ void sum_and_max(const unsigned *data, int n, unsigned *sum, unsigned *maximum) {
    __shared__ unsigned partial[32];
    unsigned local = 0, largest = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        local += data[i];
        largest = max(largest, data[i]);
    }
    local = warp_sum(local);
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_down_sync(ALL, largest, offset));
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) {
        partial[warp] = local;
        atomicMax(maximum, largest);
    }
    __syncthreads();
    if (warp == 0) {
        local = lane < blockDim.x / 32 ? partial[lane] : 0;
        local = warp_sum(local);
        if (lane == 0) atomicAdd(sum, local);
    }
}

__global__ void sum_floats(const float *data, int n, float *sum) {
    float local = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) local += data[i];
    local = warp_sum_butterfly(local);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, local);
}

// Inclusive prefix sum in one warp's registers.
__global__ void warp_scan(const int *input, int *output) {
    int lane = threadIdx.x % 32;
    int value = input[blockIdx.x * blockDim.x + threadIdx.x];
    for (int offset = 1; offset < 32; offset *= 2) {
        int below = __shfl_up_sync(ALL, value, offset);
        if (lane >= offset) value += below;
    }
    output[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// Keeps the odd values; each warp takes its places with one atomic and a ballot.
__global__ void keep_odd(const unsigned *data, int n, unsigned *kept, unsigned *count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int lane = threadIdx.x % 32;
    unsigned value = i < n ? data[i] : 0;
    bool odd = value & 1;
    unsigned votes = __ballot_sync(ALL, odd);
    unsigned base = 0;
    if (lane == 0) base = atomicAdd(count, __popc(votes));
    base = __shfl_sync(ALL, base, 0);
    if (odd) kept[base + __popc(votes & ((1u << lane) - 1))] = value;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = options.full ? (1 << 24) + 13 : 30000 + 13;
    Random random(options.seed);
    std::vector<unsigned> data(n);
    std::vector<float> floats(n);
    unsigned want_sum = 0, want_max = 0;
    double want_float = 0;
    for (int i = 0; i < n; i++) {
        data[i] = (unsigned)random.next();
        floats[i] = random.unit() - 0.25f;
        want_sum += data[i];
        want_max = std::max(want_max, data[i]);
        want_float += floats[i];
    }

    unsigned *device_data, *device_kept, *device_results;
    float *device_floats;
    CHECK(cudaMalloc(&device_data, n * sizeof(unsigned)));
    CHECK(cudaMalloc(&device_kept, n * sizeof(unsigned)));
    CHECK(cudaMalloc(&device_floats, n * sizeof(float)));
    CHECK(cudaMalloc(&device_results, 4 * sizeof(unsigned)));
    CHECK(cudaMemcpy(device_data, data.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_floats, floats.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(device_results, 0, 4 * sizeof(unsigned)));

    const int threads = 128, blocks = options.full ? 512 : 12;
    sum_and_max<<<blocks, threads>>>(device_data, n, device_results, device_results + 1);
    LAUNCHED();
    sum_floats<<<blocks, threads>>>(device_floats, n, (float *)(device_results + 2));
    LAUNCHED();
    keep_odd<<<(n + threads - 1) / threads, threads>>>(device_data, n, device_kept, device_results + 3);
    LAUNCHED();
    unsigned results[4];
    CHECK(cudaMemcpy(results, device_results, sizeof results, cudaMemcpyDeviceToHost));

    REQUIRE(results[0] == want_sum, "the sum is %u, not %u", results[0], want_sum);
    REQUIRE(results[1] == want_max, "the maximum is %u, not %u", results[1], want_max);
    float got_float;
    memcpy(&got_float, &results[2], sizeof got_float);
    REQUIRE(std::fabs(got_float - want_float) <= 1e-5 * n, "the sum of floats is %g, not %g", got_float, want_float);

    std::vector<unsigned> want_kept;
    for (unsigned value : data)
        if (value & 1) want_kept.push_back(value);
    REQUIRE(results[3] == want_kept.size(), "%u values were kept, not %zu", results[3], want_kept.size());
    std::vector<unsigned> kept(results[3]);
    CHECK(cudaMemcpy(kept.data(), device_kept, kept.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
    std::sort(kept.begin(), kept.end());
    std::sort(want_kept.begin(), want_kept.end());
    REQUIRE(kept == want_kept, "the values kept are not the odd ones");

    const int scan_size = 256;
    CHECK(cudaMemcpy(device_data, data.data(), scan_size * sizeof(int), cudaMemcpyHostToDevice));
    warp_scan<<<2, 128>>>((const int *)device_data, (int *)device_kept);
    LAUNCHED();
    std::vector<int> scanned(scan_size);
    CHECK(cudaMemcpy(scanned.data(), device_kept, scan_size * sizeof(int), cudaMemcpyDeviceToHost));
    unsigned running = 0;
    for (int i = 0; i < scan_size; i++) {
        running = (i % 32 == 0 ? 0 : running) + data[i];
        REQUIRE((unsigned)scanned[i] == running, "prefix sum %d is %u, not %u", i, (unsigned)scanned[i], running);
    }

    CHECK(cudaFree(device_data));
    CHECK(cudaFree(device_kept));
    CHECK(cudaFree(device_floats));
    CHECK(cudaFree(device_results));
    return pass("%d values: sum, maximum, float sum, compaction, prefix sum", n);
}
