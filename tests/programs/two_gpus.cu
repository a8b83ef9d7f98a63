// Two GPUs of one server: copies between them, kernels that reach the other's memory, managed memory of both, events across devices.

#include <cstdio>
#include <vector>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                        \
    do {                                                                                                   \
        cudaError_t answer = (call);                                                                       \
        if (answer != cudaSuccess) {                                                                       \
            printf("FAIL line %d %s: %s\n", __LINE__, #call, cudaGetErrorName(answer));                    \
            return 1;                                                                                      \
        }                                                                                                  \
    } while (0)
#define REQUIRE(what)                                                                                      \
    do {                                                                                                   \
        if (!(what)) {                                                                                     \
            printf("FAIL line %d: %s\n", __LINE__, #what);                                                 \
            return 1;                                                                                      \
        }                                                                                                  \
    } while (0)

__global__ void add(int *to, const int *from, int n, int value)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = from[i] + value;
}

static bool all_are(const std::vector<int> &v, int first, int value)
{
    for (size_t i = 0; i < v.size(); i++)
        if (v[i] != first * (int)i + value)
            return printf("element %zu is %d\n", i, v[i]), false;
    return true;
}

// Copies of each device's memory while the other one is current: contiguous bytes, few and many, and rows.
static int while_the_other_is_current(int n)
{
    const size_t bytes = n * sizeof(int);
    std::vector<int> host(n), rows(n / 2);
    for (int d = 0; d < 2; d++) {
        int *near, *far, few[3] = {7, 8, 9};
        CHECK(cudaSetDevice(d));
        CHECK(cudaMalloc(&far, bytes));
        CHECK(cudaSetDevice(1 - d));
        CHECK(cudaMalloc(&near, bytes));
        for (int i = 0; i < n; i++)
            host[i] = i;
        CHECK(cudaMemcpy(far, host.data(), bytes, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(far, few, sizeof few, cudaMemcpyHostToDevice));
        // The first half of each row of 128.
        CHECK(cudaMemcpy2D(near, 256, far, 512, 256, n / 128, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpy2D(far + n / 2, 512, near, 256, 256, n / 256, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpy2D(rows.data(), 256, far, 512, 256, n / 128, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(host.data(), far, bytes, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(few, near, sizeof few, cudaMemcpyDeviceToHost));
        REQUIRE(few[0] == 7 && few[1] == 8 && few[2] == 9);
        for (int i = 0; i < n; i++) {
            // What was copied there and back was once where it comes from.
            const int from = i >= n / 2 && i % 128 < 64 ? i - n / 2 : i, expected = from < 3 ? 7 + from : from;
            REQUIRE(host[i] == expected);
            if (i % 128 < 64)
                REQUIRE(rows[i / 128 * 64 + i % 128] == expected);
        }
        CHECK(cudaFree(near));
        CHECK(cudaSetDevice(d));
        CHECK(cudaFree(far));
    }
    return 0;
}

int main()
{
    int count = 0, can = 0, back = 0;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count >= 2);
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
    CHECK(cudaDeviceCanAccessPeer(&back, 1, 0));
    printf("peers: %d %d\n", can, back);
    for (int attribute = 1; attribute <= 5; attribute++) {
        int value = -1;
        CHECK(cudaDeviceGetP2PAttribute(&value, (cudaDeviceP2PAttr)attribute, 0, 1));
        printf("attribute %d of the link: %d\n", attribute, value);
    }
    cudaAtomicOperation operations[13];
    unsigned capabilities[13];
    for (int n = 0; n < 13; n++)
        operations[n] = (cudaAtomicOperation)n;
    CHECK(cudaDeviceGetP2PAtomicCapabilities(capabilities, operations, 13, 0, 1));
    for (int n = 0; n < 13; n++)
        printf("operation %d over the link: %x\n", n, capabilities[n]);

    const int n = 1 << 20, blocks = n / 256;
    const size_t bytes = n * sizeof(int);
    int *memory[2];
    std::vector<int> host(n);
    for (int d = 0; d < 2; d++) {
        CHECK(cudaSetDevice(d));
        CHECK(cudaMalloc(&memory[d], bytes));
        CHECK(cudaMemset(memory[d], 0, bytes));
    }
    for (int i = 0; i < n; i++)
        host[i] = i;
    // Copies, whichever device is current.
    CHECK(cudaMemcpy(memory[0], host.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyPeer(memory[1], 1, memory[0], 0, bytes));
    CHECK(cudaSetDevice(1));
    add<<<blocks, 256>>>(memory[1], memory[1], n, 5);
    CHECK(cudaMemcpy(memory[0], memory[1], bytes, cudaMemcpyDefault));
    CHECK(cudaMemcpy(host.data(), memory[0], bytes, cudaMemcpyDeviceToHost));
    REQUIRE(all_are(host, 1, 5));

    if (while_the_other_is_current(1 << 18))
        return 1;

    // Kernels that read the other's memory.
    if (can && back) {
        CHECK(cudaSetDevice(0));
        CHECK(cudaDeviceEnablePeerAccess(1, 0));
        REQUIRE(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
        cudaGetLastError();
        add<<<blocks, 256>>>(memory[0], memory[1], n, 10);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(host.data(), memory[0], bytes, cudaMemcpyDeviceToHost));
        REQUIRE(all_are(host, 1, 15));
        int *later;
        CHECK(cudaSetDevice(1));
        CHECK(cudaMalloc(&later, bytes));
        add<<<blocks, 256>>>(later, memory[1], n, 1);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaSetDevice(0));
        add<<<blocks, 256>>>(memory[0], later, n, 1);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(host.data(), memory[0], bytes, cudaMemcpyDeviceToHost));
        REQUIRE(all_are(host, 1, 7));
        CHECK(cudaDeviceDisablePeerAccess(1));
        REQUIRE(cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
        cudaGetLastError();
        CHECK(cudaFree(later));
    }

    // A stream of one device waits for an event of the other.
    cudaStream_t stream[2];
    cudaEvent_t done;
    for (int d = 0; d < 2; d++) {
        CHECK(cudaSetDevice(d));
        CHECK(cudaStreamCreateWithFlags(&stream[d], cudaStreamNonBlocking));
    }
    CHECK(cudaSetDevice(0));
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    for (int round = 0; round < 50; round++) {
        CHECK(cudaSetDevice(0));
        add<<<blocks, 256, 0, stream[0]>>>(memory[0], memory[0], n, 1);
        CHECK(cudaEventRecord(done, stream[0]));
        CHECK(cudaStreamWaitEvent(stream[1], done));
        CHECK(cudaMemcpyPeerAsync(memory[1], 1, memory[0], 0, bytes, stream[1]));
        CHECK(cudaSetDevice(1));
        add<<<blocks, 256, 0, stream[1]>>>(memory[1], memory[1], n, 1);
        CHECK(cudaStreamSynchronize(stream[1]));
    }
    CHECK(cudaMemcpy(host.data(), memory[1], bytes, cudaMemcpyDeviceToHost));
    REQUIRE(all_are(host, 1, (can && back ? 7 : 5) + 51));

    // Managed memory, used by both in turn.
    if (can && back) {
        int *managed;
        CHECK(cudaSetDevice(0));
        CHECK(cudaMallocManaged(&managed, bytes));
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < n; i++)
                managed[i] = i;
            for (int d = 0; d < 2; d++) {
                CHECK(cudaSetDevice(d));
                add<<<blocks, 256>>>(managed, managed, n, d + 1);
                CHECK(cudaDeviceSynchronize());
            }
            for (int i = 0; i < n; i++)
                REQUIRE(managed[i] == i + 3);
        }
        CHECK(cudaFree(managed));
    }

    // After a reset of one device, the other reaches what is allocated there then.
    if (can && back) {
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceReset());
        CHECK(cudaMalloc(&memory[1], bytes));
        CHECK(cudaMemset(memory[1], 0, bytes));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaSetDevice(0));
        CHECK(cudaDeviceEnablePeerAccess(1, 0));
        add<<<blocks, 256>>>(memory[0], memory[1], n, 3);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(host.data(), memory[0], bytes, cudaMemcpyDeviceToHost));
        REQUIRE(all_are(host, 0, 3));
    }
    printf("PASS two_gpus\n");
    return 0;
}
