// Threads are cancelled while they use CUDA; a later thread then uses it as before.
#define PROGRAM "cancelled_threads"
#include "common.h"

#include <atomic>
#include <pthread.h>

__global__ void increment(int *values) { values[threadIdx.x]++; }

static std::atomic<int> rounds;

static void *work(void *) {
    int *values, copy[32];
    cudaStream_t stream;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, nullptr);
    CHECK(cudaMalloc(&values, sizeof copy));
    CHECK(cudaMemset(values, 0, sizeof copy));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, nullptr);
    for (;;) {
        for (int i = 0; i < 5; i++) {
            increment<<<1, 32, 0, stream>>>(values);
            CHECK(cudaMemcpyAsync(copy, values, sizeof copy, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
        }
        rounds++;
        pthread_testcancel();
    }
}

int main() {
    CHECK(cudaFree(nullptr));
    for (int i = 0; i < 5; i++) {
        const int before = rounds;
        pthread_t thread;
        REQUIRE(pthread_create(&thread, nullptr, work, nullptr) == 0, "no thread");
        while (rounds == before) sched_yield();
        pthread_cancel(thread);
        void *result;
        pthread_join(thread, &result);
        REQUIRE(result == PTHREAD_CANCELED, "a cancelled thread returned");
    }
    int *values, copy[32];
    CHECK(cudaMalloc(&values, sizeof copy));
    CHECK(cudaMemset(values, 1, sizeof copy));
    CHECK(cudaMemcpy(copy, values, sizeof copy, cudaMemcpyDeviceToHost));
    REQUIRE(copy[31] == 0x01010101, "%#x after the threads", copy[31]);
    return pass("5 threads");
}
