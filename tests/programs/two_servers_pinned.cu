// Pinned memory that kernels of two devices use, each on a server of its own, as they use it natively: at the same time, one after the other by an event, through a flag, beside copies in the same stream, and
// with the program between them.
#define PROGRAM "two_servers_pinned"
#include "common.h"
#include "cases.h"

#include <cstdlib>
#include <cstring>
#include <vector>

static const int N = 1 << 10, THREADS = 128, BLOCKS = N / THREADS;

static void set_device(int device) { CHECK(cudaSetDevice(device)); }

// Adds to every pair of words whose number leaves `rest` when divided by `of`.
__global__ void add_some(int *data, int n, int of, int rest, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && i / 2 % of == rest) data[i] += by;
}

__global__ void multiply(const int *from, int *to, int n, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i] * by;
}

// Waits for a word, writes a row of words, and then another word.
__global__ void write_behind(volatile int *start, volatile int *row, volatile int *done, int round) {
    if (threadIdx.x == 0) {
        while (*start < round) {
        }
    }
    __syncthreads();
    row[threadIdx.x] = round * 1000 + threadIdx.x;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) *done = round;
}

// Waits for a word, reads the row, and counts what is wrong there.
__global__ void read_behind(volatile int *done, const volatile int *row, int *wrong, int round) {
    if (threadIdx.x == 0) {
        while (*done < round) {
        }
        __threadfence_system();
    }
    __syncthreads();
    if (row[threadIdx.x] != round * 1000 + int(threadIdx.x)) atomicAdd(wrong, 1);
}

// Each device changes a third of the pairs of words and the program another one, all at the same time.
static void thirds(int *data, int n, const char *what) {
    for (int i = 0; i < n; i++) data[i] = i;
    for (int round = 1; round <= 20; round++) {
        for (int device = 0; device < 2; device++) {
            set_device(device);
            add_some<<<(n + THREADS - 1) / THREADS, THREADS>>>(data, n, 3, device, 1 + device);
        }
        for (int i = 0; i < n; i++) {
            if (i / 2 % 3 == 2) data[i] += 5;
        }
        for (int device = 0; device < 2; device++) {
            set_device(device);
            CHECK(cudaDeviceSynchronize());
        }
        const int by[] = {1, 2, 5};
        int wrong = 0;
        for (int i = 0; i < n; i++) wrong += data[i] != i + round * by[i / 2 % 3];
        expect_value(what, 0, wrong);
        if (wrong) return;
    }
}

// The second device's kernel comes behind the first one's, and the program waits for neither in between.
static void in_order(int *data) {
    cudaStream_t streams[2];
    cudaEvent_t event;
    int *results;
    set_device(1);
    CHECK(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking));
    CHECK(cudaMalloc(&results, N * sizeof(int)));
    set_device(0);
    CHECK(cudaStreamCreateWithFlags(&streams[0], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int i = 0; i < N; i++) data[i] = i;
    for (int round = 1; round <= 20; round++) {
        set_device(0);
        add_some<<<BLOCKS, THREADS, 0, streams[0]>>>(data, N, 1, 0, 1);
        CHECK(cudaEventRecord(event, streams[0]));
        set_device(1);
        CHECK(cudaStreamWaitEvent(streams[1], event, 0));
        multiply<<<BLOCKS, THREADS, 0, streams[1]>>>(data, results, N, 3);
        std::vector<int> found(N);
        CHECK(cudaMemcpyAsync(found.data(), results, N * sizeof(int), cudaMemcpyDeviceToHost, streams[1]));
        CHECK(cudaStreamSynchronize(streams[1]));
        int wrong = 0;
        for (int i = 0; i < N; i++) wrong += found[i] != (i + round) * 3;
        expect_value("words that the second device found behind an event", 0, wrong);
    }
    CHECK(cudaFree(results));
}

