// A program that is done with CUDA closes all descriptors, as daemons do; its child keeps the files opened then.
#define PROGRAM "closed_descriptors"
#include "common.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

int main() {
    int *values;
    CHECK(cudaMalloc(&values, 64));
    CHECK(cudaMemset(values, 1, 64));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(values));
    for (int fd = 3; fd < 1024; fd++) close(fd);

    int pipes[8][2];
    for (auto &ends : pipes) REQUIRE(pipe2(ends, O_CLOEXEC) == 0, "no pipe");
    const pid_t child = fork();
    REQUIRE(child >= 0, "cannot fork");
    if (child == 0) {
        for (auto &ends : pipes) {
            char byte = 'x';
            if (write(ends[1], &byte, 1) != 1 || read(ends[0], &byte, 1) != 1 || byte != 'x') _exit(1);
        }
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0, "the child lost a file: status %#x", status);
    return pass("8 pipes");
}
