// Launches as old programs make them: block, shared memory and parameters are set beforehand.
#define PROGRAM "parameter_list"
#include "common.h"
#include <cuda.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

__global__ void fill(int *out, int step, float scale, double offset) {
    extern __shared__ int shared[];
    int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    shared[threadIdx.x] = i * step;
    __syncthreads();
    out[i] = (int)(shared[blockDim.x - 1 - threadIdx.x] * scale + offset);
}

static void require(CUresult result, CUresult wanted, const char *what) {
    REQUIRE(result == wanted, "%s answers %d, not %d", what, result, wanted);
}
#define DRIVER(call) require(call, CUDA_SUCCESS, #call)

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int threads = 64, width = 5, height = 3, n = threads * width * height;
    int *out, host[n];
    CHECK(cudaMalloc(&out, sizeof host));
    cudaFunction_t symbol;
    CHECK(cudaGetFuncBySymbol(&symbol, (const void *)fill));
    CUfunction function = (CUfunction)symbol;
    DRIVER(cuFuncSetBlockShape(function, threads, 1, 1));
    DRIVER(cuFuncSetSharedSize(function, threads * sizeof(int)));
    DRIVER(cuParamSetv(function, 0, &out, sizeof out));
    DRIVER(cuParamSeti(function, 8, 3));
    DRIVER(cuParamSetf(function, 12, 0.5f));
    double offset = 7;
    DRIVER(cuParamSetv(function, 16, &offset, sizeof offset));
    DRIVER(cuParamSetSize(function, 24));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int round = 0; round < 3; round++) {
        int count = round == 0 ? threads : round == 1 ? threads * width : n;
        CHECK(cudaMemset(out, 0, sizeof host));
        CHECK(cudaDeviceSynchronize());
        // What was set stays for the next launch.
        if (round == 0) DRIVER(cuLaunch(function));
        if (round == 1) DRIVER(cuLaunchGrid(function, width, 1));
        if (round == 2) DRIVER(cuLaunchGridAsync(function, width, height, stream));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; i++) {
            int other = i / threads * threads + threads - 1 - i % threads;
            int wanted = i < count ? (int)(other * 3 * 0.5f + 7) : 0;
            REQUIRE(host[i] == wanted, "round %d: element %d is %d", round, i, host[i]);
        }
    }
    require(cuFuncSetBlockShape(function, 0, 1, 1), CUDA_ERROR_INVALID_VALUE, "an empty block");
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(out));
    return pass("one block, a row, a grid on a stream");
}
