// Two devices of two servers in one program, by the less usual ways: contexts of the program's own, per-thread default streams, boxes in streams and graphs, symbols, batches, mapped memory, and memory and events of
// another process.
#define PROGRAM "two_servers_forms"
#include "cases.h"
#include "driver.h"
#include "other_process.h"
#include "several_devices.h"

__device__ int words[1000];

__global__ void add(int *data, int n, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += by;
}

__global__ void add_words(int *to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] += words[i];
}

static const char *CODE = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .global .align 4 .u32 word;\n"
                          ".visible .entry bump(.param .u64 to) {\n"
                          "  .reg .b32 %r<4>;\n  .reg .b64 %rd<4>;\n"
                          "  ld.param.u64 %rd1, [to];\n  cvta.to.global.u64 %rd2, %rd1;\n"
                          "  ld.global.u32 %r1, [word];\n  ld.global.u32 %r2, [%rd2];\n  add.s32 %r3, %r1, %r2;\n"
                          "  st.global.u32 [%rd2], %r3;\n  ret;\n}\n";

// Contexts that the program has made, one on each server: copies that name contexts, a module and a variable in each, an event of the one that a stream of the other waits for.
static void own_contexts() {
    const int n = 5000;
    const size_t bytes = n * sizeof(int);
    CUcontext contexts[2];
    CUdeviceptr data[2], variables[2], sums[2];
    CUstream streams[2];
    CUmodule modules[2];
    CUfunction bump[2];
    CUevent event;
    for (int i = 0; i < 2; i++) {
        DRIVER(cuCtxCreate(&contexts[i], nullptr, 0, i));
        DRIVER(cuMemAlloc(&data[i], bytes));
        DRIVER(cuMemAlloc(&sums[i], sizeof(int)));
        DRIVER(cuMemsetD32(sums[i], 7, 1));
        DRIVER(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
        DRIVER(cuModuleLoadData(&modules[i], CODE));
        DRIVER(cuModuleGetFunction(&bump[i], modules[i], "bump"));
        size_t size;
        DRIVER(cuModuleGetGlobal(&variables[i], &size, modules[i], "word"));
        DRIVER(cuMemsetD32(variables[i], 100 * (i + 1), 1));
        // Fills do not wait, and the stream does not wait for them.
        DRIVER(cuCtxSynchronize());
    }
    // Each context's module has its own variable.
    for (int i = 0; i < 2; i++) {
        DRIVER(cuCtxSetCurrent(contexts[i]));
        void *parameters[] = {&sums[i]};
        DRIVER(cuLaunchKernel(bump[i], 1, 1, 1, 1, 1, 1, 0, streams[i], parameters, nullptr));
        DRIVER(cuStreamSynchronize(streams[i]));
        int sum = -1;
        DRIVER(cuMemcpyDtoH(&sum, sums[i], sizeof sum));
        expect_value("a variable of a context's own module", 7 + 100 * (i + 1), sum);
        // The other context's function, in this context's stream.
        IS(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel(bump[1 - i], 1, 1, 1, 1, 1, 1, 0, streams[i], parameters, nullptr));
    }
    DRIVER(cuCtxSetCurrent(contexts[0]));
    std::vector<int> host = numbers(n, 4), back(n, -1);
    DRIVER(cuMemcpyHtoD(data[0], host.data(), bytes));
    // With each context current, and with none of them.
    for (int current = 0; current < 3; current++) {
        CUcontext primary = nullptr;
        if (current == 2) DRIVER(cuDevicePrimaryCtxRetain(&primary, 0));
        CUcontext used = current == 2 ? primary : contexts[current];
        // Without access to each other's memory, a context fills its own only.
        DRIVER(cuCtxSetCurrent(contexts[1]));
        DRIVER(cuMemsetD32(data[1], 0, n));
        DRIVER(cuCtxSetCurrent(used));
        DRIVER(cuMemcpyPeer(data[1], contexts[1], data[0], contexts[0], bytes));
        DRIVER(cuMemcpyDtoH(back.data(), data[1], bytes));
        expect_value("cuMemcpyPeer between own contexts", 1, back == host);
        DRIVER(cuCtxSetCurrent(contexts[1]));
        DRIVER(cuMemsetD32(data[1], 0, n));
        DRIVER(cuCtxSetCurrent(used));
        DRIVER(cuMemcpyDtoD(data[1], data[0], bytes));
        std::fill(back.begin(), back.end(), -1);
        DRIVER(cuMemcpyDtoH(back.data(), data[1], bytes));
        expect_value("cuMemcpyDtoD between own contexts", 1, back == host);
        if (primary) DRIVER(cuDevicePrimaryCtxRelease(0));
    }
    // Behind the other context's event.
    for (int from = 0; from < 2; from++) {
        int to = 1 - from;
        Gate gate;
        DRIVER(cuCtxSetCurrent(contexts[from]));
        DRIVER(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        DRIVER(cuLaunchHostFunc(streams[from], Gate::wait, &gate));
        DRIVER(cuMemsetD32Async(data[from], 1000 + from, n, streams[from]));
        DRIVER(cuEventRecord(event, streams[from]));
        DRIVER(cuCtxSetCurrent(contexts[to]));
        DRIVER(cuStreamWaitEvent(streams[to], event, 0));
        DRIVER(cuMemcpyPeerAsync(data[to], contexts[to], data[from], contexts[from], bytes, streams[to]));
        IS(CUDA_ERROR_NOT_READY, cuStreamQuery(streams[to]));
        gate.open = true;
        DRIVER(cuStreamSynchronize(streams[to]));
        DRIVER(cuMemcpyDtoH(back.data(), data[to], bytes));
        expect_value("a copy behind the other context's event", 1, back == std::vector<int>(n, 1000 + from));
        DRIVER(cuEventDestroy(event));
    }
    // A context and all it has go away. The other server's goes on.
    DRIVER(cuCtxSetCurrent(contexts[1]));
    DRIVER(cuCtxDestroy(contexts[0]));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(back.data(), data[0], bytes));
    DRIVER(cuMemsetD32(data[1], 5, n));
    DRIVER(cuMemcpyDtoH(back.data(), data[1], bytes));
    expect_value("the other context's memory", 1, back == std::vector<int>(n, 5));
    DRIVER(cuCtxDestroy(contexts[1]));
    DRIVER(cuCtxSetCurrent(nullptr));
}

// Threads with their per-thread default streams on both servers, which have equal handles.
static void per_thread_streams() {
    const int n = 2000, each = 3;
    std::atomic<int> early{0};
    std::vector<std::thread> threads;
    std::vector<int *> data, over;
    // Not in the threads: a copy in a default stream waits for all their streams.
    for (int t = 0; t < 2 * each; t++) {
        data.push_back(on_device(t % 2, n, t));
        over.push_back(on_device(1 - t % 2, n, 0));
    }
    for (int t = 0; t < 2 * each; t++) {
        threads.emplace_back([&early, t, data = data[t], over = over[t]] {
            int own = t % 2, other = 1 - own;
            CHECK(cudaSetDevice(own));
            Gate gate;
            CHECK(cudaLaunchHostFunc(cudaStreamPerThread, Gate::wait, &gate));
            for (int round = 0; round < 20; round++) add<<<(n + 255) / 256, 256, 0, cudaStreamPerThread>>>(data, n, t);
            CHECK(cudaMemcpyPeerAsync(over, other, data, own, n * sizeof(int), cudaStreamPerThread));
            early += cudaStreamQuery(cudaStreamPerThread) != cudaErrorNotReady;
            // This thread's stream on the other device has nothing to do.
            CHECK(cudaSetDevice(other));
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
            CHECK(cudaSetDevice(own));
            gate.open = true;
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        });
    }
    for (std::thread &thread : threads) thread.join();
    int wrong = 0;
    for (int t = 0; t < 2 * each; t++) {
        wrong += !holds(data[t], n, 21 * t) + !holds(over[t], n, 21 * t);
        CHECK(cudaFree(data[t]));
        CHECK(cudaFree(over[t]));
    }
    expect_value("streams that did not wait", 0, early);
    expect_value("what per-thread streams did wrong", 0, wrong);
}

// Boxes and rows in streams of either server, behind what the streams have been given.
static void boxes_in_streams() {
    const int width = 40, height = 30, depth = 4, n = width * height * depth;
    const cudaExtent extent = make_cudaExtent(width * sizeof(int), height, depth);
    for (int at = 0; at < 2; at++) {
        int *from = on_device(0, n, 1), *to = on_device(1, n, 0);
        cudaStream_t stream;
        Gate gate;
        CHECK(cudaSetDevice(at));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
        if (at == 0) add<<<(n + 255) / 256, 256, 0, stream>>>(from, n, 10);
        else CHECK(cudaMemsetAsync(to, 9, n * sizeof(int), stream));
        cudaMemcpy3DPeerParms over = {};
        over.srcPtr = make_cudaPitchedPtr(from, width * sizeof(int), width, height);
        over.srcDevice = 0;
        over.dstPtr = make_cudaPitchedPtr(to, width * sizeof(int), width, height);
        over.dstDevice = 1;
        over.extent = extent;
        CHECK(cudaMemcpy3DPeerAsync(&over, stream));
        if (at == 1) add<<<(n + 255) / 256, 256, 0, stream>>>(to, n, 10);
        // The first row of the first slice once more, into the last one.
        CHECK(cudaMemcpy2DAsync(to + n - width, width * sizeof(int), from, width * sizeof(int), width * sizeof(int), 1, cudaMemcpyDefault, stream));
        RETURNS(cudaErrorNotReady, cudaStreamQuery(stream));
        gate.open = true;
        CHECK(cudaStreamSynchronize(stream));
        std::vector<int> host(n, -1), expected = numbers(n, 11);
        for (int i = 0; i < width; i++) expected[n - width + i] = (at == 0 ? 11 : 1) + i;
        CHECK(cudaMemcpy(host.data(), to, n * sizeof(int), cudaMemcpyDefault));
        expect_value("boxes and rows in a stream", 1, host == expected);
        CHECK(cudaStreamDestroy(stream));
        CHECK(cudaFree(from));
        CHECK(cudaFree(to));
    }
}

// A graph of nodes that the program adds: a box to the other server and rows back, between kernels of one server.
static void graph_nodes() {
    const int width = 32, height = 20, depth = 3, n = width * height * depth;
    int *a = on_device(0, n, 1), *b = on_device(1, n, 0), *c = on_device(0, n, 0);
    CHECK(cudaSetDevice(0));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t kernel, there, back, last;
    CHECK(cudaGraphCreate(&graph, 0));
    int count = n, by = 3;
    void *arguments[] = {&a, &count, &by}, *of_c[] = {&c, &count, &by};
    cudaKernelNodeParams launch = {};
    launch.func = (void *)add;
    launch.gridDim = dim3((n + 255) / 256);
    launch.blockDim = dim3(256);
    launch.kernelParams = arguments;
    CHECK(cudaGraphAddKernelNode(&kernel, graph, nullptr, 0, &launch));
    auto box = [&](int *to, int *from) {
        cudaMemcpy3DParms copy = {};
        copy.srcPtr = make_cudaPitchedPtr(from, width * sizeof(int), width, height);
        copy.dstPtr = make_cudaPitchedPtr(to, width * sizeof(int), width, height);
        copy.extent = make_cudaExtent(width * sizeof(int), height, depth);
        copy.kind = cudaMemcpyDefault;
        return copy;
    };
    cudaMemcpy3DParms over = box(b, a), home = box(c, b);
    CHECK(cudaGraphAddMemcpyNode(&there, graph, &kernel, 1, &over));
    CHECK(cudaGraphAddMemcpyNode(&back, graph, &there, 1, &home));
    launch.kernelParams = of_c;
    CHECK(cudaGraphAddKernelNode(&last, graph, &back, 1, &launch));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int i = 0; i < 4; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_value("a graph's kernel", 1, holds(a, n, 1 + 4 * 3));
    expect_value("a graph's box on the other server", 1, holds(b, n, 1 + 4 * 3));
    expect_value("what came back and was changed", 1, holds(c, n, 1 + 5 * 3));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    for (int *data : {a, b, c}) CHECK(cudaFree(data));
}

// A variable from memory of the other server, and back.
static void symbols() {
    const int n = 1000;
    for (int device = 0; device < 2; device++) {
        int *other = on_device(1 - device, n, 50 + device), *back = on_device(1 - device, n, 0), *sum = on_device(device, n, 0);
        cudaStream_t stream;
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMemcpyToSymbolAsync(words, other, n * sizeof(int), 0, cudaMemcpyDeviceToDevice, stream));
        add_words<<<(n + 255) / 256, 256, 0, stream>>>(sum, n);
        CHECK(cudaMemcpyFromSymbolAsync(back, words, n * sizeof(int), 0, cudaMemcpyDeviceToDevice, stream));
        CHECK(cudaStreamSynchronize(stream));
        std::vector<int> host(n), expected(n);
        for (int i = 0; i < n; i++) expected[i] = i + 50 + device + i;
        CHECK(cudaMemcpy(host.data(), sum, n * sizeof(int), cudaMemcpyDefault));
        expect_value("a variable from the other server's memory", 1, host == expected);
        expect_value("a variable into the other server's memory", 1, holds(back, n, 50 + device));
        CHECK(cudaStreamDestroy(stream));
        for (int *data : {other, back, sum}) CHECK(cudaFree(data));
    }
}

