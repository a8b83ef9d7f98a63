// What a program is told of graphs: parameters of nodes, which stay readable when attributes change and describe another node as well; attributes that a
// capture takes from its streams; which node keeps an instance from being updated; and that nothing is recorded in a capture that was disturbed.
#define PROGRAM "graph_parameters"
#include "cases.h"

#include <vector>

__global__ void put(int *out, int a, int b, int c) { *out = a * 100 + b * 10 + c; }

static cudaStream_t stream;
static int *words;

static int word(int i) {
    int value = -1;
    CHECK(cudaMemcpy(&value, words + i, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static void zero() {
    CHECK(cudaMemset(words, 0, 16 * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
}

static cudaGraphNode_t kernel(cudaGraph_t graph, int *out, int a, int b, int c, std::vector<cudaGraphNode_t> after = {}) {
    void *arguments[] = {&out, &a, &b, &c};
    cudaKernelNodeParams p = {};
    p.func = (void *)put;
    p.gridDim = p.blockDim = dim3(1);
    p.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &p));
    return node;
}

static void run(cudaGraph_t graph) {
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(exec));
}

// "This memory remains valid until the node is destroyed or its parameters are modified": attributes are none of them.
static void arguments_outlive_attributes() {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t node = kernel(graph, words, 1, 2, 3), other = kernel(graph, words + 1, 0, 0, 0);
    cudaKernelNodeParams told;
    RETURNS(cudaSuccess, cudaGraphKernelNodeGetParams(node, &told));
    cudaLaunchAttributeValue value = {};
    value.priority = 0;
    RETURNS(cudaSuccess, cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributePriority, &value));
    std::vector<std::vector<char>> reused;
    for (int i = 0; i < 64; i++) reused.emplace_back(8 + 8 * (i % 8), (char)0x5a);
    TRUE_THAT(*(int **)told.kernelParams[0] == words);
    TRUE_THAT(*(int *)told.kernelParams[1] == 1 && *(int *)told.kernelParams[2] == 2 && *(int *)told.kernelParams[3] == 3);
    RETURNS(cudaSuccess, cudaGraphKernelNodeCopyAttributes(node, other));
    // They describe another node, with one of them replaced.
    int *out = words + 2;
    void *arguments[] = {&out, told.kernelParams[1], told.kernelParams[2], told.kernelParams[3]};
    told.kernelParams = arguments;
    RETURNS(cudaSuccess, cudaGraphKernelNodeSetParams(other, &told));
    zero();
    run(graph);
    IS(123, word(0));
    IS(123, word(2));
    CHECK(cudaGraphDestroy(graph));
}

// Priorities "are copied from stream priority during stream capture".
static void captured_priority() {
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t urgent;
    CHECK(cudaStreamCreateWithPriority(&urgent, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamBeginCapture(urgent, cudaStreamCaptureModeThreadLocal));
    put<<<1, 1, 0, urgent>>>(words, 1, 1, 1);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(urgent, &graph));
    cudaGraphNode_t node;
    size_t count = 1;
    CHECK(cudaGraphGetNodes(graph, &node, &count));
    cudaLaunchAttributeValue value = {};
    value.priority = 77;
    RETURNS(cudaSuccess, cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributePriority, &value));
    IS(greatest, value.priority);
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(urgent));
}

