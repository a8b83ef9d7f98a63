// Asking for functions by name: for every CUDA version, with every flag, by the driver and by the runtime; which are found and
// which of two forms they are, printed, and used.
#define PROGRAM "entry_points"
#include "cases.h"
#include <cuda.h>

typedef CUresult (*Allocate)(CUdeviceptr *, size_t);
typedef CUresult (*Free)(CUdeviceptr);
typedef CUresult (*Number)(int *);

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const char *names[] = {"cuInit", "cuDeviceGetCount", "cuMemAlloc", "cuMemFree", "cuMemcpyHtoD", "cuMemcpyDtoHAsync", "cuStreamCreate", "cuStreamQuery", "cuLaunchKernel",
                           "cuLaunchKernelEx", "cuGraphInstantiate", "cuGraphAddKernelNode", "cuGraphAddNode", "cuCtxCreate", "cuCtxDestroy", "cuEventElapsedTime", "cuEventRecord",
                           "cuMemAllocAsync", "cuMemAdvise", "cuMemPrefetchAsync", "cuLibraryLoadData", "cuKernelGetFunction", "cuGetProcAddress", "cuDeviceGetUuid",
                           "cuStreamBeginCapture", "cuStreamGetCaptureInfo", "cuStreamWaitValue32", "cuTensorMapEncodeTiled", "cuModuleGetGlobal", "cuPointerGetAttributes",
                           "cuMemAlloc_v2", "cuNoSuchFunction", ""};
    IS(CUDA_SUCCESS, cuInit(0));
    for (const char *name : names) {
        printf("%s:", name);
        for (int version : {2000, 3020, 4000, 7000, 10000, 11000, 11040, 12000, 12030, 12080, 13000, 14000}) {
            printf(" %d", version);
            for (cuuint64_t flags : {CU_GET_PROC_ADDRESS_DEFAULT, CU_GET_PROC_ADDRESS_LEGACY_STREAM, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM}) {
                void *function = (void *)1;
                CUdriverProcAddressQueryResult why = (CUdriverProcAddressQueryResult)9;
                CUresult answer = cuGetProcAddress(name, &function, version, flags, &why);
                cases++;
                printf("/%d:%d:%s", (int)answer, (int)why, function == nullptr ? "null" : function == (void *)1 ? "untouched" : "found");
            }
        }
        printf("\n");
    }
    void *function = nullptr;
    CUdriverProcAddressQueryResult why;
    IS(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress("cuInit", &function, 12000, 77, &why));
    IS(CUDA_SUCCESS, cuGetProcAddress("cuInit", &function, 12000, 0, nullptr));

    // Same name, two streams of default: two functions; a name without a stream: one.
    void *legacy = nullptr, *per_thread = nullptr;
    IS(CUDA_SUCCESS, cuGetProcAddress("cuMemcpyHtoDAsync", &legacy, 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &why));
    IS(CUDA_SUCCESS, cuGetProcAddress("cuMemcpyHtoDAsync", &per_thread, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &why));
    TRUE_THAT(legacy != per_thread);
    IS(CUDA_SUCCESS, cuGetProcAddress("cuMemAlloc", &legacy, 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &why));
    IS(CUDA_SUCCESS, cuGetProcAddress("cuMemAlloc", &per_thread, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &why));
    TRUE_THAT(legacy == per_thread);

    // By the runtime, and used.
    cudaDriverEntryPointQueryResult found;
    void *allocate = nullptr, *release = nullptr, *count = nullptr;
    RETURNS(cudaSuccess, cudaGetDriverEntryPointByVersion("cuMemAlloc", &allocate, 12000, cudaEnableDefault, &found));
    IS(cudaDriverEntryPointSuccess, found);
    TRUE_THAT(allocate == legacy);
    RETURNS(cudaSuccess, cudaGetDriverEntryPointByVersion("cuMemFree", &release, 12000, cudaEnableLegacyStream, &found));
    RETURNS(cudaSuccess, cudaGetDriverEntryPointByVersion("cuDeviceGetCount", &count, 12000, cudaEnablePerThreadDefaultStream, &found));
    RETURNS(cudaSuccess, cudaGetDriverEntryPointByVersion("cuNoSuchFunction", &function, 12000, cudaEnableDefault, &found));
    IS(cudaDriverEntryPointSymbolNotFound, found);
    TRUE_THAT(function == nullptr);
    RETURNS(cudaSuccess, cudaGetDriverEntryPointByVersion("cuGraphAddNode", &function, 11000, cudaEnableDefault, &found));
    IS(cudaDriverEntryPointVersionNotSufficent, found);
    void *plain;
    RETURNS(cudaSuccess, cudaMalloc(&plain, 16));
    CUdeviceptr p = 0;
    int devices = 0;
    if (!allocate || !release || !count) fail("a function is missing");
    IS(CUDA_SUCCESS, ((Allocate)allocate)(&p, 100));
    IS(CUDA_SUCCESS, ((Free)release)(p));
    IS(CUDA_SUCCESS, ((Number)count)(&devices));
    TRUE_THAT(devices >= 1);
    return verdict();
}
