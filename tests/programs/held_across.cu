// Copies between two devices, which hold their streams, and what comes behind them or beside them: nothing waits for what waits for it. If nothing happens any more, the program fails. The cases are
//
//   blocking, default   threads that make synchronous copies from pageable memory while another one copies between the devices in a blocking stream, or in the default stream
//   per_thread          a synchronous copy in a per-thread default stream behind a copy between the devices in the legacy one
//   context             a context that waits for an event behind a copy between the devices
//   free                large memory of a device with a held stream is freed while copies go on
//   stalled             copies to two servers, one of which the test stops after READY until COPIED
//   stalled_memory      the same for memory that is mapped, given to graphs, and used by kernels of the host's
//   limit, destroy      a limit that is set, and a context that is destroyed, while a stream waits for the host and then for a copy
//   first               the second device is used for the first time while a stream of the first one waits for the host
//   reset               of three devices, the first two of one server, the first one is reset while the second one waits for a copy
#define PROGRAM "held_across"
#include "common.h"
#include "cases.h"
#include "driver.h"
#include "several_devices.h"

#include <chrono>
#include <functional>

extern "C" CUresult cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t bytes);

static const int N = 1000;
static const size_t BYTES = N * sizeof(int);

// What the program's first thread has done. Each step takes milliseconds.
static std::atomic<int> steps{0};

static void watch(const char *what) {
    std::thread([what] {
        for (int last = -1; last != steps;) {
            last = steps;
            std::this_thread::sleep_for(std::chrono::seconds(120));
        }
        fail("%s: nothing happens any more after %d steps", what, steps.load());
    }).detach();
}

static void copy_from(const std::vector<int> &host, int *to) {
    CHECK(cudaMemcpy(to, host.data(), BYTES, cudaMemcpyHostToDevice));
}

// The stream is made on the first device.
static void threads(bool in_default) {
    int *here = on_device(0, N, 0), *there = on_device(1, N, 0), *sent[2];
    for (int i = 0; i < 2; i++) sent[i] = on_device(i, N, 0);
    int *told = on_device(1, N, 0), *found = on_device(0, N, 0);
    cudaStream_t stream = nullptr, beside;
    CHECK(cudaSetDevice(0));
    if (!in_default) CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    std::atomic<bool> over{false};
    std::atomic<int> wrong{0}, overtaken{0};
    std::vector<std::thread> others;
    for (int i = 0; i < 2; i++) {
        others.emplace_back([&, i] {
            CHECK(cudaSetDevice(i));
            for (int round = 1; !over; round++) {
                for (int time = 0; time < 10; time++) copy_from(numbers(N, round + time), sent[i]);
                wrong += !holds(sent[i], N, round + 9);
            }
        });
    }
    // What a synchronous copy to the second device has told is done, a stream of the first one finds there.
    others.emplace_back([&] {
        for (int round = 1; !over; round++) {
            CHECK(cudaSetDevice(1));
            copy_from(numbers(N, round), told);
            CHECK(cudaSetDevice(0));
            CHECK(cudaMemcpyPeerAsync(found, 0, told, 1, BYTES, beside));
            std::vector<int> host(N);
            CHECK(cudaMemcpyAsync(host.data(), found, BYTES, cudaMemcpyDeviceToHost, beside));
            CHECK(cudaStreamSynchronize(beside));
            overtaken += host != numbers(N, round);
        }
    });
    CHECK(cudaSetDevice(0));
    for (int round = 1; round <= 500; round++) {
        CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, stream));
        CHECK(cudaMemcpyPeerAsync(here, 0, there, 1, BYTES, stream));
        if (round % 3 == 0) CHECK(cudaStreamSynchronize(stream));
        steps++;
    }
    CHECK(cudaStreamSynchronize(stream));
    over = true;
    for (std::thread &other : others) other.join();
    expect_value("copies that were overtaken", 0, overtaken);
    expect_value("wrong synchronous copies", 0, wrong);
    expect_value("what the copies between the devices leave", 1, holds(here, N, 0) && holds(there, N, 0));
}

