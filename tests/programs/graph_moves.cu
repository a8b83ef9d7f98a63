// A graph's instance launched on several streams: each launch comes behind the one before, and not behind what its stream does after that.
#define PROGRAM "graph_moves"
#include "common.h"

#include <atomic>
#include <unistd.h>

static std::atomic<bool> go;

static void CUDART_CB gate(void *) {
    while (!go) usleep(1000);
}

__global__ void twice_and_one(int *p) { *p = *p * 2 + 1; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *data, got = 0, expected = 0;
    cudaStream_t streams[3];
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CHECK(cudaMalloc(&data, sizeof *data));
    CHECK(cudaMemset(data, 0, sizeof *data));
    CHECK(cudaDeviceSynchronize());
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
    twice_and_one<<<1, 1, 0, streams[0]>>>(data);
    CHECK(cudaStreamEndCapture(streams[0], &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, 0));

    auto launch = [&](int at) {
        CHECK(cudaGraphLaunch(instance, streams[at]));
        expected = expected * 2 + 1;
    };
    auto check = [&](int at) {
        CHECK(cudaMemcpyAsync(&got, data, sizeof got, cudaMemcpyDeviceToHost, streams[at]));
        CHECK(cudaStreamSynchronize(streams[at]));
        REQUIRE(got == expected, "the value is %d, expected %d", got, expected);
    };
    // The stream that is left behind waits for the program each time, which waits for the next launch.
    for (int i = 0; i < 6; i++) {
        int from = i % 3, to = (i + 1) % 3;
        launch(from);
        go = false;
        CHECK(cudaLaunchHostFunc(streams[from], gate, nullptr));
        launch(to);
        check(to);
        go = true;
        CHECK(cudaStreamSynchronize(streams[from]));
    }
    // Launches that must wait for the one before.
    go = false;
    CHECK(cudaLaunchHostFunc(streams[0], gate, nullptr));
    for (int i = 0; i < 6; i++) launch(i % 3);
    usleep(20000);
    go = true;
    check(2);
    CHECK(cudaGraphExecDestroy(instance));
    CHECK(cudaGraphDestroy(graph));
    return pass("%d launches on three streams", 18);
}
