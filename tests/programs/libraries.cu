// Libraries and kernels: loaded by the runtime and by the driver, from PTX text and from a file, listed, asked, launched by
// either handle, their variables, and what is left after they are unloaded.
#define PROGRAM "libraries"
#include "cases.h"
#include <cuda.h>
#include <unistd.h>

static const char ptx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 8 .u64 total = 5;
.visible .const .align 4 .u32 step = 3;
.visible .entry count(.param .u64 p, .param .u32 by, .param .align 8 .b8 pair[16])
{
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [by];
    ld.param.u32 %r2, [pair+12];
    ld.const.u32 %r3, [step];
    mov.u32 %r4, %tid.x;
    mul.wide.u32 %rd2, %r4, 4;
    add.s64 %rd1, %rd1, %rd2;
    add.u32 %r5, %r1, %r2;
    add.u32 %r5, %r5, %r3;
    atom.global.add.u32 %r6, [%rd1], %r5;
    cvt.u64.u32 %rd3, %r1;
    atom.global.add.u64 %rd4, [total], %rd3;
    ret;
}
.visible .entry nothing()
{
    ret;
}
)";

struct Pair {
    double unused;
    int here, there;
};

static void by_runtime(const std::string &code) {
    cudaLibrary_t library = nullptr;
    cudaKernel_t kernel = nullptr, none = nullptr, all[4] = {};
    unsigned count = 99;
    RETURNS(cudaSuccess, cudaLibraryLoadData(&library, code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    RETURNS(cudaSuccess, cudaLibraryGetKernel(&kernel, library, "count"));
    RETURNS(cudaErrorSymbolNotFound, cudaLibraryGetKernel(&none, library, "absent"));
    RETURNS(cudaSuccess, cudaLibraryGetKernelCount(&count, library));
    IS(2, count);
    RETURNS(cudaSuccess, cudaLibraryEnumerateKernels(all, 4, library));
    TRUE_THAT(all[0] && all[1] && all[0] != all[1] && (all[0] == kernel || all[1] == kernel) && !all[2]);
    cudaFuncAttributes attributes;
    RETURNS(cudaSuccess, cudaFuncGetAttributes(&attributes, (const void *)kernel));
    TRUE_THAT(attributes.maxThreadsPerBlock == 1024);
    int *p, got[32];
    unsigned by = 10;
    Pair pair = {0, 1, 100};
    RETURNS(cudaSuccess, cudaMalloc(&p, sizeof got));
    RETURNS(cudaSuccess, cudaMemset(p, 0, sizeof got));
    void *arguments[] = {&p, &by, &pair};
    RETURNS(cudaSuccess, cudaLaunchKernel((const void *)kernel, dim3(2), dim3(32), arguments, 0, 0));
    RETURNS(cudaSuccess, cudaMemcpy(got, p, sizeof got, cudaMemcpyDeviceToHost));
    IS(2 * 113, got[31]);
    void *total = nullptr;
    size_t size = 0;
    unsigned long long value = 0;
    RETURNS(cudaSuccess, cudaLibraryGetGlobal(&total, &size, library, "total"));
    IS(8, size);
    RETURNS(cudaSuccess, cudaMemcpy(&value, total, 8, cudaMemcpyDeviceToHost));
    IS(5 + 64 * 10, value);
    RETURNS(cudaErrorSymbolNotFound, cudaLibraryGetGlobal(&total, &size, library, "absent"));
    RETURNS(cudaErrorSymbolNotFound, cudaLibraryGetManaged(&total, &size, library, "total"));
    RETURNS(cudaSuccess, cudaLibraryUnload(library));
    RETURNS(cudaErrorInvalidValue, cudaLibraryLoadData(&library, nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0));
    // PTX that is none is found when it is loaded or, as code is loaded lazily, when a kernel is asked for.
    cudaError_t answer = cudaLibraryLoadData(&library, ".version 7.0\n.target sm_75\nno such thing\n", nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (answer == cudaSuccess) answer = cudaLibraryGetKernel(&none, library, "count");
    IS(cudaErrorInvalidPtx, answer);
    cudaGetLastError();
    RETURNS(cudaSuccess, cudaFree(p));
}

static void by_driver(const std::string &code) {
    CUlibrary library = nullptr, from_file = nullptr, owner = nullptr;
    CUkernel kernel = nullptr, all[2] = {};
    CUfunction function = nullptr;
    CUmodule module = nullptr;
    unsigned count = 0;
    IS(CUDA_SUCCESS, cuLibraryLoadData(&library, code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    char path[] = "/tmp/rgpu-librariesXXXXXX";
    int file = mkstemp(path);
    REQUIRE(file >= 0 && write(file, code.data(), code.size()) == (ssize_t)code.size(), "cannot write %s", path);
    close(file);
    IS(CUDA_SUCCESS, cuLibraryLoadFromFile(&from_file, path, nullptr, nullptr, 0, nullptr, nullptr, 0));
    unlink(path);
    IS(CUDA_ERROR_FILE_NOT_FOUND, cuLibraryLoadFromFile(&owner, path, nullptr, nullptr, 0, nullptr, nullptr, 0));
    IS(CUDA_SUCCESS, cuLibraryGetKernelCount(&count, library));
    IS(2, count);
    IS(CUDA_SUCCESS, cuLibraryEnumerateKernels(all, 2, library));
    IS(CUDA_SUCCESS, cuLibraryGetKernel(&kernel, library, "count"));
    const char *name = nullptr;
    IS(CUDA_SUCCESS, cuKernelGetName(&name, kernel));
    TRUE_THAT(name && strcmp(name, "count") == 0);
    IS(CUDA_SUCCESS, cuKernelGetLibrary(&owner, kernel));
    TRUE_THAT(owner == library);
    size_t offset = 0, size = 0;
    IS(CUDA_SUCCESS, cuKernelGetParamInfo(kernel, 2, &offset, &size));
    TRUE_THAT(offset == 16 && size == 16);
    IS(CUDA_ERROR_INVALID_VALUE, cuKernelGetParamInfo(kernel, 3, &offset, &size));
    int threads = 0;
    IS(CUDA_SUCCESS, cuKernelGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel, 0));
    IS(1024, threads);
    IS(CUDA_SUCCESS, cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000, kernel, 0));
    IS(CUDA_SUCCESS, cuKernelGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 0));
    IS(60000, threads);
    IS(CUDA_SUCCESS, cuKernelSetCacheConfig(kernel, CU_FUNC_CACHE_PREFER_L1, 0));
    IS(CUDA_SUCCESS, cuKernelGetFunction(&function, kernel));
    IS(CUDA_SUCCESS, cuFuncGetName(&name, function));
    TRUE_THAT(strcmp(name, "count") == 0);
    // What is set for the function itself stays, whatever is set for the kernel, which tells what was set for it.
    const CUfunction_attribute most = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    int told = 0;
    IS(CUDA_SUCCESS, cuFuncGetAttribute(&told, most, function));
    IS(60000, told);
    IS(CUDA_SUCCESS, cuFuncSetAttribute(function, most, 50000));
    IS(CUDA_SUCCESS, cuKernelGetAttribute(&told, most, kernel, 0));
    IS(60000, told);
    IS(CUDA_SUCCESS, cuKernelSetAttribute(most, 55000, kernel, 0));
    IS(CUDA_SUCCESS, cuFuncGetAttribute(&told, most, function));
    IS(50000, told);
    IS(CUDA_SUCCESS, cuKernelGetAttribute(&told, most, kernel, 0));
    IS(55000, told);
    IS(CUDA_ERROR_INVALID_DEVICE, cuKernelSetAttribute(most, 1000, kernel, 99));
    IS(CUDA_ERROR_INVALID_VALUE, cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NUM_REGS, 8, kernel, 0));
    IS(CUDA_ERROR_INVALID_VALUE, cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, 3));
    IS(CUDA_SUCCESS, cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, -1));
    IS(CUDA_SUCCESS, cuFuncGetAttribute(&told, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, function));
    IS(1, told);
    IS(CUDA_SUCCESS, cuLibraryGetModule(&module, library));
    CUmodule of_function = nullptr;
    IS(CUDA_SUCCESS, cuFuncGetModule(&of_function, function));
    TRUE_THAT(of_function == module);
    // It belongs to the library, which unloads it.
    IS(CUDA_ERROR_NOT_PERMITTED, cuModuleUnload(module));

    CUdeviceptr p, total;
    unsigned by = 1, got[32];
    Pair pair = {0, 0, 0};
    IS(CUDA_SUCCESS, cuMemAlloc(&p, sizeof got));
    IS(CUDA_SUCCESS, cuMemsetD32(p, 0, 32));
    void *arguments[] = {&p, &by, &pair};
    IS(CUDA_SUCCESS, cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr));
    IS(CUDA_SUCCESS, cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr));
    CUkernel other = nullptr;
    IS(CUDA_SUCCESS, cuLibraryGetKernel(&other, from_file, "count"));
    IS(CUDA_SUCCESS, cuLaunchKernel((CUfunction)other, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr));
    IS(CUDA_SUCCESS, cuMemcpyDtoH(got, p, sizeof got));
    IS(12, got[7]);
    // Each library has its own variables.
    unsigned long long value = 0;
    IS(CUDA_SUCCESS, cuLibraryGetGlobal(&total, &size, library, "total"));
    IS(CUDA_SUCCESS, cuMemcpyDtoH(&value, total, 8));
    IS(5 + 64, value);
    IS(CUDA_SUCCESS, cuLibraryGetGlobal(&total, &size, from_file, "total"));
    IS(CUDA_SUCCESS, cuMemcpyDtoH(&value, total, 8));
    IS(5 + 32, value);
    IS(CUDA_ERROR_NOT_FOUND, cuLibraryGetGlobal(&total, &size, library, "absent"));
    IS(CUDA_ERROR_NOT_FOUND, cuLibraryGetKernel(&other, library, "absent"));
    IS(CUDA_SUCCESS, cuLibraryUnload(from_file));
    IS(CUDA_SUCCESS, cuLibraryUnload(library));
    IS(CUDA_SUCCESS, cuMemFree(p));
}

