// A stream is held up by a host function, with launches and much data queued behind it, while the program works on another stream, waits for that, and only then lets the
// host function return. Nothing that belongs to the first stream may keep back the second; and what is copied behind the host function is what that has written.
#define PROGRAM "held_streams"
#include "common.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <vector>

static const char *stage = "at the start";
static std::atomic<bool> go;
static const size_t MIB = 1 << 20;

__global__ void add(unsigned *data, unsigned by, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (size_t)blockDim.x) data[i] += by;
}

__global__ void count_up(unsigned *word) { *word += 1; }

struct Writes {
    unsigned *at;
    size_t count;
    unsigned first;
};

// Waits for the program, then writes what the copies behind it read.
static void CUDART_CB hold(void *argument) {
    while (!go) usleep(500);
    Writes *writes = (Writes *)argument;
    for (size_t i = 0; i < writes->count; i++) writes->at[i] = writes->first + unsigned(i);
}

static void out_of_time(int) {
    printf("FAIL " PROGRAM " is stuck %s\n", stage);
    fflush(stdout);
    _Exit(1);
}

static void expect(const unsigned *data, size_t count, unsigned first, const char *what) {
    for (size_t i = 0; i < count; i++) REQUIRE(data[i] == first + unsigned(i), "%s: element %zu is %u instead of %u", what, i, data[i], first + unsigned(i));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    signal(SIGALRM, out_of_time);
    alarm(600);
    const size_t held_bytes = 32 * MIB, held_count = held_bytes / 4, other_bytes = 24 * MIB, other_count = other_bytes / 4, pageable_bytes = 48 * MIB;
    const int launches = 700, rounds = 2;
    cudaStream_t held, behind, other;
    cudaEvent_t event;
    unsigned *held_device, *other_device, *words, *held_pinned, *back, *other_pinned;
    for (cudaStream_t *stream : {&held, &behind, &other}) CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaMalloc(&held_device, held_bytes));
    CHECK(cudaMalloc(&other_device, pageable_bytes));
    CHECK(cudaMalloc(&words, 3 * sizeof(unsigned)));
    CHECK(cudaMemset(words, 0, 3 * sizeof(unsigned)));
    CHECK(cudaMallocHost(&held_pinned, held_bytes));
    CHECK(cudaMallocHost(&back, held_bytes));
    CHECK(cudaMallocHost(&other_pinned, other_bytes));
    std::vector<unsigned> pageable(pageable_bytes / 4), returned(pageable_bytes / 4);
    // Loading code may wait for the device.
    add<<<1, 1, 0, other>>>(other_device, 0, 1);
    count_up<<<1, 1, 0, other>>>(words + 2);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());

    for (int round = 0; round < rounds; round++) {
        go = false;
        Writes writes = {held_pinned, held_count, unsigned(round) * 1000 + 17};
        memset(held_pinned, 0xee, held_bytes);
        memset(back, 0xee, held_bytes);

        stage = "queueing behind a host function";
        CHECK(cudaLaunchHostFunc(held, hold, &writes));
        const size_t piece = held_bytes / 8;
        for (size_t at = 0; at < held_bytes; at += piece)
            CHECK(cudaMemcpyAsync((char *)held_device + at, (char *)held_pinned + at, piece, cudaMemcpyHostToDevice, held));
        for (int i = 0; i < launches; i++) count_up<<<1, 1, 0, held>>>(words);
        LAUNCHED();
        CHECK(cudaMemcpyAsync(back, held_device, held_bytes, cudaMemcpyDeviceToHost, held));
        CHECK(cudaEventRecord(event, held));
        CHECK(cudaStreamWaitEvent(behind, event, 0));
        for (int i = 0; i < launches; i++) count_up<<<1, 1, 0, behind>>>(words + 1);
        LAUNCHED();

        stage = "launching on another stream";
        for (int i = 0; i < 2 * launches; i++) count_up<<<1, 1, 0, other>>>(words + 2);
        LAUNCHED();
        CHECK(cudaStreamSynchronize(other));

        stage = "copying page-locked memory on another stream";
        for (size_t i = 0; i < other_count; i++) other_pinned[i] = unsigned(i) + round;
        CHECK(cudaMemcpyAsync(other_device, other_pinned, other_bytes, cudaMemcpyHostToDevice, other));
        add<<<64, 256, 0, other>>>(other_device, 5, other_count);
        LAUNCHED();
        CHECK(cudaStreamSynchronize(other));
        memset(other_pinned, 0, other_bytes);
        CHECK(cudaMemcpyAsync(other_pinned, other_device, other_bytes, cudaMemcpyDeviceToHost, other));
        CHECK(cudaStreamSynchronize(other));
        expect(other_pinned, other_count, 5 + round, "the other stream's page-locked memory");

        stage = "copying pageable memory on another stream";
        for (size_t i = 0; i < pageable.size(); i++) pageable[i] = unsigned(i) + 3;
        CHECK(cudaMemcpyAsync(other_device, pageable.data(), pageable_bytes, cudaMemcpyHostToDevice, other));
        add<<<64, 256, 0, other>>>(other_device, 4, pageable.size());
        LAUNCHED();
        CHECK(cudaMemcpyAsync(returned.data(), other_device, pageable_bytes, cudaMemcpyDeviceToHost, other));
        CHECK(cudaStreamSynchronize(other));
        expect(returned.data(), returned.size(), 7, "the other stream's pageable memory");

        stage = "asking for the held stream";
        EXPECT(cudaErrorNotReady, cudaStreamQuery(held));
        EXPECT(cudaErrorNotReady, cudaStreamQuery(behind));

        stage = "letting the host function return";
        go = true;
        CHECK(cudaStreamSynchronize(held));
        expect(back, held_count, writes.first, "what the host function wrote");
        CHECK(cudaStreamSynchronize(behind));
    }
    unsigned counts[3];
    CHECK(cudaMemcpy(counts, words, sizeof counts, cudaMemcpyDeviceToHost));
    REQUIRE(counts[0] == rounds * launches && counts[1] == rounds * launches, "%u and %u launches behind the host function", counts[0], counts[1]);
    REQUIRE(counts[2] == rounds * 2 * launches + 1, "%u launches beside it", counts[2]);
    return pass("%d rounds", rounds);
}
