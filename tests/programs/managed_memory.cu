// Managed memory: host and device in turns, at one address: what each has written the other reads. Small pieces and large, written
// through and in parts, over several streams, from several threads.
#define PROGRAM "managed_memory"
#include "common.h"

#include <thread>
#include <vector>

__global__ void scale(float *data, size_t n, float by) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] *= by;
}

__global__ void sum(const unsigned *data, size_t n, unsigned long long *out) {
    unsigned long long mine = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) mine += data[i];
    atomicAdd(out, mine);
}

struct Node {
    int value;
    Node *next;
};

__global__ void walk(Node *first, int *total) {
    int all = 0;
    for (Node *node = first; node; node = node->next) {
        all += node->value;
        node->value *= 2;
    }
    *total = all;
}

__global__ void one(int *at, int value) { *at = value; }

// Changes every page that is a multiple of three.
__global__ void thirds(unsigned char *data, size_t pages) {
    size_t page = 3 * (blockIdx.x * (size_t)blockDim.x + threadIdx.x);
    if (page < pages) data[page * 4096 + 7] = 0xd0;
}

static void turns() {
    const size_t n = 1 << 18;
    float *data;
    CHECK(cudaMallocManaged(&data, n * sizeof *data));
    for (size_t i = 0; i < n; i++) REQUIRE(data[i] == 0, "float %zu of fresh memory is %f", i, data[i]);
    for (size_t i = 0; i < n; i++) data[i] = i % 1000;
    float by = 1;
    for (int round = 0; round < 8; round++) {
        scale<<<(n + 255) / 256, 256>>>(data, n, 2);
        by *= 2;
        CHECK(cudaDeviceSynchronize());
        // A part is read, a part written, most is left to the device.
        for (size_t i = round * 100; i < n; i += 4099) REQUIRE(data[i] == (i % 1000) * by, "float %zu after round %d is %f", i, round, data[i]);
        data[round] = 0;
    }
    for (size_t i = 0; i < n; i++) REQUIRE(data[i] == (i < 8 ? 0 : (i % 1000) * by), "float %zu at last is %f", i, data[i]);
    CHECK(cudaFree(data));
}

static void large() {
    const size_t n = 12 << 20;
    unsigned *data;
    unsigned long long *out;
    CHECK(cudaMallocManaged(&data, n * sizeof *data));
    CHECK(cudaMallocManaged(&out, sizeof *out));
    unsigned long long expected = 0;
    for (size_t i = 0; i < n; i++) expected += data[i] = i * 2654435761u;
    sum<<<64, 256>>>(data, n, out);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(*out == expected, "the sum is %llu, not %llu", *out, expected);
    // Single pages on either side.
    unsigned char *bytes = (unsigned char *)data;
    const size_t pages = n * sizeof *data / 4096;
    for (size_t page = 1; page < pages; page += 3) bytes[page * 4096 + 7] = 0xa1;
    thirds<<<(unsigned)((pages / 3 + 256) / 256), 256>>>(bytes, pages);
    CHECK(cudaDeviceSynchronize());
    for (size_t page = 0; page < pages; page++) {
        unsigned value = (unsigned)((page * 1024 + 1) * 2654435761u);
        unsigned char top = page % 3 == 0 ? 0xd0 : page % 3 == 1 ? 0xa1 : value >> 24;
        REQUIRE(bytes[page * 4096 + 7] == top, "byte 7 of page %zu is %x, not %x", page, bytes[page * 4096 + 7], top);
    }
    CHECK(cudaFree(out));
    CHECK(cudaFree(data));
}

