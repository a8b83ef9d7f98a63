// Two devices of two servers in one program. Each check is for something that would be wrong without an error if the two were confused: positions in their sequences of records, equal addresses of variables, equal
// handles of textures, equal numbers of streams, events of the other server, modules of the other server. Then copies between the servers in every form.
#define PROGRAM "two_servers"
#include "common.h"
#include "cases.h"
#include "driver.h"
#include "several_devices.h"
#include "two_textures.h"

#include <dlfcn.h>
#include <strings.h>
#include <unistd.h>

#include <chrono>

__device__ int variable;

__global__ void add(int *data, int n, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += by;
}

__global__ void read_variable(int *to) { *to = variable; }

static void set_device(int device) { CHECK(cudaSetDevice(device)); }

static void devices() {
    int count, can = -1, domains[2];
    CHECK(cudaGetDeviceCount(&count));
    expect_value("the devices of both servers", 2, count);
    if (count < 2) fail("there are not two devices");
    for (int i = 0; i < 2; i++) {
        CHECK(cudaDeviceGetAttribute(&domains[i], cudaDevAttrPciDomainId, i));
        char id[32];
        int back = -1;
        CHECK(cudaDeviceGetPCIBusId(id, sizeof id, i));
        CHECK(cudaDeviceGetByPCIBusId(&back, id));
        expect_value("the device of a PCI bus ID", i, back);
    }
    expect_value("different PCI domains", 1, domains[0] != domains[1]);
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
    expect_value("peer access", 0, can);
    set_device(0);
    RETURNS(cudaErrorPeerAccessUnsupported, cudaDeviceEnablePeerAccess(1, 0));
    RETURNS(cudaErrorPeerAccessNotEnabled, cudaDeviceDisablePeerAccess(1));
    CHECK(cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrAccessSupported, 0, 1));
    expect_value("the attribute of peer access", 0, can);
}

// A management program sees the same devices at the same places.
static void management() {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    REQUIRE(library, "%s", dlerror());
    auto call = [&](const char *name) {
        void *found = dlsym(library, name);
        REQUIRE(found, "%s", dlerror());
        return found;
    };
    auto init = (int (*)())call("nvmlInit_v2");
    auto count_of = (int (*)(unsigned *))call("nvmlDeviceGetCount_v2");
    auto by_index = (int (*)(unsigned, void **))call("nvmlDeviceGetHandleByIndex_v2");
    auto pci_of = (int (*)(void *, void *))call("nvmlDeviceGetPciInfo_v3");
    auto by_pci = (int (*)(const char *, void **))call("nvmlDeviceGetHandleByPciBusId_v2");
    auto by_uuid = (int (*)(const char *, void **))call("nvmlDeviceGetHandleByUUID");
    auto uuid_of = (int (*)(void *, char *, unsigned))call("nvmlDeviceGetUUID");
    auto index_of = (int (*)(void *, unsigned *))call("nvmlDeviceGetIndex");
    auto memory_of = (int (*)(void *, void *))call("nvmlDeviceGetMemoryInfo");
    auto shutdown = (int (*)())call("nvmlShutdown");
    auto peers = (int (*)(void *, void *, int, int *))call("nvmlDeviceGetP2PStatus");
    unsigned count = 0;
    void *devices[2];
    expect_value("nvmlInit", 0, init());
    expect_value("nvmlDeviceGetCount", 0, count_of(&count));
    expect_value("NVML's devices", 2, count);
    char uuids[2][96] = {};
    // Two servers may share one GPU, for a test.
    bool one_gpu = getenv("RGPU_TEST_ONE_GPU");
    // NVML has the servers' order, which CUDA_VISIBLE_DEVICES does not change.
    bool same_order = !getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; i < 2; i++) {
        struct { char legacy[16]; unsigned domain, bus, device, ids[2]; char address[32]; } pci = {};
        unsigned long long memory[3] = {};
        unsigned index = 99;
        void *found = nullptr;
        int domain = -1;
        char id[32], text[96] = "GPU-";
        CHECK(cudaDeviceGetPCIBusId(id, sizeof id, i));
        expect_value("nvmlDeviceGetHandleByPciBusId", 0, by_pci(id, &devices[i]));
        expect_value("nvmlDeviceGetPciInfo", 0, pci_of(devices[i], &pci));
        CHECK(cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, i));
        expect_value("NVML's PCI domain", domain, pci.domain);
        expect_value("NVML's address", 0, strcasecmp(id, pci.legacy));
        expect_value("by NVML's own address", 0, by_pci(pci.address, &found));
        expect_value("the device at an address", 1, found == devices[i]);
        expect_value("nvmlDeviceGetIndex", 0, index_of(devices[i], &index));
        if (same_order) expect_value("the index of a device", i, index);
        expect_value("nvmlDeviceGetHandleByIndex", 0, by_index(index, &found));
        expect_value("the device of an index", 1, found == devices[i]);
        expect_value("nvmlDeviceGetUUID", 0, uuid_of(devices[i], uuids[i], sizeof uuids[i]));
        cudaDeviceProp properties;
        CHECK(cudaGetDeviceProperties(&properties, i));
        for (int byte = 0; byte < 16; byte++) {
            bool dash = byte == 4 || byte == 6 || byte == 8 || byte == 10;
            snprintf(text + strlen(text), 8, dash ? "-%02x" : "%02x", (unsigned char)properties.uuid.bytes[byte]);
        }
        expect_value("a UUID is CUDA's", 0, strcmp(text, uuids[i]));
        expect_value("nvmlDeviceGetHandleByUUID", 0, by_uuid(uuids[i], &found));
        if (!one_gpu) expect_value("the device of a UUID", 1, found == devices[i]);
        expect_value("nvmlDeviceGetMemoryInfo", 0, memory_of(devices[i], memory));
        expect_value("memory of a device", 1, memory[0] > 0);
    }
    expect_value("different UUIDs", !one_gpu, strcmp(uuids[0], uuids[1]) != 0);
    void *none;
    expect_value("a third index", 2, by_index(2, &none));
    const int not_supported = 5;
    int status = -1;
    expect_value("nvmlDeviceGetP2PStatus", 0, peers(devices[0], devices[1], 0, &status));
    expect_value("peers by NVML", not_supported, status);
    expect_value("nvmlShutdown", 0, shutdown());
}

// One server's records are far ahead of the other's: what it has done says nothing of the other. Both servers' events and streams are made by turns, so that they have equal numbers.
static void sequences(int ahead, int behind) {
    int *a = on_device(ahead, 1, 0), *b = on_device(behind, 1, 0);
    cudaStream_t passing, held;
    cudaEvent_t over, event;
    Gate gate;
    set_device(ahead);
    CHECK(cudaStreamCreateWithFlags(&passing, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&over));
    set_device(behind);
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&event));
    CHECK(cudaLaunchHostFunc(held, Gate::wait, &gate));
    add<<<1, 1, 0, held>>>(b, 1, 1);
    CHECK(cudaEventRecord(event, held));
    set_device(ahead);
    for (int i = 0; i < 500; i++) add<<<1, 1, 0, passing>>>(a, 1, 1);
    // A host function of this server's is called although one of the other's does not return.
    std::atomic<int> called{0};
    CHECK(cudaLaunchHostFunc(passing, [](void *count) { ++*static_cast<std::atomic<int> *>(count); }, &called));
    CHECK(cudaEventRecord(over, passing));
    CHECK(cudaDeviceSynchronize());
    expect_value("host functions called", 1, called);
    RETURNS(cudaSuccess, cudaEventQuery(over));
    RETURNS(cudaSuccess, cudaStreamQuery(passing));
    RETURNS(cudaErrorNotReady, cudaEventQuery(event));
    RETURNS(cudaErrorNotReady, cudaStreamQuery(held));
    gate.open = true;
    CHECK(cudaEventSynchronize(event));
    float milliseconds;
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, over, event));
    set_device(behind);
    expect_value("the held kernel's result", 1, holds(b, 1, 1));
    expect_value("the other device's result", 1, holds(a, 1, 500));
    CHECK(cudaStreamDestroy(held));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaFree(b));
    set_device(ahead);
    CHECK(cudaStreamDestroy(passing));
    CHECK(cudaEventDestroy(over));
    CHECK(cudaFree(a));
}

