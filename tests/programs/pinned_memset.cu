// Page-locked memory as a device's: fills in the order of their stream, whole and in rows, and at once in the form that waits; copies.
#define PROGRAM "pinned_memset"
#include "common.h"

#include <unistd.h>

static void CUDART_CB slow(void *) { usleep(20000); }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const size_t n = 1 << 20;
    unsigned char *pinned, *device;
    cudaStream_t stream;
    CHECK(cudaMallocHost(&pinned, n));
    CHECK(cudaMalloc(&device, n));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemset(pinned, 0x11, n));
    for (size_t i = 0; i < n; i++) REQUIRE(pinned[i] == 0x11, "byte %zu after cudaMemset is %d", i, pinned[i]);

    // A copy out of it before and after the fill, behind something slow.
    CHECK(cudaLaunchHostFunc(stream, slow, nullptr));
    CHECK(cudaMemcpyAsync(device, pinned, n / 2, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemsetAsync(pinned, 0x22, n, stream));
    CHECK(cudaMemcpyAsync(device + n / 2, pinned + n / 2, n / 2, cudaMemcpyHostToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    static unsigned char got[1 << 20];
    CHECK(cudaMemcpy(got, device, n, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) REQUIRE(got[i] == (i < n / 2 ? 0x11 : 0x22), "byte %zu on the device is %d", i, got[i]);

    CHECK(cudaMemset2D(pinned + 64, 256, 0x33, 100, 10));
    for (size_t i = 0; i < n; i++) {
        bool inside = i >= 64 && (i - 64) / 256 < 10 && (i - 64) % 256 < 100;
        REQUIRE(pinned[i] == (inside ? 0x33 : 0x22), "byte %zu after cudaMemset2D is %d", i, pinned[i]);
    }
    // With unified addressing pinned memory is a device's as well: copies that say so are copies within the host.
    unsigned char *other;
    CHECK(cudaMallocHost(&other, n));
    CHECK(cudaMemset(other, 0, n));
    CHECK(cudaLaunchHostFunc(stream, slow, nullptr));
    CHECK(cudaMemsetAsync(pinned, 0x44, n, stream));
    CHECK(cudaMemcpyAsync(other, pinned, n, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaMemcpyAsync(pinned + n / 2, other, n / 4, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpyAsync(device, other, n, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(got, device, n, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) REQUIRE(got[i] == 0x44 && other[i] == 0x44 && pinned[i] == 0x44, "byte %zu after copies from pinned memory", i);
    CHECK(cudaFreeHost(other));

    REQUIRE(cudaMemset(pinned + 1, 0, n) == cudaErrorInvalidValue, "a fill beyond the end");
    cudaGetLastError();
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    return pass("fills whole, in rows, in order; copies");
}
