// Two processes that each see one device, by CUDA_VISIBLE_DEVICES, as one process per GPU of NCCL's and vLLM's: the second one opens memory of the first, whose device it does not see, by each kind of handle, and its kernels use it. With the word `servers`, device 0 is of another server, and the second process sees it as well. With `refused`, the second process has a session without the first one's device.
#define PROGRAM "hidden_peers"
#include "driver.h"
#include "other_process.h"

#include <vector>

__global__ void turn(unsigned *data, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) data[i] = ~data[i];
}

// A multiple of the granularity of memory.
const size_t SIZE = 4 << 20, N = SIZE / 4;

// The device that is used: the last that the process sees.
static int device;

static cudaMemLocation place() {
    cudaMemLocation where = {};
    where.type = cudaMemLocationTypeDevice;
    where.id = device;
    return where;
}

static void begin() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    device = count - 1;
    CHECK(cudaSetDevice(device));
    CHECK(cudaFree(nullptr));
}

static CUmemAllocationProp exportable() {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return prop;
}

static CUdeviceptr map(CUmemGenericAllocationHandle memory) {
    CUdeviceptr at = 0;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER(cuMemAddressReserve(&at, SIZE, 0, 0, 0));
    DRIVER(cuMemMap(at, SIZE, 0, memory, 0));
    DRIVER(cuMemSetAccess(at, SIZE, &access, 1));
    return at;
}

static void unmap(CUdeviceptr at) {
    DRIVER(cuMemUnmap(at, SIZE));
    DRIVER(cuMemAddressFree(at, SIZE));
}

static void require_words(const void *data, unsigned flip, const char *what) {
    std::vector<unsigned> words(N);
    CHECK(cudaMemcpy(words.data(), data, SIZE, cudaMemcpyDefault));
    for (size_t i = 0; i < N; i++) REQUIRE(words[i] == ((unsigned)i * 2654435761u ^ flip), "word %zu of %s", i, what);
}

static void fill(void *data) {
    std::vector<unsigned> words(N);
    for (size_t i = 0; i < N; i++) words[i] = (unsigned)i * 2654435761u;
    CHECK(cudaMemcpy(data, words.data(), SIZE, cudaMemcpyHostToDevice));
}

// Copies and a kernel of the only device.
static void use(void *data, const char *what) {
    require_words(data, 0, what);
    turn<<<64, 256>>>((unsigned *)data, N);
    LAUNCHED();
    void *own;
    CHECK(cudaMalloc(&own, SIZE));
    CHECK(cudaMemcpy(own, data, SIZE, cudaMemcpyDeviceToDevice));
    require_words(own, ~0u, what);
    CHECK(cudaMemsetAsync(data, 0, SIZE));
    CHECK(cudaMemcpyAsync(data, own, SIZE, cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(own));
    cudaPointerAttributes attributes;
    CUdeviceptr base;
    CHECK(cudaPointerGetAttributes(&attributes, data));
    REQUIRE(attributes.type == cudaMemoryTypeDevice, "%s is of type %d", what, attributes.type);
    DRIVER(cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (CUdeviceptr)data));
    REQUIRE(base == (CUdeviceptr)data, "%s begins at another address", what);
}

// The session has another device only. (Not natively.)
static int refusals(int socket, cudaIpcMemHandle_t handle) {
    void *data;
    EXPECT(cudaErrorInvalidDevice, cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess));
    char byte;
    int fd = receive_fd(socket, &byte, 1);
    CUmemGenericAllocationHandle memory;
    const CUresult refused = cuMemImportFromShareableHandle(&memory, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    REQUIRE(refused == CUDA_ERROR_INVALID_DEVICE, "an import of memory: %d", refused);
    close(fd);
    fd = receive_fd(socket, &byte, 1);
    cudaMemPoolPtrExportData named;
    REQUIRE(recv(socket, &named, sizeof named, MSG_WAITALL) == sizeof named, "the first process is gone");
    cudaMemPool_t pool;
    EXPECT(cudaErrorInvalidDevice, cudaMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)fd, cudaMemHandleTypePosixFileDescriptor, 0));
    close(fd);
    REQUIRE(write(socket, "ok", 2) == 2, "the first process is gone");
    return 0;
}

