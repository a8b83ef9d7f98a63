// A thread that has no current context puts work on a stream that another has made: launches, copies, fills, allocations and host functions belong to the stream's context, and the thread has none afterwards
// either. cuBLAS works so when its handle was made in one thread and is used in another, and asks first for the number of no context, by a table of its own.
#define PROGRAM "threads_without_context"
#include "common.h"
#include <cuda.h>
#include <thread>
#include <vector>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);                                    \
    } while (0)
#define NO_CONTEXT(call)                                                                                                 \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == CUDA_ERROR_INVALID_CONTEXT, "line %d: %s: %d", __LINE__, #call, (int)got_);                      \
    } while (0)

static const char ptx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 p, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r6, [%rd1];
    add.u32 %r6, %r6, %r6;
    st.global.u32 [%rd1], %r6;
DONE:
    ret;
}
)";

constexpr unsigned N = 1000;

// As NVIDIA's libraries ask: 0 is the number of no context, whether the thread has one or not.
static unsigned long long number(CUcontext context) {
    const CUuuid guid = {{0x21, 0x31, (char)0x8C, 0x60, (char)0x97, 0x14, 0x32, 0x48, (char)0x8C, (char)0xA6, 0x41, (char)0xFF, 0x73, 0x24, (char)0xC8, (char)0xF2}};
    const void *table;
    OK(cuGetExportTable(&table, &guid));
    auto get = ((CUresult(*const *)(CUcontext, unsigned long long *))table)[4];
    unsigned long long id = 77;
    OK(get(context, &id));
    return id;
}

struct Setting {
    CUfunction function;
    CUkernel kernel;
    CUstream stream;
    CUevent event;
    CUdeviceptr values, copy, managed, to_free[2];
    CUmemoryPool pool;
};

