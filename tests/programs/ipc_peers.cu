// Memory of device 0 that another process opens by its handle for kernels of device 1, and of both devices.
// The word `busy` is for rgpu only: CUDA's manual does not say that closing waits.
#define PROGRAM "ipc_peers"
#include "other_process.h"

#include <vector>

__global__ void turn(unsigned *data, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = ~data[i];
}
__global__ void spin_and_turn(unsigned *data, size_t n, long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) data[i] = ~data[i];
}

const size_t N = 300000;
const int BLOCKS = (N + 255) / 256;

static void require_words(const unsigned *data, unsigned flip, const char *where) {
    std::vector<unsigned> words(N);
    CHECK(cudaMemcpy(words.data(), data, N * 4, cudaMemcpyDefault));
    for (size_t i = 0; i < N; i++) REQUIRE(words[i] == ((unsigned)i * 2654435761u ^ flip), "word %zu %s", i, where);
}

// The devices in the order in which the other process opens the memory and launches.
static int other(int socket) {
    cudaIpcMemHandle_t handle;
    REQUIRE(recv(socket, &handle, sizeof handle, MSG_WAITALL) == sizeof handle, "the first process is gone");
    const int orders[][2] = {{1, 0}, {0, 1}};
    for (const int *order : orders) {
        unsigned *data[2];
        for (int i = 0; i < 2; i++) {
            CHECK(cudaSetDevice(order[i]));
            CHECK(cudaIpcOpenMemHandle((void **)&data[i], handle, cudaIpcMemLazyEnablePeerAccess));
            turn<<<BLOCKS, 256>>>(data[i], N);
            LAUNCHED();
            CHECK(cudaDeviceSynchronize());
            require_words(data[i], i ? 0 : ~0u, "in the other process");
        }
        for (int i = 0; i < 2; i++) {
            CHECK(cudaSetDevice(order[i]));
            CHECK(cudaIpcCloseMemHandle(data[i]));
        }
    }
    if (getenv("BUSY")) {
        // Closed by another device while a kernel uses it.
        unsigned *data;
        CHECK(cudaSetDevice(1));
        CHECK(cudaIpcOpenMemHandle((void **)&data, handle, cudaIpcMemLazyEnablePeerAccess));
        spin_and_turn<<<1, 256>>>(data, 256, 50000000);
        spin_and_turn<<<1, 256>>>(data, 256, 50000000);
        LAUNCHED();
        CHECK(cudaSetDevice(0));
        CHECK(cudaIpcCloseMemHandle(data));
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceSynchronize());
        // An error of the device that uses it is no error of the one that closes it.
        CHECK(cudaIpcOpenMemHandle((void **)&data, handle, cudaIpcMemLazyEnablePeerAccess));
        turn<<<1, 256>>>(nullptr, 256);
        REQUIRE(cudaDeviceSynchronize() != cudaSuccess, "a kernel wrote at address 0");
        CHECK(cudaSetDevice(0));
        CHECK(cudaIpcCloseMemHandle(data));
    }
    REQUIRE(write(socket, "ok", 2) == 2, "the first process is gone");
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && std::string(argv[1]) == "other") return other(atoi(argv[2]));
    if (parse_options(argc, argv).word == "busy") setenv("BUSY", "1", 1);
    const OtherProcess second = start_other(argv);
    int count = 0, can = 0;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count >= 2, "there are not two devices");
    CHECK(cudaDeviceCanAccessPeer(&can, 1, 0));
    REQUIRE(can, "device 1 cannot access memory of device 0");
    unsigned *data;
    CHECK(cudaMalloc(&data, N * 4));
    std::vector<unsigned> words(N);
    for (size_t i = 0; i < N; i++) words[i] = (unsigned)i * 2654435761u;
    CHECK(cudaMemcpy(data, words.data(), N * 4, cudaMemcpyHostToDevice));
    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, data));
    REQUIRE(write(second.socket, &handle, sizeof handle) == sizeof handle, "the other process is gone");
    char answer[2];
    int status;
    REQUIRE(recv(second.socket, answer, 2, MSG_WAITALL) == 2, "the other process is gone");
    REQUIRE(waitpid(second.pid, &status, 0) == second.pid && status == 0, "the other process ended with %d", status);
    require_words(data, 0, "after the other process");
    CHECK(cudaFree(data));
    return pass("kernels of device 1 in another process reach memory of device 0");
}
