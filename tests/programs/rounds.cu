// Copies page-locked and pageable memory both ways, with a kernel in between, and checks every byte: so many rounds (argument), or until SIGTERM ("until"). It allocates before its first
// round only, and prints ROUND and a number after each. For tests that interrupt it at any moment.
#define PROGRAM "rounds"
#include "common.h"

#include <signal.h>

static volatile sig_atomic_t told_to_end = 0;

__global__ void scramble(unsigned char *bytes, int count, unsigned round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) bytes[i] = bytes[i] * 3 + (unsigned char)(i ^ round);
}

static void expect(const unsigned char *got, const unsigned char *sent, size_t size, int scrambled, unsigned round) {
    for (size_t i = 0; i < size; i++) {
        unsigned char want = sent[i];
        if ((int)i < scrambled) want = want * 3 + (unsigned char)(i ^ round);
        if (got[i] != want) fail("round %u: byte %zu of %zu is %u, not %u", round, i, size, got[i], want);
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const bool endless = options.word == "until";
    REQUIRE(endless || options.word.empty() || options.number > 0, "the argument is until or a number, not %s", options.word.c_str());
    const unsigned rounds = options.number > 0 ? (unsigned)options.number : 3;
    const size_t largest = options.full ? 64u << 20 : 1u << 20, sizes[] = {1, 4000, 70001, largest, 300000};
    const int most = 2048;
    signal(SIGTERM, [](int) { told_to_end = 1; });
    unsigned char *device, *pinned, *back, *pageable = (unsigned char *)malloc(largest), *returned = (unsigned char *)malloc(largest);
    CHECK(cudaMalloc(&device, largest));
    CHECK(cudaMallocHost(&pinned, largest));
    CHECK(cudaMallocHost(&back, largest));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    Random random(options.seed);
    unsigned round = 0;
    while (endless ? !told_to_end : round < rounds) {
        const size_t size = sizes[round % 5];
        const int scrambled = size < (size_t)most ? (int)size : most;
        random.fill(pinned, size);
        memset(back, 0, size);
        CHECK(cudaMemcpyAsync(device, pinned, size, cudaMemcpyHostToDevice, stream));
        scramble<<<(most + 255) / 256, 256, 0, stream>>>(device, scrambled, round);
        LAUNCHED();
        CHECK(cudaMemcpyAsync(back, device, size, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        expect(back, pinned, size, scrambled, round);
        random.fill(pageable, size);
        memset(returned, 0, size);
        CHECK(cudaMemcpy(device, pageable, size, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(returned, device, size, cudaMemcpyDeviceToHost));
        expect(returned, pageable, size, 0, round);
        printf("ROUND %u\n", ++round);
        fflush(stdout);
    }
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(back));
    CHECK(cudaFree(device));
    free(pageable);
    free(returned);
    return pass("%u rounds", round);
}
