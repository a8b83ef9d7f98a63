// Events: recorded, waited for, asked, timed and not timed, with flags of the record, recorded again, destroyed while they wait.
#define PROGRAM "event_flags"
#include "cases.h"
#include <atomic>

static std::atomic<bool> go;
static void CUDART_CB hold(void *) {
    while (!go) {}
}
__global__ void set(int *p, int value) { *p = value; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaStream_t stream, other;
    cudaEvent_t timed, later, untimed, blocking, both;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaEventCreate(&timed));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&later, cudaEventDefault));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&blocking, cudaEventBlockingSync));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&both, cudaEventBlockingSync | cudaEventDisableTiming));
    RETURNS(cudaErrorInvalidValue, cudaEventCreateWithFlags(&both, cudaEventInterprocess));

    // Never recorded: done, to be waited for, and without a time.
    float milliseconds = -1;
    RETURNS(cudaSuccess, cudaEventQuery(timed));
    RETURNS(cudaSuccess, cudaEventSynchronize(timed));
    RETURNS(cudaSuccess, cudaStreamWaitEvent(stream, timed, 0));
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, timed, later));

    int *p;
    RETURNS(cudaSuccess, cudaMalloc(&p, 4));
    // Loaded now: code is not while a stream waits for the host.
    set<<<1, 1>>>(p, 0);
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaSuccess, cudaEventRecord(timed, stream));
    go = false;
    RETURNS(cudaSuccess, cudaLaunchHostFunc(stream, hold, nullptr));
    RETURNS(cudaSuccess, cudaEventRecord(later, stream));
    RETURNS(cudaSuccess, cudaEventRecordWithFlags(untimed, stream, cudaEventRecordDefault));
    RETURNS(cudaErrorNotReady, cudaEventQuery(later));
    RETURNS(cudaErrorNotReady, cudaEventQuery(untimed));
    RETURNS(cudaErrorNotReady, cudaEventElapsedTime(&milliseconds, timed, later));
    // Another stream waits; the event is destroyed before its time, which changes nothing.
    RETURNS(cudaSuccess, cudaStreamWaitEvent(other, untimed, cudaEventWaitDefault));
    RETURNS(cudaSuccess, cudaEventDestroy(untimed));
    set<<<1, 1, 0, other>>>(p, 5);
    RETURNS(cudaSuccess, cudaEventRecord(both, other));
    RETURNS(cudaErrorNotReady, cudaEventQuery(both));
    RETURNS(cudaErrorNotReady, cudaStreamQuery(other));
    go = true;
    RETURNS(cudaSuccess, cudaEventSynchronize(both));
    RETURNS(cudaSuccess, cudaEventSynchronize(later));
    RETURNS(cudaSuccess, cudaEventElapsedTime(&milliseconds, timed, later));
    TRUE_THAT(milliseconds >= 0 && milliseconds < 1e6f);
    RETURNS(cudaSuccess, cudaEventElapsedTime(&milliseconds, later, timed));
    TRUE_THAT(milliseconds <= 0);
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, timed, both));
    int value = 0;
    RETURNS(cudaSuccess, cudaMemcpy(&value, p, 4, cudaMemcpyDeviceToHost));
    IS(5, value);

    // Recorded again, it is the newer record that counts; a wait put before keeps the older.
    RETURNS(cudaSuccess, cudaEventRecord(blocking, stream));
    RETURNS(cudaSuccess, cudaStreamWaitEvent(other, blocking, 0));
    go = false;
    RETURNS(cudaSuccess, cudaLaunchHostFunc(stream, hold, nullptr));
    RETURNS(cudaSuccess, cudaEventRecord(blocking, stream));
    RETURNS(cudaErrorNotReady, cudaEventQuery(blocking));
    RETURNS(cudaSuccess, cudaStreamSynchronize(other));
    go = true;
    RETURNS(cudaSuccess, cudaEventSynchronize(blocking));

    // What is wrong.
    RETURNS(cudaErrorInvalidValue, cudaEventRecordWithFlags(timed, stream, 0x10));
    RETURNS(cudaErrorInvalidValue, cudaStreamWaitEvent(stream, timed, 0x10));
    // External records and waits are meant for captures.
    RETURNS(cudaErrorIllegalState, cudaEventRecordWithFlags(timed, stream, cudaEventRecordExternal));
    RETURNS(cudaErrorIllegalState, cudaStreamWaitEvent(stream, timed, cudaEventWaitExternal));
    for (cudaEvent_t event : {timed, later, blocking, both}) RETURNS(cudaSuccess, cudaEventDestroy(event));
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventRecord(nullptr, stream));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    RETURNS(cudaSuccess, cudaStreamDestroy(other));
    RETURNS(cudaSuccess, cudaFree(p));
    return verdict();
}
