// A process that ends while a host function of a stream runs, which then ends its thread: so do the threads of an interpreter that shuts down (CPython's, when they ask
// for its lock). The process ends as it would have.
#define PROGRAM "exit_callback"
#include "common.h"

#include <atomic>
#include <pthread.h>
#include <unistd.h>

static std::atomic<bool> began{false}, leaving{false}, gone{false};
static pthread_key_t key;

// Nothing here that would have to be undone on the thread's way out: C++'s own library, which is inside this program, and the C library's unwinder do not know each other.
static void CUDART_CB calls(void *) {
    pthread_setspecific(key, &gone);
    began = true;
    while (!leaving) usleep(100);
    pthread_exit(nullptr);
}

static void leave() {
    leaving = true;
    for (int i = 0; i < 1000000 && !gone; i++) usleep(100);
    if (!gone) _exit(1);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    // Called when the thread has left all its functions.
    REQUIRE(pthread_key_create(&key, [](void *) { gone = true; }) == 0, "no key");
    CHECK(cudaFree(nullptr));
    // Behind the runtime's own, and so called before them.
    REQUIRE(atexit(leave) == 0, "no place for a function at exit");
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaLaunchHostFunc(stream, calls, nullptr));
    while (!began) usleep(100);
    return pass("ended");
}
