// A program to be killed in the middle of a copy (argument "copy") or of a kernel that never ends ("kernel"). It
// prints RUNNING once it is there. Left alone, it never ends; without an argument it only says that it works.
#define PROGRAM "kill_me"
#include "common.h"

__global__ void endless(volatile int *stop, int *steps) {
    int n = 0;
    while (*stop == 0) n++;
    *steps = n;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const size_t size = options.full ? 256u << 20 : 8u << 20;
    unsigned char *device, *pinned, *pageable = (unsigned char *)malloc(size);
    CHECK(cudaMalloc(&device, size));
    CHECK(cudaMallocHost(&pinned, size));
    memset(pageable, 1, size);
    memset(pinned, 2, size);

    if (options.word == "copy") {
        CHECK(cudaMemcpy(device, pageable, size, cudaMemcpyHostToDevice));
        printf("RUNNING copy\n");
        fflush(stdout);
        for (;;) {
            CHECK(cudaMemcpyAsync(device, pinned, size, cudaMemcpyHostToDevice));
            CHECK(cudaMemcpyAsync(pinned, device, size, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(device, pageable, size, cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(pageable, device, size, cudaMemcpyDeviceToHost));
        }
    }
    if (options.word == "kernel") {
        CHECK(cudaMemset(device, 0, 64));
        CHECK(cudaDeviceSynchronize());
        endless<<<1, 32>>>((volatile int *)device, (int *)(device + 32));
        LAUNCHED();
        printf("RUNNING kernel\n");
        fflush(stdout);
        CHECK(cudaDeviceSynchronize());
        fail("the endless kernel ended");
    }
    REQUIRE(options.word.empty(), "the argument is copy or kernel, not %s", options.word.c_str());
    CHECK(cudaMemset(device, 1, 64));
    endless<<<1, 32>>>((volatile int *)device, (int *)(device + 32));
    LAUNCHED();
    int steps = -1;
    CHECK(cudaMemcpy(&steps, device + 32, sizeof steps, cudaMemcpyDeviceToHost));
    REQUIRE(steps == 0, "the kernel made %d steps", steps);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    free(pageable);
    return pass("ready to be killed (arguments: copy, kernel)");
}