// Copies and fills: what is told of one node describes another.
static void copies_and_fills() {
    constexpr int WIDE = 8, HIGH = 3, DEEP = 2;
    cudaArray_t array;
    cudaChannelFormatDesc pairs = cudaCreateChannelDesc<int2>();
    CHECK(cudaMalloc3DArray(&array, &pairs, make_cudaExtent(WIDE, HIGH, DEEP)));
    std::vector<int2> in(WIDE * HIGH * DEEP), out(WIDE * HIGH * DEEP, make_int2(-1, -1));
    for (int i = 0; i < (int)in.size(); i++) in[i] = make_int2(i, 1000 + i);
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemcpy3DParms there = {};
    there.srcPtr = make_cudaPitchedPtr(in.data(), WIDE * sizeof(int2), WIDE, HIGH);
    there.dstArray = array;
    there.extent = make_cudaExtent(WIDE, HIGH, DEEP);
    there.kind = cudaMemcpyHostToDevice;
    cudaMemcpy3DParms back = {};
    back.srcArray = array;
    back.srcPos = make_cudaPos(2, 1, 0);
    back.dstPtr = make_cudaPitchedPtr(out.data(), WIDE * sizeof(int2), WIDE, HIGH);
    back.dstPos = make_cudaPos(1, 0, 0);
    back.extent = make_cudaExtent(5, 2, 2);
    back.kind = cudaMemcpyDeviceToHost;
    cudaGraphNode_t first, second;
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNode(&first, graph, nullptr, 0, &there));
    // It is made with other parameters, and then gets those that another node tells.
    cudaMemcpy3DParms other = back;
    other.extent = make_cudaExtent(1, 1, 1);
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNode(&second, graph, &first, 1, &other));
    cudaGraph_t apart;
    cudaGraphNode_t model;
    CHECK(cudaGraphCreate(&apart, 0));
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNode(&model, apart, nullptr, 0, &back));
    cudaMemcpy3DParms told = {};
    RETURNS(cudaSuccess, cudaGraphMemcpyNodeGetParams(model, &told));
    TRUE_THAT(told.srcArray == array && told.srcPtr.ptr == nullptr && told.dstArray == nullptr && told.dstPtr.ptr == out.data());
    TRUE_THAT(told.dstPtr.pitch == WIDE * sizeof(int2));
    TRUE_THAT(told.srcPos.x == 2 && told.srcPos.y == 1 && told.srcPos.z == 0 && told.dstPos.x == 1 && told.dstPos.y == 0);
    TRUE_THAT(told.extent.width == 5 && told.extent.height == 2 && told.extent.depth == 2);
    RETURNS(cudaSuccess, cudaGraphMemcpyNodeSetParams(second, &told));
    run(graph);
    int wrong = 0;
    for (int z = 0; z < DEEP; z++)
        for (int y = 0; y < HIGH; y++)
            for (int x = 0; x < WIDE; x++) {
                bool inside = x >= 1 && x < 6 && y < 2;
                int2 got = out[(z * HIGH + y) * WIDE + x];
                int from = (z * HIGH + y + 1) * WIDE + x + 1;
                wrong += inside ? got.x != from || got.y != 1000 + from : got.x != -1 || got.y != -1;
            }
    IS(0, wrong);
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphDestroy(apart));
    CHECK(cudaFreeArray(array));

    // A fill of rows. In an instance, only its place and value change.
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemsetParams rows = {};
    rows.dst = words;
    rows.pitch = 8 * sizeof(int);
    rows.value = 0x1234;
    rows.elementSize = 2;
    rows.width = 3;
    rows.height = 2;
    cudaGraphNode_t fill;
    RETURNS(cudaSuccess, cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &rows));
    cudaMemsetParams known = {};
    RETURNS(cudaSuccess, cudaGraphMemsetNodeGetParams(fill, &known));
    TRUE_THAT(known.dst == words && known.pitch == rows.pitch && known.value == 0x1234 && known.elementSize == 2 && known.width == 3 && known.height == 2);
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    known.value = 0x4321;
    known.dst = words + 1;
    RETURNS(cudaSuccess, cudaGraphExecMemsetNodeSetParams(exec, fill, &known));
    zero();
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(word(0) == 0 && word(1) == 0x43214321 && word(2) == 0x4321 && word(3) == 0 && word(8) == 0 && word(9) == 0x43214321 && word(10) == 0x4321);
    known.height = 3;
    RETURNS(cudaErrorInvalidValue, cudaGraphExecMemsetNodeSetParams(exec, fill, &known));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

