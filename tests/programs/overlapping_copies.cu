// Copies of one stream that touch the same bytes, all under way at once: later ones win, on the host and on the device.
//
// A first argument is the number of rounds.
#define PROGRAM "overlapping_copies"
#include "common.h"

#include <algorithm>
#include <vector>

static const int COPIES = 24;

static uint64_t hash(const unsigned char *bytes, size_t size) {
    uint64_t sum = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; i++) sum = (sum ^ bytes[i]) * 0x100000001b3ull;
    return sum;
}

// Memory of the program that copies go to and come from, and what must be in it.
struct Host {
    const char *name;
    unsigned char *bytes;
    std::vector<unsigned char> expected;
};

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const size_t size = options.full ? 32 << 20 : 2 << 20;
    const int rounds = options.number ? (int)options.number : options.full ? 30 : 6;
    Random random(options.seed);

    std::vector<unsigned char> device_bytes(size);
    random.fill(device_bytes.data(), size);
    unsigned char *device, *pinned;
    CHECK(cudaMalloc(&device, size));
    CHECK(cudaMemcpy(device, device_bytes.data(), size, cudaMemcpyHostToDevice));
    CHECK(cudaMallocHost(&pinned, size));
    unsigned char *pageable = (unsigned char *)malloc(size), *registered = (unsigned char *)aligned_alloc(4096, size);
    REQUIRE(pageable && registered, "no memory");
    CHECK(cudaHostRegister(registered, size, cudaHostRegisterDefault));
    std::vector<Host> hosts;
    for (Host host : {Host{"pinned", pinned, {}}, {"pageable", pageable, {}}, {"registered", registered, {}}}) {
        memset(host.bytes, 0, size);
        host.expected.resize(size);
        hosts.push_back(host);
    }
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    for (int round = 0; round < rounds; round++) {
        Host &host = hosts[round % hosts.size()];
        size_t area = std::max<size_t>(size >> random.below(4), 4096);
        for (int copy = 0; copy < COPIES; copy++) {
            size_t length = 1 + random.next() % (area >> random.below(10));
            size_t at = random.next() % (area - length + 1), from = random.next() % (size - length + 1);
            switch (random.below(4)) {
            case 0: { // rows
                size_t width = 1 + random.below(std::min<size_t>(length, 4096)), rows = length / width;
                size_t pitch = width + random.below(64);
                if (at + rows * pitch > size || from + rows * width > size) break;
                CHECK(cudaMemcpy2DAsync(host.bytes + at, pitch, device + from, width, width, rows, cudaMemcpyDeviceToHost, stream));
                for (size_t row = 0; row < rows; row++)
                    memcpy(&host.expected[at + row * pitch], &device_bytes[from + row * width], width);
                break;
            }
            case 1: // back to the device, with what the copies before this one bring
                // Bytes of pageable memory may be read before the stream has written them.
                if (host.bytes == pageable) CHECK(cudaStreamSynchronize(stream));
                CHECK(cudaMemcpyAsync(device + from, host.bytes + at, length, cudaMemcpyHostToDevice, stream));
                memcpy(&device_bytes[from], &host.expected[at], length);
                break;
            default:
                CHECK(cudaMemcpyAsync(host.bytes + at, device + from, length, cudaMemcpyDeviceToHost, stream));
                memcpy(&host.expected[at], &device_bytes[from], length);
            }
        }
        CHECK(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < size; i++)
            REQUIRE(host.bytes[i] == host.expected[i], "round %d, %s memory: byte %zu is %02x instead of %02x", round, host.name, i, host.bytes[i], host.expected[i]);
        printf("round %d, %s: %016llx\n", round, host.name, (unsigned long long)hash(host.bytes, size));
        fflush(stdout);
    }
    std::vector<unsigned char> back(size);
    CHECK(cudaMemcpy(back.data(), device, size, cudaMemcpyDeviceToHost));
    REQUIRE(back == device_bytes, "the device has other bytes");
    return pass("%d rounds", rounds);
}
