// A tensor map that the driver API encodes, and a kernel that loads tiles of a matrix through it, those over the edge filled with
// zeros.
#define PROGRAM "tensor_map"
#include "common.h"
#include <cuda.h>
#include <vector>

constexpr int WIDTH = 96, HEIGHT = 50, TILE_X = 32, TILE_Y = 8;

__global__ void load(const __grid_constant__ CUtensorMap map, float *out) {
#if __CUDA_ARCH__ >= 900
    __shared__ alignas(128) float tile[TILE_Y * TILE_X];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
        asm volatile("fence.mbarrier_init.release.cluster;");
        asm volatile("fence.proxy.async.shared::cta;");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"((unsigned)sizeof tile));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                     "l"(&map), "r"(blockIdx.x * TILE_X), "r"(blockIdx.y * TILE_Y), "r"(bar)
                     : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar)
                     : "memory");
    int block = blockIdx.y * gridDim.x + blockIdx.x;
    for (int i = threadIdx.x; i < TILE_Y * TILE_X; i += blockDim.x)
        out[block * TILE_Y * TILE_X + i] = tile[i];
#endif
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    std::vector<float> in(WIDTH * HEIGHT);
    for (size_t i = 0; i < in.size(); i++) in[i] = float(i) + 0.5f;
    float *matrix, *out;
    dim3 grid(WIDTH / TILE_X, (HEIGHT + TILE_Y - 1) / TILE_Y);
    std::vector<float> got(grid.x * grid.y * TILE_X * TILE_Y);
    CHECK(cudaMalloc(&matrix, in.size() * 4));
    CHECK(cudaMalloc(&out, got.size() * 4));
    CHECK(cudaMemcpy(matrix, in.data(), in.size() * 4, cudaMemcpyDefault));
    alignas(64) CUtensorMap map, other;
    cuuint64_t sizes[] = {WIDTH, HEIGHT}, strides[] = {WIDTH * 4};
    cuuint32_t box[] = {TILE_X, TILE_Y}, steps[] = {1, 1};
    auto encode = [&](CUtensorMap *to) {
        return cuTensorMapEncodeTiled(to, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, matrix, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = encode(&map);
    REQUIRE(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: %d", (int)result);
    box[0] = 1000;
    result = encode(&other);
    REQUIRE(result == CUDA_ERROR_INVALID_VALUE, "a box of 1000 elements: %d", (int)result);
    box[0] = TILE_X;
    // A map is made anywhere (cuda.core makes them inside of Python's objects): what is aligned is a kernel's parameter.
    alignas(64) unsigned char anywhere[256];
    for (int offset : {0, 8, 16, 100}) {
        result = encode((CUtensorMap *)(anywhere + offset));
        REQUIRE(result == CUDA_SUCCESS, "a map made %d bytes behind a multiple of 64: %d", offset, (int)result);
        REQUIRE(!memcmp(anywhere + offset, &map, sizeof map), "a map made %d bytes behind a multiple of 64 is another", offset);
    }
    // The same map at another address.
    other = map;
    result = cuTensorMapReplaceAddress(&other, out);
    REQUIRE(result == CUDA_SUCCESS, "cuTensorMapReplaceAddress: %d", (int)result);
    load<<<grid, 64>>>(map, out);
    CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDefault));
    for (unsigned by = 0; by < grid.y; by++)
        for (unsigned bx = 0; bx < grid.x; bx++)
            for (int y = 0; y < TILE_Y; y++)
                for (int x = 0; x < TILE_X; x++) {
                    int row = by * TILE_Y + y;
                    float want = row < HEIGHT ? in[row * WIDTH + bx * TILE_X + x] : 0;
                    float is = got[((by * grid.x + bx) * TILE_Y + y) * TILE_X + x];
                    REQUIRE(is == want, "tile %u,%u element %d,%d: %g instead of %g", bx, by, x, y, is, want);
                }
    return pass("%u tiles, those over the edge filled with zeros", grid.x * grid.y);
}
