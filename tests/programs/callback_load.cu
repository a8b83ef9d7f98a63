// Code is loaded, kernels are launched for the first time, and graphs of new kernels are instantiated, while streams wait for host functions: whoever holds the streams up
// must not be held up in turn.
#define PROGRAM "callback_load"
#include "common.h"

#include <unistd.h>

#include <atomic>

#include <cuda.h>

static const char *PTX = R"(
.version 8.0
.target sm_75
.address_size 64
.visible .entry add_%d(.param .u64 data, .param .u32 by) {
    .reg .u64 %%a<3>;
    .reg .u32 %%r<4>;
    ld.param.u64 %%a1, [data];
    cvta.to.global.u64 %%a2, %%a1;
    ld.param.u32 %%r1, [by];
    ld.global.u32 %%r2, [%%a2];
    add.u32 %%r3, %%r2, %%r1;
    st.global.u32 [%%a2], %%r3;
    ret;
}
.visible .entry graph_%d(.param .u64 data, .param .u32 by) {
    .reg .u64 %%a<3>;
    .reg .u32 %%r<4>;
    ld.param.u64 %%a1, [data];
    cvta.to.global.u64 %%a2, %%a1;
    ld.param.u32 %%r1, [by];
    ld.global.u32 %%r2, [%%a2];
    xor.b32 %%r3, %%r2, %%r1;
    st.global.u32 [%%a2], %%r3;
    ret;
}
)";

__global__ void first(unsigned *data) { *data *= 3; }
__global__ void second(unsigned *data) { *data += 1; }

static std::atomic<int> calls;

static void CUDART_CB slow(void *) {
    usleep(30000);
    calls++;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int rounds = 5;
    unsigned *data;
    cudaStream_t held, other;
    CHECK(cudaMalloc(&data, 8));
    CHECK(cudaMemset(data, 0, 8));
    CHECK(cudaDeviceSynchronize()); // A fill of device memory returns before it is done, and the streams do not wait for the default stream.
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    unsigned want = 0, want_other = 0;
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < 3; i++) CHECK(cudaLaunchHostFunc(held, slow, nullptr));
        char text[2048], name[32];
        snprintf(text, sizeof text, PTX, round, round);
        snprintf(name, sizeof name, "add_%d", round);
        CUmodule module;
        CUfunction function, in_graph;
        REQUIRE(cuModuleLoadData(&module, text) == CUDA_SUCCESS, "the module of round %d is not loaded", round);
        REQUIRE(cuModuleGetFunction(&function, module, name) == CUDA_SUCCESS, "no %s", name);
        unsigned by = round + 7;
        void *arguments[] = {&data, &by};
        REQUIRE(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, held, arguments, nullptr) == CUDA_SUCCESS, "%s is not launched", name);
        first<<<1, 1, 0, held>>>(data);
        second<<<1, 1, 0, other>>>(data + 1);
        LAUNCHED();
        snprintf(name, sizeof name, "graph_%d", round);
        REQUIRE(cuModuleGetFunction(&in_graph, module, name) == CUDA_SUCCESS, "no %s", name);
        unsigned *beside = data + 1;
        void *of_graph[] = {&beside, &by};
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(other, cudaStreamCaptureModeRelaxed));
        REQUIRE(cuLaunchKernel(in_graph, 1, 1, 1, 1, 1, 1, 0, other, of_graph, nullptr) == CUDA_SUCCESS, "%s is not captured", name);
        CHECK(cudaStreamEndCapture(other, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, other));
        CHECK(cudaStreamSynchronize(other));
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaStreamSynchronize(held));
        want = (want + by) * 3;
        want_other = (want_other + 1) ^ by;
        REQUIRE(cuModuleUnload(module) == CUDA_SUCCESS, "the module of round %d is not unloaded", round);
    }
    unsigned got[2];
    CHECK(cudaMemcpy(got, data, 8, cudaMemcpyDeviceToHost));
    REQUIRE(calls == 3 * rounds && got[0] == want && got[1] == want_other, "%d calls, %u instead of %u, %u instead of %u",
            calls.load(), got[0], want, got[1], want_other);
    return pass("%d host functions, %d modules", calls.load(), rounds);
}
