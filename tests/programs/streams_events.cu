// Streams that overlap, events that order them across streams, queries, host functions, callbacks and event times.
//
// Overlap is shown without a clock: one stream is held by a host function until another stream's work has been
// waited for, which could not end if the streams took turns.
#define PROGRAM "streams_events"
#include "common.h"

#include <atomic>
#include <sched.h>
#include <vector>

__global__ void scale_add(int *data, int n, int factor, int addend) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * factor + addend;
}

__global__ void copy_plus(const int *from, int *to, int n, int addend) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i] + addend;
}

static std::atomic<bool> gate_open{false};
static std::atomic<bool> gate_reached{false};

static void CUDART_CB wait_at_gate(void *) {
    gate_reached = true;
    while (!gate_open) sched_yield();
}

struct Order {
    int expected;
    std::atomic<int> *counter;
    std::atomic<int> *mistakes;
};

static void CUDART_CB in_order(void *argument) {
    Order *order = (Order *)argument;
    if (order->counter->fetch_add(1) != order->expected) order->mistakes->fetch_add(1);
}

static void CUDART_CB callback(cudaStream_t, cudaError_t status, void *argument) {
    if (status == cudaSuccess) ((std::atomic<int> *)argument)->fetch_add(1);
}

// Copies in, computes and copies out in several streams at once.
static void pipelines(const Options &options) {
    const int streams = 4, n = options.full ? 1 << 20 : 3000, rounds = 3;
    Random random(options.seed);
    cudaStream_t stream[streams];
    cudaEvent_t start[streams], end[streams];
    int *host[streams], *device[streams];
    std::vector<int> original[streams];
    for (int s = 0; s < streams; s++) {
        if (s == 0) CHECK(cudaStreamCreate(&stream[s]));
        else CHECK(cudaStreamCreateWithFlags(&stream[s], cudaStreamNonBlocking));
        CHECK(cudaEventCreate(&start[s]));
        CHECK(cudaEventCreate(&end[s]));
        CHECK(cudaMallocHost(&host[s], n * sizeof(int)));
        CHECK(cudaMalloc(&device[s], n * sizeof(int)));
        random.fill(host[s], n * sizeof(int));
        original[s].assign(host[s], host[s] + n);
    }
    for (int s = 0; s < streams; s++) CHECK(cudaEventRecord(start[s], stream[s]));
    for (int s = 0; s < streams; s++)
        CHECK(cudaMemcpyAsync(device[s], host[s], n * sizeof(int), cudaMemcpyHostToDevice, stream[s]));
    for (int round = 0; round < rounds; round++)
        for (int s = 0; s < streams; s++) {
            scale_add<<<(n + 127) / 128, 128, 0, stream[s]>>>(device[s], n, 3 + s, round);
            LAUNCHED();
        }
    for (int s = 0; s < streams; s++) {
        CHECK(cudaMemcpyAsync(host[s], device[s], n * sizeof(int), cudaMemcpyDeviceToHost, stream[s]));
        CHECK(cudaEventRecord(end[s], stream[s]));
    }
    for (int s = 0; s < streams; s++) {
        CHECK(cudaEventSynchronize(end[s]));
        CHECK(cudaEventQuery(end[s]));
        CHECK(cudaStreamSynchronize(stream[s]));
        CHECK(cudaStreamQuery(stream[s]));
        float milliseconds = -1.0f;
        CHECK(cudaEventElapsedTime(&milliseconds, start[s], end[s]));
        REQUIRE(milliseconds > 0.0f && milliseconds < 600e3f, "stream %d took %g ms by its events", s, milliseconds);
        for (int i = 0; i < n; i++) {
            unsigned want = (unsigned)original[s][i];
            for (int round = 0; round < rounds; round++) want = want * (3 + s) + round;
            REQUIRE((unsigned)host[s][i] == want, "stream %d: element %d is %d, not %d", s, i, host[s][i], (int)want);
        }
        CHECK(cudaEventDestroy(start[s]));
        CHECK(cudaEventDestroy(end[s]));
        CHECK(cudaStreamDestroy(stream[s]));
        CHECK(cudaFreeHost(host[s]));
        CHECK(cudaFree(device[s]));
    }
}

