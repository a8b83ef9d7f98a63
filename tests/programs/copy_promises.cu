// A synchronous copy to the device promises that everything before it on its stream is done: for the host, for events and streams, and for streams beside it.
#define PROGRAM "copy_promises"
#include "common.h"

#include <vector>

const int SIZE = 16 << 10;
const int LONG = 400000;

__device__ int symbol[64];

// Takes its time, and writes at the end of it.
__global__ void late(int rounds, int *out, int n, int value) {
    unsigned x = threadIdx.x + 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525u + 1013904223u;
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = x == 0 ? -1 : value;
    __threadfence_system();
}

// Counts in `wrong` what does not hold these values.
__global__ void check(const int *a, int n, int value, const int *b, int m, int other, int *wrong) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (a[i] != value) atomicAdd(wrong, 1);
    for (int i = threadIdx.x; i < m; i += blockDim.x)
        if (b[i] != other) atomicAdd(wrong, 1);
}

// Ends when another stream has set the word.
__global__ void until(volatile int *word) {
    while (*word == 0) {
    }
}

int main() {
    int *before, *copied, *wrong, *symbol_address;
    CHECK(cudaMalloc(&before, SIZE * sizeof(int)));
    CHECK(cudaMalloc(&copied, SIZE * sizeof(int)));
    CHECK(cudaMalloc(&wrong, sizeof(int)));
    CHECK(cudaMemset(wrong, 0, sizeof(int)));
    CHECK(cudaGetSymbolAddress((void **)&symbol_address, symbol));
    std::vector<int> host(SIZE);
    CHECK(cudaDeviceSynchronize());

    // Events and streams, before there is any other stream that is not behind the default stream.
    cudaEvent_t start, stop;
    cudaStream_t blocking;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    CHECK(cudaStreamCreate(&blocking));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaEventRecord(start, blocking));
        late<<<1, 32, 0, blocking>>>(LONG, before, SIZE, round);
        CHECK(cudaEventRecord(stop, blocking));
        CHECK(cudaMemcpy(copied, host.data(), 64, cudaMemcpyHostToDevice));
        float ms = -1;
        if (round == 0) CHECK(cudaEventQuery(stop));
        if (round == 1) CHECK(cudaStreamQuery(blocking));
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        REQUIRE(ms > 0, "the kernel took %g ms", ms);
    }

    // A wait for a blocking stream passes the default stream's copy, and what that has passed.
    cudaStream_t passing;
    CHECK(cudaStreamCreate(&passing));
    CHECK(cudaEventRecord(start, blocking));
    late<<<1, 32, 0, blocking>>>(LONG, before, SIZE, 3);
    CHECK(cudaEventRecord(stop, blocking));
    CHECK(cudaMemcpyAsync(copied, host.data(), 64, cudaMemcpyHostToDevice, cudaStreamLegacy));
    CHECK(cudaMemcpyAsync(copied, host.data(), 64, cudaMemcpyHostToDevice, passing));
    CHECK(cudaStreamSynchronize(passing));
    float ms = -1;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    REQUIRE(ms > 0, "the kernel before a passed copy took %g ms", ms);
    CHECK(cudaStreamDestroy(passing));

    // A stream that is made after the copy, and streams that were there before; copies of several forms and sizes.
    int rounds = 0;
    std::vector<cudaStream_t> beside;
    for (int made = 0; made < 3; made++) {
        const char *forms[] = {"few bytes", "a row", "rows", "a symbol", "two copies"};
        for (int form = 0; form < 5; form++) {
            for (int idle = 0; idle < 2; idle++) {
                int value = 1000 + ++rounds;
                for (int i = 0; i < SIZE; i++) host[i] = value;
                if (!idle) late<<<1, 32, 0, form % 2 ? blocking : 0>>>(LONG, before, SIZE, value);
                int *target = copied, n = SIZE;
                if (form == 0) CHECK(cudaMemcpy(copied, host.data(), (n = 16) * sizeof(int), cudaMemcpyHostToDevice));
                if (form == 1) CHECK(cudaMemcpy(copied, host.data(), SIZE * sizeof(int), cudaMemcpyHostToDevice));
                if (form == 2) CHECK(cudaMemcpy2D(copied, 256, host.data(), 512, 256, (n = SIZE / 2) / 64, cudaMemcpyHostToDevice));
                if (form == 3) {
                    CHECK(cudaMemcpyToSymbol(symbol, host.data(), sizeof symbol));
                    target = symbol_address, n = 64;
                }
                if (form == 4) {
                    CHECK(cudaMemcpy(copied + SIZE / 2, host.data(), SIZE / 2 * sizeof(int), cudaMemcpyHostToDevice));
                    CHECK(cudaMemcpy(copied, host.data(), SIZE / 2 * sizeof(int), cudaMemcpyHostToDevice));
                }
                if (made == (int)beside.size()) {
                    beside.emplace_back();
                    CHECK(cudaStreamCreateWithFlags(&beside.back(), cudaStreamNonBlocking));
                }
                for (cudaStream_t stream : beside) check<<<1, 64, 0, stream>>>(before, idle ? 0 : SIZE, value, target, n, value, wrong);
                for (cudaStream_t stream : beside) CHECK(cudaStreamSynchronize(stream));
                int found = -1;
                CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
                REQUIRE(found == 0, "%s, %s: %d values were not there yet", forms[form], idle ? "nothing before" : "a kernel before", found);
            }
        }
    }

    // What comes after the copy on its stream holds up no other stream: here it waits for what the other one copies.
    int *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    CHECK(cudaMemset(word, 0, sizeof *word));
    late<<<1, 32>>>(LONG, before, SIZE, 1);
    CHECK(cudaMemcpy(copied, host.data(), 64, cudaMemcpyHostToDevice));
    until<<<1, 1>>>(word);
    int one = 1;
    CHECK(cudaMemcpyAsync(word, &one, sizeof one, cudaMemcpyHostToDevice, beside[0]));
    CHECK(cudaDeviceSynchronize());

    // The host, by page-locked and managed memory and by functions of its own.
    volatile int *flag;
    int *device_flag, *managed;
    CHECK(cudaHostAlloc((void **)&flag, sizeof(int), cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer((void **)&device_flag, (void *)flag, 0));
    CHECK(cudaMallocManaged(&managed, sizeof(int)));
    for (int size = 4; size <= 64 << 10; size *= 16) {
        *flag = 0;
        late<<<1, 32>>>(LONG, device_flag, 1, size);
        CHECK(cudaMemcpy(copied, host.data(), size, cudaMemcpyHostToDevice));
        REQUIRE(*flag == size, "%d bytes: the host found %d in mapped memory", size, *flag);
        late<<<1, 32, 0, blocking>>>(LONG, managed, 1, size);
        CHECK(cudaMemcpy2D(copied, 4, host.data(), 8, 4, size / 4, cudaMemcpyHostToDevice));
        REQUIRE(*managed == size, "%d bytes: the host found %d in managed memory", size, *managed);
        int called = 0;
        late<<<1, 32, 0, blocking>>>(LONG, before, 1, size);
        CHECK(cudaLaunchHostFunc(blocking, [](void *data) { *(int *)data = 1; }, &called));
        CHECK(cudaMemcpy(copied, host.data(), size, cudaMemcpyHostToDevice));
        REQUIRE(called, "%d bytes: the function before the copy was not called", size);
    }
    return pass("%d copies with streams beside them", rounds);
}
