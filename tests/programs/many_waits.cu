// More threads than a session has reply slots wait for a held stream, each kind of wait in turn: the program's other calls go on.
#define PROGRAM "many_waits"
#include "common.h"

#include <atomic>
#include <functional>
#include <thread>
#include <unistd.h>
#include <vector>

static const int THREADS = 70;
static std::atomic<bool> go;

static void CUDART_CB gate(void *) {
    while (!go) usleep(1000);
}

__global__ void set(int *p, int value) { *p = value; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *data, *other;
    cudaStream_t held, own;
    cudaEvent_t event;
    CHECK(cudaMalloc(&data, sizeof *data));
    CHECK(cudaMalloc(&other, sizeof *other));
    // Loaded before anything waits: loading may wait for the device.
    set<<<1, 1>>>(data, 0);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

    int value = 0;
    auto during = [&](const char *what, std::function<void()> wait) {
        value++;
        go = false;
        CHECK(cudaLaunchHostFunc(held, gate, nullptr));
        set<<<1, 1, 0, held>>>(data, value);
        CHECK(cudaEventRecord(event, held));
        std::atomic<int> started{0}, wrong{0};
        std::vector<std::thread> threads;
        for (int i = 0; i < THREADS; i++)
            threads.emplace_back([&] {
                started++;
                wait();
                int got = 0;
                CHECK(cudaMemcpyAsync(&got, data, sizeof got, cudaMemcpyDeviceToHost, own));
                CHECK(cudaStreamSynchronize(own));
                if (got != value) wrong++;
            });
        // Those that begin to wait later only make it easier for the calls here.
        while (started < THREADS) usleep(1000);
        usleep(200000);
        int got = 0;
        size_t free, total;
        set<<<1, 1, 0, own>>>(other, value);
        CHECK(cudaMemcpyAsync(&got, other, sizeof got, cudaMemcpyDeviceToHost, own));
        CHECK(cudaStreamSynchronize(own));
        CHECK(cudaMemGetInfo(&free, &total));
        REQUIRE(got == value, "another stream's result is %d, expected %d", got, value);
        go = true;
        for (std::thread &thread : threads) thread.join();
        REQUIRE(wrong == 0, "%d threads returned from waiting for the %s too early", wrong.load(), what);
    };
    during("stream", [&] { CHECK(cudaStreamSynchronize(held)); });
    during("event", [&] { CHECK(cudaEventSynchronize(event)); });
    during("device", [] { CHECK(cudaDeviceSynchronize()); });
    during("copy", [&] {
        int got;
        CHECK(cudaMemcpyAsync(&got, data, sizeof got, cudaMemcpyDeviceToHost, held));
    });
    return pass("%d threads wait for a stream, an event, the device, a copy", THREADS);
}
