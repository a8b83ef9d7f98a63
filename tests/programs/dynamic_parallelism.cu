// Kernels that launch kernels: a tree of them, in streams of the device's, tails and fire-and-forget, and their errors.
#define PROGRAM "dynamic_parallelism"
#include "common.h"
#include <vector>

__device__ unsigned launched;

__global__ void leaf(int *p, int value) { p[blockIdx.x * blockDim.x + threadIdx.x] += value; }

__global__ void tree(int *p, int n, int depth) {
    if (threadIdx.x || blockIdx.x) return;
    atomicAdd(&launched, 1);
    if (depth == 0) {
        leaf<<<n / 32, 32, 0, cudaStreamFireAndForget>>>(p, 1);
        return;
    }
    tree<<<1, 1, 0, cudaStreamFireAndForget>>>(p, n / 2, depth - 1);
    tree<<<1, 1, 0, cudaStreamFireAndForget>>>(p + n / 2, n / 2, depth - 1);
}
__global__ void in_turn(int *p, int *order) {
    if (threadIdx.x) return;
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int i = 1; i <= 4; i++) leaf<<<1, 32, 0, stream>>>(p, i);
    cudaStreamDestroy(stream);
    leaf<<<1, 32, 0, cudaStreamTailLaunch>>>(order, 100);
    order[0] = 5;
}
__global__ void wrong(int *p) {
    leaf<<<1, 2000>>>(p, 1);
    *p = (int)cudaGetLastError();
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 4096, depth = 5;
    std::vector<int> host(n);
    int *p;
    CHECK(cudaMalloc(&p, n * 4));
    CHECK(cudaMemset(p, 0, n * 4));
    for (int round = 1; round <= 3; round++) {
        tree<<<1, 32>>>(p, n, depth);
        LAUNCHED();
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(host.data(), p, n * 4, cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; i++) REQUIRE(host[i] == round, "after %d trees element %d is %d", round, i, host[i]);
        unsigned count;
        CHECK(cudaMemcpyFromSymbol(&count, launched, 4));
        REQUIRE(count == round * ((2u << depth) - 1), "%u nodes", count);
    }
    CHECK(cudaMemset(p, 0, n * 4));
    in_turn<<<1, 32>>>(p, p + 64);
    CHECK(cudaMemcpy(host.data(), p, 96 * 4, cudaMemcpyDeviceToHost));
    REQUIRE(host[0] == 10 && host[31] == 10 && host[64] == 105 && host[65] == 100, "%d %d %d %d", host[0], host[31], host[64], host[65]);
    wrong<<<1, 1>>>(p);
    CHECK(cudaMemcpy(host.data(), p, 4, cudaMemcpyDeviceToHost));
    printf("2000 threads from a kernel: %d\n", host[0]);
    REQUIRE(host[0] != 0, "a launch of 2000 threads was accepted");
    return pass("trees of depth %d, a stream in turn, a tail", depth);
}
