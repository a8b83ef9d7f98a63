// Graphs inside graphs, copied or moved there, clones, and child graphs of instances that change.
#define PROGRAM "graph_child"
#include "common.h"

__global__ void step(int *value, int factor, int addend) { *value = *value * factor + addend; }

__global__ void take(int *value, const int *from) { *value += *from; }

static cudaGraphNode_t add(cudaGraph_t graph, cudaGraphNode_t *after, int *value, int factor, int addend) {
    void *arguments[] = {&value, &factor, &addend};
    cudaKernelNodeParams params = {};
    params.func = (void *)step;
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after, after ? 1 : 0, &params));
    return node;
}

static int run(cudaGraph_t graph, int *value, int from) {
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaMemcpy(value, &from, sizeof from, cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(exec, 0));
    CHECK(cudaStreamSynchronize(0));
    CHECK(cudaGraphExecDestroy(exec));
    int result;
    CHECK(cudaMemcpy(&result, value, sizeof result, cudaMemcpyDeviceToHost));
    return result;
}

static cudaError_t add_child(cudaGraphNode_t *node, cudaGraph_t graph, cudaGraph_t child, int ownership) {
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeGraph;
    params.graph.graph = child;
    params.graph.ownership = (cudaGraphChildGraphNodeOwnership)ownership;
    return cudaGraphAddNode(node, graph, nullptr, nullptr, 0, &params);
}

