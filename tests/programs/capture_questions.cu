// What captures allow: questions about streams, calls that touch no stream, and what a kernel's node tells of attributes
// that were never set. The results are those of NVIDIA's driver 580 on an H200.
#define PROGRAM "capture_questions"
#include "cases.h"

#include <cuda.h>
#include <functional>
#include <vector>

static const char *ptx = ".version 7.8\n.target sm_75\n.address_size 64\n.visible .entry empty() { ret; }\n";

static const CUresult FINE = CUDA_SUCCESS, REFUSED = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                      IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, INVALID = CUDA_ERROR_INVALID_VALUE;

static const char *name(CUresult status) {
    const char *text = "?";
    cuGetErrorName(status, &text);
    return text;
}

static void is(const std::string &what, CUresult want, CUresult got) {
    cases++;
    if (want != got) not_met((what + ": expected " + name(want) + ", got " + name(got)).c_str());
}

#define DRIVER(call)                                                                       \
    do {                                                                                   \
        CUresult result_ = (call);                                                         \
        REQUIRE(result_ == CUDA_SUCCESS, "%d: %s: %s", __LINE__, #call, name(result_));    \
    } while (0)

static CUdevice device;
static CUcontext context;
static CUfunction kernel;
static CUdeviceptr memory;
static CUstream captured, other, free_one;

// Asks within a capture. What is refused ends it, unless it is `harmless`.
static CUresult within(const std::string &what, CUstreamCaptureMode mode, CUresult want, bool harmless, const std::function<CUresult()> &call) {
    CUgraph graph = nullptr;
    CUstreamCaptureStatus after;
    DRIVER(cuStreamBeginCapture(captured, mode));
    CUresult answer = call();
    DRIVER(cuStreamIsCapturing(captured, &after));
    CUresult ended = cuStreamEndCapture(captured, &graph);
    printf("%s, mode %d: %s, then %d, end %s\n", what.c_str(), (int)mode, name(answer), (int)after, name(ended));
    is(what, want, answer);
    bool ends = !harmless && (want == REFUSED || want == IMPLICIT);
    is(what + ", the end", ends ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, ended);
    expect_value((what + ", the capture").c_str(), ends ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE, after);
    if (graph) DRIVER(cuGraphDestroy(graph));
    return answer;
}

// About each kind of stream.
static void questions() {
    int number;
    unsigned flags;
    cuuint64_t id;
    unsigned long long stream_id;
    CUcontext found;
    CUgreenCtx green;
    CUlaunchAttributeValue value;
    CUstreamCaptureStatus status;
    CUevent event;
    DRIVER(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const CUlaunchAttributeID how_to_wait = CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY;
    struct {
        const char *name;
        // Of the captured stream; and of another, while the thread captures in global and in relaxed mode.
        CUresult of_captured, of_other, relaxed;
        std::function<CUresult(CUstream)> ask;
    } questions[] = {
        {"cuStreamGetPriority", FINE, FINE, FINE, [&](CUstream s) { return cuStreamGetPriority(s, &number); }},
        {"cuStreamGetFlags", REFUSED, FINE, FINE, [&](CUstream s) { return cuStreamGetFlags(s, &flags); }},
        {"cuStreamGetDevice", REFUSED, FINE, FINE, [&](CUstream s) { return cuStreamGetDevice(s, &number); }},
        {"cuStreamGetId", REFUSED, FINE, FINE, [&](CUstream s) { return cuStreamGetId(s, &stream_id); }},
        {"cuStreamGetCtx", FINE, FINE, FINE, [&](CUstream s) { return cuStreamGetCtx(s, &found); }},
        {"cuStreamGetCtx_v2", FINE, FINE, FINE, [&](CUstream s) { return cuStreamGetCtx_v2(s, &found, &green); }},
        {"cuStreamGetAttribute", FINE, FINE, FINE, [&](CUstream s) { return cuStreamGetAttribute(s, how_to_wait, &value); }},
        {"cuStreamSetAttribute", FINE, FINE, FINE,
         [&](CUstream s) {
             value = {};
             value.syncPolicy = CU_SYNC_POLICY_AUTO;
             return cuStreamSetAttribute(s, how_to_wait, &value);
         }},
        {"cuStreamCopyAttributes to", FINE, FINE, FINE, [&](CUstream s) { return cuStreamCopyAttributes(s, free_one); }},
        {"cuStreamCopyAttributes from", FINE, FINE, FINE, [&](CUstream s) { return cuStreamCopyAttributes(free_one, s); }},
        {"cuStreamIsCapturing", FINE, FINE, FINE, [&](CUstream s) { return cuStreamIsCapturing(s, &status); }},
        {"cuStreamGetCaptureInfo", FINE, FINE, FINE,
         [&](CUstream s) { return cuStreamGetCaptureInfo(s, &status, &id, nullptr, nullptr, nullptr, nullptr); }},
        {"cuStreamQuery", REFUSED, REFUSED, FINE, [&](CUstream s) { return cuStreamQuery(s); }},
        {"cuStreamSynchronize", REFUSED, REFUSED, FINE, [&](CUstream s) { return cuStreamSynchronize(s); }},
        {"cuEventRecord", FINE, FINE, FINE, [&](CUstream s) { return cuEventRecord(event, s); }},
        {"cuStreamAttachMemAsync", REFUSED, REFUSED, INVALID,
         [&](CUstream s) { return cuStreamAttachMemAsync(s, memory, 0, CU_MEM_ATTACH_SINGLE); }},
        {"cuLaunchKernel", FINE, FINE, FINE, [&](CUstream s) { return cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, s, nullptr, nullptr); }},
    };
    struct {
        const char *name;
        CUstream stream;
    } targets[] = {{"legacy", nullptr}, {"CU_STREAM_LEGACY", CU_STREAM_LEGACY}, {"captured", captured}, {"another", other}, {"per thread", CU_STREAM_PER_THREAD}};
    for (auto &question : questions) {
        for (auto &target : targets) {
            for (CUstreamCaptureMode mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
                std::string what = question.name;
                bool is_legacy = !target.stream || target.stream == CU_STREAM_LEGACY;
                bool harmless = what == "cuStreamIsCapturing" || what == "cuStreamGetCaptureInfo";
                CUresult beside = mode == CU_STREAM_CAPTURE_MODE_GLOBAL ? question.of_other : question.relaxed;
                CUresult want = is_legacy ? IMPLICIT : target.stream == captured ? question.of_captured : beside;
                within(what + " of " + target.name, mode, want, harmless, [&] { return question.ask(target.stream); });
                DRIVER(cuCtxSynchronize());
            }
        }
    }
    DRIVER(cuEventDestroy(event));
}

// Calls that touch no stream. What a refused call was to destroy is still there: `again` destroys it.
static void calls() {
    static char registered[8192] __attribute__((aligned(4096)));
    void *host;
    CUarray array;
    CUmipmappedArray mipmapped;
    CUmemoryPool pool, current;
    CUdeviceptr at;
    CUmodule loaded;
    CUstream made;
    CUevent event;
    CUmemGenericAllocationHandle handle;
    size_t size, granularity, total;
    int number;
    char word[64] = {};
    CUmemAllocationProp allocation = {};
    allocation.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    allocation.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    allocation.location.id = device;
    DRIVER(cuMemGetAllocationGranularity(&granularity, &allocation, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUDA_ARRAY_DESCRIPTOR shape = {};
    shape.Width = shape.Height = 16, shape.Format = CU_AD_FORMAT_UNSIGNED_INT8, shape.NumChannels = 1;
    CUDA_ARRAY3D_DESCRIPTOR shape_3d = {};
    shape_3d.Width = shape_3d.Height = 16, shape_3d.Format = CU_AD_FORMAT_UNSIGNED_INT8, shape_3d.NumChannels = 1;
    CUmemPoolProps properties = {};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = allocation.location;
    auto nothing = [] {};
    auto allocate_host = [&] { DRIVER(cuMemAllocHost(&host, 4096)); };
    auto allocate = [&] { DRIVER(cuMemAlloc(&at, 4096)); };
    auto create = [&] { DRIVER(cuMemCreate(&handle, granularity, &allocation, 0)); };
    auto reserve = [&] { DRIVER(cuMemAddressReserve(&at, granularity, 0, 0, 0)); };
    auto map = [&] { DRIVER(cuMemMap(at, granularity, 0, handle, 0)); };
    auto unmap = [&] {
        DRIVER(cuMemUnmap(at, granularity));
        DRIVER(cuMemAddressFree(at, granularity));
        DRIVER(cuMemRelease(handle));
    };
    auto record = [&] {
        DRIVER(cuEventCreate(&event, 0));
        DRIVER(cuEventRecord(event, free_one));
        DRIVER(cuEventSynchronize(event));
    };
    struct {
        const char *name;
        CUresult want;
        std::function<void()> before;
        std::function<CUresult()> call;
        std::function<void()> again;
    } calls[] = {
        {"cuMemAllocHost", REFUSED, nothing, [&] { return cuMemAllocHost(&host, 4096); }, nothing},
        {"cuMemFreeHost", REFUSED, allocate_host, [&] { return cuMemFreeHost(host); }, [&] { DRIVER(cuMemFreeHost(host)); }},
        {"cuMemHostRegister", REFUSED, nothing, [&] { return cuMemHostRegister(registered, 4096, 0); }, nothing},
        {"cuMemHostUnregister", REFUSED, [&] { DRIVER(cuMemHostRegister(registered, 4096, 0)); },
         [&] { return cuMemHostUnregister(registered); }, [&] { DRIVER(cuMemHostUnregister(registered)); }},
        {"cuMemHostGetDevicePointer", FINE, allocate_host, [&] { return cuMemHostGetDevicePointer(&at, host, 0); },
         [&] { DRIVER(cuMemFreeHost(host)); }},
        {"cuMemAlloc", REFUSED, nothing, [&] { return cuMemAlloc(&at, 4096); }, nothing},
        {"cuMemFree", REFUSED, allocate, [&] { return cuMemFree(at); }, [&] { DRIVER(cuMemFree(at)); }},
        {"cuMemAllocPitch", REFUSED, nothing, [&] { return cuMemAllocPitch(&at, &size, 64, 64, 4); }, nothing},
        {"cuMemAllocManaged", REFUSED, nothing, [&] { return cuMemAllocManaged(&at, 4096, CU_MEM_ATTACH_GLOBAL); }, nothing},
        {"cuArrayCreate", REFUSED, nothing, [&] { return cuArrayCreate(&array, &shape); }, nothing},
        {"cuArrayDestroy", REFUSED, [&] { DRIVER(cuArrayCreate(&array, &shape)); }, [&] { return cuArrayDestroy(array); },
         [&] { DRIVER(cuArrayDestroy(array)); }},
        {"cuModuleLoadData", FINE, nothing, [&] { return cuModuleLoadData(&loaded, ptx); }, [&] { DRIVER(cuModuleUnload(loaded)); }},
        {"cuModuleUnload", REFUSED, [&] { DRIVER(cuModuleLoadData(&loaded, ptx)); }, [&] { return cuModuleUnload(loaded); },
         [&] { DRIVER(cuModuleUnload(loaded)); }},
        {"cuStreamCreate", FINE, nothing, [&] { return cuStreamCreate(&made, 0); }, [&] { DRIVER(cuStreamDestroy(made)); }},
        {"cuStreamDestroy", FINE, [&] { DRIVER(cuStreamCreate(&made, 0)); }, [&] { return cuStreamDestroy(made); }, nothing},
        {"cuEventCreate", FINE, nothing, [&] { return cuEventCreate(&event, 0); }, [&] { DRIVER(cuEventDestroy(event)); }},
        {"cuEventDestroy", FINE, [&] { DRIVER(cuEventCreate(&event, 0)); }, [&] { return cuEventDestroy(event); }, nothing},
        {"cuEventQuery", REFUSED, record, [&] { return cuEventQuery(event); }, [&] { DRIVER(cuEventDestroy(event)); }},
        {"cuMemCreate", FINE, nothing, [&] { return cuMemCreate(&handle, granularity, &allocation, 0); }, [&] { DRIVER(cuMemRelease(handle)); }},
        {"cuMemRelease", FINE, create, [&] { return cuMemRelease(handle); }, nothing},
        {"cuMemAddressReserve", FINE, nothing, [&] { return cuMemAddressReserve(&at, granularity, 0, 0, 0); },
         [&] { DRIVER(cuMemAddressFree(at, granularity)); }},
        {"cuMemMap", FINE, [&] { create(), reserve(); }, [&] { return cuMemMap(at, granularity, 0, handle, 0); }, unmap},
        {"cuMemUnmap", FINE, [&] { create(), reserve(), map(); }, [&] { return cuMemUnmap(at, granularity); },
         [&] { map(), unmap(); }},
        {"cuMemPoolCreate", REFUSED, nothing, [&] { return cuMemPoolCreate(&pool, &properties); }, nothing},
        {"cuMemPoolDestroy", REFUSED, [&] { DRIVER(cuMemPoolCreate(&pool, &properties)); }, [&] { return cuMemPoolDestroy(pool); },
         [&] { DRIVER(cuMemPoolDestroy(pool)); }},
        {"cuMemPoolTrimTo", REFUSED, [&] { DRIVER(cuDeviceGetMemPool(&current, device)); }, [&] { return cuMemPoolTrimTo(current, 0); }, nothing},
        {"cuMemGetInfo", FINE, nothing, [&] { return cuMemGetInfo(&size, &total); }, nothing},
        {"cuPointerGetAttribute", FINE, nothing, [&] { return cuPointerGetAttribute(word, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory); }, nothing},
        {"cuCtxSetLimit", REFUSED, nothing, [&] { return cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20); }, nothing},
        {"cuCtxGetLimit", FINE, nothing, [&] { return cuCtxGetLimit(&size, CU_LIMIT_PRINTF_FIFO_SIZE); }, nothing},
        {"cuCtxSynchronize", REFUSED, nothing, [&] { return cuCtxSynchronize(); }, nothing},
        {"cuMemcpyHtoD", IMPLICIT, nothing, [&] { return cuMemcpyHtoD(memory, word, 64); }, nothing},
        {"cuMemsetD8", IMPLICIT, nothing, [&] { return cuMemsetD8(memory, 0, 64); }, nothing},
        {"cuFuncGetAttribute", FINE, nothing, [&] { return cuFuncGetAttribute(&number, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel); }, nothing},
        {"cuOccupancyMaxActiveBlocksPerMultiprocessor", FINE, nothing,
         [&] { return cuOccupancyMaxActiveBlocksPerMultiprocessor(&number, kernel, 32, 0); }, nothing},
        // Not asked natively: taken to be as their siblings above.
        {"cuArray3DCreate", REFUSED, nothing, [&] { return cuArray3DCreate(&array, &shape_3d); }, nothing},
        {"cuMipmappedArrayCreate", REFUSED, nothing, [&] { return cuMipmappedArrayCreate(&mipmapped, &shape_3d, 2); }, nothing},
        {"cuMipmappedArrayDestroy", REFUSED, [&] { DRIVER(cuMipmappedArrayCreate(&mipmapped, &shape_3d, 2)); },
         [&] { return cuMipmappedArrayDestroy(mipmapped); }, [&] { DRIVER(cuMipmappedArrayDestroy(mipmapped)); }},
    };
    for (CUstreamCaptureMode mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}) {
        for (auto &call : calls) {
            call.before();
            CUresult got = within(call.name, mode, call.want, false, call.call);
            if (got == call.want) call.again();
        }
    }
}

static void owner(const char *what, CUdeviceptr at, CUresult want, CUcontext expected) {
    CUcontext of = (CUcontext)1;
    CUresult answer = cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, at);
    printf("context of %s: %s, %s\n", what, name(answer), of == nullptr ? "none" : of == context ? "the context" : "another");
    is(what, want, answer);
    expect_value(what, (long long)expected, (long long)of);
}

