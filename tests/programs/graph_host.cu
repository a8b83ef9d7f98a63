// Graphs with what only the program's own process can do: host functions between kernels, copies from and to pageable memory that a
// host function of the same graph writes and reads, host to host copies.
#define PROGRAM "graph_host"
#include "common.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

__global__ void triple(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= 3;
}

struct Work {
    int *from, *to;
    int n, value;
    std::atomic<int> calls{0};
    std::atomic<bool> may_begin{true};
    std::mutex waits;
    std::condition_variable begins;
};

// Writes what the next node copies to the device.
static void CUDART_CB produce(void *argument) {
    Work *work = (Work *)argument;
    if (!work->may_begin) {
        std::unique_lock<std::mutex> held(work->waits);
        bool begins = work->begins.wait_for(held, std::chrono::seconds(120), [work] { return work->may_begin.load(); });
        if (!begins) fail("a launch waits for a host function before it");
    }
    for (int i = 0; i < work->n; i++) work->from[i] = work->value + i;
    work->calls++;
}

// Reads what the node before has copied back, and says what comes next.
static void CUDART_CB consume(void *argument) {
    Work *work = (Work *)argument;
    for (int i = 0; i < work->n; i++)
        if (work->to[i] != 3 * (work->value + i)) work->calls = -1000;
    work->value += 10;
    work->calls++;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = options.full ? 1 << 20 : 5000, rounds = 8;
    const size_t bytes = n * sizeof(int);
    std::vector<int> from(n), middle(n), to(n);
    int *device;
    CHECK(cudaMalloc(&device, bytes));
    Work work;
    work.from = from.data();
    work.to = to.data();
    work.n = n;
    work.value = 1;

    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t make, copy, in, run, out, use;
    cudaHostNodeParams host = {produce, &work};
    CHECK(cudaGraphAddHostNode(&make, graph, nullptr, 0, &host));
    CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &make, 1, middle.data(), from.data(), bytes, cudaMemcpyHostToHost));
    CHECK(cudaGraphAddMemcpyNode1D(&in, graph, &copy, 1, device, middle.data(), bytes, cudaMemcpyHostToDevice));
    int count = n;
    void *arguments[] = {&device, &count};
    cudaKernelNodeParams kernel = {};
    kernel.func = (void *)triple;
    kernel.gridDim = dim3((n + 255) / 256);
    kernel.blockDim = dim3(256);
    kernel.kernelParams = arguments;
    CHECK(cudaGraphAddKernelNode(&run, graph, &in, 1, &kernel));
    CHECK(cudaGraphAddMemcpyNode1D(&out, graph, &run, 1, to.data(), device, bytes, cudaMemcpyDeviceToHost));
    host.fn = consume;
    CHECK(cudaGraphAddHostNode(&use, graph, &out, 1, &host));
    cudaHostNodeParams told;
    CHECK(cudaGraphHostNodeGetParams(use, &told));
    REQUIRE(told.fn == consume && told.userData == &work, "a host node does not say what it was made of");

    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int i = 0; i < rounds; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(work.calls == 2 * rounds, "host functions came to %d, not %d", work.calls.load(), 2 * rounds);
    REQUIRE(to[n - 1] == 3 * (1 + 10 * (rounds - 1) + n - 1), "the last element is %d", to[n - 1]);

    // A host function that waits for what this thread does after the launches.
    if (options.word == "held") {
        work.may_begin = false;
        for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, stream));
        REQUIRE(work.calls == 2 * rounds, "a host function did not wait");
        {
            std::lock_guard<std::mutex> held(work.waits);
            work.may_begin = true;
        }
        work.begins.notify_all();
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(work.calls == 2 * rounds + 4, "host functions came to %d after a wait", work.calls.load());
        REQUIRE(to[n - 1] == 3 * (1 + 10 * (rounds + 1) + n - 1), "the last element is %d after a wait", to[n - 1]);
        return pass("%d launches behind a host function that waits", 2);
    }

    // The same with another piece of work, set in the instance alone.
    Work other;
    other.from = from.data();
    other.to = to.data();
    other.n = n;
    other.value = -50;
    cudaHostNodeParams changed = {produce, &other};
    CHECK(cudaGraphExecHostNodeSetParams(exec, make, &changed));
    changed.fn = consume;
    CHECK(cudaGraphExecHostNodeSetParams(exec, use, &changed));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(other.calls == 2 && work.calls == 2 * rounds, "the other work was called %d times", other.calls.load());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // Captured: host functions and copies from and to pinned memory.
    int *pinned;
    CHECK(cudaMallocHost(&pinned, bytes));
    Work third;
    third.from = pinned;
    third.to = pinned;
    third.n = n;
    third.value = 100;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaLaunchHostFunc(stream, produce, &third));
    CHECK(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream));
    triple<<<(n + 255) / 256, 256, 0, stream>>>(device, n);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaLaunchHostFunc(stream, consume, &third));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < rounds; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(third.calls == 2 * rounds, "captured host functions came to %d", third.calls.load());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return pass("%d launches, host functions in order", 2 * rounds + 1);
}
