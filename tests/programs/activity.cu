// Uses CUPTI's activity API as PyTorch's profiler does, and checks what it says: each kernel, copy, fill and node of a graph once, with its sizes, and with the number of the call that it was for;
// external correlations; callbacks; times in the order of the calls. CUPTI is opened by name, as a program that is not linked with it would.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <cuda.h>
#include <cupti.h>

#define PROGRAM "activity"
#include "common.h"

__global__ void first_kernel(int *data, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += i;
}

__global__ void second_kernel(int *data)
{
    extern __shared__ int cells[];
    __shared__ int fixed[32];
    cells[threadIdx.x] = data[threadIdx.x];
    fixed[threadIdx.x % 32] = 1;
    __syncthreads();
    data[threadIdx.x] = cells[blockDim.x - 1 - threadIdx.x] + fixed[0];
}

#define FUNCTIONS(F)                                                                                                   \
    F(cuptiActivityEnable) F(cuptiActivityDisable) F(cuptiActivityRegisterCallbacks) F(cuptiActivityFlushAll)          \
    F(cuptiActivityGetNextRecord) F(cuptiActivityGetNumDroppedRecords) F(cuptiActivityPushExternalCorrelationId)       \
    F(cuptiActivityPopExternalCorrelationId) F(cuptiActivityRegisterTimestampCallback) F(cuptiActivitySetAttribute)    \
    F(cuptiActivityEnableRuntimeApi) F(cuptiActivityEnableDriverApi) F(cuptiGetVersion) F(cuptiGetResultString)        \
    F(cuptiGetTimestamp) F(cuptiSubscribe) F(cuptiUnsubscribe) F(cuptiEnableDomain) F(cuptiEnableCallback)             \
    F(cuptiFinalize) F(cuptiGetStreamIdEx) F(cuptiGetDeviceId) F(cuptiGetContextId)

#include "cupti_calls.h"

struct Api { bool runtime; uint32_t cbid; uint64_t start, end; uint32_t result; };

// What was recorded. Buffers may come in any thread.
static std::mutex lock;
static std::vector<CUpti_ActivityKernel10> kernels;
static std::vector<CUpti_ActivityMemcpy6> copies;
static std::vector<CUpti_ActivityMemset4> fills;
static std::map<uint32_t, Api> calls;
static std::map<uint32_t, std::set<std::pair<int, uint64_t>>> external;
static size_t buffer_size = 4 << 20;
static int buffers_given, buffers_back;

static void requested(uint8_t **buffer, size_t *size, size_t *most)
{
    std::lock_guard<std::mutex> turn(lock);
    *buffer = (uint8_t *)aligned_alloc(8, buffer_size);
    *size = buffer_size;
    *most = 0;
    buffers_given++;
}

static void completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid)
{
    std::lock_guard<std::mutex> turn(lock);
    buffers_back++;
    CUpti_Activity *record = nullptr;
    while (p_cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: kernels.push_back(*(CUpti_ActivityKernel10 *)record); break;
        case CUPTI_ACTIVITY_KIND_MEMCPY: copies.push_back(*(CUpti_ActivityMemcpy6 *)record); break;
        case CUPTI_ACTIVITY_KIND_MEMSET: fills.push_back(*(CUpti_ActivityMemset4 *)record); break;
        case CUPTI_ACTIVITY_KIND_RUNTIME:
        case CUPTI_ACTIVITY_KIND_DRIVER: {
            CUpti_ActivityAPI *api = (CUpti_ActivityAPI *)record;
            Api &known = calls[api->correlationId];
            if (known.cbid == 0 || !known.runtime) known = { api->kind == CUPTI_ACTIVITY_KIND_RUNTIME, api->cbid, api->start, api->end, api->returnValue };
            break;
        }
        case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
            CUpti_ActivityExternalCorrelation *e = (CUpti_ActivityExternalCorrelation *)record;
            external[e->correlationId].insert({ (int)e->externalKind, (uint64_t)e->externalId });
            break;
        }
        // NVIDIA's library tells what it costs itself, if that is much.
        case CUPTI_ACTIVITY_KIND_OVERHEAD: break;
        default: EXPECT_THAT(false, "a record of kind %d", (int)record->kind);
        }
    }
    size_t dropped = 0;
    OK(cuptiActivityGetNumDroppedRecords(context, stream, &dropped));
    EXPECT_THAT(dropped == 0, "%zu dropped", dropped);
    free(buffer);
}

