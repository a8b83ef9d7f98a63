// Processes at once: two that fork and exec this program, and one that only forks, all before the parent's first
// CUDA call; and then the parent itself, beside them.
#define PROGRAM "two_processes"
#include "common.h"

#include <sys/wait.h>
#include <unistd.h>
#include <vector>

__global__ void advance(unsigned *data, int n, unsigned addend) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * 1664525u + addend;
}

static void compute(uint64_t seed) {
    const int n = 2000, rounds = 10;
    Random random(seed);
    std::vector<unsigned> input(n), output(n);
    random.fill(input.data(), n * sizeof(unsigned));
    unsigned *device, addend = (unsigned)seed | 1;
    CHECK(cudaMalloc(&device, n * sizeof(unsigned)));
    CHECK(cudaMemcpy(device, input.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
    for (int i = 0; i < rounds; i++) {
        advance<<<(n + 127) / 128, 128>>>(device, n, addend);
        LAUNCHED();
        CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaMemcpy(output.data(), device, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        unsigned want = input[i];
        for (int round = 0; round < rounds; round++) want = want * 1664525u + addend;
        REQUIRE(output[i] == want, "process %d: element %d is %u, not %u", getpid(), i, output[i], want);
    }
    CHECK(cudaFree(device));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    if (options.word == "child") {
        compute(options.seed);
        return 0;
    }
    std::vector<pid_t> children;
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        REQUIRE(child >= 0, "fork failed");
        if (child == 0) {
            std::string seed = std::to_string(options.seed + 1 + i);
            if (i < 2) {
                execl("/proc/self/exe", argv[0], "child", "--seed", seed.c_str(), (char *)nullptr);
                fail("exec failed");
            }
            compute(options.seed + 1 + i);
            exit(0);
        }
        children.push_back(child);
    }
    compute(options.seed);
    for (pid_t child : children) {
        int status;
        REQUIRE(waitpid(child, &status, 0) == child, "waitpid failed");
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child %d ended with wait status 0x%x", child, status);
    }
    return pass("two after exec, one after fork, and the parent");
}