// A drawing in a folder that does not exist.
static void drawing() {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    RETURNS(cudaErrorOperatingSystem, cudaGraphDebugDotPrint(graph, "/dev/null/graph.dot", 0));
    CHECK(cudaGraphDestroy(graph));
}

static cudaGraphExecUpdateResultInfo refused(cudaGraphExec_t exec, cudaGraph_t graph, const char *what) {
    cudaGraphExecUpdateResultInfo info;
    memset(&info, 0x55, sizeof info);
    expect_(what, cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdate(exec, graph, &info));
    cudaGetLastError();
    return info;
}

// The node to blame is the new graph's; none for another number of nodes; and the one it depends on only if that is what differs.
static void updates() {
    cudaGraph_t graph, other;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t a = kernel(graph, words, 1, 0, 0), b = kernel(graph, words + 1, 2, 0, 0, {a});
    kernel(graph, words + 2, 3, 0, 0, {b});
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));

    CHECK(cudaGraphCreate(&other, 0));
    cudaGraphNode_t first = kernel(other, words, 4, 0, 0), second, third;
    kernel(other, words + 1, 5, 0, 0, {first});
    cudaGraphExecUpdateResultInfo info = refused(exec, other, "a node too few");
    IS(cudaGraphExecUpdateErrorTopologyChanged, info.result);
    TRUE_THAT(info.errorNode == nullptr && info.errorFromNode == nullptr);
    kernel(other, words + 2, 6, 0, 0, {first});
    kernel(other, words + 3, 6, 0, 0, {first});
    info = refused(exec, other, "a node too many");
    IS(cudaGraphExecUpdateErrorTopologyChanged, info.result);
    TRUE_THAT(info.errorNode == nullptr && info.errorFromNode == nullptr);
    CHECK(cudaGraphDestroy(other));

    CHECK(cudaGraphCreate(&other, 0));
    first = kernel(other, words, 4, 0, 0);
    CHECK(cudaGraphAddEmptyNode(&second, other, &first, 1));
    kernel(other, words + 2, 6, 0, 0, {second});
    info = refused(exec, other, "a node of another kind");
    IS(cudaGraphExecUpdateErrorNodeTypeChanged, info.result);
    TRUE_THAT(info.errorNode == second && info.errorFromNode == nullptr);
    CHECK(cudaGraphDestroy(other));

    CHECK(cudaGraphCreate(&other, 0));
    first = kernel(other, words, 4, 0, 0);
    second = kernel(other, words + 1, 5, 0, 0, {first});
    third = kernel(other, words + 2, 6, 0, 0, {second});
    CHECK(cudaGraphAddDependencies(other, &first, &third, nullptr, 1));
    info = refused(exec, other, "a dependency too many");
    IS(cudaGraphExecUpdateErrorTopologyChanged, info.result);
    TRUE_THAT(info.errorNode == third);
    CHECK(cudaGraphRemoveDependencies(other, &first, &third, nullptr, 1));

    // Nothing of it was taken over, and then all is.
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(word(0) == 100 && word(1) == 200 && word(2) == 300);
    memset(&info, 0x55, sizeof info);
    RETURNS(cudaSuccess, cudaGraphExecUpdate(exec, other, &info));
    IS(cudaGraphExecUpdateSuccess, info.result);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(word(0) == 400 && word(1) == 500 && word(2) == 600);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphDestroy(other));
}

