// Threads retain, use and release the primary context, so that one often releases it last as another retains it.
#define PROGRAM "primary_users"
#include "common.h"

#include <cuda.h>
#include <thread>
#include <vector>

#define DRIVER(call)                                                                                                     \
    do {                                                                                                                 \
        CUresult status_ = (call);                                                                                       \
        if (status_ != CUDA_SUCCESS) fail("%s:%d: %s: %d", __FILE__, __LINE__, #call, (int)status_);                     \
    } while (0)

static void use(unsigned number, int rounds) {
    for (int i = 0; i < rounds; i++) {
        CUcontext context;
        CUdeviceptr memory;
        unsigned values[64];
        DRIVER(cuDevicePrimaryCtxRetain(&context, 0));
        DRIVER(cuCtxSetCurrent(context));
        DRIVER(cuMemAlloc(&memory, 4096));
        DRIVER(cuMemsetD32(memory, number, 1024));
        DRIVER(cuMemcpyDtoH(values, memory + 128, sizeof values));
        for (unsigned value : values) REQUIRE(value == number, "%u instead of %u", value, number);
        DRIVER(cuMemsetD32Async(memory, 1, 1024, nullptr));
        DRIVER(cuCtxSetCurrent(nullptr));
        DRIVER(cuDevicePrimaryCtxRelease(0));
        // Both change who comes first.
        if (i % 3 == (int)number % 3) std::this_thread::yield();
    }
}

int main(int argc, char **argv) {
    const Options options = parse_options(argc, argv);
    const int rounds = options.full ? 50 : 300;
    DRIVER(cuInit(0));
    std::vector<std::thread> threads;
    for (unsigned number = 77; number < 80; number++) threads.emplace_back(use, number, rounds);
    for (std::thread &thread : threads) thread.join();
    unsigned flags;
    int active;
    DRIVER(cuDevicePrimaryCtxGetState(0, &flags, &active));
    REQUIRE(!active, "the context is active without users");
    return pass("%d rounds of 3 threads", rounds);
}
