// Threads share the blocks and pages of managed memory, but no bytes: some work on theirs with kernels, fills, copies and host functions on streams of every kind, others with the host alone, and
// one keeps synchronizing. Every thread always finds what it has written last, by whichever means. Natively this needs a device whose concurrentManagedAccess is 1.
#define PROGRAM "managed_neighbors"
#include "common.h"

#include <atomic>
#include <thread>
#include <vector>

const int WORKERS = 6, HOSTS = 2, OWNERS = WORKERS + HOSTS;
const int EACH = 160;

// The parts that one thread has of the shared memory lie apart by OWNERS slots, so a slot's neighbors are other threads'.
struct Slot {
    unsigned host, device;
    unsigned filled[4], copied[4], moved[4];
    unsigned padding[5];
};

static Slot *slots;
static std::atomic<int> running{0};

static Slot &slot(int owner, int i) { return slots[i * OWNERS + owner]; }

// Takes a while, so that other threads' calls come between.
__global__ void derive(Slot *slots, int owners, int owner, int count, int turns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Slot *slot = &slots[i * owners + owner];
    unsigned value = slot->host;
    for (int turn = 0; turn < turns; turn++) value = value * 1664525u + 1013904223u;
    slot->device = value;
}

static unsigned derived(unsigned value, int turns) {
    for (int turn = 0; turn < turns; turn++) value = value * 1664525u + 1013904223u;
    return value;
}

__global__ void add(unsigned *counter, unsigned by) { *counter += by; }

// What a stream calls the host for: it writes some of the thread's slots, and reads what a kernel before it has written.
struct Call {
    int owner, step;
    unsigned add;
    unsigned long long seen;
};

static void on_host(void *data) {
    Call *call = (Call *)data;
    for (int i = 0; i < EACH; i += call->step) {
        call->seen += slot(call->owner, i).device;
        slot(call->owner, i).host += call->add;
    }
}

