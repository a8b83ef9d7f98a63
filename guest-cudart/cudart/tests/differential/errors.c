// Prints a runtime library's errors for bad launches, unknown functions, failed stubs and failed contexts, one line per
// call: the call, its result, and the last error after it. Compiled for either version of the runtime API.
//
//   errors FATBIN        the fat binary of errors.ptx
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t);

// Replacements for nvcc's stubs. Only their addresses matter, so each does something different to stay distinct.
static volatile int called;
static void nothing(void) { called = 1; }
static void bounded(void) { called = 2; }
static void store(void) { called = 3; }
static void missing(void) { called = 4; }
static void unregistered(void) { called = 5; }

#define SAY(call)                                                                                                        \
    do {                                                                                                                 \
        cudaGetLastError();                                                                                              \
        int answer_ = (call);                                                                                            \
        printf("%-90s %d, last %d\n", #call, answer_, (int)cudaGetLastError());                                          \
    } while (0)
#define D(x, y, z) ((dim3){x, y, z})
#define ONE D(1, 1, 1)

static void *no_arguments[1];
static cudaEvent_t event;

static void launches(void) {
    SAY(cudaLaunchKernel(nothing, ONE, D(1024, 1, 1), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, ONE, D(1025, 1, 1), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, ONE, D(0, 1, 1), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, D(0, 1, 1), ONE, no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, ONE, D(32, 32, 2), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, ONE, D(1, 1, 65), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, D(1, 65536, 1), ONE, no_arguments, 0, 0));
    SAY(cudaLaunchKernel(nothing, ONE, ONE, no_arguments, 64 << 20, 0));
    SAY(cudaLaunchKernel(nothing, ONE, ONE, no_arguments, 48 * 1024 + 1, 0));
    SAY(cudaLaunchKernel(bounded, ONE, D(65, 1, 1), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(unregistered, ONE, ONE, no_arguments, 0, 0));
    SAY(cudaLaunchKernel(unregistered, ONE, D(1025, 1, 1), no_arguments, 0, 0));
    SAY(cudaLaunchKernel(0, ONE, ONE, no_arguments, 0, 0));
    SAY(cudaLaunchKernel(missing, ONE, ONE, no_arguments, 0, 0));
    SAY(cudaLaunchCooperativeKernel(nothing, ONE, D(1025, 1, 1), no_arguments, 0, 0));
    SAY(cudaLaunchCooperativeKernel(unregistered, ONE, ONE, no_arguments, 0, 0));
    SAY(cudaLaunchCooperativeKernel(nothing, D(1 << 20, 1, 1), D(1024, 1, 1), no_arguments, 0, 0));
    cudaLaunchConfig_t config;
    memset(&config, 0, sizeof config);
    config.gridDim = ONE;
    config.blockDim = D(1025, 1, 1);
    SAY(cudaLaunchKernelExC(&config, nothing, no_arguments));
    SAY(cudaLaunchKernelExC(&config, unregistered, no_arguments));
    config.blockDim = ONE;
    SAY(cudaLaunchKernelExC(&config, nothing, no_arguments));
}

static void functions(void) {
    struct cudaFuncAttributes attributes;
    SAY(cudaFuncGetAttributes(&attributes, nothing));
    SAY(cudaFuncGetAttributes(&attributes, unregistered));
    SAY(cudaFuncGetAttributes(&attributes, 0));
    SAY(cudaFuncGetAttributes(0, nothing));
    SAY(cudaFuncGetAttributes(&attributes, missing));
    SAY(cudaFuncSetAttribute(unregistered, cudaFuncAttributeMaxDynamicSharedMemorySize, 0));
    SAY(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 20));
    SAY(cudaFuncSetCacheConfig(unregistered, cudaFuncCachePreferNone));
    SAY(cudaFuncSetCacheConfig(0, cudaFuncCachePreferNone));
    int blocks;
    SAY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, unregistered, 32, 0));
    SAY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, 0, 0));
    SAY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(0, nothing, 32, 0));
    const char *name;
    SAY(cudaFuncGetName(&name, unregistered));
    SAY(cudaFuncGetName(&name, 0));
    size_t offset, size;
    SAY(cudaFuncGetParamInfo(unregistered, 0, &offset, &size));
    cudaFunction_t function;
    SAY(cudaGetFuncBySymbol(&function, unregistered));
    SAY(cudaGetFuncBySymbol(&function, 0));
    SAY(cudaGetFuncBySymbol(&function, nothing));
}

