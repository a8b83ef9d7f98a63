// Children that read managed memory of their parent: they have none of it, and end. The parent goes on with it.
#define PROGRAM "managed_forks"
#include "common.h"
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

constexpr int PAGES = 8, WORDS = 1024;

__global__ void add(int *p, int value) { p[blockIdx.x * blockDim.x + threadIdx.x] += value; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *shared;
    CHECK(cudaMallocManaged(&shared, PAGES * WORDS * sizeof(int)));
    for (int i = 0; i < PAGES * WORDS; i++) shared[i] = i;
    add<<<PAGES, WORDS>>>(shared, 1);
    CHECK(cudaDeviceSynchronize());
    fflush(stdout);
    // More than threads of one process ever wait for a page at a time.
    const int children = 70;
    for (int child = 0; child < children; child++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0, "fork failed");
        if (pid == 0) {
            alarm(60);
            _exit(((volatile int *)shared)[child % PAGES * WORDS] == 1 ? 0 : 1);
        }
        int status = 0;
        REQUIRE(waitpid(pid, &status, 0) == pid, "child %d is gone", child);
        REQUIRE(WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM, "child %d ended with %x", child, status);
    }
    for (int round = 1; round <= 3; round++) {
        auto half = [&](int from) {
            for (int i = from; i < from + PAGES * WORDS / 2; i++) {
                REQUIRE(shared[i] == i + 2 * round - 1, "word %d is %d in round %d", i, shared[i], round);
                shared[i]++;
            }
        };
        std::thread first(half, 0), second(half, PAGES * WORDS / 2);
        first.join();
        second.join();
        add<<<PAGES, WORDS>>>(shared, 1);
        CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaFree(shared));
    return pass("%d children", children);
}
