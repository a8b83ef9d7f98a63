// Pinned memory of every kind whose addresses kernels are simply given, as unified addressing allows: no flag, no device pointer.
#define PROGRAM "pinned_kernels"
#include "common.h"
#include <stdlib.h>
#include <string.h>

struct Both {
    int scale;
    const int *in;
    int *out;
};

__global__ void add(Both both, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) both.out[i] += both.in[i] * both.scale;
}

static const int n = 70000;

static void turns(int *in, int *out, const char *what) {
    for (int i = 0; i < n; i++) out[i] = 0;
    int sum = 0;
    for (int round = 1; round <= 4; round++) {
        for (int i = 0; i < n; i++) in[i] = i * round;
        sum += round * 2;
        add<<<(n + 255) / 256, 256>>>(Both{2, in, out}, n);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < n; i++) REQUIRE(out[i] == i * sum, "%s: element %d in round %d is %d", what, i, round, out[i]);
    }
}

__global__ void hold(volatile int *word, int *out, long long patience) {
    long long begin = clock64();
    while (*word == 0 && clock64() - begin < patience) {}
    *out = *word;
}

// One word, which a kernel waits for.
static void released(int *words) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    volatile int *word = words;
    for (int round = 1; round <= 5; round++) {
        *word = 0;
        hold<<<1, 1, 0, stream>>>(words, words + 200, 200000000000ll);
        CHECK(cudaGetLastError());
        REQUIRE(cudaStreamQuery(stream) == cudaErrorNotReady, "the kernel is over");
        cudaGetLastError();
        *word = round;
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(words[200] == round, "round %d: the kernel has seen %d", round, words[200]);
    }
    CHECK(cudaStreamDestroy(stream));
}

struct Seen {
    const int *words;
    int sum;
};

static void look(void *data) {
    Seen *seen = (Seen *)data;
    seen->sum = seen->words[0] + seen->words[n - 1];
}

