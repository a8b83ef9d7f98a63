// Functions of the host in a stream's order: both calls that put them there, what they get, what they see of the work before
// them, and that none begins before its turn.
#define PROGRAM "stream_callbacks"
#include "by_name.h"
#include <atomic>

constexpr int N = 4096, ROUNDS = 10;

__global__ void add(int *p, int value) { p[blockIdx.x * blockDim.x + threadIdx.x] += value; }

struct Seen {
    const int *host;
    int round, calls, wrong;
    cudaStream_t stream;
};
static std::atomic<int> order{0};

static void CUDART_CB plain(void *data) {
    Seen *seen = (Seen *)data;
    seen->calls++;
    for (int i = 0; i < N; i++) seen->wrong += seen->host[i] != seen->round * 2 + 1;
    order = order * 10 + 1;
}
static void CUDART_CB with_status(cudaStream_t stream, cudaError_t status, void *data) {
    Seen *seen = (Seen *)data;
    seen->calls++;
    seen->wrong += stream != seen->stream || status != cudaSuccess;
    for (int i = 0; i < N; i++) seen->wrong += seen->host[i] != seen->round * 2 + 2;
    order = order * 10 + 2;
}
// No call of CUDA is allowed in a host function, least of all one that waits for the function itself. (In NVIDIA's driver some of these wait, and for good.)
static bool of_rgpu() {
    return dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "rgpu_libcuda");
}
static cudaStream_t awaited;
static cudaEvent_t behind;
static void CUDART_CB forbidden(void *data) {
    int *device;
    *(cudaError_t *)data = cudaMalloc(&device, 16);
}
static void CUDART_CB waits(void *data) {
    int *errors = (int *)data;
    CUdeviceptr device;
    errors[0] = named("cuMemAlloc_v2", &device, (size_t)16);
    errors[1] = named("cuCtxSynchronize");
    errors[2] = of_rgpu() ? cudaStreamSynchronize(awaited) : cudaErrorNotPermitted;
    errors[3] = of_rgpu() ? cudaEventSynchronize(behind) : cudaErrorNotPermitted;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *device, *host;
    CHECK(cudaMalloc(&device, N * 4));
    CHECK(cudaMallocHost(&host, N * 4));
    for (cudaStream_t stream : {(cudaStream_t) nullptr, (cudaStream_t)1}) {
        if (stream) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        Seen seen[2] = {{host, 0, 0, 0, stream}, {host, 0, 0, 0, stream}};
        CHECK(cudaMemsetAsync(device, 0, N * 4, stream));
        for (int round = 0; round < ROUNDS; round++) {
            order = 0;
            seen[0].round = seen[1].round = round;
            add<<<N / 128, 128, 0, stream>>>(device, 1);
            CHECK(cudaMemcpyAsync(host, device, N * 4, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaLaunchHostFunc(stream, plain, &seen[0]));
            add<<<N / 128, 128, 0, stream>>>(device, 1);
            CHECK(cudaMemcpyAsync(host, device, N * 4, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamAddCallback(stream, with_status, &seen[1], 0));
            CHECK(cudaStreamSynchronize(stream));
            REQUIRE(order == 12, "round %d: they came as %d", round, order.load());
        }
        REQUIRE(seen[0].calls == ROUNDS && seen[1].calls == ROUNDS, "%d and %d calls", seen[0].calls, seen[1].calls);
        REQUIRE(seen[0].wrong == 0 && seen[1].wrong == 0, "%d and %d wrong values", seen[0].wrong, seen[1].wrong);
        if (stream) CHECK(cudaStreamDestroy(stream));
    }
    EXPECT(cudaErrorInvalidValue, cudaStreamAddCallback(nullptr, with_status, nullptr, 1));
    EXPECT(cudaErrorInvalidValue, cudaLaunchHostFunc(nullptr, nullptr, nullptr));
    cudaError_t inside = cudaSuccess;
    CHECK(cudaLaunchHostFunc(nullptr, forbidden, &inside));
    CHECK(cudaStreamSynchronize(nullptr));
    REQUIRE(inside == cudaErrorNotPermitted, "cudaMalloc in a host function: %s", cudaGetErrorName(inside));
    int waiting[4] = {};
    CHECK(cudaStreamCreateWithFlags(&awaited, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&behind));
    std::atomic<bool> recorded{false};
    CHECK(cudaLaunchHostFunc(awaited, [](void *data) { while (!*(std::atomic<bool> *)data) {} }, &recorded));
    CHECK(cudaLaunchHostFunc(awaited, waits, waiting));
    CHECK(cudaEventRecord(behind, awaited));
    recorded = true;
    CHECK(cudaStreamSynchronize(awaited));
    for (int error : waiting)
        REQUIRE(error == cudaErrorNotPermitted, "calls in a host function: %d, waiting for the device, its stream and an event behind it: %d %d %d", waiting[0], waiting[1],
                waiting[2], waiting[3]);
    CHECK(cudaEventDestroy(behind));
    CHECK(cudaStreamDestroy(awaited));
    // A whole chain waits in its stream, though another stream goes on.
    cudaStream_t other;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    static std::atomic<bool> go{false};
    CHECK(cudaLaunchHostFunc(other, [](void *) { while (!go) {} }, nullptr));
    CHECK(cudaMemsetAsync(device, 7, 4, other));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(other));
    go = true;
    CHECK(cudaStreamSynchronize(other));
    CHECK(cudaStreamQuery(other));
    return pass("%d rounds on two streams", ROUNDS);
}
