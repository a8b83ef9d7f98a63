// Memory of graphs that other streams read and free while one of them is held: it stays until each has read it.
#define PROGRAM "graph_memory_streams"
#include "common.h"

#include <atomic>
#include <unistd.h>

static std::atomic<bool> go{false};

static void CUDART_CB gate(void *) {
    while (!go) usleep(1000);
}

__global__ void set(int *p, int value) { *p = value; }
__global__ void copy(int *to, const int *from) { *to = *from; }

struct Made {
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    int *p, *q;
};

// A graph that allocates memory twice and writes `value` and `value + 1` there. Its launches leave both to the program.
static Made make(cudaStream_t stream, int value) {
    Made made;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMallocAsync(&made.p, 1 << 20, stream));
    CHECK(cudaMallocAsync(&made.q, 1 << 20, stream));
    set<<<1, 1, 0, stream>>>(made.p, value);
    set<<<1, 1, 0, stream>>>(made.q, value + 1);
    CHECK(cudaStreamEndCapture(stream, &made.graph));
    CHECK(cudaGraphInstantiate(&made.instance, made.graph, 0));
    return made;
}

static void destroy(Made made) {
    CHECK(cudaGraphExecDestroy(made.instance));
    CHECK(cudaGraphDestroy(made.graph));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *out, got[4];
    cudaStream_t launches, held, other;
    cudaEvent_t launched;
    CHECK(cudaMalloc(&out, sizeof got));
    // Loaded before anything waits: loading may wait for the device.
    set<<<1, 1>>>(out, 0);
    copy<<<1, 1>>>(out, out);
    CHECK(cudaDeviceSynchronize());
    for (cudaStream_t *stream : {&launches, &held, &other})
        CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&launched));

    Made first = make(launches, 1);
    CHECK(cudaGraphLaunch(first.instance, launches));
    CHECK(cudaEventRecord(launched, launches));
    CHECK(cudaStreamWaitEvent(held, launched, 0));
    CHECK(cudaStreamWaitEvent(other, launched, 0));
    CHECK(cudaLaunchHostFunc(held, gate, nullptr));
    copy<<<1, 1, 0, held>>>(out, first.p);
    CHECK(cudaFreeAsync(first.p, held));
    copy<<<1, 1, 0, other>>>(out + 1, first.q);
    CHECK(cudaFreeAsync(first.q, other));
    CHECK(cudaStreamSynchronize(launches));
    CHECK(cudaStreamSynchronize(other));

    // The other stream's next graph may take the second allocation's memory, and the first one's addresses may be
    // given away only when the held stream has come to the end.
    Made second = make(other, 3);
    CHECK(cudaGraphLaunch(second.instance, other));
    CHECK(cudaStreamSynchronize(other));
    destroy(first);
    Made third = make(other, 5);
    CHECK(cudaGraphLaunch(third.instance, other));
    copy<<<1, 1, 0, other>>>(out + 2, second.p);
    copy<<<1, 1, 0, other>>>(out + 3, third.q);
    CHECK(cudaStreamSynchronize(other));
    go = true;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    for (int i : {0, 1, 2, 3}) {
        int expected[] = {1, 2, 3, 6};
        REQUIRE(got[i] == expected[i], "value %d is %d, expected %d", i, got[i], expected[i]);
    }
    destroy(second);
    destroy(third);
    return pass("freed in two streams, one of them held");
}
