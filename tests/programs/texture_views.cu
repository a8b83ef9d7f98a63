// Resource views: some of the levels or layers of an array, and its elements taken for others of the same size.
#define PROGRAM "texture_views"
#include "cases.h"
#include <cstring>
#include <vector>

const int W = 32, H = 16, LEVELS = 5, LAYERS = 6;

__global__ void read_level(cudaTextureObject_t texture, float *out, float level) { out[threadIdx.x] = tex2DLod<float>(texture, (threadIdx.x + 0.5f) / blockDim.x, 0.01f, level); }
__global__ void read_layer(cudaTextureObject_t texture, float *out, int layer) { out[threadIdx.x] = tex2DLayered<float>(texture, threadIdx.x + 0.5f, 2.5f, layer); }
template <typename T> __global__ void read_as(cudaTextureObject_t texture, T *out) { out[threadIdx.x] = tex2D<T>(texture, threadIdx.x + 0.5f, 3.5f); }

static cudaTextureObject_t texture_of(const cudaResourceDesc &resource, bool levels, const cudaResourceViewDesc &view) {
    cudaTextureDesc how = {};
    how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
    how.normalizedCoords = levels;
    how.maxMipmapLevelClamp = 16;
    cudaTextureObject_t texture = 0;
    CHECK(cudaCreateTextureObject(&texture, &resource, &how, &view));
    cudaResourceViewDesc told;
    CHECK(cudaGetTextureObjectResourceViewDesc(&told, texture));
    TRUE_THAT(told.format == view.format && told.firstMipmapLevel == view.firstMipmapLevel && told.lastLayer == view.lastLayer);
    return texture;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    float *out, got[W];
    CHECK(cudaMalloc(&out, sizeof got * 4));
    cudaChannelFormatDesc one = cudaCreateChannelDesc<float>();

    // Levels 1 to 3 of five: the view's level 0 is the array's 1, and its last one is its 2.
    cudaMipmappedArray_t levels;
    CHECK(cudaMallocMipmappedArray(&levels, &one, make_cudaExtent(W, H, 0), LEVELS));
    for (int l = 0; l < LEVELS; l++) {
        cudaArray_t level;
        CHECK(cudaGetMipmappedArrayLevel(&level, levels, l));
        std::vector<float> texels((W >> l) * (H >> l), (float)(l + 1));
        CHECK(cudaMemcpy2DToArray(level, 0, 0, texels.data(), (W >> l) * 4, (W >> l) * 4, H >> l, cudaMemcpyHostToDevice));
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = levels;
    cudaResourceViewDesc view = {};
    view.format = cudaResViewFormatFloat1;
    view.width = W, view.height = H;
    view.firstMipmapLevel = 1, view.lastMipmapLevel = 3;
    cudaTextureObject_t texture = texture_of(resource, true, view);
    for (int l = 0; l < LEVELS; l++) {
        read_level<<<1, W>>>(texture, out, (float)l);
        CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
        const float want = (float)(l < 2 ? l + 2 : 4);
        int wrong = 0;
        for (float v : got) wrong += v != want;
        IS(0, wrong);
    }
    CHECK(cudaDestroyTextureObject(texture));

    // Levels that are not there are the last one; what else does not fit is an error.
    view.lastMipmapLevel = 9;
    texture = texture_of(resource, true, view);
    read_level<<<1, W>>>(texture, out, 9.0f);
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    IS(LEVELS, got[0]);
    CHECK(cudaDestroyTextureObject(texture));
    const cudaResourceViewDesc right = view;
    cudaTextureDesc how = {};
    how.normalizedCoords = 1;
    for (int wrong = 0; wrong < 6; wrong++) {
        view = right;
        if (wrong == 0) view.format = cudaResViewFormatNone;
        if (wrong == 1) view.format = cudaResViewFormatHalf1;
        if (wrong == 2) view.width = W / 2;
        if (wrong == 3) view.depth = 1;
        if (wrong == 4) view.firstMipmapLevel = 3, view.lastMipmapLevel = 1;
        if (wrong == 5) view.lastLayer = 1;
        RETURNS(cudaErrorInvalidValue, cudaCreateTextureObject(&texture, &resource, &how, &view));
    }
    CHECK(cudaFreeMipmappedArray(levels));

    // The faces of a cube are no layers.
    cudaArray_t cube;
    CHECK(cudaMalloc3DArray(&cube, &one, make_cudaExtent(H, H, 6), cudaArrayCubemap));
    resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = cube;
    view = {};
    view.format = cudaResViewFormatFloat1;
    view.width = view.height = H, view.depth = 6;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, &view));
    CHECK(cudaDestroyTextureObject(texture));
    view.lastLayer = 5;
    RETURNS(cudaErrorInvalidValue, cudaCreateTextureObject(&texture, &resource, &how, &view));
    CHECK(cudaFreeArray(cube));

    // Layers 2 to 4 of six.
    cudaArray_t layers;
    CHECK(cudaMalloc3DArray(&layers, &one, make_cudaExtent(W, H, LAYERS), cudaArrayLayered));
    std::vector<float> texels(W * H * LAYERS);
    for (size_t i = 0; i < texels.size(); i++) texels[i] = (float)(i / (W * H));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(texels.data(), W * 4, W, H);
    copy.dstArray = layers;
    copy.extent = make_cudaExtent(W, H, LAYERS);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = layers;
    view = {};
    view.format = cudaResViewFormatFloat1;
    view.width = W, view.height = H, view.depth = LAYERS;
    view.firstLayer = 2, view.lastLayer = 4;
    texture = texture_of(resource, false, view);
    for (int l = 0; l < 4; l++) {
        read_layer<<<1, W>>>(texture, out, l);
        CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (float v : got) wrong += v != (l < 3 ? 2 + l : 4);
        IS(0, wrong);
    }
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFreeArray(layers));

    // Floats as whole numbers of 32 bits.
    cudaArray_t plain;
    std::vector<uint32_t> bits(W * H);
    for (uint32_t &b : bits) b = (uint32_t)random.next();
    CHECK(cudaMallocArray(&plain, &one, W, H));
    CHECK(cudaMemcpy2DToArray(plain, 0, 0, bits.data(), W * 4, W * 4, H, cudaMemcpyHostToDevice));
    resource.res.array.array = plain;
    view = {};
    view.width = W, view.height = H;
    view.format = cudaResViewFormatUnsignedInt1;
    texture = texture_of(resource, false, view);
    read_as<unsigned><<<1, W>>>(texture, (unsigned *)out);
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    IS(0, memcmp(got, &bits[3 * W], sizeof got));
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFreeArray(plain));
    CHECK(cudaFree(out));
    return verdict();
}
