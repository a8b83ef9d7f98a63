// Copies a model to the device as a framework does, tensor by tensor from pageable memory and one large piece from pinned memory, and checks what arrives. Its bytes are the same in every run, unless
// --seed says otherwise: a server with a cache need not be sent them again. --mib sets the size of the large piece, --unchecked leaves the check out.
#define PROGRAM "model_upload"
#include "common.h"

#include <vector>

static void fill(unsigned *words, size_t count, unsigned seed) {
    unsigned x = seed * 2654435761u + 1;
    for (size_t i = 0; i < count; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        words[i] = x;
    }
}

static void check(const unsigned *device, size_t count, unsigned seed) {
    std::vector<unsigned> want(count), got(count);
    fill(want.data(), count, seed);
    CHECK(cudaMemcpy(got.data(), device, 4 * count, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) REQUIRE(got[i] == want[i], "tensor %u, word %zu: %#x, not %#x", seed, i, got[i], want[i]);
}

int main(int argc, char **argv) {
    unsigned seed = 1;
    size_t large = (9 << 18) + 12345;
    const bool checks = strcmp(argv[argc - 1], "--unchecked") != 0;
    for (int i = 1; i + 1 < argc; i++) {
        if (!strcmp(argv[i], "--seed")) seed = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--mib")) large = (size_t)atoi(argv[i + 1]) << 18;
    }
    const int tensors = 12;
    const size_t count = 400 << 10;
    std::vector<unsigned *> device(tensors);
    std::vector<unsigned> host(count);
    for (int i = 0; i < tensors; i++) {
        CHECK(cudaMalloc(&device[i], 4 * count));
        fill(host.data(), count, 1000 * seed + i);
        CHECK(cudaMemcpyAsync(device[i], host.data(), 4 * count, cudaMemcpyHostToDevice));
        CHECK(cudaStreamSynchronize(0));
    }
    unsigned *pinned, *whole;
    CHECK(cudaMallocHost(&pinned, 4 * large));
    CHECK(cudaMalloc(&whole, 4 * large));
    fill(pinned, large, 1000 * seed + 999);
    CHECK(cudaMemcpy(whole, pinned, 4 * large, cudaMemcpyHostToDevice));
    if (checks) {
        for (int i = 0; i < tensors; i++) check(device[i], count, 1000 * seed + i);
        check(whole, large, 1000 * seed + 999);
    }
    return pass("%d tensors and %zu bytes", tensors, 4 * large);
}
