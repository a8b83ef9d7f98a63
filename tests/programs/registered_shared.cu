// Memory that two processes share is registered by one of them, whose kernels and copies use it: each sees what the other has written.
#define PROGRAM "registered_shared"
#include "common.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

// Small enough for kernels on another machine, at no page's beginning.
const int OFFSET = 25, N = 50000;
// Only for copies.
const int LARGE = 1 << 20;

__global__ void add(int *p, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i]++;
}

__global__ void count(const int *p, int n, int start, int *same) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (p[i] == start + i) atomicAdd(same, 1);
}

static int *shared_memory(bool file, size_t size) {
    int fd = file ? memfd_create("registered_shared", 0) : -1;
    REQUIRE(!file || (fd >= 0 && ftruncate(fd, size) == 0), "no file");
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | (file ? 0 : MAP_ANONYMOUS), fd, 0);
    REQUIRE(memory != MAP_FAILED, "no shared memory");
    return (int *)memory;
}

static void fill(int *p, int n, int start) {
    for (int i = 0; i < n; i++) p[i] = start + i;
}

static int wrong(const int *p, int n, int start) {
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += p[i] != start + i;
    return wrong;
}

// What the other process is to do: look for values, or write them.
struct Order {
    bool write;
    bool large;
    int start;
};

static void obey(int socket, int *small, int *large) {
    Order order;
    while (read(socket, &order, sizeof order) == sizeof order) {
        int *p = order.large ? large : small, n = order.large ? LARGE : N, answer = 0;
        if (order.write)
            fill(p, n, order.start);
        else
            answer = wrong(p, n, order.start);
        if (write(socket, &answer, sizeof answer) != sizeof answer) break;
    }
    _exit(0);
}

static int ask(int socket, Order order) {
    int answer = -1;
    REQUIRE(write(socket, &order, sizeof order) == sizeof order && read(socket, &answer, sizeof answer) == sizeof answer, "the other process is gone");
    return answer;
}

static void both(bool file) {
    int *small = shared_memory(file, (OFFSET + N) * 4) + OFFSET, *large = shared_memory(file, LARGE * 4ul);
    fill(small, N, 1);
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0, "no process");
    if (child == 0) {
        close(ends[0]);
        obey(ends[1], small, large);
    }
    close(ends[1]);
    auto sees = [&](bool large, int start, const char *when) {
        int wrong = ask(ends[0], {false, large, start});
        REQUIRE(wrong == 0, "%s, the other process finds %d words wrong", when, wrong);
    };
    auto writes = [&](bool large, int start) { ask(ends[0], {true, large, start}); };

    int *device, *same, found = -1;
    CHECK(cudaMalloc(&device, LARGE * 4ul));
    CHECK(cudaMalloc(&same, 4));
    CHECK(cudaHostRegister(small, N * 4, cudaHostRegisterMapped));
    CHECK(cudaHostRegister(large, LARGE * 4ul, cudaHostRegisterDefault));
    auto counted = [&](int start, const char *when) {
        CHECK(cudaMemset(same, 0, 4));
        count<<<1, 128>>>(small, N, start, same);
        LAUNCHED();
        CHECK(cudaMemcpy(&found, same, 4, cudaMemcpyDeviceToHost));
        REQUIRE(found == N, "%s, a kernel finds %d words right", when, found);
    };
    // Kernels that only read leave it to the other process.
    counted(1, "at first");
    sees(false, 1, "after a kernel has read");
    add<<<1, 128>>>(small, N);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(wrong(small, N, 2) == 0, "this process does not see what a kernel has written");
    sees(false, 2, "after a kernel has written");
    writes(false, 10);
    counted(10, "after the other process has written");
    REQUIRE(wrong(small, N, 10) == 0, "this process does not see what the other has written");
    fill(small, N, 20);
    sees(false, 20, "after this process has written");
    counted(20, "after this process has written");

    // Copies, of what kernels use and of what they don't.
    for (bool big : {false, true}) {
        int *p = big ? large : small, n = big ? LARGE : N;
        writes(big, 30);
        CHECK(cudaMemcpyAsync(device, p, n * 4ul, cudaMemcpyHostToDevice, 0));
        CHECK(cudaDeviceSynchronize());
        writes(big, 40);
        CHECK(cudaMemcpyAsync(p, device, n * 4ul, cudaMemcpyDeviceToHost, 0));
        CHECK(cudaDeviceSynchronize());
        REQUIRE(wrong(p, n, 30) == 0, "a copy comes back with %d words wrong", wrong(p, n, 30));
        sees(big, 30, "after a copy");
        writes(big, 50);
        CHECK(cudaMemcpy(device, p, n * 4ul, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(p, 0xff, 4ul * n));
        CHECK(cudaDeviceSynchronize());
        REQUIRE(p[0] == -1 && p[n - 1] == -1, "a fill has not come");
        CHECK(cudaMemcpy(p, device, n * 4ul, cudaMemcpyDeviceToHost));
        sees(big, 50, "after a fill and a synchronous copy");
    }

    add<<<1, 128>>>(small, N);
    CHECK(cudaHostUnregister(small));
    CHECK(cudaHostUnregister(large));
    REQUIRE(wrong(small, N, 51) == 0, "after unregistering, words are wrong here");
    sees(false, 51, "after unregistering");
    writes(false, 60);
    REQUIRE(wrong(small, N, 60) == 0, "after unregistering, the memory is no longer shared");
    CHECK(cudaFree(device));
    CHECK(cudaFree(same));
    close(ends[0]);
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0, "the other process ended with %x", status);
}

