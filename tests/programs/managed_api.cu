// What is around managed memory: copies and fills with it on either side, graphs, advice and prefetching, what is said of its pointers, errors.
#define PROGRAM "managed_api"
#include "common.h"

#include <string.h>
#include <vector>

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

static const int N = 100000;

static void all_are(const int *data, int n, int value, const char *what) {
    for (int i = 0; i < n; i++) REQUIRE(data[i] == value, "%s: element %d is %d, not %d", what, i, data[i], value);
}

static void copies(int *managed, int *device, int *pinned) {
    std::vector<int> pageable(N, 3);
    const size_t bytes = N * sizeof(int);
    CHECK(cudaMemcpy(managed, pageable.data(), bytes, cudaMemcpyHostToDevice));
    all_are(managed, N, 3, "from pageable memory");
    for (int i = 0; i < N; i++) managed[i] = 4;
    CHECK(cudaMemcpy(device, managed, bytes, cudaMemcpyHostToDevice));
    add<<<(N + 255) / 256, 256>>>(device, N, 1);
    CHECK(cudaMemcpy(managed, device, bytes, cudaMemcpyDeviceToHost));
    all_are(managed, N, 5, "through a device");
    for (int i = 0; i < N; i++) managed[i] = 6;
    CHECK(cudaMemcpy(pageable.data(), managed, bytes, cudaMemcpyDefault));
    all_are(pageable.data(), N, 6, "to pageable memory");
    for (int i = 0; i < N; i++) pinned[i] = 7;
    CHECK(cudaMemcpyAsync(managed, pinned, bytes, cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());
    all_are(managed, N, 7, "from pinned memory");
    for (int i = 0; i < N; i++) managed[i] = 8;
    CHECK(cudaMemcpyAsync(pinned, managed, bytes, cudaMemcpyHostToHost));
    CHECK(cudaDeviceSynchronize());
    all_are(pinned, N, 8, "to pinned memory");
    CHECK(cudaMemset(managed, 0x11, bytes));
    all_are(managed, N, 0x11111111, "a fill");
    managed[N / 2] = 9;
    CHECK(cudaMemset(managed, 0, bytes / 4));
    all_are(managed, N / 4, 0, "a fill of a part");
    REQUIRE(managed[N / 2] == 9 && managed[N - 1] == 0x11111111, "beside the part: %d %x", managed[N / 2], managed[N - 1]);
    CHECK(cudaMemcpy2D(managed, 400, pageable.data(), 200, 200, 100, cudaMemcpyHostToDevice));
    REQUIRE(managed[0] == 6 && managed[49] == 6 && managed[50] == 0 && managed[9900] == 6, "rows: %d %d %d", managed[49], managed[50], managed[9900]);
    // As the host's side of a copy that names its sides: in rows, and captured.
    for (int i = 0; i < N; i++) managed[i] = i;
    CHECK(cudaMemcpy2D(device, 200, managed, 400, 200, 100, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(managed + N / 2, 400, device, 200, 200, 100, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 5000; i++) REQUIRE(managed[N / 2 + i / 50 * 100 + i % 50] == i / 50 * 100 + i % 50, "element %d of the rows", i);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemcpyAsync(device, managed, bytes, cudaMemcpyHostToDevice, stream));
    add<<<(N + 255) / 256, 256, 0, stream>>>(device, N, 1);
    CHECK(cudaMemcpyAsync(managed, device, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) managed[i] = round + i;
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < N; i++) REQUIRE(managed[i] == round + i + 1, "round %d: element %d is %d", round, i, managed[i]);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
}

static void graphs(int *managed) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    for (int i = 0; i < N; i++) managed[i] = 1;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    add<<<(N + 255) / 256, 256, 0, stream>>>(managed, N, 10);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 1; round <= 3; round++) {
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        all_are(managed, N, 11 * round - round + 1, "a graph");
        for (int i = 0; i < N; i++) managed[i] += 0;
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
}

static void advice(int *managed) {
    cudaMemLocation here = {cudaMemLocationTypeDevice, {0}}, host = {cudaMemLocationTypeHost, {0}};
    const size_t bytes = N * sizeof(int);
    int value = 0;
    CHECK(cudaMemAdvise(managed, bytes, cudaMemAdviseSetReadMostly, here));
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributeReadMostly, managed, bytes));
    REQUIRE(value == 1, "read mostly is %d", value);
    CHECK(cudaMemAdvise(managed, bytes, cudaMemAdviseUnsetReadMostly, here));
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributeReadMostly, managed, bytes));
    REQUIRE(value == 0, "read mostly is %d", value);
    CHECK(cudaMemAdvise(managed, bytes, cudaMemAdviseSetPreferredLocation, here));
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributePreferredLocation, managed, bytes));
    REQUIRE(value == 0, "the preferred location is %d", value);
    CHECK(cudaMemAdvise(managed, bytes, cudaMemAdviseUnsetPreferredLocation, here));
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributePreferredLocation, managed, bytes));
    REQUIRE(value == cudaInvalidDeviceId, "the preferred location is %d", value);
    CHECK(cudaMemAdvise(managed, bytes, cudaMemAdviseSetAccessedBy, here));
    int by[2] = {-7, -7};
    CHECK(cudaMemRangeGetAttribute(by, sizeof by, cudaMemRangeAttributeAccessedBy, managed, bytes));
    REQUIRE(by[0] == 0 && by[1] == cudaInvalidDeviceId, "accessed by %d, %d", by[0], by[1]);

    for (int i = 0; i < N; i++) managed[i] = i;
    CHECK(cudaMemPrefetchAsync(managed, bytes, here, 0, 0));
    add<<<(N + 255) / 256, 256>>>(managed, N, 1);
    CHECK(cudaMemPrefetchAsync(managed, bytes, host, 0, 0));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < N; i++) REQUIRE(managed[i] == i + 1, "element %d after prefetching is %d", i, managed[i]);
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributeLastPrefetchLocation, managed, bytes));
    REQUIRE(value == cudaCpuDeviceId, "prefetched to %d", value);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *managed, *device, *pinned, value;
    CHECK(cudaMallocManaged(&managed, N * sizeof(int)));
    CHECK(cudaMalloc(&device, N * sizeof(int)));
    CHECK(cudaMallocHost(&pinned, N * sizeof(int)));
    copies(managed, device, pinned);
    graphs(managed);
    advice(managed);

    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrManagedMemory, 0));
    REQUIRE(value == 1, "the attribute is %d", value);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, managed + 5));
    REQUIRE(attributes.type == cudaMemoryTypeManaged && attributes.device == 0 && attributes.devicePointer == managed + 5 && attributes.hostPointer == managed + 5,
            "type %d, device %d", attributes.type, attributes.device);

    void *none;
    CHECK(cudaMallocManaged(&none, 0));
    REQUIRE(none == nullptr, "no bytes");
    REQUIRE(cudaMallocManaged(&none, 16, 8) == cudaErrorInvalidValue, "unknown flags");
    REQUIRE(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributeReadMostly, device, 16) == cudaErrorInvalidValue, "an attribute of device memory");
    cudaGetLastError();
    CHECK(cudaFree(managed));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));

    // A reset takes it away, and there is more afterwards.
    CHECK(cudaMallocManaged(&managed, 4096));
    managed[0] = 1;
    CHECK(cudaDeviceReset());
    CHECK(cudaMallocManaged(&managed, N * sizeof(int)));
    managed[5] = 6;
    add<<<1, 32>>>(managed, 32, 1);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(managed[5] == 7 && managed[0] == 1 && managed[N - 1] == 0, "after a reset: %d %d %d", managed[5], managed[0], managed[N - 1]);
    CHECK(cudaFree(managed));
    return pass("copies, fills, a graph, advice, prefetching, attributes, errors, a reset");
}