static void variables() {
    void *addresses[2];
    for (int i = 0; i < 2; i++) {
        set_device(i);
        int value = 100 + i;
        CHECK(cudaGetSymbolAddress(&addresses[i], variable));
        CHECK(cudaMemcpyToSymbol(variable, &value, sizeof value));
    }
    for (int i = 0; i < 2; i++) {
        set_device(i);
        int value = -1, *read = on_device(i, 1, 0);
        CHECK(cudaMemcpyFromSymbol(&value, variable, sizeof value));
        expect_value("a variable", 100 + i, value);
        read_variable<<<1, 1>>>(read);
        expect_value("a variable as a kernel reads it", 1, holds(read, 1, 100 + i));
        CHECK(cudaFree(read));
    }
    // An address alone means the current device's variable, if both have one there, and else whose it is.
    for (int i = 0; i < 2; i++) {
        set_device(i);
        int value = -1;
        CHECK(cudaMemcpy(&value, addresses[i], sizeof value, cudaMemcpyDefault));
        expect_value("a variable at its address", 100 + i, value);
        cudaPointerAttributes about;
        CHECK(cudaPointerGetAttributes(&about, addresses[i]));
        expect_value("the device of a variable", i, about.device);
    }
    // A fill on a stream means the variable of the stream's device.
    for (int i = 0; i < 2; i++) {
        set_device(i);
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        set_device(1 - i);
        CHECK(cudaMemsetAsync(addresses[i], 3 + i, sizeof(int), stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaStreamDestroy(stream));
        for (int device = 0; device < 2; device++) {
            set_device(device);
            int value = -1, old = 100 + device, filled = 0x01010101 * (3 + i);
            CHECK(cudaMemcpyFromSymbol(&value, variable, sizeof value));
            expect_value("a variable that a stream fills", device == i ? filled : old, value);
            CHECK(cudaMemcpyToSymbol(variable, &old, sizeof old));
        }
    }
    // The peer copy names the devices, so that equal addresses do not matter.
    CHECK(cudaMemcpyPeer(addresses[1], 1, addresses[0], 0, sizeof(int)));
    int value = -1;
    set_device(1);
    CHECK(cudaMemcpyFromSymbol(&value, variable, sizeof value));
    expect_value("a variable that was copied from the other server", 100, value);
}

// Streams of both servers, made and used by turns, so that equal numbers would be noticed.
static void streams() {
    const int n = 1 << 10, each = 4;
    int *data[2][each];
    cudaStream_t all[2][each];
    for (int s = 0; s < each; s++) {
        for (int i = 0; i < 2; i++) {
            data[i][s] = on_device(i, n, 0);
            CHECK(cudaStreamCreate(&all[i][s]));
        }
    }
    for (int round = 0; round < 10; round++) {
        for (int s = 0; s < each; s++) {
            for (int i = 0; i < 2; i++) {
                set_device(i);
                add<<<n / 256, 256, 0, all[i][s]>>>(data[i][s], n, 1 + i + 2 * s);
            }
        }
    }
    for (int s = 0; s < each; s++) {
        for (int i = 0; i < 2; i++) {
            CHECK(cudaStreamSynchronize(all[i][s]));
            set_device(i);
            expect_value("a stream's result", 1, holds(data[i][s], n, 10 * (1 + i + 2 * s)));
            CHECK(cudaStreamDestroy(all[i][s]));
            CHECK(cudaFree(data[i][s]));
        }
    }
}

static void other_servers_event(int from, int to) {
    const int n = 1 << 12;
    int *a = on_device(from, n, 0), *b = on_device(to, n, 0);
    cudaStream_t first, second;
    cudaEvent_t event;
    Gate gate;
    set_device(from);
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaLaunchHostFunc(first, Gate::wait, &gate));
    add<<<n / 256, 256, 0, first>>>(a, n, 7);
    CHECK(cudaEventRecord(event, first));
    set_device(to);
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    // This call and the next return although the event is held.
    CHECK(cudaStreamWaitEvent(second, event, 0));
    CHECK(cudaMemcpyPeerAsync(b, to, a, from, n * sizeof(int), second));
    add<<<n / 256, 256, 0, second>>>(b, n, 1);
    RETURNS(cudaErrorNotReady, cudaStreamQuery(second));
    expect_value("nothing came before the event", 1, holds(b, n, 0));
    gate.open = true;
    CHECK(cudaStreamSynchronize(second));
    expect_value("what came behind the event", 1, holds(b, n, 8));
    // By way of pinned memory that both servers copy in place.
    int *pinned;
    CHECK(cudaMallocHost(&pinned, n * sizeof(int)));
    set_device(from);
    Gate again;
    CHECK(cudaLaunchHostFunc(first, Gate::wait, &again));
    CHECK(cudaMemcpyAsync(pinned, a, n * sizeof(int), cudaMemcpyDeviceToHost, first));
    CHECK(cudaEventRecord(event, first));
    set_device(to);
    CHECK(cudaStreamWaitEvent(second, event, 0));
    CHECK(cudaMemcpyAsync(b, pinned, n * sizeof(int), cudaMemcpyHostToDevice, second));
    again.open = true;
    CHECK(cudaStreamSynchronize(second));
    expect_value("what came by way of pinned memory", 1, holds(b, n, 7));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaStreamDestroy(second));
    set_device(from);
    CHECK(cudaStreamDestroy(first));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
}

// What the default stream of one device does with another server's memory comes behind what that device's default stream has been given, and before what it gets next.
static void default_streams() {
    const int n = 1 << 12;
    int *data = on_device(0, n, 0), *pinned;
    CHECK(cudaMallocHost(&pinned, n * sizeof(int)));
    for (int i = 0; i < n; i++) pinned[i] = i + 9;
    for (int copy = 0; copy < 2; copy++) {
        Gate gate;
        set_device(0);
        CHECK(cudaLaunchHostFunc(0, Gate::wait, &gate));
        CHECK(cudaMemsetAsync(data, 1, n * sizeof(int), 0));
        set_device(1);
        if (copy) CHECK(cudaMemcpyAsync(data, pinned, n * sizeof(int), cudaMemcpyHostToDevice, 0));
        else CHECK(cudaMemsetAsync(data, 0, n * sizeof(int), 0));
        set_device(0);
        add<<<n / 256, 256>>>(data, n, 1);
        gate.open = true;
        CHECK(cudaDeviceSynchronize());
        std::vector<int> host(n, -1);
        CHECK(cudaMemcpy(host.data(), data, n * sizeof(int), cudaMemcpyDeviceToHost));
        bool right = true;
        for (int i = 0; i < n; i++) right = right && host[i] == (copy ? i + 10 : 1);
        expect_value(copy ? "a copy by the other default stream" : "a fill by the other default stream", 1, right);
    }
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(data));
}