// Prints what became of a kernel handle, which is set to 5 before the call.
static void say_kernel(cudaKernel_t kernel, void (*function)(void)) {
    printf("    the output is %s\n", kernel == (void *)5            ? "untouched"
                                     : !kernel                      ? "NULL"
                                     : kernel == (void *)function   ? "the host function"
                                                                    : "a handle");
}

#define GET(get, function)                                                                                               \
    do {                                                                                                                 \
        cudaKernel_t kernel = (cudaKernel_t)5;                                                                           \
        SAY(get(&kernel, function));                                                                                     \
        say_kernel(kernel, (void (*)(void))function);                                                                    \
    } while (0)

static void stubs(void) {
    cudaKernel_t kernel;
    SAY(__cudaGetKernel(&kernel, nothing));
    SAY(__cudaLaunchKernel(kernel, ONE, ONE, no_arguments, 0, 0));
    SAY(__cudaLaunchKernel(kernel, ONE, D(1025, 1, 1), no_arguments, 0, 0));
    GET(__cudaGetKernel, unregistered);
    GET(__cudaGetKernel, missing);
    GET(__cudaGetKernel, 0);
    SAY(__cudaLaunchKernel((cudaKernel_t)nothing, ONE, ONE, no_arguments, 0, 0));
    SAY(__cudaLaunchKernel((cudaKernel_t)unregistered, ONE, ONE, no_arguments, 0, 0));
    SAY(__cudaLaunchKernel((cudaKernel_t)missing, ONE, ONE, no_arguments, 0, 0));
    SAY(__cudaLaunchKernel(0, ONE, ONE, no_arguments, 0, 0));
    GET(cudaGetKernel, unregistered);
    GET(cudaGetKernel, missing);
    GET(cudaGetKernel, 0);
    SAY(cudaGetKernel(0, nothing));
}

static void events(void) {
    float milliseconds;
    SAY(cudaEventCreate(&event));
    SAY(cudaEventElapsedTime(0, event, event));
    SAY(cudaEventElapsedTime(0, 0, event));
    SAY(cudaEventElapsedTime(&milliseconds, 0, event));
    SAY(cudaEventElapsedTime(&milliseconds, event, event));
    SAY(cudaEventRecord(event, 0));
    SAY(cudaEventElapsedTime(0, event, event));
}

static void failed_context(void) {
    void *wild = (void *)16, *memory;
    int value = 1, device;
    void *arguments[] = {&wild, &value};
    SAY(cudaLaunchKernel(store, ONE, ONE, arguments, 0, 0));
    SAY(cudaDeviceSynchronize());
    int synchronized = cudaDeviceSynchronize();
    int peeked = cudaPeekAtLastError(), taken = cudaGetLastError(), again = cudaGetLastError();
    printf("synchronized %d, peeked %d, taken %d, again %d\n", synchronized, peeked, taken, again);
    SAY(cudaLaunchKernel(nothing, ONE, ONE, no_arguments, 0, 0));
    SAY(cudaMalloc(&memory, 16));
    SAY(cudaGetDevice(&device));
    SAY(cudaLaunchKernel(0, ONE, ONE, no_arguments, 0, 0));
    SAY(cudaEventElapsedTime(0, event, event));
    cudaDeviceSynchronize();
    int reset = cudaDeviceReset(), last = cudaGetLastError();
    printf("reset %d, last %d\n", reset, last);
    SAY(cudaMalloc(&memory, 16));
    SAY(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    static char image[1 << 16];
    static struct {
        int magic, version;
        const void *data;
        void *unused;
    } wrapper = {0x466243b1, 1, image, 0};
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : 0;
    if (!file || fread(image, 1, sizeof image, file) == 0) {
        fprintf(stderr, "usage: errors FATBIN\n");
        return 2;
    }
    setvbuf(stdout, 0, _IOLBF, 0);
    void **binary = __cudaRegisterFatBinary(&wrapper);
    __cudaRegisterFunction(binary, (char *)nothing, "nothing", "nothing", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFunction(binary, (char *)bounded, "bounded", "bounded", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFunction(binary, (char *)store, "store", "store", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFunction(binary, (char *)missing, "missing", "missing", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFatBinaryEnd(binary);
    int version = 0;
    cudaRuntimeGetVersion(&version);
    printf("runtime %d\n", version);
    launches();
    functions();
    stubs();
    events();
    failed_context();
    return 0;
}
