// A kernel's fault found in each way that a program can come to know of it, and everything after it in that process; then a
// reset, after which the process goes on. Each way has a process of its own.
#define PROGRAM "sticky_errors"
#include "cases.h"
#include <sys/wait.h>
#include <unistd.h>

__global__ void store(int *p, int value) { *p = value; }
__global__ void stop() { __trap(); }
__device__ int *wild;
__global__ void through_wild() { *wild = 1; }

static int *device;
static cudaStream_t stream, other;
static cudaEvent_t event;

static int called = 0;
static void CUDART_CB call(void *) { called++; }
static void CUDART_CB tell(cudaStream_t, cudaError_t, void *) {}

static void fault() { store<<<1, 1, 0, stream>>>((int *)0x400, 1); }

static cudaError_t found_by(const std::string &way) {
    int word;
    if (way == "stream") return cudaStreamSynchronize(stream);
    if (way == "device") return cudaDeviceSynchronize();
    if (way == "event") {
        cudaEventRecord(event, stream);
        return cudaEventSynchronize(event);
    }
    if (way == "copy") {
        // The default stream's copy is behind it only if the fault is in the default stream.
        store<<<1, 1>>>((int *)0x400, 1);
        return cudaMemcpy(&word, device, 4, cudaMemcpyDeviceToHost);
    }
    if (way == "query") {
        cudaError_t answer;
        while ((answer = cudaStreamQuery(stream)) == cudaErrorNotReady) {}
        return answer;
    }
    if (way == "other") {
        // Of another stream, which waits for the one with the fault.
        cudaEventRecord(event, stream);
        cudaStreamWaitEvent(other, event, 0);
        return cudaStreamSynchronize(other);
    }
    if (way == "free") {
        cudaError_t answer = cudaFree(device);
        return answer == cudaSuccess ? cudaDeviceSynchronize() : answer;
    }
    if (way == "functions" || way == "graph") {
        // Host functions behind the fault, and more behind these: none is called, and none is waited for.
        bool refused = false;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t instance = nullptr;
        if (way == "graph") {
            cudaStreamBeginCapture(other, cudaStreamCaptureModeRelaxed);
            store<<<1, 1, 0, other>>>((int *)0x400, 1);
            cudaMemcpyAsync(&word, device, 4, cudaMemcpyDeviceToHost, other);
            cudaLaunchHostFunc(other, call, nullptr);
            store<<<1, 1, 0, other>>>(device, 1);
            RETURNS(cudaSuccess, cudaStreamEndCapture(other, &graph));
            RETURNS(cudaSuccess, cudaGraphInstantiate(&instance, graph, 0));
        }
        for (int at = 0; at < 6; at++) {
            cudaError_t answer = instance ? cudaGraphLaunch(instance, stream) : cudaLaunchHostFunc(stream, call, nullptr);
            // Refused once the fault is known.
            refused |= answer != cudaSuccess;
            TRUE_THAT(answer == (refused ? cudaErrorIllegalAddress : cudaSuccess));
        }
        cudaError_t answer = cudaStreamSynchronize(stream);
        IS(0, called);
        return answer;
    }
    if (way == "callbacks") {
        cudaError_t first = cudaStreamAddCallback(stream, tell, nullptr, 0);
        cudaError_t second = cudaStreamAddCallback(stream, tell, nullptr, 0);
        cudaError_t answer = cudaStreamSynchronize(stream);
        TRUE_THAT(first == cudaSuccess || first == cudaErrorIllegalAddress);
        TRUE_THAT(second == cudaSuccess || second == cudaErrorIllegalAddress);
        return answer;
    }
    return cudaErrorUnknown;
}

static int child(const std::string &way) {
    RETURNS(cudaSuccess, cudaMalloc(&device, 64));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    int *kept = (int *)aligned_alloc(4096, 4096);
    RETURNS(cudaSuccess, cudaHostRegister(kept, 4096, cudaHostRegisterMapped));
    store<<<1, 1, 0, stream>>>(kept, 5);
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    cudaError_t want = cudaErrorIllegalAddress;
    if (way == "trap") {
        stop<<<1, 1, 0, stream>>>();
        want = cudaErrorLaunchFailure;
        RETURNS(want, cudaDeviceSynchronize());
    } else if (way == "wild") {
        through_wild<<<1, 1, 0, stream>>>();
        RETURNS(want, cudaDeviceSynchronize());
    } else {
        if (way != "graph") fault();
        RETURNS(want, found_by(way));
    }
    // Everything fails from here on, whatever it would do.
    void *p;
    int word = 0;
    RETURNS(want, cudaMalloc(&p, 16));
    RETURNS(want, cudaMallocHost(&p, 16));
    RETURNS(want, cudaMemset(device, 0, 4));
    RETURNS(want, cudaMemcpy(&word, device, 4, cudaMemcpyDeviceToHost));
    RETURNS(want, cudaStreamSynchronize(stream));
    RETURNS(want, cudaStreamSynchronize(other));
    RETURNS(want, cudaDeviceSynchronize());
    LAUNCH_LEAVES(want, store<<<1, 1>>>(device, 1));
    RETURNS(want, cudaEventRecord(event, stream));
    size_t free_bytes, total;
    RETURNS(want, cudaMemGetInfo(&free_bytes, &total));
    // Not what asks no context.
    int value = 0;
    RETURNS(cudaSuccess, cudaGetDeviceCount(&value));
    RETURNS(cudaSuccess, cudaGetDevice(&value));
    RETURNS(cudaSuccess, cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0));
    TRUE_THAT(cudaPeekAtLastError() == cudaSuccess);
    // Nor the program's own memory, which has what a kernel wrote there before.
    IS(5, kept[0]);
    kept[0] = 6;
    IS(6, kept[0]);
    return mismatches ? 1 : 0;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    if (!options.word.empty()) return child(options.word);
    for (const char *way : {"stream", "device", "event", "copy", "query", "other", "free", "trap", "wild", "functions", "callbacks", "graph"}) {
        fflush(stdout);
        pid_t pid = fork();
        REQUIRE(pid >= 0, "fork failed");
        if (pid == 0) {
            execl("/proc/self/exe", argv[0], way, (char *)nullptr);
            _exit(127);
        }
        int status;
        REQUIRE(waitpid(pid, &status, 0) == pid, "waitpid failed");
        cases++;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) not_met((std::string("found by ") + way).c_str());
    }
    return verdict();
}