static void per_thread() {
    int *here = on_device(0, N, 7), *there = on_device(1, N, 0), *sent = on_device(0, N, 0);
    Gate gate;
    CHECK(cudaSetDevice(0));
    CHECK(cudaLaunchHostFunc(cudaStreamLegacy, Gate::wait, &gate));
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, cudaStreamLegacy));
    std::atomic<bool> returned{false};
    std::thread other([&] {
        CHECK(cudaSetDevice(0));
        DRIVER(cuMemcpyHtoD_v2_ptds((CUdeviceptr)sent, numbers(N, 5).data(), BYTES));
        returned = true;
    });
    // It may wait for the copy before it.
    for (int i = 0; i < 100 && !returned; i++) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    gate.open = true;
    other.join();
    CHECK(cudaDeviceSynchronize());
    expect_value("the copy between the devices", 1, holds(there, N, 7));
    expect_value("the synchronous copy", 1, holds(sent, N, 5));
}

static void context() {
    int *here = on_device(0, N, 7), *there = on_device(1, N, 0);
    cudaStream_t stream;
    cudaEvent_t event;
    CUcontext context;
    CHECK(cudaSetDevice(0));
    DRIVER(cuCtxGetCurrent(&context));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    for (int round = 0; round < 2; round++) {
        Gate gate;
        CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
        CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, stream));
        CHECK(cudaEventRecord(event, stream));
        DRIVER(cuCtxWaitEvent(context, event));
        gate.open = true;
        CHECK(cudaDeviceSynchronize());
        steps++;
    }
    expect_value("the copy between the devices", 1, holds(there, N, 7));
}

// Calls something that comes behind all earlier work, also behind a copy that its stream has not begun. `meanwhile` is done
// before the stream continues.
static void behind_a_copy(const std::function<void()> &call, const std::function<void()> &meanwhile) {
    int *here = on_device(0, N, 7), *there = on_device(1, N, 0);
    cudaStream_t stream;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int round = 0; round < 2; round++) {
        Gate gate;
        CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
        CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, stream));
        std::atomic<bool> returned{false};
        std::thread other([&] {
            CHECK(cudaSetDevice(0));
            call();
            returned = true;
        });
        // It may wait for the copy.
        for (int i = 0; i < 100 && !returned; i++) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        meanwhile();
        gate.open = true;
        other.join();
        CHECK(cudaDeviceSynchronize());
        steps++;
    }
    expect_value("the copy between the devices", 1, holds(there, N, 7));
}

static void limit() {
    behind_a_copy([] { CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 2048)); }, [] {});
    size_t size = 0;
    CHECK(cudaDeviceGetLimit(&size, cudaLimitStackSize));
    expect_value("the limit", 2048, size);
}

// More events than the library keeps unused before it gives their numbers to others.
static std::vector<cudaEvent_t> many_events() {
    std::vector<cudaEvent_t> events(600);
    for (cudaEvent_t &event : events) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return events;
}

static void destroy() {
    CUcontext contexts[2];
    CHECK(cudaSetDevice(0));
    for (CUcontext &context : contexts) {
        DRIVER(cuCtxCreate(&context, nullptr, 0, 0));
        many_events();
        DRIVER(cuCtxPopCurrent(&context));
    }
    cudaStream_t beside;
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    std::vector<cudaEvent_t> events;
    int at = 0;
    behind_a_copy([&] { DRIVER(cuCtxDestroy(contexts[at++])); },
                  [&] {
                      for (cudaEvent_t event : many_events()) events.push_back(event);
                      for (cudaEvent_t event : events) CHECK(cudaEventRecord(event, beside));
                      CHECK(cudaStreamSynchronize(beside));
                  });
    // Those made meanwhile are not the destroyed context's.
    for (cudaEvent_t event : events) {
        CHECK(cudaEventRecord(event, beside));
        CHECK(cudaEventSynchronize(event));
        CHECK(cudaEventDestroy(event));
    }
    CHECK(cudaDeviceSynchronize());
}

// Large memory of a device with a held stream is freed, and copies between the devices go on.
static void free_memory() {
    int *here = on_device(0, N, 7), *there = on_device(1, N, 0);
    const size_t large = size_t(300) << 20;
    cudaStream_t held, beside, away;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&away, cudaStreamNonBlocking));
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    void *data[2], *more;
    for (void *&each : data) CHECK(cudaMalloc(&each, large));
    size_t before = 0, after = 0, total = 0;
    CHECK(cudaMemGetInfo(&before, &total));
    Gate gate;
    CHECK(cudaLaunchHostFunc(held, Gate::wait, &gate));
    for (void *each : data) {
        CHECK(cudaFreeAsync(each, beside));
        CHECK(cudaStreamSynchronize(beside));
    }
    // Soon after the frees are known to be reached.
    // The amount is not exact: other programs may use the device, and CUDA gives whole blocks back.
    const size_t least = before + 2 * large - (size_t(32) << 20);
    for (int i = 0; i < 12000 && after < least; i++) {
        CHECK(cudaMemGetInfo(&after, &total));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    expect_value("what was freed is free", 1, after >= least);
    CHECK(cudaMallocAsync(&more, large, beside));
    steps++;
    CHECK(cudaMemcpy2DAsync(there, 40, here, 40, 40, BYTES / 40, cudaMemcpyDefault, away));
    CHECK(cudaStreamSynchronize(away));
    steps++;
    gate.open = true;
    CHECK(cudaFreeAsync(more, beside));
    CHECK(cudaDeviceSynchronize());
    // The memory that was given back can be used.
    for (void *&each : data) {
        CHECK(cudaMalloc(&each, large));
        CHECK(cudaMemset(each, 1, large));
    }
    for (void *each : data) CHECK(cudaFree(each));
    expect_value("the copy between the devices", 1, holds(there, N, 7));
}

