// Times between events that are recorded again and again: each is the time between the last records, whatever was asked before.
#define PROGRAM "event_times"
#include "common.h"

#include <atomic>
#include <chrono>
#include <thread>

static const int PAUSE = 20;  // milliseconds

static std::atomic<bool> may_rest;

// Begins when the program says so, and takes a while.
static void rest(void *) {
    while (!may_rest) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(PAUSE));
}

static float between(cudaEvent_t a, cudaEvent_t b) {
    float time = -1, again = -1;
    CHECK(cudaEventElapsedTime(&time, a, b));
    CHECK(cudaEventElapsedTime(&again, a, b));
    REQUIRE(memcmp(&time, &again, sizeof time) == 0, "%.9g ms, then %.9g", time, again);
    return time;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaStream_t stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&other));
    cudaEvent_t begin, middle, end, once;
    for (cudaEvent_t *event : {&begin, &middle, &end, &once}) CHECK(cudaEventCreate(event));
    CHECK(cudaEventRecord(once, stream));
    // Every third step is a long one between `begin` and `middle`, every fourth between `middle` and `end`. How the program waits changes, too.
    float before = -1;
    for (int step = 0; step < 24; step++) {
        bool first = step % 3 == 0, second = step % 4 == 0;
        may_rest = false;
        CHECK(cudaEventRecord(begin, stream));
        if (first) CHECK(cudaLaunchHostFunc(stream, rest, nullptr));
        CHECK(cudaEventRecord(middle, stream));
        if (second) CHECK(cudaLaunchHostFunc(stream, rest, nullptr));
        CHECK(cudaEventRecord(end, stream));
        if (second) {
            float time = -1;
            EXPECT(cudaErrorNotReady, cudaEventElapsedTime(&time, begin, end));
        }
        may_rest = true;
        switch (step % 5) {
            case 0: CHECK(cudaEventSynchronize(end)); break;
            case 1: CHECK(cudaStreamSynchronize(stream)); break;
            case 2: CHECK(cudaDeviceSynchronize()); break;
            case 3: while (cudaEventQuery(end) == cudaErrorNotReady) std::this_thread::yield(); break;
            case 4: CHECK(cudaEventSynchronize(middle)); CHECK(cudaEventSynchronize(end)); break;
        }
        float early = between(begin, middle), late = between(middle, end), all = between(begin, end), whole = between(once, end);
        REQUIRE(early >= (first ? PAUSE - 0.1f : 0), "step %d: %f ms to the middle", step, early);
        REQUIRE(late >= (second ? PAUSE - 0.1f : 0), "step %d: %f ms from the middle", step, late);
        REQUIRE(all >= early && all >= late && whole >= all && whole >= before, "step %d: %f and %f ms, %f in all, %f since the first", step, early, late, all, whole);
        // The other way round it is the same time, negative.
        REQUIRE(between(end, begin) == -all, "step %d: %f ms forwards, %f backwards", step, all, between(end, begin));
        before = whole;
    }
    // An event that ends another time now: recorded on another stream, behind nothing.
    CHECK(cudaEventRecord(middle, other));
    CHECK(cudaEventSynchronize(middle));
    REQUIRE(between(end, middle) >= 0, "a later record is %f ms earlier", -between(end, middle));
    // Made anew under what may be the same number.
    for (int i = 0; i < 50; i++) {
        cudaEvent_t a, b;
        CHECK(cudaEventCreate(&a));
        CHECK(cudaEventCreate(&b));
        for (int round = 0; round < 2; round++) {
            CHECK(cudaEventRecord(a, stream));
            CHECK(cudaEventRecord(b, stream));
            if (round == 0 || i % 2) {
                CHECK(cudaEventSynchronize(b));
                REQUIRE(between(a, b) >= 0, "%f ms", between(a, b));
            }
        }
        CHECK(cudaEventDestroy(a));
        if (i % 3) CHECK(cudaEventDestroy(b));
    }
    CHECK(cudaDeviceSynchronize());
    cudaEvent_t untimed, never;
    float time = -1;
    CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    CHECK(cudaEventCreate(&never));
    CHECK(cudaEventRecord(untimed, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&time, untimed, end));
    EXPECT(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&time, begin, never));
    return pass("24 steps, %f ms", before);
}
