// What a program can learn of a graph: nodes, roots, edges, types, parameters, attributes; of a capture while it is under way; and
// objects that live as long as graphs do.
#define PROGRAM "graph_inspect"
#include "common.h"

#include <atomic>
#include <string>
#include <fcntl.h>
#include <unistd.h>
#include <vector>

__global__ void kernel(int *data, char small, double wide) { data[threadIdx.x] = small + (int)wide; }

static std::atomic<int> ended{0};

static void CUDART_CB end_object(void *argument) { ended += *(int *)argument; }

// A graph with one node, which has an object that ends with the graphs and instances that have it.
static cudaGraph_t with_object(std::atomic<int> *ends) {
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaUserObject_t object;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddEmptyNode(&node, graph, nullptr, 0));
    CHECK(cudaUserObjectCreate(&object, ends, [](void *ends) { ++*(std::atomic<int> *)ends; }, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    return graph;
}

static void expect_end(std::atomic<int> &ends, const char *what) {
    for (int i = 0; i < 100000 && ends == 0; i++) usleep(1000);
    usleep(1000);
    REQUIRE(ends == 1, "%s: an object ended %d times", what, ends.load());
}

// Objects of graphs that an instance was updated with, and of child graphs.
static void instances_keep_objects(cudaStream_t stream) {
    std::atomic<int> ends[4] = {};
    cudaGraph_t graph = with_object(&ends[0]), newer = with_object(&ends[1]);
    cudaGraphExec_t exec;
    cudaGraphExecUpdateResultInfo result;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecUpdate(exec, newer, &result));
    CHECK(cudaGraphDestroy(newer));
    expect_end(ends[0], "of the graph before an update");
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(ends[1] == 0, "an object ended that an updated instance has");
    CHECK(cudaGraphExecDestroy(exec));
    expect_end(ends[1], "of the graph that an instance was updated with");

    cudaGraph_t child = with_object(&ends[2]), other = with_object(&ends[3]);
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddChildGraphNode(&node, graph, nullptr, 0, child));
    CHECK(cudaGraphDestroy(child));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphExecChildGraphNodeSetParams(exec, node, other));
    CHECK(cudaGraphDestroy(other));
    // The graph has it as well.
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(ends[2] == 0, "an object of a child graph ended with its replacement in an instance");
    CHECK(cudaGraphDestroy(graph));
    expect_end(ends[2], "of a child graph that was replaced");
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(ends[3] == 0, "an object ended that an instance has by a child graph that replaced another");
    CHECK(cudaGraphExecDestroy(exec));
    expect_end(ends[3], "of a child graph that replaced another");

    ends[0] = 0;
    child = with_object(&ends[0]);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddChildGraphNode(&node, graph, nullptr, 0, child));
    CHECK(cudaGraphDestroy(child));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(ends[0] == 0, "an object of a child graph ended before the instance");
    CHECK(cudaGraphExecDestroy(exec));
    expect_end(ends[0], "of a child graph");
}

