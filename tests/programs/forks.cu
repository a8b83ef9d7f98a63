// Children of a process: made before it uses the GPU, a child uses it by itself; made afterwards, it is told that it cannot, and the parent goes on.
#define PROGRAM "forks"
#include "common.h"
#include <sys/wait.h>
#include <unistd.h>

__global__ void twice(int *p) { p[threadIdx.x] *= 2; }

static int compute(int start) {
    int host[32], *device;
    for (int i = 0; i < 32; i++) host[i] = start + i;
    CHECK(cudaMalloc(&device, sizeof host));
    CHECK(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice));
    twice<<<1, 32>>>(device);
    CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device));
    return host[31];
}

// What a library asks to see whether there is a GPU (how many there are is known), and what it would do with one.
static void told_no(int *device, cudaStream_t stream, cudaEvent_t event) {
    int value = -7;
    size_t free = 0, total = 0;
    void *p = nullptr;
    // What the devices are is known as well.
    cudaDeviceProp properties;
    memset(&properties, 0, sizeof properties);
    cudaError_t asked = cudaGetDeviceProperties(&properties, 0);
    printf("properties: %d, warps of %d, another's: %d\n", asked, properties.warpSize, cudaGetDeviceProperties(&properties, 1000));
    cudaGetLastError();
    cudaError_t answers[] = {
        cudaGetDeviceCount(&value),
        cudaGetDevice(&value),
        cudaSetDevice(0),
        cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0),
        cudaMemGetInfo(&free, &total),
        cudaMalloc(&p, 16),
        cudaMallocHost(&p, 16),
        cudaMemset(device, 0, 16),
        cudaStreamQuery(stream),
        cudaStreamSynchronize(stream),
        cudaEventRecord(event, stream),
        cudaDeviceSynchronize(),
        cudaFree(device),
        cudaPeekAtLastError(),
        cudaGetLastError(),
        cudaGetLastError(),
    };
    twice<<<1, 32>>>(device);
    printf("told:");
    for (cudaError_t answer : answers) printf(" %d", answer);
    printf(" %d\n", cudaGetLastError());
}

static void wait_for(pid_t child, const char *what) {
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s ended with %x", what, status);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    pid_t child = fork();
    if (child == 0) {
        int answer = compute(100);
        // Everything that is called at exit is called.
        exit(answer == 262 ? 0 : 1);
    }
    REQUIRE(compute(0) == 62, "the parent");
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    wait_for(child, "the first child");

    int *device;
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaMalloc(&device, 4096));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    for (int round = 0; round < 2; round++) {
        CHECK(cudaMemsetAsync(device, 1, 4096, stream));
        fflush(stdout);
        child = fork();
        if (child == 0) {
            told_no(device, stream, event);
            exit(0);
        }
        REQUIRE(compute(round) == 2 * (31 + round), "the parent while a child ends");
        wait_for(child, "a later child");
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(compute(round) == 2 * (31 + round), "the parent after a child");
    }
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return pass("a child before, children afterwards");
}
