// Pinned and managed memory that kernels use, when the program learns in other ways than by cudaDeviceSynchronize that work is done, or tells kernels that data is there.
#define PROGRAM "mapped_waits"
#include "common.h"

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

static const int WORDS = 64 << 10;
static std::string only;

template <class T> static T *mapped(size_t count) {
    T *memory;
    CHECK(cudaHostAlloc(&memory, count * sizeof *memory, cudaHostAllocMapped));
    return memory;
}

template <class T> static T *on_device(size_t count) {
    T *memory;
    CHECK(cudaMalloc(&memory, count * sizeof *memory));
    CHECK(cudaMemset(memory, 0, count * sizeof *memory));
    return memory;
}

static cudaStream_t beside() {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

// Fills memory after the program has set a word.
__global__ void fill_when_told(const volatile int *word, int round, int *memory, int words, int value) {
    while (*word < round) {
    }
    for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = value + i;
}

// Waits for a word for each round, and compares the data of the round.
__global__ void compare(const volatile int *word, int rounds, const volatile int *data, int words, int *wrong, volatile int *confirmed) {
    for (int round = 1; round <= rounds; round++) {
        while (*word < round) {
        }
        __threadfence_system();
        for (int i = 0; i < words; i++)
            if (data[i] != round * 1000 + i) ++*wrong;
        __threadfence_system();
        *confirmed = round;
    }
}

// Writes data for each round, then a word, and waits until the program has seen it.
__global__ void produce(const volatile int *seen, int rounds, volatile int *data, int words, volatile int *word) {
    for (int round = 1; round <= rounds; round++) {
        for (int i = 0; i < words; i++) data[i] = round * 1000 + i;
        __threadfence_system();
        *word = round;
        while (*seen < round) {
        }
    }
}

__global__ void compare_zero(const int *memory, int words, int *wrong) {
    for (int i = 0; i < words; i++)
        if (memory[i] != 0) ++*wrong;
}

__global__ void put(int *memory, int words, int value) {
    for (int i = 0; i < words; i++) memory[i] = value;
}

// The program writes data, and then tells a running kernel by a copy or a fill of device memory.
static void told_by(const char *what, cudaError_t (*tell)(int *, int, cudaStream_t)) {
    const int rounds = 20, words = 3000;
    int *word = on_device<int>(1), *wrong = on_device<int>(1), found = -1;
    int *data = mapped<int>(words), *confirmed = mapped<int>(1);
    cudaStream_t stream = beside(), other = beside();
    CHECK(cudaDeviceSynchronize());
    *(volatile int *)confirmed = 0;
    compare<<<1, 1, 0, stream>>>(word, rounds, data, words, wrong, confirmed);
    CHECK(cudaGetLastError());
    for (int round = 1; round <= rounds; round++) {
        for (int i = 0; i < words; i++) data[i] = round * 1000 + i;
        CHECK(tell(word, round, other));
        while (*(volatile int *)confirmed < round) std::this_thread::yield();
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "a kernel that was told by %s saw %d old words", what, found);
    for (int *memory : {data, confirmed}) CHECK(cudaFreeHost(memory));
    for (int *memory : {word, wrong}) CHECK(cudaFree(memory));
    for (cudaStream_t one : {stream, other}) CHECK(cudaStreamDestroy(one));
}

static cudaError_t by_copy(int *word, int round, cudaStream_t stream) {
    return cudaMemcpyAsync(word, &round, sizeof round, cudaMemcpyHostToDevice, stream);
}

static cudaError_t by_fill(int *word, int round, cudaStream_t stream) { return cudaMemsetAsync(word, round, 1, stream); }

static cudaError_t by_written_value(int *word, int round, cudaStream_t stream) {
    return cuStreamWriteValue32(stream, (CUdeviceptr)word, round, 0) == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

// What the program has read while a kernel worked is current once it knows in another way that the kernel is done.
static void known_by(const char *what, void (*learn)(cudaStream_t, int *, int *)) {
    int *memory = mapped<int>(WORDS), *other = mapped<int>(WORDS), *word = mapped<int>(1), *device = on_device<int>(WORDS);
    cudaStream_t stream = beside();
    for (int round = 1; round <= 8; round++) {
        *(volatile int *)word = 0;
        CHECK(cudaDeviceSynchronize());
        fill_when_told<<<1, 64, 0, stream>>>(word, 1, memory, WORDS, round * 1000003);
        CHECK(cudaGetLastError());
        long sum = 0;
        for (int i = 0; i < WORDS; i++) sum += ((volatile int *)memory)[i];
        REQUIRE(round > 1 || sum == 0, "the sum is %ld", sum);
        *(volatile int *)word = 1;
        learn(stream, device, other);
        for (int i = WORDS - 1; i >= 0; i -= 7) {
            int found = ((volatile int *)memory)[i];
            REQUIRE(found == round * 1000003 + i, "%s, round %d: word %d is %d", what, round, i, found);
        }
    }
    CHECK(cudaDeviceSynchronize());
    for (int *one : {memory, other, word}) CHECK(cudaFreeHost(one));
    CHECK(cudaFree(device));
    CHECK(cudaStreamDestroy(stream));
}

static void by_pageable_copy(cudaStream_t stream, int *device, int *) {
    int word;
    CHECK(cudaMemcpyAsync(&word, device, sizeof word, cudaMemcpyDeviceToHost, stream));
}

static void by_long_pageable_copy(cudaStream_t stream, int *device, int *) {
    static int words[WORDS];
    CHECK(cudaMemcpyAsync(words, device, sizeof words, cudaMemcpyDeviceToHost, stream));
}

static void by_pageable_rows(cudaStream_t stream, int *device, int *) {
    int words[64];
    CHECK(cudaMemcpy2DAsync(words, 64, device, 256, 32, 4, cudaMemcpyDeviceToHost, stream));
}

static void by_host_copy(cudaStream_t stream, int *, int *) {
    int from = 1, to = 0;
    CHECK(cudaMemcpyAsync(&to, &from, sizeof to, cudaMemcpyHostToHost, stream));
}

static void by_freeing(cudaStream_t, int *, int *) {
    void *memory;
    CHECK(cudaMalloc(&memory, 1000));
    CHECK(cudaFree(memory));
}

static void by_elapsed_time(cudaStream_t stream, int *, int *) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaEventRecord(end, stream));
    float time;
    cudaError_t status;
    while ((status = cudaEventElapsedTime(&time, begin, end)) == cudaErrorNotReady) std::this_thread::yield();
    CHECK(status);
    cudaGetLastError();
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
}

