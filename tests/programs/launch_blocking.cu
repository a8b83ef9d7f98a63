// CUDA_LAUNCH_BLOCKING=1: a launch returns when its kernel is done, with the kernel's fault if it had one. Work in a capture is not
// waited for.
#define PROGRAM "launch_blocking"
#include "common.h"

__global__ void slow(int *value, long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
    ++*value;
}
__global__ void store(int *p, int value) { *p = value; }

int main(int argc, char **argv) {
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    parse_options(argc, argv);
    int *value, result;
    CHECK(cudaMalloc(&value, sizeof *value));
    CHECK(cudaMemset(value, 0, sizeof *value));
    CHECK(cudaDeviceSynchronize());
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (cudaStream_t on : {stream, (cudaStream_t)0}) {
        slow<<<1, 1, 0, on>>>(value, 50000000);
        LAUNCHED();
        cudaError_t asked = cudaStreamQuery(on);
        REQUIRE(asked == cudaSuccess, "a kernel was under way when its launch had returned: %s", cudaGetErrorName(asked));
    }

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    slow<<<1, 1, 0, stream>>>(value, 1);
    LAUNCHED();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&result, value, sizeof result, cudaMemcpyDeviceToHost));
    REQUIRE(result == 3, "three kernels counted to %d", result);

    store<<<1, 1, 0, stream>>>((int *)0x400, 1);
    cudaError_t fault = cudaGetLastError();
    REQUIRE(fault == cudaErrorIllegalAddress, "the launch of a kernel with a fault: %s", cudaGetErrorName(fault));
    return pass("%d", result);
}
