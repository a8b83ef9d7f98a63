// A pool shared with another process: its descriptor goes over a socket, its allocations by 64 bytes each. The other process reads them, writes them, and frees them at once or in a
// stream's order before their owner does, or leaves that to a reset of its device.
#define PROGRAM "pool_ipc"
#include "other_process.h"

#include <vector>

__global__ void turn(unsigned *data, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = ~data[i];
}
__global__ void fill(unsigned *data, size_t n, unsigned of) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = (unsigned)i * 2654435761u + of;
}

const int COUNT = 5;
static size_t words_of(int i) { return 1000 + i * 70001; }

static void give(int to, const void *data, size_t len) { REQUIRE(write(to, data, len) == (ssize_t)len, "the socket is broken"); }
static void take(int from, void *data, size_t len) { REQUIRE(recv(from, data, len, MSG_WAITALL) == (ssize_t)len, "the other process is gone"); }

static int other(int socket) {
    char byte;
    int fds[2] = {receive_fd(socket, &byte, 1), receive_fd(socket, &byte, 1)};
    cudaMemPool_t pool, another;
    CHECK(cudaMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)fds[0], cudaMemHandleTypePosixFileDescriptor, 0));
    CHECK(cudaMemPoolImportFromShareableHandle(&another, (void *)(uintptr_t)fds[1], cudaMemHandleTypePosixFileDescriptor, 0));
    close(fds[0]);
    close(fds[1]);
    cudaMemLocation here = {cudaMemLocationTypeDevice, {0}};
    cudaMemAccessFlags access;
    CHECK(cudaMemPoolGetAccess(&access, pool, &here));
    if (access != cudaMemAccessFlagsProtReadWrite) {
        cudaMemAccessDesc wanted = {here, cudaMemAccessFlagsProtReadWrite};
        CHECK(cudaMemPoolSetAccess(pool, &wanted, 1));
    }
    cudaMemPoolPtrExportData data[COUNT + 1];
    take(socket, data, sizeof data);
    // Before anything has made a context current in this process.
    void *first, *none;
    CHECK(cudaMemPoolImportPointer(&first, pool, &data[0]));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    EXPECT(cudaErrorInvalidValue, cudaMallocFromPoolAsync(&none, 4096, pool, stream));
    EXPECT(cudaErrorInvalidValue, cudaDeviceSetMemPool(0, pool));
    cudaMemPoolPtrExportData wrong = {};
    REQUIRE(cudaMemPoolImportPointer(&none, pool, &wrong) != cudaSuccess, "an import of nothing");
    cudaGetLastError();
    unsigned *at[COUNT];
    for (int i = 0; i < COUNT; i++) {
        const size_t n = words_of(i);
        CHECK(cudaMemPoolImportPointer((void **)&at[i], pool, &data[i]));
        cudaPointerAttributes known;
        CHECK(cudaPointerGetAttributes(&known, at[i]));
        REQUIRE(known.type == cudaMemoryTypeDevice && known.device == 0, "allocation %d is of type %d", i, known.type);
        std::vector<unsigned> words(n);
        CHECK(cudaMemcpyAsync(words.data(), at[i], n * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (size_t w = 0; w < n; w++) REQUIRE(words[w] == (unsigned)w * 2654435761u + i, "word %zu of allocation %d in the other process", w, i);
        turn<<<(n + 255) / 256, 256, 0, stream>>>(at[i], n);
        LAUNCHED();
    }
    REQUIRE(at[0] == first, "what is imported twice is at two addresses");
    // At once, and in the order of the stream that has used them.
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(at[0]));
    for (int i = 1; i < COUNT; i++) CHECK(cudaFreeAsync(at[i], stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolDestroy(pool));
    CHECK(cudaStreamDestroy(stream));
    // What is not freed goes with a reset.
    cudaPointerAttributes known;
    CHECK(cudaMemPoolImportPointer(&first, another, &data[COUNT]));
    CHECK(cudaPointerGetAttributes(&known, first));
    REQUIRE(known.type == cudaMemoryTypeDevice, "the last allocation is of type %d", known.type);
    CHECK(cudaDeviceReset());
    CHECK(cudaPointerGetAttributes(&known, first));
    REQUIRE(known.type == cudaMemoryTypeUnregistered, "after a reset, the last allocation is of type %d", known.type);
    give(socket, "ok", 2);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && std::string(argv[1]) == "other") return other(atoi(argv[2]));
    parse_options(argc, argv);
    const OtherProcess second = start_other(argv);
    int kinds = 0;
    CHECK(cudaDeviceGetAttribute(&kinds, cudaDevAttrMemoryPoolSupportedHandleTypes, 0));
    REQUIRE(kinds & cudaMemHandleTypePosixFileDescriptor, "pools cannot be shared by descriptors");
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, {0}};
    cudaMemPool_t pool, another, own;
    CHECK(cudaMemPoolCreate(&own, &properties));
    properties.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    CHECK(cudaMemPoolCreate(&another, &properties));
    int fds[2] = {-1, -1};
    EXPECT(cudaErrorInvalidValue, cudaMemPoolExportToShareableHandle(&fds[0], own, cudaMemHandleTypePosixFileDescriptor, 0));
    CHECK(cudaMemPoolExportToShareableHandle(&fds[0], pool, cudaMemHandleTypePosixFileDescriptor, 0));
    CHECK(cudaMemPoolExportToShareableHandle(&fds[1], another, cudaMemHandleTypePosixFileDescriptor, 0));
    for (int fd : fds) {
        send_fd(second.socket, fd, "f", 1);
        close(fd);
    }
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    unsigned *at[COUNT];
    void *left;
    cudaMemPoolPtrExportData data[COUNT + 1];
    CHECK(cudaMallocFromPoolAsync(&left, 4096, another, stream));
    CHECK(cudaMemPoolExportPointer(&data[COUNT], left));
    for (int i = 0; i < COUNT; i++) {
        const size_t n = words_of(i);
        CHECK(cudaMallocFromPoolAsync((void **)&at[i], n * 4, pool, stream));
        fill<<<(n + 255) / 256, 256, 0, stream>>>(at[i], n, i);
        LAUNCHED();
        CHECK(cudaMemPoolExportPointer(&data[i], at[i]));
    }
    void *unshared, *plain;
    cudaMemPoolPtrExportData none;
    CHECK(cudaMallocFromPoolAsync(&unshared, 4096, own, stream));
    CHECK(cudaMalloc(&plain, 4096));
    EXPECT(cudaErrorInvalidValue, cudaMemPoolExportPointer(&none, unshared));
    EXPECT(cudaErrorInvalidValue, cudaMemPoolExportPointer(&none, plain));
    CHECK(cudaFree(plain));
    CHECK(cudaFreeAsync(unshared, stream));
    CHECK(cudaStreamSynchronize(stream));
    give(second.socket, data, sizeof data);
    char answer[2];
    take(second.socket, answer, 2);
    for (int i = 0; i < COUNT; i++) {
        const size_t n = words_of(i);
        std::vector<unsigned> words(n);
        CHECK(cudaMemcpyAsync(words.data(), at[i], n * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (size_t w = 0; w < n; w++) REQUIRE(words[w] == ~((unsigned)w * 2654435761u + i), "word %zu of allocation %d after the other process", w, i);
        CHECK(cudaFreeAsync(at[i], stream));
    }
    CHECK(cudaFreeAsync(left, stream));
    CHECK(cudaStreamSynchronize(stream));
    int status;
    REQUIRE(waitpid(second.pid, &status, 0) == second.pid && status == 0, "the other process ended with %d", status);
    for (cudaMemPool_t each : {pool, another, own}) CHECK(cudaMemPoolDestroy(each));
    return pass("%d allocations of a pool through two processes", COUNT);
}
