// Two processes hand an allocation to and fro, each step behind the other's event, without waiting on the host in between.
#define PROGRAM "ipc_events"
#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

const int N = 1 << 16, STEPS = 6;

__global__ void advance(unsigned *data, int n, unsigned by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        for (int k = 0; k < 2000; k++) data[i] = data[i] * 3 + by;
}

static void give(int to, const void *data, size_t len) { REQUIRE(write(to, data, len) == (ssize_t)len, "the pipe is broken"); }
static void take(int from, void *data, size_t len) {
    for (size_t at = 0; at < len;) {
        ssize_t n = read(from, (char *)data + at, len - at);
        REQUIRE(n > 0, "the other process is gone");
        at += n;
    }
}

// Even steps are the parent's, odd ones the child's; after each, a byte tells the other that its event is recorded.
static void steps(int first, int from, int to, unsigned *data, cudaEvent_t own, cudaEvent_t others) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int step = first; step < STEPS; step += 2) {
        char word = 'x';
        if (step > 0) {
            take(from, &word, 1);
            CHECK(cudaStreamWaitEvent(stream, others, 0));
        }
        advance<<<N / 256, 256, 0, stream>>>(data, N, step + 1);
        LAUNCHED();
        CHECK(cudaEventRecord(own, stream));
        give(to, &word, 1);
    }
    CHECK(cudaEventSynchronize(own));
    CHECK(cudaStreamSynchronize(stream));
}

static int other(int from, int to) {
    cudaIpcMemHandle_t memory;
    cudaIpcEventHandle_t parents, ours;
    char supported;
    take(from, &supported, 1);
    if (!supported) return 0;
    take(from, &memory, sizeof memory);
    take(from, &parents, sizeof parents);
    unsigned *data;
    cudaEvent_t own, opened;
    CHECK(cudaIpcOpenMemHandle((void **)&data, memory, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaIpcOpenEventHandle(&opened, parents));
    CHECK(cudaEventQuery(opened));
    CHECK(cudaEventCreateWithFlags(&own, cudaEventDisableTiming | cudaEventInterprocess));
    CHECK(cudaIpcGetEventHandle(&ours, own));
    give(to, &ours, sizeof ours);
    steps(1, from, to, data, own, opened);
    // A graph cannot depend on another process's record.
    cudaStream_t captured;
    cudaGraph_t graph;
    CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal));
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaStreamWaitEvent(captured, opened, 0));
    EXPECT(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(captured, &graph));
    CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaStreamWaitEvent(captured, opened, cudaEventWaitExternal));
    CHECK(cudaStreamEndCapture(captured, &graph));
    CHECK(cudaGraphDestroy(graph));
    char word;
    take(from, &word, 1);
    CHECK(cudaEventDestroy(opened));
    CHECK(cudaEventDestroy(own));
    CHECK(cudaIpcCloseMemHandle(data));
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 3 && std::string(argv[1]) == "other") return other(atoi(argv[2]), atoi(argv[3]));
    parse_options(argc, argv);
    int there[2], back[2];
    REQUIRE(pipe(there) == 0 && pipe(back) == 0, "no pipe");
    pid_t child = fork();
    REQUIRE(child >= 0, "no process");
    if (child == 0) {
        close(there[1]);
        close(back[0]);
        std::string from = std::to_string(there[0]), to = std::to_string(back[1]);
        execl("/proc/self/exe", argv[0], "other", from.c_str(), to.c_str(), (char *)nullptr);
        _exit(127);
    }
    close(there[0]);
    close(back[1]);
    int supported;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrIpcEventSupport, 0));
    char told = supported != 0;
    give(there[1], &told, 1);
    cudaEvent_t own, opened, plain;
    if (!supported) {
        // A device that has no such events says so, and then has none. The one in software has them.
        cudaDeviceProp properties;
        CHECK(cudaGetDeviceProperties(&properties, 0));
        REQUIRE(!strstr(properties.name, "software"), "the device in software has no events for other processes");
        REQUIRE(cudaEventCreateWithFlags(&own, cudaEventDisableTiming | cudaEventInterprocess) == cudaErrorNotSupported, "an event for other processes");
        waitpid(child, nullptr, 0);
        return pass("the device has no events for other processes");
    }
    cudaIpcEventHandle_t handle;
    REQUIRE(cudaEventCreateWithFlags(&own, cudaEventInterprocess) == cudaErrorInvalidValue, "an event for other processes with timing");
    cudaGetLastError();
    CHECK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming));
    REQUIRE(cudaIpcGetEventHandle(&handle, plain) != cudaSuccess, "the handle of an event that is not for other processes");
    cudaGetLastError();
    unsigned *data;
    CHECK(cudaMalloc(&data, N * 4));
    CHECK(cudaMemset(data, 0, N * 4));
    CHECK(cudaDeviceSynchronize());
    cudaIpcMemHandle_t memory;
    CHECK(cudaEventCreateWithFlags(&own, cudaEventDisableTiming | cudaEventInterprocess));
    CHECK(cudaIpcGetMemHandle(&memory, data));
    CHECK(cudaIpcGetEventHandle(&handle, own));
    give(there[1], &memory, sizeof memory);
    give(there[1], &handle, sizeof handle);
    take(back[0], &handle, sizeof handle);
    CHECK(cudaIpcOpenEventHandle(&opened, handle));
    steps(0, back[0], there[1], data, own, opened);
    char word = 'x';
    take(back[0], &word, 1);
    CHECK(cudaEventSynchronize(opened));
    static unsigned got[N];
    CHECK(cudaMemcpy(got, data, sizeof got, cudaMemcpyDeviceToHost));
    unsigned want = 0;
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < 2000; k++) want = want * 3 + step + 1;
    for (int i = 0; i < N; i++) REQUIRE(got[i] == want, "element %d is %u instead of %u", i, got[i], want);
    give(there[1], &word, 1);
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0, "the other process ended with %d", status);
    CHECK(cudaEventDestroy(opened));
    CHECK(cudaEventDestroy(own));
    CHECK(cudaFree(data));
    return pass("%d steps of two processes in turn", STEPS);
}
