// Page-locked memory between two copies: one stream fills it from the device, and the next copy, of the same or another stream, takes it from there to
// another part of the device. The host waits for nothing in between, so the second copy must read the memory when its stream comes to it, not earlier.
#define PROGRAM "pinned_relay"
#include "cases.h"
#include <cstdlib>
#include <vector>

__global__ void fill(unsigned *data, size_t n, unsigned round) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        data[i] = (unsigned)i * 2654435761u + round;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const size_t most = 8 << 20;
    unsigned *from, *to;
    cudaStream_t first, second;
    cudaEvent_t filled, taken;
    RETURNS(cudaSuccess, cudaMalloc(&from, most));
    RETURNS(cudaSuccess, cudaMalloc(&to, most));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&filled, cudaEventDisableTiming));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&taken, cudaEventDisableTiming));
    for (size_t bytes : {(size_t)16 << 10, (size_t)48 << 10, (size_t)300 << 10, most}) {
        const size_t n = bytes / sizeof(unsigned);
        std::vector<unsigned> got(n);
        for (bool registered : {false, true}) {
            unsigned *host = nullptr;
            if (registered) {
                host = (unsigned *)aligned_alloc(4096, bytes);
                RETURNS(cudaSuccess, cudaHostRegister(host, bytes, 0));
            } else {
                RETURNS(cudaSuccess, cudaMallocHost(&host, bytes));
            }
            for (bool two_streams : {false, true}) {
                cudaStream_t reader = two_streams ? second : first;
                for (unsigned round = 0; round < 8; round++) {
                    fill<<<64, 256, 0, first>>>(from, n, round);
                    LAUNCHED();
                    RETURNS(cudaSuccess, cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, first));
                    if (two_streams) {
                        RETURNS(cudaSuccess, cudaEventRecord(filled, first));
                        RETURNS(cudaSuccess, cudaStreamWaitEvent(second, filled, 0));
                    }
                    RETURNS(cudaSuccess, cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, reader));
                    RETURNS(cudaSuccess, cudaMemcpyAsync(got.data(), to, bytes, cudaMemcpyDeviceToHost, reader));
                    RETURNS(cudaSuccess, cudaStreamSynchronize(reader));
                    size_t wrong = 0;
                    for (size_t i = 0; i < n; i++) wrong += got[i] != (unsigned)i * 2654435761u + round;
                    if (wrong)
                        printf("%zu of %zu words are wrong: %zu bytes, registered %d, two streams %d, round %u\n", wrong, n, bytes,
                               registered, two_streams, round);
                    IS(0, wrong);
                    // The next round must not fill the memory while this one reads it.
                    RETURNS(cudaSuccess, cudaEventRecord(taken, reader));
                    RETURNS(cudaSuccess, cudaStreamWaitEvent(first, taken, 0));
                }
            }
            if (registered) {
                RETURNS(cudaSuccess, cudaHostUnregister(host));
                free(host);
            } else {
                RETURNS(cudaSuccess, cudaFreeHost(host));
            }
        }
    }
    RETURNS(cudaSuccess, cudaFree(from));
    RETURNS(cudaSuccess, cudaFree(to));
    return verdict();
}
