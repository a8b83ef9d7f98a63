// Children of a process whose registered memory kernels have used: each goes on with its own copy, and the parent with the memory itself.
#define PROGRAM "registered_forks"
#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

const int N = 8192;

__global__ void add(int *p) {
    for (int i = threadIdx.x; i < N; i += blockDim.x) p[i]++;
}

static int wrong(const int *p, int start) {
    int wrong = 0;
    for (int i = 0; i < N; i++) wrong += p[i] != start + i;
    return wrong;
}

static void fill(int *p, int start) {
    for (int i = 0; i < N; i++) p[i] = start + i;
}

static void finishes(pid_t child, const char *what) {
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0, "%s ended with %x", what, status);
}

// What a child does: it finds what its parent had, changes it, and has a child of its own.
static void child(int *p, int start) {
    if (wrong(p, start) != 0) _exit(1);
    fill(p, -5);
    pid_t pid = fork();
    if (pid == 0) _exit(wrong(p, -5) == 0 ? 0 : 2);
    int status = -1;
    _exit(waitpid(pid, &status, 0) == pid && status == 0 && wrong(p, -5) == 0 ? 0 : 3);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    for (int offset : {0, 100}) {
        int *room = (int *)aligned_alloc(4096, (N + 1024) * 4), *p = room + offset;
        fill(p, 0);
        CHECK(cudaHostRegister(p, N * 4, cudaHostRegisterMapped));
        // The program has looked at nothing, a word, or everything since the kernel.
        for (int round = 1; round < 4; round++) {
            add<<<1, 64>>>(p);
            LAUNCHED();
            CHECK(cudaDeviceSynchronize());
            if (round == 2) p[N / 2]--, p[N / 2]++;
            if (round == 3) REQUIRE(wrong(p, round) == 0, "%d words are wrong", wrong(p, round));
            fflush(stdout);
            pid_t pid = fork();
            REQUIRE(pid >= 0, "no process");
            if (pid == 0) child(p, round);
            finishes(pid, "a child");
        }
        REQUIRE(wrong(p, 3) == 0, "after the children, %d words are wrong", wrong(p, 3));
        CHECK(cudaHostUnregister(p));
        pid_t pid = fork();
        if (pid == 0) child(p, 3);
        finishes(pid, "a child without registered memory");
        REQUIRE(wrong(p, 3) == 0, "after unregistering, %d words are wrong", wrong(p, 3));
        free(room);
    }
    return pass("at a page's beginning and elsewhere");
}
