// Host memory in virtual memory management: pieces at a location of the host that the processor and kernels share, grown side by side and moved to other addresses, as XGBoost does with its
// staging memory.
#define PROGRAM "vmm_host"
#include "driver.h"

#include <vector>

__global__ void add(unsigned *data, size_t n, unsigned by) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) data[i] += by;
}

static CUmemAccessDesc access_of[2];

static CUmemGenericAllocationHandle make(size_t size) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    CUmemGenericAllocationHandle handle;
    DRIVER(cuMemCreate(&handle, size, &prop, 0));
    return handle;
}

static void map(CUdeviceptr at, size_t size, CUmemGenericAllocationHandle handle) {
    DRIVER(cuMemMap(at, size, 0, handle, 0));
    DRIVER(cuMemSetAccess(at, size, access_of, 2));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    CHECK(cudaFree(nullptr));
    int supported = 0;
    DRIVER(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    REQUIRE(supported == 1, "the device does not support it");
    access_of[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access_of[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    for (CUmemAccessDesc &desc : access_of) desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    size_t granule = 0;
    DRIVER(cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    REQUIRE(granule > 0 && (granule & (granule - 1)) == 0, "the granularity is %zu", granule);

    // New memory is zero. The processor writes, a kernel adds, the processor reads.
    CUdeviceptr base = 0;
    DRIVER(cuMemAddressReserve(&base, granule, 0, 0, 0));
    CUmemGenericAllocationHandle first = make(granule);
    map(base, granule, first);
    unsigned *words = (unsigned *)base;
    const size_t n = granule / sizeof *words;
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) wrong += words[i] != 0;
    REQUIRE(wrong == 0, "%zu words of new memory are not 0", wrong);
    std::vector<unsigned> expected(n);
    for (size_t i = 0; i < n; i++) words[i] = expected[i] = (unsigned)random.next();
    add<<<64, 256>>>(words, n, 3);
    CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < n; i++) wrong += words[i] != expected[i] + 3;
    REQUIRE(wrong == 0, "%zu words are wrong after a kernel", wrong);

    // It is pinned memory for copies, and what it is said to be.
    unsigned type = 0;
    DRIVER(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, base + 64));
    printf("memory type %u\n", type);
    unsigned *device;
    CHECK(cudaMalloc(&device, granule));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemcpyAsync(device, words, granule, cudaMemcpyDefault, stream));
    add<<<64, 256, 0, stream>>>(device, n, 4);
    CHECK(cudaMemcpyAsync(words, device, granule, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < n; i++) wrong += words[i] != expected[i] + 7;
    REQUIRE(wrong == 0, "%zu words are wrong after copies", wrong);

    // Growth: the old addresses go, its bytes appear at the new ones, with new memory behind them.
    CUdeviceptr larger = 0;
    DRIVER(cuMemAddressReserve(&larger, 3 * granule, 0, 0, 0));
    DRIVER(cuMemUnmap(base, granule));
    map(larger, granule, first);
    DRIVER(cuMemAddressFree(base, granule));
    CUmemGenericAllocationHandle second = make(2 * granule);
    map(larger + granule, 2 * granule, second);
    words = (unsigned *)larger;
    for (size_t i = 0; i < n; i++) wrong += words[i] != expected[i] + 7;
    REQUIRE(wrong == 0, "%zu words are wrong at the new address", wrong);
    for (size_t i = 0; i < 2 * n; i++) words[n + i] = (unsigned)i;
    add<<<64, 256>>>(words, 3 * n, 5);
    CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < n; i++) wrong += words[i] != expected[i] + 12;
    for (size_t i = 0; i < 2 * n; i++) wrong += words[n + i] != (unsigned)i + 5;
    REQUIRE(wrong == 0, "%zu words of both pieces are wrong", wrong);
    DRIVER(cuMemsetD32(larger + granule, 11, n));
    for (size_t i = 0; i < n; i++) wrong += words[n + i] != 11;
    REQUIRE(wrong == 0, "%zu words are wrong after a fill", wrong);

    // What it was made with, and who may use it.
    CUmemAllocationProp told = {};
    DRIVER(cuMemGetAllocationPropertiesFromHandle(&told, second));
    printf("type %d, location %d\n", (int)told.type, (int)told.location.type);
    unsigned long long flags = 0;
    DRIVER(cuMemGetAccess(&flags, &access_of[0].location, larger + granule));
    printf("access of the device %llu\n", flags);
    CUmemGenericAllocationHandle again;
    DRIVER(cuMemRetainAllocationHandle(&again, (void *)(larger + granule + 4)));
    REQUIRE(again == second, "another handle for the same memory");
    DRIVER(cuMemRelease(again));

    // A handle can go before its mapping.
    DRIVER(cuMemRelease(first));
    DRIVER(cuMemRelease(second));
    REQUIRE(words[0] == expected[0] + 12, "memory without its handle is %u", words[0]);
    DRIVER(cuMemUnmap(larger, 3 * granule));
    DRIVER(cuMemAddressFree(larger, 3 * granule));

    // Refused: a node that is not there.
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    prop.location.id = 4000;
    REQUIRE(cuMemCreate(&first, granule, &prop, 0) != CUDA_SUCCESS, "memory of NUMA node 4000");
    CHECK(cudaFree(device));
    return pass("shared with kernels, copied, grown, moved, and given back");
}
