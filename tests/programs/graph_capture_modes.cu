// Capture in every mode: what each forbids, to whom, and what becomes of a capture that was disturbed.
#define PROGRAM "graph_capture_modes"
#include "common.h"

#include <atomic>
#include <cuda.h>
#include <thread>
#include <unistd.h>

__global__ void bump(int *value) { ++*value; }

static const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                              cudaStreamCaptureModeRelaxed};
static const char *names[] = {"global", "thread local", "relaxed"};

static const char *name(cudaError_t status) {
    cudaGetLastError();
    return cudaGetErrorName(status);
}

// A capture that fails destroys its graph, with the objects that were moved into it.
static void failed_captures_end_objects(int *value, cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
    for (std::string how : {"not joined", "another thread", "spoiled", "destroyed"}) {
        std::atomic<int> ends{0};
        cudaStream_t captured = stream;
        if (how == "destroyed") CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
        CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal));
        bump<<<1, 1, 0, captured>>>(value);
        LAUNCHED();
        cudaStreamCaptureStatus status;
        unsigned long long id;
        cudaGraph_t inside, graph = nullptr;
        CHECK(cudaStreamGetCaptureInfo(captured, &status, &id, &inside, nullptr, nullptr, nullptr));
        cudaUserObject_t object;
        auto end = [](void *ends) { ++*(std::atomic<int> *)ends; };
        CHECK(cudaUserObjectCreate(&object, &ends, end, 1, cudaUserObjectNoDestructorSync));
        CHECK(cudaGraphRetainUserObject(inside, object, 1, cudaGraphUserObjectMove));
        cudaError_t ended = cudaSuccess;
        if (how == "not joined") {
            CHECK(cudaEventRecord(event, captured));
            CHECK(cudaStreamWaitEvent(other, event, 0));
            bump<<<1, 1, 0, other>>>(value);
            ended = cudaStreamEndCapture(captured, &graph);
        } else if (how == "another thread") {
            std::thread([&] { ended = cudaStreamEndCapture(captured, &graph); }).join();
        } else if (how == "spoiled") {
            cudaStreamSynchronize(captured);
            ended = cudaStreamEndCapture(captured, &graph);
        } else {
            CHECK(cudaStreamDestroy(captured));
        }
        printf("%s with an object: %s\n", how.c_str(), name(ended));
        REQUIRE(!graph, "a capture that failed has a graph: %s", how.c_str());
        for (int i = 0; i < 100000 && ends == 0; i++) usleep(1000);
        REQUIRE(ends == 1, "%s: the object ended %d times", how.c_str(), ends.load());
    }
}

// A blocking stream that has joined a capture keeps work off the default stream like one where a capture began.
static void joined_streams_hold_the_default_stream(int *value, cudaStream_t origin, cudaStream_t blocking, cudaEvent_t event) {
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMemsetAsync(value, 0, 4, cudaStreamLegacy));
    CHECK(cudaEventRecord(event, origin));
    CHECK(cudaStreamWaitEvent(blocking, event, 0));
    cudaError_t status = cudaMemsetAsync(value, 0, 4, cudaStreamLegacy);
    REQUIRE(status == cudaErrorStreamCaptureImplicit, "work on the default stream: %s", name(status));
    status = cudaStreamEndCapture(origin, &graph);
    REQUIRE(status == cudaErrorStreamCaptureInvalidated && !graph, "the capture's end: %s", name(status));
    name(status);
    CHECK(cudaMemsetAsync(value, 0, 4, cudaStreamLegacy));
    CHECK(cudaDeviceSynchronize());
}

