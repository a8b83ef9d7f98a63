// A graph built node by node: kernels, copies in one and two dimensions, fills, empty nodes, event nodes, dependencies added and
// taken away; instantiated in every way and launched often, on several streams.
#define PROGRAM "graph_explicit"
#include "common.h"

#include <vector>

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

__global__ void combine(const int *a, const int *b, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 3 * a[i] - b[i];
}

__device__ int symbol[64];

static cudaGraphNode_t kernel(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, void *function, void **arguments,
                              int n) {
    cudaKernelNodeParams params = {};
    params.func = function;
    params.gridDim = dim3((n + 127) / 128);
    params.blockDim = dim3(128);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
    return node;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = options.full ? 1 << 20 : 4096;
    const size_t bytes = n * sizeof(int);
    Random random(options.seed);
    int *input, *output, *a, *b, *c;
    CHECK(cudaMallocHost(&input, bytes));
    CHECK(cudaMallocHost(&output, bytes));
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    CHECK(cudaMalloc(&c, bytes));
    random.fill(input, bytes);
    std::vector<int> first(input, input + n);

    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t in, fill, empty, out, symbol_in, box;
    CHECK(cudaGraphAddMemcpyNode1D(&in, graph, nullptr, 0, a, input, bytes, cudaMemcpyHostToDevice));
    cudaMemsetParams set = {};
    set.dst = b;
    set.value = 7;
    set.elementSize = 4;
    set.width = n;
    set.height = 1;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &set));
    cudaGraphNode_t both[] = {in, fill};
    CHECK(cudaGraphAddEmptyNode(&empty, graph, both, 2));
    int five = 5, count = n;
    void *to_a[] = {&a, &count, &five}, *to_b[] = {&b, &count, &five}, *to_c[] = {&a, &b, &c, &count};
    cudaGraphNode_t add_a = kernel(graph, {empty}, (void *)add, to_a, n);
    cudaGraphNode_t add_b = kernel(graph, {empty}, (void *)add, to_b, n);
    // Arguments are read when a node is made.
    five = 1000;
    cudaGraphNode_t last = kernel(graph, {add_a}, (void *)combine, to_c, n);
    CHECK(cudaGraphAddDependencies(graph, &add_b, &last, nullptr, 1));
    EXPECT(cudaErrorInvalidValue, cudaGraphAddDependencies(graph, &add_b, &last, nullptr, 1));
    CHECK(cudaGraphAddMemcpyNode1D(&out, graph, &last, 1, output, c, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphAddMemcpyNodeToSymbol(&symbol_in, graph, &last, 1, symbol, a, 64, 32, cudaMemcpyDeviceToDevice));
    // A square of 8 by 8 integers, from one corner of a 32 wide image to another.
    cudaMemcpy3DParms part = {};
    part.srcPtr = make_cudaPitchedPtr(c, 32 * sizeof(int), 32, n / 32);
    part.dstPtr = make_cudaPitchedPtr(b, 32 * sizeof(int), 32, n / 32);
    part.dstPos = make_cudaPos(16 * sizeof(int), 8, 0);
    part.extent = make_cudaExtent(8 * sizeof(int), 8, 1);
    part.kind = cudaMemcpyDeviceToDevice;
    CHECK(cudaGraphAddMemcpyNode(&box, graph, &last, 1, &part));

    cudaEvent_t before, after;
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    cudaGraphNode_t record, wait;
    CHECK(cudaGraphAddEventWaitNode(&wait, graph, nullptr, 0, before));
    CHECK(cudaGraphAddEventRecordNode(&record, graph, &out, 1, after));

    cudaGraphExec_t exec[3];
    CHECK(cudaGraphInstantiate(&exec[0], graph, 0));
    CHECK(cudaGraphInstantiateWithFlags(&exec[1], graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    cudaStream_t stream[2];
    CHECK(cudaStreamCreate(&stream[0]));
    CHECK(cudaStreamCreateWithFlags(&stream[1], cudaStreamNonBlocking));
    cudaGraphInstantiateParams with = {};
    with.flags = cudaGraphInstantiateFlagUpload;
    with.uploadStream = stream[0];
    CHECK(cudaGraphInstantiateWithParams(&exec[2], graph, &with));
    REQUIRE(with.result_out == cudaGraphInstantiateSuccess, "the result of an instantiation is %d", (int)with.result_out);
    unsigned long long flags;
    CHECK(cudaGraphExecGetFlags(exec[1], &flags));
    REQUIRE(flags == cudaGraphInstantiateFlagAutoFreeOnLaunch, "the flags are %llu", flags);
    // The upload "does not affect the resulting executable graph".
    CHECK(cudaGraphExecGetFlags(exec[2], &flags));
    REQUIRE(flags == 0, "the flags of an uploaded one are %llu", flags);
    CHECK(cudaGraphUpload(exec[0], stream[0]));

    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < n; i++) input[i] = first[i] + round;
        CHECK(cudaEventRecord(before, stream[1]));
        cudaStream_t on = stream[round & 1];
        CHECK(cudaGraphLaunch(exec[round % 3], on));
        CHECK(cudaStreamSynchronize(on));
        CHECK(cudaEventQuery(after));
        for (int i = 0; i < n; i++) {
            int a = (int)((unsigned)input[i] + 5), b = 12;
            int expected = (int)(3u * (unsigned)a - (unsigned)b);
            REQUIRE(output[i] == expected, "round %d: element %d is %d and not %d", round, i, output[i], expected);
        }
    }
    int *image = output;
    CHECK(cudaMemcpy(image, b, bytes, cudaMemcpyDeviceToHost));
    std::vector<int> results(n);
    CHECK(cudaMemcpy(results.data(), c, bytes, cudaMemcpyDeviceToHost));
    for (int y = 0; y < n / 32; y++)
        for (int x = 0; x < 32; x++) {
            bool inside = x >= 16 && x < 24 && y >= 8 && y < 16;
            int expected = inside ? results[(y - 8) * 32 + x - 16] : 12;
            REQUIRE(image[y * 32 + x] == expected, "the image at %d, %d is %d", x, y, image[y * 32 + x]);
        }
    int seen[64];
    CHECK(cudaMemcpyFromSymbol(seen, symbol, sizeof seen));
    for (int i = 0; i < 16; i++) REQUIRE(seen[8 + i] == input[i] + 5, "the symbol's element %d is %d", i, seen[8 + i]);

    // An instance does not need its graph; without the kernel on b, the result is another.
    CHECK(cudaGraphRemoveDependencies(graph, &add_b, &last, nullptr, 1));
    CHECK(cudaGraphDestroyNode(add_b));
    cudaGraphExec_t less;
    CHECK(cudaGraphInstantiate(&less, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(less, stream[0]));
    CHECK(cudaStreamSynchronize(stream[0]));
    int expected = (int)(3u * ((unsigned)input[0] + 5) - 7u);
    REQUIRE(output[0] == expected, "without a node, the first element is %d and not %d", output[0], expected);
    for (cudaGraphExec_t each : exec) CHECK(cudaGraphExecDestroy(each));
    CHECK(cudaGraphExecDestroy(less));
    return pass("11 nodes, 4 instances, 7 launches");
}
