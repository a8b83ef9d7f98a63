// Levels made on the device: each by a kernel that reads the level above it through a texture and writes its own through a surface.
#define PROGRAM "mipmap_surfaces"
#include "cases.h"
#include <utility>
#include <vector>

const int SIDE = 64, LEVELS = 7;

__global__ void half_of(cudaTextureObject_t from, cudaSurfaceObject_t to, int side) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= side || y >= side) return;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int i = 0; i < 4; i++) {
        float4 v = tex2D<float4>(from, 2 * x + (i & 1) + 0.5f, 2 * y + (i >> 1) + 0.5f);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    surf2Dwrite(make_float4(sum.x / 4, sum.y / 4, sum.z / 4, sum.w / 4), to, x * 16, y);
}
__global__ void read_level(cudaTextureObject_t all, float4 *out, int side, int level) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < side && y < side) out[y * side + x] = tex2DLod<float4>(all, (x + 0.5f) / side, (y + 0.5f) / side, level);
}
__global__ void turn(cudaSurfaceObject_t level, int side) {
    int x = threadIdx.x, y = threadIdx.y;
    float4 here = surf2Dread<float4>(level, x * 16, y), there = surf2Dread<float4>(level, (side - 1 - x) * 16, y);
    __syncthreads();
    if (x < side / 2) {
        surf2Dwrite(there, level, x * 16, y);
        surf2Dwrite(here, level, (side - 1 - x) * 16, y);
    }
}

static bool same(float4 a, float4 b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    cudaChannelFormatDesc four = cudaCreateChannelDesc<float4>();
    cudaMipmappedArray_t array;
    RETURNS(cudaSuccess, cudaMallocMipmappedArray(&array, &four, make_cudaExtent(SIDE, SIDE, 0), LEVELS, cudaArraySurfaceLoadStore));
    // Whole numbers: sums of four and quarters of them are exact down to the last level.
    std::vector<std::vector<float4>> want(LEVELS);
    want[0].resize(SIDE * SIDE);
    for (float4 &v : want[0]) v = make_float4(random.below(256), random.below(256), random.below(256), random.below(256));
    cudaArray_t first;
    RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&first, array, 0));
    RETURNS(cudaSuccess, cudaMemcpy2DToArray(first, 0, 0, want[0].data(), SIDE * 16, SIDE * 16, SIDE, cudaMemcpyHostToDevice));
    for (int l = 1; l < LEVELS; l++) {
        const int side = SIDE >> l;
        cudaResourceDesc from = {}, to = {};
        from.resType = to.resType = cudaResourceTypeArray;
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&from.res.array.array, array, l - 1));
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&to.res.array.array, array, l));
        cudaTextureDesc how = {};
        cudaTextureObject_t texture;
        cudaSurfaceObject_t surface;
        RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &from, &how, nullptr));
        RETURNS(cudaSuccess, cudaCreateSurfaceObject(&surface, &to));
        half_of<<<dim3((side + 15) / 16, (side + 15) / 16), dim3(16, 16)>>>(texture, surface, side);
        LAUNCHED();
        CHECK(cudaDeviceSynchronize());
        RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
        RETURNS(cudaSuccess, cudaDestroySurfaceObject(surface));
        want[l].resize(side * side);
        for (int y = 0; y < side; y++)
            for (int x = 0; x < side; x++) {
                float4 sum = make_float4(0, 0, 0, 0);
                for (int i = 0; i < 4; i++) {
                    float4 v = want[l - 1][(2 * y + (i >> 1)) * 2 * side + 2 * x + (i & 1)];
                    sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
                }
                want[l][y * side + x] = make_float4(sum.x / 4, sum.y / 4, sum.z / 4, sum.w / 4);
            }
    }
    // One level is read and written in place.
    const int turned = 3, side_of = SIDE >> turned;
    cudaResourceDesc place = {};
    place.resType = cudaResourceTypeArray;
    RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&place.res.array.array, array, turned));
    cudaSurfaceObject_t surface;
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&surface, &place));
    turn<<<1, dim3(side_of, side_of)>>>(surface, side_of);
    LAUNCHED();
    for (int y = 0; y < side_of; y++)
        for (int x = 0; x < side_of / 2; x++) std::swap(want[turned][y * side_of + x], want[turned][y * side_of + side_of - 1 - x]);

    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = array;
    cudaTextureDesc how = {};
    how.normalizedCoords = 1;
    how.maxMipmapLevelClamp = LEVELS;
    cudaTextureObject_t all;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&all, &resource, &how, nullptr));
    float4 *out;
    CHECK(cudaMalloc(&out, SIDE * SIDE * sizeof *out));
    for (int l = 0; l < LEVELS; l++) {
        const int side = SIDE >> l;
        std::vector<float4> got(side * side);
        read_level<<<dim3((side + 15) / 16, (side + 15) / 16), dim3(16, 16)>>>(all, out, side, l);
        LAUNCHED();
        CHECK(cudaMemcpy(got.data(), out, got.size() * sizeof *out, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (size_t i = 0; i < got.size(); i++) wrong += !same(got[i], want[l][i]);
        IS(0, wrong);
    }
    printf("the last level: %g %g %g %g\n", want[LEVELS - 1][0].x, want[LEVELS - 1][0].y, want[LEVELS - 1][0].z, want[LEVELS - 1][0].w);
    CHECK(cudaFree(out));
    RETURNS(cudaSuccess, cudaDestroyTextureObject(all));
    RETURNS(cudaSuccess, cudaDestroySurfaceObject(surface));
    RETURNS(cudaSuccess, cudaFreeMipmappedArray(array));
    return verdict();
}
