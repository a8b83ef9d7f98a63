// Streams and events that end before their work: destroyed while it waits or runs, made again, many of them; memory freed while
// it is in use; and priorities.
#define PROGRAM "stream_lifetimes"
#include "cases.h"
#include <atomic>
#include <vector>

static std::atomic<bool> go;
static void CUDART_CB hold(void *) {
    while (!go) {}
}
__global__ void add(int *p, int value) { atomicAdd(p, value); }
__global__ void fill(int *p, int n, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = value;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *p, got = 0;
    RETURNS(cudaSuccess, cudaMalloc(&p, 4));
    RETURNS(cudaSuccess, cudaMemset(p, 0, 4));
    add<<<1, 1>>>(p, 0);
    RETURNS(cudaSuccess, cudaDeviceSynchronize());

    // Destroyed with its work held: the work is done all the same, and the call does not wait for it.
    go = false;
    for (int i = 0; i < 5; i++) {
        cudaStream_t stream;
        cudaEvent_t event;
        RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        RETURNS(cudaSuccess, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        RETURNS(cudaSuccess, cudaLaunchHostFunc(stream, hold, nullptr));
        add<<<1, 32, 0, stream>>>(p, 1);
        RETURNS(cudaSuccess, cudaEventRecord(event, stream));
        cudaStream_t behind;
        RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&behind, cudaStreamNonBlocking));
        RETURNS(cudaSuccess, cudaStreamWaitEvent(behind, event, 0));
        add<<<1, 32, 0, behind>>>(p, 10);
        RETURNS(cudaSuccess, cudaEventDestroy(event));
        RETURNS(cudaSuccess, cudaStreamDestroy(stream));
        RETURNS(cudaSuccess, cudaStreamDestroy(behind));
    }
    go = true;
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaMemcpy(&got, p, 4, cudaMemcpyDeviceToHost));
    IS(5 * 32 * 11, got);

    // Memory freed behind work that uses it: the free waits.
    const int n = 1 << 16;
    for (int i = 0; i < 5; i++) {
        int *big;
        RETURNS(cudaSuccess, cudaMalloc(&big, n * 4));
        fill<<<4, 128>>>(big, n, i);
        RETURNS(cudaSuccess, cudaFree(big));
    }

    // Many at once, each with work, made and destroyed over again.
    RETURNS(cudaSuccess, cudaMemset(p, 0, 4));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    for (int round = 0; round < 3; round++) {
        std::vector<cudaStream_t> streams(150);
        for (cudaStream_t &stream : streams) RETURNS(cudaSuccess, cudaStreamCreate(&stream));
        for (cudaStream_t stream : streams) add<<<1, 1, 0, stream>>>(p, 1);
        for (cudaStream_t stream : streams) RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    }
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaMemcpy(&got, p, 4, cudaMemcpyDeviceToHost));
    IS(450, got);

    // Priorities: kept within the range, told back; the lower number goes first, which cannot be seen here.
    int least = 0, greatest = 0, priority = 99;
    unsigned flags = 99;
    RETURNS(cudaSuccess, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    printf("priorities %d to %d:", least, greatest);
    for (int wanted : {5, 0, -1, -2, -3, -4, -5, -6, -100}) {
        cudaStream_t stream;
        RETURNS(cudaSuccess, cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, wanted));
        RETURNS(cudaSuccess, cudaStreamGetPriority(stream, &priority));
        RETURNS(cudaSuccess, cudaStreamGetFlags(stream, &flags));
        IS(wanted > least ? least : wanted < greatest ? greatest : wanted, priority);
        IS(cudaStreamNonBlocking, flags);
        printf(" %d", priority);
        unsigned long long id = 0, of_default = 0;
        int device = 99;
        RETURNS(cudaSuccess, cudaStreamGetId(stream, &id));
        RETURNS(cudaSuccess, cudaStreamGetId(nullptr, &of_default));
        TRUE_THAT(id != of_default);
        RETURNS(cudaSuccess, cudaStreamGetDevice(stream, &device));
        IS(0, device);
        RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    }
    printf("\n");
    RETURNS(cudaSuccess, cudaStreamGetPriority(nullptr, &priority));
    IS(0, priority);
    RETURNS(cudaSuccess, cudaStreamGetFlags(nullptr, &flags));
    IS(0, flags);
    RETURNS(cudaErrorInvalidValue, cudaStreamCreateWithPriority(nullptr, 0, 0));
    RETURNS(cudaErrorInvalidValue, cudaStreamGetPriority(nullptr, nullptr));
    RETURNS(cudaSuccess, cudaFree(p));
    return verdict();
}
