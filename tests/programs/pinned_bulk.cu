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
    const size_t words = (options.full ? size_t(64) << 20 : size_t(2) << 20) / 4 + 1021;
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
    // Ranges that begin and end anywhere. Whole pieces are compared at once: this also runs in machines that are emulated twice.
    std::vector<uint32_t> due(words);
    for (size_t i = 0; i < words; i++) due[i] = ~word(options.seed + 32, i);
    const unsigned char *const inside = reinterpret_cast<unsigned char *>(due.data());
    const std::vector<unsigned char> zeros(bytes);
    const size_t offsets[] = {1, 4095, 65537, 524289};
    unsigned char *const at = reinterpret_cast<unsigned char *>(host[0]);
    for (size_t offset : offsets) {
        const size_t len = bytes - 2 * offset - 3;
        memset(at, 0, bytes);
        CHECK(cudaMemcpy(at + offset, reinterpret_cast<unsigned char *>(device[0]) + offset, len, cudaMemcpyDeviceToHost));
        REQUIRE(!memcmp(at, zeros.data(), offset), "%zu bytes from %zu: there is something before them", len, offset);
        REQUIRE(!memcmp(at + offset, inside + offset, len), "%zu bytes from %zu are wrong", len, offset);
        REQUIRE(!memcmp(at + offset + len, zeros.data(), bytes - offset - len), "%zu bytes from %zu: there is something behind them", len, offset);
    }
    // Rows with a gap between them, on both sides.
    const size_t width = 1000, pitch = 1536, height = 700;
    for (size_t i = 0; i < pitch * height / 4; i++) host[0][i] = word(options.seed + 99, i);
    CHECK(cudaMemcpy2D(device[1], 2048, at, pitch, width, height, cudaMemcpyHostToDevice));
    unsigned char *const back = reinterpret_cast<unsigned char *>(host[1]);
    memset(back, 0, bytes);
    CHECK(cudaMemcpy2D(back, pitch, device[1], 2048, width, height, cudaMemcpyDeviceToHost));
    for (size_t row = 0; row < height; row++) {
        REQUIRE(!memcmp(back + row * pitch, at + row * pitch, width), "row %zu is wrong", row);
        REQUIRE(!memcmp(back + row * pitch + width, zeros.data(), pitch - width), "there is something behind row %zu", row);
    }
    for (int s = 0; s < streams; s++) {
        CHECK(cudaFreeHost(host[s]));
        CHECK(cudaFree(device[s]));
        CHECK(cudaStreamDestroy(stream[s]));
    }
    return pass("%d streams of %zu bytes, odd ranges, rows", streams, bytes);
}
