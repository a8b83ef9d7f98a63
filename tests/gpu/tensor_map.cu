// A tensor map encoded by the driver API, and a kernel that loads tiles of a matrix through it (Hopper and later).
//
//   nvcc -cudart shared -arch=native -o tensor_map tensor_map.cu -lcuda

#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>
#include <vector>

constexpr int WIDTH = 96, HEIGHT = 50, TILE_X = 32, TILE_Y = 8;

__global__ void load(const __grid_constant__ CUtensorMap map, float *out)
{
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
}

int main()
{
    std::vector<float> in(WIDTH * HEIGHT);
    for (size_t i = 0; i < in.size(); i++)
        in[i] = float(i) + 0.5f;
    float *matrix, *out;
    dim3 grid(WIDTH / TILE_X, (HEIGHT + TILE_Y - 1) / TILE_Y);
    std::vector<float> got(grid.x * grid.y * TILE_X * TILE_Y);
    if (cudaMalloc(&matrix, in.size() * 4) || cudaMalloc(&out, got.size() * 4) || cudaMemcpy(matrix, in.data(), in.size() * 4, cudaMemcpyDefault))
        return printf("FAIL allocation\n"), 1;
    alignas(64) CUtensorMap map, other;
    cuuint64_t sizes[] = {WIDTH, HEIGHT}, strides[] = {WIDTH * 4};
    cuuint32_t box[] = {TILE_X, TILE_Y}, steps[] = {1, 1};
    CUresult result = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, matrix, sizes, strides, box, steps,
                                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result)
        return printf("FAIL cuTensorMapEncodeTiled: %d\n", result), 1;
    box[0] = 1000;
    CUresult refused = cuTensorMapEncodeTiled(&other, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, matrix, sizes, strides, box, steps,
                                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (refused != CUDA_ERROR_INVALID_VALUE)
        return printf("FAIL a box of 1000 elements: %d\n", refused), 1;
    load<<<grid, 64>>>(map, out);
    cudaError_t error = cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDefault);
    if (error)
        return printf("FAIL the kernel: %s\n", cudaGetErrorName(error)), 1;
    for (unsigned by = 0; by < grid.y; by++)
        for (unsigned bx = 0; bx < grid.x; bx++)
            for (int y = 0; y < TILE_Y; y++)
                for (int x = 0; x < TILE_X; x++) {
                    int row = by * TILE_Y + y;
                    float want = row < HEIGHT ? in[row * WIDTH + bx * TILE_X + x] : 0;
                    float is = got[((by * grid.x + bx) * TILE_Y + y) * TILE_X + x];
                    if (is != want)
                        return printf("FAIL tile %u,%u element %d,%d: %g instead of %g\n", bx, by, x, y, is, want), 1;
                }
    printf("PASS tensor_map %u tiles, those over the edge filled with zeros\n", grid.x * grid.y);
    return 0;
}
