// One stream has much to copy, another a little, enqueued behind it: both arrive whole. With the argument "strict" the little must not have waited for all of the much, which is counted
// in copies, not in time. (A GPU's own copy engine takes copies in their order, so that is asked for only where the copies share a connection.)
#define PROGRAM "fair_streams"
#include "common.h"

#include <vector>

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const bool strict = options.word == "strict";
    const int copies = strict ? 128 : 16, rounds = 5, most_rounds = 60;
    const size_t much = 4 << 20, little = 4096;
    cudaStream_t busy, other;
    CHECK(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    unsigned char *device, *small, *pinned, *pinned_small;
    CHECK(cudaMalloc(&device, much));
    CHECK(cudaMalloc(&small, little));
    CHECK(cudaMallocHost(&pinned, much));
    CHECK(cudaMallocHost(&pinned_small, little));
    std::vector<cudaEvent_t> done(copies);
    for (cudaEvent_t &event : done) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    std::vector<unsigned char> back(much);
    Random random(options.seed);
    int best = copies;
    // A busy machine may keep the program from enqueuing the little, or from seeing that it has come, so more rounds are made until one shows it.
    for (int round = 0; round < rounds || (strict && best > copies / 2 && round < most_rounds); round++) {
        random.fill(pinned, much);
        random.fill(pinned_small, little);
        for (int i = 0; i < copies; i++) {
            CHECK(cudaMemcpyAsync(device, pinned, much, cudaMemcpyHostToDevice, busy));
            CHECK(cudaEventRecord(done[i], busy));
        }
        CHECK(cudaMemcpyAsync(small, pinned_small, little, cudaMemcpyHostToDevice, other));
        CHECK(cudaStreamSynchronize(other));
        int before = 0;
        for (cudaEvent_t event : done) {
            cudaError_t status = cudaEventQuery(event);
            if (status == cudaErrorNotReady) break;
            CHECK(status);
            before++;
        }
        if (before < best) best = before;
        CHECK(cudaStreamSynchronize(busy));
        CHECK(cudaMemcpy(back.data(), device, much, cudaMemcpyDeviceToHost));
        REQUIRE(!memcmp(back.data(), pinned, much), "round %d: the much", round);
        CHECK(cudaMemcpy(back.data(), small, little, cudaMemcpyDeviceToHost));
        REQUIRE(!memcmp(back.data(), pinned_small, little), "round %d: the little", round);
    }
    REQUIRE(!strict || best <= copies / 2, "%d of %d copies came before one that was enqueued behind them on another stream", best, copies);
    return pass("%d rounds", rounds);
}
