// Memory pools of one device that kernels of another device of the same server read and write: a pool of its own, also in graphs, the default pool, and a pool imported from another process.
#define PROGRAM "pool_access"
#include "other_process.h"

#include <vector>

__global__ void fill(unsigned *data, size_t n, unsigned of) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = (unsigned)i * 2654435761u + of;
}
__global__ void turn(unsigned *data, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = ~data[i];
}

const size_t N = 100003;
const int BLOCKS = (N + 255) / 256;

static cudaMemLocation place(int device) { return {cudaMemLocationTypeDevice, {device}}; }
static cudaMemAccessDesc wish(int device, cudaMemAccessFlags flags) { return {place(device), flags}; }
static cudaError_t set(cudaMemPool_t pool, int device, cudaMemAccessFlags flags) {
    cudaMemAccessDesc one = wish(device, flags);
    return cudaMemPoolSetAccess(pool, &one, 1);
}
static void expect_access(cudaMemPool_t pool, int device, cudaMemAccessFlags wanted, const char *when) {
    cudaMemAccessFlags access;
    cudaMemLocation where = place(device);
    CHECK(cudaMemPoolGetAccess(&access, pool, &where));
    REQUIRE(access == wanted, "device %d has access %d %s, and not %d", device, access, when, wanted);
}
// A kernel of device 1 turns what a kernel of device 0 has written, which is over.
static void turn_on_second(unsigned *data, unsigned of, const char *what) {
    CHECK(cudaSetDevice(1));
    turn<<<BLOCKS, 256>>>(data, N);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(0));
    std::vector<unsigned> words(N);
    CHECK(cudaMemcpy(words.data(), data, N * 4, cudaMemcpyDefault));
    for (size_t i = 0; i < N; i++) REQUIRE(words[i] == ~((unsigned)i * 2654435761u + of), "word %zu of %s", i, what);
}

static void use_from_second(unsigned *data, unsigned of, const char *what) {
    CHECK(cudaSetDevice(0));
    fill<<<BLOCKS, 256>>>(data, N, of);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    turn_on_second(data, of, what);
}