// One batch: from the host to both servers, between them, and to the host.
static void batches() {
    const int n = 3000;
    const size_t bytes = n * sizeof(int);
    int *a = on_device(0, n, 1), *b = on_device(1, n, 0), *c = on_device(1, n, 20), *d = on_device(0, n, 0), *pinned, *e = on_device(1, n, 0);
    CHECK(cudaMallocHost(&pinned, 2 * bytes));
    for (int i = 0; i < n; i++) pinned[i] = i + 77, pinned[n + i] = -1;
    cudaStream_t stream;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    void *to[] = {b, d, e, pinned + n};
    const void *from[] = {a, c, pinned, c};
    size_t sizes[] = {bytes, bytes, bytes, bytes}, first = 0;
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    CHECK(cudaMemcpyBatchAsync(to, from, sizes, 4, &attributes, &first, 1, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_value("a batch's copy to the other server", 1, holds(b, n, 1));
    expect_value("a batch's copy from the other server", 1, holds(d, n, 20));
    expect_value("a batch's copy from the host to the other server", 1, holds(e, n, 77));
    expect_value("a batch's copy from the other server to the host", 1, holds(pinned + n, n, 20));
    CHECK(cudaStreamDestroy(stream));
    for (int *data : {a, b, c, d, e}) CHECK(cudaFree(data));
    CHECK(cudaFreeHost(pinned));
}

// Memory that the program maps itself, in two parts on the second server, behind each other. A copy from or to the first server goes over both.
static void mapped_memory() {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = 1;
    size_t part;
    CHECK(cudaSetDevice(1));
    DRIVER(cuMemGetAllocationGranularity(&part, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUdeviceptr at;
    CUmemGenericAllocationHandle handles[2];
    DRIVER(cuMemAddressReserve(&at, 2 * part, 0, 0, 0));
    CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (int i = 0; i < 2; i++) {
        DRIVER(cuMemCreate(&handles[i], part, &properties, 0));
        DRIVER(cuMemMap(at + i * part, part, 0, handles[i], 0));
    }
    DRIVER(cuMemSetAccess(at, 2 * part, &access, 1));
    CUmemAccessDesc others = access;
    others.location.id = 0;
    IS(CUDA_ERROR_INVALID_DEVICE, cuMemSetAccess(at, 2 * part, &others, 1));
    const int n = 5000;
    int *middle = (int *)(at + part) - n / 2, *a = on_device(0, n, 8), *back = on_device(0, n, 0);
    CHECK(cudaMemcpy(middle, a, n * sizeof(int), cudaMemcpyDefault));
    CHECK(cudaSetDevice(1));
    add<<<(n + 255) / 256, 256>>>(middle, n, 2);
    CHECK(cudaDeviceSynchronize());
    expect_value("mapped memory", 1, holds(middle, n, 10));
    CHECK(cudaMemcpyPeer(back, 0, middle, 1, n * sizeof(int)));
    expect_value("mapped memory copied to the other server", 1, holds(back, n, 10));
    CHECK(cudaFree(a));
    CHECK(cudaFree(back));
    CHECK(cudaDeviceSynchronize());
    DRIVER(cuMemUnmap(at, 2 * part));
    for (CUmemGenericAllocationHandle handle : handles) DRIVER(cuMemRelease(handle));
    DRIVER(cuMemAddressFree(at, 2 * part));
}

// What the processes tell each other: memory and an event of each server.
struct Shared {
    cudaIpcMemHandle_t memory[2];
    cudaIpcEventHandle_t events[2];
};
static const int SHARED = 6000;

static void give(int socket, const void *data, size_t size) { REQUIRE(write(socket, data, size) == (ssize_t)size, "the other process is gone"); }
static void take(int socket, void *data, size_t size) { REQUIRE(recv(socket, data, size, MSG_WAITALL) == (ssize_t)size, "the other process is gone"); }

// The other process: it opens both servers' memory, copies from the one to the other, and from each to memory of its own on the other server.
static int other(int socket) {
    Shared shared;
    take(socket, &shared, sizeof shared);
    int *opened[2];
    cudaEvent_t events[2];
    for (int i = 0; i < 2; i++) {
        // With the other server's device.
        CHECK(cudaSetDevice(1 - i));
        void *wrong;
        EXPECT(cudaErrorInvalidValue, cudaIpcOpenMemHandle(&wrong, shared.memory[i], cudaIpcMemLazyEnablePeerAccess));
        CHECK(cudaSetDevice(i));
        CHECK(cudaIpcOpenMemHandle((void **)&opened[i], shared.memory[i], cudaIpcMemLazyEnablePeerAccess));
        CHECK(cudaIpcOpenEventHandle(&events[i], shared.events[i]));
        cudaPointerAttributes about;
        CHECK(cudaPointerGetAttributes(&about, opened[i]));
        REQUIRE(about.device == i, "memory of device %d is of device %d", i, about.device);
    }
    for (int i = 0; i < 2; i++) {
        int *own = on_device(1 - i, SHARED, 0);
        CHECK(cudaSetDevice(i));
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaStreamWaitEvent(stream, events[i], 0));
        CHECK(cudaMemcpyPeerAsync(own, 1 - i, opened[i], i, SHARED * sizeof(int), stream));
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(holds(own, SHARED, 30 + i), "what was copied from another process's memory of device %d", i);
        CHECK(cudaStreamDestroy(stream));
        CHECK(cudaFree(own));
    }
    CHECK(cudaMemcpyPeer(opened[1], 1, opened[0], 0, SHARED * sizeof(int)));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventDestroy(events[i]));
        CHECK(cudaIpcCloseMemHandle(opened[i]));
    }
    give(socket, "ok", 2);
    return 0;
}

static void another_process(char **argv) {
    OtherProcess process = start_other(argv);
    Shared shared;
    int *data[2];
    cudaEvent_t events[2];
    for (int i = 0; i < 2; i++) {
        data[i] = on_device(i, SHARED, 0);
        CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming | cudaEventInterprocess));
        add<<<(SHARED + 255) / 256, 256>>>(data[i], SHARED, 30 + i);
        CHECK(cudaEventRecord(events[i], 0));
        CHECK(cudaIpcGetMemHandle(&shared.memory[i], data[i]));
        CHECK(cudaIpcGetEventHandle(&shared.events[i], events[i]));
    }
    give(process.socket, &shared, sizeof shared);
    char said[2];
    take(process.socket, said, sizeof said);
    expect_value("what the other process copied", 1, holds(data[1], SHARED, 30));
    int status = -1;
    waitpid(process.pid, &status, 0);
    expect_value("the other process's end", 0, status);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaEventDestroy(events[i]));
        CHECK(cudaFree(data[i]));
    }
    close(process.socket);
}

