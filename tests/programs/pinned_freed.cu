// Page-locked memory that is freed, or no longer registered, while copies from it and into it run, and while another stream waits for a host function: the copies are whole.
#define PROGRAM "pinned_freed"
#include "cases.h"
#include <cstdlib>
#include <unistd.h>
#include <vector>

static int calls;
static void CUDART_CB slow(void *) {
    usleep(20000);
    calls++;
}

__global__ void add(unsigned *data, size_t n) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) data[i] += 7;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const size_t n = 1 << 20, bytes = n * sizeof(unsigned);
    unsigned *device;
    cudaStream_t held, copying;
    RETURNS(cudaSuccess, cudaMalloc(&device, bytes));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&copying, cudaStreamNonBlocking));
    std::vector<unsigned> got(n);
    for (unsigned round = 0; round < 4; round++) {
        bool registered = round & 1;
        unsigned *from = nullptr;
        if (registered) {
            from = (unsigned *)aligned_alloc(4096, bytes);
            RETURNS(cudaSuccess, cudaHostRegister(from, bytes, 0));
        } else {
            RETURNS(cudaSuccess, cudaMallocHost(&from, bytes));
        }
        for (size_t i = 0; i < n; i++) from[i] = (unsigned)i * 2654435761u + round;
        for (int i = 0; i < 3; i++) RETURNS(cudaSuccess, cudaLaunchHostFunc(held, slow, nullptr));
        RETURNS(cudaSuccess, cudaMemcpyAsync(device, from, bytes, cudaMemcpyHostToDevice, copying));
        add<<<64, 256, 0, copying>>>(device, n);
        LAUNCHED();
        if (round & 2) RETURNS(cudaSuccess, cudaMemcpyAsync(from, device, bytes, cudaMemcpyDeviceToHost, copying));
        if (registered) {
            RETURNS(cudaSuccess, cudaHostUnregister(from));
            free(from);
        } else {
            RETURNS(cudaSuccess, cudaFreeHost(from));
        }
        RETURNS(cudaSuccess, cudaMemcpyAsync(got.data(), device, bytes, cudaMemcpyDeviceToHost, copying));
        RETURNS(cudaSuccess, cudaStreamSynchronize(copying));
        size_t wrong = 0;
        for (size_t i = 0; i < n; i++) wrong += got[i] != (unsigned)i * 2654435761u + round + 7;
        IS(0, wrong);
        RETURNS(cudaSuccess, cudaStreamSynchronize(held));
        IS(3 * ((int)round + 1), calls);
    }
    RETURNS(cudaSuccess, cudaStreamDestroy(held));
    RETURNS(cudaSuccess, cudaStreamDestroy(copying));
    RETURNS(cudaSuccess, cudaFree(device));
    return verdict();
}
