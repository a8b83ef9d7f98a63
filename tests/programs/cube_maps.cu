// Cube maps: faces by direction, edges with and without neighbours, levels, gradients, surfaces.
#define PROGRAM "cube_maps"
#include "cases.h"
#include <cmath>
#include <vector>

const int SIDE = 16, LEVELS = 5;

static float texel(int level, int face, int x, int y) { return level * 8192 + face * 1024 + y * 32 + x; }

__global__ void write(cudaSurfaceObject_t cube) { surfCubemapwrite(blockIdx.x * 1024.0f + threadIdx.y * 32 + threadIdx.x, cube, threadIdx.x * 4, threadIdx.y, blockIdx.x); }
__global__ void copy(cudaSurfaceObject_t cube, float *out) {
    out[(blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x] = surfCubemapread<float>(cube, threadIdx.x * 4, threadIdx.y, blockIdx.x);
}
__global__ void read(cudaTextureObject_t cube, const float4 *at, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = texCubemap<float>(cube, at[i].x, at[i].y, at[i].z);
}
__global__ void lod(cudaTextureObject_t cube, const float4 *at, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = texCubemapLod<float>(cube, at[i].x, at[i].y, at[i].z, at[i].w);
}

// The direction through a point of a face, as the programming guide numbers faces and turns them.
static float4 through(int face, float s, float t, float longer) {
    float x = 2 * s - 1, y = 2 * t - 1;
    const float v[6][3] = {{1, -y, -x}, {-1, -y, x}, {x, 1, y}, {x, -1, -y}, {x, -y, 1}, {-x, -y, -1}};
    return make_float4(v[face][0] * longer, v[face][1] * longer, v[face][2] * longer, 0);
}

struct Looker {
    float4 *places;
    float *out;
    explicit Looker(size_t most) {
        CHECK(cudaMalloc(&places, most * sizeof *places));
        CHECK(cudaMalloc(&out, most * sizeof *out));
    }
    template <typename K> std::vector<float> look(K kernel, cudaTextureObject_t texture, const std::vector<float4> &at) {
        const int n = (int)at.size();
        CHECK(cudaMemcpy(places, at.data(), n * sizeof *places, cudaMemcpyHostToDevice));
        kernel<<<(n + 127) / 128, 128>>>(texture, places, out, n);
        LAUNCHED();
        std::vector<float> got(n);
        CHECK(cudaMemcpy(got.data(), out, n * 4, cudaMemcpyDeviceToHost));
        return got;
    }
    ~Looker() {
        CHECK(cudaFree(places));
        CHECK(cudaFree(out));
    }
};

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    cudaChannelFormatDesc one = cudaCreateChannelDesc<float>();
    cudaArray_t cube, none;
    RETURNS(cudaErrorInvalidValue, cudaMalloc3DArray(&none, &one, make_cudaExtent(SIDE, SIDE, 5), cudaArrayCubemap));
    RETURNS(cudaErrorInvalidValue, cudaMalloc3DArray(&none, &one, make_cudaExtent(SIDE, SIDE / 2, 6), cudaArrayCubemap));
    RETURNS(cudaErrorInvalidValue, cudaMalloc3DArray(&none, &one, make_cudaExtent(SIDE, SIDE, 12), cudaArrayCubemap));
    RETURNS(cudaSuccess, cudaMalloc3DArray(&cube, &one, make_cudaExtent(SIDE, SIDE, 6), cudaArrayCubemap | cudaArraySurfaceLoadStore));
    cudaExtent extent;
    unsigned flags;
    RETURNS(cudaSuccess, cudaArrayGetInfo(nullptr, &extent, &flags, cube));
    TRUE_THAT(extent.width == SIDE && extent.height == SIDE && extent.depth == 6);
    IS(cudaArrayCubemap | cudaArraySurfaceLoadStore, flags);

    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = cube;
    cudaSurfaceObject_t surface;
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&surface, &resource));
    write<<<6, dim3(SIDE, SIDE)>>>(surface);
    LAUNCHED();
    const int n = 6 * SIDE * SIDE;
    Looker looker(n);
    copy<<<6, dim3(SIDE, SIDE)>>>(surface, looker.out);
    LAUNCHED();
    std::vector<float> got(n), copied(n);
    CHECK(cudaMemcpy(got.data(), looker.out, n * 4, cudaMemcpyDeviceToHost));
    cudaMemcpy3DParms out = {};
    out.srcArray = cube;
    out.dstPtr = make_cudaPitchedPtr(copied.data(), SIDE * 4, SIDE, SIDE);
    out.extent = make_cudaExtent(SIDE, SIDE, 6);
    out.kind = cudaMemcpyDeviceToHost;
    RETURNS(cudaSuccess, cudaMemcpy3D(&out));
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        float want = texel(0, i / SIDE / SIDE, i % SIDE, i / SIDE % SIDE);
        wrong += got[i] != want || copied[i] != want;
    }
    IS(0, wrong);

    // The middle of each texel, by directions of any length.
    cudaTextureDesc how = {};
    how.normalizedCoords = 1;
    cudaTextureObject_t texture;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    std::vector<float4> at(n);
    for (int i = 0; i < n; i++) at[i] = through(i / SIDE / SIDE, (i % SIDE + 0.5f) / SIDE, (i / SIDE % SIDE + 0.5f) / SIDE, 0.25f + random.below(8));
    got = looker.look(read, texture, at);
    for (int i = wrong = 0; i < n; i++) wrong += got[i] != texel(0, i / SIDE / SIDE, i % SIDE, i / SIDE % SIDE);
    IS(0, wrong);
    RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));

    // On an edge between two faces: half of each where the filter goes on beyond it, the face's own texel where not.
    how.filterMode = cudaFilterModeLinear;
    how.addressMode[0] = how.addressMode[1] = how.addressMode[2] = cudaAddressModeClamp;
    const float middle = (SIDE / 2 + 0.5f) / SIDE;
    std::vector<float4> edge = {through(4, 1, middle, 1), through(4, 0, middle, 1), through(0, 1, middle, 1)};
    for (int seamless = 0; seamless < 2; seamless++) {
        how.seamlessCubemap = seamless;
        RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
        std::vector<float> values = looker.look(read, texture, edge);
        printf("edges, %s: %g %g %g\n", seamless ? "seamless" : "each face for itself", values[0], values[1], values[2]);
        RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
    }
    RETURNS(cudaSuccess, cudaDestroySurfaceObject(surface));
    RETURNS(cudaSuccess, cudaFreeArray(cube));

    // Levels of a cube.
    cudaMipmappedArray_t levels;
    RETURNS(cudaSuccess, cudaMallocMipmappedArray(&levels, &one, make_cudaExtent(SIDE, SIDE, 6), LEVELS, cudaArrayCubemap));
    for (int l = 0; l < LEVELS; l++) {
        const int side = SIDE >> l;
        cudaArray_t level;
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&level, levels, l));
        std::vector<float> texels(6 * side * side);
        for (size_t i = 0; i < texels.size(); i++) texels[i] = texel(l, i / side / side, i % side, i / side % side);
        cudaMemcpy3DParms in = {};
        in.srcPtr = make_cudaPitchedPtr(texels.data(), side * 4, side, side);
        in.dstArray = level;
        in.extent = make_cudaExtent(side, side, 6);
        in.kind = cudaMemcpyHostToDevice;
        RETURNS(cudaSuccess, cudaMemcpy3D(&in));
    }
    resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = levels;
    how = {};
    how.normalizedCoords = 1;
    how.maxMipmapLevelClamp = LEVELS;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    for (int l = 0; l < LEVELS; l++) {
        const int side = SIDE >> l;
        at.resize(6 * side * side);
        for (size_t i = 0; i < at.size(); i++) {
            at[i] = through(i / side / side, (i % side + 0.5f) / side, (i / side % side + 0.5f) / side, 1);
            at[i].w = (float)l;
        }
        got = looker.look(lod, texture, at);
        wrong = 0;
        for (size_t i = 0; i < at.size(); i++) wrong += got[i] != texel(l, i / side / side, i % side, i / side % side);
        IS(0, wrong);
    }
    RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
    RETURNS(cudaSuccess, cudaFreeMipmappedArray(levels));
    return verdict();
}
