// Memory allocated and freed in a stream's order: used at once, reused, handed from stream to stream, out of a pool of the
// program's own, trimmed, and refused when it is too much.
#define PROGRAM "stream_ordered"
#include "cases.h"
#include <atomic>
#include <thread>
#include <vector>

__global__ void fill(int *p, int n, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = value + i;
}
__global__ void add(int *to, const int *from, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] += from[i];
}

constexpr int N = 30000;
constexpr size_t BYTES = N * sizeof(int);

__global__ void set(int *to, int value) { *to = value; }
__global__ void until(volatile int *flag) {
    while (*flag == 0) {
    }
}

// Memory that a blocking stream frees is still used by the default stream's work before.
static void behind_the_default_stream(cudaStream_t freeing, cudaStream_t other) {
    int *flag, *used, *next;
    std::vector<int> host(N);
    RETURNS(cudaSuccess, cudaMalloc(&flag, sizeof *flag));
    // All kernels are loaded before one has to run beside another.
    set<<<1, 1>>>(flag, 1);
    until<<<1, 1>>>(flag);
    set<<<1, 1>>>(flag, 0);
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaMallocAsync(&used, BYTES, freeing));
    fill<<<8, 128, 0, freeing>>>(used, N, 1);
    // The stream is known to have done its own work.
    while (cudaStreamQuery(freeing) == cudaErrorNotReady) {
    }
    until<<<1, 1, 0, cudaStreamLegacy>>>(flag);
    fill<<<8, 128, 0, cudaStreamLegacy>>>(used, N, 2);
    RETURNS(cudaSuccess, cudaFreeAsync(used, freeing));
    RETURNS(cudaSuccess, cudaMallocAsync(&next, BYTES, other));
    fill<<<8, 128, 0, other>>>(next, N, 3);
    RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    set<<<1, 1, 0, other>>>(flag, 1);
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaMemcpy(host.data(), next, BYTES, cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < N; i++) wrong += host[i] != 3 + i;
    IS(0, wrong);
    RETURNS(cudaSuccess, cudaFreeAsync(next, other));
    RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    RETURNS(cudaSuccess, cudaFree(flag));
}

static unsigned long long attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
    unsigned long long value = 0;
    RETURNS(cudaSuccess, cudaMemPoolGetAttribute(pool, which, &value));
    return value;
}

