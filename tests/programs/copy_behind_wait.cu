// A copy behind a wait in the default stream does not hold up the stream that ends the wait.
#define PROGRAM "copy_behind_wait"
#include "driver.h"

#include <thread>
#include <unistd.h>

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaFree(nullptr));
    CUcontext context;
    CUstream ends;
    CUdeviceptr word, value;
    int got = 0;
    DRIVER(cuCtxGetCurrent(&context));
    DRIVER(cuStreamCreate(&ends, CU_STREAM_NON_BLOCKING));
    DRIVER(cuMemAlloc(&word, 4));
    DRIVER(cuMemAlloc(&value, 4));
    DRIVER(cuMemsetD32(word, 0, 1));
    DRIVER(cuCtxSynchronize());
    DRIVER(cuStreamWaitValue32(CU_STREAM_LEGACY, word, 5, CU_STREAM_WAIT_VALUE_EQ));
    std::thread copier([&] {
        int seven = 7;
        DRIVER(cuCtxSetCurrent(context));
        DRIVER(cuMemcpyHtoD(value, &seven, 4));
    });
    // Long enough for the call to begin, so that there is something to find.
    usleep(100000);
    DRIVER(cuStreamWriteValue32(ends, word, 5, 0));
    DRIVER(cuStreamSynchronize(ends));
    copier.join();
    DRIVER(cuMemcpyDtoH(&got, value, 4));
    REQUIRE(got == 7, "the copy behind the wait was not made");
    return pass("%d", got);
}
