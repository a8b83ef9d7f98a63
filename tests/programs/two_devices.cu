// Two devices of one server that reach each other's memory: pinned, managed and mapped memory of both, variables, textures, per-thread streams, graphs, function attributes, limits, an error of one of them.
#define PROGRAM "two_devices"
#include "cases.h"
#include "driver.h"
#include "several_devices.h"
#include "two_textures.h"

__device__ int variable;
__constant__ int constants[4];

__global__ void add(int *data, int n, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += by;
}

__global__ void copy(int *to, const int *from, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}

__global__ void read_variables(int *to) {
    to[0] = variable;
    to[1] = constants[2];
}

__global__ void late_fill(int rounds, int *out, int n, int value) {
    unsigned x = threadIdx.x + 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525u + 1013904223u;
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = x == 0 ? -1 : value;
}

__global__ void large_block(int *to) {
    extern __shared__ int words[];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    to[threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

__global__ void stray(int *nowhere) { *nowhere = 1; }

static bool all_are(const int *data, int n, int value) {
    std::vector<int> host(n, -1);
    CHECK(cudaMemcpy(host.data(), data, n * sizeof(int), cudaMemcpyDefault));
    return host == std::vector<int>(n, value);
}

// One piece of pinned memory, which kernels of both devices and the host change in turn.
static void pinned() {
    const int n = 3000;
    int *words;
    cudaStream_t streams[2];
    cudaEvent_t events[2];
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    }
    CHECK(cudaMallocHost(&words, n * sizeof(int)));
    for (int i = 0; i < n; i++) words[i] = i;
    int sum = 0;
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 2; i++) {
            CHECK(cudaSetDevice(i));
            if (round || i) CHECK(cudaStreamWaitEvent(streams[i], events[1 - i]));
            add<<<(n + 255) / 256, 256, 0, streams[i]>>>(words, n, i + 1);
            CHECK(cudaEventRecord(events[i], streams[i]));
        }
        sum += 3;
        if (round % 2 == 0) continue;
        CHECK(cudaEventSynchronize(events[1]));
        int wrong = 0;
        for (int k = 0; k < n; k++) wrong += words[k] != k + sum;
        expect_value("words of pinned memory that are wrong", 0, wrong);
        for (int k = 0; k < n; k++) words[k] += 10;
        sum += 10;
    }
    // Each device's kernel on its own half, at the same time.
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        add<<<(n / 2 + 255) / 256, 256, 0, streams[i]>>>(words + i * (n / 2), n / 2, 7 + i);
    }
    for (int i = 0; i < 2; i++) CHECK(cudaStreamSynchronize(streams[i]));
    int wrong = 0;
    for (int k = 0; k < n; k++) wrong += words[k] != k + sum + (k < n / 2 ? 7 : 8);
    expect_value("words of halves that are wrong", 0, wrong);
    CHECK(cudaFreeHost(words));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamDestroy(streams[i]));
        CHECK(cudaEventDestroy(events[i]));
    }
}

// Managed memory: both devices in the order of events.
static void managed() {
    const int n = 20000;
    int *words;
    cudaEvent_t done;
    CHECK(cudaSetDevice(0));
    CHECK(cudaMallocManaged(&words, n * sizeof(int)));
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    for (int i = 0; i < n; i++) words[i] = i;
    for (int round = 0; round < 3; round++) {
        CHECK(cudaSetDevice(0));
        add<<<(n + 255) / 256, 256>>>(words, n, 1);
        CHECK(cudaEventRecord(done, 0));
        CHECK(cudaSetDevice(1));
        CHECK(cudaStreamWaitEvent(0, done));
        add<<<(n + 255) / 256, 256>>>(words, n, 2);
        CHECK(cudaDeviceSynchronize());
        int wrong = 0;
        for (int k = 0; k < n; k++) wrong += words[k] != k + 3 * (round + 1);
        expect_value("words of managed memory that are wrong", 0, wrong);
    }
    CHECK(cudaFree(words));
    CHECK(cudaEventDestroy(done));
}

// Variables and constants are each device's own.
static void variables() {
    int *found[2];
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaMalloc(&found[i], 2 * sizeof(int)));
        int value = 70 + i, four[4] = {0, 1, 80 + i, 3};
        CHECK(cudaMemcpyToSymbol(variable, &value, sizeof value));
        CHECK(cudaMemcpyToSymbol(constants, four, sizeof four));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        read_variables<<<1, 1>>>(found[i]);
        int host[2], value = -1;
        CHECK(cudaMemcpy(host, found[i], sizeof host, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpyFromSymbol(&value, variable, sizeof value));
        expect_value("a variable as a kernel reads it", 70 + i, host[0]);
        expect_value("a constant as a kernel reads it", 80 + i, host[1]);
        expect_value("a variable as the host reads it", 70 + i, value);
        CHECK(cudaFree(found[i]));
    }
}

