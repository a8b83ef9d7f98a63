// Pinned host memory that kernels read and write in place: by cudaHostGetDevicePointer, and by the host's own address.
// Over a transport that shares no memory host and device take turns on it.
//
//   nvcc -cudart shared -arch=native -o mapped_host mapped_host.cu

#include <cstdio>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                        \
    do {                                                                                                   \
        cudaError_t answer = (call);                                                                       \
        if (answer != cudaSuccess) {                                                                       \
            printf("FAIL %s: %s\n", #call, cudaGetErrorName(answer));                                      \
            return 1;                                                                                      \
        }                                                                                                  \
    } while (0)

__global__ void triple(unsigned *p, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        p[i] = p[i] * 3 + 1;
}

static int check(const volatile unsigned *host, int n, unsigned round)
{
    unsigned add = 0, factor = 1;
    for (unsigned i = 0; i < round; i++) {
        add = add * 3 + 1;
        factor *= 3;
    }
    for (int i = 0; i < n; i++)
        if (host[i] != i * factor + add) {
            printf("FAIL element %d is %u after %u rounds\n", i, host[i], round);
            return 1;
        }
    return 0;
}

int main()
{
    const int n = 300007;
    int can = -1;
    unsigned *host, *device, *plain;
    CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrCanMapHostMemory, 0));
    CHECK(cudaHostAlloc(&host, n * sizeof *host, cudaHostAllocMapped));
    for (int i = 0; i < n; i++)
        host[i] = i;
    CHECK(cudaHostGetDevicePointer(&device, host, 0));
    if (can != 1) {
        printf("FAIL the device says that it cannot\n");
        return 1;
    }
    triple<<<(n + 255) / 256, 256>>>(device, n);
    CHECK(cudaDeviceSynchronize());
    if (check(host, n, 1))
        return 1;
    triple<<<(n + 255) / 256, 256>>>(host, n);
    CHECK(cudaDeviceSynchronize());
    if (check(host, n, 2))
        return 1;
    // A copy from it sees what the kernel wrote; a second round after the host has written.
    CHECK(cudaMalloc(&plain, n * sizeof *plain));
    CHECK(cudaMemcpy(plain, host, n * sizeof *plain, cudaMemcpyDefault));
    triple<<<(n + 255) / 256, 256>>>(plain, n);
    CHECK(cudaMemcpy(host, plain, n * sizeof *plain, cudaMemcpyDefault));
    if (check(host, n, 3))
        return 1;
    for (int i = 0; i < 20; i++) {
        unsigned *again;
        CHECK(cudaFreeHost(host));
        CHECK(cudaHostAlloc(&host, (n + i) * sizeof *host, cudaHostAllocMapped));
        CHECK(cudaHostGetDevicePointer(&again, host, 0));
        host[n - 1] = i;
        triple<<<1, 1>>>(again + n - 1, 1);
        CHECK(cudaDeviceSynchronize());
        if (host[n - 1] != i * 3u + 1) {
            printf("FAIL allocation %d\n", i);
            return 1;
        }
    }
    printf("PASS mapped_host by device pointer and by the host's own\n");
    return 0;
}
