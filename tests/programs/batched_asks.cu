// A copy to the device, and behind it a call for which the driver may wait until the copy is done: loading code, freeing and making memory, instantiating a graph, resetting the
// device. Both reach the server together, if the variable BRIDGE_PID names the process between them: it is stopped while they are issued, as a busy machine would delay it.
//
// usage: batched_asks [MODE-BYTES], one of the modes below and the bytes to copy; all of them, in small, without one
#define PROGRAM "batched_asks"
#include "common.h"

#include <csignal>
#include <thread>
#include <unistd.h>
#include <vector>

#include <cuda.h>

#include "batched_asks.h"

static const char *PTX = R"(
.version 8.0
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
)";

__global__ void increment(int *data, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) data[i] += 1;
}

static void capture(cudaGraph_t *graph, int *data) {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    increment<<<1, 32, 0, stream>>>(data, 32);
    CHECK(cudaStreamEndCapture(stream, graph));
    CHECK(cudaStreamDestroy(stream));
}

// Copies `bytes` bytes, then does what `mode` says, then looks at the bytes.
static void run(const std::string &mode, size_t bytes) {
    const int count = bytes / sizeof(int);
    std::vector<int> host(count), numbers(64, 5);
    for (int i = 0; i < count; i++) host[i] = i * 7 + 3;
    int *data, *more, *made = nullptr;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUmodule module = nullptr;
    CHECK(cudaMalloc(&data, bytes));
    CHECK(cudaMalloc(&more, 64 << 20));
    if (mode == "unload" && cuModuleLoadData(&module, PTX) != CUDA_SUCCESS) fail("no module");
    if (mode == "instantiate") capture(&graph, more);
    CHECK(cudaDeviceSynchronize());

    const char *number = getenv("BRIDGE_PID");
    pid_t bridge = number ? atoi(number) : 0;
    std::thread wake;
    if (bridge) {
        if (kill(bridge, SIGSTOP)) fail("no process %d", bridge);
        wake = std::thread([=] {
            usleep(300000);
            kill(bridge, SIGCONT);
        });
    }
    CHECK(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice));
    int added = 0;
    if (mode == "load") {
        increment<<<1, 256>>>(data, count);
        CHECK(cudaGetLastError());
        added = 1;
    } else if (mode == "symbol") {
        CHECK(write_symbol(numbers.data()));
        CHECK(launch_other(data, count));
        added = 5;
    } else if (mode == "free") {
        CHECK(cudaFree(more));
    } else if (mode == "malloc") {
        CHECK(cudaMalloc(&made, 512 << 20));
    } else if (mode == "unload") {
        if (cuModuleUnload(module) != CUDA_SUCCESS) fail("the module is not unloaded");
    } else if (mode == "instantiate") {
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
    } else if (mode == "reset") {
        CHECK(cudaDeviceReset());
    } else {
        fail("does not know the mode %s", mode.c_str());
    }
    if (wake.joinable()) wake.join();
    if (mode == "reset") return;
    std::vector<int> back(count);
    CHECK(cudaMemcpy(back.data(), data, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) {
        if (back[i] != host[i] + added) fail("%s: element %d is %d, not %d", mode.c_str(), i, back[i], host[i] + added);
    }
    CHECK(cudaFree(data));
    CHECK(cudaFree(made));
    if (mode != "free") CHECK(cudaFree(more));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    if (options.word.empty()) {
        const char *modes[] = {"load", "symbol", "free", "malloc", "unload", "instantiate", "reset"};
        for (const char *mode : modes) run(mode, 256 << 10);
        return pass("all modes");
    }
    size_t dash = options.word.find('-');
    if (dash == std::string::npos) fail("wants MODE-BYTES");
    size_t bytes = strtoull(options.word.c_str() + dash + 1, nullptr, 0);
    run(options.word.substr(0, dash), bytes);
    return pass("%s", options.word.c_str());
}