// A copy from pageable memory to pinned memory that kernels use is done when it returns.
static void copied_from_pageable() {
    cudaStream_t stream = beside();
    int *memory = mapped<int>(16 * WORDS), *source = (int *)malloc(16 * WORDS * sizeof(int));
    for (int round = 1; round <= 30; round++) {
        int words = round % 3 == 0 ? 16 * WORDS : round % 3 == 1 ? WORDS : 300;
        for (int i = 0; i < words; i++) source[i] = round * 1000003 + i;
        if (round % 2) CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(memory, source, words * sizeof(int), cudaMemcpyDefault));
        for (int i = words - 1; i >= 0; i -= 13) REQUIRE(memory[i] == source[i], "round %d: word %d of a copy is %d", round, i, memory[i]);
        for (int i = 0; i < words; i++) source[i] = round * 1000033 + i;
        CHECK(cudaMemcpyAsync(memory, source, words * sizeof(int), cudaMemcpyDefault, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = words - 1; i >= 0; i -= 13) REQUIRE(memory[i] == source[i], "round %d: word %d of an asynchronous copy is %d", round, i, memory[i]);
        CHECK(cudaMemcpy2D(memory, 4096, source, 1024, 1024, words / 1024, cudaMemcpyDefault));
        for (int y = words / 1024 - 1; y >= 0; y--) REQUIRE(memory[y * 1024] == source[y * 256], "round %d: row %d of a copy begins with %d", round, y, memory[y * 1024]);
    }
    CHECK(cudaFreeHost(memory));
    CHECK(cudaStreamDestroy(stream));
    free(source);
}

// Pinned memory that shares a page with other pinned memory is registered anew, with other bytes.
static void registered_again() {
    char *pages = (char *)aligned_alloc(4096, 8 * 4096);
    memset(pages, 0, 8 * 4096);
    char *beside = pages + 7 * 4096 + 2048;
    int words = (int)(beside - pages) / (int)sizeof(int), *wrong = on_device<int>(1), found = -1;
    CHECK(cudaHostRegister(pages, beside - pages, cudaHostRegisterMapped));
    put<<<1, 1>>>((int *)pages, words, 7);
    CHECK(cudaHostRegister(beside, 1024, cudaHostRegisterMapped));
    put<<<1, 1>>>((int *)beside, 256, 9);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(((int *)pages)[words - 1] == 7 && ((int *)pages)[0] == 7 && *(int *)beside == 9, "kernels have written nothing");
    CHECK(cudaHostUnregister(pages));
    memset(pages, 0, beside - pages);
    CHECK(cudaHostRegister(pages, beside - pages, cudaHostRegisterMapped));
    compare_zero<<<1, 1>>>((int *)pages, words, wrong);
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "a kernel saw %d words from before the memory was cleared and registered again", found);
    CHECK(cudaHostUnregister(pages));
    CHECK(cudaHostUnregister(beside));
    free(pages);
    CHECK(cudaFree(wrong));
}

