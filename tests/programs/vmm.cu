// Virtual memory management by the driver API: addresses reserved, memory made, mapped twice, grown as a pool grows, exported and
// imported as a descriptor, and what must be refused.
#define PROGRAM "vmm"
#include "driver.h"

#include <unistd.h>

#include <vector>

__global__ void add(unsigned *data, size_t n, unsigned by) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) data[i] += by;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    CHECK(cudaFree(nullptr));
    int supported = 0;
    DRIVER(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    REQUIRE(supported == 1, "the device does not support virtual memory management");

    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t granule = 0;
    DRIVER(cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    REQUIRE(granule > 0 && (granule & (granule - 1)) == 0, "the granularity is %zu", granule);

    // Two pieces side by side, written by one copy over both.
    CUdeviceptr base = 0;
    DRIVER(cuMemAddressReserve(&base, 8 * granule, 0, 0, 0));
    CUmemGenericAllocationHandle first, second;
    DRIVER(cuMemCreate(&first, granule, &prop, 0));
    DRIVER(cuMemCreate(&second, 2 * granule, &prop, 0));
    DRIVER(cuMemMap(base, granule, 0, first, 0));
    DRIVER(cuMemMap(base + granule, 2 * granule, 0, second, 0));
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER(cuMemSetAccess(base, 3 * granule, &access, 1));
    unsigned long long flags = 0;
    DRIVER(cuMemGetAccess(&flags, &prop.location, base + 2 * granule));
    REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "access is %llu", flags);
    const size_t n = 3 * granule / 4;
    std::vector<unsigned> words(n), got(n);
    for (unsigned &word : words) word = (unsigned)random.next();
    DRIVER(cuMemcpyHtoD(base, words.data(), n * 4));
    add<<<64, 256>>>((unsigned *)base, n, 5);
    LAUNCHED();
    DRIVER(cuMemcpyDtoH(got.data(), base, n * 4));
    for (size_t i = 0; i < n; i++) REQUIRE(got[i] == words[i] + 5, "word %zu over two pieces", i);

    // The first piece a second time, elsewhere: one memory, two addresses.
    DRIVER(cuMemMap(base + 4 * granule, granule, 0, first, 0));
    DRIVER(cuMemSetAccess(base + 4 * granule, granule, &access, 1));
    add<<<64, 256>>>((unsigned *)(base + 4 * granule), granule / 4, 7);
    LAUNCHED();
    DRIVER(cuMemcpyDtoH(got.data(), base, granule));
    for (size_t i = 0; i < granule / 4; i++) REQUIRE(got[i] == words[i] + 12, "word %zu through another address", i);

    // A handle goes, the memory stays until its last mapping goes; the handle comes again from the address.
    CUmemGenericAllocationHandle again;
    DRIVER(cuMemRelease(first));
    DRIVER(cuMemRetainAllocationHandle(&again, (void *)base));
    CUmemAllocationProp found = {};
    DRIVER(cuMemGetAllocationPropertiesFromHandle(&found, again));
    REQUIRE(found.type == prop.type && found.location.type == CU_MEM_LOCATION_TYPE_DEVICE && found.location.id == 0, "the memory's properties");
    DRIVER(cuMemUnmap(base + 4 * granule, granule));

    // Out by a descriptor and in again, in the same process.
    int fd = -1;
    DRIVER(cuMemExportToShareableHandle(&fd, again, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CUmemGenericAllocationHandle imported;
    DRIVER(cuMemImportFromShareableHandle(&imported, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    DRIVER(cuMemMap(base + 5 * granule, granule, 0, imported, 0));
    DRIVER(cuMemSetAccess(base + 5 * granule, granule, &access, 1));
    DRIVER(cuMemcpyDtoH(got.data(), base + 5 * granule, granule));
    for (size_t i = 0; i < granule / 4; i++) REQUIRE(got[i] == words[i] + 12, "word %zu of what was imported", i);
    DRIVER(cuMemUnmap(base + 5 * granule, granule));
    DRIVER(cuMemRelease(imported));

    // Pointers into it are device pointers.
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, (void *)(base + granule + 4)));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0, "a pointer into it is of type %d", (int)attributes.type);

    // What must be refused.
    CUdeviceptr odd;
    CUmemGenericAllocationHandle none;
    REQUIRE(cuMemAddressReserve(&odd, granule + 1, 0, 0, 0) == CUDA_ERROR_INVALID_VALUE, "half a granule is reserved");
    REQUIRE(cuMemCreate(&none, granule + 512, &prop, 0) == CUDA_ERROR_INVALID_VALUE, "half a granule is made");
    REQUIRE(cuMemMap(base, granule, 0, second, 0) != CUDA_SUCCESS, "two memories at one address");
    REQUIRE(cuMemUnmap(base + granule, granule) == CUDA_ERROR_INVALID_VALUE, "half a mapping is unmapped");
    REQUIRE(cuMemAddressFree(base, 8 * granule) != CUDA_SUCCESS, "addresses with memory go");

    DRIVER(cuMemUnmap(base, granule));
    DRIVER(cuMemRelease(again));
    DRIVER(cuMemUnmap(base + granule, 2 * granule));
    DRIVER(cuMemRelease(second));
    REQUIRE(cuMemRelease(second) != CUDA_SUCCESS, "memory is released twice");

    // Grows piece by piece, as PyTorch's expandable segments do, and keeps what was there.
    std::vector<CUmemGenericAllocationHandle> pieces;
    for (size_t i = 0; i < 8; i++) {
        CUmemGenericAllocationHandle piece;
        DRIVER(cuMemCreate(&piece, granule, &prop, 0));
        DRIVER(cuMemMap(base + i * granule, granule, 0, piece, 0));
        DRIVER(cuMemSetAccess(base + i * granule, granule, &access, 1));
        DRIVER(cuMemsetD32(base + i * granule, (unsigned)i, granule / 4));
        pieces.push_back(piece);
    }
    add<<<64, 256>>>((unsigned *)base, 8 * granule / 4, 100);
    LAUNCHED();
    for (size_t i = 0; i < 8; i++) {
        DRIVER(cuMemcpyDtoH(got.data(), base + i * granule + granule / 2, 4));
        REQUIRE(got[0] == 100 + i, "piece %zu holds %u", i, got[0]);
    }
    for (size_t i = 0; i < 8; i++) {
        DRIVER(cuMemUnmap(base + i * granule, granule));
        DRIVER(cuMemRelease(pieces[i]));
    }
    DRIVER(cuMemAddressFree(base, 8 * granule));

    // Addresses for 120 expandable segments of a large device, of which some are mapped.
    std::vector<CUdeviceptr> segments(120);
    const size_t segment = 159ull << 30;
    for (auto &address : segments) DRIVER(cuMemAddressReserve(&address, segment, 0, 0, 0));
    CUmemGenericAllocationHandle shared;
    DRIVER(cuMemCreate(&shared, granule, &prop, 0));
    for (size_t i : {0, 60, 119}) {
        CUdeviceptr at = segments[i] + segment - granule;
        DRIVER(cuMemMap(at, granule, 0, shared, 0));
        DRIVER(cuMemSetAccess(at, granule, &access, 1));
        DRIVER(cuMemsetD32(at, (unsigned)i, granule / 4));
        add<<<64, 256>>>((unsigned *)at, granule / 4, 100);
        LAUNCHED();
        DRIVER(cuMemcpyDtoH(got.data(), at, granule));
        for (size_t word = 0; word < granule / 4; word++) REQUIRE(got[word] == 100 + i, "word %zu of segment %zu is %u", word, i, got[word]);
        CHECK(cudaPointerGetAttributes(&attributes, (void *)(at + 4)));
        REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0, "a pointer into segment %zu is of type %d", i, (int)attributes.type);
        DRIVER(cuMemUnmap(at, granule));
    }
    DRIVER(cuMemRelease(shared));
    for (auto address : segments) DRIVER(cuMemAddressFree(address, segment));
    return pass("mapped side by side, twice, by a descriptor, and grown");
}