static void forget()
{
    OK(cuptiActivityFlushAll(1));
    std::lock_guard<std::mutex> turn(lock);
    kernels.clear(), copies.clear(), fills.clear(), calls.clear(), external.clear();
}

static void enable(bool on)
{
    for (CUpti_ActivityKind kind : { CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                     CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER,
                                     CUPTI_ACTIVITY_KIND_OVERHEAD }) {
        if (on) OK(cuptiActivityEnable(kind));
        else OK(cuptiActivityDisable(kind));
    }
}

static uint64_t push(uint64_t id)
{
    OK(cuptiActivityPushExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, id));
    return id;
}

static void pop(uint64_t id)
{
    uint64_t last = 0;
    OK(cuptiActivityPopExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &last));
    EXPECT_THAT(last == id, "%llu, not %llu", (unsigned long long)last, (unsigned long long)id);
}

// Whether a record's call has this external number.
static bool is_of(uint32_t correlation, uint64_t id)
{
    return external[correlation].count({ (int)CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, id }) == 1;
}

template <typename Record> static const Record &only(const std::vector<Record> &all, uint64_t id, const char *what)
{
    const Record *found = nullptr;
    for (const Record &record : all) {
        if (!is_of(record.correlationId, id)) continue;
        EXPECT_THAT(!found, "two records of %s", what);
        found = &record;
    }
    EXPECT_THAT(found, "no record of %s", what);
    EXPECT_THAT(found->start > 0 && found->end >= found->start, "%s took from %llu to %llu", what, (unsigned long long)found->start, (unsigned long long)found->end);
    const Api &call = calls.at(found->correlationId);
    EXPECT_THAT(found->start >= call.start, "%s began %llu ns before its call", what, (unsigned long long)(call.start - found->start));
    return *found;
}

static std::atomic<int> entered, left;

// What a subscriber was told of the last call of each function, and how often it was called.
struct Heard {
    int calls;
    const char *name;
    uint32_t correlation;
    std::string symbol;
};
static std::map<std::pair<int, uint32_t>, Heard> heard;
static CUdeviceptr allocated;
static size_t copied, asked_for;
static unsigned grid;

static void callback(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data)
{
    const CUpti_CallbackData *call = (const CUpti_CallbackData *)data;
    bool begins = call->callbackSite == CUPTI_API_ENTER;
    (begins ? entered : left)++;
    EXPECT_THAT(user == &entered && call->correlationId != 0, "a call of %d, %d", (int)domain, (int)id);
    CUcontext context = nullptr;
    uint32_t context_id = 77;
    EXPECT_THAT(cuCtxGetCurrent(&context) == CUDA_SUCCESS && context && call->context == context, "%s in %p, not %p", call->functionName, call->context, context);
    OK(cuptiGetContextId(context, &context_id));
    EXPECT_THAT(call->contextUid == context_id, "context %u, not %u", call->contextUid, context_id);
    // Runtime functions have their results, and what they return by pointers, at the end.
    if (domain == CUPTI_CB_DOMAIN_DRIVER_API && id == CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2) {
        const cuMemAlloc_v2_params *p = (const cuMemAlloc_v2_params *)call->functionParams;
        asked_for = p->bytesize;
        if (!begins) allocated = *p->dptr;
    } else if (domain == CUPTI_CB_DOMAIN_DRIVER_API && id == CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2) {
        copied = ((const cuMemcpyHtoD_v2_params *)call->functionParams)->ByteCount;
    } else if (domain == CUPTI_CB_DOMAIN_DRIVER_API && id == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel) {
        grid = ((const cuLaunchKernel_params *)call->functionParams)->gridDimX;
    } else if (domain == CUPTI_CB_DOMAIN_RUNTIME_API && id == CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000) {
        grid = ((const cudaLaunchKernel_v7000_params *)call->functionParams)->gridDim.x;
    } else if (domain == CUPTI_CB_DOMAIN_RUNTIME_API && id == CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020) {
        copied = ((const cudaMemcpy_v3020_params *)call->functionParams)->count;
    }
    Heard &known = heard[{ (int)domain, id }];
    // "This string is a global constant and so may be accessed outside of the callback."
    EXPECT_THAT(!known.name || strcmp(known.name, call->functionName) == 0, "%s has become %s", known.name, call->functionName);
    known = { known.calls + begins, call->functionName, call->correlationId, call->symbolName ? call->symbolName : "" };
}