// Data in a page that pinned memory shares with other memory, and a word in a page of its own tells that it is there. Over `local` there is no such order (decision 11), so this case has to be asked for.
static void data_in_a_shared_page() {
    const int rounds = 20, words = 900;
    char *pages = (char *)aligned_alloc(4096, 8192);
    memset(pages, 0, 8192);
    int *data = (int *)(pages + 72), *wrong = on_device<int>(1), found = -1;
    CHECK(cudaHostRegister(data, words * sizeof(int), cudaHostRegisterMapped));
    volatile int *word = mapped<int>(1), *confirmed = mapped<int>(1);
    *word = *confirmed = 0;
    CHECK(cudaDeviceSynchronize());
    compare<<<1, 1>>>((int *)word, rounds, data, words, wrong, (int *)confirmed);
    CHECK(cudaGetLastError());
    for (int round = 1; round <= rounds; round++) {
        for (int i = 0; i < words; i++) data[i] = round * 1000 + i;
        std::atomic_thread_fence(std::memory_order_seq_cst);
        *word = round;
        while (*confirmed < round) std::this_thread::yield();
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    REQUIRE(found == 0, "a kernel saw %d old words in a page that other memory shares", found);
    *word = *confirmed = 0;
    produce<<<1, 1>>>((int *)confirmed, rounds, data, words, (int *)word);
    CHECK(cudaGetLastError());
    for (int round = 1; round <= rounds; round++) {
        while (*word < round) std::this_thread::yield();
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (int i = 0; i < words; i++)
            REQUIRE(((volatile int *)data)[i] == round * 1000 + i, "round %d: word %d in a page that other memory shares is %d", round, i, data[i]);
        *confirmed = round;
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaHostUnregister(data));
    free(pages);
    for (volatile int *memory : {word, confirmed}) CHECK(cudaFreeHost((void *)memory));
    CHECK(cudaFree(wrong));
}

static std::mutex lock;
static std::condition_variable changed;
static bool running, may_end;

static void CUDART_CB wait_for_program(void *) {
    std::unique_lock<std::mutex> guard(lock);
    running = true;
    changed.notify_all();
    changed.wait(guard, [] { return may_end; });
}

// A synchronous copy of managed memory is done when it returns, also while a host function runs.
static void managed_beside_a_host_function() {
    int *memory, *word = mapped<int>(1), *device = on_device<int>(WORDS), *out = on_device<int>(WORDS);
    CHECK(cudaMallocManaged(&memory, WORDS * sizeof(int)));
    cudaStream_t stream = beside(), called = beside();
    for (int i = 0; i < WORDS; i++) memory[i] = -1;
    *(volatile int *)word = 0;
    CHECK(cudaDeviceSynchronize());
    {
        std::lock_guard<std::mutex> guard(lock);
        running = may_end = false;
    }
    CHECK(cudaLaunchHostFunc(called, wait_for_program, nullptr));
    {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [] { return running; });
    }
    fill_when_told<<<1, 64>>>(word, 1, device, WORDS, 1000);
    CHECK(cudaGetLastError());
    std::thread teller([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        *(volatile int *)word = 1;
    });
    CHECK(cudaMemcpy(memory, device, WORDS * sizeof(int), cudaMemcpyDefault));
    for (int i = 0; i < WORDS; i += 5) REQUIRE(memory[i] == 1000 + i, "word %d of managed memory was copied as %d", i, memory[i]);
    teller.join();
    // Its source may change at once.
    *(volatile int *)word = 0;
    fill_when_told<<<1, 64>>>(word, 1, device, WORDS, 5000);
    CHECK(cudaGetLastError());
    std::thread second([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        *(volatile int *)word = 1;
    });
    CHECK(cudaMemcpy(out, memory, WORDS * sizeof(int), cudaMemcpyDefault));
    for (int i = 0; i < WORDS; i++) memory[i] = -2;
    second.join();
    {
        std::lock_guard<std::mutex> guard(lock);
        may_end = true;
    }
    changed.notify_all();
    CHECK(cudaDeviceSynchronize());
    int *found = (int *)malloc(WORDS * sizeof(int));
    CHECK(cudaMemcpy(found, out, WORDS * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < WORDS; i++) REQUIRE(found[i] == 1000 + i, "word %d from managed memory was copied as %d", i, found[i]);
    free(found);
    CHECK(cudaFree(memory));
    CHECK(cudaFreeHost(word));
    for (int *one : {device, out}) CHECK(cudaFree(one));
    for (cudaStream_t one : {stream, called}) CHECK(cudaStreamDestroy(one));
}

// A kernel of a context that is being destroyed still sees what the program writes.
static void destroyed_context() {
    int *word = mapped<int>(1), *memory = mapped<int>(WORDS);
    *(volatile int *)word = 0;
    memory[0] = 0;
    CUcontext own, first;
    CUdevice device;
    REQUIRE(cuCtxGetCurrent(&first) == CUDA_SUCCESS && cuCtxGetDevice(&device) == CUDA_SUCCESS, "there is no context");
    REQUIRE(cuCtxCreate(&own, nullptr, 0, device) == CUDA_SUCCESS, "no other context can be made");
    fill_when_told<<<1, 64>>>(word, 1, memory, WORDS, 3);
    CHECK(cudaGetLastError());
    std::thread teller([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        *(volatile int *)word = 1;
    });
    REQUIRE(cuCtxDestroy(own) == CUDA_SUCCESS, "the context cannot be destroyed");
    for (int i = 0; i < WORDS; i += 11) REQUIRE(memory[i] == 3 + i, "a kernel of a destroyed context left %d in word %d", memory[i], i);
    teller.join();
    REQUIRE(cuCtxSetCurrent(first) == CUDA_SUCCESS, "the first context is gone");
    for (int *one : {word, memory}) CHECK(cudaFreeHost(one));
}

// A stream is not taken for done because another one has waited for an event that a third thread records anew meanwhile.
static void recorded_meanwhile() {
    int *word = mapped<int>(1), *device = on_device<int>(64);
    *(volatile int *)word = 0;
    cudaStream_t busy = beside(), idle = beside();
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaDeviceSynchronize());
    fill_when_told<<<1, 64, 0, busy>>>(word, 1, device, 64, 0);
    CHECK(cudaGetLastError());
    const int rounds = 1500;
    std::atomic<int> round(0);
    std::thread recorder([&] {
        for (int next = 1; next <= rounds; next++) {
            while (round < next) {
            }
            CHECK(cudaEventRecord(event, idle));
        }
    });
    for (int i = 1; i <= rounds; i++) {
        cudaStream_t waiting = beside();
        CHECK(cudaEventRecord(event, busy));
        round = i;
        for (volatile int pause = i * 7 % 2000; pause > 0;) pause = pause - 1;
        CHECK(cudaStreamWaitEvent(waiting, event, 0));
        for (int n = 0; n < 20; n++) {
            cudaError_t status = cudaStreamQuery(waiting);
            REQUIRE(status == cudaSuccess || status == cudaErrorNotReady, "a query: %s", cudaGetErrorName(status));
            if (status == cudaSuccess) break;
        }
        cudaError_t status = cudaStreamQuery(busy);
        REQUIRE(status == cudaErrorNotReady, "after %d waits, a stream with a running kernel seems to be done: %s", i, cudaGetErrorName(status));
        CHECK(cudaStreamDestroy(waiting));
    }
    recorder.join();
    cudaGetLastError();
    *(volatile int *)word = 1;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventDestroy(event));
    for (cudaStream_t one : {busy, idle}) CHECK(cudaStreamDestroy(one));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(word));
}