__global__ void until(volatile int *gate) {
    while (*gate == 0) {
    }
}

__global__ void set_behind(volatile int *gate, int *to, int value) {
    while (*gate == 0) {
    }
    *to = value;
}

__global__ void copy_word(const volatile int *from, int *to) { *to = *from; }

// A wait for the other server's event is an operation of its stream. In the default stream it comes behind what blocking streams have, and they wait for it. In a blocking stream it comes behind what the default stream has.
static void waits_are_operations(int here, int there) {
    int *far_gate = on_device(there, 1, 0), *gate = on_device(here, 1, 0);
    int *value = on_device(here, 1, 0), *seen = on_device(here, 1, -1), *rounds = on_device(here, 1, 0);
    cudaStream_t far, far_beside, first, second, beside;
    cudaEvent_t event;
    set_device(there);
    CHECK(cudaStreamCreateWithFlags(&far, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&far_beside, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    set_device(here);
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreate(&second));
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    auto record_behind_gate = [&] {
        set_device(there);
        CHECK(cudaMemsetAsync(far_gate, 0, sizeof(int), far));
        CHECK(cudaStreamSynchronize(far));
        until<<<1, 1, 0, far>>>(far_gate);
        CHECK(cudaEventRecord(event, far));
        set_device(here);
    };
    // Opens the event's gate. When it returns, work that waits only for the event has had much time, and then this device's gate is opened.
    auto open_both = [&] {
        set_device(there);
        CHECK(cudaMemsetAsync(far_gate, 1, sizeof(int), far_beside));
        set_device(here);
        for (int round = 0; round < 50; round++) {
            add<<<1, 1, 0, beside>>>(rounds, 1, 1);
            CHECK(cudaStreamSynchronize(beside));
        }
        CHECK(cudaMemsetAsync(gate, 1, sizeof(int), beside));
    };
    auto value_of = [&](const int *word) {
        int found = -2;
        CHECK(cudaMemcpyAsync(&found, word, sizeof(int), cudaMemcpyDeviceToHost, beside));
        CHECK(cudaStreamSynchronize(beside));
        return found;
    };
    record_behind_gate();
    set_behind<<<1, 1, 0, first>>>(gate, value, 1);
    CHECK(cudaStreamWaitEvent(cudaStreamLegacy, event, 0));
    copy_word<<<1, 1, 0, second>>>(value, seen);
    CHECK(cudaStreamWaitEvent(beside, event, 0));
    open_both();
    CHECK(cudaStreamSynchronize(second));
    expect_value("a blocking stream behind a default stream that waits for an event", 1, value_of(seen));

    CHECK(cudaMemsetAsync(gate, 0, sizeof(int), beside));
    CHECK(cudaStreamSynchronize(beside));
    record_behind_gate();
    set_behind<<<1, 1>>>(gate, value, 2);
    CHECK(cudaStreamWaitEvent(second, event, 0));
    CHECK(cudaStreamWaitEvent(beside, event, 0));
    std::thread opens(open_both);
    CHECK(cudaStreamSynchronize(second));
    expect_value("the default stream's work when a blocking stream is done", 2, value_of(value));
    opens.join();
    CHECK(cudaDeviceSynchronize());
    for (cudaStream_t stream : {first, second, beside}) CHECK(cudaStreamDestroy(stream));
    for (int *memory : {gate, value, seen, rounds}) CHECK(cudaFree(memory));
    set_device(there);
    for (cudaStream_t stream : {far, far_beside}) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaFree(far_gate));
}

static void other_servers_objects() {
    int *b = on_device(1, 1, 0);
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaStreamCreate(&stream));
    set_device(0);
    CHECK(cudaEventCreate(&event));
    add<<<1, 1, 0, stream>>>(b, 1, 1);
    expect_("a launch in the other server's stream", cudaErrorInvalidResourceHandle, cudaGetLastError());
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventRecord(event, stream));
    // A function belongs to the context that its module was loaded into.
    CUfunction function;
    CUcontext contexts[2];
    for (int i = 0; i < 2; i++) DRIVER(cuDevicePrimaryCtxRetain(&contexts[i], i));
    cudaFunction_t found;
    CHECK(cudaGetFuncBySymbol(&found, (const void *)read_variable));
    function = (CUfunction)found;
    // What stands for all contexts is not it.
    CUfunction own;
    if (cuKernelGetFunction(&own, (CUkernel)found) == CUDA_SUCCESS) function = own;
    CUdeviceptr to = (CUdeviceptr)b;
    void *parameters[] = {&to};
    DRIVER(cuCtxSetCurrent(contexts[1]));
    CUresult launched = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0);
    expect_value("a launch of the other server's function", CUDA_ERROR_INVALID_HANDLE, launched);
    for (int i = 0; i < 2; i++) DRIVER(cuDevicePrimaryCtxRelease(i));
    set_device(1);
    expect_value("nothing was launched", 1, holds(b, 1, 0));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(b));
    set_device(0);
    CHECK(cudaEventDestroy(event));
}

static void copies(size_t bytes) {
    int n = bytes / sizeof(int);
    for (int from = 0; from < 2; from++) {
        int to = 1 - from;
        int *a = on_device(from, n, 3), *b = on_device(to, n, 0), *c = on_device(from, n, 0);
        for (int current = 0; current < 2; current++) {
            set_device(current);
            CHECK(cudaMemset(b, 0, bytes));
            CHECK(cudaMemcpy(b, a, bytes, cudaMemcpyDefault));
            expect_value("cudaMemcpyDefault", 1, holds(b, n, 3));
            CHECK(cudaMemset(c, 0, bytes));
            CHECK(cudaMemcpyPeer(c, from, b, to, bytes));
            expect_value("cudaMemcpyPeer", 1, holds(c, n, 3));
            cudaStream_t stream;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            CHECK(cudaMemsetAsync(b, 0, bytes, stream));
            CHECK(cudaMemcpyPeerAsync(b, to, a, from, bytes, stream));
            CHECK(cudaMemsetAsync(c, 0, bytes, stream));
            CHECK(cudaMemcpyAsync(c, b, bytes, cudaMemcpyDeviceToDevice, stream));
            CHECK(cudaStreamSynchronize(stream));
            expect_value("asynchronous copies there", 1, holds(b, n, 3));
            expect_value("asynchronous copies back", 1, holds(c, n, 3));
            CHECK(cudaStreamDestroy(stream));
        }
        set_device(from);
        CHECK(cudaFree(a));
        CHECK(cudaFree(b));
        CHECK(cudaFree(c));
    }
}