static void work(const Setting &s) {
    CUcontext mine = (CUcontext)1;
    OK(cuCtxGetCurrent(&mine));
    REQUIRE(mine == nullptr, "a new thread has a context");
    REQUIRE(number(nullptr) == 0, "no context has a number");
    CUstreamCaptureStatus capturing;
    OK(cuStreamIsCapturing(s.stream, &capturing));
    REQUIRE(capturing == CU_STREAM_CAPTURE_STATUS_NONE, "the stream is being captured");

    unsigned n = N, seven = 7, calls = 0;
    void *arguments[] = {const_cast<CUdeviceptr *>(&s.values), &n};
    std::vector<unsigned> back(N, 0);
    OK(cuMemsetD32Async(s.values, 5, N, s.stream));
    OK(cuMemcpyHtoDAsync(s.values, &seven, 4, s.stream));
    OK(cuLaunchKernel(s.function, (N + 127) / 128, 1, 1, 128, 1, 1, 0, s.stream, arguments, nullptr));
    OK(cuLaunchKernel((CUfunction)s.kernel, (N + 127) / 128, 1, 1, 128, 1, 1, 0, s.stream, arguments, nullptr));
    CUlaunchConfig config = {};
    config.gridDimX = (N + 127) / 128, config.blockDimX = 128;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.hStream = s.stream;
    OK(cuLaunchKernelEx(&config, (CUfunction)s.kernel, arguments, nullptr));
    OK(cuMemcpyDtoDAsync(s.copy, s.values, N * 4, s.stream));
    OK(cuLaunchHostFunc(s.stream, [](void *calls) { ++*(unsigned *)calls; }, &calls));
    OK(cuEventRecord(s.event, s.stream));
    OK(cuStreamWaitEvent(s.stream, s.event, 0));
    OK(cuEventSynchronize(s.event));
    REQUIRE(calls == 1, "the host function was called %u times", calls);
    OK(cuMemcpyDtoHAsync(back.data(), s.copy, N * 4, s.stream));
    OK(cuStreamSynchronize(s.stream));
    for (unsigned i = 0; i < N; i++) REQUIRE(back[i] == 8 * (i ? 5 : 7), "value %u is %u", i, back[i]);

    // Memory in the stream's order, of the device's pool and of a named one.
    CUdeviceptr ordered[2];
    unsigned first = 0;
    OK(cuMemAllocAsync(&ordered[0], N * 4, s.stream));
    OK(cuMemAllocFromPoolAsync(&ordered[1], N * 4, s.pool, s.stream));
    for (CUdeviceptr p : ordered) {
        OK(cuMemcpyDtoDAsync(p, s.values, N * 4, s.stream));
        OK(cuMemcpyDtoHAsync(&first, p, 4, s.stream));
        OK(cuMemFreeAsync(p, s.stream));
        OK(cuStreamSynchronize(s.stream));
        REQUIRE(first == 8 * 7, "the first value is %u", first);
    }

    // A capture of the stream, and managed memory that is moved in its order.
    CUgraph graph;
    size_t nodes = 0;
    OK(cuStreamBeginCapture(s.stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemsetD32Async(s.values, 6, N, s.stream));
    OK(cuStreamEndCapture(s.stream, &graph));
    OK(cuGraphGetNodes(graph, nullptr, &nodes));
    REQUIRE(nodes == 1, "%zu nodes were captured", nodes);
    OK(cuGraphDestroy(graph));
    CUmemLocation there = {};
    there.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(cuMemPrefetchAsync(s.managed, N * 4, there, 0, s.stream));
    OK(cuStreamSynchronize(s.stream));

    // Memory belongs to the context in which it was made, so it can be freed.
    for (CUdeviceptr p : s.to_free) OK(cuMemFree(p));

    // The default streams are those of the current context, and there is none.
    for (CUstream none : {(CUstream) nullptr, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
        NO_CONTEXT(cuMemsetD32Async(s.values, 5, N, none));
        NO_CONTEXT(cuLaunchKernel(s.function, 1, 1, 1, 1, 1, 1, 0, none, arguments, nullptr));
        NO_CONTEXT(cuMemcpyDtoDAsync(s.copy, s.values, 4, none));
        NO_CONTEXT(cuMemAllocAsync(&ordered[0], 4, none));
        NO_CONTEXT(cuMemFreeAsync(s.copy, none));
    }
    CUdeviceptr more;
    NO_CONTEXT(cuMemAlloc(&more, 4));
    OK(cuCtxGetCurrent(&mine));
    REQUIRE(mine == nullptr, "the thread has got a context");
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    OK(cuInit(0));
    CUdevice device;
    OK(cuDeviceGet(&device, 0));
    CUcontext context;
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    REQUIRE(number(nullptr) == 0 && number(context) != 0, "the numbers of no context and of one are %llu and %llu", number(nullptr), number(context));
    Setting s;
    CUmodule module;
    CUlibrary library;
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&s.function, module, "twice"));
    OK(cuLibraryLoadData(&library, ptx, nullptr, nullptr, 0, nullptr, nullptr, 0));
    OK(cuLibraryGetKernel(&s.kernel, library, "twice"));
    OK(cuMemAlloc(&s.values, N * 4));
    OK(cuMemAlloc(&s.copy, N * 4));
    OK(cuMemAllocManaged(&s.managed, N * 4, CU_MEM_ATTACH_GLOBAL));
    CUmemPoolProps props = {};
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(cuMemPoolCreate(&s.pool, &props));
    OK(cuEventCreate(&s.event, 0));
    for (unsigned flags : {CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING}) {
        OK(cuStreamCreate(&s.stream, flags));
        OK(cuMemAlloc(&s.to_free[0], 100));
        OK(cuMemAllocManaged(&s.to_free[1], 100, CU_MEM_ATTACH_GLOBAL));
        std::thread(work, s).join();
        OK(cuStreamDestroy(s.stream));
    }
    OK(cuMemPoolDestroy(s.pool));
    OK(cuLibraryUnload(library));
    OK(cuModuleUnload(module));
    OK(cuDevicePrimaryCtxRelease(device));
    return pass("on streams of both kinds");
}