// A child graph that is moved into its node: it is the parent's then, under the handles that it has.
static void move(int *value) {
    cudaGraph_t parent, child, other, part;
    cudaGraphNode_t node, refused;
    for (cudaGraph_t *each : {&parent, &child, &other}) CHECK(cudaGraphCreate(each, 0));
    cudaGraphNode_t first = add(child, nullptr, value, 2, 1);
    CHECK(add_child(&node, parent, child, cudaGraphChildGraphOwnershipMove));
    CHECK(cudaGraphChildGraphNodeGetGraph(node, &part));
    REQUIRE(part == child, "a moved graph has another handle");
    // What it is not any more: a graph of its own.
    cudaGraphExec_t exec;
    EXPECT(cudaErrorNotSupported, add_child(&refused, other, child, cudaGraphChildGraphOwnershipMove));
    EXPECT(cudaErrorNotSupported, add_child(&refused, other, child, cudaGraphChildGraphOwnershipClone));
    EXPECT(cudaErrorNotSupported, cudaGraphInstantiate(&exec, child, 0));
    EXPECT(cudaErrorInvalidValue, cudaGraphDestroy(child));
    // It changes by its old handles.
    add(child, &first, value, 10, 3);
    int result = run(parent, value, 1);
    REQUIRE(result == (1 * 2 + 1) * 10 + 3, "a moved graph comes to %d", result);
    cudaKernelNodeParams params;
    CHECK(cudaGraphKernelNodeGetParams(first, &params));
    int factor = 1, addend = 4;
    void *arguments[] = {&value, &factor, &addend};
    params.kernelParams = arguments;
    CHECK(cudaGraphInstantiate(&exec, parent, 0));
    CHECK(cudaGraphExecKernelNodeSetParams(exec, first, &params));
    CHECK(cudaGraphLaunch(exec, 0));
    CHECK(cudaGraphKernelNodeSetParams(first, &params));
    CHECK(cudaStreamSynchronize(0));
    CHECK(cudaMemcpy(&result, value, sizeof result, cudaMemcpyDeviceToHost));
    REQUIRE(result == (33 + 4) * 10 + 3, "an instance whose moved graph changes comes to %d", result);
    result = run(parent, value, 1);
    REQUIRE(result == (1 + 4) * 10 + 3, "a moved graph that changes comes to %d", result);
    CHECK(cudaGraphExecDestroy(exec));

    // Memory nodes are moved, too.
    cudaMemAllocNodeParams memory = {};
    memory.poolProps.allocType = cudaMemAllocationTypePinned;
    memory.poolProps.location.type = cudaMemLocationTypeDevice;
    memory.bytesize = sizeof(int);
    cudaGraph_t with_memory, around;
    cudaGraphNode_t made, freed;
    CHECK(cudaGraphCreate(&with_memory, 0));
    CHECK(cudaGraphCreate(&around, 0));
    CHECK(cudaGraphAddMemAllocNode(&made, with_memory, nullptr, 0, &memory));
    cudaGraphNode_t used = add(with_memory, &made, (int *)memory.dptr, 0, 5);
    void *copy_arguments[] = {&value, &memory.dptr};
    params.func = (void *)take;
    params.kernelParams = copy_arguments;
    cudaGraphNode_t taken;
    CHECK(cudaGraphAddKernelNode(&taken, with_memory, &used, 1, &params));
    CHECK(cudaGraphAddMemFreeNode(&freed, with_memory, &taken, 1, memory.dptr));
    EXPECT(cudaErrorNotSupported, cudaGraphAddChildGraphNode(&node, around, nullptr, 0, with_memory));
    CHECK(add_child(&node, around, with_memory, cudaGraphChildGraphOwnershipMove));
    for (int round = 0; round < 2; round++) {
        result = run(around, value, 1);
        REQUIRE(result == 6, "a moved graph with memory comes to %d", result);
    }
    for (cudaGraph_t graph : {parent, other, around}) CHECK(cudaGraphDestroy(graph));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *value;
    CHECK(cudaMalloc(&value, sizeof *value));
    move(value);

    cudaGraph_t inner;
    CHECK(cudaGraphCreate(&inner, 0));
    cudaGraphNode_t first = add(inner, nullptr, value, 2, 1), second = add(inner, &first, value, 3, 0);

    cudaGraph_t middle;
    CHECK(cudaGraphCreate(&middle, 0));
    cudaGraphNode_t begin = add(middle, nullptr, value, 1, 10), child, end;
    CHECK(cudaGraphAddChildGraphNode(&child, middle, &begin, 1, inner));
    end = add(middle, &child, value, 1, -4);

    cudaGraph_t outer, empty;
    CHECK(cudaGraphCreate(&outer, 0));
    CHECK(cudaGraphCreate(&empty, 0));
    cudaGraphNode_t one, nothing, two;
    CHECK(cudaGraphAddChildGraphNode(&one, outer, nullptr, 0, middle));
    CHECK(cudaGraphAddChildGraphNode(&nothing, outer, &one, 1, empty));
    CHECK(cudaGraphAddChildGraphNode(&two, outer, &nothing, 1, middle));
    // ((v + 10) * 2 + 1) * 3 - 4, twice
    int result = run(outer, value, 1);
    int once = ((1 + 10) * 2 + 1) * 3 - 4, twice = ((once + 10) * 2 + 1) * 3 - 4;
    REQUIRE(result == twice, "nested graphs come to %d, not %d", result, twice);

    // What a child graph node has is a copy: the original changes without it.
    add(inner, &second, value, 0, 0);
    REQUIRE(run(outer, value, 1) == twice, "a child graph followed its original");
    cudaGraph_t part;
    CHECK(cudaGraphChildGraphNodeGetGraph(child, &part));
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(part, nullptr, &nodes));
    REQUIRE(nodes == 2, "the child graph has %zu nodes", nodes);

    // A clone: nodes are found again, and what is changed in it is changed there alone.
    cudaGraph_t clone;
    CHECK(cudaGraphClone(&clone, middle));
    cudaGraphNode_t found;
    CHECK(cudaGraphNodeFindInClone(&found, end, clone));
    REQUIRE(found != end, "a clone's node is the original's");
    EXPECT(cudaErrorInvalidValue, cudaGraphNodeFindInClone(&found, first, clone));
    CHECK(cudaGraphNodeFindInClone(&found, end, clone));
    cudaKernelNodeParams params;
    CHECK(cudaGraphKernelNodeGetParams(found, &params));
    int factor = 1, addend = 1000;
    void *arguments[] = {&value, &factor, &addend};
    params.kernelParams = arguments;
    CHECK(cudaGraphKernelNodeSetParams(found, &params));
    int cloned = run(clone, value, 1), original = run(middle, value, 1);
    REQUIRE(cloned == once + 1004 && original == once, "the clone comes to %d, the original to %d", cloned, original);

    // A launch has no place in a capture.
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, middle, 0));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t captured = nullptr;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step<<<1, 1, 0, stream>>>(value, 1, 1);
    LAUNCHED();
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaGraphLaunch(exec, stream));
    EXPECT(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &captured));

    // The instance's child graph changes: its nodes do something else, under the names that they had.
    cudaGraph_t other;
    CHECK(cudaGraphCreate(&other, 0));
    first = add(other, nullptr, value, 1, 7);
    add(other, &first, value, 1, 8);
    CHECK(cudaGraphExecChildGraphNodeSetParams(exec, child, other));
    int start = 1;
    CHECK(cudaMemcpy(value, &start, sizeof start, cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&result, value, sizeof result, cudaMemcpyDeviceToHost));
    REQUIRE(result == 1 + 10 + 7 + 8 - 4, "the changed child graph comes to %d", result);
    CHECK(cudaGraphExecDestroy(exec));
    for (cudaGraph_t graph : {inner, middle, outer, empty, clone, other}) CHECK(cudaGraphDestroy(graph));
    return pass("%d, %d, %d", twice, cloned, result);
}
