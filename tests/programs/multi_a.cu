// A program of two translation units (with multi_b.cu), each with kernels, constants and device variables, some
// under the same names. With -rdc=true, device code of one file also calls into the other.
#ifndef PROGRAM
#define PROGRAM "multi"
#endif
#include "common.h"
#include "multi.h"

#include <vector>

static __device__ int counter = 10;
static __constant__ int step = 3;

static __global__ void kernel(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += step;
    if (i == 0) counter += 1;
}

__global__ void kernel_of_a(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= 2;
}

#ifdef RELOCATABLE
__global__ void kernel_across_files(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = function_of_b(data[i]) + shared_table[i % 8];
}
#endif

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const int n = 1000;
    std::vector<int> input(n), output(n);
    for (int &x : input) x = (int)random.below(100000);
    int *device;
    CHECK(cudaMalloc(&device, n * sizeof(int)));
    CHECK(cudaMemcpy(device, input.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    kernel<<<8, 128>>>(device, n);
    LAUNCHED();
    run_b(device, n);
    kernel_of_a<<<8, 128>>>(device, n);
    LAUNCHED();
#ifdef RELOCATABLE
    int table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    CHECK(cudaMemcpyToSymbol(shared_table, table, sizeof table));
    kernel_across_files<<<8, 128>>>(device, n);
    LAUNCHED();
#endif
    CHECK(cudaMemcpy(output.data(), device, n * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        int want = (input[i] + 3 + 500) * 2;
#ifdef RELOCATABLE
        want = want * 3 + 1 + table[i % 8];
#endif
        REQUIRE(output[i] == want, "element %d is %d, not %d", i, output[i], want);
    }
    int counter_of_a;
    CHECK(cudaMemcpyFromSymbol(&counter_of_a, counter, sizeof(int)));
    REQUIRE(counter_of_a == 11, "the first file's counter is %d, not 11", counter_of_a);
    REQUIRE(counter_of_b() == 99, "the second file's counter is %d, not 99", counter_of_b());
    CHECK(cudaFree(device));
    return pass("two files%s", sizeof(PROGRAM) > 6 ? ", linked on the device" : "");
}
