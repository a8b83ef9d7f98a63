// What calls cost and what copies carry, measured by an ordinary CUDA program, so that the very same file runs natively
// and through rgpu.
//
//   bench [--small]        measures everything; each line is "name size median low high", in microseconds or GB/s
//   bench loop NAME N      does the same thing N times and nothing else, for counting what it takes
//   bench time NAME SIZE N does one thing N times: a line of key=value with MB/s over all (10^6 bytes), the median of a call in microseconds, and for how many milliseconds the
//                          machine's processors were in the kernel meanwhile
//
// Low and high are the tenth and ninetieth percentile of what the median is taken of. All data is random, and is compared
// with what comes back in the same run; a difference ends the program with status 1 and no line.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <time.h>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t outcome = (call);                                                            \
        if (outcome != cudaSuccess) {                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(outcome)); \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

__global__ void nothing() {}

__global__ void add_one(int *value) { *value += 1; }

static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static uint64_t random_state = 0x5eed;

static uint64_t random_word() {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static void fill(void *to, size_t size) {
    uint64_t *words = (uint64_t *)to;
    for (size_t i = 0; i < size / 8; i++) words[i] = random_word();
}

static void same(const void *a, const void *b, size_t size, const char *what) {
    if (memcmp(a, b, size) != 0) {
        fprintf(stderr, "%s: %zu bytes came back changed\n", what, size);
        exit(1);
    }
}

static void report(const char *name, size_t size, std::vector<double> values) {
    std::sort(values.begin(), values.end());
    size_t n = values.size();
    printf("%s %zu %.4f %.4f %.4f\n", name, size, values[n / 2], values[n / 10], values[n - 1 - n / 10]);
    fflush(stdout);
}

// Times `call` in microseconds, `count` times; `after` is done untimed after each.
static std::vector<double> times(int count, const std::function<void()> &call, const std::function<void()> &after = {}) {
    std::vector<double> all;
    for (int i = 0; i < count; i++) {
        double begin = now();
        call();
        all.push_back(now() - begin);
        if (after) after();
    }
    return all;
}

static void latencies(bool small) {
    int count = small ? 100 : 2000;
    auto sync = [] { CHECK(cudaDeviceSynchronize()); };
    auto launch = [] { nothing<<<1, 1>>>(); };
    launch();
    sync();

    // A batch stays far below what a device queues, so that no call waits for room.
    std::vector<double> each;
    for (int batch = 0; batch < (small ? 5 : 50); batch++) {
        const int launches = small ? 20 : 200;
        double begin = now();
        for (int i = 0; i < launches; i++) launch();
        each.push_back((now() - begin) / launches);
        sync();
    }
    report("launch", 0, each);

    std::vector<double> rates;
    for (int batch = 0; batch < 5; batch++) {
        const int launches = small ? 200 : 20000;
        double begin = now();
        for (int i = 0; i < launches; i++) launch();
        sync();
        rates.push_back(launches / (now() - begin) * 1e6);
    }
    report("launches_per_second", 0, rates);
    report("launch_sync", 0, times(count, [&] { launch(); sync(); }));

    uint64_t up[8], down[8];
    uint64_t *device;
    CHECK(cudaMalloc(&device, sizeof up));
    fill(up, sizeof up);
    report("htod_64", 64, times(count, [&] { CHECK(cudaMemcpy(device, up, sizeof up, cudaMemcpyHostToDevice)); }, sync));
    report("dtoh_64", 64, times(count, [&] { CHECK(cudaMemcpy(down, device, sizeof down, cudaMemcpyDeviceToHost)); }));
    same(up, down, sizeof up, "64 bytes");
    CHECK(cudaFree(device));

    void *memory;
    report("alloc_free_1M", 1 << 20, times(small ? 50 : 500, [&] { CHECK(cudaMalloc(&memory, 1 << 20)); CHECK(cudaFree(memory)); }));

    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventRecord(event));
    CHECK(cudaEventSynchronize(event));
    each.clear();
    for (int batch = 0; batch < 20; batch++) {
        double begin = now();
        for (int i = 0; i < 100; i++) CHECK(cudaEventQuery(event));
        each.push_back((now() - begin) / 100);
    }
    report("event_query", 0, each);
    CHECK(cudaEventDestroy(event));
}