// Whose memory is it? The variable is left alone where the answer is an error.
static void owners() {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    void *host;
    size_t granularity;
    CUmemAllocationProp allocation = {};
    allocation.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    allocation.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    allocation.location.id = device;
    DRIVER(cuMemGetAllocationGranularity(&granularity, &allocation, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    owner("cuMemAlloc's memory", memory, FINE, context);
    DRIVER(cuMemCreate(&handle, granularity, &allocation, 0));
    DRIVER(cuMemAddressReserve(&at, granularity, 0, 0, 0));
    owner("a reservation", at, INVALID, (CUcontext)1);
    DRIVER(cuMemMap(at, granularity, 0, handle, 0));
    owner("cuMemCreate's memory", at, FINE, nullptr);
    CUmemAccessDesc access = {};
    access.location = allocation.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER(cuMemSetAccess(at, granularity, &access, 1));
    owner("cuMemCreate's memory with access", at, FINE, nullptr);
    DRIVER(cuMemAllocAsync(&at, 4096, free_one));
    owner("cuMemAllocAsync's memory", at, FINE, nullptr);
    DRIVER(cuMemAllocManaged(&at, 4096, CU_MEM_ATTACH_GLOBAL));
    owner("managed memory", at, FINE, context);
    DRIVER(cuMemAllocHost(&host, 4096));
    owner("pinned memory", (CUdeviceptr)host, FINE, context);
}

// The first 16 bytes: "ee" where they were left alone.
static std::string bytes(const CUlaunchAttributeValue &value, bool exact) {
    std::string text;
    for (int i = 0; i < 16; i++) {
        char byte[8];
        unsigned char is = ((const unsigned char *)&value)[i];
        snprintf(byte, sizeof byte, exact || is == 0xee ? " %02x" : " **", is);
        text += byte;
    }
    return text;
}

static void attribute(const char *of, int id, CUresult answer, const CUlaunchAttributeValue &value, const char *want, bool exact) {
    std::string got = answer == CUDA_SUCCESS ? bytes(value, exact) : "";
    std::string what = std::string(of) + " attribute " + std::to_string(id);
    printf("%s: %s%s\n", what.c_str(), name(answer), got.c_str());
    is(what, want ? FINE : INVALID, answer);
    cases++;
    if (want && got != want) not_met((what + ": expected" + want + ", got" + got).c_str());
}

// Attributes that were never set, of a kernel's node and of a stream.
static void attributes() {
    CUgraph graph;
    CUgraphNode node;
    CUlaunchAttributeValue value;
    DRIVER(cuGraphCreate(&graph, 0));
    CUDA_KERNEL_NODE_PARAMS parameters = {};
    parameters.func = kernel;
    parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1;
    parameters.blockDimX = parameters.blockDimY = parameters.blockDimZ = 1;
    DRIVER(cuGraphAddKernelNode(&node, graph, nullptr, 0, &parameters));
    const char *number = " 00 00 00 00 ee ee ee ee ee ee ee ee ee ee ee ee", *all = " 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00";
    const char *of_nodes[17] = {};
    of_nodes[1] = all;
    of_nodes[2] = of_nodes[5] = of_nodes[8] = of_nodes[10] = of_nodes[14] = number;
    of_nodes[4] = " 00 00 00 00 00 00 00 00 00 00 00 00 ee ee ee ee";
    of_nodes[9] = " 00 01 ee ee ee ee ee ee ee ee ee ee ee ee ee ee";
    of_nodes[13] = " 00 00 00 00 ee ee ee ee 00 00 00 00 00 00 00 00";
    for (int id = 1; id < 17; id++) {
        memset(&value, 0xee, sizeof value);
        CUresult answer = cuGraphKernelNodeGetAttribute(node, (CUlaunchAttributeID)id, &value);
        attribute("a node's", id, answer, value, of_nodes[id], true);
    }
    number = " ** ** ** ** ee ee ee ee ee ee ee ee ee ee ee ee";
    const char *of_streams[17] = {};
    of_streams[1] = " ** ** ** ** ** ** ** ** ** ** ** ** ** ** ** **";
    of_streams[3] = of_streams[8] = of_streams[10] = number;
    of_streams[9] = " ** ** ee ee ee ee ee ee ee ee ee ee ee ee ee ee";
    for (int id = 1; id < 17; id++) {
        memset(&value, 0xee, sizeof value);
        CUresult answer = cuStreamGetAttribute(free_one, (CUlaunchAttributeID)id, &value);
        attribute("a stream's", id, answer, value, of_streams[id], false);
    }
    DRIVER(cuGraphDestroy(graph));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CUmodule module;
    DRIVER(cuInit(0));
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    DRIVER(cuModuleLoadData(&module, ptx));
    DRIVER(cuModuleGetFunction(&kernel, module, "empty"));
    DRIVER(cuStreamCreate(&captured, CU_STREAM_DEFAULT));
    DRIVER(cuStreamCreate(&other, CU_STREAM_DEFAULT));
    DRIVER(cuStreamCreate(&free_one, CU_STREAM_NON_BLOCKING));
    DRIVER(cuMemAlloc(&memory, 4096));
    questions();
    calls();
    owners();
    attributes();
    return verdict();
}
