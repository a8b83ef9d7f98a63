// Every integer atomic, float addition, compare-and-swap loops, 64-bit ones; in global and in shared memory; votes.
#define PROGRAM "atomics"
#include "common.h"

#include <algorithm>
#include <vector>

struct Results {
    unsigned add, sub, smallest, largest, all_bits, any_bits, parity, wrapped_up, wrapped_down, swapped;
    int smallest_signed, largest_signed;
    unsigned long long wide_add, wide_max, wide_cas;
    float float_add;
    double double_add;
};

__device__ void double_add_by_cas(double *target, double value) {
    unsigned long long *bits = (unsigned long long *)target, seen = *bits, expected;
    do {
        expected = seen;
        seen = atomicCAS(bits, expected, __double_as_longlong(__longlong_as_double(expected) + value));
    } while (seen != expected);
}

__global__ void everything(const unsigned *data, int n, Results *results) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned x = data[i];
    atomicAdd(&results->add, x);
    atomicSub(&results->sub, x);
    atomicMin(&results->smallest, x);
    atomicMax(&results->largest, x);
    atomicMin(&results->smallest_signed, (int)x);
    atomicMax(&results->largest_signed, (int)x);
    atomicAnd(&results->all_bits, x | 0xff00u);
    atomicOr(&results->any_bits, x & 0x0ff0u);
    atomicXor(&results->parity, x);
    atomicInc(&results->wrapped_up, 99);
    atomicDec(&results->wrapped_down, 99);
    if (i == 0) atomicExch(&results->swapped, x);
    atomicAdd(&results->wide_add, (unsigned long long)x << 8);
    atomicMax(&results->wide_max, (unsigned long long)x << 20);
    atomicCAS(&results->wide_cas, 0ull, 0x123456789abcull);
    atomicAdd(&results->float_add, 0.25f);
    double_add_by_cas(&results->double_add, 0.5);
}

__global__ void histogram(const unsigned *data, int n, unsigned *bins) {
    __shared__ unsigned local[64];
    if (threadIdx.x < 64) local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[data[i] % 64], 1);
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

// Each thread takes a ticket; the tickets must be all different.
__global__ void tickets(unsigned *next, unsigned *taken) { taken[atomicAdd(next, 1u)] += 1 + blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void votes(int *results) {
    unsigned all = 0xffffffffu;
    int lane = threadIdx.x;
    int any = __any_sync(all, lane == 31), every = __all_sync(all, lane < 32), not_every = __all_sync(all, lane < 31);
    unsigned even = __ballot_sync(all, lane % 2 == 0);
    if (lane == 0) {
        results[0] = any != 0;
        results[1] = every != 0;
        results[2] = not_every != 0;
        results[3] = (int)even;
        results[4] = __popc(even) * 100 + __clz(even >> 1) * 10 + __ffs(even << 1);
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const int n = options.full ? 1000003 : 3001;
    std::vector<unsigned> data(n);
    random.fill(data.data(), n * sizeof(unsigned));
    Results want = {}, got;
    want.smallest = want.all_bits = ~0u;
    want.smallest_signed = 2147483647;
    want.largest_signed = -2147483647 - 1;
    Results initial = want;
    for (unsigned x : data) {
        want.add += x;
        want.sub -= x;
        want.smallest = std::min(want.smallest, x);
        want.largest = std::max(want.largest, x);
        want.smallest_signed = std::min(want.smallest_signed, (int)x);
        want.largest_signed = std::max(want.largest_signed, (int)x);
        want.all_bits &= x | 0xff00u;
        want.any_bits |= x & 0x0ff0u;
        want.parity ^= x;
        want.wrapped_up = want.wrapped_up >= 99 ? 0 : want.wrapped_up + 1;
        want.wrapped_down = want.wrapped_down == 0 || want.wrapped_down > 99 ? 99 : want.wrapped_down - 1;
        want.wide_add += (unsigned long long)x << 8;
        want.wide_max = std::max(want.wide_max, (unsigned long long)x << 20);
    }
    want.swapped = data[0];
    want.wide_cas = 0x123456789abcull;
    want.float_add = 0.25f * n;
    want.double_add = 0.5 * n;

    unsigned *device, *bins, *taken;
    Results *results;
    CHECK(cudaMalloc(&device, n * sizeof(unsigned)));
    CHECK(cudaMalloc(&bins, 64 * sizeof(unsigned)));
    CHECK(cudaMalloc(&taken, 1025 * sizeof(unsigned)));
    CHECK(cudaMalloc(&results, sizeof(Results)));
    CHECK(cudaMemcpy(device, data.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(results, &initial, sizeof initial, cudaMemcpyHostToDevice));
    everything<<<(n + 127) / 128, 128>>>(device, n, results);
    LAUNCHED();
    CHECK(cudaMemcpy(&got, results, sizeof got, cudaMemcpyDeviceToHost));
#define SAME(field) REQUIRE(got.field == want.field, #field " is %.17g, not %.17g", (double)got.field, (double)want.field)
    SAME(add);
    SAME(sub);
    SAME(smallest);
    SAME(largest);
    SAME(smallest_signed);
    SAME(largest_signed);
    SAME(all_bits);
    SAME(any_bits);
    SAME(parity);
    SAME(wrapped_up);
    SAME(wrapped_down);
    SAME(swapped);
    SAME(wide_add);
    SAME(wide_max);
    SAME(wide_cas);
    SAME(float_add);
    SAME(double_add);

    std::vector<unsigned> want_bins(64), got_bins(64);
    for (unsigned x : data) want_bins[x % 64]++;
    CHECK(cudaMemset(bins, 0, 64 * sizeof(unsigned)));
    histogram<<<5, 96>>>(device, n, bins);
    LAUNCHED();
    CHECK(cudaMemcpy(got_bins.data(), bins, 64 * sizeof(unsigned), cudaMemcpyDeviceToHost));
    REQUIRE(got_bins == want_bins, "the histogram is wrong");

    CHECK(cudaMemset(taken, 0, 1025 * sizeof(unsigned)));
    tickets<<<8, 128>>>(taken + 1024, taken);
    LAUNCHED();
    std::vector<unsigned> order(1024);
    CHECK(cudaMemcpy(order.data(), taken, 1024 * sizeof(unsigned), cudaMemcpyDeviceToHost));
    std::sort(order.begin(), order.end());
    for (unsigned i = 0; i < 1024; i++) REQUIRE(order[i] == i + 1, "ticket %u was given twice or never", i);

    int vote[5];
    CHECK(cudaMemset(taken, 0xff, sizeof vote));
    votes<<<1, 32>>>((int *)taken);
    LAUNCHED();
    CHECK(cudaMemcpy(vote, taken, sizeof vote, cudaMemcpyDeviceToHost));
    REQUIRE(vote[0] == 1 && vote[1] == 1 && vote[2] == 0, "votes: any %d, all %d, not all %d", vote[0], vote[1], vote[2]);
    REQUIRE(vote[3] == 0x55555555 && vote[4] == 1600 + 20 + 2, "ballot %08x, counts %d", (unsigned)vote[3], vote[4]);

    CHECK(cudaFree(device));
    CHECK(cudaFree(bins));
    CHECK(cudaFree(taken));
    CHECK(cudaFree(results));
    return pass("17 atomics over %d values, histogram, tickets, votes", n);
}
