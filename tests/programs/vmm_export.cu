// A process exports memory as a descriptor and sends it over a socket; another imports it, checks what is there, and changes it.
#define PROGRAM "vmm_export"
#include "driver.h"
#include "other_process.h"

#include <vector>

__global__ void turn(unsigned *data, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) data[i] = ~data[i];
}

static CUdeviceptr map(CUmemGenericAllocationHandle memory, size_t size) {
    CUdeviceptr at = 0;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER(cuMemAddressReserve(&at, size, 0, 0, 0));
    DRIVER(cuMemMap(at, size, 0, memory, 0));
    DRIVER(cuMemSetAccess(at, size, &access, 1));
    return at;
}

static void unmap(CUdeviceptr at, size_t size) {
    DRIVER(cuMemUnmap(at, size));
    DRIVER(cuMemAddressFree(at, size));
}

static unsigned long long handle_types(CUdeviceptr at) {
    unsigned long long types = 99;
    DRIVER(cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, at));
    return types;
}

// What memory says of how it can be exported: that which is mapped, and that of pools.
static void tell_handle_types(CUmemAllocationProp prop, size_t size) {
    for (CUmemAllocationHandleType types : {CU_MEM_HANDLE_TYPE_NONE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) {
        prop.requestedHandleTypes = types;
        CUmemGenericAllocationHandle memory;
        DRIVER(cuMemCreate(&memory, size, &prop, 0));
        CUdeviceptr at = map(memory, size);
        REQUIRE(handle_types(at + size / 2) == types, "mapped memory has handles %llu, and not %d", handle_types(at), types);
        unmap(at, size);
        DRIVER(cuMemRelease(memory));
        CUmemPoolProps properties = {};
        properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = prop.location;
        properties.handleTypes = types;
        CUmemoryPool pool;
        DRIVER(cuMemPoolCreate(&pool, &properties));
        DRIVER(cuMemAllocFromPoolAsync(&at, 4096, pool, nullptr));
        REQUIRE(handle_types(at + 100) == types, "a pool's memory has handles %llu, and not %d", handle_types(at), types);
        DRIVER(cuMemFreeAsync(at, nullptr));
        DRIVER(cuStreamSynchronize(nullptr));
        DRIVER(cuMemPoolDestroy(pool));
    }
}

static int other(int socket) {
    CHECK(cudaFree(nullptr));
    size_t size = 0;
    int fd = receive_fd(socket, &size, sizeof size);
    CUmemGenericAllocationHandle memory;
    DRIVER(cuMemImportFromShareableHandle(&memory, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    CUdeviceptr at = map(memory, size);
    // The mapping keeps the memory.
    DRIVER(cuMemRelease(memory));
    const size_t n = size / 4;
    std::vector<unsigned> words(n);
    DRIVER(cuMemcpyDtoH(words.data(), at, size));
    for (size_t i = 0; i < n; i++) REQUIRE(words[i] == (unsigned)i * 2654435761u, "word %zu in the other process", i);
    turn<<<64, 256>>>((unsigned *)at, n);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    REQUIRE(write(socket, "ok", 2) == 2, "the first process is gone");
    // The first process has released the memory by now: what is mapped here stays.
    char gone;
    REQUIRE(read(socket, &gone, 1) == 1, "the first process is gone");
    DRIVER(cuMemcpyDtoH(words.data(), at, size));
    for (size_t i = 0; i < n; i++) REQUIRE(words[i] == ~((unsigned)i * 2654435761u), "word %zu after its maker let it go", i);
    unmap(at, size);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && std::string(argv[1]) == "other") return other(atoi(argv[2]));
    parse_options(argc, argv);
    const OtherProcess second = start_other(argv);
    CHECK(cudaFree(nullptr));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t granule = 0;
    DRIVER(cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    const size_t size = 2 * granule, n = size / 4;
    tell_handle_types(prop, size);
    CUmemGenericAllocationHandle memory;
    DRIVER(cuMemCreate(&memory, size, &prop, 0));
    CUdeviceptr at = map(memory, size);
    std::vector<unsigned> words(n);
    for (size_t i = 0; i < n; i++) words[i] = (unsigned)i * 2654435761u;
    DRIVER(cuMemcpyHtoD(at, words.data(), size));
    int fd = -1;
    DRIVER(cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_fd(second.socket, fd, &size, sizeof size);
    close(fd);
    char answer[2];
    REQUIRE(recv(second.socket, answer, 2, MSG_WAITALL) == 2, "the other process is gone");
    DRIVER(cuMemcpyDtoH(words.data(), at, size));
    for (size_t i = 0; i < n; i++) REQUIRE(words[i] == ~((unsigned)i * 2654435761u), "word %zu after the other process", i);
    unmap(at, size);
    DRIVER(cuMemRelease(memory));
    REQUIRE(write(second.socket, "x", 1) == 1, "the other process is gone");
    int status;
    REQUIRE(waitpid(second.pid, &status, 0) == second.pid && status == 0, "the other process ended with %d", status);
    return pass("%zu words through a descriptor and two processes", n);
}
