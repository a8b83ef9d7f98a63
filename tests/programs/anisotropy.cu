// Anisotropic filtering: a picture of stripes seen at a slant, with ratios of 1, 4 and 16. What comes back is the GPU's own affair, and equal wherever it is the same GPU: a hash of
// their bits is printed. The more samples along the slant, the more of the stripes is kept.
#define PROGRAM "anisotropy"
#include "cases.h"
#include <cmath>
#include <vector>

const int SIDE = 256, LEVELS = 9;

__global__ void slant(cudaTextureObject_t texture, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2DGrad<float>(texture, (i + 0.5f) / n, 0.4f, make_float2(1.0f / SIDE, 0), make_float2(0, 16.0f / SIDE));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaChannelFormatDesc one = cudaCreateChannelDesc<float>();
    cudaMipmappedArray_t levels;
    CHECK(cudaMallocMipmappedArray(&levels, &one, make_cudaExtent(SIDE, SIDE, 0), LEVELS));
    std::vector<float> above(SIDE * SIDE);
    for (int i = 0; i < SIDE * SIDE; i++) above[i] = i % SIDE / 4 % 2 ? 1.0f : 0.0f;
    for (int l = 0; l < LEVELS; l++) {
        const int side = SIDE >> l;
        cudaArray_t level;
        CHECK(cudaGetMipmappedArrayLevel(&level, levels, l));
        CHECK(cudaMemcpy2DToArray(level, 0, 0, above.data(), side * 4, side * 4, side, cudaMemcpyHostToDevice));
        const int half = side / 2;
        std::vector<float> below(half * half);
        for (int y = 0; y < half; y++)
            for (int x = 0; x < half; x++) below[y * half + x] = (above[2 * y * side + 2 * x] + above[2 * y * side + 2 * x + 1] + above[(2 * y + 1) * side + 2 * x] + above[(2 * y + 1) * side + 2 * x + 1]) / 4;
        above = below;
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = levels;
    const int n = 512;
    float *out;
    CHECK(cudaMalloc(&out, n * 4));
    double contrast_before = 0;
    for (unsigned most : {1u, 4u, 16u}) {
        cudaTextureDesc how = {};
        how.normalizedCoords = 1;
        how.filterMode = how.mipmapFilterMode = cudaFilterModeLinear;
        how.maxAnisotropy = most;
        how.maxMipmapLevelClamp = LEVELS;
        cudaTextureObject_t texture;
        CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
        slant<<<n / 128, 128>>>(texture, out, n);
        LAUNCHED();
        std::vector<float> got(n);
        CHECK(cudaMemcpy(got.data(), out, n * 4, cudaMemcpyDeviceToHost));
        uint32_t sum = 2166136261u;
        double contrast = 0;
        for (float v : got) {
            unsigned char bytes[4];
            memcpy(bytes, &v, 4);
            for (unsigned char byte : bytes) sum = (sum ^ byte) * 16777619u;
            contrast += fabs(v - 0.5);
        }
        printf("ratio %u: %08x, contrast %.3f\n", most, sum, contrast / n);
        TRUE_THAT(contrast > contrast_before || most == 1);
        contrast_before = contrast;
        CHECK(cudaDestroyTextureObject(texture));
    }
    CHECK(cudaFree(out));
    CHECK(cudaFreeMipmappedArray(levels));
    return verdict();
}
