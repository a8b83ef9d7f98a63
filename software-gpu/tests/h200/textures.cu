// Samples the textures written by `examples/h200_corpus.rs` on a real GPU: textures CORPUS RESULTS.
// A case is a resource with its texels, a sampler, a kernel and its inputs; `textures.rs` defines the encoding.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static const unsigned char *at;
static unsigned word()
{
    unsigned v;
    memcpy(&v, at, 4);
    at += 4;
    return v;
}
static float number()
{
    float v;
    memcpy(&v, at, 4);
    at += 4;
    return v;
}

template <typename F> static F entry(const char *name)
{
    void *f = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found) != cudaSuccess || !f) {
        fprintf(stderr, "no driver function %s\n", name);
        exit(1);
    }
    return (F)f;
}

#define TRY(call)                                                                               \
    do {                                                                                        \
        cudaError_t e = (call);                                                                 \
        if (e != cudaSuccess) {                                                                 \
            fprintf(stderr, "case %u: %s: %s\n", number_of_case, #call, cudaGetErrorString(e)); \
            return false;                                                                       \
        }                                                                                       \
    } while (0)

enum Kind { ARRAY, LEVELS, LINEAR, ROWS };
enum { LAYERED = 1, CUBE = 2, SURFACE = 4, STORES = 8, GATHERS = 16 };

static unsigned number_of_case;
static CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);

struct Case {
    unsigned kernel, kind, flags, size[3], layers, levels;
    cudaChannelFormatDesc format;
    unsigned bytes;
    cudaTextureDesc sampler;
    const unsigned char *texels;
    const unsigned char *input;
    unsigned input_words, threads, result_words;
};

static cudaMemcpy3DParms box(cudaArray_t array, void *memory, const Case &c, unsigned level, bool out)
{
    cudaMemcpy3DParms p = {};
    size_t w = c.size[0] >> level ? c.size[0] >> level : 1, h = c.size[1] >> level ? c.size[1] >> level : 1;
    size_t d = c.flags & (LAYERED | CUBE) ? c.layers : c.size[2] >> level ? c.size[2] >> level : 1;
    cudaPitchedPtr there = make_cudaPitchedPtr(memory, w * c.bytes, w, h);
    if (out) {
        p.srcArray = array, p.dstPtr = there, p.kind = cudaMemcpyDeviceToHost;
    } else {
        p.dstArray = array, p.srcPtr = there, p.kind = cudaMemcpyHostToDevice;
    }
    p.extent = make_cudaExtent(w, h, d);
    return p;
}

static size_t level_bytes(const Case &c, unsigned level)
{
    cudaMemcpy3DParms p = box(nullptr, nullptr, c, level, false);
    return p.extent.width * p.extent.height * p.extent.depth * c.bytes;
}

