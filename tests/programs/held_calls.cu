// Calls that may wait for the device, while a stream waits for a host function and has work behind it: each comes back, at the latest when the function is done. --full tells which ones
// waited for it, which is the driver's affair.
#define PROGRAM "held_calls"
#include "cases.h"

#include <chrono>
#include <csignal>
#include <cuda.h>
#include <cstdlib>
#include <functional>
#include <unistd.h>

__global__ void touch(unsigned *data) { data[threadIdx.x] += 1; }
__global__ void deep(unsigned *data, int n) {
    unsigned many[512];
    for (int i = 0; i < 512; i++) many[i] = data[0] + i * n;
    for (int i = 0; i < n; i++) many[(i * 7) & 511] += many[(i * 13) & 511];
    data[1] = many[n & 511];
}
__device__ unsigned symbol[16];

static const char *stage = "at the start";
static void out_of_time(int) {
    printf("FAIL " PROGRAM " is stuck in %s\n", stage);
    fflush(stdout);
    _Exit(1);
}

static void CUDART_CB slow(void *done) {
    usleep(60000);
    *(volatile bool *)done = true;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    signal(SIGALRM, out_of_time);
    unsigned *data, host[256] = {};
    cudaStream_t held, other;
    RETURNS(cudaSuccess, cudaMalloc(&data, sizeof host));
    RETURNS(cudaSuccess, cudaMemset(data, 0, sizeof host));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    touch<<<1, 64, 0, held>>>(data);
    unsigned runs = 1;

    // `make` before the stream is held, `call` while it is, `after` when it is not any more.
    auto during = [&](const char *what, std::function<void()> make, std::function<cudaError_t()> call, std::function<void()> after = [] {}) {
        stage = what;
        alarm(300);
        if (make) make();
        bool done = false;
        RETURNS(cudaSuccess, cudaLaunchHostFunc(held, slow, &done));
        touch<<<1, 64, 0, held>>>(data);
        runs++;
        usleep(5000);
        auto begin = std::chrono::steady_clock::now();
        cudaError_t got = call();
        bool waited = *(volatile bool *)&done;
        double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
        cases++;
        if (got != cudaSuccess) not_met((std::string(what) + ": " + cudaGetErrorName(got)).c_str());
        if (options.full) printf("%-40s %s %7.2f ms\n", what, waited ? "waits" : "-", ms);
        RETURNS(cudaSuccess, cudaStreamSynchronize(held));
        if (after) after();
    };
    auto driver = [](CUresult result) { return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown; };

    void *p = nullptr;
    cudaStream_t stream;
    cudaEvent_t event;
    cudaArray_t array;
    cudaMipmappedArray_t mipmaps;
    cudaTextureObject_t texture;
    cudaMemPool_t pool;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    const size_t size = 8 << 20;
    cudaChannelFormatDesc floats = cudaCreateChannelDesc<float>();
    auto allocate = [&] { RETURNS(cudaSuccess, cudaMalloc(&p, size)); };
    auto release = [&] { RETURNS(cudaSuccess, cudaFree(p)); };
    auto make_array = [&] { RETURNS(cudaSuccess, cudaMallocArray(&array, &floats, 256, 256)); };
    auto free_array = [&] { RETURNS(cudaSuccess, cudaFreeArray(array)); };

    during("cudaMalloc", nullptr, [&] { return cudaMalloc(&p, size); }, release);
    during("cudaFree", allocate, [&] { return cudaFree(p); });
    during("cudaMalloc of much", nullptr, [&] { return cudaMalloc(&p, 200 << 20); }, release);
    during("cudaFree of much", [&] { RETURNS(cudaSuccess, cudaMalloc(&p, 200 << 20)); }, [&] { return cudaFree(p); });
    during("cudaMallocHost", nullptr, [&] { return cudaMallocHost(&p, size); }, [&] { RETURNS(cudaSuccess, cudaFreeHost(p)); });
    during("cudaFreeHost", [&] { RETURNS(cudaSuccess, cudaMallocHost(&p, size)); }, [&] { return cudaFreeHost(p); });
    auto pinned = [&] {
        RETURNS(cudaSuccess, cudaMallocHost(&p, size));
        RETURNS(cudaSuccess, cudaMemcpyAsync(data + 64, p, 256, cudaMemcpyHostToDevice, other));
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    };
    during("cudaFreeHost of what was copied from", pinned, [&] { return cudaFreeHost(p); });
    during("the first copy from page-locked memory", [&] { RETURNS(cudaSuccess, cudaMallocHost(&p, size)); },
           [&] { return cudaMemcpyAsync(data + 64, p, 256, cudaMemcpyHostToDevice, other); }, [&] {
               RETURNS(cudaSuccess, cudaStreamSynchronize(other));
               RETURNS(cudaSuccess, cudaFreeHost(p));
           });
    auto aligned = [&] { p = aligned_alloc(4096, size); };
    auto and_freed = [&] {
        RETURNS(cudaSuccess, cudaHostUnregister(p));
        free(p);
    };
    during("cudaHostRegister", aligned, [&] { return cudaHostRegister(p, size, 0); }, and_freed);
    during("cudaHostUnregister", [&] {
        aligned();
        RETURNS(cudaSuccess, cudaHostRegister(p, size, 0));
        RETURNS(cudaSuccess, cudaMemcpyAsync(data + 64, p, 256, cudaMemcpyHostToDevice, other));
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    }, [&] { return cudaHostUnregister(p); }, [&] { free(p); });
    during("cudaHostAlloc, mapped, and a kernel on it", nullptr, [&] {
        cudaError_t got = cudaHostAlloc(&p, size, cudaHostAllocMapped);
        touch<<<1, 64, 0, other>>>((unsigned *)p);
        return got;
    }, [&] {
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
        RETURNS(cudaSuccess, cudaFreeHost(p));
    });
    during("cudaFreeHost of what a kernel used", [&] {
        RETURNS(cudaSuccess, cudaHostAlloc(&p, size, cudaHostAllocMapped));
        touch<<<1, 64, 0, other>>>((unsigned *)p);
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    }, [&] { return cudaFreeHost(p); });
    during("cudaMallocManaged", nullptr, [&] { return cudaMallocManaged(&p, size); }, release);
    during("cudaFree of managed memory", [&] { RETURNS(cudaSuccess, cudaMallocManaged(&p, size)); }, [&] { return cudaFree(p); });
    during("cudaMallocArray", nullptr, [&] { return cudaMallocArray(&array, &floats, 256, 256); }, free_array);
    during("cudaFreeArray", make_array, [&] { return cudaFreeArray(array); });
    cudaExtent extent = make_cudaExtent(256, 256, 0);
    auto make_mipmaps = [&] { RETURNS(cudaSuccess, cudaMallocMipmappedArray(&mipmaps, &floats, extent, 3)); };
    during("cudaMallocMipmappedArray", nullptr, [&] { return cudaMallocMipmappedArray(&mipmaps, &floats, extent, 3); },
           [&] { RETURNS(cudaSuccess, cudaFreeMipmappedArray(mipmaps)); });
    during("cudaFreeMipmappedArray", make_mipmaps, [&] { return cudaFreeMipmappedArray(mipmaps); });
    cudaResourceDesc resource = {};
    cudaTextureDesc how = {};
    auto describe = [&] {
        make_array();
        resource.resType = cudaResourceTypeArray;
        resource.res.array.array = array;
    };
    during("cudaCreateTextureObject", describe, [&] { return cudaCreateTextureObject(&texture, &resource, &how, nullptr); }, [&] {
        RETURNS(cudaSuccess, cudaDestroyTextureObject(texture));
        free_array();
    });
    during("cudaDestroyTextureObject", [&] {
        describe();
        RETURNS(cudaSuccess, cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    }, [&] { return cudaDestroyTextureObject(texture); }, free_array);
    during("cudaStreamCreate", nullptr, [&] { return cudaStreamCreate(&stream); }, [&] { RETURNS(cudaSuccess, cudaStreamDestroy(stream)); });
    during("cudaStreamDestroy", [&] {
        RETURNS(cudaSuccess, cudaStreamCreate(&stream));
        touch<<<1, 64, 0, stream>>>(data + 128);
    }, [&] { return cudaStreamDestroy(stream); });
    during("cudaEventCreate and cudaEventDestroy", nullptr, [&] {
        cudaError_t got = cudaEventCreate(&event);
        if (got == cudaSuccess) got = cudaEventRecord(event, other);
        if (got == cudaSuccess) got = cudaEventSynchronize(event);
        return got == cudaSuccess ? cudaEventDestroy(event) : got;
    });
    auto make_graph = [&] {
        RETURNS(cudaSuccess, cudaStreamBeginCapture(other, cudaStreamCaptureModeRelaxed));
        touch<<<1, 64, 0, other>>>(data + 128);
        RETURNS(cudaSuccess, cudaStreamEndCapture(other, &graph));
    };
    during("cudaGraphInstantiate", make_graph, [&] { return cudaGraphInstantiate(&exec, graph, 0); }, [&] {
        RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
        RETURNS(cudaSuccess, cudaGraphDestroy(graph));
    });
    auto make_exec = [&] {
        make_graph();
        RETURNS(cudaSuccess, cudaGraphInstantiate(&exec, graph, 0));
    };
    during("the first cudaGraphLaunch", make_exec, [&] { return cudaGraphLaunch(exec, other); }, [&] {
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
        RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
        RETURNS(cudaSuccess, cudaGraphDestroy(graph));
    });
    during("cudaGraphUpload", make_exec, [&] { return cudaGraphUpload(exec, other); }, [&] {
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
        RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
        RETURNS(cudaSuccess, cudaGraphDestroy(graph));
    });
    during("cudaGraphExecDestroy", [&] {
        make_exec();
        RETURNS(cudaSuccess, cudaGraphLaunch(exec, other));
    }, [&] { return cudaGraphExecDestroy(exec); }, [&] { RETURNS(cudaSuccess, cudaGraphDestroy(graph)); });
    during("cudaGraphExecDestroy behind the host function", [&] { make_exec(); }, [&] {
        cudaError_t got = cudaGraphLaunch(exec, held);
        if (got == cudaSuccess) got = cudaGraphLaunch(exec, held);
        return got == cudaSuccess ? cudaGraphExecDestroy(exec) : got;
    }, [&] { RETURNS(cudaSuccess, cudaGraphDestroy(graph)); });
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    during("cudaMemPoolCreate and an allocation", nullptr, [&] {
        cudaError_t got = cudaMemPoolCreate(&pool, &properties);
        return got == cudaSuccess ? cudaMallocFromPoolAsync(&p, size, pool, other) : got;
    }, [&] {
        RETURNS(cudaSuccess, cudaFreeAsync(p, other));
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
        RETURNS(cudaSuccess, cudaMemPoolDestroy(pool));
    });
    during("cudaMemPoolTrimTo and cudaMemPoolDestroy", [&] {
        RETURNS(cudaSuccess, cudaMemPoolCreate(&pool, &properties));
        RETURNS(cudaSuccess, cudaMallocFromPoolAsync(&p, size, pool, other));
        RETURNS(cudaSuccess, cudaFreeAsync(p, other));
        RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    }, [&] {
        cudaError_t got = cudaMemPoolTrimTo(pool, 0);
        return got == cudaSuccess ? cudaMemPoolDestroy(pool) : got;
    });
    during("cudaFuncSetAttribute", nullptr, [&] { return cudaFuncSetAttribute(touch, cudaFuncAttributeMaxDynamicSharedMemorySize, 1024); });
    during("cudaFuncSetCacheConfig", nullptr, [&] { return cudaFuncSetCacheConfig(touch, cudaFuncCachePreferShared); });
    during("the first launch with much local memory", nullptr, [&] {
        deep<<<1, 32, 0, other>>>(data + 128, 5);
        return cudaGetLastError();
    }, [&] { RETURNS(cudaSuccess, cudaStreamSynchronize(other)); });
    size_t stack = 0;
    RETURNS(cudaSuccess, cudaDeviceGetLimit(&stack, cudaLimitStackSize));
    during("cudaDeviceSetLimit of the stack", nullptr, [&] { return cudaDeviceSetLimit(cudaLimitStackSize, 16384); }, [&] { RETURNS(cudaSuccess, cudaDeviceSetLimit(cudaLimitStackSize, stack)); });
    during("cudaMemcpyToSymbol on another stream", nullptr, [&] { return cudaMemcpyToSymbolAsync(symbol, host, 64, 0, cudaMemcpyHostToDevice, other); }, [&] { RETURNS(cudaSuccess, cudaStreamSynchronize(other)); });
    during("cudaMemGetInfo", nullptr, [&] {
        size_t free_bytes, all;
        return cudaMemGetInfo(&free_bytes, &all);
    });
    during("cudaIpcGetMemHandle", allocate, [&] {
        cudaIpcMemHandle_t handle;
        return cudaIpcGetMemHandle(&handle, p);
    }, release);
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle memory = 0;
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemAccessDesc access = {kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    auto map = [&] {
        CUresult got = cuMemAddressReserve(&at, size, 0, 0, 0);
        if (got == CUDA_SUCCESS) got = cuMemCreate(&memory, size, &kind, 0);
        if (got == CUDA_SUCCESS) got = cuMemMap(at, size, 0, memory, 0);
        return got == CUDA_SUCCESS ? cuMemSetAccess(at, size, &access, 1) : got;
    };
    auto unmap = [&] {
        CUresult got = cuMemUnmap(at, size);
        if (got == CUDA_SUCCESS) got = cuMemRelease(memory);
        return got == CUDA_SUCCESS ? cuMemAddressFree(at, size) : got;
    };
    during("cuMemCreate, cuMemMap, cuMemSetAccess", nullptr, [&] { return driver(map()); }, [&] { IS(CUDA_SUCCESS, unmap()); });
    during("cuMemUnmap, cuMemRelease", [&] { IS(CUDA_SUCCESS, map()); }, [&] { return driver(unmap()); });

    RETURNS(cudaSuccess, cudaStreamSynchronize(held));
    RETURNS(cudaSuccess, cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    TRUE_THAT(host[0] == runs && host[63] == runs);
    RETURNS(cudaSuccess, cudaStreamDestroy(held));
    RETURNS(cudaSuccess, cudaStreamDestroy(other));
    RETURNS(cudaSuccess, cudaFree(data));
    return verdict();
}
