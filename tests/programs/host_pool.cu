// Memory pools of page-locked host memory (CUDA 13.0: CU_MEM_LOCATION_TYPE_HOST): the default pool and one that is made, what kernels, copies and the program
// find there, freed in stream order and used again, attributes and limits; and what is no allocation of such a pool's.
#define PROGRAM "host_pool"
#include "by_name.h"
#include "cases.h"

#include <unistd.h>

#define OK(call) expect_value(#call, 0, (long long)(call))

__global__ void fill(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = value + i;
}

static void CUDART_CB slow(void *) { usleep(20000); }

static cudaStream_t stream, other;

static unsigned long long figure(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
    unsigned long long value = 0;
    CHECK(cudaMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static cudaMemPool_t made(size_t most) {
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeHost;
    props.maxSize = most;
    cudaMemPool_t pool = nullptr;
    CHECK(cudaMemPoolCreate(&pool, &props));
    return pool;
}

static void uses(cudaMemPool_t pool) {
    const int n = 100000;
    int *data, *again, *device;
    CHECK(cudaMalloc(&device, n * sizeof(int)));
    CHECK(cudaMallocFromPoolAsync((void **)&data, n * sizeof(int), pool, stream));
    fill<<<(n + 255) / 256, 256, 0, stream>>>(data, n, 7);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(device, data, n * sizeof(int), cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += data[i] != 7 + i;
    IS(0, wrong);
    // The host writes, a kernel of the same address reads what it wrote over the copy.
    for (int i = 0; i < n; i++) data[i] = -i;
    CHECK(cudaMemcpyAsync(device, data, n * sizeof(int), cudaMemcpyDefault, stream));
    CHECK(cudaMemsetAsync(data, 0x11, 8, stream));
    CHECK(cudaMemcpyAsync(data + 2, device + 5, sizeof(int), cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(data[0] == 0x11111111 && data[1] == 0x11111111 && data[2] == -5 && data[3] == -3);

    CUdeviceptr at = (CUdeviceptr)(data + 4);
    unsigned type = 0;
    CUmemoryPool from = nullptr;
    size_t size = 0;
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at));
    IS(CU_MEMORYTYPE_HOST, type);
    OK(cuPointerGetAttribute(&from, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, at));
    TRUE_THAT(from == (CUmemoryPool)pool);
    OK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at));
    IS(n * sizeof(int), size);
    RETURNS(cudaErrorInvalidValue, cudaFreeHost(data));
    RETURNS(cudaErrorInvalidValue, cudaFreeAsync(data + 1, stream));

    // Freed behind something slow: the same stream has it at once, and what was enqueued before is done before.
    CHECK(cudaLaunchHostFunc(stream, slow, nullptr));
    fill<<<(n + 255) / 256, 256, 0, stream>>>(data, n, 50);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(device, data, n * sizeof(int), cudaMemcpyDefault, stream));
    CHECK(cudaFreeAsync(data, stream));
    CHECK(cudaMallocFromPoolAsync((void **)&again, n * sizeof(int), pool, stream));
    fill<<<(n + 255) / 256, 256, 0, stream>>>(again, n, 1000);
    LAUNCHED();
    int *beside;
    CHECK(cudaMallocFromPoolAsync((void **)&beside, n * sizeof(int), pool, other));
    fill<<<(n + 255) / 256, 256, 0, other>>>(beside, n, 3);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    int first = 0;
    CHECK(cudaMemcpy(&first, device, sizeof first, cudaMemcpyDefault));
    TRUE_THAT(first == 50 && again[0] == 1000 && again[n - 1] == 999 + n && beside[0] == 3 && beside[n - 1] == 2 + n && again != beside);
    OK(cudaFreeAsync(again, stream));
    OK(cudaFreeAsync(beside, other));
    CHECK(cudaDeviceSynchronize());
    IS(0, figure(pool, cudaMemPoolAttrUsedMemCurrent));
    TRUE_THAT(figure(pool, cudaMemPoolAttrUsedMemHigh) >= 2 * n * sizeof(int));
    // Each high-water mark is reset by itself, and none is below what there is now.
    uint64_t nothing = 0;
    OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &nothing));
    IS(0, figure(pool, cudaMemPoolAttrUsedMemHigh));
    TRUE_THAT(figure(pool, cudaMemPoolAttrReservedMemHigh) >= 2 * n * sizeof(int));
    OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &nothing));
    TRUE_THAT(figure(pool, cudaMemPoolAttrReservedMemHigh) >= figure(pool, cudaMemPoolAttrReservedMemCurrent));
    OK(cudaMemPoolTrimTo(pool, 0));
    IS(0, figure(pool, cudaMemPoolAttrReservedMemCurrent));
    // NVIDIA's count of used memory takes no notice of this way.
    CHECK(cudaMallocFromPoolAsync((void **)&again, n * sizeof(int), pool, stream));
    OK(cudaFree(again));
    CHECK(cudaFree(device));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrHostMemoryPoolsSupported, 0));
    IS(1, supported);
    cudaMemLocation host = {}, gpu = {};
    host.type = cudaMemLocationTypeHost;
    gpu.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool = made(0), standard, chosen;
    cudaMemAccessDesc access = {gpu, cudaMemAccessFlagsProtReadWrite};
    cudaMemAccessFlags flags = cudaMemAccessFlagsProtReadWrite;
    OK(cudaMemPoolGetAccess(&flags, pool, &gpu));
    IS(cudaMemAccessFlagsProtNone, flags);
    OK(cudaMemPoolSetAccess(pool, &access, 1));
    OK(cudaMemPoolGetAccess(&flags, pool, &gpu));
    IS(cudaMemAccessFlagsProtReadWrite, flags);
    uses(pool);
    OK(cudaMemGetDefaultMemPool(&standard, &host, cudaMemAllocationTypePinned));
    OK(cudaMemGetMemPool(&chosen, &host, cudaMemAllocationTypePinned));
    TRUE_THAT(standard && chosen == standard && standard != pool);
    OK(cudaMemSetMemPool(&host, cudaMemAllocationTypePinned, pool));
    OK(cudaMemGetMemPool(&chosen, &host, cudaMemAllocationTypePinned));
    TRUE_THAT(chosen == pool);
    OK(cudaMemSetMemPool(&host, cudaMemAllocationTypePinned, standard));
    // No device allocates from it by default.
    RETURNS(cudaErrorInvalidValue, cudaDeviceSetMemPool(0, pool));
    // "Not IPC capable", and never of the NUMA node that a thread happens to be on.
    cudaMemPoolProps none = {};
    cudaMemPool_t refused;
    none.allocType = cudaMemAllocationTypePinned;
    none.location.type = cudaMemLocationTypeHost;
    none.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    RETURNS(cudaErrorInvalidValue, cudaMemPoolCreate(&refused, &none));
    none.handleTypes = cudaMemHandleTypeNone;
    none.location.type = cudaMemLocationTypeHostNumaCurrent;
    RETURNS(cudaErrorInvalidValue, cudaMemPoolCreate(&refused, &none));

    // A pool goes, and what is left of it is freed later.
    int *left;
    CHECK(cudaMallocFromPoolAsync((void **)&left, 4096, pool, stream));
    OK(cudaMemPoolDestroy(pool));
    CHECK(cudaStreamSynchronize(stream));
    left[0] = 5;
    OK(cudaFreeAsync(left, stream));
    RETURNS(cudaErrorInvalidValue, cudaFreeAsync(left, stream));
    RETURNS(cudaErrorInvalidValue, cudaMemPoolDestroy(standard));

    // A limit.
    pool = made(32 << 20);
    void *most, *more;
    OK(cudaMallocFromPoolAsync(&most, 32 << 20, pool, stream));
    RETURNS(cudaErrorMemoryAllocation, cudaMallocFromPoolAsync(&more, 1, pool, stream));
    OK(cudaFreeAsync(most, stream));
    CHECK(cudaStreamSynchronize(stream));
    OK(cudaMemPoolDestroy(pool));

    // A capture frees what graphs have allocated and nothing else.
    void *plain;
    cudaGraph_t graph;
    CHECK(cudaMallocAsync(&plain, 256, stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    RETURNS(cudaErrorInvalidValue, cudaFreeAsync(plain, stream));
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    OK(cudaFreeAsync(plain, stream));
    CHECK(cudaStreamSynchronize(stream));
    return verdict();
}
