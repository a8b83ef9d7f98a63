// Events that a held stream waits for or records: other streams and the program use their records, and record them again, meanwhile.
#define PROGRAM "held_events"
#include "common.h"

#include <atomic>
#include <unistd.h>

static std::atomic<bool> go;

static void CUDART_CB gate(void *) {
    while (!go) usleep(1000);
}

__global__ void set(int *p, int value) { *p = value; }
__global__ void copy(int *to, const int *from) { *to = *from; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int ROUNDS = 20;
    int *data, *out, got[ROUNDS];
    cudaStream_t held, behind, other;
    cudaEvent_t start, event, again;
    CHECK(cudaMalloc(&data, sizeof got));
    CHECK(cudaMalloc(&out, sizeof got));
    // Loaded before anything waits: loading may wait for the device.
    set<<<1, 1>>>(data, 0);
    copy<<<1, 1>>>(out, data);
    CHECK(cudaMemset(data, 0, sizeof got));
    CHECK(cudaDeviceSynchronize());
    for (cudaStream_t *stream : {&held, &behind, &other})
        CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventCreate(&again));

    // A held stream waits for the events; the program and another stream use the same records.
    CHECK(cudaEventRecord(start, other));
    set<<<1, 1, 0, other>>>(data, 1);
    CHECK(cudaEventRecord(event, other));
    CHECK(cudaLaunchHostFunc(held, gate, nullptr));
    CHECK(cudaStreamWaitEvent(held, start, 0));
    CHECK(cudaStreamWaitEvent(held, event, 0));
    CHECK(cudaStreamWaitEvent(behind, event, 0));
    CHECK(cudaEventSynchronize(event));
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, start, event));
    CHECK(cudaStreamSynchronize(behind));

    // Both record and wait are held, the event is recorded again on a stream that is not, and so on.
    for (int i = 0; i < ROUNDS; i++) {
        set<<<1, 1, 0, held>>>(data + i, i + 1);
        CHECK(cudaEventRecord(again, held));
        CHECK(cudaStreamWaitEvent(behind, again, 0));
        copy<<<1, 1, 0, behind>>>(out + i, data + i);
        CHECK(cudaEventRecord(again, other));
        CHECK(cudaEventSynchronize(again));
        CHECK(cudaStreamWaitEvent(other, again, 0));
        CHECK(cudaStreamSynchronize(other));
    }
    CHECK(cudaEventDestroy(again));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(behind));
    go = true;
    CHECK(cudaStreamSynchronize(behind));
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < ROUNDS; i++) REQUIRE(got[i] == i + 1, "value %d is %d", i, got[i]);
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(event));
    return pass("recorded again %d times", ROUNDS);
}