static void boxes() {
    const int width = 60, height = 50, depth = 5;
    std::vector<int> host(width * height * depth), back(host.size());
    for (size_t i = 0; i < host.size(); i++) host[i] = i * 3 + 1;
    cudaPitchedPtr at[2];
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaMalloc3D(&at[i], make_cudaExtent(width * sizeof(int), height, depth)));
        CHECK(cudaMemset(at[i].ptr, 0, at[i].pitch * height * depth));
    }
    // Down to the first device, which is not current, over to the second, and back.
    cudaMemcpy3DParms down = {};
    down.srcPtr = make_cudaPitchedPtr(host.data(), width * sizeof(int), width, height);
    down.dstPtr = at[0];
    down.extent = make_cudaExtent(width * sizeof(int), height, depth);
    down.kind = cudaMemcpyDefault;
    CHECK(cudaMemcpy3D(&down));
    cudaMemcpy3DPeerParms over = {};
    over.srcPtr = at[0];
    over.srcDevice = 0;
    over.dstPtr = at[1];
    over.dstDevice = 1;
    over.extent = down.extent;
    CHECK(cudaMemcpy3DPeer(&over));
    cudaMemcpy3DParms up = {};
    up.srcPtr = at[1];
    up.dstPtr = make_cudaPitchedPtr(back.data(), width * sizeof(int), width, height);
    up.extent = down.extent;
    up.kind = cudaMemcpyDefault;
    CHECK(cudaMemcpy3D(&up));
    expect_value("a box", 1, back == host);
    // Rows of one slice.
    CHECK(cudaMemset(at[0].ptr, 0, at[0].pitch * height * depth));
    CHECK(cudaMemcpy2D(at[0].ptr, at[0].pitch, at[1].ptr, at[1].pitch, width * sizeof(int), height, cudaMemcpyDefault));
    std::fill(back.begin(), back.end(), 0);
    CHECK(cudaMemcpy2D(back.data(), width * sizeof(int), at[0].ptr, at[0].pitch, width * sizeof(int), height, cudaMemcpyDefault));
    expect_value("rows", 1, std::equal(back.begin(), back.begin() + width * height, host.begin()));
    // Arrays at both ends, and at one.
    cudaArray_t arrays[2];
    cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaMalloc3DArray(&arrays[i], &format, make_cudaExtent(width, height, depth)));
    }
    cudaMemcpy3DParms fill = {};
    fill.srcPtr = make_cudaPitchedPtr(host.data(), width * sizeof(int), width, height);
    fill.dstArray = arrays[0];
    fill.extent = make_cudaExtent(width, height, depth);
    fill.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&fill));
    cudaMemcpy3DPeerParms across = {};
    across.srcArray = arrays[0];
    across.srcDevice = 0;
    across.dstArray = arrays[1];
    across.dstDevice = 1;
    across.extent = fill.extent;
    CHECK(cudaMemcpy3DPeer(&across));
    cudaMemcpy3DParms fetch = {};
    fetch.srcArray = arrays[1];
    fetch.dstPtr = make_cudaPitchedPtr(back.data(), width * sizeof(int), width, height);
    fetch.extent = fill.extent;
    fetch.kind = cudaMemcpyDeviceToHost;
    std::fill(back.begin(), back.end(), 0);
    CHECK(cudaMemcpy3D(&fetch));
    expect_value("arrays", 1, back == host);
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaFreeArray(arrays[i]));
        CHECK(cudaFree(at[i].ptr));
    }
}

static void graphs() {
    const int n = 1 << 14;
    int *a = on_device(0, n, 0), *b = on_device(1, n, 0);
    set_device(0);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    add<<<n / 256, 256, 0, stream>>>(a, n, 1);
    CHECK(cudaMemcpyPeerAsync(b, 1, a, 0, n * sizeof(int), stream));
    add<<<n / 256, 256, 0, stream>>>(a, n, 10);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_value("a graph's kernels", 1, holds(a, n, 33));
    expect_value("a graph's copy to the other server", 1, holds(b, n, 23));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
}

// A graph's kernels are of one server. Work that a capture brings to another one's is refused, and not put on the wrong device.
static void graph_of_both() {
    int *a = on_device(0, 1, 0), *b = on_device(1, 1, 0);
    cudaStream_t first, second;
    cudaEvent_t fork, joined;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    set_device(1);
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    set_device(0);
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    // Each call may be the one that refuses it.
    bool works = cudaStreamBeginCapture(first, cudaStreamCaptureModeRelaxed) == cudaSuccess;
    works = works && cudaEventRecord(fork, first) == cudaSuccess && cudaStreamWaitEvent(second, fork, 0) == cudaSuccess;
    add<<<1, 1, 0, first>>>(a, 1, 1);
    set_device(1);
    add<<<1, 1, 0, second>>>(b, 1, 1);
    works = works && cudaGetLastError() == cudaSuccess && cudaEventRecord(joined, second) == cudaSuccess;
    set_device(0);
    works = works && cudaStreamWaitEvent(first, joined, 0) == cudaSuccess;
    works = cudaStreamEndCapture(first, &graph) == cudaSuccess && works;
    works = works && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphLaunch(exec, first) == cudaSuccess;
    works = works && cudaStreamSynchronize(first) == cudaSuccess;
    cudaGetLastError();
    expect_value("a graph with kernels of two servers is refused", 0, works);
    expect_value("the second server's kernel did not run", 1, holds(b, 1, 0));
    if (exec) CHECK(cudaGraphExecDestroy(exec));
    if (graph) CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(first));
    CHECK(cudaStreamDestroy(second));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(joined));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
}

// Memory in stream order, freed by the other server's stream too; and a pool that the other server's device cannot reach.
static void stream_ordered() {
    const int n = 1 << 12;
    cudaStream_t streams[2];
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    for (int round = 0; round < 8; round++) {
        int *data[2];
        for (int i = 0; i < 2; i++) {
            set_device(i);
            CHECK(cudaMallocAsync(&data[i], n * sizeof(int), streams[i]));
            CHECK(cudaMemsetAsync(data[i], 0, n * sizeof(int), streams[i]));
            add<<<n / 256, 256, 0, streams[i]>>>(data[i], n, 1 + i);
        }
        // The copy comes behind what the second stream has done with its memory, and before what it does next.
        cudaEvent_t ready, copied;
        CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
        CHECK(cudaEventRecord(ready, streams[1]));
        set_device(0);
        CHECK(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
        CHECK(cudaStreamWaitEvent(streams[0], ready, 0));
        CHECK(cudaMemcpyPeerAsync(data[1], 1, data[0], 0, n * sizeof(int), streams[0]));
        CHECK(cudaEventRecord(copied, streams[0]));
        CHECK(cudaStreamWaitEvent(streams[1], copied, 0));
        set_device(1);
        add<<<n / 256, 256, 0, streams[1]>>>(data[1], n, 5);
        std::vector<int> host(n, -1);
        CHECK(cudaMemcpyAsync(host.data(), data[1], n * sizeof(int), cudaMemcpyDeviceToHost, streams[1]));
        CHECK(cudaStreamSynchronize(streams[1]));
        bool right = true;
        for (int value : host) right = right && value == 1 + 5;
        expect_value("memory in stream order", 1, right);
        CHECK(cudaEventDestroy(ready));
        CHECK(cudaEventDestroy(copied));
        CHECK(cudaFreeAsync(data[1], streams[0]));
        CHECK(cudaFreeAsync(data[0], streams[0]));
    }
    for (int i = 0; i < 2; i++) CHECK(cudaStreamSynchronize(streams[i]));
    cudaMemPool_t pool;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    cudaMemAccessDesc access = {};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = 1;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    RETURNS(cudaErrorInvalidDevice, cudaMemPoolSetAccess(pool, &access, 1));
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaStreamDestroy(streams[i]));
    }
}

