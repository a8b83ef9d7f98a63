// A program that has used all that a session has (launches, events, copies of all kinds and sizes, a host function) and then does nothing. With the argument "wait" it
// prints IDLE, waits until its standard input is closed, and works again.
#define PROGRAM "idle"
#include "common.h"

#include <unistd.h>

#include <atomic>
#include <vector>

__global__ void add(unsigned *data, unsigned by, size_t count) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < count) data[i] += by;
}

static std::atomic<int> calls;

static void CUDART_CB called(void *) { calls++; }

static void work(unsigned *device, unsigned *pinned, std::vector<unsigned> &pageable, cudaStream_t stream) {
    const size_t count = pageable.size(), bytes = count * sizeof(unsigned);
    cudaEvent_t done;
    CHECK(cudaEventCreate(&done));
    for (size_t i = 0; i < count; i++) pageable[i] = unsigned(i * 7);
    CHECK(cudaMemcpy(device, pageable.data(), bytes, cudaMemcpyHostToDevice));
    add<<<(count + 255) / 256, 256, 0, stream>>>(device, 5, count);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaLaunchHostFunc(stream, called, nullptr));
    CHECK(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream));
    CHECK(cudaEventRecord(done, stream));
    CHECK(cudaEventSynchronize(done));
    CHECK(cudaMemcpy(pageable.data(), device, bytes, cudaMemcpyDeviceToHost));
    unsigned first = 0;
    CHECK(cudaMemcpy(&first, device, sizeof first, cudaMemcpyDeviceToHost));
    REQUIRE(first == 5, "%u at the beginning", first);
    for (size_t i = 0; i < count; i++) REQUIRE(pageable[i] == unsigned(i * 7) + 5, "element %zu is %u", i, pageable[i]);
    CHECK(cudaEventDestroy(done));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const size_t count = 1 << 20;
    unsigned *device, *pinned;
    std::vector<unsigned> pageable(count);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&device, count * sizeof(unsigned)));
    CHECK(cudaMallocHost(&pinned, count * sizeof(unsigned)));
    work(device, pinned, pageable, stream);
    if (options.word == "wait") {
        printf("IDLE\n");
        fflush(stdout);
        char byte;
        while (read(0, &byte, 1) > 0) {}
    }
    work(device, pinned, pageable, stream);
    REQUIRE(calls == 2, "%d host functions were called", calls.load());
    return pass("%zu elements, twice", count);
}
