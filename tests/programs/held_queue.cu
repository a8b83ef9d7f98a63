// A stream is held, by a host function or by a kernel that waits for a word of pinned memory, while the program queues far more behind it than any queue takes. As on a GPU, the program has to
// wait at some point. The hold ends when everything is queued or the program has stopped, and everything queued is then done.
//   function  behind a host function
//   beside    the same; the host function ends only after another thread has used another stream
//   word      behind a kernel; another thread writes the word
#define PROGRAM "held_queue"
#include "common.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

struct Long {
    unsigned words[1000];
};

__global__ void add(Long numbers, unsigned *sum) { *sum += numbers.words[0] + numbers.words[999]; }

__global__ void wait_for(volatile unsigned *word) {
    while (!*word) {
    }
}

static std::atomic<unsigned> queued;
static std::atomic<bool> all_queued, use_other, other_used;
static unsigned stopped_at;
static const char *stage = "at the start";

static void out_of_time(int) {
    printf("FAIL " PROGRAM " is stuck %s, with %u launches queued\n", stage, queued.load());
    fflush(stdout);
    _Exit(1);
}

// Returns when the program has queued everything or does not come further.
static void until_the_queue_is_full() {
    unsigned seen = 0;
    for (int same = 0; !all_queued && same < 200; usleep(10000)) {
        unsigned now = queued;
        same = now == seen ? same + 1 : 0;
        seen = now;
    }
    stopped_at = queued;
}

static void CUDART_CB hold(void *) { until_the_queue_is_full(); }

static void CUDART_CB hold_for_another(void *) {
    until_the_queue_is_full();
    use_other = true;
    while (!other_used) usleep(500);
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    signal(SIGALRM, out_of_time);
    alarm(600);
    const bool word = options.word == "word", beside = options.word == "beside";
    // 320 MiB of parameters, 110 MiB, or just more launches than a GPU's queue takes.
    const unsigned launches = word ? 28000 : options.word.empty() ? 3000 : 82000, others = 300;
    cudaStream_t held, other;
    unsigned *sums, got[2], *flag;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&sums, sizeof got));
    CHECK(cudaMemset(sums, 0, sizeof got));
    CHECK(cudaHostAlloc(&flag, sizeof *flag, cudaHostAllocMapped));
    Long numbers = {};
    // Loading code may wait for the device, and the word is known to the device before the kernel waits.
    *flag = 1;
    wait_for<<<1, 1, 0, held>>>(flag);
    add<<<1, 1, 0, other>>>(numbers, sums);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    *flag = 0;

    std::thread thread([&] {
        if (word) {
            until_the_queue_is_full();
            *(volatile unsigned *)flag = 1;
        } else if (beside) {
            while (!use_other) usleep(500);
            Long ones = {};
            ones.words[0] = 1;
            for (unsigned i = 0; i < others; i++) add<<<1, 1, 0, other>>>(ones, sums + 1);
            LAUNCHED();
            CHECK(cudaStreamSynchronize(other));
            other_used = true;
        }
    });
    stage = "queueing";
    if (word) {
        wait_for<<<1, 1, 0, held>>>(flag);
        LAUNCHED();
    } else {
        CHECK(cudaLaunchHostFunc(held, beside ? hold_for_another : hold, nullptr));
    }
    unsigned expected = 0;
    for (unsigned i = 0; i < launches; i++) {
        numbers.words[0] = i;
        numbers.words[999] = 3;
        expected += i + 3;
        add<<<1, 1, 0, held>>>(numbers, sums);
        LAUNCHED();
        queued++;
    }
    all_queued = true;
    stage = "waiting for what was queued";
    CHECK(cudaStreamSynchronize(held));
    thread.join();
    CHECK(cudaMemcpy(got, sums, sizeof got, cudaMemcpyDeviceToHost));
    REQUIRE(got[0] == expected, "the sum is %u instead of %u", got[0], expected);
    REQUIRE(got[1] == (beside ? others : 0), "%u launches beside it", got[1]);
    // Otherwise it tries nothing.
    REQUIRE(options.word.empty() || stopped_at < launches, "nothing made the program wait");
    return pass("%u launches", launches);
}