// A copy's memory is of the same kind after a kernel has used it in place.
static void pinned_stays_pinned() {
    int *pinned;
    CHECK(cudaMallocHost(&pinned, 64));
    cudaGraph_t graphs[2];
    cudaGraphExec_t exec;
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaMemcpyAsync(words, pinned + i, sizeof(int), cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(pinned + 4 + i, words, sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamEndCapture(stream, &graphs[i]));
        if (i == 1) break;
        CHECK(cudaGraphInstantiate(&exec, graphs[0], 0));
        pinned[0] = 5;
        CHECK(cudaGraphLaunch(exec, stream));
        put<<<1, 1, 0, stream>>>(pinned + 1, 7, 8, 9);
        LAUNCHED();
        CHECK(cudaStreamSynchronize(stream));
        TRUE_THAT(pinned[4] == 5 && pinned[1] == 789);
    }
    cudaGraphExecUpdateResultInfo info;
    RETURNS(cudaSuccess, cudaGraphExecUpdate(exec, graphs[1], &info));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(pinned[5] == 789 && word(0) == 789);
    // And back again, by what the first graph still says of it.
    RETURNS(cudaSuccess, cudaGraphExecUpdate(exec, graphs[0], &info));
    pinned[0] = 6;
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(pinned[4] == 6 && word(0) == 6);
    CHECK(cudaGraphExecDestroy(exec));
    for (cudaGraph_t graph : graphs) CHECK(cudaGraphDestroy(graph));

    // A fill of pinned memory that no kernel has used, and then of that which one has.
    cudaMemsetParams fill = {};
    int *other;
    CHECK(cudaMallocHost(&other, 64));
    fill.dst = other;
    fill.elementSize = 4;
    fill.value = 3;
    fill.width = 2;
    fill.height = 1;
    cudaGraph_t graph;
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &fill));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    fill.dst = pinned;
    fill.value = 4;
    RETURNS(cudaSuccess, cudaGraphExecMemsetNodeSetParams(exec, node, &fill));
    other[0] = pinned[0] = pinned[2] = 0;
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    TRUE_THAT(other[0] == 0 && pinned[0] == 4 && pinned[1] == 4 && pinned[2] == 0);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // The direction of a copy is told as it was given.
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemcpy3DParms told = {};
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNode1D(&node, graph, nullptr, 0, words, pinned, 16, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaGraphMemcpyNodeGetParams(node, &told));
    TRUE_THAT(told.kind == cudaMemcpyHostToDevice && told.srcPtr.ptr == pinned && told.dstPtr.ptr == words);
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNode1D(&node, graph, nullptr, 0, pinned, words, 16, cudaMemcpyDeviceToHost));
    RETURNS(cudaSuccess, cudaGraphMemcpyNodeGetParams(node, &told));
    TRUE_THAT(told.kind == cudaMemcpyDeviceToHost && told.srcPtr.ptr == words && told.dstPtr.ptr == pinned);
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFreeHost(other));
    CHECK(cudaFreeHost(pinned));
}

// "Any further use of any streams being captured or captured events associated with the capture is invalid and will return an error, until stream capture
// is terminated."
static void disturbed_capture() {
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    put<<<1, 1, 0, stream>>>(words, 1, 1, 1);
    LAUNCHED();
    RETURNS(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(stream));
    TRUE_THAT(cudaEventRecord(event, stream) != cudaSuccess);
    TRUE_THAT(cudaEventRecordWithFlags(event, stream, cudaEventRecordExternal) != cudaSuccess);
    TRUE_THAT(cudaMemsetAsync(words, 0, 4, stream) != cudaSuccess);
    put<<<1, 1, 0, stream>>>(words, 1, 1, 1);
    TRUE_THAT(cudaGetLastError() != cudaSuccess);
    cudaGraph_t graph = (cudaGraph_t)1;
    RETURNS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    TRUE_THAT(graph == nullptr);
    // The event was not recorded there, and is one like any other.
    RETURNS(cudaSuccess, cudaEventQuery(event));
    RETURNS(cudaSuccess, cudaEventRecord(event, stream));
    RETURNS(cudaSuccess, cudaEventSynchronize(event));
    CHECK(cudaEventDestroy(event));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaMalloc(&words, 64 * sizeof(int)));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    arguments_outlive_attributes();
    captured_priority();
    copies_and_fills();
    drawing();
    updates();
    pinned_stays_pinned();
    disturbed_capture();
    return verdict();
}