// One stream stands still; another goes on; a third waits for an event of the first.
static void overlap() {
    const int n = 1000;
    cudaStream_t held, running, waiting;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&running, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
    cudaEvent_t passed;
    CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
    CHECK(cudaEventQuery(passed));  // never recorded: complete

    int *a, *b, *c, *host;
    CHECK(cudaMalloc(&a, n * sizeof(int)));
    CHECK(cudaMalloc(&b, n * sizeof(int)));
    CHECK(cudaMalloc(&c, n * sizeof(int)));
    CHECK(cudaMallocHost(&host, n * sizeof(int)));
    CHECK(cudaMemset(a, 0, n * sizeof(int)));
    CHECK(cudaMemset(b, 0, n * sizeof(int)));
    CHECK(cudaMemset(c, 0, n * sizeof(int)));
    // CUDA loads a kernel at its first use, and may wait for the whole context to do it: not while a stream is held.
    copy_plus<<<1, 1>>>(a, c, 0, 0);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());

    CHECK(cudaLaunchHostFunc(held, wait_at_gate, nullptr));
    scale_add<<<8, 128, 0, held>>>(a, n, 1, 5);
    LAUNCHED();
    CHECK(cudaEventRecord(passed, held));
    CHECK(cudaStreamWaitEvent(waiting, passed, 0));
    copy_plus<<<8, 128, 0, waiting>>>(a, c, n, 1);
    LAUNCHED();
    scale_add<<<8, 128, 0, running>>>(b, n, 1, 7);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(host, b, n * sizeof(int), cudaMemcpyDeviceToHost, running));
    CHECK(cudaStreamSynchronize(running));
    for (int i = 0; i < n; i++) REQUIRE(host[i] == 7, "the running stream's element %d is %d, not 7", i, host[i]);
    while (!gate_reached) sched_yield();
    EXPECT(cudaErrorNotReady, cudaEventQuery(passed));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(held));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(waiting));

    gate_open = true;
    CHECK(cudaStreamSynchronize(waiting));
    CHECK(cudaEventQuery(passed));
    CHECK(cudaStreamSynchronize(held));
    CHECK(cudaMemcpy(host, c, n * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) REQUIRE(host[i] == 6, "the waiting stream's element %d is %d, not 6", i, host[i]);

    CHECK(cudaEventDestroy(passed));
    CHECK(cudaStreamDestroy(held));
    CHECK(cudaStreamDestroy(running));
    CHECK(cudaStreamDestroy(waiting));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    CHECK(cudaFree(c));
    CHECK(cudaFreeHost(host));
}

// Host functions and callbacks run once each, in stream order, after the work before them.
static void host_functions() {
    const int calls = 20;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *device, *host;
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMallocHost(&host, sizeof(int)));
    CHECK(cudaMemsetAsync(device, 0, sizeof(int), stream));
    std::atomic<int> counter{0}, mistakes{0}, callbacks{0};
    std::vector<Order> orders(calls);
    for (int i = 0; i < calls; i++) {
        scale_add<<<1, 1, 0, stream>>>(device, 1, 1, 1);
        LAUNCHED();
        orders[i] = {i, &counter, &mistakes};
        CHECK(cudaLaunchHostFunc(stream, in_order, &orders[i]));
        CHECK(cudaStreamAddCallback(stream, callback, &callbacks, 0));
    }
    CHECK(cudaMemcpyAsync(host, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(*host == calls, "the kernels ran %d times, not %d", *host, calls);
    REQUIRE(counter == calls && mistakes == 0, "%d host functions ran, %d out of order", (int)counter, (int)mistakes);
    REQUIRE(callbacks == calls, "%d callbacks ran, not %d", (int)callbacks, calls);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(host));
}

// The legacy default stream waits for, and is waited for by, every blocking stream.
static void default_stream() {
    const int n = 500;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *device, *host;
    CHECK(cudaMalloc(&device, n * sizeof(int)));
    CHECK(cudaMallocHost(&host, n * sizeof(int)));
    CHECK(cudaMemset(device, 0, n * sizeof(int)));
    for (int round = 0; round < 4; round++) {
        scale_add<<<4, 128, 0, stream>>>(device, n, 2, 1);
        LAUNCHED();
        scale_add<<<4, 128>>>(device, n, 3, 1);
        LAUNCHED();
    }
    CHECK(cudaMemcpy(host, device, n * sizeof(int), cudaMemcpyDeviceToHost));
    int want = 0;
    for (int round = 0; round < 4; round++) want = (want * 2 + 1) * 3 + 1;
    for (int i = 0; i < n; i++) REQUIRE(host[i] == want, "default stream: element %d is %d, not %d", i, host[i], want);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(host));
}

static void properties() {
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    REQUIRE(least >= greatest, "the priorities go from %d to %d", least, greatest);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    int priority;
    unsigned flags;
    CHECK(cudaStreamGetPriority(stream, &priority));
    CHECK(cudaStreamGetFlags(stream, &flags));
    REQUIRE(priority == greatest, "a stream of priority %d says %d", greatest, priority);
    REQUIRE(flags == cudaStreamNonBlocking, "a non-blocking stream has the flags %u", flags);
    cudaEvent_t timed, untimed;
    CHECK(cudaEventCreate(&timed));
    CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming | cudaEventBlockingSync));
    float milliseconds;
    EXPECT(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, timed, timed));  // not recorded
    CHECK(cudaEventRecord(timed, stream));
    CHECK(cudaEventRecord(untimed, stream));
    CHECK(cudaEventSynchronize(untimed));
    EXPECT(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, timed, untimed));
    // Handles may go while their work is still under way.
    scale_add<<<1, 1, 0, stream>>>(nullptr, 0, 1, 1);
    LAUNCHED();
    CHECK(cudaEventRecord(timed, stream));
    CHECK(cudaEventDestroy(timed));
    CHECK(cudaEventDestroy(untimed));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    pipelines(options);
    overlap();
    host_functions();
    default_stream();
    properties();
    return pass("pipelines, overlap, host functions, default stream, properties");
}