static bool run(CUfunction kernel, const Case &c, std::vector<unsigned char> &result)
{
    cudaResourceDesc resource = {};
    cudaArray_t array = nullptr;
    cudaMipmappedArray_t levels = nullptr;
    void *memory = nullptr;
    unsigned flags = (c.flags & LAYERED ? cudaArrayLayered : 0) | (c.flags & CUBE ? cudaArrayCubemap : 0) |
                     (c.flags & SURFACE ? cudaArraySurfaceLoadStore : 0) | (c.flags & GATHERS ? cudaArrayTextureGather : 0);
    bool layers = c.flags & (LAYERED | CUBE);
    bool flat = c.size[1] == 1 && c.size[2] == 1 && !(c.flags & CUBE);
    cudaExtent extent = make_cudaExtent(c.size[0], flat ? 0 : c.size[1], layers ? c.layers : c.size[2] > 1 ? c.size[2] : 0);
    cudaChannelFormatDesc format = c.format;
    if (c.kind == ARRAY) {
        TRY(cudaMalloc3DArray(&array, &format, extent, flags));
        cudaMemcpy3DParms p = box(array, (void *)c.texels, c, 0, false);
        TRY(cudaMemcpy3D(&p));
        resource.resType = cudaResourceTypeArray;
        resource.res.array.array = array;
    } else if (c.kind == LEVELS) {
        TRY(cudaMallocMipmappedArray(&levels, &format, extent, c.levels, flags));
        const unsigned char *texels = c.texels;
        for (unsigned level = 0; level < c.levels; level++) {
            cudaArray_t one;
            TRY(cudaGetMipmappedArrayLevel(&one, levels, level));
            cudaMemcpy3DParms p = box(one, (void *)texels, c, level, false);
            TRY(cudaMemcpy3D(&p));
            texels += level_bytes(c, level);
        }
        resource.resType = cudaResourceTypeMipmappedArray;
        resource.res.mipmap.mipmap = levels;
    } else if (c.kind == LINEAR) {
        TRY(cudaMalloc(&memory, (size_t)c.size[0] * c.bytes));
        TRY(cudaMemcpy(memory, c.texels, (size_t)c.size[0] * c.bytes, cudaMemcpyHostToDevice));
        resource.resType = cudaResourceTypeLinear;
        resource.res.linear.devPtr = memory;
        resource.res.linear.desc = format;
        resource.res.linear.sizeInBytes = (size_t)c.size[0] * c.bytes;
    } else {
        size_t pitch, row = (size_t)c.size[0] * c.bytes;
        TRY(cudaMallocPitch(&memory, &pitch, row, c.size[1]));
        TRY(cudaMemcpy2D(memory, pitch, c.texels, row, row, c.size[1], cudaMemcpyHostToDevice));
        resource.resType = cudaResourceTypePitch2D;
        resource.res.pitch2D.devPtr = memory;
        resource.res.pitch2D.desc = format;
        resource.res.pitch2D.width = c.size[0];
        resource.res.pitch2D.height = c.size[1];
        resource.res.pitch2D.pitchInBytes = pitch;
    }
    unsigned long long handle = 0;
    if (c.flags & SURFACE)
        TRY(cudaCreateSurfaceObject((cudaSurfaceObject_t *)&handle, &resource));
    else
        TRY(cudaCreateTextureObject((cudaTextureObject_t *)&handle, &resource, &c.sampler, nullptr));

    void *in, *out;
    size_t inputs = (size_t)c.threads * c.input_words * 4, outputs = (size_t)c.threads * c.result_words * 4;
    TRY(cudaMalloc(&in, inputs));
    TRY(cudaMalloc(&out, outputs));
    TRY(cudaMemcpy(in, c.input, inputs, cudaMemcpyHostToDevice));
    TRY(cudaMemset(out, 0xaa, outputs));
    unsigned threads = c.threads;
    void *args[] = {&in, &out, &handle, &threads};
    CUresult launched = launch(kernel, (threads + 127) / 128, 1, 1, 128, 1, 1, 0, 0, args, nullptr);
    if (launched != CUDA_SUCCESS) {
        fprintf(stderr, "case %u: launch: %d\n", number_of_case, launched);
        return false;
    }
    TRY(cudaDeviceSynchronize());
    result.resize(outputs);
    TRY(cudaMemcpy(result.data(), out, outputs, cudaMemcpyDeviceToHost));
    if (c.flags & STORES) {
        result.resize(outputs + level_bytes(c, 0));
        cudaMemcpy3DParms p = box(array, result.data() + outputs, c, 0, true);
        TRY(cudaMemcpy3D(&p));
    }
    if (c.flags & SURFACE)
        TRY(cudaDestroySurfaceObject(handle));
    else
        TRY(cudaDestroyTextureObject(handle));
    TRY(cudaFree(in));
    TRY(cudaFree(out));
    TRY(cudaFree(memory));
    if (array)
        TRY(cudaFreeArray(array));
    if (levels)
        TRY(cudaFreeMipmappedArray(levels));
    return true;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    FILE *f = fopen(argv[1], "rb");
    if (!f)
        return 3;
    std::vector<unsigned char> corpus;
    static unsigned char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, f));)
        corpus.insert(corpus.end(), buffer, buffer + n);
    fclose(f);
    at = corpus.data();

    cudaDeviceProp prop;
    int driver = 0;
    if (cudaSetDevice(0) != cudaSuccess || cudaFree(0) != cudaSuccess || cudaGetDeviceProperties(&prop, 0) != cudaSuccess)
        return 4;
    cudaDriverGetVersion(&driver);
    auto load = entry<CUresult (*)(CUmodule *, const void *, unsigned, CUjit_option *, void **)>("cuModuleLoadDataEx");
    auto function = entry<CUresult (*)(CUfunction *, CUmodule, const char *)>("cuModuleGetFunction");
    launch = entry<decltype(launch)>("cuLaunchKernel");

    std::vector<unsigned char> out(128);
    snprintf((char *)out.data(), 128, "%s, compute capability %d.%d, driver %d", prop.name, prop.major, prop.minor, driver);
    unsigned length = word();
    std::string log(65536, '\0');
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {&log[0], (void *)log.size()};
    CUmodule module;
    if (load(&module, at, 2, options, values) != CUDA_SUCCESS) {
        fprintf(stderr, "%s\n", log.c_str());
        return 5;
    }
    at += length;
    unsigned failed = 0, cases = word();
    for (unsigned n = 0; n < cases; n++) {
        const unsigned char *hash = at;
        at += 8;
        Case c = {};
        number_of_case = n;
        c.kernel = word();
        c.kind = word();
        c.flags = word();
        for (unsigned &s : c.size)
            s = word();
        c.layers = word();
        c.levels = word();
        unsigned kind = word(), bits = word(), channels = word();
        c.format = cudaCreateChannelDesc(bits, channels > 1 ? bits : 0, channels > 2 ? bits : 0, channels > 2 ? bits : 0,
                                         kind == 0 ? cudaChannelFormatKindUnsigned : kind == 1 ? cudaChannelFormatKindSigned : cudaChannelFormatKindFloat);
        c.bytes = bits / 8 * channels;
        for (auto &mode : c.sampler.addressMode)
            mode = (cudaTextureAddressMode)word();
        c.sampler.filterMode = (cudaTextureFilterMode)word();
        c.sampler.readMode = (cudaTextureReadMode)word();
        c.sampler.normalizedCoords = word();
        c.sampler.sRGB = word();
        c.sampler.mipmapFilterMode = (cudaTextureFilterMode)word();
        c.sampler.seamlessCubemap = word();
        for (float &b : c.sampler.borderColor)
            b = number();
        c.sampler.mipmapLevelBias = number();
        c.sampler.minMipmapLevelClamp = number();
        c.sampler.maxMipmapLevelClamp = number();
        length = word();
        c.texels = at;
        at += length;
        c.input_words = word();
        c.threads = word();
        c.result_words = word();
        c.input = at;
        at += (size_t)c.input_words * c.threads * 4;
        CUfunction kernel;
        std::vector<unsigned char> result;
        if (function(&kernel, module, ("k" + std::to_string(c.kernel)).c_str()) != CUDA_SUCCESS || !run(kernel, c, result)) {
            result.clear();
            failed++;
        }
        unsigned size = (unsigned)result.size();
        out.insert(out.end(), hash, hash + 8);
        out.insert(out.end(), (unsigned char *)&size, (unsigned char *)&size + 4);
        out.insert(out.end(), result.begin(), result.end());
    }
    f = fopen(argv[2], "wb");
    if (!f || fwrite(out.data(), 1, out.size(), f) != out.size() || fclose(f))
        return 6;
    printf("%s: %u cases, %u failed, %zu bytes\n", (char *)out.data(), cases, failed, out.size());
    return failed != 0;
}
