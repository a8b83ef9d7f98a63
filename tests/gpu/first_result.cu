// One small program: it allocates, copies in, launches, copies out, and prints the seconds from its start to its first result.
//
//   first_result [HOLD [reset]]    keeps its session for HOLD seconds afterwards; then `reset` resets the device and prints how long that took
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

__global__ void twice(float *x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 2; }

static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    printf("FAILED %s: %s (%d)\n", what, cudaGetErrorString(error), (int)error);
    exit(1);
}
#define CHECK(call) check(call, #call)

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv) {
    const double begin = now();
    const int count = 1 << 16;
    std::vector<float> host(count);
    for (int i = 0; i < count; i++) host[i] = i;
    float *device;
    CHECK(cudaMalloc(&device, count * sizeof *device));
    CHECK(cudaMemcpy(device, host.data(), count * sizeof *device, cudaMemcpyHostToDevice));
    twice<<<count / 256, 256>>>(device);
    CHECK(cudaMemcpy(host.data(), device, count * sizeof *device, cudaMemcpyDeviceToHost));
    const double seconds = now() - begin;
    for (int i = 0; i < count; i++)
        if (host[i] != 2.0f * i) return printf("FAILED element %d is %f\n", i, host[i]), 1;
    printf("FIRST %.4f\n", seconds);
    fflush(stdout);
    if (argc > 1) std::this_thread::sleep_for(std::chrono::duration<double>(atof(argv[1])));
    if (argc > 2) {
        const double reset = now();
        CHECK(cudaDeviceReset());
        printf("RESET %.4f\n", now() - reset);
    }
}