// Functions of the program's in a stream's order find what kernels and copies before them have written.
static void functions(int *in, int *out, int *device) {
    cudaStream_t streams[2];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Seen seen[2][8];
    for (int i = 0; i < n; i++) in[i] = i + 1;
    memset(out, 0, n * sizeof *out);
    for (int round = 0; round < 8; round++) {
        add<<<(n + 255) / 256, 256, 0, streams[0]>>>(Both{1, in, out}, n);
        seen[0][round] = Seen{out, 0};
        CHECK(cudaLaunchHostFunc(streams[0], look, &seen[0][round]));
        CHECK(cudaMemsetAsync(device, round, n * sizeof *device, streams[1]));
        CHECK(cudaMemcpyAsync(in + n, device, n * sizeof *device, cudaMemcpyDeviceToHost, streams[1]));
        seen[1][round] = Seen{in + n, 0};
        CHECK(cudaLaunchHostFunc(streams[1], look, &seen[1][round]));
    }
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < 8; round++) {
        REQUIRE(seen[0][round].sum == (n + 1) * (round + 1), "a function behind kernel %d has seen %d", round, seen[0][round].sum);
        REQUIRE(seen[1][round].sum == round * 0x01010101 * 2, "a function behind copy %d has seen %x", round, seen[1][round].sum);
    }
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const size_t bytes = n * sizeof(int);
    int *in, *out, *device;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&in, 2 * bytes));
    CHECK(cudaHostAlloc(&out, bytes, cudaHostAllocPortable));
    // Copies before, in between and after.
    for (int i = 0; i < n; i++) in[i] = 7 * i;
    CHECK(cudaMemcpyAsync(device, in, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyAsync(out, device, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(out[1000] == 7000, "copied: %d", out[1000]);
    turns(in, out, "allocated");
    CHECK(cudaMemcpyAsync(device, out, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemsetAsync(in, 0x11, bytes));
    CHECK(cudaMemcpyAsync(in, device, bytes / 2, cudaMemcpyDeviceToHost));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(in[1000] == 20000 && in[n - 1] == 0x11111111, "after copies: %d %x", in[1000], in[n - 1]);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, in + 5));
    REQUIRE(attributes.type == cudaMemoryTypeHost && attributes.devicePointer == in + 5, "type %d, device pointer %p", attributes.type, attributes.devicePointer);

    functions(in, out, device);

    // Registered memory keeps what kernels wrote when it is the program's alone again.
    const size_t whole = (bytes + 4095) / 4096 * 4096;
    int *mine = (int *)aligned_alloc(4096, whole);
    memset(mine, 0, whole);
    CHECK(cudaHostRegister(mine, whole, cudaHostRegisterDefault));
    turns(in, mine, "registered");
    CHECK(cudaHostUnregister(mine));
    REQUIRE(mine[1234] == 1234 * 20 && mine[n - 1] == (n - 1) * 20, "unregistered: %d %d", mine[1234], mine[n - 1]);
    mine[5] = 1;
    free(mine);

    // Registered memory need not be whole pages: a word of the heap, and pages with two ragged ends, between bytes that nobody may change.
    char *heap = (char *)malloc(4 * 4096 + n * sizeof(int) + 8192);
    memset(heap, 0x77, 4 * 4096 + n * sizeof(int) + 8192);
    int *words_of_heap = (int *)(((size_t)heap + 255) / 256 * 256);
    CHECK(cudaHostRegister(words_of_heap, 1000, cudaHostRegisterPortable));
    int *ragged = words_of_heap + 3 * 1024 + 20;
    CHECK(cudaHostRegister(ragged, bytes, cudaHostRegisterPortable));
    memset(words_of_heap, 0, 1000);
    released(words_of_heap);
    turns(ragged, out, "ragged in");
    turns(in, ragged, "ragged out");
    CHECK(cudaMemcpy(device, ragged, bytes, cudaMemcpyDefault));
    CHECK(cudaMemset(device, 0x22, 64));
    CHECK(cudaMemcpyAsync(ragged + 1, device, bytes - 4, cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(ragged[0] == 0 && ragged[1] == 0x22222222 && ragged[16] == 0x22222222 && ragged[17] == 16 * 20, "a copy to ragged memory: %d %x %x %d", ragged[0], ragged[1], ragged[16], ragged[17]);
    CHECK(cudaHostUnregister(ragged));
    CHECK(cudaHostUnregister(words_of_heap));
    REQUIRE(ragged[n - 1] == (n - 2) * 20 && words_of_heap[200] == 5, "unregistered: %d %d", ragged[n - 1], words_of_heap[200]);
    for (char *p = heap; p < (char *)words_of_heap; p++) REQUIRE(*p == 0x77, "a byte before");
    for (char *p = (char *)words_of_heap + 1000; p < (char *)ragged; p++) REQUIRE(*p == 0x77, "a byte between");
    for (char *p = (char *)(ragged + n); p < heap + 4 * 4096 + bytes + 8192; p++) REQUIRE(*p == 0x77, "a byte behind");
    free(heap);

    // A graph's kernel.
    int *third;
    CHECK(cudaMallocHost(&third, bytes));
    memset(third, 0, bytes);
    for (int i = 0; i < n; i++) in[i] = i;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    add<<<(n + 255) / 256, 256, 0, stream>>>(Both{1, in, third}, n);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 3; round++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(third[321] == 963, "a graph's kernel: %d", third[321]);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));

    int *words;
    CHECK(cudaMallocHost(&words, 8192));
    memset(words, 0, 8192);
    released(words);
    CHECK(cudaFreeHost(words));
    CHECK(cudaFreeHost(third));
    CHECK(cudaFreeHost(in));
    CHECK(cudaFreeHost(out));
    CHECK(cudaFree(device));
    return pass("read and written by kernels, in turn and one word at the same time");
}