// A graph that is captured again for each step, which updates the instance of the first one, as llama.cpp does: its
// kernel is on one server, what it copies and fills on the other.
static void updated_graph() {
    const int n = 1000;
    const size_t bytes = n * sizeof(int);
    int *there[2] = {on_device(1, n, 0), on_device(1, n, 0)}, *filled[2] = {on_device(1, n, 0), on_device(1, n, 0)};
    int *here = on_device(0, n, 0);
    cudaStream_t stream;
    cudaGraphExec_t exec = nullptr;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int step = 0; step < 4; step++) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        add<<<8, 128, 0, stream>>>(here, n, step + 1);
        CHECK(cudaMemcpyPeerAsync(there[step % 2], 1, here, 0, bytes, stream));
        CHECK(cudaMemsetAsync(filled[step % 2], step, bytes, stream));
        CHECK(cudaStreamEndCapture(stream, &graph));
        if (!exec) {
            CHECK(cudaGraphInstantiate(&exec, graph, 0));
        } else {
            cudaGraphExecUpdateResultInfo info;
            CHECK(cudaGraphExecUpdate(exec, graph, &info));
        }
        CHECK(cudaGraphDestroy(graph));
        expect_value("the launch of an updated graph", 0, cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        expect_value("what an updated graph copied", 1, holds(there[step % 2], n, (step + 1) * (step + 2) / 2));
        std::vector<int> words(n);
        CHECK(cudaMemcpy(words.data(), filled[step % 2], bytes, cudaMemcpyDefault));
        expect_value("what an updated graph filled", 1, words == std::vector<int>(n, 0x01010101 * step));
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(here));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaFree(there[i]));
        CHECK(cudaFree(filled[i]));
    }
}

int main(int argc, char **argv) {
    if (argc > 2 && std::string(argv[1]) == "other") return other(atoi(argv[2]));
    parse_options(argc, argv);
    DRIVER(cuInit(0));
    own_contexts();
    per_thread_streams();
    boxes_in_streams();
    graph_nodes();
    updated_graph();
    symbols();
    batches();
    mapped_memory();
    another_process(argv);
    return verdict();
}