static bool is_wanted(const char *name) { return only.empty() || only == name; }

int main(int argc, char **argv) {
    only = parse_options(argc, argv).word;
    if (is_wanted("told_by_copy")) told_by("a copy", by_copy);
    if (is_wanted("told_by_fill")) told_by("a fill", by_fill);
    if (is_wanted("told_by_value")) told_by("a written value", by_written_value);
    if (is_wanted("pageable_copy")) known_by("a copy to pageable memory", by_pageable_copy);
    if (is_wanted("long_pageable_copy")) known_by("a long copy to pageable memory", by_long_pageable_copy);
    if (is_wanted("pageable_rows")) known_by("a copy of rows to pageable memory", by_pageable_rows);
    if (is_wanted("host_copy")) known_by("a copy in the program's memory", by_host_copy);
    if (is_wanted("freeing")) known_by("freeing memory", by_freeing);
    if (is_wanted("elapsed_time")) known_by("the time between events", by_elapsed_time);
    if (is_wanted("copied")) copied_from_pageable();
    if (is_wanted("registered_again")) registered_again();
    if (only == "shared_page") data_in_a_shared_page();
    if (is_wanted("managed")) managed_beside_a_host_function();
    if (is_wanted("context")) destroyed_context();
    if (is_wanted("recorded")) recorded_meanwhile();
    return pass("told and known in every way");
}