__global__ void write_late(int *p, int n, int start, volatile int *rounds) {
    for (int i = 0; i < 200000; i++) *rounds = *rounds + 1;
    for (int i = 0; i < n; i++) p[i] = start + i;
}

// The same pages at two addresses of this process: kernels write them at one, and synchronous copies read them at the other, which may be registered, too.
static void at_two_addresses(bool registered) {
    const int pitch = 4096, row = 2048, rows = N * 4 / pitch;
    int fd = memfd_create("registered_shared", 0);
    REQUIRE(fd >= 0 && ftruncate(fd, N * 4) == 0, "no file");
    int *at[2], *device, *rounds;
    for (int *&p : at) {
        p = (int *)mmap(nullptr, N * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REQUIRE(p != MAP_FAILED, "no shared memory");
    }
    CHECK(cudaMalloc(&device, N * 4));
    CHECK(cudaMalloc(&rounds, 4));
    CHECK(cudaHostRegister(at[0], N * 4, cudaHostRegisterMapped));
    if (registered) CHECK(cudaHostRegister(at[1], N * 4, cudaHostRegisterDefault));
    static int copied[N];
    add<<<1, 128>>>(at[0], N);
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < 8; round++) {
        const char *what = round % 2 ? "rows" : "a copy";
        memset(copied, 0, sizeof copied);
        write_late<<<1, 1>>>(at[0], N, round + 2, rounds);
        if (round % 2)
            CHECK(cudaMemcpy2D(device, pitch, at[1], pitch, row, rows, cudaMemcpyHostToDevice));
        else
            CHECK(cudaMemcpy(device, at[1], N * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(copied, device, N * 4, cudaMemcpyDeviceToHost));
        int wrong_words = 0;
        for (int i = 0; i < rows * pitch / 4; i++) wrong_words += (i % (pitch / 4) < row / 4 || round % 2 == 0) && copied[i] != round + 2 + i;
        REQUIRE(wrong_words == 0, "%s from the other %s address has %d words wrong", what, registered ? "registered" : "pageable", wrong_words);
    }
    for (int i = 0; i < 1 + registered; i++) CHECK(cudaHostUnregister(at[i]));
    for (int *p : at) munmap(p, N * 4);
    close(fd);
    CHECK(cudaFree(device));
    CHECK(cudaFree(rounds));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    both(false);
    both(true);
    for (bool registered : {true, false}) at_two_addresses(registered);
    return pass("anonymous memory and a file's, at two addresses");
}
