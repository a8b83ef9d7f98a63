// Launches with attributes: priority, cooperative, memory synchronization domains, programmatic serialization, events; the
// order of what is launched so, and the codes for what no launch can have.
#define PROGRAM "launch_attributes"
#include "cases.h"
#include <cooperative_groups.h>

__global__ void step(int *p, int factor, int addend) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    p[i] = p[i] * factor + addend;
}
__global__ void turn(int *p, int n) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    int i = grid.thread_rank(), mine = p[n - 1 - i];
    grid.sync();
    p[i] = mine;
}

constexpr int N = 512;

static cudaLaunchConfig_t config(cudaStream_t stream, cudaLaunchAttribute *attributes, unsigned count) {
    cudaLaunchConfig_t config = {};
    config.gridDim = N / 128;
    config.blockDim = 128;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return config;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *p, host[N], least, greatest;
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaMalloc(&p, sizeof host));
    RETURNS(cudaSuccess, cudaMemset(p, 0, sizeof host));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaDeviceGetStreamPriorityRange(&least, &greatest));

    cudaLaunchConfig_t none = config(stream, nullptr, 0);
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&none, step, p, 1, 3));

    cudaLaunchAttribute attributes[4] = {};
    attributes[0].id = cudaLaunchAttributePriority;
    attributes[0].val.priority = greatest;
    attributes[1].id = cudaLaunchAttributeMemSyncDomain;
    attributes[1].val.memSyncDomain = cudaLaunchMemSyncDomainDefault;
    attributes[2].id = cudaLaunchAttributeIgnore;
    cudaLaunchConfig_t several = config(stream, attributes, 3);
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&several, step, p, 5, 1));

    // A kernel that may begin before the one ahead is done, and waits for nothing of it by itself: written so that both orders
    // are the same only if the second still comes after the first.
    cudaLaunchAttribute serial = {};
    serial.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serial.val.programmaticStreamSerializationAllowed = 0;
    cudaLaunchConfig_t after = config(stream, &serial, 1);
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&after, step, p, 2, 7));

    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (host[i] != (3 * 5 + 1) * 2 + 7) fail("element %d is %d", i, host[i]);
    for (int i = 0; i < N; i++) host[i] = i;
    RETURNS(cudaSuccess, cudaMemcpy(p, host, sizeof host, cudaMemcpyHostToDevice));
    // The stream does not wait for the default one, and of pageable memory no more may be done yet than reading it.
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    cudaLaunchConfig_t whole = config(stream, &together, 1);
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&whole, turn, p, N));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (host[i] != N - 1 - i) fail("turned, element %d is %d", i, host[i]);

    // By the untyped call.
    int factor = 1, addend = 100;
    void *arguments[] = {&p, &factor, &addend};
    RETURNS(cudaSuccess, cudaLaunchKernelExC(&none, (const void *)step, arguments));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
    IS(N - 1 + 100, host[0]);

    // A hint for kernels that use NVLink, which changes nothing of what the kernel does.
    cudaLaunchAttribute hint = {};
    hint.id = cudaLaunchAttributeNvlinkUtilCentricScheduling;
    hint.val.nvlinkUtilCentricScheduling = 1;
    cudaLaunchConfig_t hinted = config(stream, &hint, 1);
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&hinted, step, p, 0, 5));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
    IS(5, host[0]);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&hinted, step, p, 3, 2));
    RETURNS(cudaSuccess, cudaStreamEndCapture(stream, &graph));
    cudaGraphNode_t node;
    size_t count = 1;
    RETURNS(cudaSuccess, cudaGraphGetNodes(graph, &node, &count));
    RETURNS(cudaSuccess, cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeNvlinkUtilCentricScheduling, &hint.val));
    RETURNS(cudaSuccess, cudaGraphInstantiate(&exec, graph, 0));
    RETURNS(cudaSuccess, cudaGraphLaunch(exec, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
    IS(5 * 3 + 2, host[0]);
    hint.val.nvlinkUtilCentricScheduling = 2;
    RETURNS(cudaErrorInvalidValue, cudaLaunchKernelEx(&hinted, step, p, 0, 5));
    RETURNS(cudaErrorInvalidValue, cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeNvlinkUtilCentricScheduling, &hint.val));
    RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));

    // What a launch cannot have.
    cudaLaunchConfig_t wrong = none;
    wrong.blockDim = 2000;
    RETURNS(cudaErrorInvalidValue, cudaLaunchKernelExC(&wrong, (const void *)step, arguments));
    wrong = none;
    wrong.gridDim = dim3(0);
    RETURNS(cudaErrorInvalidValue, cudaLaunchKernelExC(&wrong, (const void *)step, arguments));
    wrong = none;
    wrong.dynamicSmemBytes = 1 << 20;
    RETURNS(cudaErrorInvalidValue, cudaLaunchKernelExC(&wrong, (const void *)step, arguments));
    cudaLaunchAttribute unknown = {};
    for (int id : {(int)cudaLaunchAttributeSynchronizationPolicy, 15, 60}) {
        unknown.id = (cudaLaunchAttributeID)id;
        wrong = config(stream, &unknown, 1);
        RETURNS(cudaErrorInvalidValue, cudaLaunchKernelExC(&wrong, (const void *)step, arguments));
    }
    // More blocks at once than the device holds.
    wrong = config(stream, &together, 1);
    wrong.gridDim = 1 << 20;
    RETURNS(cudaErrorCooperativeLaunchTooLarge, cudaLaunchKernelExC(&wrong, (const void *)step, arguments));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    RETURNS(cudaSuccess, cudaFree(p));
    return verdict();
}