// GB/s of copies of each size; each is whole when the time is taken.
static void bandwidths(bool small) {
    const size_t most = small ? 4 << 20 : 256 << 20;
    for (int pinned = 1; pinned >= 0; pinned--) {
        char *up, *down, *device;
        if (pinned) {
            CHECK(cudaMallocHost(&up, most));
            CHECK(cudaMallocHost(&down, most));
        } else {
            up = (char *)aligned_alloc(4096, most);
            down = (char *)aligned_alloc(4096, most);
        }
        CHECK(cudaMalloc(&device, most));
        fill(up, most);
        memset(down, 0, most);
        for (size_t size = 4 << 10; size <= most; size *= 4) {
            int count = small ? 3 : size >= (64 << 20) ? 7 : 20;
            auto rate = [&](std::vector<double> all) {
                for (double &time : all) time = size / time / 1e3;
                return all;
            };
            size_t at = most - size;
            auto to = [&] { CHECK(cudaMemcpy(device, up + at, size, cudaMemcpyHostToDevice)); CHECK(cudaDeviceSynchronize()); };
            auto from = [&] { CHECK(cudaMemcpy(down + at, device, size, cudaMemcpyDeviceToHost)); };
            to();
            from();
            same(up + at, down + at, size, pinned ? "pinned" : "pageable");
            report(pinned ? "pinned_htod" : "pageable_htod", size, rate(times(count, to)));
            memset(down + at, 0, size);
            report(pinned ? "pinned_dtoh" : "pageable_dtoh", size, rate(times(count, from)));
            same(up + at, down + at, size, pinned ? "pinned, measured" : "pageable, measured");
        }
        CHECK(cudaFree(device));
        if (pinned) {
            CHECK(cudaFreeHost(up));
            CHECK(cudaFreeHost(down));
        } else {
            free(up);
            free(down);
        }
    }
}

static void loop(const char *name, int count) {
    cudaStream_t stream, beside;
    cudaEvent_t event;
    char *device, *pinned, pageable[1024];
    fill(pageable, sizeof pageable);
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    CHECK(cudaMalloc(&device, 64 << 10));
    // With page-locked memory the host could see what a copy does not wait for.
    const bool blind = !strcmp(name, "launch_and_copy");
    if (blind) CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    else {
        CHECK(cudaMallocHost(&pinned, 64 << 10));
        fill(pinned, 64 << 10);
    }
    nothing<<<1, 1, 0, stream>>>();
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < count; i++) {
        if (!strcmp(name, "launches")) nothing<<<1, 1, 0, stream>>>();
        else if (!strcmp(name, "async_copies")) {
            CHECK(cudaMemcpyAsync(device, pinned, 4096, cudaMemcpyHostToDevice, stream));
            CHECK(cudaMemcpyAsync(pinned + 8192, device, 4096, cudaMemcpyDeviceToHost, stream));
        } else if (!strcmp(name, "event_records")) CHECK(cudaEventRecord(event, stream));
        else if (!strcmp(name, "event_queries")) {
            cudaError_t status = cudaEventQuery(event);
            if (status != cudaSuccess && status != cudaErrorNotReady) CHECK(status);
        } else if (!strcmp(name, "small_pageable")) CHECK(cudaMemcpy(device, pageable, sizeof pageable, cudaMemcpyHostToDevice));
        else if (blind) {
            nothing<<<1, 1>>>();
            CHECK(cudaMemcpy(device, pageable, sizeof pageable, cudaMemcpyHostToDevice));
            nothing<<<1, 1, 0, beside>>>();
        } else if (!strcmp(name, "alloc_free")) {
            void *memory;
            CHECK(cudaMalloc(&memory, 1 << 20));
            CHECK(cudaFree(memory));
        } else {
            fprintf(stderr, "no loop is called %s\n", name);
            exit(1);
        }
        CHECK(cudaGetLastError());
    }
    CHECK(cudaDeviceSynchronize());
    printf("PASS bench\n");
}

// Milliseconds that this machine's processors, all together, have been in the kernel so far; its own interrupts are part of that.
static double in_kernel() {
    double fields[7] = {};
    FILE *file = fopen("/proc/stat", "r");
    if (!file || fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf", fields, fields + 1, fields + 2, fields + 3, fields + 4, fields + 5, fields + 6) != 7) {
        fprintf(stderr, "/proc/stat does not say what the processors do\n");
        exit(1);
    }
    fclose(file);
    // User, nice, system, idle, iowait, irq, softirq, in ticks.
    return (fields[2] + fields[5] + fields[6]) * 1e3 / sysconf(_SC_CLK_TCK);
}

