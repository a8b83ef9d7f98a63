// The second file of the program in multi_a.cu.
#ifndef PROGRAM
#define PROGRAM "multi"
#endif
#include "common.h"
#include "multi.h"

static __device__ int counter = 100;
static __constant__ int step = 500;

static __global__ void kernel(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += step;
    if (i == 0) counter -= 1;
}

#ifdef RELOCATABLE
__device__ int shared_table[8];
__device__ int function_of_b(int x) { return x * 3 + 1; }
#endif

void run_b(int *device, int n) {
    kernel<<<8, 128>>>(device, n);
    LAUNCHED();
}

int counter_of_b() {
    int value;
    CHECK(cudaMemcpyFromSymbol(&value, counter, sizeof value));
    return value;
}
