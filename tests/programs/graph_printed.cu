// Graphs as text: each kind of node stands in what cudaGraphDebugDotPrint writes, with its edges; and what outlives what when a
// graph, its clone and its instances are destroyed.
#define PROGRAM "graph_printed"
#include "cases.h"
#include <fstream>
#include <sstream>
#include <unistd.h>

__global__ void step(int *p, int value) { *p = *p * 2 + value; }
static void CUDART_CB on_host(void *p) { ++*(int *)p; }

static std::string print(cudaGraph_t graph, unsigned flags) {
    char path[] = "/tmp/rgpu-graphXXXXXX";
    int file = mkstemp(path);
    REQUIRE(file >= 0, "cannot make a file");
    close(file);
    RETURNS(cudaSuccess, cudaGraphDebugDotPrint(graph, path, flags));
    std::ifstream in(path);
    std::stringstream text;
    text << in.rdbuf();
    unlink(path);
    return text.str();
}

static int times(const std::string &text, const std::string &what) {
    int n = 0;
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) n++;
    return n;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *p, value = 3, calls = 0, got = 0;
    RETURNS(cudaSuccess, cudaMalloc(&p, 4));
    cudaGraph_t graph, clone;
    cudaGraphNode_t fill, kernel, host, copy, empty;
    RETURNS(cudaSuccess, cudaGraphCreate(&graph, 0));
    cudaMemsetParams set = {};
    set.dst = p, set.value = 0, set.elementSize = 4, set.width = 1, set.height = 1;
    RETURNS(cudaSuccess, cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &set));
    void *arguments[] = {&p, &value};
    cudaKernelNodeParams params = {};
    params.func = (void *)step, params.gridDim = dim3(1), params.blockDim = dim3(1), params.kernelParams = arguments;
    RETURNS(cudaSuccess, cudaGraphAddKernelNode(&kernel, graph, &fill, 1, &params));
    cudaHostNodeParams call = {on_host, &calls};
    RETURNS(cudaSuccess, cudaGraphAddHostNode(&host, graph, &kernel, 1, &call));
    RETURNS(cudaSuccess, cudaGraphAddMemcpyNode1D(&copy, graph, &kernel, 1, &got, p, 4, cudaMemcpyDeviceToHost));
    cudaGraphNode_t both[] = {host, copy};
    RETURNS(cudaSuccess, cudaGraphAddEmptyNode(&empty, graph, both, 2));

    for (unsigned flags : {0u, (unsigned)cudaGraphDebugDotFlagsVerbose}) {
        std::string text = print(graph, flags);
        TRUE_THAT(text.find("digraph") != std::string::npos);
        IS(5, times(text, "->"));
        TRUE_THAT(text.find("step") != std::string::npos);
    }
    RETURNS(cudaErrorInvalidValue, cudaGraphDebugDotPrint(graph, nullptr, 0));

    // Instances and clones do not need the graph.
    cudaGraphExec_t exec, of_clone;
    unsigned long long flags = 99;
    RETURNS(cudaSuccess, cudaGraphClone(&clone, graph));
    RETURNS(cudaSuccess, cudaGraphInstantiateWithFlags(&exec, graph, 0));
    RETURNS(cudaSuccess, cudaGraphExecGetFlags(exec, &flags));
    IS(0, flags);
    RETURNS(cudaSuccess, cudaGraphDestroyNode(empty));
    size_t count = 0;
    RETURNS(cudaSuccess, cudaGraphGetNodes(graph, nullptr, &count));
    IS(4, count);
    RETURNS(cudaSuccess, cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &count));
    IS(3, count);
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));
    RETURNS(cudaSuccess, cudaGraphLaunch(exec, 0));
    RETURNS(cudaSuccess, cudaStreamSynchronize(0));
    IS(3, got);
    IS(1, calls);
    RETURNS(cudaSuccess, cudaGraphGetNodes(clone, nullptr, &count));
    IS(5, count);
    RETURNS(cudaSuccess, cudaGraphInstantiate(&of_clone, clone, 0));
    RETURNS(cudaSuccess, cudaGraphUpload(of_clone, 0));
    RETURNS(cudaSuccess, cudaGraphDestroy(clone));
    for (int i = 0; i < 3; i++) RETURNS(cudaSuccess, cudaGraphLaunch(of_clone, 0));
    // Destroyed while it may run.
    RETURNS(cudaSuccess, cudaGraphExecDestroy(of_clone));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    IS(4, calls);
    RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
    RETURNS(cudaErrorInvalidValue, cudaGraphCreate(nullptr, 0));
    RETURNS(cudaErrorInvalidValue, cudaGraphInstantiate(nullptr, nullptr, 0));
    RETURNS(cudaErrorInvalidValue, cudaGraphLaunch(nullptr, 0));
    RETURNS(cudaErrorInvalidValue, cudaGraphDestroy(nullptr));
    RETURNS(cudaSuccess, cudaFree(p));
    return verdict();
}
