// A graph whose kernels are of two devices, with copies between them, as tinygrad makes for tensors on several
// GPUs: each node follows those that it depends on, nodes can be changed, and an instance that is held up holds
// up no other.
#define PROGRAM "graph_across"
#include "driver.h"
#include "several_devices.h"

static const int N = 1000;

__global__ void add(int *data, int by) {
    for (int i = threadIdx.x; i < N; i += blockDim.x) data[i] += by;
}

struct Kernel {
    CUfunction function;
    int *data;
    int by;
    void *arguments[2] = {&data, &by};
    CUDA_KERNEL_NODE_PARAMS params() {
        CUDA_KERNEL_NODE_PARAMS p = {};
        p.func = function;
        p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimY = p.blockDimZ = 1;
        p.blockDimX = 128;
        p.kernelParams = arguments;
        return p;
    }
};

static CUgraphNode add_kernel(CUgraph graph, Kernel &kernel, std::vector<CUgraphNode> after) {
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS params = kernel.params();
    DRIVER(cuGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
    return node;
}

static CUgraphNode add_copy(CUgraph graph, CUcontext context, int *to, int *from, CUgraphNode after) {
    CUgraphNode node;
    CUDA_MEMCPY3D params = {};
    params.srcMemoryType = params.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    params.srcDevice = (CUdeviceptr)from;
    params.dstDevice = (CUdeviceptr)to;
    params.WidthInBytes = params.srcPitch = params.dstPitch = N * sizeof(int);
    params.Height = params.Depth = params.srcHeight = params.dstHeight = 1;
    DRIVER(cuGraphAddMemcpyNode(&node, graph, &after, 1, &params, context));
    return node;
}

int main() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count >= 2, "needs two devices, and there are %d", count);
    CUcontext contexts[2];
    cudaFunction_t functions[2];
    cudaStream_t streams[2];
    for (int device : {1, 0}) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaFree(nullptr));
        CHECK(cudaDeviceEnablePeerAccess(1 - device, 0));
        DRIVER(cuCtxGetCurrent(&contexts[device]));
        CHECK(cudaGetFuncBySymbol(&functions[device], (const void *)add));
    }
    int *first = on_device(0, N, 0), *last = on_device(0, N, 0), *there = on_device(1, N, 0), *alone = on_device(1, N, 0);
    CHECK(cudaSetDevice(0));
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    Kernel begins{(CUfunction)functions[0], first, 1}, goes_on{(CUfunction)functions[1], there, 10}, ends{(CUfunction)functions[0], last, 100},
        beside{(CUfunction)functions[1], alone, 5};
    CUgraph graph;
    CUgraphExec exec;
    DRIVER(cuGraphCreate(&graph, 0));
    CUgraphNode begun = add_kernel(graph, begins, {});
    CUgraphNode gone_on = add_kernel(graph, goes_on, {add_copy(graph, contexts[0], there, first, begun)});
    add_kernel(graph, ends, {add_copy(graph, contexts[1], last, there, gone_on)});
    add_kernel(graph, beside, {});
    DRIVER(cuGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) DRIVER(cuGraphLaunch(exec, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    REQUIRE(holds(first, N, 3) && holds(there, N, 13) && holds(last, N, 113) && holds(alone, N, 15), "wrong after three launches");

    goes_on.by = 20;
    CUDA_KERNEL_NODE_PARAMS changed = goes_on.params();
    DRIVER(cuGraphExecKernelNodeSetParams(exec, gone_on, &changed));
    DRIVER(cuGraphLaunch(exec, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    REQUIRE(holds(first, N, 4) && holds(there, N, 24) && holds(last, N, 124), "wrong after a change of the other device's kernel");
    DRIVER(cuGraphNodeSetEnabled(exec, gone_on, 0));
    DRIVER(cuGraphLaunch(exec, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    REQUIRE(holds(there, N, 5) && holds(last, N, 105) && holds(alone, N, 25), "wrong without the other device's kernel");

    // On the other device's stream, whose own work it follows.
    cudaStream_t third;
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreateWithFlags(&third, cudaStreamNonBlocking));
    add<<<1, 128, 0, third>>>(alone, 1000);
    DRIVER(cuGraphUpload(exec, third));
    DRIVER(cuGraphLaunch(exec, third));
    add<<<1, 128, 0, third>>>(there, 1000);
    CHECK(cudaStreamSynchronize(third));
    REQUIRE(holds(first, N, 6) && holds(there, N, 1006) && holds(last, N, 106) && holds(alone, N, 1030), "wrong on the other device's stream");

    // Two instances, of which the first waits for the host.
    CUgraph other;
    CUgraphExec held, free;
    int *mine = on_device(1, N, 0), *yours = on_device(1, N, 0);
    CHECK(cudaSetDevice(0));
    Kernel of_first{(CUfunction)functions[0], first, 0}, of_held{(CUfunction)functions[1], mine, 1}, of_free{(CUfunction)functions[1], yours, 2};
    DRIVER(cuGraphCreate(&other, 0));
    add_kernel(other, of_first, {});
    CUgraphNode kernel = add_kernel(other, of_held, {});
    DRIVER(cuGraphInstantiate(&held, other, 0));
    CUDA_KERNEL_NODE_PARAMS params = of_free.params();
    DRIVER(cuGraphKernelNodeSetParams(kernel, &params));
    DRIVER(cuGraphInstantiate(&free, other, 0));
    static Gate gate;
    CHECK(cudaLaunchHostFunc(streams[0], Gate::wait, &gate));
    DRIVER(cuGraphLaunch(held, streams[0]));
    DRIVER(cuGraphLaunch(free, streams[1]));
    CHECK(cudaStreamSynchronize(streams[1]));
    REQUIRE(holds(yours, N, 2), "wrong in an instance beside one that is held up");
    REQUIRE(cudaStreamQuery(streams[0]) == cudaErrorNotReady, "the other instance is not held up");
    gate.open = true;
    CHECK(cudaStreamSynchronize(streams[0]));
    REQUIRE(holds(mine, N, 1), "wrong in an instance that was held up");
    for (CUgraphExec e : {exec, held, free}) DRIVER(cuGraphExecDestroy(e));
    for (CUgraph g : {graph, other}) DRIVER(cuGraphDestroy(g));
    return pass("kernels of two devices in a graph");
}
