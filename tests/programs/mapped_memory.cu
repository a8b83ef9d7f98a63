// Pinned memory that kernels read and write where it is.
#define PROGRAM "mapped_memory"
#include "common.h"

#include <unistd.h>

__global__ void add(const int *in, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] += in[i];
}

static void CUDART_CB slow(void *) { usleep(2000); }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 70000;
    CHECK(cudaSetDeviceFlags(cudaDeviceMapHost));
    int *in, *out, *in_device, *out_device, *device;
    CHECK(cudaHostAlloc(&in, n * sizeof *in, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&out, n * sizeof *out, cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaMalloc(&device, n * sizeof *device));
    CHECK(cudaHostGetDevicePointer(&in_device, in, 0));
    CHECK(cudaHostGetDevicePointer(&out_device, out, 0));
    for (int i = 0; i < n; i++) out[i] = 0;
    int sum = 0;
    for (int round = 1; round <= 5; round++) {
        for (int i = 0; i < n; i++) in[i] = i * round;
        sum += round;
        add<<<(n + 255) / 256, 256>>>(in_device, out_device, n);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < n; i++) REQUIRE(out[i] == i * sum, "element %d in round %d is %d", i, round, out[i]);
    }
    // It is pinned memory to everything else.
    CHECK(cudaMemcpyAsync(device, out, n * sizeof *out, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyAsync(in, device, n * sizeof *out, cudaMemcpyDeviceToHost));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(in[i] == i * sum, "element %d after copies is %d", i, in[i]);
    CHECK(cudaMemset(in, 0x22, n * sizeof *in));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(in[0] == 0x22222222 && in[n - 1] == 0x22222222, "after a fill: %x %x", in[0], in[n - 1]);
    // A fill that is told no stream is done when it returns, as of any memory of the host.
    for (int round = 0; round < 20; round++) {
        CHECK(cudaLaunchHostFunc(nullptr, slow, nullptr));
        CHECK(cudaMemset(in, round, n * sizeof *in));
        for (int i : {0, n / 2, n - 1}) REQUIRE(in[i] == round * 0x01010101, "element %d after fill %d: %x", i, round, in[i]);
        CHECK(cudaMemset2D(in, 4096, 0x40 + round, 100, 3));
        for (int i : {0, 1024, 2048}) REQUIRE(in[i] == (0x40 + round) * 0x01010101, "element %d after rows %d: %x", i, round, in[i]);
    }
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, out + 3));
    REQUIRE(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == out + 3 && attributes.devicePointer == out_device + 3, "type %d", attributes.type);
    unsigned flags = 0;
    CHECK(cudaHostGetFlags(&flags, out));
    REQUIRE(flags & cudaHostAllocMapped, "flags %x", flags);
    REQUIRE(cudaFree(out) == cudaErrorInvalidValue, "cudaFree of it");
    cudaGetLastError();
    CHECK(cudaFreeHost(in));
    CHECK(cudaFreeHost(out));
    REQUIRE(cudaFreeHost(out) == cudaErrorInvalidValue, "freed twice");
    cudaGetLastError();
    CHECK(cudaFree(device));
    return pass("read and written by kernels, copied, filled");
}