// Kernels that write the other device's memory, in the order of events.
static void peers() {
    const int n = 5000;
    int *data[2] = {on_device(0, n, 0), on_device(1, n, 0)};
    cudaStream_t streams[2];
    cudaEvent_t event;
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaDeviceEnablePeerAccess(1 - i, 0));
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        late_fill<<<1, 64, 0, streams[i]>>>(200000, data[1 - i], n, 40 + i);
        CHECK(cudaEventRecord(event, streams[i]));
        CHECK(cudaStreamWaitEvent(streams[1 - i], event));
        CHECK(cudaSetDevice(1 - i));
        copy<<<(n + 255) / 256, 256, 0, streams[1 - i]>>>(data[i], data[1 - i], n);
        CHECK(cudaStreamSynchronize(streams[1 - i]));
        expect_value("what the other device has written", 1, all_are(data[1 - i], n, 40 + i));
        expect_value("what was copied back", 1, all_are(data[i], n, 40 + i));
        CHECK(cudaEventDestroy(event));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamDestroy(streams[i]));
        CHECK(cudaFree(data[i]));
    }
}

// A managed variable would be another one on the second device, where the host would never see it: code that has one is refused there.
static void managed_variable() {
    CUlibrary library;
    CUkernel kernel;
    CUdeviceptr address;
    size_t size;
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    DRIVER(cuLibraryLoadData(&library, MANAGED_CODE, nullptr, nullptr, 0, nullptr, nullptr, 0));
    DRIVER(cuLibraryGetKernel(&kernel, library, "bump"));
    DRIVER(cuLibraryGetManaged(&address, &size, library, "shared_word"));
    volatile int *word = (volatile int *)address;
    *word = 41;
    DRIVER(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr));
    CHECK(cudaDeviceSynchronize());
    expect_value("a managed variable", 42, *word);
    CHECK(cudaSetDevice(1));
    CUresult launched = cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr);
    // Either it counts, as natively, or it says that it cannot.
    CHECK(cudaDeviceSynchronize());
    expect_value("a managed variable and the other device", launched == CUDA_SUCCESS ? 43 : 42, *word);
    if (launched != CUDA_SUCCESS) expect_value("its code on the other device", CUDA_ERROR_NOT_SUPPORTED, launched);
    DRIVER(cuLibraryUnload(library));
}

// A graph that forks to the other device's stream and comes back: right, or refused.
static void graph() {
    const int n = 4000;
    int *data[2] = {on_device(0, n, 0), on_device(1, n, 100)};
    cudaStream_t streams[2];
    cudaEvent_t fork, joined;
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    CHECK(cudaSetDevice(0));
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    // Each call may be the one that refuses it.
    CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed));
    add<<<(n + 255) / 256, 256, 0, streams[0]>>>(data[0], n, 1);
    CHECK(cudaEventRecord(fork, streams[0]));
    CHECK(cudaStreamWaitEvent(streams[1], fork));
    CHECK(cudaSetDevice(1));
    add<<<(n + 255) / 256, 256, 0, streams[1]>>>(data[1], n, 5);
    bool works = cudaGetLastError() == cudaSuccess;
    works = works && cudaMemcpyPeerAsync(data[1], 1, data[0], 0, n / 2 * sizeof(int), streams[1]) == cudaSuccess;
    works = cudaEventRecord(joined, streams[1]) == cudaSuccess && works;
    CHECK(cudaSetDevice(0));
    works = cudaStreamWaitEvent(streams[0], joined) == cudaSuccess && works;
    if (works) add<<<(n + 255) / 256, 256, 0, streams[0]>>>(data[0], n, 10);
    works = cudaStreamEndCapture(streams[0], &graph) == cudaSuccess && works;
    works = works && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
    for (int i = 0; works && i < 3; i++) CHECK(cudaGraphLaunch(exec, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    cudaGetLastError();
    expect_value("a graph's memory on its first device", 1, holds(data[0], n, works ? 33 : 0));
    expect_value("a graph's copy to its second device", 1, holds(data[1], n / 2, works ? 23 : 100));
    expect_value("a graph's kernel on its second device", 1, holds(data[1] + n / 2, n - n / 2, 100 + n / 2 + (works ? 15 : 0)));
    if (exec) CHECK(cudaGraphExecDestroy(exec));
    if (graph) CHECK(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamDestroy(streams[i]));
        CHECK(cudaFree(data[i]));
    }
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(joined));
}

// What is set for a kernel on one device does not hold on the other, and neither do limits.
static void settings() {
    const int bytes = 64 << 10;
    int *data[2] = {on_device(0, 256, 0), on_device(1, 256, 0)};
    CHECK(cudaSetDevice(0));
    CHECK(cudaFuncSetAttribute(large_block, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    LAUNCH_LEAVES(cudaSuccess, (large_block<<<1, 256, bytes>>>(data[0])));
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, large_block));
    expect_value("dynamic memory on the first device", bytes, attributes.maxDynamicSharedSizeBytes);
    CHECK(cudaSetDevice(1));
    CHECK(cudaFuncGetAttributes(&attributes, large_block));
    expect_value("dynamic memory on the second device", 48 << 10, attributes.maxDynamicSharedSizeBytes);
    LAUNCH_LEAVES(cudaErrorInvalidValue, (large_block<<<1, 256, bytes>>>(data[1])));
    CHECK(cudaSetDevice(0));
    size_t limits[2], before;
    CHECK(cudaDeviceGetLimit(&before, cudaLimitPrintfFifoSize));
    CHECK(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 2 * before));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaDeviceGetLimit(&limits[i], cudaLimitPrintfFifoSize));
        CHECK(cudaFree(data[i]));
    }
    expect_value("the limit of the first device", 2 * before, limits[0]);
    expect_value("the limit of the second device", before, limits[1]);
}