// The kernels of both devices run at the same time, and wait for each other and for the program.
static void by_flags(int *data) {
    int *start = data, *done = data + 16, *row = data + 64, *wrong, found = -1;
    memset(data, 0, N * sizeof(int));
    set_device(1);
    CHECK(cudaMalloc(&wrong, sizeof(int)));
    CHECK(cudaMemset(wrong, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    for (int round = 1; round <= 10; round++) {
        set_device(1);
        read_behind<<<1, THREADS>>>(done, row, wrong, round);
        set_device(0);
        write_behind<<<1, THREADS>>>(start, row, done, round);
        *static_cast<volatile int *>(start) = round;
        for (int device = 0; device < 2; device++) {
            set_device(device);
            CHECK(cudaDeviceSynchronize());
        }
    }
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    expect_value("words that were not there when the flag was", 0, found);
    CHECK(cudaFree(wrong));
}

// Copies from and to the memory see what kernels of their stream did, and kernels see what copies did. The first `devices` devices take turns.
static void beside_copies(int *data, int devices) {
    int *there[2];
    for (int device = 0; device < devices; device++) {
        set_device(device);
        CHECK(cudaMalloc(&there[device], N * sizeof(int)));
    }
    for (int i = 0; i < N; i++) data[i] = i;
    for (int round = 0; round < 20; round++) {
        int device = round % devices, wrong = 0;
        set_device(device);
        add_some<<<BLOCKS, THREADS>>>(data, N, 1, 0, 1);
        CHECK(cudaMemcpyAsync(there[device], data, N * sizeof(int), cudaMemcpyHostToDevice));
        add_some<<<BLOCKS, THREADS>>>(there[device], N, 1, 0, 1);
        CHECK(cudaMemcpyAsync(data, there[device], N * sizeof(int), cudaMemcpyDeviceToHost));
        add_some<<<BLOCKS, THREADS>>>(data, N, 1, 0, 1);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < N; i++) wrong += data[i] != i + 3 * (round + 1);
        expect_value("words after kernels and copies", 0, wrong);
    }
    for (int device = 0; device < devices; device++) {
        set_device(device);
        CHECK(cudaFree(there[device]));
    }
}

// Only the second device's kernels have used the first one's memory when the second one is reset.
static void after_its_only_user() {
    const int large = 1 << 18;
    const size_t bytes = large * sizeof(int);
    int *data, *there, wrong = 0;
    set_device(0);
    CHECK(cudaMallocHost(&data, bytes));
    CHECK(cudaMalloc(&there, bytes));
    for (int i = 0; i < large; i++) data[i] = i;
    set_device(1);
    add_some<<<large / THREADS, THREADS>>>(data, large, 1, 0, 1);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < large; i++) wrong += data[i] != i + 1;
    expect_value("words after the second device's kernel", 0, wrong);
    CHECK(cudaDeviceReset());
    set_device(0);
    for (int i = 0; i < large; i++) data[i] = 3 * i;
    CHECK(cudaMemcpy(there, data, bytes, cudaMemcpyHostToDevice));
    memset(data, 0, bytes);
    CHECK(cudaMemcpy(data, there, bytes, cudaMemcpyDeviceToHost));
    wrong = 0;
    for (int i = 0; i < large; i++) wrong += data[i] != 3 * i;
    expect_value("words that were copied there and back after the reset", 0, wrong);
    set_device(1);
    add_some<<<large / THREADS, THREADS>>>(data, large, 1, 0, 1);
    CHECK(cudaDeviceSynchronize());
    wrong = 0;
    for (int i = 0; i < large; i++) wrong += data[i] != 3 * i + 1;
    expect_value("words after the second device's next kernel", 0, wrong);
    set_device(0);
    CHECK(cudaFree(there));
    CHECK(cudaFreeHost(data));
}

int main() {
    int count, *data;
    CHECK(cudaGetDeviceCount(&count));
    if (count < 2) fail("there are not two devices");
    set_device(0);
    CHECK(cudaHostAlloc(&data, N * sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped));
    thirds(data, N, "words that two devices and the program change");
    in_order(data);
    by_flags(data);
    beside_copies(data, 2);
    CHECK(cudaFreeHost(data));

    // The program's own memory, in the middle of pages that have other memory of its, too.
    const int odd = 3001;
    char *own = static_cast<char *>(malloc(odd * sizeof(int) + 200));
    memset(own, 77, odd * sizeof(int) + 200);
    int *registered = reinterpret_cast<int *>(own + 104);
    set_device(1);
    CHECK(cudaHostRegister(registered, odd * sizeof(int), cudaHostRegisterPortable));
    thirds(registered, odd, "words of registered memory");
    set_device(0);
    add_some<<<24, THREADS>>>(registered, odd, 1, 0, 7);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaHostUnregister(registered));
    int wrong = 0;
    const int by[] = {20, 40, 100};
    for (int i = 0; i < odd; i++) wrong += registered[i] != i + by[i / 2 % 3] + 7;
    for (int i = 0; i < 104; i++) wrong += own[i] != 77 || own[104 + odd * sizeof(int) + i % 96] != 77;
    expect_value("words of memory that is not registered any more", 0, wrong);
    free(own);

    // Many pieces one after the other.
    for (int round = 0; round < 10; round++) {
        set_device(round % 2);
        CHECK(cudaMallocHost(&data, N * sizeof(int)));
        thirds(data, N, "words of memory that is new");
        CHECK(cudaFreeHost(data));
    }
    // The first device goes on with the memory after the second one was reset.
    set_device(0);
    CHECK(cudaMallocHost(&data, N * sizeof(int)));
    thirds(data, N, "words before a reset");
    set_device(1);
    CHECK(cudaDeviceReset());
    beside_copies(data, 1);
    set_device(0);
    CHECK(cudaFreeHost(data));
    after_its_only_user();
    if (mismatches) fail("%d of %d cases: %s", mismatches, cases, first_mismatch.c_str());
    return pass("%d cases", cases);
}
