// The profiler's switches, which a program without a profiler may turn at any time, with work between them; and the clocks of
// kernels and the events' order.
#define PROGRAM "profiler"
#include "cases.h"
#include <cuda.h>

// Their headers are another package's.
extern "C" cudaError_t CUDARTAPI cudaProfilerStart(void);
extern "C" cudaError_t CUDARTAPI cudaProfilerStop(void);
extern "C" CUresult CUDAAPI cuProfilerStart(void);
extern "C" CUresult CUDAAPI cuProfilerStop(void);

__global__ void work(long long *out) {
    long long begin = clock64();
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    int sum = 0;
    for (int i = 0; i < 200; i++) sum += i * (int)(begin & 1);
    long long end = clock64();
    unsigned long long later;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(later));
    out[0] = end >= begin;
    out[1] = later >= time;
    out[2] = sum >= 0;
    out[3] = time > 1000000;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    long long *out, got[4];
    RETURNS(cudaSuccess, cudaMalloc(&out, sizeof got));
    for (int i = 0; i < 3; i++) {
        RETURNS(cudaSuccess, cudaProfilerStart());
        work<<<1, 1>>>(out);
        RETURNS(cudaSuccess, cudaProfilerStop());
        RETURNS(cudaSuccess, cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
        for (long long each : got) IS(1, each);
    }
    IS(CUDA_SUCCESS, cuProfilerStart());
    IS(CUDA_SUCCESS, cuProfilerStart());
    IS(CUDA_SUCCESS, cuProfilerStop());
    IS(CUDA_SUCCESS, cuProfilerStop());
    return verdict();
}
