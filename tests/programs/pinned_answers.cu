// A kernel and the program answer each other by words of page-locked memory, and find in the order of writing what else the other has written.
#define PROGRAM "pinned_answers"
#include "common.h"
#include <string.h>

// Waits for the program, then answers it.
__global__ void answer(volatile int *asked, volatile int *answered, volatile int *data, long long patience) {
    long long begin = clock64();
    while (*asked == 0 && clock64() - begin < patience) {}
    data[100] = *asked * 3;
    __threadfence_system();
    *answered = *asked == 0 ? -1 : *asked + 1;
}

// Its own words, one after the other, while a kernel of another stream never ends without them.
static void together(int *words) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    volatile int *asked = words, *answered = words + 1;
    for (int round = 1; round <= 5; round++) {
        *asked = *answered = words[100] = 0;
        answer<<<1, 1, 0, stream>>>(asked, answered, words, 200000000000ll);
        CHECK(cudaGetLastError());
        words[200] = round;
        *asked = round;
        while (*answered == 0) {}
        REQUIRE(*answered == round + 1, "round %d: answered %d", round, *answered);
        REQUIRE(words[100] == round * 3, "round %d: what was written before the answer is %d", round, words[100]);
        REQUIRE(words[200] == round, "round %d: a word of the program's own is %d", round, words[200]);
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(words[100] == round * 3 && words[200] == round, "round %d: afterwards %d and %d", round, words[100], words[200]);
    }
    // What was read while the kernel worked is read anew once it is known to be over.
    for (int round = 1; round <= 20; round++) {
        *asked = *answered = words[100] = 0;
        answer<<<1, 1, 0, stream>>>(asked, answered, words, 200000000000ll);
        CHECK(cudaGetLastError());
        *asked = round;
        while (cudaStreamQuery(stream) == cudaErrorNotReady) words[200] += ((volatile int *)words)[300];
        cudaGetLastError();
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(*answered == round + 1 && words[100] == round * 3, "round %d: found %d and %d when it was over", round, *answered, words[100]);
    }
    // The same if the program learns that it is over without looking at the memory meanwhile.
    for (int round = 1; round <= 50; round++) {
        *asked = *answered = words[100] = 0;
        answer<<<1, 1, 0, stream>>>(asked, answered, words, 200000000000ll);
        CHECK(cudaGetLastError());
        REQUIRE(((volatile int *)words)[100] == 0, "round %d: the kernel did not wait", round);
        *asked = round;
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(*answered == round + 1 && words[100] == round * 3, "round %d: found %d and %d after the wait", round, *answered, words[100]);
    }
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *words;
    CHECK(cudaMallocHost(&words, 8192));
    memset(words, 0, 8192);
    together(words);
    CHECK(cudaFreeHost(words));
    return pass("words of both, one after the other");
}
