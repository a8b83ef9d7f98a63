// Random use of stream-ordered memory: several pools, streams and graphs allocate, write, check, free and use again, ordered by events where streams change.
// Whatever memory is given out twice at a time, or too early, shows as words that are not what was last written.
#define PROGRAM "pool_random"
#include "common.h"

#include <vector>

__global__ void fill(unsigned *words, int n, unsigned value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) words[i] = value + i * 2654435761u;
}
// Adds the number of words that are wrong.
__global__ void check(const unsigned *words, int n, unsigned value, unsigned *wrong) {
    unsigned found = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) found += words[i] != value + i * 2654435761u;
    if (found) atomicAdd(wrong, found);
}
__global__ void delay(int rounds, unsigned *never) {
    unsigned state = rounds;
    for (int i = 0; i < rounds; i++) state = state * 1664525u + 1013904223u;
    if (state == 1 && rounds < 0) *never = state;
}

constexpr int STREAMS = 5, POOLS = 3;

struct Allocation {
    unsigned *words;
    int n;
    unsigned value;
    int stream;  // of its last use
    int pool;    // -1: a graph's
};

// A graph that allocates, writes and checks, and frees all or leaves one allocation to the program.
struct Instance {
    cudaGraphExec_t exec;
    cudaGraph_t graph;
    unsigned *kept;  // NULL if it keeps nothing
    int n;
    unsigned value;
    bool is_out;  // the program has its allocation
    int freed;    // the stream in which the program freed it; -1 if it need not be waited for
};

static cudaStream_t streams[STREAMS];
static cudaMemPool_t pools[POOLS];
static cudaEvent_t event;
static unsigned *wrong;

static void follow(int after, int stream) {
    if (after == stream) return;
    CHECK(cudaEventRecord(event, streams[after]));
    CHECK(cudaStreamWaitEvent(streams[stream], event, 0));
}

static void use(Random &random, Allocation &a) {
    int stream = random.below(STREAMS);
    follow(a.stream, stream);
    a.stream = stream;
    check<<<4, 64, 0, streams[stream]>>>(a.words, a.n, a.value, wrong);
    if (random.below(2)) {
        if (random.below(2)) delay<<<1, 1, 0, streams[stream]>>>(random.below(2000), wrong);
        a.value = (unsigned)random.next();
        fill<<<4, 64, 0, streams[stream]>>>(a.words, a.n, a.value);
    }
    LAUNCHED();
}

static int words_of(Random &random) { return (int)(1 + random.below(4)) << 14; }

static cudaMemPool_t make_pool() {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    return pool;
}

static Instance make_instance(Random &random) {
    Instance made = {};
    made.freed = -1;
    cudaStream_t stream = streams[1];
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    std::vector<Allocation> own;
    int count = 1 + random.below(4);
    bool keeps = random.below(2);
    for (int i = 0; i < count; i++) {
        Allocation a = {nullptr, words_of(random), (unsigned)random.next(), 1, -1};
        CHECK(cudaMallocAsync((void **)&a.words, a.n * sizeof(unsigned), stream));
        fill<<<4, 64, 0, stream>>>(a.words, a.n, a.value);
        own.push_back(a);
        // One goes in between, whose place the next may have.
        if (random.below(3) == 0) {
            int at = random.below(own.size());
            check<<<4, 64, 0, stream>>>(own[at].words, own[at].n, own[at].value, wrong);
            CHECK(cudaFreeAsync(own[at].words, stream));
            own.erase(own.begin() + at);
        }
    }
    for (const Allocation &a : own) check<<<4, 64, 0, stream>>>(a.words, a.n, a.value, wrong);
    for (size_t i = keeps && !own.empty(); i < own.size(); i++) CHECK(cudaFreeAsync(own[i].words, stream));
    if (keeps && !own.empty()) made.kept = own[0].words, made.n = own[0].n, made.value = own[0].value;
    LAUNCHED();
    CHECK(cudaStreamEndCapture(stream, &made.graph));
    CHECK(cudaGraphInstantiate(&made.exec, made.graph, 0));
    return made;
}

