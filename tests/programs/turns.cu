// Makes turns: 4 KiB up, a kernel, 4 KiB down, and every word checked.
//
//   turns            makes three
//   turns SECONDS    makes turns until so many seconds after its first result, and prints the seconds from its first CUDA call to
//                    that (FIRST)
//   turns wait       makes one, prints FIRST, reads a number from standard input, and makes so many more
//   turns reset      makes three, and prints the seconds that a reset of the device takes (RESET)
#define PROGRAM "turns"
#include "common.h"

#include <chrono>

static const int words = 1024;

__global__ void scramble(uint32_t *x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = x[i] * 3 + i;
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One turn with data of its own.
static void turn(uint32_t *device, uint32_t number) {
    uint32_t host[words];
    for (int i = 0; i < words; i++) host[i] = number * words + i;
    CHECK(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice));
    scramble<<<words / 256, 256>>>(device);
    LAUNCHED();
    memset(host, 0, sizeof host);
    CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < words; i++) {
        uint32_t want = (number * words + i) * 3 + i;
        REQUIRE(host[i] == want, "turn %u: word %d is %u, not %u", number, i, host[i], want);
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const bool reset = options.word == "reset", wait = options.word == "wait";
    REQUIRE(reset || wait || options.word.empty() || options.number > 0, "the argument is wait, reset or a number of seconds, not %s",
            options.word.c_str());
    const double begin = now();
    uint32_t *device, turns = 0, most = 3;
    CHECK(cudaMalloc(&device, words * sizeof *device));
    turn(device, turns++);
    const double first = now();
    if (wait || options.number > 0) {
        printf("FIRST %.4f\n", first - begin);
        fflush(stdout);
    }
    if (wait) {
        REQUIRE(scanf("%u", &most) == 1, "standard input has no number of turns");
        most += turns;
    }
    while (options.number > 0 ? now() - first < (double)options.number : turns < most) turn(device, turns++);
    CHECK(cudaFree(device));
    if (reset) {
        const double since = now();
        CHECK(cudaDeviceReset());
        printf("RESET %.4f\n", now() - since);
    }
    return pass("%u turns", turns);
}
