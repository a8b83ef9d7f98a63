// What CUDA knows of an address: of every kind of memory, by the runtime and by the driver, inside and past it.
#define PROGRAM "pointer_attributes"
#include "cases.h"
#include <cuda.h>
#include <vector>

__device__ int variable[256];
__constant__ int constant[16];
__managed__ int managed_variable;
__device__ const char *text;

__global__ void give_text() { text = "a text of the device"; }

static void runtime(const char *what, const void *p, cudaMemoryType type, bool on_device, bool on_host) {
    cudaPointerAttributes a;
    memset(&a, 0x55, sizeof a);
    cudaError_t answer = cudaPointerGetAttributes(&a, p);
    expect_(what, cudaSuccess, answer);
    if (a.type != type || (a.devicePointer == p) != on_device || (a.hostPointer == p) != on_host)
        not_met((std::string(what) + ": type " + std::to_string(a.type) + (a.devicePointer == p ? " device" : "") + (a.hostPointer == p ? " host" : "")).c_str());
    cases++;
    if (type != cudaMemoryTypeUnregistered) IS(0, a.device);
    else IS(-2, a.device);
}

static void driver(const char *what, const void *p, int type, int managed, size_t size, size_t offset, bool pooled = false) {
    CUdeviceptr address = (CUdeviceptr)p, start = 0;
    unsigned kind = 99, is_managed = 99, legacy = 99;
    int ordinal = 99, mapped = 99;
    size_t range = 0;
    CUcontext context = nullptr, current = nullptr;
    unsigned long long id = 0, again = 0;
    std::string name = what;
    auto is = [&](const char *which, long long want, long long got) { expect_value((name + ", " + which).c_str(), want, got); };
    is("memory type asked", CUDA_SUCCESS, cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address));
    is("memory type", type, kind);
    is("managed asked", CUDA_SUCCESS, cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address));
    is("managed", managed, is_managed & 0xff);
    is("ordinal asked", CUDA_SUCCESS, cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address));
    is("ordinal", 0, ordinal);
    is("mapped asked", CUDA_SUCCESS, cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, address));
    is("mapped", 1, mapped & 0xff);
    is("IPC asked", CUDA_SUCCESS, cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address));
    is("range's start asked", CUDA_SUCCESS, cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address));
    is("range's start", address - offset, start);
    is("range's size asked", CUDA_SUCCESS, cuPointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address));
    is("range's size", size, range);
    is("context asked", CUDA_SUCCESS, cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, address));
    cuCtxGetCurrent(&current);
    // A pool's memory is a device's, whichever context asked for it.
    if (!managed) is("context", pooled ? 0 : (long long)current, (long long)context);
    is("buffer's number asked", CUDA_SUCCESS, cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address - offset));
    is("buffer's number again", CUDA_SUCCESS, cuPointerGetAttribute(&again, CU_POINTER_ATTRIBUTE_BUFFER_ID, address));
    is("one number for one buffer", 1, id == again && id != 0);
    printf("%s: IPC %u\n", what, legacy & 0xff);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    char *device, *pinned, *mapped, *managed, *ordered;
    CHECK(cudaMalloc(&device, 5000));
    CHECK(cudaMallocHost(&pinned, 5000));
    CHECK(cudaHostAlloc(&mapped, 5000, cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaMallocManaged(&managed, 5000));
    CHECK(cudaMallocAsync(&ordered, 5000, 0));
    CHECK(cudaStreamSynchronize(0));
    std::vector<char> room(3 * 65536);
    char *registered = (char *)(((size_t)room.data() + 4095) & ~(size_t)4095);
    CHECK(cudaHostRegister(registered, 65536, cudaHostRegisterDefault));
    void *global;
    CHECK(cudaGetSymbolAddress(&global, variable));
    int local = 0;

    runtime("device memory", device, cudaMemoryTypeDevice, true, false);
    runtime("inside it", device + 4999, cudaMemoryTypeDevice, true, false);
    runtime("pinned memory", pinned, cudaMemoryTypeHost, true, true);
    runtime("inside pinned memory", pinned + 77, cudaMemoryTypeHost, true, true);
    runtime("mapped memory", mapped + 1, cudaMemoryTypeHost, true, true);
    runtime("registered memory", registered + 4097, cudaMemoryTypeHost, true, true);
    runtime("managed memory", managed + 9, cudaMemoryTypeManaged, true, true);
    runtime("a managed variable", &managed_variable, cudaMemoryTypeManaged, true, true);
    runtime("stream-ordered memory", ordered, cudaMemoryTypeDevice, true, false);
    runtime("a variable", global, cudaMemoryTypeDevice, true, false);
    runtime("the stack", &local, cudaMemoryTypeUnregistered, false, true);
    runtime("pageable memory beside registered", registered + 65536 + 4096, cudaMemoryTypeUnregistered, false, true);

    driver("device memory", device + 100, CU_MEMORYTYPE_DEVICE, 0, 5000, 100);
    driver("pinned memory", pinned + 100, CU_MEMORYTYPE_HOST, 0, 5000, 100);
    driver("registered memory", registered + 100, CU_MEMORYTYPE_HOST, 0, 65536, 100);
    driver("managed memory", managed + 100, CU_MEMORYTYPE_DEVICE, 1, 5000, 100);
    driver("stream-ordered memory", ordered + 100, CU_MEMORYTYPE_DEVICE, 0, 5000, 100, true);

    // The host's and the device's view.
    CUdeviceptr seen = 0;
    void *host = nullptr;
    IS(CUDA_SUCCESS, cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, (CUdeviceptr)(pinned + 8)));
    TRUE_THAT(seen == (CUdeviceptr)(pinned + 8));
    IS(CUDA_SUCCESS, cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, (CUdeviceptr)(pinned + 8)));
    TRUE_THAT(host == pinned + 8);
    IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, (CUdeviceptr)device));
    IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, (CUdeviceptr)&local));
    IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)&local));
    IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(nullptr, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)device));
    IS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&seen, (CUpointer_attribute)1000, (CUdeviceptr)device));

    // Several at once: what cannot be told is null, and that is no error.
    unsigned type = 7, managed_flag = 7;
    CUdeviceptr start = 7;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
    void *places[] = {&type, &managed_flag, &start};
    IS(CUDA_SUCCESS, cuPointerGetAttributes(3, wanted, places, (CUdeviceptr)(managed + 10)));
    TRUE_THAT(type == CU_MEMORYTYPE_DEVICE && (managed_flag & 0xff) == 1 && start == (CUdeviceptr)managed);
    type = 7, managed_flag = 7, start = 7;
    IS(CUDA_SUCCESS, cuPointerGetAttributes(3, wanted, places, (CUdeviceptr)&local));
    TRUE_THAT(type == 0 && (managed_flag & 0xff) == 0);

    // Synchronous copies only, as sets of the driver's.
    int on = 1;
    IS(CUDA_SUCCESS, cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (CUdeviceptr)device));
    int is_on = 0;
    IS(CUDA_SUCCESS, cuPointerGetAttribute(&is_on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (CUdeviceptr)device));
    IS(1, is_on & 0xff);

    CUdeviceptr base = 0;
    size_t size = 0;
    IS(CUDA_SUCCESS, cuMemGetAddressRange(&base, &size, (CUdeviceptr)(device + 4000)));
    TRUE_THAT(base == (CUdeviceptr)device && size == 5000);
    // A text that only a kernel has the address of.
    CUdeviceptr literal;
    give_text<<<1, 1>>>();
    CHECK(cudaMemcpyFromSymbol(&literal, text, sizeof literal));
    IS(CUDA_SUCCESS, cuMemGetAddressRange(&base, &size, literal));
    TRUE_THAT(base <= literal && literal + sizeof "a text of the device" <= base + size);
    IS(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange(&base, &size, (CUdeviceptr)&local));
    CHECK(cudaHostUnregister(registered));
    runtime("memory that was registered", registered, cudaMemoryTypeUnregistered, false, true);
    CHECK(cudaFreeAsync(ordered, 0));
    CHECK(cudaFree(device));
    CHECK(cudaFree(managed));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(mapped));
    return verdict();
}