// What a graph allocates has the access that its pool has when the allocation is captured, or that its node names.
static void in_graphs(cudaMemPool_t pool, cudaStream_t stream) {
    cudaMemAccessDesc peer = wish(1, cudaMemAccessFlagsProtReadWrite);
    for (bool captured : {true, false}) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        cudaGraphNode_t node;
        unsigned *data;
        if (captured) {
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
            CHECK(cudaMallocFromPoolAsync((void **)&data, N * 4, pool, stream));
            CHECK(cudaStreamEndCapture(stream, &graph));
            size_t count = 1;
            CHECK(cudaGraphGetNodes(graph, &node, &count));
        } else {
            CHECK(cudaGraphCreate(&graph, 0));
            cudaMemAllocNodeParams made = {};
            made.poolProps.allocType = cudaMemAllocationTypePinned;
            made.poolProps.location = place(0);
            made.accessDescs = &peer;
            made.accessDescCount = 1;
            made.bytesize = N * 4;
            CHECK(cudaGraphAddMemAllocNode(&node, graph, nullptr, 0, &made));
            data = (unsigned *)made.dptr;
        }
        cudaMemAllocNodeParams told;
        CHECK(cudaGraphMemAllocNodeGetParams(node, &told));
        bool is_told = told.accessDescCount >= 1 && told.accessDescs[told.accessDescCount - 1].location.id == 1;
        REQUIRE(is_told, "a node of a graph tells %zu devices", told.accessDescCount);
        cudaGraphNode_t filled;
        cudaKernelNodeParams kernel = {};
        size_t n = N;
        unsigned of = 5;
        void *arguments[] = {&data, &n, &of};
        kernel.func = (void *)fill;
        kernel.gridDim = BLOCKS;
        kernel.blockDim = 256;
        kernel.kernelParams = arguments;
        CHECK(cudaGraphAddKernelNode(&filled, graph, &node, 1, &kernel));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        turn_on_second(data, of, captured ? "a captured allocation" : "an allocation of a graph");
        CHECK(cudaFreeAsync(data, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
}

static void refusals(cudaMemPool_t pool, int count) {
    EXPECT(cudaErrorInvalidDevice, set(pool, 0, cudaMemAccessFlagsProtNone));
    EXPECT(cudaErrorNotSupported, set(pool, 0, cudaMemAccessFlagsProtRead));
    EXPECT(cudaErrorInvalidDevice, set(pool, count, cudaMemAccessFlagsProtReadWrite));
    expect_access(pool, 0, cudaMemAccessFlagsProtReadWrite, "after the refusals");
    // All or nothing.
    cudaMemAccessDesc two[] = {wish(1, cudaMemAccessFlagsProtReadWrite), wish(count, cudaMemAccessFlagsProtReadWrite)};
    EXPECT(cudaErrorInvalidDevice, cudaMemPoolSetAccess(pool, two, 2));
    expect_access(pool, 1, cudaMemAccessFlagsProtNone, "after a list that was refused");
}

static int other(int socket) {
    int fd;
    char byte;
    fd = receive_fd(socket, &byte, 1);
    cudaMemPool_t pool;
    CHECK(cudaMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)fd, cudaMemHandleTypePosixFileDescriptor, 0));
    close(fd);
    cudaMemPoolPtrExportData data[2];
    REQUIRE(recv(socket, data, sizeof data, MSG_WAITALL) == sizeof data, "the first process is gone");
    unsigned *at[2];
    // What the exporting process gave to device 1 is not inherited.
    expect_access(pool, 0, cudaMemAccessFlagsProtReadWrite, "to an imported pool");
    expect_access(pool, 1, cudaMemAccessFlagsProtNone, "to an imported pool");
    // An allocation from before, and one from after.
    CHECK(cudaMemPoolImportPointer((void **)&at[0], pool, &data[0]));
    CHECK(set(pool, 1, cudaMemAccessFlagsProtReadWrite));
    expect_access(pool, 1, cudaMemAccessFlagsProtReadWrite, "to an imported pool that it was given");
    CHECK(cudaMemPoolImportPointer((void **)&at[1], pool, &data[1]));
    for (int i = 0; i < 2; i++) use_from_second(at[i], 7 + i, "an imported allocation");
    for (int i = 0; i < 2; i++) CHECK(cudaFree(at[i]));
    CHECK(cudaMemPoolDestroy(pool));
    REQUIRE(write(socket, "ok", 2) == 2, "the first process is gone");
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && std::string(argv[1]) == "other") return other(atoi(argv[2]));
    parse_options(argc, argv);
    const OtherProcess second = start_other(argv);
    int count = 0, can = 0;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count >= 2, "there are not two devices");
    CHECK(cudaDeviceCanAccessPeer(&can, 1, 0));
    REQUIRE(can, "device 1 cannot access memory of device 0");

    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = place(0);
    properties.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    cudaMemPool_t pool, standard;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    expect_access(pool, 0, cudaMemAccessFlagsProtReadWrite, "to a new pool");
    expect_access(pool, 1, cudaMemAccessFlagsProtNone, "to a new pool");
    refusals(pool, count);
    // An allocation from before it is given access, and one from after.
    unsigned *data[2];
    cudaStream_t stream;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMallocFromPoolAsync((void **)&data[0], N * 4, pool, stream));
    cudaMemAccessDesc both[] = {wish(0, cudaMemAccessFlagsProtReadWrite), wish(1, cudaMemAccessFlagsProtReadWrite)};
    CHECK(cudaMemPoolSetAccess(pool, both, 2));
    expect_access(pool, 1, cudaMemAccessFlagsProtReadWrite, "to a pool that it was given");
    CHECK(cudaMallocFromPoolAsync((void **)&data[1], N * 4, pool, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 2; i++) use_from_second(data[i], i, "an allocation");

    in_graphs(pool, stream);

    // One that a stream of the other device asks for is the pool's device's all the same.
    unsigned *asked;
    cudaStream_t theirs;
    cudaPointerAttributes attributes;
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreate(&theirs));
    CHECK(cudaMallocFromPoolAsync((void **)&asked, N * 4, pool, theirs));
    CHECK(cudaStreamSynchronize(theirs));
    CHECK(cudaPointerGetAttributes(&attributes, asked));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0, "it is told as device %d's", attributes.device);
    use_from_second(asked, 2, "an allocation by its own stream");
    CHECK(cudaFreeAsync(asked, theirs));
    CHECK(cudaStreamSynchronize(theirs));
    CHECK(cudaStreamDestroy(theirs));
    CHECK(cudaSetDevice(0));

    int fd;
    cudaMemPoolPtrExportData named[2];
    CHECK(cudaMemPoolExportToShareableHandle(&fd, pool, cudaMemHandleTypePosixFileDescriptor, 0));
    for (int i = 0; i < 2; i++) CHECK(cudaMemPoolExportPointer(&named[i], data[i]));
    send_fd(second.socket, fd, "f", 1);
    close(fd);
    REQUIRE(write(second.socket, named, sizeof named) == sizeof named, "the other process is gone");
    char answer[2];
    int status;
    REQUIRE(recv(second.socket, answer, 2, MSG_WAITALL) == 2, "the other process is gone");
    REQUIRE(waitpid(second.pid, &status, 0) == second.pid && status == 0, "the other process ended with %d", status);
    for (int i = 0; i < 2; i++) {
        std::vector<unsigned> words(N);
        CHECK(cudaMemcpy(words.data(), data[i], N * 4, cudaMemcpyDefault));
        for (size_t w = 0; w < N; w++) REQUIRE(words[w] == ~((unsigned)w * 2654435761u + 7 + i), "word %zu after the other process", w);
    }

    CHECK(set(pool, 1, cudaMemAccessFlagsProtNone));
    expect_access(pool, 1, cudaMemAccessFlagsProtNone, "to a pool from which it was taken");
    CHECK(cudaDeviceGetDefaultMemPool(&standard, 0));
    refusals(standard, count);
    CHECK(set(standard, 1, cudaMemAccessFlagsProtReadWrite));
    unsigned *more;
    CHECK(cudaMallocAsync((void **)&more, N * 4, stream));
    CHECK(cudaStreamSynchronize(stream));
    use_from_second(more, 3, "an allocation of the default pool");
    expect_access(pool, 1, cudaMemAccessFlagsProtNone, "to the other pool");

    for (unsigned *each : {data[0], data[1], more}) CHECK(cudaFreeAsync(each, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolDestroy(pool));
    return pass("kernels of device 1 reach pools of device 0");
}
