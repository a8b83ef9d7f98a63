// A mipmapped array of two dimensions: its levels are arrays that can be copied to, asked and read alone; a texture of it is read at a level, between levels, by gradients, with
// a bias and between clamps.
#define PROGRAM "mipmaps"
#include "cases.h"
#include <algorithm>
#include <cmath>
#include <vector>

const int W = 48, H = 20, LEVELS = 6;

static int side(int size, int level) { return std::max(size >> level, 1); }
static float texel(int level, int x, int y) { return level * 4096 + y * 64 + x; }

__global__ void lod(cudaTextureObject_t texture, const float4 *at, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2DLod<float>(texture, at[i].x, at[i].y, at[i].z);
}
__global__ void grad(cudaTextureObject_t texture, const float4 *at, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2DGrad<float>(texture, at[i].x, at[i].y, make_float2(at[i].z, 0), make_float2(0, at[i].w));
}
__global__ void base(cudaTextureObject_t texture, const float4 *at, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2D<float>(texture, at[i].x, at[i].y);
}

typedef void (*Kernel)(cudaTextureObject_t, const float4 *, float *, int);

static std::vector<float> look(Kernel kernel, cudaMipmappedArray_t array, const cudaTextureDesc &how, const std::vector<float4> &at) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = array;
    cudaTextureObject_t texture = 0;
    CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    cudaTextureDesc told;
    CHECK(cudaGetTextureObjectTextureDesc(&told, texture));
    TRUE_THAT(told.mipmapLevelBias == how.mipmapLevelBias && told.maxMipmapLevelClamp == how.maxMipmapLevelClamp && told.mipmapFilterMode == how.mipmapFilterMode);
    cudaResourceDesc of;
    CHECK(cudaGetTextureObjectResourceDesc(&of, texture));
    TRUE_THAT(of.resType == cudaResourceTypeMipmappedArray && of.res.mipmap.mipmap == array);
    float4 *places;
    float *out;
    const int n = (int)at.size();
    CHECK(cudaMalloc(&places, n * sizeof *places));
    CHECK(cudaMalloc(&out, n * sizeof *out));
    CHECK(cudaMemcpy(places, at.data(), n * sizeof *places, cudaMemcpyHostToDevice));
    kernel<<<(n + 127) / 128, 128>>>(texture, places, out, n);
    LAUNCHED();
    std::vector<float> got(n);
    CHECK(cudaMemcpy(got.data(), out, n * sizeof *out, cudaMemcpyDeviceToHost));
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFree(places));
    CHECK(cudaFree(out));
    return got;
}

