// A function's limit of dynamic shared memory is raised while a launch of it is held: graphs and other streams use the new limit at once.
#define PROGRAM "held_attribute"
#include "common.h"

#include <atomic>
#include <unistd.h>

static std::atomic<bool> go;

static void CUDART_CB gate(void *) {
    while (!go) usleep(1000);
}

__global__ void through_shared(int *to, int value) {
    extern __shared__ int words[];
    words[threadIdx.x] = value;
    __syncthreads();
    *to = words[0];
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int MORE = 50000, LESS = 8192;
    int *data, got[3];
    cudaStream_t held, other;
    CHECK(cudaMalloc(&data, sizeof got));
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    through_shared<<<1, 1, 4096, other>>>(data, 0);
    CHECK(cudaStreamSynchronize(other));

    CHECK(cudaLaunchHostFunc(held, gate, nullptr));
    through_shared<<<1, 1, 16384, held>>>(data, 1);
    CHECK(cudaFuncSetAttribute(through_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, MORE));
    through_shared<<<1, 1, MORE, other>>>(data + 1, 2);
    CHECK(cudaStreamSynchronize(other));

    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CHECK(cudaStreamBeginCapture(other, cudaStreamCaptureModeThreadLocal));
    through_shared<<<1, 1, MORE, other>>>(data + 2, 3);
    CHECK(cudaStreamEndCapture(other, &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    CHECK(cudaGraphLaunch(instance, other));
    CHECK(cudaStreamSynchronize(other));

    // Less than the held launch has asked for.
    CHECK(cudaFuncSetAttribute(through_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, LESS));
    go = true;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(got, data, sizeof got, cudaMemcpyDeviceToHost));
    for (int i : {0, 1, 2}) REQUIRE(got[i] == i + 1, "value %d is %d", i, got[i]);
    CHECK(cudaGraphExecDestroy(instance));
    CHECK(cudaGraphDestroy(graph));
    return pass("raised and lowered behind a held launch");
}
