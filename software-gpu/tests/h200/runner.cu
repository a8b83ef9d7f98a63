// Runs the corpus written by `examples/h200_corpus.rs` on a real GPU: runner CORPUS RESULTS.
// Gets the driver's functions from the runtime, so that it links only to the static runtime.
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

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    FILE *f = fopen(argv[1], "rb");
    if (!f)
        return 3;
    std::vector<unsigned char> corpus;
    unsigned char buffer[65536];
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
    auto attribute = entry<CUresult (*)(CUfunction, CUfunction_attribute, int)>("cuFuncSetAttribute");
    auto launch = entry<CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)>("cuLaunchKernel");

    std::vector<unsigned char> out;
    char head[128] = {};
    snprintf(head, sizeof head, "%s, compute capability %d.%d, driver %d", prop.name, prop.major, prop.minor, driver);
    out.insert(out.end(), head, head + sizeof head);
    unsigned modules = word(), failed = 0, done = 0;
    for (unsigned m = 0; m < modules; m++) {
        unsigned length = word();
        const char *text = (const char *)at;
        at += length;
        std::string log(65536, '\0');
        CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        void *values[] = {&log[0], (void *)log.size()};
        CUmodule module = nullptr;
        CUresult loaded = load(&module, text, 2, options, values);
        if (loaded != CUDA_SUCCESS)
            fprintf(stderr, "module %u: error %d\n%s\n", m, loaded, log.c_str());
        unsigned cases = word();
        for (unsigned c = 0; c < cases; c++) {
            unsigned threads = word(), bytes = word(), gx = word(), gy = word(), gz = word();
            const unsigned char *hash = at;
            at += 8;
            unsigned in = word();
            const unsigned char *input = at;
            at += in;
            void *din, *dout;
            size_t size = (size_t)threads * bytes;
            if (cudaMalloc(&din, in) != cudaSuccess || cudaMalloc(&dout, size) != cudaSuccess)
                return 5;
            cudaMemcpy(din, input, in, cudaMemcpyHostToDevice);
            cudaMemset(dout, 0, size);
            CUfunction kernel;
            std::string name = "c" + std::to_string(c);
            std::vector<unsigned char> result(size);
            void *args[] = {&din, &dout};
            if (!module || function(&kernel, module, name.c_str()) != CUDA_SUCCESS ||
                attribute(kernel, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1) != CUDA_SUCCESS ||
                launch(kernel, gx, gy, gz, threads / (gx * gy * gz), 1, 1, 0, 0, args, nullptr) != CUDA_SUCCESS ||
                cudaDeviceSynchronize() != cudaSuccess ||
                cudaMemcpy(result.data(), dout, size, cudaMemcpyDeviceToHost) != cudaSuccess) {
                fprintf(stderr, "module %u case %u failed: %s\n", m, c, cudaGetErrorString(cudaGetLastError()));
                failed++;
            } else {
                unsigned n = (unsigned)size;
                out.insert(out.end(), hash, hash + 8);
                out.insert(out.end(), (unsigned char *)&n, (unsigned char *)&n + 4);
                out.insert(out.end(), result.begin(), result.end());
                done++;
            }
            cudaFree(din);
            cudaFree(dout);
        }
        // Written incrementally, so that a kernel that never ends loses only what follows it.
        f = fopen(argv[2], "wb");
        if (!f || fwrite(out.data(), 1, out.size(), f) != out.size() || fclose(f))
            return 6;
    }
    printf("%s: %u cases recorded, %u failed, %zu bytes\n", head, done, failed, out.size());
    return failed != 0;
}