// The second device works before the first one goes on. What is copied from the first one's memory comes behind a fill that nobody has waited for: natively, that is over before the second device can do anything.
static void first() {
    int *here = on_device(0, N, 0);
    cudaStream_t held, free, away;
    CHECK(cudaSetDevice(0));
    for (cudaStream_t *stream : {&held, &free}) CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    Gate gate;
    CHECK(cudaLaunchHostFunc(held, Gate::wait, &gate));
    CHECK(cudaMemsetAsync(here, 1, BYTES, free));
    CHECK(cudaSetDevice(1));
    int *there = on_device(1, N, 7);
    CHECK(cudaStreamCreateWithFlags(&away, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    expect_value("the second device's memory", 1, holds(there, N, 7));
    steps++;
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, away));
    CHECK(cudaStreamSynchronize(away));
    std::vector<int> host(N);
    CHECK(cudaMemcpy(host.data(), there, BYTES, cudaMemcpyDeviceToHost));
    expect_value("what was filled before", 1, host == std::vector<int>(N, 0x01010101));
    steps++;
    gate.open = true;
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceSynchronize());
}

// A device is reset. The other device of its server waits for the host, for an event of the device that is reset, and for a copy.
static void reset() {
    int *there = on_device(1, N, 0), *away = on_device(2, N, 7);
    cudaStream_t stream;
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int round = 0; round < 3; round++) {
        cudaEvent_t event;
        CHECK(cudaSetDevice(0));
        on_device(0, N, 1);
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CHECK(cudaEventRecord(event, nullptr));
        CHECK(cudaSetDevice(1));
        CHECK(cudaMemsetAsync(there, 0, BYTES, stream));
        Gate gate;
        if (round < 2) CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
        CHECK(cudaMemcpyPeerAsync(there, 1, away, 2, BYTES, stream));
        CHECK(cudaStreamWaitEvent(stream, event, 0));
        CHECK(cudaSetDevice(0));
        if (round == 1) CHECK(cudaEventDestroy(event));
        CHECK(cudaDeviceReset());
        steps++;
        gate.open = true;
        // The device can be used again.
        expect_value("memory of the device after the reset", 1, holds(on_device(0, N, 3), N, 3));
        CHECK(cudaSetDevice(1));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaDeviceSynchronize());
        expect_value("the copy between the devices", 1, holds(there, N, 7));
    }
}

// Copies to two other servers, one of which does not answer until the other copy is done. The copies through the program
// use several pieces of its memory, most of which that server does not know before.
static void stalled() {
    const int n = 1 << 20;
    const size_t bytes = n * sizeof(int);
    int *here = on_device(0, n, 7), *there = on_device(1, n, 0), *stalling = on_device(2, n, 0);
    cudaStream_t streams[2];
    CHECK(cudaSetDevice(0));
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, bytes, streams[1]));
    CHECK(cudaStreamSynchronize(streams[1]));
    CHECK(cudaMemcpyPeerAsync(stalling, 2, here, 0, BYTES, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    for (int device : {1, 2}) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaMemset(device == 1 ? there : stalling, 0, bytes));
        CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaSetDevice(0));
    steps++;
    printf("READY\n");
    fflush(stdout);
    getchar();
    CHECK(cudaMemcpyPeerAsync(stalling, 2, here, 0, bytes, streams[0]));
    CHECK(cudaMemcpyPeerAsync(there, 1, here, 0, bytes, streams[1]));
    CHECK(cudaStreamSynchronize(streams[1]));
    steps++;
    printf("COPIED\n");
    fflush(stdout);
    CHECK(cudaStreamSynchronize(streams[0]));
    expect_value("both copies", 1, holds(there, n, 7) && holds(stalling, n, 7));
}

