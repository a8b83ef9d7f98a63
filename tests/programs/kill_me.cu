// A program to be killed in the middle of a copy (argument "copy"), of a kernel that never ends ("kernel"), or of a call for which a driver may wait until such a kernel
// ("call") or a host function that never returns ("callback") has ended, or of a launch that waits because too much is queued behind such a function ("queue"). It prints
// RUNNING once it is there. Left alone, it never ends; without an argument it only says that it works.
#define PROGRAM "kill_me"
#include "common.h"

#include <unistd.h>

#include <atomic>
#include <thread>

struct Long {
    unsigned words[1000];
};

static void CUDART_CB never_returns(void *) {
    for (;;) pause();
}

__global__ void endless(volatile int *stop, int *steps) {
    int n = 0;
    while (*stop == 0) n++;
    *steps = n;
}

__global__ void add(Long numbers, unsigned *sum) { *sum += numbers.words[999]; }

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
    if (options.word == "call" || options.word == "callback") {
        CHECK(cudaMemset(device, 0, 64));
        CHECK(cudaDeviceSynchronize());
        if (options.word == "call") {
            endless<<<1, 32>>>((volatile int *)device, (int *)(device + 32));
            LAUNCHED();
        } else {
            CHECK(cudaLaunchHostFunc(nullptr, never_returns, nullptr));
        }
        printf("RUNNING call\n");
        fflush(stdout);
        // More than fit a short queue; and memory has to be made.
        for (int i = 0; i < 100; i++) CHECK(cudaMemsetAsync(device, i, 64));
        CHECK(cudaMalloc(&pinned, 1 << 30));
        for (;;) pause();
    }
    if (options.word == "queue") {
        Long numbers = {};
        add<<<1, 1>>>(numbers, (unsigned *)device);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaLaunchHostFunc(nullptr, never_returns, nullptr));
        std::atomic<unsigned> queued(0);
        std::thread([&] {
            for (unsigned seen = 1, same = 0; same < 50; usleep(10000)) {
                same = seen == queued ? same + 1 : 0;
                seen = queued;
            }
            printf("RUNNING queue\n");
            fflush(stdout);
        }).detach();
        for (;; queued++) {
            add<<<1, 1>>>(numbers, (unsigned *)device);
            LAUNCHED();
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
    REQUIRE(options.word.empty(), "the argument is copy, kernel, call, callback or queue, not %s", options.word.c_str());
    CHECK(cudaMemset(device, 1, 64));
    endless<<<1, 32>>>((volatile int *)device, (int *)(device + 32));
    LAUNCHED();
    int steps = -1;
    CHECK(cudaMemcpy(&steps, device + 32, sizeof steps, cudaMemcpyDeviceToHost));
    REQUIRE(steps == 0, "the kernel made %d steps", steps);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    free(pageable);
    return pass("ready to be killed (arguments: copy, kernel, call, callback, queue)");
}
