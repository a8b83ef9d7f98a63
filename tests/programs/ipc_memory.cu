// A process shares an allocation with another, which reads it, writes it and closes it.
#define PROGRAM "ipc_memory"
#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

#include <vector>

__global__ void turn(unsigned *data, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = ~data[i];
}

const size_t N = 300000;

static void give(int to, const void *data, size_t len) { REQUIRE(write(to, data, len) == (ssize_t)len, "the pipe is broken"); }
static void take(int from, void *data, size_t len) {
    for (size_t at = 0; at < len;) {
        ssize_t n = read(from, (char *)data + at, len - at);
        REQUIRE(n > 0, "the other process is gone");
        at += n;
    }
}

static int other(int from, int to) {
    cudaIpcMemHandle_t handle;
    take(from, &handle, sizeof handle);
    unsigned *data, *again;
    CHECK(cudaIpcOpenMemHandle((void **)&data, handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaIpcOpenMemHandle((void **)&again, handle, cudaIpcMemLazyEnablePeerAccess));
    REQUIRE(data == again, "opened twice, at two addresses");
    CHECK(cudaIpcCloseMemHandle(again));
    std::vector<unsigned> words(N);
    CHECK(cudaMemcpy(words.data(), data, N * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < N; i++) REQUIRE(words[i] == (unsigned)i * 2654435761u, "word %zu in the other process", i);
    turn<<<(N + 255) / 256, 256>>>(data, N);
    LAUNCHED();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcCloseMemHandle(data));
    REQUIRE(cudaIpcCloseMemHandle(data) == cudaErrorInvalidValue, "closed twice");
    cudaGetLastError();
    // A reset closes what is open.
    CHECK(cudaIpcOpenMemHandle((void **)&data, handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaDeviceReset());
    CHECK(cudaIpcOpenMemHandle((void **)&again, handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaMemcpy(words.data(), again, N * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < N; i++) REQUIRE(words[i] == ~((unsigned)i * 2654435761u), "word %zu after a reset", i);
    CHECK(cudaIpcCloseMemHandle(again));
    REQUIRE(cudaIpcCloseMemHandle(again) == cudaErrorInvalidValue, "still open after a reset");
    cudaGetLastError();
    give(to, "ok", 2);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 3 && std::string(argv[1]) == "other") return other(atoi(argv[2]), atoi(argv[3]));
    parse_options(argc, argv);
    int there[2], back[2];
    REQUIRE(pipe(there) == 0 && pipe(back) == 0, "no pipe");
    pid_t child = fork();
    REQUIRE(child >= 0, "no process");
    if (child == 0) {
        close(there[1]);
        close(back[0]);
        std::string from = std::to_string(there[0]), to = std::to_string(back[1]);
        execl("/proc/self/exe", argv[0], "other", from.c_str(), to.c_str(), (char *)nullptr);
        _exit(127);
    }
    close(there[0]);
    close(back[1]);
    unsigned *before, *data;
    // Not the first in its piece of memory.
    CHECK(cudaMalloc(&before, 4096));
    CHECK(cudaMalloc(&data, N * 4));
    std::vector<unsigned> words(N);
    for (size_t i = 0; i < N; i++) words[i] = (unsigned)i * 2654435761u;
    CHECK(cudaMemcpy(data, words.data(), N * 4, cudaMemcpyHostToDevice));
    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, data));
    void *own;
    REQUIRE(cudaIpcOpenMemHandle(&own, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess, "a process opens its own");
    cudaGetLastError();
    give(there[1], &handle, sizeof handle);
    char answer[2];
    take(back[0], answer, 2);
    CHECK(cudaMemcpy(words.data(), data, N * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < N; i++) REQUIRE(words[i] == ~((unsigned)i * 2654435761u), "word %zu after the other process", i);
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0, "the other process ended with %d", status);
    CHECK(cudaFree(data));
    CHECK(cudaFree(before));
    return pass("%zu words through two processes", N);
}