// Managed memory of both servers: each has what its own device and the host write, page by page.
static void managed_of_both() {
    const int n = 3000;
    int *data[2];
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaMallocManaged(&data[i], n * sizeof(int)));
        for (int k = 0; k < n; k++) data[i][k] = k;
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2; i++) {
            set_device(i);
            add<<<(n + 255) / 256, 256>>>(data[i], n, 10 * (i + 1));
        }
        for (int i = 0; i < 2; i++) {
            set_device(i);
            CHECK(cudaDeviceSynchronize());
            data[i][round] += 1000;
        }
    }
    for (int i = 0; i < 2; i++) {
        bool right = true;
        for (int k = 0; k < n; k++) right = right && data[i][k] == k + 30 * (i + 1) + (k < 3 ? 1000 : 0);
        expect_value("managed memory of a server", 1, right);
    }
    // The host reads and writes managed memory without asking, so a synchronous copy is done when the call returns. The stream is held until then, or for a while.
    set_device(0);
    int *linear = on_device(0, n, 0);
    auto behind_a_gate = [](auto copy) {
        Gate gate;
        CHECK(cudaLaunchHostFunc(0, Gate::wait, &gate));
        std::thread opener([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            gate.open = true;
        });
        copy();
        opener.join();
        CHECK(cudaStreamSynchronize(0));
    };
    behind_a_gate([&] {
        CHECK(cudaMemcpy(data[0], data[1], n * sizeof(int), cudaMemcpyDefault));
        expect_value("managed memory copied from the other server", 3 + 60, data[0][3]);
    });
    behind_a_gate([&] {
        CHECK(cudaMemcpy2D(data[0], 64, data[1], 32, 32, 20, cudaMemcpyDefault));
        expect_value("rows of managed memory copied from the other server", 8 + 60, data[0][16]);
    });
    behind_a_gate([&] {
        CHECK(cudaMemcpy(linear, data[1], n * sizeof(int), cudaMemcpyDefault));
        for (int k = 0; k < n; k++) data[1][k] = -1;
    });
    std::vector<int> host(n, -1);
    CHECK(cudaMemcpy(host.data(), linear, n * sizeof(int), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int k = 0; k < n; k++) right = right && host[k] == k + 60 + (k < 3 ? 1000 : 0);
    expect_value("what managed memory held at the call", 1, right);
    CHECK(cudaFree(linear));
    for (int i = 0; i < 2; i++) CHECK(cudaFree(data[i]));
}

// A managed variable is one place for the host and the kernels of one server. The same code is not loaded on another, where it would have a variable that the host never sees.
static void managed_variable() {
    CUlibrary library;
    CUkernel kernel;
    CUdeviceptr address;
    size_t size;
    set_device(0);
    DRIVER(cuLibraryLoadData(&library, MANAGED_CODE, nullptr, nullptr, 0, nullptr, nullptr, 0));
    DRIVER(cuLibraryGetKernel(&kernel, library, "bump"));
    DRIVER(cuLibraryGetManaged(&address, &size, library, "shared_word"));
    volatile int *word = (volatile int *)address;
    *word = 41;
    DRIVER(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr));
    DRIVER(cuCtxSynchronize());
    expect_value("a managed variable", 42, *word);
    set_device(1);
    CUresult launched = cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr);
    expect_value("its code on the other server", CUDA_ERROR_NOT_SUPPORTED, launched);
    CHECK(cudaDeviceSynchronize());
    expect_value("the variable is as it was", 42, *word);
    // And if the code is on both servers before the program asks where the variable is.
    CUlibrary other;
    DRIVER(cuLibraryLoadData(&other, MANAGED_CODE, nullptr, nullptr, 0, nullptr, nullptr, 0));
    DRIVER(cuLibraryGetKernel(&kernel, other, "bump"));
    for (int i = 0; i < 2; i++) {
        set_device(i);
        DRIVER(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr));
        CHECK(cudaDeviceSynchronize());
    }
    expect_value("a managed variable of code on both servers", CUDA_ERROR_NOT_SUPPORTED,
                 cuLibraryGetManaged(&address, &size, other, "shared_word"));
    DRIVER(cuLibraryUnload(other));
    DRIVER(cuLibraryUnload(library));
}

// Pinned memory that kernels of one server after the other use. True: the second one can, because both servers are on this host.
static bool mapped(int n, bool *wrong) {
    int *data;
    set_device(0);
    CHECK(cudaHostAlloc(&data, n * sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped));
    for (int i = 0; i < n; i++) data[i] = i;
    add<<<n / 256, 256>>>(data, n, 1);
    CHECK(cudaDeviceSynchronize());
    set_device(1);
    add<<<n / 256, 256>>>(data, n, 1);
    cudaError_t error = cudaDeviceSynchronize();
    int sum = error == cudaSuccess ? 2 : 1;
    for (int i = 0; i < n; i++) *wrong = *wrong || data[i] != i + sum;
    return error == cudaSuccess;
}

// Managed memory is with the server of the device that was current. The host and copies to the other server see what that device wrote.
static void managed() {
    const int n = 1 << 12;
    int *data, *b = on_device(1, n, 0);
    set_device(0);
    CHECK(cudaMallocManaged(&data, n * sizeof(int)));
    for (int i = 0; i < n; i++) data[i] = i;
    add<<<n / 256, 256>>>(data, n, 5);
    CHECK(cudaDeviceSynchronize());
    data[0] += 100;
    data[0] -= 100;
    CHECK(cudaMemcpyPeer(b, 1, data, 0, n * sizeof(int)));
    expect_value("managed memory on the other server", 1, holds(b, n, 5));
    set_device(1);
    add<<<n / 256, 256>>>(b, n, 1);
    CHECK(cudaMemcpy(data, b, n * sizeof(int), cudaMemcpyDefault));
    set_device(0);
    add<<<n / 256, 256>>>(data, n, 1);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) {
        if (data[i] != i + 7) {
            expect_value("managed memory that came back", i + 7, data[i]);
            break;
        }
    }
    CHECK(cudaFree(data));
    CHECK(cudaFree(b));
}

// A kernel of the other server does not reach it: that is an error of that device, and of no other.
static int unreachable() {
    int *data;
    set_device(0);
    CHECK(cudaMallocManaged(&data, sizeof(int)));
    *data = 1;
    set_device(1);
    add<<<1, 1>>>(data, 1, 1);
    cudaError_t error = cudaDeviceSynchronize();
    expect_value("an error of the second device", 1, error != cudaSuccess);
    set_device(0);
    add<<<1, 1>>>(data, 1, 1);
    CHECK(cudaDeviceSynchronize());
    expect_value("what the first device added", 2, *data);
    // Freeing and unregistering wait for both devices.
    void *pinned;
    std::vector<char> registered(1 << 16);
    CHECK(cudaMallocHost(&pinned, 1 << 16));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaHostRegister(registered.data(), registered.size(), 0));
    CHECK(cudaHostUnregister(registered.data()));
    // The first time that memory is shared, what was copied before must have arrived on both.
    void *shared;
    cudaIpcMemHandle_t handle;
    CHECK(cudaMalloc(&shared, 1 << 16));
    CHECK(cudaIpcGetMemHandle(&handle, shared));
    CHECK(cudaFree(shared));
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("%s", cudaGetErrorName(error));
}

