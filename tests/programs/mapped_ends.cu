// Pinned memory of which kernels write words, while the program looks at the same pages and writes others: whichever way it learns that a kernel has ended, it then sees all that the kernel has written, and the next
// kernel sees all that the program has written. Kernels of another stream go on meanwhile.
#define PROGRAM "mapped_ends"
#include "common.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <random>
#include <vector>

const int PAGES = 24, WORDS = 512, MOST = 12;

// Words of 8 bytes: what a kernel writes, one after the other, and what it checks before.
struct Work {
    int writes, checks;
    int at[MOST], looks[MOST];
    unsigned long long value[MOST], expected[MOST];
    int pause;
};

__device__ void rest(int cycles) {
    for (long long begun = clock64(); clock64() - begun < cycles;) {
    }
}

__global__ void go(volatile unsigned long long *words, Work work, unsigned *wrong) {
    for (int i = 0; i < work.checks; i++)
        if (words[work.looks[i]] != work.expected[i]) atomicAdd(wrong, 1);
    for (int i = 0; i < work.writes; i++) {
        rest(work.pause);
        words[work.at[i]] = work.value[i];
    }
}

// Writes a word of its own again and again.
__global__ void beside(volatile unsigned long long *word, int times, int pause) {
    for (int i = 0; i < times; i++) {
        rest(pause);
        *word += 1;
    }
}

struct Memory {
    volatile unsigned long long *words;
    std::vector<unsigned long long> expected = std::vector<unsigned long long>(PAGES * WORDS);
    Memory() {
        unsigned long long *memory;
        CHECK(cudaHostAlloc(&memory, PAGES * WORDS * sizeof *memory, cudaHostAllocMapped));
        memset(memory, 0, PAGES * WORDS * sizeof *memory);
        words = memory;
    }
};

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int rounds = options.number ? (int)options.number : options.full ? 20000 : 300;
    Random random(options.seed);
    auto below = [&](int n) { return (int)random.below(n); };
    Memory memories[2];
    unsigned long long *counter;
    unsigned *wrong, *found;
    CHECK(cudaHostAlloc(&counter, 4096, cudaHostAllocMapped));
    *counter = 0;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaHostAlloc(&found, sizeof *found, cudaHostAllocDefault));
    cudaStream_t stream, other;
    cudaEvent_t event;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    unsigned long long steps = 0;
    // Mostly the same pages, as programs have them, and sometimes any.
    int hot[4] = {1, 7, 8, 20};
    for (int round = 0; round < rounds; round++) {
        Memory &memory = memories[below(4) == 0];
        if (below(40) == 0) hot[below(4)] = below(PAGES);
        auto word = [&](int owner) {
            int page = below(5) ? hot[below(4)] : below(PAGES);
            // Even words are the kernels', odd ones the program's.
            return page * WORDS + 2 * below(WORDS / 2) + owner;
        };
        if (below(3) == 0) {
            beside<<<1, 1, 0, other>>>(counter, 1 + below(8), 1000);
            CHECK(cudaGetLastError());
        }
        Work work = {};
        for (int n = below(4); n--;) {
            int at = word(1);
            memory.words[at] = memory.expected[at] = random.next();
        }
        work.checks = below(MOST);
        for (int i = 0; i < work.checks; i++) {
            work.looks[i] = word(below(2));
            work.expected[i] = memory.expected[work.looks[i]];
        }
        work.writes = below(MOST + 1);
        work.pause = below(2) ? 0 : below(20000);
        for (int i = 0; i < work.writes; i++) {
            work.at[i] = word(0);
            memory.expected[work.at[i]] = work.value[i] = random.next();
        }
        go<<<1, 1, 0, stream>>>((unsigned long long *)memory.words, work, wrong);
        CHECK(cudaGetLastError());
        const int way = below(7);
        CHECK(cudaEventRecord(event, stream));
        // Meanwhile it looks and writes.
        for (int n = below(6); n--;) {
            volatile unsigned long long *at = &memory.words[word(0)];
            (void)*at;
            if (below(3) == 0) {
                int mine = word(1);
                // The kernel may still be about to check it.
                if (std::find(work.looks, work.looks + work.checks, mine) != work.looks + work.checks) continue;
                memory.words[mine] = memory.expected[mine] = random.next();
            }
        }
        switch (way) {
        case 0: CHECK(cudaStreamSynchronize(stream)); break;
        case 1: CHECK(cudaEventSynchronize(event)); break;
        case 2:
            while (cudaEventQuery(event) == cudaErrorNotReady) {
            }
            cudaGetLastError();
            break;
        case 3:
            while (cudaStreamQuery(stream) == cudaErrorNotReady) {
            }
            cudaGetLastError();
            break;
        case 4: CHECK(cudaDeviceSynchronize()); break;
        case 5:
            CHECK(cudaMemcpyAsync(found, wrong, sizeof *found, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            break;
        default: {
            unsigned now = 0;
            CHECK(cudaStreamWaitEvent(cudaStreamPerThread, event, 0));
            CHECK(cudaMemcpyAsync(&now, wrong, sizeof now, cudaMemcpyDeviceToHost, cudaStreamPerThread));
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        }
        }
        // What it has just written, in any order, and then anything.
        std::vector<int> looks(work.at, work.at + work.writes);
        std::shuffle(looks.begin(), looks.end(), std::minstd_rand((unsigned)random.next()));
        for (int n = below(10); n--;) looks.push_back(word(below(2)));
        for (int at : looks) {
            unsigned long long is = memory.words[at];
            if (is != memory.expected[at]) fail("round %d, way %d: word %d of page %d is %llx instead of %llx", round, way, at % WORDS, at / WORDS, is, memory.expected[at]);
        }
        steps += work.writes;
    }
    CHECK(cudaDeviceSynchronize());
    for (Memory &memory : memories) {
        for (int at = 0; at < PAGES * WORDS; at++)
            if (memory.words[at] != memory.expected[at]) fail("in the end, word %d is %llx instead of %llx", at, memory.words[at], memory.expected[at]);
    }
    CHECK(cudaMemcpy(found, wrong, sizeof *found, cudaMemcpyDeviceToHost));
    if (*found) fail("kernels saw %u words of before", *found);
    return pass("%d rounds, %llu words", rounds, steps);
}
