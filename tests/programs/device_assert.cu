// A failed assertion in a kernel: its text on the program's own standard error, CUDA's error for it, and that error from then on. The program runs itself as a child and
// reads what that prints.
#define PROGRAM "device_assert"
#include "common.h"

#include <cassert>
#include <string>

__global__ void below(int limit, int *out) {
    int i = threadIdx.x;
    assert(i < limit);
    out[i] = i;
}

static int child() {
    int *device;
    CHECK(cudaMalloc(&device, 64 * sizeof *device));
    below<<<1, 33>>>(33, device);
    CHECK(cudaDeviceSynchronize());
    fprintf(stderr, "the first is good\n");
    below<<<dim3(1, 1, 1), 33>>>(32, device);
    cudaError_t error = cudaDeviceSynchronize();
    fprintf(stderr, "%s\n", cudaGetErrorName(error));
    error = cudaMalloc(&device, 64);
    fprintf(stderr, "then %s\n", cudaGetErrorName(error));
    return 0;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    if (options.word == "child") return child();
    std::string text, command = std::string(argv[0]) + " child 2>&1";
    FILE *pipe = popen(command.c_str(), "r");
    REQUIRE(pipe, "cannot run %s", command.c_str());
    char buffer[4096];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
    int status = pclose(pipe);
    REQUIRE(status == 0, "the child ended with status %#x after\n%s", status, text.c_str());
    size_t good = text.find("the first is good\n"), said = text.find("below(int, int *): block: [0,0,0], thread: [32,0,0] Assertion `i < limit` failed.\n");
    size_t error = text.find("\ncudaErrorAssert\n"), then = text.find("then cudaErrorAssert\n");
    REQUIRE(good != std::string::npos && said != std::string::npos && error != std::string::npos && then != std::string::npos, "the child printed\n%s", text.c_str());
    REQUIRE(good < said && said < error && error < then, "in another order:\n%s", text.c_str());
    REQUIRE(text.find("device_assert.cu:") < said, "without its file:\n%s", text.c_str());
    return pass("its text, then its error, then nothing but its error");
}