// Threads with their per-thread default streams on both devices.
static void per_thread_streams() {
    const int n = 2000;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; t++) {
        threads.emplace_back([&wrong, t] {
            int own = t % 2, other = 1 - own;
            int *data = on_device(own, n, t), *over = on_device(other, n, 0);
            // Its bytes may still be on their way, on a stream of the other device that this one does not wait for.
            CHECK(cudaDeviceSynchronize());
            CHECK(cudaSetDevice(own));
            for (int round = 0; round < 20; round++) add<<<(n + 255) / 256, 256, 0, cudaStreamPerThread>>>(data, n, t);
            CHECK(cudaMemcpyPeerAsync(over, other, data, own, n * sizeof(int), cudaStreamPerThread));
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
            wrong += !holds(data, n, 21 * t) + !holds(over, n, 21 * t);
            CHECK(cudaFree(data));
            CHECK(cudaFree(over));
        });
    }
    for (std::thread &thread : threads) thread.join();
    expect_value("what per-thread streams did wrong", 0, wrong);
}

// Memory of the second device that both may use, mapped by the program.
static void mapped() {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = 1;
    size_t part;
    CHECK(cudaSetDevice(1));
    DRIVER(cuMemGetAllocationGranularity(&part, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUdeviceptr at;
    CUmemGenericAllocationHandle handle;
    DRIVER(cuMemAddressReserve(&at, part, 0, 0, 0));
    DRIVER(cuMemCreate(&handle, part, &properties, 0));
    DRIVER(cuMemMap(at, part, 0, handle, 0));
    CUmemAccessDesc access[2] = {{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    access[0].location.id = 0;
    DRIVER(cuMemSetAccess(at, part, access, 2));
    const int n = 3000;
    int *words = (int *)at;
    CHECK(cudaMemcpy(words, numbers(n, 3).data(), n * sizeof(int), cudaMemcpyHostToDevice));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        add<<<(n + 255) / 256, 256>>>(words, n, i + 1);
        CHECK(cudaDeviceSynchronize());
    }
    expect_value("mapped memory of both", 1, holds(words, n, 6));
    DRIVER(cuMemUnmap(at, part));
    DRIVER(cuMemRelease(handle));
    DRIVER(cuMemAddressFree(at, part));
}

// Stream-ordered memory of the second device, which the first may use, and which is freed in the first one's stream.
static void stream_ordered() {
    const int n = 3000;
    cudaStream_t streams[2];
    cudaMemPool_t pool;
    cudaEvent_t made;
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 1));
    cudaMemAccessDesc access = {};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = 0;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    CHECK(cudaMemPoolSetAccess(pool, &access, 1));
    CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    for (int round = 0; round < 5; round++) {
        int *data, *seen;
        CHECK(cudaMallocAsync(&data, n * sizeof(int), streams[1]));
        late_fill<<<1, 64, 0, streams[1]>>>(50000, data, n, round);
        CHECK(cudaEventRecord(made, streams[1]));
        CHECK(cudaSetDevice(0));
        CHECK(cudaStreamWaitEvent(streams[0], made));
        CHECK(cudaMallocAsync(&seen, n * sizeof(int), streams[0]));
        copy<<<(n + 255) / 256, 256, 0, streams[0]>>>(seen, data, n);
        CHECK(cudaFreeAsync(data, streams[0]));
        CHECK(cudaStreamSynchronize(streams[0]));
        expect_value("stream-ordered memory of the other device", 1, all_are(seen, n, round));
        CHECK(cudaFreeAsync(seen, streams[0]));
        CHECK(cudaSetDevice(1));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamSynchronize(streams[i]));
        CHECK(cudaStreamDestroy(streams[i]));
    }
    CHECK(cudaEventDestroy(made));
}

// A device whose kernel has failed is lost to the process. The other one keeps its memory and its work, until the reset.
static void failed_device() {
    const int n = 1000;
    int *data = on_device(0, n, 0);
    CHECK(cudaSetDevice(1));
    stray<<<1, 1>>>((int *)0x10);
    cudaError_t failed = cudaDeviceSynchronize();
    expect_("a stray kernel", cudaErrorIllegalAddress, failed);
    int *none;
    expect_("memory of the failed device", cudaErrorIllegalAddress, cudaMalloc(&none, 4));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    DRIVER(cuInit(0));
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count >= 2, "there are not two devices");
    pinned();
    managed();
    managed_variable();
    variables();
    per_thread_streams();
    graph();
    settings();
    peers();
    mapped();
    textures();
    surfaces();
    stream_ordered();
    failed_device();
    return verdict();
}
