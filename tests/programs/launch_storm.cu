// Launches in a tight loop (2000, or as many as the argument says), with nothing waited for;
// then a counter that each of them advanced must have come out exactly.
#define PROGRAM "launch_storm"
#include "common.h"

#include <chrono>

__global__ void tick(unsigned *counter) {
    if (threadIdx.x == 0) *counter += 1;
}

__global__ void empty() {}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const unsigned launches = options.number ? (unsigned)options.number : options.full ? 200000 : 2000;
    unsigned *counter, got;
    CHECK(cudaMalloc(&counter, sizeof(unsigned)));
    CHECK(cudaMemset(counter, 0, sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());

    auto start = std::chrono::steady_clock::now();
    for (unsigned i = 0; i < launches; i++) {
        tick<<<1, 1>>>(counter);
        LAUNCHED();
    }
    double issue = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(cudaDeviceSynchronize());
    double total = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(cudaMemcpy(&got, counter, sizeof got, cudaMemcpyDeviceToHost));
    REQUIRE(got == launches, "%u launches advanced the counter to %u", launches, got);

    start = std::chrono::steady_clock::now();
    for (unsigned i = 0; i < launches; i++) empty<<<1, 1>>>();
    LAUNCHED();
    double empty_issue = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(counter));
    return pass("%u launches: %.2f µs each to issue, %.2f µs each to completion; empty ones %.2f µs each to issue", launches,
                issue / launches * 1e6, total / launches * 1e6, empty_issue / launches * 1e6);
}
