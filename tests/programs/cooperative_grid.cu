// Cooperative launches: all blocks of a grid wait for each other, many times over; and the codes for grids that cannot.
#define PROGRAM "cooperative_grid"
#include "cases.h"
#include <cooperative_groups.h>
#include <vector>

namespace cg = cooperative_groups;

// Prefix sums by doubling: each round reads what every other block wrote in the round before.
__global__ void prefix(unsigned *from, unsigned *to, int n) {
    cg::grid_group grid = cg::this_grid();
    for (int step = 1; step < n; step *= 2) {
        for (int i = grid.thread_rank(); i < n; i += grid.size()) to[i] = from[i] + (i >= step ? from[i - step] : 0);
        grid.sync();
        unsigned *swap = from;
        from = to, to = swap;
    }
}
__global__ void ranks(unsigned long long *out) {
    cg::grid_group grid = cg::this_grid();
    out[grid.thread_rank()] = grid.is_valid() * 1000000ull + grid.block_rank() * 1000 + grid.num_blocks();
}
__global__ void ordinary() {}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    int can = 0;
    RETURNS(cudaSuccess, cudaDeviceGetAttribute(&can, cudaDevAttrCooperativeLaunch, 0));
    IS(1, can);
    const int n = options.full ? 1 << 20 : 3000;
    std::vector<unsigned> host(n), want(n);
    Random random(options.seed);
    unsigned sum = 0;
    for (int i = 0; i < n; i++) {
        host[i] = random.below(1000);
        want[i] = sum += host[i];
    }
    unsigned *a, *b;
    RETURNS(cudaSuccess, cudaMalloc(&a, n * 4));
    RETURNS(cudaSuccess, cudaMalloc(&b, n * 4));
    int blocks = 0;
    RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, prefix, 128, 0));
    TRUE_THAT(blocks >= 1);
    int rounds = 0;
    for (int step = 1; step < n; step *= 2) rounds++;
    void *arguments[] = {&a, &b, (void *)&n};
    for (int grid : {1, 2, 7, 8}) {
        RETURNS(cudaSuccess, cudaMemcpy(a, host.data(), n * 4, cudaMemcpyHostToDevice));
        RETURNS(cudaSuccess, cudaLaunchCooperativeKernel((const void *)prefix, dim3(grid), dim3(128), arguments, 0, 0));
        std::vector<unsigned> got(n);
        RETURNS(cudaSuccess, cudaMemcpy(got.data(), rounds % 2 ? b : a, n * 4, cudaMemcpyDeviceToHost));
        TRUE_THAT(got == want);
    }
    unsigned long long *ranked, got[6 * 32];
    RETURNS(cudaSuccess, cudaMalloc(&ranked, sizeof got));
    void *one[] = {&ranked};
    RETURNS(cudaSuccess, cudaLaunchCooperativeKernel((const void *)ranks, dim3(3, 2), dim3(8, 4), one, 0, 0));
    RETURNS(cudaSuccess, cudaMemcpy(got, ranked, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 6 * 32; i++)
        if (got[i] != 1000000ull + i / 32 * 1000 + 6) fail("thread %d says %llu", i, got[i]);

    // More blocks than are on the device at once; too large for any launch; not cooperative by nature, which is no matter.
    int processors = 0;
    RETURNS(cudaSuccess, cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    RETURNS(cudaErrorCooperativeLaunchTooLarge, cudaLaunchCooperativeKernel((const void *)prefix, dim3(processors * 64 + 1), dim3(128), arguments, 0, 0));
    RETURNS(cudaErrorInvalidValue, cudaLaunchCooperativeKernel((const void *)prefix, dim3(1), dim3(1025), arguments, 0, 0));
    RETURNS(cudaSuccess, cudaLaunchCooperativeKernel((const void *)ordinary, dim3(2), dim3(32), nullptr, 0, 0));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    return verdict();
}
