// Layers of cube maps: written through a surface by layer and face, read through a texture by cube and direction, and level by level.
#define PROGRAM "cube_layers"
#include "cases.h"
#include <vector>

const int SIDE = 8, CUBES = 3, LEVELS = 3;

static short texel(int level, int cube, int face, int x, int y) { return level * 5000 + cube * 1000 + face * 100 + y * 9 + x; }

__global__ void write(cudaSurfaceObject_t cubes, int level) {
    int x = threadIdx.x, y = threadIdx.y, layer_face = blockIdx.x;
    short value = level * 5000 + layer_face / 6 * 1000 + layer_face % 6 * 100 + y * 9 + x;
    surfCubemapLayeredwrite(make_short2(value, -value), cubes, x * 4, y, layer_face);
}
__global__ void copy_faces(cudaSurfaceObject_t cubes, short2 *out) {
    int x = threadIdx.x, y = threadIdx.y, layer_face = blockIdx.x;
    out[(layer_face * blockDim.y + y) * blockDim.x + x] = surfCubemapLayeredread<short2>(cubes, x * 4, y, layer_face);
}
__global__ void read(cudaTextureObject_t cubes, const float4 *at, short2 *out, int n, int level) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = level < 0 ? texCubemapLayered<short2>(cubes, at[i].x, at[i].y, at[i].z, (int)at[i].w) : texCubemapLayeredLod<short2>(cubes, at[i].x, at[i].y, at[i].z, (int)at[i].w, level);
}

static std::vector<float4> middles(int side) {
    std::vector<float4> at(CUBES * 6 * side * side);
    for (size_t i = 0; i < at.size(); i++) {
        float x = 2 * (i % side + 0.5f) / side - 1, y = 2 * (i / side % side + 0.5f) / side - 1;
        const float v[6][3] = {{1, -y, -x}, {-1, -y, x}, {x, 1, y}, {x, -1, -y}, {x, -y, 1}, {-x, -y, -1}};
        const float *d = v[i / side / side % 6];
        at[i] = make_float4(d[0], d[1], d[2], (float)(i / side / side / 6));
    }
    return at;
}

static int differing(const std::vector<short2> &got, int side, int level) {
    int wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        int face = (int)(i / side / side);
        short want = texel(level, face / 6, face % 6, i % side, i / side % side);
        wrong += got[i].x != want || got[i].y != (short)-want;
    }
    return wrong;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaChannelFormatDesc two = cudaCreateChannelDesc<short2>();
    const unsigned kind = cudaArrayCubemap | cudaArrayLayered | cudaArraySurfaceLoadStore;
    cudaArray_t none, cubes;
    RETURNS(cudaErrorInvalidValue, cudaMalloc3DArray(&none, &two, make_cudaExtent(SIDE, SIDE, 6 * CUBES + 1), kind));
    RETURNS(cudaErrorInvalidValue, cudaMalloc3DArray(&none, &two, make_cudaExtent(SIDE, SIDE, 0), kind));
    RETURNS(cudaSuccess, cudaMalloc3DArray(&cubes, &two, make_cudaExtent(SIDE, SIDE, 6 * CUBES), kind));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = cubes;
    cudaSurfaceObject_t surface;
    cudaTextureObject_t texture;
    cudaTextureDesc how = {};
    how.normalizedCoords = 1;
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&surface, &resource));
    RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    write<<<6 * CUBES, dim3(SIDE, SIDE)>>>(surface, 0);
    LAUNCHED();
    const int n = 6 * CUBES * SIDE * SIDE;
    short2 *out;
    float4 *places;
    CHECK(cudaMalloc(&out, n * sizeof *out));
    CHECK(cudaMalloc(&places, n * sizeof *places));
    std::vector<short2> got(n);
    copy_faces<<<6 * CUBES, dim3(SIDE, SIDE)>>>(surface, out);
    LAUNCHED();
    CHECK(cudaMemcpy(got.data(), out, n * sizeof *out, cudaMemcpyDeviceToHost));
    IS(0, differing(got, SIDE, 0));
    std::vector<float4> at = middles(SIDE);
    CHECK(cudaMemcpy(places, at.data(), n * sizeof *places, cudaMemcpyHostToDevice));
    read<<<(n + 127) / 128, 128>>>(texture, places, out, n, -1);
    LAUNCHED();
    CHECK(cudaMemcpy(got.data(), out, n * sizeof *out, cudaMemcpyDeviceToHost));
    IS(0, differing(got, SIDE, 0));
    RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
    RETURNS(cudaSuccess, cudaDestroySurfaceObject(surface));
    RETURNS(cudaSuccess, cudaFreeArray(cubes));

    cudaMipmappedArray_t levels;
    RETURNS(cudaSuccess, cudaMallocMipmappedArray(&levels, &two, make_cudaExtent(SIDE, SIDE, 6 * CUBES), LEVELS, kind));
    for (int l = 0; l < LEVELS; l++) {
        cudaArray_t level;
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&level, levels, l));
        resource.res.array.array = level;
        RETURNS(cudaSuccess, cudaCreateSurfaceObject(&surface, &resource));
        write<<<6 * CUBES, dim3(SIDE >> l, SIDE >> l)>>>(surface, l);
        LAUNCHED();
        RETURNS(cudaSuccess, cudaDestroySurfaceObject(surface));
    }
    resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = levels;
    how.maxMipmapLevelClamp = LEVELS;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    for (int l = 0; l < LEVELS; l++) {
        at = middles(SIDE >> l);
        got.resize(at.size());
        CHECK(cudaMemcpy(places, at.data(), at.size() * sizeof *places, cudaMemcpyHostToDevice));
        read<<<(int)(at.size() + 127) / 128, 128>>>(texture, places, out, (int)at.size(), l);
        LAUNCHED();
        CHECK(cudaMemcpy(got.data(), out, got.size() * sizeof *out, cudaMemcpyDeviceToHost));
        IS(0, differing(got, SIDE >> l, l));
    }
    CHECK(cudaFree(out));
    CHECK(cudaFree(places));
    RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
    RETURNS(cudaSuccess, cudaFreeMipmappedArray(levels));
    return verdict();
}
