// The limits of a device: read, set, rounded as the device likes, refused; and the cache and shared memory settings.
#define PROGRAM "device_limits"
#include "cases.h"

__global__ void recurse(int *to, int depth) {
    struct Walk {
        static __device__ __noinline__ int down(int depth) {
            volatile int weight[64];
            for (int i = 0; i < 64; i++) weight[i] = depth + i;
            return depth == 0 ? weight[1] : weight[63] + down(depth - 1);
        }
    };
    *to = Walk::down(depth);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    size_t value = 0;
    struct { const char *name; cudaLimit limit; size_t set; } limits[] = {
        {"stack", cudaLimitStackSize, 16 << 10},
        {"printf", cudaLimitPrintfFifoSize, 2 << 20},
        {"heap", cudaLimitMallocHeapSize, 16 << 20},
        {"granularity", cudaLimitMaxL2FetchGranularity, 64},
    };
    for (auto &limit : limits) {
        RETURNS(cudaSuccess, cudaDeviceGetLimit(&value, limit.limit));
        printf("%s: %zu", limit.name, value);
        RETURNS(cudaSuccess, cudaDeviceSetLimit(limit.limit, limit.set));
        RETURNS(cudaSuccess, cudaDeviceGetLimit(&value, limit.limit));
        TRUE_THAT(value >= limit.set);
        printf(", set to %zu: %zu\n", limit.set, value);
    }
    RETURNS(cudaErrorInvalidValue, cudaDeviceGetLimit(&value, (cudaLimit)0x77));
    RETURNS(cudaErrorInvalidValue, cudaDeviceSetLimit((cudaLimit)0x77, 1));
    RETURNS(cudaErrorInvalidValue, cudaDeviceGetLimit(nullptr, cudaLimitStackSize));

    // What the larger stack is for: 100 frames of more than 256 bytes.
    int *to, got = 0, want = 1;
    for (int depth = 1; depth <= 40; depth++) want += depth + 63;
    RETURNS(cudaSuccess, cudaMalloc(&to, sizeof *to));
    recurse<<<1, 1>>>(to, 40);
    RETURNS(cudaSuccess, cudaMemcpy(&got, to, sizeof got, cudaMemcpyDeviceToHost));
    IS(want, got);
    // The heap is fixed once a kernel that uses it has run, not before.
    RETURNS(cudaSuccess, cudaDeviceSetLimit(cudaLimitStackSize, 2048));
    RETURNS(cudaSuccess, cudaDeviceGetLimit(&value, cudaLimitStackSize));
    IS(2048, value);

    cudaFuncCache cache;
    RETURNS(cudaSuccess, cudaDeviceGetCacheConfig(&cache));
    printf("cache: %d", (int)cache);
    RETURNS(cudaSuccess, cudaDeviceSetCacheConfig(cudaFuncCachePreferShared));
    RETURNS(cudaSuccess, cudaDeviceGetCacheConfig(&cache));
    printf(", %d", (int)cache);
    RETURNS(cudaSuccess, cudaFuncSetCacheConfig(recurse, cudaFuncCachePreferL1));
    cudaSharedMemConfig config;
    RETURNS(cudaSuccess, cudaDeviceGetSharedMemConfig(&config));
    printf("; shared memory banks: %d", (int)config);
    RETURNS(cudaSuccess, cudaDeviceSetSharedMemConfig(cudaSharedMemBankSizeEightByte));
    RETURNS(cudaSuccess, cudaDeviceGetSharedMemConfig(&config));
    printf(", %d\n", (int)config);

    unsigned flags = 99;
    RETURNS(cudaSuccess, cudaGetDeviceFlags(&flags));
    printf("flags: %u", flags);
    RETURNS(cudaSuccess, cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
    RETURNS(cudaSuccess, cudaGetDeviceFlags(&flags));
    printf(", %u\n", flags);
    RETURNS(cudaErrorInvalidValue, cudaSetDeviceFlags(0x4000));
    int least = 1, greatest = 1;
    RETURNS(cudaSuccess, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    TRUE_THAT(least == 0 && greatest <= 0);
    RETURNS(cudaSuccess, cudaFree(to));
    return verdict();
}