// What one thing alone takes, N times in a row: calls that ask the server and wait (`memory_info`: nothing but that; `dtoh`: with the device's work), or page-locked
// asynchronous copies, all under way before the first is done. `peer`: from the first device to the second.
static void timed(const char *name, size_t size, int count) {
    const size_t span = std::max<size_t>({4096, size, std::min<size_t>(size * count, 16 << 20)}), places = span / size;
    char *up, *down, *device;
    CHECK(cudaMallocHost(&up, span));
    CHECK(cudaMallocHost(&down, span));
    CHECK(cudaMalloc(&device, span));
    char *source = device, *target = device;
    if (!strcmp(name, "peer")) {
        CHECK(cudaSetDevice(1));
        CHECK(cudaMalloc(&target, span));
        CHECK(cudaMemset(target, 0, span));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaSetDevice(0));
    }
    fill(up, span);
    memset(down, 0, span);
    const bool to = !strcmp(name, "htod_async");
    // Either way the device's memory has been written: that of a GPU in software gets its pages then.
    if (to) CHECK(cudaMemset(device, 0, span));
    else CHECK(cudaMemcpy(device, up, span, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    if (target != source) {
        // The servers have connected and made their buffers when the time begins. The first large copy opens further connections beside itself.
        for (int k = 0; k < 4; k++) {
            CHECK(cudaMemcpyPeer(target, 1, source, 0, span));
            usleep(500000);
        }
        CHECK(cudaMemset(target, 0, span));
        CHECK(cudaDeviceSynchronize());
    }
    int i = 0;
    double kernel = in_kernel(), begin = now();
    std::vector<double> each = times(count, [&] {
        size_t at = i++ % places * size, free_bytes, total_bytes;
        if (to) CHECK(cudaMemcpyAsync(device + at, up + at, size, cudaMemcpyHostToDevice));
        else if (!strcmp(name, "dtoh_async")) CHECK(cudaMemcpyAsync(down + at, device + at, size, cudaMemcpyDeviceToHost));
        else if (!strcmp(name, "peer")) CHECK(cudaMemcpyPeerAsync(target + at, 1, source + at, 0, size));
        else if (!strcmp(name, "dtoh")) CHECK(cudaMemcpy(down + at, device + at, size, cudaMemcpyDeviceToHost));
        else if (!strcmp(name, "memory_info")) CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
        else {
            fprintf(stderr, "nothing to be timed is called %s\n", name);
            exit(1);
        }
    });
    CHECK(cudaDeviceSynchronize());
    double all = now() - begin;
    kernel = in_kernel() - kernel;
    const size_t whole = std::min<size_t>(count, places) * size;
    if (to || target != source) CHECK(cudaMemcpy(down, target, whole, cudaMemcpyDeviceToHost));
    if (strcmp(name, "memory_info")) same(up, down, whole, name);
    std::sort(each.begin(), each.end());
    printf("do=%s size=%zu count=%d mb_per_s=%.2f us_median=%.2f kernel_ms=%.0f\n", name, size, count, size * count / all, each[each.size() / 2], kernel);
}

int main(int argc, char **argv) {
    if (argc == 5 && !strcmp(argv[1], "time")) {
        timed(argv[2], strtoul(argv[3], nullptr, 10), atoi(argv[4]));
        return 0;
    }
    if (argc == 4 && !strcmp(argv[1], "loop")) {
        loop(argv[2], atoi(argv[3]));
        return 0;
    }
    bool small = argc > 1 && !strcmp(argv[1], "--small");
    int value = 41, *device;
    CHECK(cudaMalloc(&device, sizeof value));
    CHECK(cudaMemcpy(device, &value, sizeof value, cudaMemcpyHostToDevice));
    add_one<<<1, 1>>>(device);
    CHECK(cudaMemcpy(&value, device, sizeof value, cudaMemcpyDeviceToHost));
    if (value != 42) return 1;
    // In nanoseconds of the same clock, by whoever started this process, just before.
    if (const char *start = getenv("RGPU_BENCH_START")) report("first_result", 0, {now() - atof(start) / 1e3});
    CHECK(cudaFree(device));
    latencies(small);
    bandwidths(small);
}
