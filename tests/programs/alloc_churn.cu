// Allocations and frees of many sizes in random order; every live allocation keeps its own pattern, is aligned, and
// overlaps no other; at the end the device has its memory back.
#define PROGRAM "alloc_churn"
#include "common.h"

#include <algorithm>
#include <map>
#include <vector>

__global__ void fill(unsigned *data, size_t n, unsigned pattern) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) data[i] = pattern ^ (unsigned)i;
}

struct Allocation {
    unsigned *address;
    size_t size;
    unsigned pattern;
};

static void verify(const Allocation &allocation) {
    // The beginning and the end: where a neighbour would have reached in.
    const size_t n = allocation.size / 4, part = std::min<size_t>(n, 64);
    unsigned got[64];
    for (size_t start : {(size_t)0, n - part}) {
        CHECK(cudaMemcpy(got, allocation.address + start, part * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < part; i++) {
            unsigned want = allocation.pattern ^ (unsigned)(start + i);
            REQUIRE(got[i] == want, "word %zu of an allocation of %zu bytes is %08x, not %08x", start + i, allocation.size,
                    got[i], want);
        }
    }
}

static void churn(Random &random, int rounds, int largest_bits) {
    std::vector<Allocation> live;
    std::map<uintptr_t, size_t> ranges;
    for (int round = 0; round < rounds; round++) {
        if (live.size() < 3 || (live.size() < 60 && random.below(100) < 55)) {
            size_t size = ((size_t)1 << (2 + random.below(largest_bits - 2))) + 4 * random.below(50);
            Allocation allocation = {nullptr, size, (unsigned)random.next()};
            CHECK(cudaMalloc(&allocation.address, size));
            uintptr_t start = (uintptr_t)allocation.address;
            REQUIRE(start % 256 == 0, "an allocation of %zu bytes at %p", size, (void *)allocation.address);
            auto after = ranges.lower_bound(start);
            REQUIRE(after == ranges.end() || start + size <= after->first, "allocations overlap");
            REQUIRE(after == ranges.begin() || std::prev(after)->first + std::prev(after)->second <= start, "allocations overlap");
            ranges[start] = size;
            // Large ones would be slow to fill on an emulated GPU by one block; the tail is filled by a copy.
            fill<<<1, 64>>>(allocation.address, std::min<size_t>(size / 4, 2048), allocation.pattern);
            LAUNCHED();
            if (size / 4 > 2048) {
                std::vector<unsigned> tail(64);
                const size_t at = size / 4 - 64;
                for (size_t i = 0; i < 64; i++) tail[i] = allocation.pattern ^ (unsigned)(at + i);
                CHECK(cudaMemcpy(allocation.address + at, tail.data(), 256, cudaMemcpyHostToDevice));
            }
            live.push_back(allocation);
        } else {
            size_t which = random.below((uint32_t)live.size());
            verify(live[which]);
            CHECK(cudaFree(live[which].address));
            ranges.erase((uintptr_t)live[which].address);
            live[which] = live.back();
            live.pop_back();
        }
    }
    for (const Allocation &allocation : live) {
        verify(allocation);
        CHECK(cudaFree(allocation.address));
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const int rounds = options.full ? 5000 : 250;
    const int largest_bits = options.full ? 27 : 16;

    CHECK(cudaFree(nullptr));
    churn(random, rounds, largest_bits);

    // Nothing leaks: what is freed can be had again. Others may take memory of the same device meanwhile, once; a leak takes some each time.
    const size_t slack = (size_t)64 << 20;
    size_t free_before, free_after, total;
    for (int attempt = 0;; attempt++) {
        CHECK(cudaMemGetInfo(&free_before, &total));
        churn(random, rounds, largest_bits);
        CHECK(cudaMemGetInfo(&free_after, &total));
        if (free_after + slack >= free_before) break;
        REQUIRE(attempt < 3, "%zu bytes were free before, %zu after, each time", free_before, free_after);
    }
    for (int i = 0; i < 3; i++) {
        void *half;
        CHECK(cudaMalloc(&half, free_after / 2));
        CHECK(cudaFree(half));
    }
    return pass("%d allocations and frees", rounds);
}