static long resident_pages() {
    long all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    REQUIRE(file && fscanf(file, "%ld %ld", &all, &resident) == 2, "cannot read statm");
    fclose(file);
    return resident;
}

// An image that stays where it is, as the program promises, is not copied; any other is. Either serves for a second context.
static void preserved(const std::string &code) {
    const size_t size = 16 << 20;
    std::string image = code;
    // Short lines: NVIDIA's compiler takes 10 s for a comment of 16 MiB.
    while (image.size() < size) image += "// nothing else is in this line of the image, nor in any of those behind it\n";
    image.resize(size, '\n');
    CUlibraryOption option = CU_LIBRARY_BINARY_IS_PRESERVED;
    void *yes = (void *)1, *no = nullptr;
    CUlibrary libraries[4], copied = nullptr;
    CUkernel kernels[2];
    long before = 0;
    for (CUlibrary &library : libraries) {
        IS(CUDA_SUCCESS, cuLibraryLoadData(&library, image.c_str(), nullptr, nullptr, 0, &option, &yes, 1));
        if (library == libraries[0]) before = resident_pages();
    }
    const long grown = (resident_pages() - before) * sysconf(_SC_PAGESIZE);
    REQUIRE(grown < (long)size * 3 / 2, "three libraries of %zu bytes that stay in place took %ld", size, grown);
    std::string passing = code;
    IS(CUDA_SUCCESS, cuLibraryLoadData(&copied, passing.c_str(), nullptr, nullptr, 0, &option, &no, 1));
    passing.assign(passing.size(), '?');
    IS(CUDA_SUCCESS, cuLibraryGetKernel(&kernels[0], libraries[3], "nothing"));
    IS(CUDA_SUCCESS, cuLibraryGetKernel(&kernels[1], copied, "nothing"));
    CUcontext other;
    IS(CUDA_SUCCESS, cuCtxCreate(&other, nullptr, 0, 0));
    for (CUkernel kernel : kernels) IS(CUDA_SUCCESS, cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
    IS(CUDA_SUCCESS, cuCtxSynchronize());
    IS(CUDA_SUCCESS, cuCtxDestroy(other));
    IS(CUDA_SUCCESS, cuLibraryUnload(copied));
    for (CUlibrary library : libraries) IS(CUDA_SUCCESS, cuLibraryUnload(library));
}

// Modules, as they were before libraries.
static void by_module(const std::string &code) {
    CUmodule module = nullptr;
    CUfunction all[3] = {}, function = nullptr;
    unsigned count = 0;
    IS(CUDA_SUCCESS, cuModuleLoadData(&module, code.c_str()));
    IS(CUDA_SUCCESS, cuModuleGetFunctionCount(&count, module));
    IS(2, count);
    IS(CUDA_SUCCESS, cuModuleEnumerateFunctions(all, 2, module));
    const char *first = nullptr, *second = nullptr;
    IS(CUDA_SUCCESS, cuFuncGetName(&first, all[0]));
    IS(CUDA_SUCCESS, cuFuncGetName(&second, all[1]));
    TRUE_THAT((std::string(first) == "count" && std::string(second) == "nothing") || (std::string(first) == "nothing" && std::string(second) == "count"));
    IS(CUDA_SUCCESS, cuModuleGetFunction(&function, module, "count"));
    TRUE_THAT(function == all[0] || function == all[1]);
    // A function of the same name has the same text in another module: programs compare the addresses.
    CUmodule again = nullptr;
    CUfunction same = nullptr;
    const char *here = nullptr, *there = nullptr;
    IS(CUDA_SUCCESS, cuModuleLoadData(&again, code.c_str()));
    IS(CUDA_SUCCESS, cuModuleGetFunction(&same, again, "count"));
    IS(CUDA_SUCCESS, cuFuncGetName(&here, function));
    IS(CUDA_SUCCESS, cuFuncGetName(&there, same));
    TRUE_THAT(function != same && here == there);
    IS(CUDA_SUCCESS, cuModuleUnload(again));
    size_t offset = 0, size = 0;
    IS(CUDA_SUCCESS, cuFuncGetParamInfo(function, 1, &offset, &size));
    TRUE_THAT(offset == 8 && size == 4);
    CUfunctionLoadingState state = (CUfunctionLoadingState)9;
    IS(CUDA_SUCCESS, cuFuncLoad(function));
    IS(CUDA_SUCCESS, cuFuncIsLoaded(&state, function));
    IS(CU_FUNCTION_LOADING_STATE_LOADED, state);
    CUdeviceptr address = 0;
    IS(CUDA_SUCCESS, cuModuleGetGlobal(&address, &size, module, "step"));
    IS(4, size);
    IS(CUDA_SUCCESS, cuModuleGetGlobal(&address, nullptr, module, "total"));
    IS(CUDA_SUCCESS, cuModuleGetGlobal(nullptr, &size, module, "total"));
    IS(8, size);
    IS(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal(&address, &size, module, "absent"));
    IS(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&function, module, "absent"));
    IS(CUDA_ERROR_INVALID_VALUE, cuModuleGetFunction(&function, module, nullptr));
    IS(CUDA_SUCCESS, cuModuleUnload(module));
    CUmoduleLoadingMode mode = (CUmoduleLoadingMode)9;
    IS(CUDA_SUCCESS, cuModuleGetLoadingMode(&mode));
    const char *asked = getenv("CUDA_MODULE_LOADING");
    IS(asked && strcmp(asked, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING, mode);
    IS(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, "neither PTX nor a binary"));
    IS(CUDA_ERROR_INVALID_VALUE, cuModuleLoadData(&module, nullptr));
    IS(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&module, "/no/such/file"));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const std::string code = ptx;
    RETURNS(cudaSuccess, cudaFree(nullptr));
    by_runtime(code);
    by_driver(code);
    preserved(code);
    by_module(code);
    return verdict();
}