static void expect_right(uint64_t seed, int step) {
    CHECK(cudaDeviceSynchronize());
    unsigned found;
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "seed %#llx: %u words are wrong after %d steps", (unsigned long long)seed, found, step);
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    int steps = options.number ? (int)options.number : options.full ? 20000 : 600;
    Random random(options.seed);
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int i = 1; i < STREAMS; i++) CHECK(cudaStreamCreateWithFlags(&streams[i], i == 4 ? cudaStreamDefault : cudaStreamNonBlocking));
    streams[0] = cudaStreamPerThread;
    CHECK(cudaDeviceGetDefaultMemPool(&pools[0], 0));
    pools[1] = make_pool();
    pools[2] = make_pool();
    unsigned long long keep = ~0ull;
    CHECK(cudaMemPoolSetAttribute(pools[1], cudaMemPoolAttrReleaseThreshold, &keep));
    CHECK(cudaDeviceSynchronize());

    std::vector<Allocation> live;
    std::vector<Instance> instances;
    int allocated = 0, launched = 0;
    for (int step = 0; step < steps; step++) {
        switch (random.below(16)) {
        case 0: case 1: case 2: case 3: {
            if (live.size() >= 40) break;
            Allocation a = {nullptr, words_of(random), (unsigned)random.next(), (int)random.below(STREAMS), (int)random.below(POOLS)};
            CHECK(cudaMallocFromPoolAsync((void **)&a.words, a.n * sizeof(unsigned), pools[a.pool], streams[a.stream]));
            fill<<<4, 64, 0, streams[a.stream]>>>(a.words, a.n, a.value);
            LAUNCHED();
            live.push_back(a);
            allocated++;
            break;
        }
        case 4: case 5: case 6: case 7: case 8:
            if (!live.empty()) use(random, live[random.below(live.size())]);
            break;
        case 9: case 10: case 11: {
            if (live.empty()) break;
            int at = random.below(live.size());
            Allocation a = live[at];
            use(random, a);
            int stream = random.below(STREAMS);
            follow(a.stream, stream);
            // An ordinary free takes it, too, but NVIDIA's count of used memory takes no notice of that.
            bool plainly = (a.pool < 0 || a.pool >= 2) && random.below(4) == 0;
            if (plainly) {
                CHECK(cudaStreamSynchronize(streams[a.stream]));
                CHECK(cudaFree(a.words));
            } else {
                CHECK(cudaFreeAsync(a.words, streams[stream]));
            }
            for (Instance &instance : instances)
                if (instance.kept == a.words && a.pool < 0) instance.is_out = false, instance.freed = plainly ? -1 : stream;
            live.erase(live.begin() + at);
            break;
        }
        case 12:
            if (instances.size() < 6) {
                instances.push_back(make_instance(random));
            } else {
                // What the program has of it stays, and so does what still runs.
                int at = random.below(instances.size());
                if (instances[at].is_out) break;
                CHECK(cudaGraphExecDestroy(instances[at].exec));
                CHECK(cudaGraphDestroy(instances[at].graph));
                instances.erase(instances.begin() + at);
            }
            break;
        case 13: case 14: {
            if (instances.empty()) break;
            Instance &instance = instances[random.below(instances.size())];
            if (instance.is_out) break;
            int stream = random.below(STREAMS);
            if (instance.freed >= 0) follow(instance.freed, stream);
            CHECK(cudaGraphLaunch(instance.exec, streams[stream]));
            launched++;
            if (instance.kept) {
                instance.is_out = true;
                live.push_back({instance.kept, instance.n, instance.value, stream, -1});
            }
            break;
        }
        default:
            if (random.below(4) == 0) {
                CHECK(cudaStreamSynchronize(streams[random.below(STREAMS)]));
            } else if (random.below(3) == 0) {
                CHECK(cudaMemPoolTrimTo(pools[random.below(POOLS)], random.below(2) << 20));
            } else if (random.below(3) == 0) {
                CHECK(cudaDeviceGraphMemTrim(0));
            } else if (random.below(3) == 0) {
                // Its allocations stay until they are freed.
                CHECK(cudaMemPoolDestroy(pools[2]));
                pools[2] = make_pool();
                for (Allocation &a : live)
                    if (a.pool == 2) a.pool = POOLS;
            } else {
                expect_right(options.seed, step);
                for (int i = 0; i < 2; i++) {
                    unsigned long long used, least = 0;
                    for (const Allocation &a : live) least += a.pool == i ? a.n * sizeof(unsigned) : 0;
                    CHECK(cudaMemPoolGetAttribute(pools[i], cudaMemPoolAttrUsedMemCurrent, &used));
                    REQUIRE(used == least, "seed %#llx: pool %d uses %llu bytes of %llu", (unsigned long long)options.seed, i, used, least);
                }
            }
        }
    }
    for (const Allocation &a : live) {
        check<<<4, 64, 0, streams[a.stream]>>>(a.words, a.n, a.value, wrong);
        CHECK(cudaFreeAsync(a.words, streams[a.stream]));
    }
    expect_right(options.seed, steps);
    for (int i = 0; i < 2; i++) {
        unsigned long long used;
        CHECK(cudaMemPoolGetAttribute(pools[i], cudaMemPoolAttrUsedMemCurrent, &used));
        REQUIRE(used == 0, "pool %d uses %llu bytes of nothing", i, used);
    }
    return pass("%d allocations, %d launches", allocated, launched);
}