// What has no node.
static void without_nodes(cudaStream_t stream) {
    int *managed, *device;
    CHECK(cudaMallocManaged(&managed, 4));
    CHECK(cudaMalloc(&device, 8));
    CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t), (*copy_any)(CUdeviceptr, CUdeviceptr, size_t);
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuMemcpyDtoD", (void **)&copy, 12000, cudaEnablePerThreadDefaultStream, &found));
    CHECK(cudaGetDriverEntryPointByVersion("cuMemcpy", (void **)&copy_any, 12000, cudaEnablePerThreadDefaultStream, &found));
    for (std::string what : {"attach", "copy", "copy of any memory", "allocate", "register"}) {
        cudaGraph_t graph = nullptr;
        static char bytes[4096];
        void *pinned = nullptr;
        cudaStream_t captured = what.find("copy") == 0 ? cudaStreamPerThread : stream;
        CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
        cudaError_t status = what == "attach"     ? cudaStreamAttachMemAsync(captured, managed)
                             : what == "copy"     ? (cudaError_t)copy((CUdeviceptr)device, (CUdeviceptr)(device + 1), 4)
                             : what == "copy of any memory" ? (cudaError_t)copy_any((CUdeviceptr)device, (CUdeviceptr)(device + 1), 4)
                             : what == "allocate" ? cudaMallocHost(&pinned, 256)
                                                  : cudaHostRegister(bytes, sizeof bytes, 0);
        REQUIRE(status == cudaErrorStreamCaptureUnsupported, "%s: %s", what.c_str(), name(status));
        status = cudaStreamEndCapture(captured, &graph);
        REQUIRE(status == cudaErrorStreamCaptureInvalidated && !graph, "%s, the capture's end: %s", what.c_str(), name(status));
        name(status);
    }
    CHECK(cudaFree(managed));
    CHECK(cudaFree(device));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *value, zero = 0;
    CHECK(cudaMalloc(&value, sizeof *value));
    CHECK(cudaMemcpy(value, &zero, sizeof zero, cudaMemcpyHostToDevice));
    cudaStream_t stream, free_stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreateWithFlags(&free_stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventRecord(event, other));
    CHECK(cudaStreamSynchronize(other));
    bump<<<1, 1>>>(value);
    CHECK(cudaDeviceSynchronize());

    // An allocation while a capture is under way: in the capturing thread, in another, and in one that asked for it to be let.
    for (int mode = 0; mode < 3; mode++) {
        for (int who = 0; who < 3; who++) {
            cudaGraph_t graph = nullptr;
            CHECK(cudaStreamBeginCapture(free_stream, modes[mode]));
            bump<<<1, 1, 0, free_stream>>>(value);
            cudaError_t allocated = cudaSuccess;
            void *memory = nullptr;
            auto allocate = [&] { allocated = cudaMalloc(&memory, 256); };
            if (who == 0) {
                allocate();
            } else if (who == 1) {
                std::thread(allocate).join();
            } else {
                cudaStreamCaptureMode mine = cudaStreamCaptureModeRelaxed;
                CHECK(cudaThreadExchangeStreamCaptureMode(&mine));
                allocate();
                CHECK(cudaThreadExchangeStreamCaptureMode(&mine));
                REQUIRE(mine == cudaStreamCaptureModeRelaxed, "the mode before was %d", (int)mine);
            }
            name(allocated);
            cudaStreamCaptureStatus status;
            CHECK(cudaStreamIsCapturing(free_stream, &status));
            cudaError_t ended = cudaStreamEndCapture(free_stream, &graph);
            printf("%s, %s: %s, status %d, end %s, %s\n", names[mode],
                   who == 0 ? "this thread" : who == 1 ? "another thread" : "relaxed thread", name(allocated), (int)status,
                   name(ended), graph ? "a graph" : "no graph");
            if (graph) CHECK(cudaGraphDestroy(graph));
            if (memory) CHECK(cudaFree(memory));
        }
    }

    // What has no place in a capture, on the captured stream and beside it.
    struct {
        const char *what;
        cudaError_t (*call)(cudaStream_t captured, cudaStream_t other, cudaEvent_t event, int *value);
    } calls[] = {
        {"synchronize the stream", [](cudaStream_t s, cudaStream_t, cudaEvent_t, int *) { return cudaStreamSynchronize(s); }},
        {"query the stream", [](cudaStream_t s, cudaStream_t, cudaEvent_t, int *) { return cudaStreamQuery(s); }},
        {"query an event from outside", [](cudaStream_t, cudaStream_t, cudaEvent_t e, int *) { return cudaEventQuery(e); }},
        {"wait for an event from outside",
         [](cudaStream_t s, cudaStream_t, cudaEvent_t e, int *) { return cudaStreamWaitEvent(s, e, 0); }},
        {"work on another stream",
         [](cudaStream_t, cudaStream_t o, cudaEvent_t, int *v) { return cudaMemsetAsync(v, 0, 4, o); }},
        {"work on the default stream",
         [](cudaStream_t, cudaStream_t, cudaEvent_t, int *v) { return cudaMemsetAsync(v, 0, 4, 0); }},
        {"synchronize the device", [](cudaStream_t, cudaStream_t, cudaEvent_t, int *) { return cudaDeviceSynchronize(); }},
        {"begin again",
         [](cudaStream_t s, cudaStream_t, cudaEvent_t, int *) {
             return cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed);
         }},
    };
    for (auto &each : calls) {
        for (cudaStream_t captured : {stream, free_stream}) {
            cudaGraph_t graph = nullptr;
            CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
            bump<<<1, 1, 0, captured>>>(value);
            cudaError_t status = each.call(captured, other, event, value);
            printf("%s, %s: %s", each.what, captured == stream ? "blocking" : "non-blocking", name(status));
            cudaError_t ended = cudaStreamEndCapture(captured, &graph);
            printf(", end %s\n", name(ended));
            if (graph) CHECK(cudaGraphDestroy(graph));
        }
    }
    // Asking the default stream whether it is captured, which does no harm to a capture that it would wait for.
    for (cudaStream_t captured : {stream, free_stream}) {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        cudaError_t expected = captured == stream ? cudaErrorStreamCaptureImplicit : cudaSuccess;
        cudaError_t asked = cudaStreamIsCapturing(cudaStreamLegacy, &status);
        REQUIRE(asked == expected, "whether the default stream is captured: %s", name(asked));
        asked = cudaStreamIsCapturing(cudaStreamPerThread, &status);
        REQUIRE(asked == cudaSuccess && status == cudaStreamCaptureStatusNone, "whether the thread's is: %s", name(asked));
        CHECK(cudaStreamIsCapturing(captured, &status));
        REQUIRE(status == cudaStreamCaptureStatusActive, "the capture that was asked about is %d", (int)status);
        CHECK(cudaStreamEndCapture(captured, &graph));
        CHECK(cudaGraphDestroy(graph));
    }
    // Nothing of it has run but the fills of other streams.
    CHECK(cudaDeviceSynchronize());

    // The end from another thread, and a fork that was not joined.
    cudaGraph_t graph = nullptr;
    for (int mode = 0; mode < 3; mode++) {
        CHECK(cudaStreamBeginCapture(free_stream, modes[mode]));
        cudaError_t ended = cudaSuccess;
        std::thread([&] { ended = cudaStreamEndCapture(free_stream, &graph); }).join();
        printf("%s, ended by another thread: %s\n", names[mode], name(ended));
        if (ended != cudaSuccess) {
            ended = cudaStreamEndCapture(free_stream, &graph);
            printf("  and then here: %s\n", name(ended));
        }
        if (graph) CHECK(cudaGraphDestroy(graph));
        graph = nullptr;
    }
    CHECK(cudaStreamBeginCapture(free_stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaEventRecord(event, free_stream));
    CHECK(cudaStreamWaitEvent(other, event, 0));
    bump<<<1, 1, 0, other>>>(value);
    cudaError_t ended = cudaStreamEndCapture(free_stream, &graph);
    printf("not joined: %s\n", name(ended));

    // A stream that is destroyed takes along the capture that began there: nothing is captured then.
    for (cudaStreamCaptureMode mode : modes) {
        cudaStream_t destroyed;
        cudaEvent_t point;
        void *memory;
        CHECK(cudaStreamCreate(&destroyed));
        CHECK(cudaEventCreateWithFlags(&point, cudaEventDisableTiming));
        CHECK(cudaStreamBeginCapture(destroyed, mode));
        bump<<<1, 1, 0, destroyed>>>(value);
        LAUNCHED();
        // The event keeps what it was recorded in.
        CHECK(cudaEventRecord(point, destroyed));
        CHECK(cudaStreamDestroy(destroyed));
        CHECK(cudaMalloc(&memory, 256));
        CHECK(cudaMemset(memory, 0, 256));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(point, stream));
        CHECK(cudaEventSynchronize(point));
        CHECK(cudaEventDestroy(point));
        CHECK(cudaFree(memory));
    }

    failed_captures_end_objects(value, free_stream, other, event);
    joined_streams_hold_the_default_stream(value, free_stream, stream, event);
    without_nodes(free_stream);

    // Into a graph that is there, behind one of its nodes.
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemsetParams set = {};
    set.dst = value;
    set.value = 40;
    set.elementSize = 4;
    set.width = set.height = 1;
    cudaGraphNode_t fill;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &set));
    CHECK(cudaStreamBeginCaptureToGraph(free_stream, graph, &fill, nullptr, 1, cudaStreamCaptureModeRelaxed));
    bump<<<1, 1, 0, free_stream>>>(value);
    bump<<<1, 1, 0, free_stream>>>(value);
    cudaGraph_t same;
    CHECK(cudaStreamEndCapture(free_stream, &same));
    REQUIRE(same == graph, "captured into another graph");
    // Whoever captures into a graph has it already, and need not ask for it.
    CHECK(cudaStreamBeginCaptureToGraph(free_stream, graph, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
    CHECK(cudaStreamEndCapture(free_stream, nullptr));
    CHECK(cudaStreamBeginCapture(free_stream, cudaStreamCaptureModeRelaxed));
    bump<<<1, 1, 0, free_stream>>>(value);
    CHECK(cudaStreamEndCapture(free_stream, nullptr));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(free_stream, &status));
    REQUIRE(status == cudaStreamCaptureStatusNone, "still being captured");
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, free_stream));
    int result;
    CHECK(cudaStreamSynchronize(free_stream));
    CHECK(cudaMemcpy(&result, value, sizeof result, cudaMemcpyDeviceToHost));
    REQUIRE(result == 42, "the graph comes to %d", result);
    return pass("%d", result);
}
