// Pinned memory that a running kernel writes, word after word in several pages: the program sees the words in this order, whichever pages it looks at first, while its pages are taken away again and again.
#define PROGRAM "mapped_words"
#include "common.h"

#include <algorithm>
#include <random>

// Two of the pages are neighbors.
static const int WORDS = 9;
__host__ __device__ int place(int i) { return (i < 2 ? i : 2 * i) * 1024 + i; }

// Counts in all words, from the first to the last, until it is told to stop.
__global__ void count(volatile int *words, const volatile int *stop) {
    for (int round = 1; !*stop; round++) {
        for (int i = 0; i < WORDS; i++) {
            words[place(i)] = round;
            __threadfence_system();
        }
    }
}

__global__ void nothing() {}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int steps = options.number ? options.number : 150;
    std::mt19937 random(options.seed);
    volatile int *words, *stop;
    CHECK(cudaHostAlloc((void **)&words, place(WORDS) * sizeof(int), cudaHostAllocMapped));
    CHECK(cudaHostAlloc((void **)&stop, 4096, cudaHostAllocMapped));
    *stop = 0;
    for (int i = 0; i < WORDS; i++) words[place(i)] = 0;
    cudaStream_t counts, other;
    CHECK(cudaStreamCreateWithFlags(&counts, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    count<<<1, 1, 0, counts>>>((int *)words, (const int *)stop);
    CHECK(cudaGetLastError());
    int order[WORDS], last[WORDS] = {};
    for (int i = 0; i < WORDS; i++) order[i] = i;
    for (int step = 0; step < steps; step++) {
        int begun = words[place(random() % WORDS)];
        // More than once with the same pages, so that some have come without being asked for and have changed.
        for (int turn = 0; turn < 3; turn++) {
            std::shuffle(order, order + WORDS, random);
            int used = step % 3 ? WORDS : 4, found[WORDS];
            for (int n = 0; n < used; n++) {
                int i = order[n];
                found[n] = words[place(i)];
                REQUIRE(found[n] >= last[i] && found[n] >= begun - 1, "step %d: word %d is %d after %d", step, i, found[n], std::max(last[i], begun));
                last[i] = found[n];
                for (int before = 0; before < n; before++) {
                    int at_least = found[before] - (i > order[before]);
                    REQUIRE(found[n] >= at_least, "step %d: word %d is %d after word %d was %d", step, i, found[n], order[before], found[before]);
                }
            }
        }
        // The program learns that work is done, while the other kernel runs.
        if (step % 2 == 0) {
            nothing<<<1, 1, 0, other>>>();
            CHECK(cudaGetLastError());
        }
        CHECK(cudaStreamSynchronize(other));
    }
    *stop = 1;
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < WORDS; i++) REQUIRE(words[place(i)] == words[place(0)], "in the end, word %d is %d and the first %d", i, words[place(i)], words[place(0)]);
    CHECK(cudaFreeHost((void *)words));
    CHECK(cudaFreeHost((void *)stop));
    return pass("%d steps", steps);
}
