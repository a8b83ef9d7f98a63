// How many blocks of a kernel fit on a multiprocessor, what block size fills it, and what dynamic shared memory is left: the
// figures are printed, so that those of a remote GPU can be compared with the same GPU's natively.
#define PROGRAM "occupancy"
#include "cases.h"

__global__ void plain(float *p) { p[threadIdx.x] += 1; }
__global__ void __launch_bounds__(128, 2) bounded(float *p) { p[threadIdx.x] *= 2; }
__global__ void shared(float *p) {
    __shared__ float tile[2048];
    tile[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = tile[threadIdx.x ^ 1];
}
__global__ void dynamic(float *p) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = tile[threadIdx.x ^ 1];
}

template <class Kernel> static void of(const char *name, Kernel kernel) {
    printf("%s:", name);
    for (int block : {1, 32, 33, 64, 128, 256, 512, 1000, 1024}) {
        int blocks = -1, flagged = -1;
        RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, block, 0));
        RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&flagged, kernel, block, 0, cudaOccupancyDisableCachingOverride));
        TRUE_THAT(blocks >= 0 && blocks <= 64 && flagged == blocks);
        printf(" %d", blocks);
    }
    int grid = 0, block = 0;
    RETURNS(cudaSuccess, cudaOccupancyMaxPotentialBlockSize(&grid, &block, kernel));
    TRUE_THAT(grid > 0 && block > 0 && block % 32 == 0);
    printf("; %d blocks of %d", grid, block);
    RETURNS(cudaSuccess, cudaOccupancyMaxPotentialBlockSize(&grid, &block, kernel, 0, 96));
    TRUE_THAT(block <= 96);
    printf(", %d of %d\n", grid, block);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    of("plain", plain);
    of("bounded", bounded);
    of("shared", shared);
    of("dynamic", dynamic);

    // More shared memory for each block, fewer blocks.
    int before = 1 << 20;
    printf("dynamic shared memory:");
    for (size_t bytes = 0; bytes <= 48 << 10; bytes += 4 << 10) {
        int blocks = -1;
        RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dynamic, 64, bytes));
        TRUE_THAT(blocks >= 1 && blocks <= before);
        before = blocks;
        printf(" %d", blocks);
    }
    printf("\navailable:");
    for (int blocks : {1, 2, 4, 8}) {
        size_t bytes = 0;
        RETURNS(cudaSuccess, cudaOccupancyAvailableDynamicSMemPerBlock(&bytes, dynamic, blocks, 64));
        TRUE_THAT(bytes > 0);
        printf(" %zu", bytes);
    }
    int grid = 0, block = 0;
    auto bytes_of = [](int threads) { return (size_t)threads * 16; };
    RETURNS(cudaSuccess, cudaOccupancyMaxPotentialBlockSizeVariableSMem(&grid, &block, dynamic, bytes_of));
    TRUE_THAT(grid > 0 && block > 0);
    printf("\nwith 16 bytes a thread: %d blocks of %d\n", grid, block);

    int blocks;
    RETURNS(cudaErrorInvalidValue, cudaOccupancyMaxActiveBlocksPerMultiprocessor((int *)nullptr, plain, 64, 0));
    RETURNS(cudaErrorInvalidValue, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, plain, 0, 0));
    RETURNS(cudaErrorInvalidValue, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, plain, -1, 0));
    RETURNS(cudaErrorInvalidDeviceFunction, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (void (*)(float *))nullptr, 64, 0));
    RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, plain, 1025, 0));
    IS(0, blocks);
    RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dynamic, 64, 1 << 20));
    IS(0, blocks);
    return verdict();
}
