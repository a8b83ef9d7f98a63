// Copies of page-locked memory in bulk, both ways: whole and odd ranges, in rows, on several streams at once. Nothing here needs a copy by a CPU on the way.
#define PROGRAM "pinned_bulk"
#include "common.h"

#include <vector>

static uint32_t word(uint64_t seed, uint64_t at) {
    uint64_t x = (seed + at) * 0x9e3779b97f4a7c15ull;
    return static_cast<uint32_t>(x >> 32) ^ static_cast<uint32_t>(x);
}

__global__ void invert(uint32_t *data, size_t count) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        data[i] = ~data[i];
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int streams = 3;
    const size_t words = (options.full ? size_t(64) << 20 : size_t(3) << 20) / 4 + 1021;
    const size_t bytes = words * 4;
    std::vector<uint32_t *> host(streams), device(streams);
    std::vector<cudaStream_t> stream(streams);
    for (int s = 0; s < streams; s++) {
        CHECK(cudaStreamCreate(&stream[s]));
        CHECK(cudaHostAlloc(&host[s], bytes, cudaHostAllocDefault));
        CHECK(cudaMalloc(&device[s], bytes));
    }
    for (int round = 0; round < 3; round++) {
        for (int s = 0; s < streams; s++) {
            for (size_t i = 0; i < words; i++) host[s][i] = word(options.seed + s + 16 * round, i);
            CHECK(cudaMemcpyAsync(device[s], host[s], bytes, cudaMemcpyHostToDevice, stream[s]));
            invert<<<64, 128, 0, stream[s]>>>(device[s], words);
            CHECK(cudaGetLastError());
            CHECK(cudaMemcpyAsync(host[s], device[s], bytes, cudaMemcpyDeviceToHost, stream[s]));
        }
        for (int s = 0; s < streams; s++) {
            CHECK(cudaStreamSynchronize(stream[s]));
            for (size_t i = 0; i < words; i++) {
                if (host[s][i] != ~word(options.seed + s + 16 * round, i)) {
                    fail("round %d, stream %d: word %zu is %08x", round, s, i, host[s][i]);
                }
            }
        }
    }
    // Ranges that begin and end anywhere.
    const size_t offsets[] = {1, 4095, 65537, 524289};
    unsigned char *const at = reinterpret_cast<unsigned char *>(host[0]);
    for (size_t offset : offsets) {
        const size_t len = bytes - 2 * offset - 3;
        memset(at, 0, bytes);
        CHECK(cudaMemcpy(at + offset, reinterpret_cast<unsigned char *>(device[0]) + offset, len, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < bytes; i++) {
            const uint32_t inside = ~word(options.seed + 32, i / 4);
            const unsigned char due = i < offset || i >= offset + len ? 0 : inside >> (i % 4 * 8);
            if (at[i] != due) fail("%zu bytes from %zu: byte %zu is %02x", len, offset, i, at[i]);
        }
    }
    // Rows with a gap between them, on both sides.
    const size_t width = 1000, pitch = 1536, height = 700;
    for (size_t i = 0; i < pitch * height; i++) at[i] = static_cast<unsigned char>(word(options.seed + 99, i));
    CHECK(cudaMemcpy2D(device[1], 2048, at, pitch, width, height, cudaMemcpyHostToDevice));
    unsigned char *const back = reinterpret_cast<unsigned char *>(host[1]);
    memset(back, 0, bytes);
    CHECK(cudaMemcpy2D(back, pitch, device[1], 2048, width, height, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < pitch * height; i++) {
        const unsigned char due = i % pitch < width ? static_cast<unsigned char>(word(options.seed + 99, i)) : 0;
        if (back[i] != due) fail("rows: byte %zu is %02x", i, back[i]);
    }
    for (int s = 0; s < streams; s++) {
        CHECK(cudaFreeHost(host[s]));
        CHECK(cudaFree(device[s]));
        CHECK(cudaStreamDestroy(stream[s]));
    }
    return pass("%d streams of %zu bytes, odd ranges, rows", streams, bytes);
}