static void order(cudaStream_t one, cudaStream_t two) {
    int *a, *b;
    std::vector<int> host(N);
    for (int round = 0; round < 5; round++) {
        RETURNS(cudaSuccess, cudaMallocAsync(&a, BYTES, one));
        fill<<<8, 128, 0, one>>>(a, N, round);
        RETURNS(cudaSuccess, cudaMallocAsync(&b, BYTES, one));
        RETURNS(cudaSuccess, cudaMemsetAsync(b, 0, BYTES, one));
        add<<<8, 128, 0, one>>>(b, a, N);
        RETURNS(cudaSuccess, cudaFreeAsync(a, one));
        cudaEvent_t ready;
        RETURNS(cudaSuccess, cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
        RETURNS(cudaSuccess, cudaEventRecord(ready, one));
        RETURNS(cudaSuccess, cudaStreamWaitEvent(two, ready, 0));
        RETURNS(cudaSuccess, cudaMemcpyAsync(host.data(), b, BYTES, cudaMemcpyDeviceToHost, two));
        RETURNS(cudaSuccess, cudaFreeAsync(b, two));
        RETURNS(cudaSuccess, cudaStreamSynchronize(two));
        RETURNS(cudaSuccess, cudaEventDestroy(ready));
        int wrong = 0;
        for (int i = 0; i < N; i++) wrong += host[i] != round + i;
        IS(0, wrong);
    }
}

static void pools(cudaStream_t stream) {
    cudaMemPool_t standard, current, own;
    RETURNS(cudaSuccess, cudaDeviceGetDefaultMemPool(&standard, 0));
    RETURNS(cudaSuccess, cudaDeviceGetMemPool(&current, 0));
    TRUE_THAT(standard == current);
    IS(0, attribute(standard, cudaMemPoolAttrReleaseThreshold));
    int on = 0;
    for (cudaMemPoolAttr which : {cudaMemPoolReuseFollowEventDependencies, cudaMemPoolReuseAllowOpportunistic, cudaMemPoolReuseAllowInternalDependencies}) {
        RETURNS(cudaSuccess, cudaMemPoolGetAttribute(standard, which, &on));
        IS(1, on);
        int off = 0;
        RETURNS(cudaSuccess, cudaMemPoolSetAttribute(standard, which, &off));
        RETURNS(cudaSuccess, cudaMemPoolGetAttribute(standard, which, &on));
        IS(0, on);
        on = 1;
        RETURNS(cudaSuccess, cudaMemPoolSetAttribute(standard, which, &on));
    }

    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, {0}};
    RETURNS(cudaSuccess, cudaMemPoolCreate(&own, &properties));
    unsigned long long keep = ~0ull;
    RETURNS(cudaSuccess, cudaMemPoolSetAttribute(own, cudaMemPoolAttrReleaseThreshold, &keep));
    TRUE_THAT(attribute(own, cudaMemPoolAttrReleaseThreshold) == keep);
    IS(0, attribute(own, cudaMemPoolAttrUsedMemCurrent));
    int *p, *q;
    RETURNS(cudaSuccess, cudaMallocFromPoolAsync(&p, 1 << 20, own, stream));
    RETURNS(cudaSuccess, cudaMallocFromPoolAsync(&q, 1 << 20, own, stream));
    IS(2 << 20, attribute(own, cudaMemPoolAttrUsedMemCurrent));
    TRUE_THAT(attribute(own, cudaMemPoolAttrReservedMemCurrent) >= 2 << 20);
    cudaPointerAttributes known;
    RETURNS(cudaSuccess, cudaPointerGetAttributes(&known, p));
    TRUE_THAT(known.type == cudaMemoryTypeDevice && known.device == 0);
    RETURNS(cudaSuccess, cudaFreeAsync(p, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    IS(1 << 20, attribute(own, cudaMemPoolAttrUsedMemCurrent));
    IS(2 << 20, attribute(own, cudaMemPoolAttrUsedMemHigh));
    unsigned long long zero = 0;
    RETURNS(cudaSuccess, cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemHigh, &zero));
    IS(1 << 20, attribute(own, cudaMemPoolAttrUsedMemHigh));
    unsigned long long one = 1;
    RETURNS(cudaErrorInvalidValue, cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemHigh, &one));
    RETURNS(cudaErrorInvalidValue, cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemCurrent, &zero));
    RETURNS(cudaSuccess, cudaMemPoolTrimTo(own, 0));
    TRUE_THAT(attribute(own, cudaMemPoolAttrReservedMemCurrent) >= 1 << 20);
    RETURNS(cudaSuccess, cudaFreeAsync(q, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemPoolTrimTo(own, 0));
    IS(0, attribute(own, cudaMemPoolAttrReservedMemCurrent));

    // The device's pool from now on.
    RETURNS(cudaSuccess, cudaDeviceSetMemPool(0, own));
    RETURNS(cudaSuccess, cudaDeviceGetMemPool(&current, 0));
    TRUE_THAT(current == own);
    RETURNS(cudaSuccess, cudaMallocAsync(&p, 5000, stream));
    TRUE_THAT(attribute(own, cudaMemPoolAttrUsedMemCurrent) >= 5000);
    RETURNS(cudaSuccess, cudaFreeAsync(p, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    cudaMemAccessFlags access;
    cudaMemLocation here = {cudaMemLocationTypeDevice, {0}};
    RETURNS(cudaSuccess, cudaMemPoolGetAccess(&access, own, &here));
    IS(cudaMemAccessFlagsProtReadWrite, access);
    RETURNS(cudaSuccess, cudaDeviceSetMemPool(0, standard));
    RETURNS(cudaSuccess, cudaMemPoolDestroy(own));
    RETURNS(cudaErrorInvalidValue, cudaMemPoolDestroy(standard));
}

// A stream has what it has freed again at once, in other sizes too: one after the other, these are more than the device has. The program holds the stream meanwhile, so nothing of
// it is done before all have been made.
static void again(cudaStream_t stream) {
    constexpr int ROUNDS = 40;
    static std::atomic<bool> go;
    size_t free, total;
    int *seen;
    RETURNS(cudaSuccess, cudaMemGetInfo(&free, &total));
    RETURNS(cudaSuccess, cudaMallocHost(&seen, 2 * ROUNDS * sizeof *seen));
    RETURNS(cudaSuccess, cudaLaunchHostFunc(stream, [](void *) { while (!go) std::this_thread::yield(); }, nullptr));
    for (int i = 0; i < ROUNDS; i++) {
        const size_t words = free / 8 / 64 * (64 - i % 13) / sizeof(int);
        int *large, *small;
        RETURNS(cudaSuccess, cudaMallocAsync(&large, words * sizeof(int), stream));
        RETURNS(cudaSuccess, cudaMallocAsync(&small, 1000 + 512 * i, stream));
        set<<<1, 1, 0, stream>>>(large, i);
        set<<<1, 1, 0, stream>>>(large + words - 1, i + 1);
        set<<<1, 1, 0, stream>>>(small, i + 2);
        RETURNS(cudaSuccess, cudaMemcpyAsync(seen + 2 * i, large, sizeof(int), cudaMemcpyDeviceToHost, stream));
        RETURNS(cudaSuccess, cudaMemcpyAsync(seen + 2 * i + 1, large + words - 1, sizeof(int), cudaMemcpyDeviceToHost, stream));
        RETURNS(cudaSuccess, cudaFreeAsync(large, stream));
        RETURNS(cudaSuccess, cudaFreeAsync(small, stream));
    }
    go = true;
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    int wrong = 0;
    for (int i = 0; i < ROUNDS; i++) wrong += seen[2 * i] != i || seen[2 * i + 1] != i + 1;
    IS(0, wrong);
    RETURNS(cudaSuccess, cudaFreeHost(seen));
}

static void errors(cudaStream_t stream) {
    int *p;
    RETURNS(cudaErrorInvalidValue, cudaMallocAsync((void **)nullptr, 16, stream));
    RETURNS(cudaErrorMemoryAllocation, cudaMallocAsync((void **)&p, (size_t)1 << 50, stream));
    RETURNS(cudaSuccess, cudaMallocAsync(&p, 64, stream));
    // An ordinary free takes it as well.
    RETURNS(cudaSuccess, cudaFree(p));
    RETURNS(cudaErrorInvalidValue, cudaFreeAsync((void *)0x1234, stream));
    int *plain;
    RETURNS(cudaSuccess, cudaMalloc(&plain, 64));
    // And an ordered one takes ordinary memory.
    RETURNS(cudaSuccess, cudaFreeAsync(plain, stream));
    RETURNS(cudaSuccess, cudaMallocAsync(&p, 0, stream));
    TRUE_THAT(p == nullptr);
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
}

// After a reset, the device's pool gives out memory again. (NVIDIA's driver still counts what was allocated before; rgpu does not.)
static void reset() {
    cudaMemPool_t pool;
    int *p, *freed;
    RETURNS(cudaSuccess, cudaDeviceGetDefaultMemPool(&pool, 0));
    RETURNS(cudaSuccess, cudaMallocAsync(&p, BYTES, cudaStreamPerThread));
    RETURNS(cudaSuccess, cudaMallocAsync(&freed, BYTES, cudaStreamPerThread));
    RETURNS(cudaSuccess, cudaFreeAsync(freed, cudaStreamPerThread));
    TRUE_THAT(attribute(pool, cudaMemPoolAttrUsedMemCurrent) >= BYTES);
    RETURNS(cudaSuccess, cudaDeviceReset());
    RETURNS(cudaSuccess, cudaDeviceGetDefaultMemPool(&pool, 0));
    RETURNS(cudaSuccess, cudaMallocAsync(&p, BYTES, cudaStreamPerThread));
    fill<<<8, 128, 0, cudaStreamPerThread>>>(p, N, 7);
    int last = 0;
    RETURNS(cudaSuccess, cudaMemcpyAsync(&last, p + N - 1, sizeof last, cudaMemcpyDeviceToHost, cudaStreamPerThread));
    RETURNS(cudaSuccess, cudaFreeAsync(p, cudaStreamPerThread));
    RETURNS(cudaSuccess, cudaStreamSynchronize(cudaStreamPerThread));
    IS(7 + N - 1, last);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int supported = 0;
    RETURNS(cudaSuccess, cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
    IS(1, supported);
    cudaStream_t one, two;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaStreamCreate(&two));
    order(one, two);
    behind_the_default_stream(two, one);
    behind_the_default_stream(cudaStreamPerThread, one);
    pools(one);
    again(one);
    errors(two);
    RETURNS(cudaSuccess, cudaStreamDestroy(one));
    RETURNS(cudaSuccess, cudaStreamDestroy(two));
    reset();
    return verdict();
}
