// Mipmapped arrays of one and three dimensions and of layers, which do not become fewer; small numbers read as fractions at a level.
#define PROGRAM "mipmap_kinds"
#include "cases.h"
#include <algorithm>
#include <vector>

const int W = 24, H = 10, D = 12, LEVELS = 4;

static int side(int size, int level) { return size == 0 ? 0 : std::max(size >> level, 1); }
// Of the texel, by its place; an element of 8 bits has its lowest ones.
static unsigned texel(int level, int x, int y, int z) { return level * 61 + z * 17 + y * 5 + x; }

enum Kind { LINE, BOX, LINES, PICTURES };

__global__ void read(Kind kind, bool gradients, cudaTextureObject_t texture, int w, int h, int d, int level, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w * h * d) return;
    int a = i % w, b = i / w % h, c = i / w / h;
    float x = (a + 0.5f) / w, y = (b + 0.5f) / h, z = (c + 0.5f) / d, step = 1.0f / w;
    float value = 0;
    switch (kind) {
    case LINE: value = gradients ? tex1DGrad<float>(texture, x, step, 0) : tex1DLod<float>(texture, x, level); break;
    case BOX:
        value = gradients ? tex3DGrad<float>(texture, x, y, z, make_float4(step, 0, 0, 0), make_float4(0, 0, 0, 0)) : tex3DLod<float>(texture, x, y, z, level);
        break;
    case LINES: value = gradients ? tex1DLayeredGrad<float>(texture, x, c, step, 0) : tex1DLayeredLod<float>(texture, x, c, level); break;
    case PICTURES:
        value = gradients ? tex2DLayeredGrad<float>(texture, x, y, c, make_float2(step, 0), make_float2(0, 0)) : tex2DLayeredLod<float>(texture, x, y, c, level);
        break;
    }
    out[i] = value;
}

template <typename T> static void run(Kind kind, cudaTextureReadMode mode) {
    const bool layered = kind >= LINES;
    const int height = kind == LINE || kind == LINES ? 0 : H, depth = kind == LINE ? 0 : D;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<T>();
    cudaMipmappedArray_t array;
    RETURNS(cudaSuccess, cudaMallocMipmappedArray(&array, &format, make_cudaExtent(W, height, depth), LEVELS, layered ? cudaArrayLayered : 0));
    for (int l = 0; l < LEVELS; l++) {
        const int w = side(W, l), h = side(height, l), d = layered ? depth : side(depth, l);
        cudaArray_t level;
        RETURNS(cudaSuccess, cudaGetMipmappedArrayLevel(&level, array, l));
        cudaExtent extent;
        unsigned flags;
        RETURNS(cudaSuccess, cudaArrayGetInfo(nullptr, &extent, &flags, level));
        TRUE_THAT((int)extent.width == w && (int)extent.height == h && (int)extent.depth == d);
        IS(layered ? cudaArrayLayered : 0, flags & cudaArrayLayered);
        const int rows = std::max(h, 1), slices = std::max(d, 1);
        std::vector<T> texels(w * rows * slices);
        for (size_t i = 0; i < texels.size(); i++) texels[i] = (T)texel(l, i % w, i / w % rows, i / w / rows);
        cudaMemcpy3DParms copy = {};
        copy.srcPtr = make_cudaPitchedPtr(texels.data(), w * sizeof(T), w, rows);
        copy.dstArray = level;
        copy.extent = make_cudaExtent(w, rows, slices);
        copy.kind = cudaMemcpyHostToDevice;
        RETURNS(cudaSuccess, cudaMemcpy3D(&copy));
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = array;
    cudaTextureDesc how = {};
    how.readMode = mode;
    how.normalizedCoords = 1;
    how.maxMipmapLevelClamp = LEVELS;
    cudaTextureObject_t texture;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    float *out;
    CHECK(cudaMalloc(&out, W * H * D * 4));
    for (int gradients = 0; gradients < 2; gradients++)
        for (int l = 0; l < LEVELS; l++) {
            const int w = side(W, l), h = std::max(side(height, l), 1), d = std::max(layered ? depth : side(depth, l), 1), n = w * h * d;
            read<<<(n + 127) / 128, 128>>>(kind, gradients, texture, w, h, d, l, out);
            LAUNCHED();
            std::vector<float> got(n);
            CHECK(cudaMemcpy(got.data(), out, n * 4, cudaMemcpyDeviceToHost));
            int wrong = 0;
            for (int i = 0; i < n; i++) {
                float stored = (float)(T)texel(l, i % w, i / w % h, i / w / h);
                float want = mode == cudaReadModeElementType ? stored : (float)(stored / 255.0);
                wrong += want - got[i] > 1e-6f || got[i] - want > 1e-6f;
            }
            IS(0, wrong);
        }
    CHECK(cudaFree(out));
    RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
    RETURNS(cudaSuccess, cudaFreeMipmappedArray(array));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    for (Kind kind : {LINE, BOX, LINES, PICTURES}) {
        run<float>(kind, cudaReadModeElementType);
        run<unsigned char>(kind, cudaReadModeNormalizedFloat);
    }
    return verdict();
}
