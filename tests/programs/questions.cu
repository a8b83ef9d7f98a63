// Questions that programs ask in every step and whose answers the process can know: attributes of a kernel, limits, occupancy, elapsed times. `questions N` asks them N times.
#define PROGRAM "questions"
#include "common.h"

__global__ void turn(float *p) {
    extern __shared__ float s[];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = s[31 - threadIdx.x] + 1;
}

// Needs 16 KiB of stack for each thread: the driver raises the limit when it is launched.
__global__ void deep(int *p, int n) {
    volatile int a[4096];
    for (int i = 0; i < 4096; i++) a[i] = n;
    p[threadIdx.x] = a[(p[threadIdx.x] * 37) & 4095];
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    int count = options.number ? (int)options.number : 16;
    float *data, result[32];
    CHECK(cudaMalloc(&data, sizeof result));
    CHECK(cudaMemset(data, 0, sizeof result));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin));
    turn<<<1, 32, 128>>>(data);
    LAUNCHED();
    CHECK(cudaEventRecord(end));
    CHECK(cudaDeviceSynchronize());
    size_t stack = 0, heap = 0;
    float first = 0;
    int most = 0, fitting[8] = {};
    CHECK(cudaDeviceGetLimit(&stack, cudaLimitStackSize));
    CHECK(cudaDeviceGetLimit(&heap, cudaLimitMallocHeapSize));
    CHECK(cudaEventElapsedTime(&first, begin, end));
    REQUIRE(first >= 0, "%f ms passed", first);
    int device = 0, optin = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    for (int i = 0; i < count; i++) {
        int shared = 1024 + 16 * (i % 8), threads = 32 * (1 + i % 8), blocks = 0;
        CHECK(cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        CHECK(cudaFuncSetAttribute(turn, cudaFuncAttributePreferredSharedMemoryCarveout, i % 8 * 10));
        CHECK(cudaFuncSetCacheConfig(turn, i % 2 ? cudaFuncCachePreferL1 : cudaFuncCachePreferShared));
        cudaFuncAttributes attributes;
        CHECK(cudaFuncGetAttributes(&attributes, turn));
        REQUIRE(attributes.maxDynamicSharedSizeBytes == shared && attributes.preferredShmemCarveout == i % 8 * 10,
                "set %d and %d, got %d and %d", shared, i % 8 * 10, attributes.maxDynamicSharedSizeBytes, attributes.preferredShmemCarveout);
        size_t now = 0;
        CHECK(cudaDeviceGetLimit(&now, cudaLimitStackSize));
        REQUIRE(now == stack, "a stack of %zu bytes, then of %zu", stack, now);
        CHECK(cudaDeviceGetLimit(&now, cudaLimitMallocHeapSize));
        REQUIRE(now == heap, "a heap of %zu bytes, then of %zu", heap, now);
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, turn, threads, 128));
        REQUIRE(blocks > 0 && (i < 8 || blocks == fitting[i % 8]), "%d blocks of %d threads, then %d", fitting[i % 8], threads, blocks);
        fitting[i % 8] = blocks;
        most = blocks > most ? blocks : most;
        size_t available = 0;
        CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&available, turn, 1, threads));
        // The carveout of some of these settings leaves less.
        REQUIRE(available <= (size_t)shared, "%zu bytes of shared memory where %d were allowed", available, shared);
        float again = 0;
        CHECK(cudaEventElapsedTime(&again, begin, end));
        REQUIRE(memcmp(&again, &first, sizeof again) == 0, "%.9g ms, then %.9g", first, again);
        turn<<<1, 32, 128>>>(data);
        LAUNCHED();
    }
    // What the driver refuses is refused at the call, and changes nothing.
    EXPECT(cudaErrorInvalidValue, cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, optin + 1));
    EXPECT(cudaErrorInvalidValue, cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, -1));
    EXPECT(cudaErrorInvalidValue, cudaFuncSetAttribute(turn, cudaFuncAttributePreferredSharedMemoryCarveout, 101));
    EXPECT(cudaErrorInvalidValue, cudaFuncSetAttribute(turn, cudaFuncAttributePreferredSharedMemoryCarveout, -2));
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, turn));
    REQUIRE(attributes.maxDynamicSharedSizeBytes == 1024 + 16 * ((count - 1) % 8), "a refused value was kept");
    turn<<<1, 32, 4096>>>(data);
    EXPECT(cudaErrorInvalidValue, cudaGetLastError());
    CHECK(cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, optin));
    turn<<<1, 32, 4096>>>(data);
    LAUNCHED();
    CHECK(cudaMemcpy(result, data, sizeof result, cudaMemcpyDeviceToHost));
    for (float value : result) REQUIRE(value == count + 2, "%f after %d launches", value, count + 2);
    size_t deeper = 0;
    deep<<<1, 32>>>((int *)data, 7);
    LAUNCHED();
    CHECK(cudaDeviceGetLimit(&deeper, cudaLimitStackSize));
    REQUIRE(deeper >= 16384, "a stack of %zu bytes for a kernel that needs 16384", deeper);
    // A limit that is set is what is told from then on.
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 4096));
    size_t now = 0;
    CHECK(cudaDeviceGetLimit(&now, cudaLimitStackSize));
    REQUIRE(now >= 4096 && now < deeper, "a stack of %zu bytes after 4096 were asked for", now);
    return pass("%d rounds, %d blocks at most", count, most);
}