// The nearest texel of a level at a normalized place.
static float nearest(int level, float4 p) { return texel(level, (int)(p.x * side(W, level)), (int)(p.y * side(H, level))); }

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    cudaChannelFormatDesc one = cudaCreateChannelDesc<float>();
    cudaMipmappedArray_t array, all;
    RETURNS(cudaSuccess, cudaMallocMipmappedArray(&array, &one, make_cudaExtent(W, H, 0), LEVELS));
    cudaArray_t level, again;
    for (int l = 0; l < LEVELS; l++) {
        const int w = side(W, l), h = side(H, l);
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&level, array, l));
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&again, array, l));
        cudaChannelFormatDesc told;
        cudaExtent extent;
        RETURNS(cudaSuccess, cudaArrayGetInfo(&told, &extent, nullptr, level));
        TRUE_THAT(told.x == 32 && told.y == 0 && told.f == cudaChannelFormatKindFloat);
        IS(w, extent.width);
        IS(h, extent.height);
        IS(0, extent.depth);
        std::vector<float> texels(w * h), back(w * h);
        for (int y = 0; y < h; y++)
            for (int x = 0; x < w; x++) texels[y * w + x] = texel(l, x, y);
        RETURNS(cudaSuccess, cudaMemcpy2DToArray(level, 0, 0, texels.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
        RETURNS(cudaSuccess, cudaMemcpy2DFromArray(back.data(), w * 4, again, 0, 0, w * 4, h, cudaMemcpyDeviceToHost));
        TRUE_THAT(back == texels);
        RETURNS(cudaErrorInvalidValue, cudaMemcpy2DToArray(level, 4, 0, texels.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
    }
    RETURNS(cudaErrorInvalidValue, cudaGetMipmappedArrayLevel(&level, array, LEVELS));
    // A level's handle may go by itself; what it holds stays.
    RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&level, array, 1));
    RETURNS(cudaSuccess, cudaFreeArray(level));
    RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&again, array, 1));
    RETURNS(cudaSuccess, cudaArrayGetInfo(nullptr, nullptr, nullptr, again));
    // There are no more levels than halvings, whatever is asked for.
    RETURNS(cudaSuccess, cudaMallocMipmappedArray(&all, &one, make_cudaExtent(W, H, 0), 40));
    RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&level, all, LEVELS - 1));
    RETURNS(cudaErrorInvalidValue, cudaGetMipmappedArrayLevel(&level, all, LEVELS));
    RETURNS(cudaSuccess, cudaFreeMipmappedArray(all));

    // Places in the middle of a sixteenth of a texel, levels a quarter away from where the nearest one changes.
    const int n = 4000;
    std::vector<float4> at(n);
    for (float4 &p : at) {
        p.x = (random.below(16 * W) + 0.5f) / (16 * W);
        p.y = (random.below(16 * H) + 0.5f) / (16 * H);
        p.z = (int)random.below(LEVELS + 2) - 1 + (random.below(2) ? 0.25f : -0.25f);
    }
    cudaTextureDesc how = {};
    how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
    how.normalizedCoords = 1;
    how.maxMipmapLevelClamp = LEVELS - 1;
    const float clamps[][3] = {{0, 0, LEVELS - 1}, {1, 0, LEVELS - 1}, {-1.5f, 0.5f, 3.25f}, {0, 2, 2}, {0, 0, 0}};
    for (const float *clamp : clamps) {
        how.mipmapLevelBias = clamp[0];
        how.minMipmapLevelClamp = clamp[1];
        how.maxMipmapLevelClamp = clamp[2];
        auto wanted = [&](float level) { return fminf(fmaxf(fminf(level + clamp[0], clamp[2]), clamp[1]), LEVELS - 1); };
        how.mipmapFilterMode = cudaFilterModePoint;
        // Anisotropy is for gradients.
        how.maxAnisotropy = 8;
        std::vector<float> got = look(lod, array, how, at);
        how.maxAnisotropy = 0;
        int wrong = 0;
        for (int i = 0; i < n; i++) wrong += got[i] != nearest((int)(wanted(at[i].z) + 0.5f), at[i]);
        IS(0, wrong);
        // Between two levels in proportion: both texels are whole numbers, and quarters of them exact.
        how.mipmapFilterMode = cudaFilterModeLinear;
        got = look(lod, array, how, at);
        for (int i = wrong = 0; i < n; i++) {
            float at_level = wanted(at[i].z), share = at_level - floorf(at_level);
            int lower = (int)at_level, upper = std::min(lower + 1, LEVELS - 1);
            wrong += got[i] != nearest(lower, at[i]) * (1 - share) + nearest(upper, at[i]) * share;
        }
        IS(0, wrong);
        // Without a level: the first one that may be read, to which no bias is added.
        how.mipmapFilterMode = cudaFilterModePoint;
        got = look(base, array, how, at);
        for (int i = wrong = 0; i < n; i++) wrong += got[i] != nearest((int)(clamp[1] + 0.5f), at[i]);
        IS(0, wrong);
    }

    // Gradients of 2^level texels along one direction or both.
    how.mipmapLevelBias = how.minMipmapLevelClamp = 0;
    how.maxMipmapLevelClamp = LEVELS - 1;
    how.mipmapFilterMode = cudaFilterModePoint;
    std::vector<int> level_of(n);
    for (int i = 0; i < n; i++) {
        level_of[i] = (int)random.below(LEVELS);
        float steps = (float)(1 << level_of[i]);
        unsigned which = random.below(3);
        at[i].z = which == 0 ? 0.1f / W : steps / W;
        at[i].w = which == 1 ? 0.1f / H : steps / H;
    }
    std::vector<float> got = look(grad, array, how, at);
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += got[i] != nearest(level_of[i], at[i]);
    IS(0, wrong);

    // Filtered within a level: the texels lie on a plane, so the value is the plane's, to the weights' 8 bits.
    how.filterMode = cudaFilterModeLinear;
    for (float4 &p : at) p.z = (float)random.below(LEVELS);
    got = look(lod, array, how, at);
    for (int i = wrong = 0; i < n; i++) {
        int l = (int)at[i].z, w = side(W, l), h = side(H, l);
        float x = fminf(fmaxf(at[i].x * w - 0.5f, 0), w - 1), y = fminf(fmaxf(at[i].y * h - 0.5f, 0), h - 1);
        wrong += fabsf(got[i] - (l * 4096 + y * 64 + x)) > 0.5f;
    }
    IS(0, wrong);
    RETURNS(cudaSuccess, cudaFreeMipmappedArray(array));
    return verdict();
}