// Memory of a device that is mapped at an address, or will be.
struct Mapped {
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle memory;
    size_t size = 0;
    CUmemAccessDesc access = {};

    explicit Mapped(int device) {
        CUmemAllocationProp kind = {};
        kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
        access = {kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        DRIVER(cuMemGetAllocationGranularity(&size, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        DRIVER(cuMemCreate(&memory, size, &kind, 0));
        DRIVER(cuMemAddressReserve(&at, size, 0, 0, 0));
    }

    void map() {
        DRIVER(cuMemMap(at, size, 0, memory, 0));
        DRIVER(cuMemSetAccess(at, size, &access, 1));
    }

    void copy(int from) { copy_from(numbers(N, from), (int *)at); }
};

// A graph that fills memory of its own and frees it.
static cudaGraphExec_t graph_with_memory(int device) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    void *data;
    CHECK(cudaSetDevice(device));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMallocAsync(&data, BYTES, stream));
    CHECK(cudaMemsetAsync(data, 1, BYTES, stream));
    CHECK(cudaFreeAsync(data, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

__global__ void add_one(int *data, int n) {
    for (int i = 0; i < n; i++) data[i]++;
}

// Threads ask the third server, which does not answer, for memory. Meanwhile the second one gives memory.
static void stalled_memory() {
    // The first calls, which open the sessions.
    for (int device : {0, 1, 2}) on_device(device, 1, 0);
    Mapped before(1), beside(1), stalling(2);
    before.map();
    cudaGraphExec_t graphs[] = {graph_with_memory(1), graph_with_memory(2)};
    int *hosts[2];
    CHECK(cudaSetDevice(0));
    for (int *&host : hosts) {
        CHECK(cudaMallocHost(&host, BYTES));
        std::copy_n(numbers(N, 3).data(), N, host);
    }
    int *warm = on_device(2, 1, 0);
    add_one<<<1, 1>>>(warm, 1);
    CHECK(cudaDeviceSynchronize());
    cudaStream_t stream;
    int *there = on_device(1, N, 0);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    steps++;
    printf("READY\n");
    fflush(stdout);
    getchar();
    std::vector<std::thread> asking;
    auto ask = [&](const std::function<void()> &what) {
        asking.emplace_back([what] {
            CHECK(cudaSetDevice(2));
            what();
        });
    };
    ask([&] { stalling.map(); });
    ask([&] { CHECK(cudaGraphLaunch(graphs[1], cudaStreamPerThread)); });
    ask([&] { add_one<<<1, 1>>>(hosts[1], N); });
    // So that they wait for the server. If they did not yet, the rest would show less, and fail no more.
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    before.copy(5);
    expect_value("memory that was mapped before", 1, holds((int *)before.at, N, 5));
    steps++;
    beside.map();
    beside.copy(6);
    expect_value("memory that is mapped meanwhile", 1, holds((int *)beside.at, N, 6));
    steps++;
    CHECK(cudaGraphLaunch(graphs[0], stream));
    CHECK(cudaStreamSynchronize(stream));
    steps++;
    CHECK(cudaMemcpyAsync(there, hosts[0], BYTES, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpyAsync(hosts[0], there, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_value("pinned memory", 1, holds(there, N, 3));
    steps++;
    printf("COPIED\n");
    fflush(stdout);
    for (std::thread &thread : asking) thread.join();
    CHECK(cudaSetDevice(2));
    stalling.copy(8);
    expect_value("memory that the other server has mapped", 1, holds((int *)stalling.at, N, 8));
    CHECK(cudaDeviceSynchronize());
    expect_value("what its kernel has written", 1, std::vector<int>(hosts[1], hosts[1] + N) == numbers(N, 4));
}

int main(int argc, char **argv) {
    const std::string what = parse_options(argc, argv).word;
    watch(what.c_str());
    if (what == "blocking") threads(false);
    else if (what == "default") threads(true);
    else if (what == "per_thread") per_thread();
    else if (what == "context") context();
    else if (what == "limit") limit();
    else if (what == "destroy") destroy();
    else if (what == "free") free_memory();
    else if (what == "first") first();
    else if (what == "reset") reset();
    else if (what == "stalled") stalled();
    else if (what == "stalled_memory") stalled_memory();
    else fail("knows blocking, default, per_thread, context, limit, destroy, free, first, reset, stalled and stalled_memory");
    return verdict();
}