static void worker(int owner, int rounds, uint64_t seed) {
    Random random(seed + owner);
    cudaStream_t stream = 0;
    if (owner % 3 == 1) CHECK(cudaStreamCreate(&stream));
    if (owner % 3 == 2) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    unsigned *counter, counted = 0;
    CHECK(cudaMallocManaged(&counter, sizeof *counter));
    std::vector<Slot> expected(EACH);
    memset(expected.data(), 0, EACH * sizeof(Slot));
    for (int round = 0; round < rounds; round++) {
        const int turns = 1 + random.below(300), some = 1 + random.below(4);
        for (int i = random.below(3); i < EACH; i += 1 + random.below(5)) slot(owner, i).host = expected[i].host = (unsigned)random.next();
        unsigned bytes[4];
        for (unsigned &word : bytes) word = (unsigned)random.next();
        Call call = {owner, 1 + (int)random.below(7), (unsigned)random.next(), 0};
        switch (random.below(5)) {
        case 0:
            derive<<<(EACH + 63) / 64, 64, 0, stream>>>(slots, OWNERS, owner, EACH, turns);
            CHECK(cudaGetLastError());
            for (Slot &slot : expected) slot.device = derived(slot.host, turns);
            break;
        case 1:
            for (int n = 0; n < some; n++) {
                int i = random.below(EACH), value = random.below(256);
                CHECK(cudaMemsetAsync(slot(owner, i).filled, value, sizeof expected[i].filled, stream));
                memset(expected[i].filled, value, sizeof expected[i].filled);
            }
            break;
        case 2:
            for (int n = 0; n < some; n++) {
                int i = random.below(EACH);
                CHECK(cudaMemcpyAsync(slot(owner, i).copied, bytes, sizeof bytes, cudaMemcpyDefault, stream));
                memcpy(expected[i].copied, bytes, sizeof bytes);
            }
            break;
        case 3: {
            unsigned long long seen = 0;
            derive<<<(EACH + 63) / 64, 64, 0, stream>>>(slots, OWNERS, owner, EACH, turns);
            CHECK(cudaLaunchHostFunc(stream, on_host, &call));
            derive<<<(EACH + 63) / 64, 64, 0, stream>>>(slots, OWNERS, owner, EACH, turns + 1);
            CHECK(cudaStreamSynchronize(stream));
            for (int i = 0; i < EACH; i++) {
                if (i % call.step == 0) {
                    seen += derived(expected[i].host, turns);
                    expected[i].host += call.add;
                }
                expected[i].device = derived(expected[i].host, turns + 1);
            }
            REQUIRE(call.seen == seen, "thread %d, round %d: the host function has seen the sum %llx, not %llx", owner, round, call.seen, seen);
            break;
        }
        default:
            for (int n = 0; n < some; n++) {
                int from = random.below(EACH), to = random.below(EACH);
                CHECK(cudaMemcpyAsync(slot(owner, to).moved, slot(owner, from).copied, sizeof bytes, cudaMemcpyDefault, stream));
                memcpy(expected[to].moved, expected[from].copied, sizeof bytes);
            }
        }
        *counter += 1;
        add<<<1, 1, 0, stream>>>(counter, 10);
        CHECK(cudaGetLastError());
        counted += 11;
        CHECK(random.below(4) ? cudaStreamSynchronize(stream) : cudaDeviceSynchronize());
        REQUIRE(*counter == counted, "thread %d's counter after round %d is %u, not %u", owner, round, *counter, counted);
        for (int i = 0; i < EACH; i++) {
            const Slot &is = slot(owner, i), &right = expected[i];
            REQUIRE(is.host == right.host, "thread %d, round %d: slot %d has %x of the host's, not %x", owner, round, i, is.host, right.host);
            REQUIRE(is.device == right.device, "thread %d, round %d: slot %d has %x of the kernel's, not %x", owner, round, i, is.device, right.device);
            REQUIRE(!memcmp(is.filled, right.filled, sizeof is.filled), "thread %d, round %d: slot %d is filled with %x, not %x", owner, round, i, is.filled[0], right.filled[0]);
            REQUIRE(!memcmp(is.copied, right.copied, sizeof is.copied), "thread %d, round %d: slot %d was copied to as %x, not %x", owner, round, i, is.copied[0], right.copied[0]);
            REQUIRE(!memcmp(is.moved, right.moved, sizeof is.moved), "thread %d, round %d: slot %d was moved to as %x, not %x", owner, round, i, is.moved[0], right.moved[0]);
        }
    }
    CHECK(cudaFree(counter));
    if (stream) CHECK(cudaStreamDestroy(stream));
    running--;
}

// Uses the host alone, for as long as others use the device.
static void host(int owner, uint64_t seed) {
    Random random(seed + owner);
    std::vector<unsigned> expected(EACH);
    while (running) {
        int i = random.below(EACH);
        REQUIRE(slot(owner, i).host == expected[i], "host thread %d: slot %d has %x, not %x", owner, i, slot(owner, i).host, expected[i]);
        slot(owner, i).host = expected[i] = (unsigned)random.next();
    }
    for (int i = 0; i < EACH; i++) REQUIRE(slot(owner, i).host == expected[i], "host thread %d: slot %d has %x at the end, not %x", owner, i, slot(owner, i).host, expected[i]);
}

// Learns that work is over while other threads put more of it on their streams.
static void synchronizer() {
    while (running) {
        CHECK(cudaStreamSynchronize(cudaStreamLegacy));
        cudaError_t status = cudaStreamQuery(cudaStreamLegacy);
        REQUIRE(status == cudaSuccess || status == cudaErrorNotReady, "the query is answered with %d", status);
        std::this_thread::yield();
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int rounds = options.number ? (int)options.number : options.full ? 400 : 60;
    CHECK(cudaMallocManaged(&slots, sizeof(Slot) * EACH * OWNERS));
    running = WORKERS;
    std::vector<std::thread> all;
    for (int owner = 0; owner < WORKERS; owner++) all.emplace_back(worker, owner, rounds, options.seed);
    for (int owner = WORKERS; owner < OWNERS; owner++) all.emplace_back(host, owner, options.seed);
    all.emplace_back(synchronizer);
    for (auto &thread : all) thread.join();
    CHECK(cudaFree(slots));
    return pass("%d threads, %d rounds", OWNERS + 1, rounds);
}
