// The shapes of grids and blocks: every dimension up to its limit and one more, all coordinates seen once, and large grids.
#define PROGRAM "grids"
#include "cases.h"
#include <vector>

__global__ void mark(unsigned char *seen, unsigned *outside) {
    size_t block = ((size_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    size_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    if (threadIdx.x >= blockDim.x || threadIdx.y >= blockDim.y || threadIdx.z >= blockDim.z || blockIdx.x >= gridDim.x || blockIdx.y >= gridDim.y || blockIdx.z >= gridDim.z)
        atomicAdd(outside, 1);
    seen[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1;
}
__global__ void last(unsigned *out) {
    if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1 && blockIdx.z == gridDim.z - 1) *out = blockIdx.x + blockIdx.y + blockIdx.z;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    unsigned char *seen;
    unsigned *outside, count;
    const size_t room = 1 << 17;
    RETURNS(cudaSuccess, cudaMalloc(&seen, room));
    RETURNS(cudaSuccess, cudaMalloc(&outside, 4));
    struct { dim3 grid, block; } shapes[] = {
        {dim3(1), dim3(1)},           {dim3(7), dim3(1024)},         {dim3(3, 5), dim3(32, 4)},    {dim3(2, 3, 4), dim3(4, 8, 16)},
        {dim3(1, 1, 9), dim3(1, 1, 64)}, {dim3(2, 1, 1), dim3(1, 1024)}, {dim3(5, 5, 5), dim3(3, 3, 3)}, {dim3(1, 40, 2), dim3(33)},
        {dim3(100, 1, 3), dim3(16, 16)}};
    for (auto &shape : shapes) {
        size_t threads = (size_t)shape.grid.x * shape.grid.y * shape.grid.z * shape.block.x * shape.block.y * shape.block.z;
        REQUIRE(threads < room, "%zu threads", threads);
        RETURNS(cudaSuccess, cudaMemset(seen, 0, room));
        RETURNS(cudaSuccess, cudaMemset(outside, 0, 4));
        mark<<<shape.grid, shape.block>>>(seen, outside);
        std::vector<unsigned char> got(room);
        RETURNS(cudaSuccess, cudaMemcpy(got.data(), seen, room, cudaMemcpyDeviceToHost));
        size_t wrong = 0;
        for (size_t i = 0; i < room; i++) wrong += got[i] != (i < threads);
        IS(0, wrong);
        RETURNS(cudaSuccess, cudaMemcpy(&count, outside, 4, cudaMemcpyDeviceToHost));
        IS(0, count);
    }
    // At the limits: a block of many, a grid of 65535 in y and in z, and more than 65535 in x.
    unsigned x = options.full ? 3000000 : 70000;
    for (dim3 grid : {dim3(x), dim3(1, 65535), dim3(1, 1, 65535)}) {
        RETURNS(cudaSuccess, cudaMemset(outside, 0, 4));
        LAUNCH_LEAVES(cudaSuccess, last<<<grid, 1>>>(outside));
        RETURNS(cudaSuccess, cudaMemcpy(&count, outside, 4, cudaMemcpyDeviceToHost));
        IS(grid.x + grid.y + grid.z - 3, count);
    }
    for (dim3 grid : {dim3(1, 65536), dim3(1, 1, 65536), dim3(0), dim3(1, 0), dim3(1, 1, 0), dim3(0x80000000u)}) {
        LAUNCH_LEAVES(cudaErrorInvalidValue, last<<<grid, 1>>>(outside));
    }
    for (dim3 block : {dim3(1025), dim3(1, 1025), dim3(1, 1, 65), dim3(0), dim3(1, 0), dim3(32, 33), dim3(16, 16, 5)}) {
        LAUNCH_LEAVES(cudaErrorInvalidValue, last<<<1, block>>>(outside));
    }
    LAUNCH_LEAVES(cudaErrorInvalidValue, last<<<1, 1, 48 * 1024 + 4>>>(outside));
    LAUNCH_LEAVES(cudaSuccess, last<<<1, 1, 48 * 1024>>>(outside));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    return verdict();
}