static const Heard &called(int times, CUpti_CallbackDomain domain, uint32_t id)
{
    const Heard &found = heard[{ (int)domain, id }];
    EXPECT_THAT(found.calls == times, "%d calls of %d, %u", found.calls, (int)domain, id);
    return found;
}

static uint64_t ticks()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 7 * ((uint64_t)now.tv_sec * 1000000000 + now.tv_nsec);
}

int main()
{
    void *library = dlopen("libcupti.so.13", RTLD_NOW);
    EXPECT_THAT(library, "%s", dlerror());
#define FIND(name)                                                                                                     \
    p_##name = (decltype(p_##name))dlsym(library, #name);                                                              \
    EXPECT_THAT(p_##name, "there is no %s", #name);
    FUNCTIONS(FIND)

    uint32_t version = 0;
    OK(cuptiGetVersion(&version));
    EXPECT_THAT(version >= 130000, "%u", version);
    const char *text = nullptr;
    OK(cuptiGetResultString(CUPTI_ERROR_INVALID_PARAMETER, &text));
    EXPECT_THAT(strcmp(text, "CUPTI_ERROR_INVALID_PARAMETER") == 0, "%s", text);
    EXPECT_THAT(p_cuptiActivityEnable(CUPTI_ACTIVITY_KIND_INVALID) != CUPTI_SUCCESS, "kind 0 was enabled");

    const int n = 1 << 20;
    const size_t bytes = n * sizeof(int);
    int *device, *pinned;
    std::vector<int> pageable(n, 1);
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, 2 * bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    memset(pinned, 0, bytes);
    first_kernel<<<1, 32, 0, stream>>>(device, 0);
    CHECK(cudaDeviceSynchronize());

    // Before and after the time in which it is enabled, nothing is recorded.
    size_t size = sizeof(size_t), value = 1 << 20;
    OK(cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_DEVICE_BUFFER_SIZE, &size, &value));
    OK(cuptiActivityRegisterCallbacks(requested, completed));
    enable(true);
    OK(cuptiActivityEnableRuntimeApi(CUPTI_RUNTIME_TRACE_CBID_cudaGetDevice_v3020, 0));
    CHECK(cudaDeviceSynchronize());
    forget();

    // Copies, a fill, kernels.
    uint64_t id = 1000;
    uint64_t htod_pageable = push(id++);
    CHECK(cudaMemcpy(device, pageable.data(), bytes, cudaMemcpyHostToDevice));
    pop(htod_pageable);
    uint64_t htod_pinned = push(id++);
    CHECK(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream));
    pop(htod_pinned);
    uint64_t small = push(id++);
    CHECK(cudaMemcpyAsync(device, pageable.data(), 100, cudaMemcpyHostToDevice, stream));
    pop(small);
    uint64_t fill = push(id++);
    CHECK(cudaMemsetAsync(device + n, 5, 4096, stream));
    pop(fill);
    uint64_t dtod = push(id++);
    CHECK(cudaMemcpyAsync(device + n, device, bytes / 2, cudaMemcpyDeviceToDevice, stream));
    pop(dtod);
    uint64_t first = push(id++);
    first_kernel<<<dim3(64, 2, 1), 128, 0, stream>>>(device, n);
    CHECK(cudaGetLastError());
    pop(first);
    uint64_t outer = push(id++), inner = push(id++);
    second_kernel<<<3, dim3(64, 1, 1), 1024, stream>>>(device);
    CHECK(cudaGetLastError());
    pop(inner);
    pop(outer);
    uint64_t dtoh = push(id++);
    CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream));
    pop(dtoh);
    CHECK(cudaStreamSynchronize(stream));
    uint64_t dtoh_pageable = push(id++);
    CHECK(cudaMemcpy(pageable.data(), device, 64, cudaMemcpyDeviceToHost));
    pop(dtoh_pageable);

    // A graph of a kernel, a fill and a kernel, launched twice.
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    uint64_t capturing = push(id++);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    first_kernel<<<2, 32, 0, stream>>>(device, 64);
    CHECK(cudaMemsetAsync(device, 1, 256, stream));
    second_kernel<<<1, 32, 128, stream>>>(device);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    pop(capturing);
    uint64_t launches[2];
    for (uint64_t &launch : launches) {
        launch = push(id++);
        CHECK(cudaGraphLaunch(instance, stream));
        pop(launch);
    }
    // Another thread has a stack of its own.
    uint64_t other = id++, mine = push(id++);
    std::thread([&] {
        push(other);
        first_kernel<<<5, 32, 0, stream>>>(device, 1);
        pop(other);
    }).join();
    pop(mine);
    CHECK(cudaDeviceSynchronize());
    uint32_t stream_id = 0, device_id = 77;
    OK(cuptiGetStreamIdEx(nullptr, (CUstream)stream, 0, &stream_id));
    CUcontext context;
    cuCtxGetCurrent(&context);
    OK(cuptiGetDeviceId(context, &device_id));
    OK(cuptiActivityFlushAll(0));
    enable(false);
    OK(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));

    {
        std::lock_guard<std::mutex> turn(lock);
        EXPECT_THAT(buffers_given == buffers_back && buffers_given > 0, "%d given, %d back", buffers_given, buffers_back);
        EXPECT_THAT(kernels.size() == 7 && copies.size() == 6 && fills.size() == 3, "%zu kernels, %zu copies, %zu fills", kernels.size(), copies.size(), fills.size());
        const auto &k1 = only(kernels, first, "the first kernel");
        EXPECT_THAT(strcmp(k1.name, "_Z12first_kernelPii") == 0, "%s", k1.name);
        EXPECT_THAT(k1.gridX == 64 && k1.gridY == 2 && k1.gridZ == 1 && k1.blockX == 128 && k1.blockY == 1, "%d %d %d", k1.gridX, k1.gridY, k1.blockX);
        EXPECT_THAT(k1.registersPerThread > 0 && k1.dynamicSharedMemory == 0 && k1.staticSharedMemory == 0, "%d", k1.registersPerThread);
        EXPECT_THAT(k1.streamId == stream_id && k1.deviceId == device_id && k1.contextId != 0, "stream %u, not %u", k1.streamId, stream_id);
        const auto &k2 = only(kernels, inner, "the second kernel");
        EXPECT_THAT(strcmp(k2.name, "_Z13second_kernelPi") == 0 && k2.dynamicSharedMemory == 1024 && k2.staticSharedMemory == 128, "%s, %d, %d", k2.name, k2.dynamicSharedMemory, k2.staticSharedMemory);
        EXPECT_THAT(k2.start >= k1.end, "kernels of one stream overlap by %llu ns", (unsigned long long)(k1.end - k2.start));
        only(kernels, other, "the kernel of another thread");
        auto copy = [&](uint64_t id, const char *what, int kind, int from, int to, size_t bytes, uint32_t on) {
            const auto &c = only(copies, id, what);
            EXPECT_THAT(c.copyKind == kind && c.bytes == bytes, "%s: kind %d, %llu bytes", what, c.copyKind, (unsigned long long)c.bytes);
            EXPECT_THAT(c.srcKind == from && c.dstKind == to, "%s: from %d to %d", what, c.srcKind, c.dstKind);
            EXPECT_THAT(c.streamId == on, "%s: stream %u, not %u", what, c.streamId, on);
        };
        const int PAGEABLE = CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE, PINNED = CUPTI_ACTIVITY_MEMORY_KIND_PINNED, DEVICE = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
        copy(htod_pageable, "a copy of pageable memory", CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, PAGEABLE, DEVICE, bytes, 7);
        copy(htod_pinned, "a copy of pinned memory", CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, PINNED, DEVICE, bytes, stream_id);
        copy(small, "a small copy", CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, PAGEABLE, DEVICE, 100, stream_id);
        copy(dtod, "a copy on the device", CUPTI_ACTIVITY_MEMCPY_KIND_DTOD, DEVICE, DEVICE, bytes / 2, stream_id);
        copy(dtoh, "a copy back", CUPTI_ACTIVITY_MEMCPY_KIND_DTOH, DEVICE, PINNED, bytes, stream_id);
        copy(dtoh_pageable, "a small copy back", CUPTI_ACTIVITY_MEMCPY_KIND_DTOH, DEVICE, PAGEABLE, 64, 7);
        const auto &f = only(fills, fill, "a fill");
        EXPECT_THAT(f.bytes == 4096 && (f.value & 255) == 5 && f.memoryKind == DEVICE && f.graphNodeId == 0, "%llu bytes of %u", (unsigned long long)f.bytes, f.value);
        // Each node once for each launch; the nodes are the same in both.
        std::set<uint64_t> nodes[2];
        for (int launch = 0; launch < 2; launch++) {
            int found = 0;
            for (const auto &k : kernels) {
                if (!is_of(k.correlationId, launches[launch])) continue;
                EXPECT_THAT(k.graphId != 0, "a kernel of no graph");
                nodes[launch].insert(k.graphNodeId);
                found++;
            }
            EXPECT_THAT(found == 2, "%d kernels", found);
            const auto &node = only(fills, launches[launch], "a fill of a graph");
            nodes[launch].insert(node.graphNodeId);
            EXPECT_THAT(node.bytes == 256, "%llu", (unsigned long long)node.bytes);
        }
        EXPECT_THAT(nodes[0].size() == 3 && nodes[0] == nodes[1], "%zu nodes", nodes[0].size());
        const Api &call = calls.at(k1.correlationId);
        EXPECT_THAT(call.runtime && call.cbid == CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000, "%d, %u", call.runtime, call.cbid);
        for (const auto &k : kernels) EXPECT_THAT(!is_of(k.correlationId, capturing) && !is_of(k.correlationId, outer), "a kernel of another's call");
    }

    // By a clock of the program's, in buffers that have room for little, each call of the driver and of the runtime once.
    forget();
    buffer_size = 1 << 10;
    OK(cuptiActivityRegisterTimestampCallback(ticks));
    enable(true);
    uint64_t before = ticks();
    const int many = 300;
    for (int i = 0; i < many; i++) {
        push(i);
        first_kernel<<<1, 32, 0, stream>>>(device, 32);
        pop(i);
    }
    CHECK(cudaStreamSynchronize(stream));
    uint64_t after = ticks();
    OK(cuptiActivityFlushAll(0));
    enable(false);
    OK(cuptiActivityFlushAll(1));
    {
        std::lock_guard<std::mutex> turn(lock);
        EXPECT_THAT((int)kernels.size() == many, "%zu", kernels.size());
        uint64_t end = 0;
        for (int i = 0; i < many; i++) {
            const auto &k = only(kernels, i, "one of many");
            // The clocks are compared to some microseconds, but on a busy machine only as well as the quickest of a few answers allows.
            EXPECT_THAT(k.start >= before && k.end <= after + 7 * 1000000000ull, "it took from %llu to %llu of %llu to %llu", (unsigned long long)k.start, (unsigned long long)k.end, (unsigned long long)before, (unsigned long long)after);
            EXPECT_THAT(k.start >= end, "kernels of one stream overlap");
            end = k.end;
        }
    }

    // The driver's calls by which the runtime does its work are not recorded, even if only the driver's calls are.
    forget();
    OK(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_DRIVER));
    OK(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
    first_kernel<<<1, 32, 0, stream>>>(device, 32);
    CHECK(cudaStreamSynchronize(stream));
    OK(cuptiActivityFlushAll(0));
    OK(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_DRIVER));
    OK(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
    {
        std::lock_guard<std::mutex> turn(lock);
        EXPECT_THAT(kernels.size() == 1, "%zu kernels", kernels.size());
        EXPECT_THAT(calls.count(kernels[0].correlationId) == 0, "a call %u", calls.at(kernels[0].correlationId).cbid);
    }

    // What a function returns: also where the driver has another opinion, or none.
    forget();
    OK(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_RUNTIME));
    int current = 77;
    void *nowhere = nullptr;
    CHECK(cudaDeviceSynchronize());
    EXPECT_THAT(cudaMalloc((void **)nullptr, 16) == cudaErrorInvalidValue, "memory at NULL");
    EXPECT_THAT(cudaPeekAtLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue, "another error");
    EXPECT_THAT(cudaMemcpy2D(device, 1, device, 64, 32, 2, cudaMemcpyDeviceToDevice) == cudaErrorInvalidPitchValue, "a pitch of 1");
    std::thread([&] { CHECK(cudaGetDevice(&current)); }).join();
    EXPECT_THAT(current == 0 && cudaGetLastError() == cudaErrorInvalidPitchValue, "device %d", current);
    EXPECT_THAT(cudaGetSymbolAddress(&nowhere, &nowhere) == cudaErrorInvalidSymbol && cudaGetLastError() == cudaErrorInvalidSymbol, "a symbol");
    OK(cuptiActivityFlushAll(0));
    OK(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_RUNTIME));
    {
        std::lock_guard<std::mutex> turn(lock);
        std::map<uint32_t, std::vector<uint32_t>> results;
        for (auto &call : calls) results[call.second.cbid].push_back(call.second.result);
        auto expect = [&](uint32_t id, std::vector<uint32_t> expected) {
            EXPECT_THAT(results[id] == expected, "%u: %zu results, the first %d", id, results[id].size(), results[id].empty() ? -1 : (int)results[id][0]);
        };
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020, { 0 });
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaMalloc_v3020, { 1 });
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaPeekAtLastError_v3020, { 1 });
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaGetLastError_v3020, { 1, 12, 13 });
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2D_v3020, { 12 });
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaGetDevice_v3020, { 0 });
        expect(CUPTI_RUNTIME_TRACE_CBID_cudaGetSymbolAddress_v3020, { 13 });
    }

    // Callbacks.
    const auto DRIVER = CUPTI_CB_DOMAIN_DRIVER_API, RUNTIME = CUPTI_CB_DOMAIN_RUNTIME_API;
    CUpti_SubscriberHandle subscriber, second;
    OK(cuptiSubscribe(&subscriber, callback, &entered));
    EXPECT_THAT(p_cuptiSubscribe(&second, callback, nullptr) == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, "two subscribers");
    OK(cuptiEnableCallback(1, subscriber, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize));
    cuCtxSynchronize();
    int value_of_nothing;
    cuDriverGetVersion(&value_of_nothing);
    EXPECT_THAT(entered == 1 && left == 1, "%d and %d calls", entered.load(), left.load());
    const char *name = called(1, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize).name;
    for (uint32_t id : { CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel })
        OK(cuptiEnableCallback(1, subscriber, DRIVER, id));
    CUdeviceptr fresh = 0;
    EXPECT_THAT(cuMemAlloc(&fresh, 12345) == CUDA_SUCCESS && fresh == allocated && asked_for == 12345, "%llx, %zu bytes", allocated, asked_for);
    EXPECT_THAT(cuMemcpyHtoD(fresh, pageable.data(), 333) == CUDA_SUCCESS && copied == 333, "%zu bytes", copied);
    cudaFunction_t function;
    CHECK(cudaGetFuncBySymbol(&function, (const void *)second_kernel));
    void *parameters[] = { &device };
    EXPECT_THAT(cuLaunchKernel(function, 3, 1, 1, 32, 1, 1, 128, (CUstream)stream, parameters, nullptr) == CUDA_SUCCESS, "not launched");
    const Heard &launch = called(1, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel);
    EXPECT_THAT(launch.symbol == "_Z13second_kernelPi" && grid == 3, "%s, %u", launch.symbol.c_str(), grid);
    cuCtxSynchronize();
    EXPECT_THAT(called(2, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize).name == name && strcmp(name, "cuCtxSynchronize") == 0, "%s", name);
    // The runtime's, and the driver's calls by which it does its work.
    OK(cuptiEnableCallback(1, subscriber, RUNTIME, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000));
    OK(cuptiEnableCallback(1, subscriber, RUNTIME, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020));
    first_kernel<<<4, 32, 0, stream>>>(device, 32);
    CHECK(cudaGetLastError());
    const Heard &inside = called(2, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel);
    EXPECT_THAT(inside.symbol == "_Z12first_kernelPii" && grid == 4, "%s, %u", inside.symbol.c_str(), grid);
    CHECK(cudaMemcpy(device, pageable.data(), 444, cudaMemcpyHostToDevice));
    const Heard &outside = called(1, RUNTIME, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
    EXPECT_THAT(outside.symbol == "_Z12first_kernelPii" && outside.correlation == inside.correlation, "%s, %u and %u", outside.symbol.c_str(), outside.correlation, inside.correlation);
    called(1, RUNTIME, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020);
    EXPECT_THAT(copied == 444, "%zu bytes", copied);
    OK(cuptiEnableDomain(0, subscriber, RUNTIME));
    OK(cuptiEnableDomain(0, subscriber, DRIVER));
    cuCtxSynchronize();
    OK(cuptiUnsubscribe(subscriber));
    called(2, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize);
    EXPECT_THAT(entered == left && cuMemFree(fresh) == CUDA_SUCCESS, "%d and %d calls", entered.load(), left.load());

    // A question for a stream's number does not end a capture.
    cudaStream_t blocking;
    CHECK(cudaStreamCreate(&blocking));
    CHECK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
    OK(cuptiGetStreamIdEx(context, nullptr, 0, &stream_id));
    CHECK(cudaStreamEndCapture(blocking, &graph));
    EXPECT_THAT(stream_id == 7, "%u", stream_id);

    forget();
    first_kernel<<<1, 32, 0, stream>>>(device, 0);
    CHECK(cudaDeviceSynchronize());
    OK(cuptiActivityFlushAll(1));
    EXPECT_THAT(kernels.empty() && calls.empty(), "it was recorded after the end");

    // The end of everything: the subscriber, the records of single functions, the functions for buffers.
    OK(cuptiSubscribe(&subscriber, callback, &entered));
    OK(cuptiEnableCallback(1, subscriber, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize));
    OK(cuptiActivityEnableDriverApi(CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, 1));
    cuCtxSynchronize();
    called(3, DRIVER, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize);
    OK(cuptiActivityFlushAll(1));
    OK(cuptiFinalize());
    EXPECT_THAT(buffers_given == buffers_back, "%d given, %d back", buffers_given, buffers_back);
    int so_far = entered, given = buffers_given;
    cuCtxSynchronize();
    EXPECT_THAT(entered == so_far && buffers_given == given, "%d calls, then %d", so_far, entered.load());
    // Whoever comes next begins anew.
    OK(cuptiSubscribe(&subscriber, callback, &entered));
    OK(cuptiUnsubscribe(subscriber));
    CHECK(cudaFree(device));
    return pass("%d launches", many);
}
