// What kernels print comes out on the program's own standard output, in whole calls, and before the program goes on after it has waited for the kernel: whichever
// way it waits. The program runs itself as a child and reads what that prints.
#define PROGRAM "device_printf"
#include "common.h"

#include <string>
#include <unistd.h>

__global__ void hello(int round) {
    printf("round %d thread %d\n", round, threadIdx.x);
}

__device__ int symbol;

__global__ void formats() {
    printf("%d %5u|%-6x|%08.3f %s %c %% %lld %e %+d\n", -7, 42u, 0xbeefu, 3.14159, "text", 'q', -1234567890123ll, 0.00012, 5);
    printf("no arguments\n");
}

__global__ void many(int lines) {
    for (int i = 0; i < lines; i++) printf("line %d of block %d ........................................................\n", i, blockIdx.x);
}

static int child() {
    int *device, host = 0;
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaMalloc(&device, sizeof *device));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    printf("begin\n");
    hello<<<1, 3>>>(1);
    CHECK(cudaDeviceSynchronize());
    printf("after cudaDeviceSynchronize\n");
    hello<<<1, 2, 0, stream>>>(2);
    CHECK(cudaStreamSynchronize(stream));
    printf("after cudaStreamSynchronize\n");
    hello<<<1, 2, 0, stream>>>(3);
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaEventSynchronize(event));
    printf("after cudaEventSynchronize\n");
    hello<<<1, 2>>>(4);
    CHECK(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost));
    printf("after cudaMemcpy\n");
    // A blocking copy to the device, which waits for the kernel before it: of pageable memory, whole and by rows, and to a symbol.
    hello<<<1, 2>>>(5);
    CHECK(cudaMemcpy(device, &host, sizeof host, cudaMemcpyHostToDevice));
    printf("after cudaMemcpy to the device\n");
    hello<<<1, 2>>>(6);
    CHECK(cudaMemcpy2D(device, 4, &host, 4, 4, 1, cudaMemcpyHostToDevice));
    printf("after cudaMemcpy2D\n");
    hello<<<1, 2>>>(7);
    CHECK(cudaMemcpyToSymbol(symbol, &host, sizeof host));
    printf("after cudaMemcpyToSymbol\n");
    formats<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    printf("end\n");
    return 0;
}

static std::string run(const char *program, const char *what) {
    std::string text, command = std::string(program) + " " + what;
    FILE *pipe = popen(command.c_str(), "r");
    REQUIRE(pipe, "cannot run %s", command.c_str());
    char buffer[4096];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
    int status = pclose(pipe);
    REQUIRE(status == 0, "%s ended with status %#x after\n%s", command.c_str(), status, text.c_str());
    return text;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    if (options.word == "child") return child();
    if (options.word == "flood") {
        // Several times what a pipe holds, and less than CUDA's own buffer of 1 MiB.
        many<<<4, 1>>>(1000);
        CHECK(cudaDeviceSynchronize());
        return 0;
    }
    const char *expected =
        "begin\n"
        "round 1 thread 0\nround 1 thread 1\nround 1 thread 2\n"
        "after cudaDeviceSynchronize\n"
        "round 2 thread 0\nround 2 thread 1\n"
        "after cudaStreamSynchronize\n"
        "round 3 thread 0\nround 3 thread 1\n"
        "after cudaEventSynchronize\n"
        "round 4 thread 0\nround 4 thread 1\n"
        "after cudaMemcpy\n"
        "round 5 thread 0\nround 5 thread 1\n"
        "after cudaMemcpy to the device\n"
        "round 6 thread 0\nround 6 thread 1\n"
        "after cudaMemcpy2D\n"
        "round 7 thread 0\nround 7 thread 1\n"
        "after cudaMemcpyToSymbol\n"
        "-7    42|beef  |0003.142 text q % -1234567890123 1.200000e-04 +5\n"
        "no arguments\n"
        "end\n";
    std::string text = run(argv[0], "child");
    REQUIRE(text == expected, "printed\n%s", text.c_str());

    std::string flood = run(argv[0], "flood");
    int next[4] = {};
    size_t lines = 0;
    for (size_t at = 0, end; (end = flood.find('\n', at)) != std::string::npos; at = end + 1, lines++) {
        int line = -1, block = -1;
        REQUIRE(sscanf(flood.c_str() + at, "line %d of block %d ....", &line, &block) == 2 && block >= 0 && block < 4, "the line %s", flood.substr(at, end - at).c_str());
        REQUIRE(line == next[block]++, "line %d of block %d comes too early or too late", line, block);
    }
    REQUIRE(lines == 4000, "%zu lines of 4000", lines);
    return pass("eight ways of waiting, %zu bytes in order from four blocks", flood.size());
}