// Kernels of both servers use one piece of pinned memory, or the second one's fails because only one server is on this host, or because it is too much. The first device goes on.
static int pinned_of_both(int n) {
    bool wrong = false, both = mapped(n, &wrong);
    expect_value("bytes of pinned memory", 0, wrong);
    int *data = on_device(0, 1, 0);
    add<<<1, 1>>>(data, 1, 1);
    CHECK(cudaDeviceSynchronize());
    expect_value("what the first device added", 1, holds(data, 1, 1));
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("%s", both ? "both servers" : "one server");
}

// Until the second server is gone, and beyond that on the first.
static int lost() {
    const int n = 1 << 12;
    int *a = on_device(0, n, 0), *b = on_device(1, n, 0);
    // Kernels of both use it, if they can.
    int *pinned, words = 0;
    void *on_second;
    set_device(0);
    CHECK(cudaMallocHost(&pinned, n * sizeof(int)));
    for (int i = 0; i < n; i++) pinned[i] = i;
    add<<<n / 256, 256>>>(pinned, n, ++words);
    CHECK(cudaDeviceSynchronize());
    set_device(1);
    if (cudaHostGetDevicePointer(&on_second, pinned, 0) == cudaSuccess) {
        add<<<n / 256, 256>>>(pinned, n, 1);
        CHECK(cudaDeviceSynchronize());
        words++;
    }
    cudaStream_t waits;
    cudaEvent_t event;
    static Gate gate;
    set_device(0);
    CHECK(cudaStreamCreateWithFlags(&waits, cudaStreamNonBlocking));
    set_device(1);
    CHECK(cudaEventCreate(&event));
    cudaStream_t held;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaLaunchHostFunc(held, Gate::wait, &gate));
    CHECK(cudaEventRecord(event, held));
    set_device(0);
    CHECK(cudaStreamWaitEvent(waits, event, 0));
    printf("READY\n");
    fflush(stdout);
    set_device(1);
    cudaError_t error = cudaSuccess;
    auto begin = std::chrono::steady_clock::now();
    while (error == cudaSuccess && std::chrono::steady_clock::now() - begin < std::chrono::minutes(5)) {
        error = cudaMemcpy(b, b + 1, 4, cudaMemcpyDeviceToDevice);
        if (error == cudaSuccess) error = cudaStreamSynchronize(0);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    expect_value("an error of the lost device", 1, error != cudaSuccess);
    set_device(0);
    // What waited for the lost server says so once, and goes on.
    expect_value("the waiting stream has an error", 1, cudaStreamSynchronize(waits) != cudaSuccess);
    expect_value("a copy from the lost server fails", 1, cudaMemcpyPeer(a, 0, b, 1, 4) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess);
    cudaGetLastError();
    add<<<n / 256, 256>>>(a, n, 1);
    CHECK(cudaDeviceSynchronize());
    expect_value("the first device goes on", 1, holds(a, n, 1));
    int *more = on_device(0, n, 5);
    expect_value("new memory", 1, holds(more, n, 5));
    add<<<n / 256, 256>>>(pinned, n, 1);
    CHECK(cudaDeviceSynchronize());
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += pinned[i] != i + words + 1;
    expect_value("pinned memory that the lost device used as well", 0, wrong);
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("the other server's devices go on");
}

__global__ void fill(unsigned *data, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) data[i] = seed + unsigned(i) * 2654435761u;
}

__global__ void count_wrong(const unsigned *data, size_t n, unsigned seed, int *wrong) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        if (data[i] != seed + unsigned(i) * 2654435761u) atomicAdd(wrong, 1);
    }
}

// Words of a box whose rows are `pitch` words apart and have `width` words that were filled, and otherwise zero.
__global__ void count_wrong_rows(const unsigned *data, size_t n, unsigned seed, unsigned width, unsigned pitch, int *wrong) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        unsigned expected = i % pitch < width ? seed + unsigned(i) * 2654435761u : 0;
        if (data[i] != expected) atomicAdd(wrong, 1);
    }
}

// A copy of rows with gaps, in one slice and in several, so large that it takes several connections.
static void large_boxes(unsigned *source, unsigned *target, int *wrong[2], unsigned seed) {
    const unsigned blocks = 32, threads = 64, width = 1020, pitch = 1024;
    for (unsigned depth : {1u, 3u}) {
        const unsigned height = 4500 / depth;
        const size_t n = size_t(pitch) * height * depth;
        set_device(0);
        fill<<<blocks, threads>>>(source, n, seed);
        set_device(1);
        CHECK(cudaMemset(target, 0, n * sizeof(unsigned)));
        CHECK(cudaMemset(wrong[1], 0, sizeof(int)));
        cudaMemcpy3DPeerParms copy = {};
        copy.srcDevice = 0;
        copy.srcPtr = make_cudaPitchedPtr(source, pitch * sizeof(unsigned), pitch * sizeof(unsigned), height);
        copy.dstDevice = 1;
        copy.dstPtr = make_cudaPitchedPtr(target, pitch * sizeof(unsigned), pitch * sizeof(unsigned), height);
        copy.extent = make_cudaExtent(width * sizeof(unsigned), height, depth);
        CHECK(cudaMemcpy3DPeer(&copy));
        int count = 0;
        count_wrong_rows<<<blocks, threads>>>(target, n, seed, width, pitch, wrong[1]);
        CHECK(cudaMemcpy(&count, wrong[1], sizeof count, cudaMemcpyDeviceToHost));
        expect_value("wrong words of a box", 0, count);
    }
}