static void small() {
    Node *first = nullptr;
    std::vector<Node *> all;
    int expected = 0;
    for (int i = 0; i < 500; i++) {
        Node *node;
        CHECK(cudaMallocManaged(&node, sizeof *node));
        *node = Node{i, first};
        first = node;
        all.push_back(node);
        expected += i;
    }
    int *total;
    CHECK(cudaMallocManaged(&total, sizeof *total));
    walk<<<1, 1>>>(first, total);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(*total == expected, "the list's sum is %d", *total);
    for (int i = 0; i < 500; i++) REQUIRE(all[i]->value == 2 * i, "node %d is %d", i, all[i]->value);
    for (Node *node : all) CHECK(cudaFree(node));
    CHECK(cudaFree(total));
}

static void streams() {
    cudaStream_t stream[4];
    int *at[4];
    for (int i = 0; i < 4; i++) {
        CHECK(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
        CHECK(cudaMallocManaged(&at[i], 4096));
    }
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 4; i++) at[i][1] = round;
        for (int i = 0; i < 4; i++) one<<<1, 1, 0, stream[i]>>>(at[i], round * 10 + i);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < 4; i++) REQUIRE(at[i][0] == round * 10 + i && at[i][1] == round, "stream %d, round %d: %d %d", i, round, at[i][0], at[i][1]);
    }
    for (int i = 0; i < 4; i++) {
        CHECK(cudaStreamDestroy(stream[i]));
        CHECK(cudaFree(at[i]));
    }
}

// Threads with memory of their own, in turns with the device each by itself.
static void threads() {
    std::vector<std::thread> all;
    for (int t = 0; t < 4; t++) {
        all.emplace_back([t] {
            int *mine;
            cudaStream_t stream;
            CHECK(cudaStreamCreate(&stream));
            CHECK(cudaMallocManaged(&mine, 64));
            CHECK(cudaStreamAttachMemAsync(stream, mine, 0, cudaMemAttachSingle));
            CHECK(cudaStreamSynchronize(stream));
            for (int round = 0; round < 25; round++) {
                mine[1] = round + t;
                one<<<1, 1, 0, stream>>>(mine, round * 4 + t);
                CHECK(cudaStreamSynchronize(stream));
                REQUIRE(mine[0] == round * 4 + t && mine[1] == round + t, "thread %d, round %d: %d %d", t, round, mine[0], mine[1]);
            }
            CHECK(cudaFree(mine));
            CHECK(cudaStreamDestroy(stream));
        });
    }
    for (auto &thread : all) thread.join();
}

// A host function reads what the kernel before it has written, and writes for the one behind it.
static void CUDART_CB between(void *data) {
    int *at = (int *)data;
    at[2] = at[0] + 1000;
}

static void CUDART_CB behind(void *data) {
    int *at = (int *)data;
    at[4] = at[3] + 1;
}

__global__ void twice(int *at) { at[3] = at[2] * 2; }

static void host_functions() {
    int *at, *other;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMallocManaged(&at, 4096));
    CHECK(cudaMallocManaged(&other, 4096));
    for (int round = 0; round < 10; round++) {
        one<<<1, 1, 0, stream>>>(at, round);
        CHECK(cudaLaunchHostFunc(stream, between, at));
        twice<<<1, 1, 0, stream>>>(at);
        CHECK(cudaLaunchHostFunc(stream, behind, at));
        // An access that may have to wait for the stream, and the stream for accesses of its host functions.
        other[1] = round;
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(at[0] == round, "round %d: the first kernel has written %d", round, at[0]);
        REQUIRE(at[2] == round + 1000, "round %d: the first function has written %d", round, at[2]);
        REQUIRE(at[3] == 2 * (round + 1000), "round %d: the second kernel has written %d", round, at[3]);
        REQUIRE(at[4] == 2 * (round + 1000) + 1, "round %d: the second function has written %d", round, at[4]);
        REQUIRE(other[1] == round, "round %d: beside it stands %d", round, other[1]);
    }
    CHECK(cudaFree(other));
    CHECK(cudaFree(at));
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    turns();
    large();
    small();
    streams();
    threads();
    host_functions();
    return pass("turns, large, small, streams, threads, host functions");
}
