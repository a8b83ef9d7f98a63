// What is known of a kernel, printed to be compared; and what can be set for it, among that more dynamic shared memory than
// a block has without asking.
#define PROGRAM "function_attributes"
#include "cases.h"

__constant__ int table[100];

__global__ void plain(int *p) { p[threadIdx.x] = table[threadIdx.x % 100]; }
__global__ void __launch_bounds__(96) local(int *p, int at) {
    volatile int words[50];
    for (int i = 0; i < 50; i++) words[i] = i * at;
    p[threadIdx.x] = words[at % 50];
}
__global__ void tiles(int *p) {
    __shared__ int fixed[300];
    extern __shared__ int rest[];
    for (int i = threadIdx.x; i < 300; i += blockDim.x) fixed[i] = i;
    __syncthreads();
    rest[threadIdx.x] = fixed[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = rest[blockDim.x - 1 - threadIdx.x];
}
__global__ void large(int *p, int words) {
    extern __shared__ int rest[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) rest[i] = i * 3;
    __syncthreads();
    int sum = 0;
    for (int i = threadIdx.x; i < words; i += blockDim.x) sum += rest[words - 1 - i];
    atomicAdd(p, sum);
}

template <class Kernel> static cudaFuncAttributes of(const char *name, Kernel kernel) {
    cudaFuncAttributes a = {};
    RETURNS(cudaSuccess, cudaFuncGetAttributes(&a, kernel));
    printf("%s: shared %zu, constant %zu, local %zu, threads %d, registers %d, ptx %d, binary %d, dynamic %d, carveout %d\n", name, a.sharedSizeBytes,
           a.constSizeBytes, a.localSizeBytes, a.maxThreadsPerBlock, a.numRegs, a.ptxVersion, a.binaryVersion, a.maxDynamicSharedSizeBytes, a.preferredShmemCarveout);
    return a;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaFuncAttributes a = of("plain", plain);
    TRUE_THAT(a.constSizeBytes >= 400 && a.sharedSizeBytes == 0 && a.numRegs > 0 && a.ptxVersion >= 75);
    a = of("local", local);
    TRUE_THAT(a.maxThreadsPerBlock == 96);
    a = of("tiles", tiles);
    TRUE_THAT(a.sharedSizeBytes == 1200);

    int opt_in = 0;
    RETURNS(cudaSuccess, cudaDeviceGetAttribute(&opt_in, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    printf("shared memory at most: %d\n", opt_in);
    int *p, got = 0;
    RETURNS(cudaSuccess, cudaMalloc(&p, 4096));
    int words = 16 << 10;  // 64 KiB
    LAUNCH_LEAVES(cudaErrorInvalidValue, large<<<1, 128, words * 4>>>(p, words));
    RETURNS(cudaSuccess, cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, words * 4));
    a = of("large", large);
    IS(words * 4, a.maxDynamicSharedSizeBytes);
    RETURNS(cudaSuccess, cudaMemset(p, 0, 4));
    LAUNCH_LEAVES(cudaSuccess, large<<<1, 128, words * 4>>>(p, words));
    RETURNS(cudaSuccess, cudaMemcpy(&got, p, 4, cudaMemcpyDeviceToHost));
    IS((int)(3u * (unsigned)words * (unsigned)(words - 1) / 2), got);
    LAUNCH_LEAVES(cudaErrorInvalidValue, large<<<1, 128, words * 4 + 4>>>(p, words));
    RETURNS(cudaErrorInvalidValue, cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in + 4));
    RETURNS(cudaErrorInvalidValue, cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, -1));
    RETURNS(cudaErrorInvalidValue, cudaFuncSetAttribute(tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in - 1000));
    RETURNS(cudaSuccess, cudaFuncSetAttribute(tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in - 1200));
    of("tiles", tiles);
    RETURNS(cudaSuccess, cudaFuncSetAttribute(plain, cudaFuncAttributePreferredSharedMemoryCarveout, 40));
    a = of("plain", plain);
    IS(40, a.preferredShmemCarveout);
    RETURNS(cudaErrorInvalidValue, cudaFuncSetAttribute(plain, cudaFuncAttributePreferredSharedMemoryCarveout, 101));
    RETURNS(cudaErrorInvalidValue, cudaFuncSetAttribute(plain, (cudaFuncAttribute)77, 1));
    LAUNCH_LEAVES(cudaErrorInvalidValue, local<<<1, 97>>>(p, 3));
    LAUNCH_LEAVES(cudaSuccess, local<<<1, 96>>>(p, 3));
    LAUNCH_LEAVES(cudaSuccess, tiles<<<1, 128, 512>>>(p));
    int row[128];
    RETURNS(cudaSuccess, cudaMemcpy(row, p, sizeof row, cudaMemcpyDeviceToHost));
    TRUE_THAT(row[0] == 127 && row[127] == 0);

    const char *name = nullptr;
    RETURNS(cudaSuccess, cudaFuncGetName(&name, (const void *)large));
    TRUE_THAT(name && strstr(name, "large"));
    printf("%s\n", name ? name : "");
    size_t offset = 99, size = 99;
    RETURNS(cudaSuccess, cudaFuncGetParamInfo((const void *)large, 1, &offset, &size));
    TRUE_THAT(offset == 8 && size == 4);
    RETURNS(cudaErrorInvalidValue, cudaFuncGetParamInfo((const void *)large, 2, &offset, &size));
    return verdict();
}