// Prints what tells where wrong words came from: the first one, the seed that it would have at this place, the
// place that it would have with the right seed, and whether they are still wrong a moment later.
static void describe_wrong_words(const unsigned *data, size_t n, unsigned seed, cudaStream_t stream) {
    std::vector<unsigned> words(n);
    for (const char *when : {"now", "0.2 s later"}) {
        CHECK(cudaMemcpyAsync(words.data(), data, n * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        size_t wrong = 0, first = 0, last = 0;
        for (size_t i = 0; i < n; i++) {
            if (words[i] == seed + unsigned(i) * 2654435761u) continue;
            if (!wrong++) first = i;
            last = i;
        }
        unsigned value = words[first];
        // The factor's inverse modulo 2^32.
        unsigned place = (value - seed) * 0xe8b2f51u;
        fprintf(stderr, "%s: %zu of %zu words are wrong, from %zu to %zu; the first is %#x, of seed %u (instead of %u), or of word %u\n",
                when, wrong, n, first, last, value, value - unsigned(first) * 2654435761u, seed, place);
        usleep(200000);
    }
}

// Copies in both directions at once, made and checked by kernels: of their bytes the host needs none. The number of bytes is printed. `forever`: of these sizes, again and again, until the test ends the program.
static int direct(const std::vector<size_t> &forever) {
    const size_t most = size_t(64) << 20;
    const unsigned blocks = 32, threads = 64;
    unsigned *source[2], *target[2];
    int *wrong[2];
    cudaStream_t streams[2];
    for (int i = 0; i < 2; i++) {
        set_device(i);
        CHECK(cudaMalloc(&source[i], most));
        CHECK(cudaMalloc(&target[i], most));
        CHECK(cudaMalloc(&wrong[i], sizeof(int)));
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    size_t copied = 0;
    unsigned seed = 1;
    std::vector<size_t> sizes = {4, 1000, (128 << 10) + 4, 1 << 20, (5 << 20) + 20, most};
    if (!forever.empty()) sizes = forever;
    do {
        for (size_t bytes : sizes) {
            size_t n = bytes / sizeof(unsigned);
            for (int i = 0; i < 2; i++) {
                set_device(i);
                CHECK(cudaMemsetAsync(target[i], 0, bytes, streams[i]));
                fill<<<blocks, threads, 0, streams[i]>>>(source[i], n, seed + i);
                CHECK(cudaStreamSynchronize(streams[i]));
            }
            // By the stream of the sending device, and of the receiving one.
            for (int i = 0; i < 2; i++) {
                set_device(i);
                int from = seed & 2 ? i : 1 - i;
                CHECK(cudaMemcpyPeerAsync(target[1 - from], 1 - from, source[from], from, bytes, streams[i]));
            }
            for (int i = 0; i < 2; i++) CHECK(cudaStreamSynchronize(streams[i]));
            for (int i = 0; i < 2; i++) {
                int count = 0;
                set_device(i);
                CHECK(cudaMemsetAsync(wrong[i], 0, sizeof(int), streams[i]));
                count_wrong<<<blocks, threads, 0, streams[i]>>>(target[i], n, seed + 1 - i, wrong[i]);
                CHECK(cudaMemcpyAsync(&count, wrong[i], sizeof count, cudaMemcpyDeviceToHost, streams[i]));
                CHECK(cudaStreamSynchronize(streams[i]));
                if (count) describe_wrong_words(target[i], n, seed + 1 - i, streams[i]);
                expect_value("wrong words of a copy between servers", 0, count);
            }
            copied += bytes;
            seed += 2;
            if (mismatches) break;
        }
        if (forever.size() > 2) large_boxes(source[0], target[1], wrong, seed);
        if (!forever.empty()) {
            printf("COPIED\n");
            fflush(stdout);
        }
    } while (!forever.empty() && !mismatches);
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("%zu bytes each way", copied);
}

// Copies of so many bytes from the first device to the second, one after the other, each of which the host waits for.
static int one_by_one(unsigned count, size_t bytes) {
    const unsigned blocks = 32, threads = 64;
    unsigned *source, *target;
    int *wrong, found = 0;
    size_t n = bytes / sizeof(unsigned);
    set_device(1);
    CHECK(cudaMalloc(&target, bytes));
    CHECK(cudaMalloc(&wrong, sizeof(int)));
    CHECK(cudaMemset(wrong, 0, sizeof(int)));
    set_device(0);
    CHECK(cudaMalloc(&source, bytes));
    fill<<<blocks, threads>>>(source, n, 5u);
    CHECK(cudaDeviceSynchronize());
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (unsigned i = 0; i < count; i++) {
        CHECK(cudaMemcpyPeerAsync(target, 1, source, 0, bytes, stream));
        CHECK(cudaStreamSynchronize(stream));
    }
    set_device(1);
    count_wrong<<<blocks, threads>>>(target, n, 5u, wrong);
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    expect_value("wrong words of a copy between servers", 0, found);
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("%u copies of %zu bytes", count, bytes);
}

static std::vector<int> words_of(const int *data, int n) {
    std::vector<int> host(n, -1);
    CHECK(cudaMemcpy(host.data(), data, n * sizeof(int), cudaMemcpyDeviceToHost));
    return host;
}

// Copies that are queued behind each other before the first begins, so that several may be under way at once. Whatever each needs of the ones before has happened: bytes have the order of the stream.
static void queued_copies(int n, bool default_stream) {
    const int count = 6;
    const size_t bytes = n * sizeof(int);
    int *a[count], *b[count];
    for (int k = 0; k < count; k++) {
        a[k] = on_device(0, n, 1000 * k);
        b[k] = on_device(1, n, -1);
    }
    set_device(0);
    cudaStream_t stream = 0, other;
    if (!default_stream) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    auto queued = [&](auto copies) {
        Gate gate;
        set_device(0);
        CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
        copies();
        gate.open = true;
        CHECK(cudaStreamSynchronize(stream));
    };
    auto to = [&](int *target, const int *source, size_t size) { CHECK(cudaMemcpyPeerAsync(target, 1, source, 0, size, stream)); };
    auto back = [&](int *target, const int *source, size_t size) { CHECK(cudaMemcpyPeerAsync(target, 0, source, 1, size, stream)); };
    // Each to its own memory.
    queued([&] { for (int k = 0; k < count; k++) to(b[k], a[k], bytes); });
    for (int k = 0; k < count; k++) expect_value("a copy among others", 1, holds(b[k], n, 1000 * k));
    // All to the same: the last one's bytes stay.
    queued([&] { for (int k = 0; k < count; k++) to(b[0], a[k], bytes); });
    expect_value("the last of several copies to the same memory", 1, holds(b[0], n, 1000 * (count - 1)));
    // Each over a half of the one before.
    int *wide = on_device(1, n * (count + 1) / 2, -1);
    queued([&] { for (int k = 0; k < count; k++) to(wide + n / 2 * k, a[k], bytes); });
    bool right = true;
    std::vector<int> host = words_of(wide, n * (count + 1) / 2);
    for (int i = 0; i < n * (count + 1) / 2; i++) {
        int k = std::min(i / (n / 2), count - 1);
        right = right && host[i] == i - n / 2 * k + 1000 * k;
    }
    expect_value("copies that overlap in part", 1, right);
    CHECK(cudaFree(wide));
    // Each copies what the one before has copied, there and back.
    queued([&] {
        for (int k = 0; k + 1 < count; k++) {
            to(b[k], a[k], bytes);
            back(a[k + 1], b[k], bytes);
        }
    });
    for (int k = 0; k < count; k++) expect_value("a ring of copies", 1, holds(a[k], n, 0));
    // The source of one is the target of the next.
    set_device(1);
    add<<<(n + 255) / 256, 256>>>(b[1], n, 7);
    CHECK(cudaDeviceSynchronize());
    queued([&] {
        to(b[0], a[0], bytes);
        back(a[0], b[1], bytes);
        to(b[2], a[0], bytes);
    });
    expect_value("a source that is a target next", 1, holds(b[0], n, 0) && holds(a[0], n, 7) && holds(b[2], n, 7));
    // A kernel between two copies, and events that another stream waits for.
    cudaEvent_t event;
    int *seen = on_device(1, n, -1);
    set_device(1);
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    set_device(0);
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    queued([&] {
        to(b[3], a[0], bytes);
        CHECK(cudaEventRecord(event, stream));
        set_device(1);
        CHECK(cudaStreamWaitEvent(other, event, 0));
        CHECK(cudaMemcpyAsync(seen, b[3], bytes, cudaMemcpyDeviceToDevice, other));
        set_device(0);
        to(b[4], a[0], bytes);
        CHECK(cudaEventRecord(event, stream));
        add<<<(n + 255) / 256, 256, 0, stream>>>(a[0], n, 5);
        to(b[5], a[0], bytes);
    });
    CHECK(cudaStreamSynchronize(other));
    expect_value("what comes behind an event between copies", 1, holds(seen, n, 7));
    expect_value("copies around a kernel", 1, holds(b[3], n, 7) && holds(b[4], n, 7) && holds(b[5], n, 12));
    // A graph of copies, launched twice, with the second to the target of the first.
    cudaStream_t capturing;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreateWithFlags(&capturing, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(capturing, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemcpyPeerAsync(b[0], 1, a[1], 0, bytes, capturing));
    CHECK(cudaMemcpyPeerAsync(b[0], 1, a[0], 0, bytes, capturing));
    CHECK(cudaMemcpyPeerAsync(a[2], 0, b[0], 1, bytes, capturing));
    CHECK(cudaStreamEndCapture(capturing, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, capturing));
    CHECK(cudaStreamSynchronize(capturing));
    expect_value("copies of a graph", 1, holds(b[0], n, 12) && holds(a[2], n, 12));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    // A stream that is destroyed meanwhile finishes what it has.
    {
        Gate gate;
        CHECK(cudaLaunchHostFunc(capturing, Gate::wait, &gate));
        for (int k = 0; k < count; k++) CHECK(cudaMemcpyPeerAsync(b[k], 1, a[2], 0, bytes, capturing));
        CHECK(cudaStreamDestroy(capturing));
        gate.open = true;
        CHECK(cudaDeviceSynchronize());
    }
    for (int k = 0; k < count; k++) expect_value("copies of a destroyed stream", 1, holds(b[k], n, 12));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(other));
    if (!default_stream) CHECK(cudaStreamDestroy(stream));
    for (int k = 0; k < count; k++) {
        CHECK(cudaFree(a[k]));
        CHECK(cudaFree(b[k]));
    }
    CHECK(cudaFree(seen));
}

// Copies of so many bytes from the first device to the second, none of which the host waits for: they are queued before the first begins. All but the last go to the same memory.
static int all_at_once(unsigned count, size_t bytes, bool default_stream, bool forever) {
    const unsigned blocks = 32, threads = 64, last = count - 1;
    std::vector<unsigned *> sources(count);
    unsigned *target, *last_target;
    int *wrong, found = 0;
    size_t n = bytes / sizeof(unsigned);
    set_device(1);
    CHECK(cudaMalloc(&target, bytes));
    CHECK(cudaMalloc(&last_target, bytes));
    CHECK(cudaMalloc(&wrong, sizeof(int)));
    CHECK(cudaMemset(wrong, 0, sizeof(int)));
    set_device(0);
    cudaStream_t stream = 0;
    if (!default_stream) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (unsigned *&source : sources) CHECK(cudaMalloc(&source, bytes));
    unsigned seed = 1;
    do {
        set_device(1);
        CHECK(cudaMemset(target, 0, bytes));
        CHECK(cudaMemset(last_target, 0, bytes));
        CHECK(cudaDeviceSynchronize());
        set_device(0);
        for (unsigned i = 0; i < count; i++) fill<<<blocks, threads>>>(sources[i], n, seed + i);
        CHECK(cudaDeviceSynchronize());
        Gate gate;
        CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
        for (unsigned i = 0; i < count; i++) CHECK(cudaMemcpyPeerAsync(i == last ? last_target : target, 1, sources[i], 0, bytes, stream));
        if (forever) {
            // The test says when they begin.
            printf("QUEUED\n");
            fflush(stdout);
            forever = getchar() != EOF;
        }
        gate.open = true;
        // A wait would be a question, too, and the copies' at the same time would not count.
        cudaError_t state;
        while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady) usleep(1000);
        CHECK(state);
        set_device(1);
        count_wrong<<<blocks, threads>>>(target, n, seed + last - 1, wrong);
        count_wrong<<<blocks, threads>>>(last_target, n, seed + last, wrong);
        CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
        expect_value("wrong words of copies between servers", 0, found);
        seed += count;
    } while (forever && !mismatches);
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("%u copies of %zu bytes", count, bytes);
}

// Copies of so many bytes from two devices of one server to another server's, at the same time. All are queued before the first begins.
static int from_two_devices(unsigned count, size_t bytes) {
    const int n = bytes / sizeof(int), other = 2;
    int *sources[2], *targets[2];
    cudaStream_t streams[2];
    Gate gate;
    for (int device = 0; device < 2; device++) {
        targets[device] = on_device(other, n, -1);
        sources[device] = on_device(device, n, 1000 * device);
        set_device(device);
        CHECK(cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking));
    }
    for (cudaStream_t stream : streams) CHECK(cudaLaunchHostFunc(stream, Gate::wait, &gate));
    for (unsigned i = 0; i < 2 * count; i++) {
        int device = i % 2;
        set_device(device);
        CHECK(cudaMemcpyPeerAsync(targets[device], other, sources[device], device, bytes, streams[device]));
    }
    gate.open = true;
    for (int device = 0; device < 2; device++) {
        set_device(device);
        CHECK(cudaStreamSynchronize(streams[device]));
        set_device(other);
        expect_value("a copy from one of two devices", 1, holds(targets[device], n, 1000 * device));
    }
    return mismatches ? (fail("%s", first_mismatch.c_str()), 1) : pass("%u copies of %zu bytes", 2 * count, bytes);
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    unsigned count;
    size_t bytes;
    if (sscanf(options.word.c_str(), "%ux%zu", &count, &bytes) == 2) return one_by_one(count, bytes);
    for (bool default_stream : {false, true}) {
        const char *form = default_stream ? "default_%ux%zu" : "queued_%ux%zu";
        if (sscanf(options.word.c_str(), form, &count, &bytes) == 2) return all_at_once(count, bytes, default_stream, false);
    }
    if (sscanf(options.word.c_str(), "both_%ux%zu", &count, &bytes) == 2) return from_two_devices(count, bytes);
    if (sscanf(options.word.c_str(), "broken_%ux%zu", &count, &bytes) == 2) return all_at_once(count, bytes, false, true);
    if (options.word == "unreachable") return unreachable();
    if (options.word == "pinned") return pinned_of_both(1 << 10);
    if (options.word == "much_pinned") return pinned_of_both(1 << 19);
    if (options.word == "lost") return lost();
    if (options.word == "direct") return direct({});
    if (options.word == "copies") return direct({4, size_t(3) << 20});
    if (options.word == "large") return direct({4, size_t(3) << 20, (size_t(17) << 20) + 20});
    devices();
    management();
    sequences(0, 1);
    sequences(1, 0);
    variables();
    textures();
    surfaces();
    streams();
    other_servers_event(0, 1);
    other_servers_event(1, 0);
    default_streams();
    waits_are_operations(0, 1);
    waits_are_operations(1, 0);
    other_servers_objects();
    for (size_t bytes : {size_t(4), size_t(1000), size_t(1) << 20, (size_t(5) << 20) + 20}) copies(bytes);
    boxes();
    for (bool default_stream : {false, true}) {
        for (int n : {1, 3 << 8, 3 << 18}) queued_copies(2 * n, default_stream);
    }
    graphs();
    graph_of_both();
    stream_ordered();
    managed();
    managed_of_both();
    managed_variable();
    if (mismatches) fail("%d of %d cases: %s", mismatches, cases, first_mismatch.c_str());
    return pass("%d cases", cases);
}