static std::string types(cudaGraph_t graph) {
    size_t count = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    std::string text;
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type;
        CHECK(cudaGraphNodeGetType(node, &type));
        text += (text.empty() ? "" : " ") + std::to_string((int)type);
    }
    return text;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *data, *other;
    CHECK(cudaMalloc(&data, 4096));
    CHECK(cudaMalloc(&other, 4096));
    cudaStream_t stream, side;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&side));
    cudaEvent_t fork, join;
    CHECK(cudaEventCreate(&fork));
    CHECK(cudaEventCreate(&join));

    // A fork and a join, looked at on the way.
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMemsetAsync(data, 1, 256, stream));
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    kernel<<<2, 64, 128, stream>>>(data, 'a', 2.5);
    kernel<<<3, 32, 0, side>>>(other, 'b', -1);
    LAUNCHED();
    cudaStreamCaptureStatus status;
    unsigned long long id = 0, side_id = 0;
    cudaGraph_t graph, seen;
    const cudaGraphNode_t *dependencies;
    size_t count;
    CHECK(cudaStreamGetCaptureInfo(stream, &status, &id, &seen, &dependencies, nullptr, &count));
    REQUIRE(status == cudaStreamCaptureStatusActive && count == 1, "status %d, %zu dependencies", (int)status, count);
    cudaGraphNode_t on_stream = dependencies[0];
    CHECK(cudaStreamGetCaptureInfo(side, &status, &side_id, nullptr, &dependencies, nullptr, &count));
    REQUIRE(id == side_id && count == 1 && dependencies[0] != on_stream, "the forked stream is not in the same capture");
    cudaGraphNode_t on_side = dependencies[0];
    CHECK(cudaEventRecord(join, side));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    // A node of the program's own, put in by hand: the next captured node comes behind it alone, and it behind both.
    cudaGraphNode_t both[] = {on_stream, on_side}, empty;
    CHECK(cudaGraphAddEmptyNode(&empty, seen, both, 2));
    CHECK(cudaStreamUpdateCaptureDependencies(stream, &empty, nullptr, 1, cudaStreamSetCaptureDependencies));
    CHECK(cudaMemcpyAsync(other, data, 64, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    REQUIRE(graph == seen, "the graph is not the one that was shown");
    printf("captured: types %s\n", types(graph).c_str());

    cudaGraphNode_t roots[4], from[8], to[8];
    size_t root_count = 4, edge_count = 0;
    CHECK(cudaGraphGetRootNodes(graph, roots, &root_count));
    REQUIRE(root_count == 1 && roots[1] == nullptr, "%zu roots", root_count);
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edge_count));
    REQUIRE(edge_count == 5, "%zu edges", edge_count);
    edge_count = 8;
    CHECK(cudaGraphGetEdges(graph, from, to, nullptr, &edge_count));
    int into_empty = 0;
    for (size_t i = 0; i < edge_count; i++) into_empty += to[i] == empty;
    REQUIRE(edge_count == 5 && into_empty == 2, "%zu edges, %d to the empty node", edge_count, into_empty);
    CHECK(cudaGraphNodeGetDependencies(empty, from, nullptr, &(count = 8)));
    REQUIRE(count == 2 && ((from[0] == on_stream && from[1] == on_side) || (from[0] == on_side && from[1] == on_stream)),
            "%zu dependencies", count);
    CHECK(cudaGraphNodeGetDependentNodes(roots[0], to, nullptr, &(count = 8)));
    REQUIRE(count == 2, "%zu dependent nodes", count);

    // Parameters, as they were captured and as they are changed.
    cudaKernelNodeParams params;
    CHECK(cudaGraphKernelNodeGetParams(on_stream, &params));
    REQUIRE(params.func == (void *)kernel, "the node's function is another");
    printf("kernel: grid %u block %u shared %u arguments %c %.1f\n", params.gridDim.x, params.blockDim.x,
           params.sharedMemBytes, *(char *)params.kernelParams[1], *(double *)params.kernelParams[2]);
    REQUIRE(*(int **)params.kernelParams[0] == data, "the node's first argument is another");
    cudaMemsetParams set;
    CHECK(cudaGraphMemsetNodeGetParams(roots[0], &set));
    REQUIRE(set.dst == data, "the fill's address is another");
    printf("fill: value %u element %u width %zu height %zu\n", set.value, set.elementSize, set.width, set.height);
    cudaGraphNode_t nodes[8];
    CHECK(cudaGraphGetNodes(graph, nodes, &(count = 8)));
    cudaMemcpy3DParms copy;
    CHECK(cudaGraphMemcpyNodeGetParams(nodes[4], &copy));
    REQUIRE(copy.srcPtr.ptr == data && copy.dstPtr.ptr == other, "the copy's addresses are others");
    printf("copy: %zu x %zu x %zu\n", copy.extent.width, copy.extent.height, copy.extent.depth);
    cudaKernelNodeAttrValue attribute = {};
    attribute.priority = 0;
    CHECK(cudaGraphKernelNodeSetAttribute(on_stream, cudaLaunchAttributePriority, &attribute));
    attribute.cooperative = 1;
    CHECK(cudaGraphKernelNodeSetAttribute(on_side, cudaLaunchAttributeCooperative, &attribute));
    CHECK(cudaGraphKernelNodeCopyAttributes(on_stream, on_side));
    attribute = {};
    CHECK(cudaGraphKernelNodeGetAttribute(on_stream, cudaLaunchAttributeCooperative, &attribute));
    REQUIRE(attribute.cooperative == 1, "the attribute was not copied");

    // A drawing that names each node's kernel.
    char path[] = "/tmp/graph_inspect_XXXXXX";
    int file = mkstemp(path);
    REQUIRE(file >= 0, "no temporary file");
    CHECK(cudaGraphDebugDotPrint(graph, path, 0));
    std::string text(1 << 16, '\0');
    ssize_t length = read(file, &text[0], text.size());
    close(file);
    REQUIRE(length > 0 && text.find("digraph") != std::string::npos && text.find("kernel") != std::string::npos &&
                text.find("->") != std::string::npos,
            "the drawing is %zd bytes long", length);
    CHECK(cudaGraphDebugDotPrint(graph, path, cudaGraphDebugDotFlagsVerbose));
    file = open(path, O_RDONLY);
    ssize_t longer = read(file, &text[0], text.size());
    close(file);
    unlink(path);
    REQUIRE(longer > length, "the drawing that says all is %zd bytes long, the other %zd", longer, length);

    // Objects live as long as a graph, or an instance of it, has them.
    int one = 1, ten = 10;
    cudaUserObject_t object, moved;
    CHECK(cudaUserObjectCreate(&object, &one, end_object, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaUserObjectCreate(&moved, &ten, end_object, 2, cudaUserObjectNoDestructorSync));
    CHECK(cudaGraphRetainUserObject(graph, object, 1, 0));
    CHECK(cudaGraphRetainUserObject(graph, moved, 1, cudaGraphUserObjectMove));
    CHECK(cudaUserObjectRelease(object, 1));
    CHECK(cudaUserObjectRelease(moved, 1));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphReleaseUserObject(graph, moved, 1));
    CHECK(cudaGraphDestroy(graph));
    REQUIRE(ended == 0, "objects ended with their graph, not its instance: %d", ended.load());
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    int value;
    CHECK(cudaMemcpy(&value, other, sizeof value, cudaMemcpyDeviceToHost));
    REQUIRE(value == 'a' + 2, "the graph's result is %d", value);
    CHECK(cudaGraphExecDestroy(exec));
    for (int i = 0; i < 100000 && ended != 11; i++) usleep(1000);
    REQUIRE(ended == 11, "objects ended: %d", ended.load());
    instances_keep_objects(stream);
    return pass("5 nodes, 5 edges");
}