static int other(int socket) {
    begin();
    const bool refused = getenv("OTHERS_SERVERS");
    cudaIpcMemHandle_t handle;
    REQUIRE(recv(socket, &handle, sizeof handle, MSG_WAITALL) == sizeof handle, "the first process is gone");
    if (refused) return refusals(socket, handle);
    void *data, *again;
    CHECK(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaIpcOpenMemHandle(&again, handle, cudaIpcMemLazyEnablePeerAccess));
    REQUIRE(data == again, "opened twice, at two addresses");
    CHECK(cudaIpcCloseMemHandle(again));
    use(data, "an allocation");
    CHECK(cudaIpcCloseMemHandle(data));

    char byte;
    int fd = receive_fd(socket, &byte, 1);
    CUmemGenericAllocationHandle memory;
    DRIVER(cuMemImportFromShareableHandle(&memory, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    CUdeviceptr at = map(memory);
    DRIVER(cuMemRelease(memory));
    use((void *)at, "mapped memory");
    unmap(at);

    fd = receive_fd(socket, &byte, 1);
    cudaMemPool_t pool;
    cudaMemPoolPtrExportData named;
    REQUIRE(recv(socket, &named, sizeof named, MSG_WAITALL) == sizeof named, "the first process is gone");
    CHECK(cudaMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)fd, cudaMemHandleTypePosixFileDescriptor, 0));
    close(fd);
    cudaMemAccessDesc access = {place(), cudaMemAccessFlagsProtReadWrite};
    CHECK(cudaMemPoolSetAccess(pool, &access, 1));
    CHECK(cudaMemPoolImportPointer(&data, pool, &named));
    use(data, "a pool's allocation");
    CHECK(cudaFree(data));
    CHECK(cudaMemPoolDestroy(pool));
    REQUIRE(write(socket, "ok", 2) == 2, "the first process is gone");
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && std::string(argv[1]) == "other") return other(atoi(argv[2]));
    const std::string word = parse_options(argc, argv).word;
    const bool servers = word == "servers", refused = word == "refused";
    const std::string own = refused ? getenv("RGPU_SERVERS") : servers ? "1" : "0";
    const std::string others = refused ? getenv("OTHERS_SERVERS") : servers ? "0,2" : "1";
    const char *name = refused ? "RGPU_SERVERS" : "CUDA_VISIBLE_DEVICES";
    setenv(name, others.c_str(), 1);
    const OtherProcess second = start_other(argv);
    setenv(name, own.c_str(), 1);
    begin();
    void *data[3];
    CHECK(cudaMalloc(&data[0], SIZE));
    const CUmemAllocationProp prop = exportable();
    CUmemGenericAllocationHandle memory;
    DRIVER(cuMemCreate(&memory, SIZE, &prop, 0));
    data[1] = (void *)map(memory);
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = place();
    properties.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    CHECK(cudaMallocFromPoolAsync(&data[2], SIZE, pool, nullptr));
    for (void *one : data) fill(one);

    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, data[0]));
    REQUIRE(write(second.socket, &handle, sizeof handle) == sizeof handle, "the other process is gone");
    int fd = -1;
    DRIVER(cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_fd(second.socket, fd, "f", 1);
    close(fd);
    cudaMemPoolPtrExportData named;
    CHECK(cudaMemPoolExportToShareableHandle(&fd, pool, cudaMemHandleTypePosixFileDescriptor, 0));
    CHECK(cudaMemPoolExportPointer(&named, data[2]));
    send_fd(second.socket, fd, "f", 1);
    close(fd);
    REQUIRE(write(second.socket, &named, sizeof named) == sizeof named, "the other process is gone");

    char answer[2];
    int status;
    REQUIRE(recv(second.socket, answer, 2, MSG_WAITALL) == 2, "the other process is gone");
    REQUIRE(waitpid(second.pid, &status, 0) == second.pid && status == 0, "the other process ended with %d", status);
    const char *names[] = {"the allocation", "the mapped memory", "the pool's allocation"};
    for (int i = 0; i < 3; i++) require_words(data[i], refused ? 0 : ~0u, names[i]);
    unmap((CUdeviceptr)data[1]);
    DRIVER(cuMemRelease(memory));
    CHECK(cudaFreeAsync(data[2], nullptr));
    CHECK(cudaFree(data[0]));
    CHECK(cudaMemPoolDestroy(pool));
    return pass("memory of a device that is hidden, by 3 kinds of handle");
}
