// Copies of every kind: pageable and pinned (all three ways of pinning), both directions, synchronous and
// asynchronous, between device buffers, memsets, two-dimensional ones; odd sizes and offsets; random data, and the
// bytes around each target must stay as they were.
#define PROGRAM "copies"
#include "common.h"

#include <sys/mman.h>
#include <vector>

static int copies_made = 0;

enum Memory { PAGEABLE, MALLOC_HOST, HOST_ALLOC, REGISTERED, MEMORY_KINDS };
static const char *const memory_names[] = {"pageable", "cudaMallocHost", "cudaHostAlloc", "cudaHostRegister"};

struct HostBuffer {
    Memory kind;
    size_t size;
    unsigned char *bytes = nullptr;

    HostBuffer(Memory kind, size_t size) : kind(kind), size(size) {
        switch (kind) {
        case PAGEABLE: bytes = (unsigned char *)malloc(size); break;
        case MALLOC_HOST: CHECK(cudaMallocHost((void **)&bytes, size)); break;
        case HOST_ALLOC: CHECK(cudaHostAlloc((void **)&bytes, size, cudaHostAllocPortable)); break;
        default:
            // Registered from an address that is not at the beginning of a page.
            bytes = (unsigned char *)mmap(nullptr, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            REQUIRE(bytes != MAP_FAILED, "mmap of %zu bytes failed", size);
            bytes += 64;
            CHECK(cudaHostRegister(bytes, size, cudaHostRegisterDefault));
        }
        REQUIRE(bytes != nullptr, "no %s memory of %zu bytes", memory_names[kind], size);
    }
    HostBuffer(const HostBuffer &) = delete;
    ~HostBuffer() {
        switch (kind) {
        case PAGEABLE: free(bytes); break;
        case MALLOC_HOST:
        case HOST_ALLOC: CHECK(cudaFreeHost(bytes)); break;
        default:
            CHECK(cudaHostUnregister(bytes));
            munmap(bytes - 64, size + 4096);
        }
    }
};

constexpr size_t MARGIN = 64;  // untouched bytes on either side of every target

static void check_target(const unsigned char *buffer, size_t size, size_t offset, const unsigned char *want, unsigned char around,
                         const char *what) {
    for (size_t i = 0; i < offset + MARGIN; i++)
        REQUIRE(buffer[i] == around, "%s of %zu bytes at offset %zu wrote before its target", what, size, offset);
    if (memcmp(buffer + MARGIN + offset, want, size) != 0) {
        size_t at = 0;
        while (buffer[MARGIN + offset + at] == want[at]) at++;
        fail("%s of %zu bytes at offset %zu: byte %zu is %02x, not %02x", what, size, offset, at,
             buffer[MARGIN + offset + at], want[at]);
    }
    for (size_t i = MARGIN + offset + size; i < MARGIN + offset + size + MARGIN; i++)
        REQUIRE(buffer[i] == around, "%s of %zu bytes at offset %zu wrote after its target", what, size, offset);
    copies_made++;
}

struct Device {
    unsigned char *a = nullptr, *b = nullptr;
    cudaStream_t stream;
};

// Host to device, device to device and device to host for one size, one kind of memory and one pair of offsets.
static void round_trip(Device &device, Memory kind, bool async, size_t size, size_t host_offset, size_t device_offset,
                       Random &random) {
    char what[128];
    const char *how = async ? "cudaMemcpyAsync" : "cudaMemcpy";
    const size_t room = size + 2 * MARGIN + 16;
    HostBuffer source(kind, room), target(kind, room);
    unsigned char *from = source.bytes + MARGIN + host_offset;
    random.fill(from, size);
    memset(target.bytes, 0xa5, room);
    auto copy = [&](void *to, const void *start, size_t length, cudaMemcpyKind direction) {
        if (async) CHECK(cudaMemcpyAsync(to, start, length, direction, device.stream));
        else CHECK(cudaMemcpy(to, start, length, direction));
    };
    auto wait = [&] {
        if (async) CHECK(cudaStreamSynchronize(device.stream));
    };

    // The device's own margins are seen by copying more than the payload back.
    std::vector<unsigned char> whole(room);
    CHECK(cudaMemset(device.a, 0x3c, room));
    CHECK(cudaMemset(device.b, 0xc3, room));
    CHECK(cudaDeviceSynchronize());
    copy(device.a + MARGIN + device_offset, from, size, cudaMemcpyHostToDevice);
    wait();
    CHECK(cudaMemcpy(whole.data(), device.a, room, cudaMemcpyDeviceToHost));
    snprintf(what, sizeof what, "%s from %s memory", how, memory_names[kind]);
    check_target(whole.data(), size, device_offset, from, 0x3c, what);

    copy(device.b + MARGIN + device_offset + 1, device.a + MARGIN + device_offset, size, cudaMemcpyDeviceToDevice);
    wait();
    CHECK(cudaMemcpy(whole.data(), device.b, room, cudaMemcpyDeviceToHost));
    snprintf(what, sizeof what, "%s between device buffers", how);
    check_target(whole.data(), size, device_offset + 1, from, 0xc3, what);

    copy(target.bytes + MARGIN + host_offset, device.b + MARGIN + device_offset + 1, size, cudaMemcpyDeviceToHost);
    wait();
    snprintf(what, sizeof what, "%s to %s memory", how, memory_names[kind]);
    check_target(target.bytes, size, host_offset, from, 0xa5, what);
}

// Many asynchronous copies of one stream in flight at once, no two alike; then all waited for together.
static void in_flight(Device &device, Random &random, size_t room) {
    const int count = 24;
    HostBuffer source(MALLOC_HOST, room), target(REGISTERED, room);
    random.fill(source.bytes, room);
    memset(target.bytes, 0, room);
    const size_t part = room / count;
    for (int i = 0; i < count; i++)
        CHECK(cudaMemcpyAsync(device.a + i * part, source.bytes + i * part, part, cudaMemcpyHostToDevice, device.stream));
    for (int i = count - 1; i >= 0; i--)
        CHECK(cudaMemcpyAsync(target.bytes + i * part, device.a + i * part, part, cudaMemcpyDeviceToHost, device.stream));
    CHECK(cudaStreamSynchronize(device.stream));
    REQUIRE(memcmp(source.bytes, target.bytes, part * count) == 0, "%d copies in flight mixed up their data", count);
    copies_made += 2 * count;
}

// A pageable source may be reused as soon as an asynchronous copy from it has returned.
static void reuse_source(Device &device, Random &random, size_t size) {
    std::vector<unsigned char> scratch(size), want(size), got(size);
    const int rounds = 4;
    for (int i = 0; i < rounds; i++) {
        random.fill(scratch.data(), size);
        if (i == rounds - 1) want = scratch;
        CHECK(cudaMemcpyAsync(device.a, scratch.data(), size, cudaMemcpyHostToDevice, device.stream));
        memset(scratch.data(), 0xee, size);
    }
    CHECK(cudaMemcpyAsync(got.data(), device.a, size, cudaMemcpyDeviceToHost, device.stream));
    CHECK(cudaStreamSynchronize(device.stream));
    REQUIRE(got == want, "a pageable source of %zu bytes was read after cudaMemcpyAsync had returned", size);
    copies_made += rounds + 1;
}

static void defaults(Device &device, Random &random) {
    // cudaMemcpyDefault finds the direction from the addresses.
    const size_t size = 5000;
    std::vector<unsigned char> from(size), to(size), host(size);
    random.fill(from.data(), size);
    CHECK(cudaMemcpy(device.a, from.data(), size, cudaMemcpyDefault));
    CHECK(cudaMemcpy(device.b, device.a, size, cudaMemcpyDefault));
    CHECK(cudaMemcpy(to.data(), device.b, size, cudaMemcpyDefault));
    CHECK(cudaMemcpy(host.data(), to.data(), size, cudaMemcpyHostToHost));
    REQUIRE(to == from && host == from, "cudaMemcpyDefault or HostToHost changed the data");
    CHECK(cudaMemcpy(device.a, from.data(), 0, cudaMemcpyHostToDevice));  // nothing is a valid amount
    copies_made += 4;
}

static void memsets(Device &device, size_t room) {
    std::vector<unsigned char> want(room, 0x11), got(room);
    CHECK(cudaMemset(device.a, 0x11, room));
    CHECK(cudaDeviceSynchronize());  // memsets return early, and a non-blocking stream does not wait for the default one
    const size_t pieces[][2] = {{0, 1}, {3, 2}, {9, 7}, {17, 64}, {101, 999}, {2000, 4096}, {7001, 2049}};
    int value = 0x80;
    for (auto &piece : pieces) {
        CHECK(cudaMemsetAsync(device.a + piece[0], value, piece[1], device.stream));
        memset(want.data() + piece[0], value, piece[1]);
        value += 0x13;
    }
    CHECK(cudaStreamSynchronize(device.stream));
    CHECK(cudaMemcpy(got.data(), device.a, room, cudaMemcpyDeviceToHost));
    REQUIRE(got == want, "memsets of odd sizes at odd offsets left other bytes");
    copies_made += (int)(sizeof pieces / sizeof pieces[0]);
}

// Rectangles between buffers of different pitch, in all directions, and a rectangular memset.
static void rectangles(Device &device, Random &random, bool full) {
    const size_t width = full ? 1021 : 61, height = full ? 777 : 23, host_pitch = width + 11;
    unsigned char *pitched;
    size_t pitch;
    CHECK(cudaMallocPitch((void **)&pitched, &pitch, width, height));
    REQUIRE(pitch >= width, "a pitch of %zu for rows of %zu bytes", pitch, width);
    for (Memory kind : {PAGEABLE, MALLOC_HOST}) {
        for (bool async : {false, true}) {
            HostBuffer source(kind, host_pitch * height), target(kind, host_pitch * height);
            random.fill(source.bytes, source.size);
            memset(target.bytes, 0x77, target.size);
            const size_t tight = width + 3;
            if (async) {
                CHECK(cudaMemcpy2DAsync(pitched, pitch, source.bytes, host_pitch, width, height, cudaMemcpyHostToDevice,
                                        device.stream));
                CHECK(cudaMemcpy2DAsync(device.a, tight, pitched, pitch, width, height, cudaMemcpyDeviceToDevice,
                                        device.stream));
                CHECK(cudaMemcpy2DAsync(target.bytes, host_pitch, device.a, tight, width, height, cudaMemcpyDeviceToHost,
                                        device.stream));
                CHECK(cudaStreamSynchronize(device.stream));
            } else {
                CHECK(cudaMemcpy2D(pitched, pitch, source.bytes, host_pitch, width, height, cudaMemcpyHostToDevice));
                CHECK(cudaMemcpy2D(device.a, tight, pitched, pitch, width, height, cudaMemcpyDeviceToDevice));
                CHECK(cudaMemcpy2D(target.bytes, host_pitch, device.a, tight, width, height, cudaMemcpyDeviceToHost));
            }
            for (size_t row = 0; row < height; row++) {
                REQUIRE(memcmp(source.bytes + row * host_pitch, target.bytes + row * host_pitch, width) == 0,
                        "row %zu of a rectangle of %s memory is wrong", row, memory_names[kind]);
                for (size_t i = width; i < host_pitch; i++)
                    REQUIRE(target.bytes[row * host_pitch + i] == 0x77, "a rectangle wrote past the end of row %zu", row);
            }
            copies_made += 3;
        }
    }

    std::vector<unsigned char> got(width * height);
    CHECK(cudaMemset2D(pitched, pitch, 0x21, width, height));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemset2DAsync(pitched + 5, pitch, 0x42, 7, height - 2, device.stream));
    CHECK(cudaStreamSynchronize(device.stream));
    CHECK(cudaMemcpy2D(got.data(), width, pitched, pitch, width, height, cudaMemcpyDeviceToHost));
    for (size_t row = 0; row < height; row++)
        for (size_t i = 0; i < width; i++) {
            int want = i >= 5 && i < 12 && row < height - 2 ? 0x42 : 0x21;
            REQUIRE(got[row * width + i] == want, "cudaMemset2D: byte (%zu, %zu) is %02x, not %02x", row, i,
                    got[row * width + i], want);
        }
    copies_made += 2;
    CHECK(cudaFree(pitched));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const size_t largest = options.full ? 256u << 20 : 4u << 20;
    Device device;
    CHECK(cudaMalloc((void **)&device.a, largest + 2 * MARGIN + 64));
    CHECK(cudaMalloc((void **)&device.b, largest + 2 * MARGIN + 64));
    CHECK(cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking));

    const size_t small[] = {1, 2, 3, 7, 8, 63, 64, 65, 255, 1000, 4095, 4096, 4097, 65535, 65536, 65537};
    for (int kind = PAGEABLE; kind < MEMORY_KINDS; kind++)
        for (bool async : {false, true})
            for (size_t size : small)
                round_trip(device, (Memory)kind, async, size, random.below(8), random.below(8), random);

    std::vector<size_t> large = {(1u << 20) - 1, 4u << 20};
    if (options.full) {
        for (size_t size : {(size_t)(4u << 20) + 3, (size_t)(16u << 20) + 5, (size_t)(64u << 20) - 7, (size_t)(256u << 20)})
            large.push_back(size);
    }
    for (size_t size : large) {
        for (int kind = PAGEABLE; kind < MEMORY_KINDS; kind++) {
            // One of the two for each kind by default: an emulated CPU copies slowly.
            for (bool async : {false, true})
                if (options.full || async == (kind % 2 == 1))
                    round_trip(device, (Memory)kind, async, size, random.below(8), random.below(8), random);
        }
    }

    in_flight(device, random, options.full ? 64u << 20 : 600 * 1024);
    for (size_t size : {100, 5000, 200 * 1000}) reuse_source(device, random, size);
    defaults(device, random);
    memsets(device, 10000);
    rectangles(device, random, options.full);

    CHECK(cudaStreamDestroy(device.stream));
    CHECK(cudaFree(device.a));
    CHECK(cudaFree(device.b));
    return pass("%d copies of 1 byte to %zu MiB", copies_made, largest >> 20);
}
