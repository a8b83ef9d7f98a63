// The driver API by itself, as programs use it that have no runtime: modules out of files, the older forms of functions, copies of every kind between host, device and arrays, contexts of every version.
#define PROGRAM "driver_forms"
#include "by_name.h"
#include "cases.h"

#include <unistd.h>
#include <vector>

#define OK(call) expect_value(#call, CUDA_SUCCESS, (long long)(call))

static const char source[] =
    ".version 7.0\n.target sm_75\n.address_size 64\n"
    ".visible .global .align 4 .u32 addend;\n"
    ".visible .entry add(.param .u64 p_out, .param .u64 p_in, .param .u32 p_n)\n{\n"
    "    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %rd<8>;\n"
    "    ld.param.u64 %rd1, [p_out]; ld.param.u64 %rd2, [p_in]; ld.param.u32 %r1, [p_n];\n"
    "    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;\n"
    "    mad.lo.u32 %r4, %r2, %r3, %r4;\n"
    "    setp.ge.u32 %p, %r4, %r1;\n    @%p bra DONE;\n"
    "    mul.wide.u32 %rd3, %r4, 4;\n"
    "    add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3;\n"
    "    ld.global.u32 %r5, [%rd2]; ld.global.u32 %r6, [addend]; add.u32 %r5, %r5, %r6;\n"
    "    st.global.u32 [%rd1], %r5;\n"
    "DONE:\n    ret;\n}\n";

static const int N = 1000;

// What `add` makes of 0, 1, 2 …; the module's variable is set to `addend`.
static void run(CUmodule module, unsigned addend, int form) {
    CUfunction function;
    CUdeviceptr in, out, variable;
    size_t size = 0;
    std::vector<unsigned> data(N), result(N);
    for (int i = 0; i < N; i++) data[i] = i * 3;
    OK(cuModuleGetFunction(&function, module, "add"));
    OK(cuModuleGetGlobal(&variable, &size, module, "addend"));
    IS(4, size);
    OK(cuMemcpyHtoD(variable, &addend, 4));
    OK(cuMemAlloc(&in, N * 4));
    OK(cuMemAlloc(&out, N * 4));
    OK(cuMemcpyHtoD(in, data.data(), N * 4));
    OK(cuMemsetD32(out, 7, N));
    int n = N;
    void *arguments[] = {&out, &in, &n};
    if (form == 0) {
        OK(cuLaunchKernel(function, (N + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
    } else if (form == 1) {
        struct {
            CUdeviceptr out, in;
            int n;
        } block = {out, in, n};
        // As long as the parameters, without what the structure ends in.
        size_t bytes = 20, more = sizeof block;
        void *longer[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &more, CU_LAUNCH_PARAM_END};
        IS(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cuLaunchKernel(function, (N + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, nullptr, longer));
        void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
        OK(cuLaunchKernel(function, (N + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, nullptr, extra));
    } else if (form == 2) {
        // Where the function is given, a node's kernel and context are not looked at.
        CUDA_KERNEL_NODE_PARAMS node;
        memset(&node, 0x5a, sizeof node);
        node.func = function;
        node.gridDimX = (N + 127) / 128;
        node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1;
        node.blockDimX = 128;
        node.sharedMemBytes = 0;
        node.kernelParams = arguments;
        node.extra = nullptr;
        CUgraph graph;
        CUgraphNode added;
        CUgraphExec exec;
        OK(cuGraphCreate(&graph, 0));
        OK(cuGraphAddKernelNode(&added, graph, nullptr, 0, &node));
        OK(cuGraphInstantiate(&exec, graph, 0));
        OK(cuGraphLaunch(exec, nullptr));
        OK(cuCtxSynchronize());
        OK(cuGraphExecDestroy(exec));
        OK(cuGraphDestroy(graph));
    } else {
        CUlaunchConfig config = {};
        config.gridDimX = (N + 127) / 128;
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
        config.blockDimX = 128;
        CUlaunchAttribute attribute = {};
        attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
        config.attrs = &attribute;
        config.numAttrs = 1;
        OK(cuLaunchKernelEx(&config, function, arguments, nullptr));
    }
    OK(cuCtxSynchronize());
    OK(cuMemcpyDtoH(result.data(), out, N * 4));
    int wrong = 0;
    for (int i = 0; i < N; i++) wrong += result[i] != data[i] + addend;
    IS(0, wrong);
    OK(cuMemFree(in));
    OK(cuMemFree(out));
}

static void modules() {
    char path[] = "/tmp/rgpu-module-XXXXXX";
    int file = mkstemp(path);
    REQUIRE(file >= 0 && write(file, source, sizeof source - 1) == (ssize_t)sizeof source - 1, "no temporary file");
    close(file);
    CUmodule module;
    OK(cuModuleLoad(&module, path));
    unlink(path);
    run(module, 5, 0);
    OK(cuModuleUnload(module));
    IS(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&module, "/nowhere/at/all.ptx"));
    char log[512] = "";
    float time = -1;
    CUjit_option options[] = {CU_JIT_MAX_REGISTERS, CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_WALL_TIME, CU_JIT_OPTIMIZATION_LEVEL};
    void *values[5] = {(void *)32, log, (void *)sizeof log, nullptr, (void *)3};
    memcpy(&values[3], &time, sizeof time);
    OK(cuModuleLoadDataEx(&module, source, 5, options, values));
    memcpy(&time, &values[3], sizeof time);
    TRUE_THAT(time >= 0);
    run(module, 1000, 1);
    OK(cuModuleUnload(module));
    // A fat binary with the text in it: one entry of PTX, not packed.
    struct {
        unsigned magic = 0xba55ed50;
        unsigned short version = 1, header = 16;
        unsigned long long size;
        unsigned short kind = 1, attributes = 0x101;
        unsigned entry_header = 80;
        unsigned long long payload;
        unsigned packed = 0, options_at = 64;
        unsigned short minor = 0, major = 7;
        unsigned arch = 75;
        unsigned name_at = 0, name_size = 0;
        unsigned long long flags = 0x11, zero = 0, unpacked = 0;
        unsigned long long options[2] = {72, 0};
        char text[(sizeof source + 7) / 8 * 8];
    } fat;
    memset(fat.text, 0, sizeof fat.text);
    memcpy(fat.text, source, sizeof source);
    fat.payload = sizeof fat.text;
    fat.size = 80 + fat.payload;
    OK(cuModuleLoadFatBinary(&module, &fat));
    run(module, 76, 2);
    run(module, 77, 3);

    CUfunction function;
    OK(cuModuleGetFunction(&function, module, "add"));
    IS(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&function, module, "subtract"));
    OK(cuModuleGetFunction(&function, module, "add"));
    int value = -1, blocks = 0, block = 0, grid = 0;
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function));
    TRUE_THAT(value >= 128);
    OK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, function));
    IS(50, value);
    OK(cuFuncSetCacheConfig(function, CU_FUNC_CACHE_PREFER_L1));
    OK(named("cuFuncSetSharedMemConfig", function, 1));
    OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 128, 0));
    TRUE_THAT(blocks > 0);
    OK(cuOccupancyMaxPotentialBlockSize(&grid, &block, function, nullptr, 0, 0));
    TRUE_THAT(grid > 0 && block >= 32);
    OK(cuOccupancyMaxPotentialBlockSizeWithFlags(&grid, &block, function, nullptr, 0, 64, 0));
    TRUE_THAT(block <= 64);
    OK(cuModuleUnload(module));
}

static void devices(CUdevice device) {
    int major = 0, minor = 0, value = -1;
    OK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    int told = 0;
    OK(cuDeviceComputeCapability(&told, &minor, device));
    TRUE_THAT(told == major && minor == value);
    CUdevprop properties = {};
    OK(cuDeviceGetProperties(&properties, device));
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device));
    IS(value, properties.maxThreadsPerBlock);
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device));
    IS(value, properties.SIMDWidth);
    size_t width = 0;
    OK(cuDeviceGetTexture1DLinearMaxWidth(&width, CU_AD_FORMAT_FLOAT, 1, device));
    TRUE_THAT(width >= 1 << 20);
    OK(cuDeviceGetExecAffinitySupport(&value, CU_EXEC_AFFINITY_TYPE_SM_COUNT, device));
    TRUE_THAT(value == 0 || value == 1);
    CUexecAffinityParam affinity = {};
    OK(cuCtxGetExecAffinity(&affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT));
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    IS(value, affinity.param.smCount.val);
    IS(CU_EXEC_AFFINITY_TYPE_SM_COUNT, affinity.type);
    // There is no way from a device to itself.
    IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetP2PAttribute(&value, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, device, device));
    // Atomic operations across the bus, and across links; CUDA 13 has asked for the first time.
    unsigned operations[] = {CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_FLOAT_MAX, 77}, can[3] = {~0u, ~0u, ~0u};
    OK(named("cuDeviceGetHostAtomicCapabilities", can, operations, 2u, device));
    TRUE_THAT(can[0] != ~0u && can[1] != ~0u && can[2] == ~0u);
    IS(CUDA_ERROR_INVALID_VALUE, named("cuDeviceGetHostAtomicCapabilities", can, operations, 3u, device));
    IS(CUDA_ERROR_INVALID_VALUE, named("cuDeviceGetHostAtomicCapabilities", (unsigned *)nullptr, operations, 2u, device));
    IS(CUDA_ERROR_INVALID_VALUE, named("cuDeviceGetHostAtomicCapabilities", can, operations, 0u, device));
    IS(CUDA_ERROR_INVALID_DEVICE, named("cuDeviceGetP2PAtomicCapabilities", can, operations, 2u, device, device));
    void *function = nullptr;
    OK(named("cuGetProcAddress", "cuInit", &function, 12000, 0ull));
    TRUE_THAT(function != nullptr);
    IS(CUDA_ERROR_NOT_FOUND, named("cuGetProcAddress", "cuNothingOfTheKind", &function, 12000, 0ull));
}

static void contexts(CUdevice device) {
    CUcontext before = nullptr, made = nullptr, current = nullptr;
    OK(cuCtxGetCurrent(&before));
    for (int round = 0; round < 2; round++) {
        OK(named("cuCtxCreate_v2", &made, (unsigned)CU_CTX_SCHED_BLOCKING_SYNC, device));
        OK(cuCtxGetCurrent(&current));
        TRUE_THAT(current == made);
        unsigned flags = 0;
        OK(cuCtxGetFlags(&flags));
        IS(CU_CTX_SCHED_BLOCKING_SYNC, flags & CU_CTX_SCHED_MASK);
        OK(cuCtxSetFlags(CU_CTX_SCHED_YIELD));
        OK(cuCtxGetFlags(&flags));
        IS(CU_CTX_SCHED_YIELD, flags & CU_CTX_SCHED_MASK);
        CUmodule module;
        OK(cuModuleLoadData(&module, source));
        run(module, 9, 0);
        OK(cuCtxDestroy(made));
    }
    OK(named("cuCtxCreate_v3", &made, (void *)nullptr, 0, 0u, device));
    OK(cuCtxResetPersistingL2Cache());
    OK(cuCtxAttach(&current, 0));
    TRUE_THAT(current == made);
    OK(cuCtxDetach(current));
    OK(cuCtxGetCurrent(&current));
    TRUE_THAT(current == made);
    OK(cuCtxDestroy(made));
    OK(cuCtxGetCurrent(&current));
    TRUE_THAT(current == before);
}

static const int Width = 40, Height = 6;

static CUarray array_of(int width, int height) {
    CUDA_ARRAY_DESCRIPTOR wanted = {}, told = {};
    wanted.Width = width;
    wanted.Height = height;
    wanted.Format = CU_AD_FORMAT_UNSIGNED_INT8;
    wanted.NumChannels = 1;
    CUarray array = nullptr;
    OK(cuArrayCreate(&array, &wanted));
    OK(cuArrayGetDescriptor(&told, array));
    TRUE_THAT(told.Width == wanted.Width && told.Height == wanted.Height && told.Format == wanted.Format && told.NumChannels == 1);
    return array;
}

static void copies() {
    std::vector<unsigned char> bytes(256), back(256);
    for (int i = 0; i < 256; i++) bytes[i] = (unsigned char)(i * 7 + 1);
    CUdeviceptr device, other;
    CUstream stream;
    OK(cuMemAlloc(&device, 256));
    OK(cuMemAlloc(&other, 256));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    // Lines of arrays: there and back, by way of the device and of another array.
    CUarray line = array_of(256, 0), second = array_of(256, 0);
    OK(cuMemcpyHtoA(line, 0, bytes.data(), 256));
    OK(cuMemcpyAtoA(second, 16, line, 0, 200));
    OK(cuMemcpyAtoD(device, second, 16, 200));
    OK(cuMemcpyDtoH(back.data(), device, 200));
    TRUE_THAT(!memcmp(back.data(), bytes.data(), 200));
    OK(cuMemcpyDtoA(second, 0, device, 100));
    OK(cuMemcpyAtoH(back.data(), second, 0, 100));
    TRUE_THAT(!memcmp(back.data(), bytes.data(), 100));
    OK(cuMemcpyHtoAAsync(line, 4, bytes.data() + 50, 30, stream));
    memset(back.data(), 0, 256);
    OK(cuMemcpyAtoHAsync(back.data(), line, 4, 30, stream));
    OK(cuStreamSynchronize(stream));
    TRUE_THAT(!memcmp(back.data(), bytes.data() + 50, 30));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoA(line, 200, bytes.data(), 100));
    OK(cuArrayDestroy(line));
    OK(cuArrayDestroy(second));

    // A part of a picture, which begins inside each row: host, array, device with rows of another length, host.
    CUarray picture = array_of(Width, Height);
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = bytes.data();
    copy.srcPitch = Width;
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = picture;
    copy.WidthInBytes = Width;
    copy.Height = Height;
    OK(cuMemcpy2D(&copy));
    CUdeviceptr rows;
    size_t pitch = 0;
    OK(cuMemAllocPitch(&rows, &pitch, Width, Height, 4));
    CUDA_MEMCPY2D part = {};
    part.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    part.srcArray = picture;
    part.srcXInBytes = 3;
    part.srcY = 1;
    part.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    part.dstDevice = rows;
    part.dstPitch = pitch;
    part.dstXInBytes = 5;
    part.dstY = 2;
    part.WidthInBytes = 20;
    part.Height = 3;
    OK(cuMemcpy2DUnaligned(&part));
    // Inside the device nothing has waited for it, nor does the stream below.
    OK(cuCtxSynchronize());
    CUDA_MEMCPY2D home = {};
    home.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
    home.srcDevice = rows;
    home.srcPitch = pitch;
    home.srcXInBytes = 5;
    home.srcY = 2;
    home.dstMemoryType = CU_MEMORYTYPE_HOST;
    home.dstHost = back.data();
    home.dstPitch = 20;
    home.WidthInBytes = 20;
    home.Height = 3;
    OK(cuMemcpy2DAsync(&home, stream));
    OK(cuStreamSynchronize(stream));
    int wrong = 0;
    for (int y = 0; y < 3; y++)
        for (int x = 0; x < 20; x++) wrong += back[y * 20 + x] != bytes[(y + 1) * Width + x + 3];
    IS(0, wrong);
    OK(cuMemFree(rows));
    OK(cuArrayDestroy(picture));

    // Between contexts, here one and the same.
    CUcontext context;
    OK(cuCtxGetCurrent(&context));
    OK(cuMemcpyHtoD(device, bytes.data(), 256));
    OK(cuMemcpyPeer(other, context, device, context, 256));
    OK(cuMemcpyDtoH(back.data(), other, 256));
    TRUE_THAT(back == bytes);
    CUDA_MEMCPY3D_PEER peer = {};
    peer.srcMemoryType = peer.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    peer.srcContext = peer.dstContext = context;
    peer.srcDevice = device + 10;
    peer.dstDevice = other;
    peer.srcPitch = 32;
    peer.dstPitch = 16;
    peer.WidthInBytes = 16;
    peer.Height = 4;
    peer.Depth = 1;
    OK(cuMemcpy3DPeerAsync(&peer, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemcpyDtoH(back.data(), other, 64));
    wrong = 0;
    for (int i = 0; i < 64; i++) wrong += back[i] != bytes[10 + i / 16 * 32 + i % 16];
    IS(0, wrong);

    // The same description without its peers: contexts are where the manual reserves fields. NVIDIA's driver looks at neither.
    const auto &reserved = reinterpret_cast<const CUDA_MEMCPY3D &>(peer);
    CUgraph captured, built;
    CUgraphNode node;
    CUgraphExec exec;
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemcpy3DAsync(&reserved, stream));
    OK(cuStreamEndCapture(stream, &captured));
    OK(cuGraphCreate(&built, 0));
    OK(cuGraphAddMemcpyNode(&node, built, nullptr, 0, &reserved, context));
    OK(cuGraphMemcpyNodeSetParams(node, &reserved));
    for (int form = 0; form < 4; form++) {
        OK(cuMemsetD8(other, 0, 256));
        OK(cuCtxSynchronize());
        if (form == 0) {
            OK(cuMemcpy3D(&reserved));
            OK(cuCtxSynchronize());
        } else if (form == 1) {
            OK(cuMemcpy3DAsync(&reserved, stream));
        } else {
            OK(cuGraphInstantiate(&exec, form == 2 ? captured : built, 0));
            OK(cuGraphLaunch(exec, stream));
            OK(cuGraphExecDestroy(exec));
        }
        OK(cuStreamSynchronize(stream));
        OK(cuMemcpyDtoH(back.data(), other, 64));
        wrong = 0;
        for (int i = 0; i < 64; i++) wrong += back[i] != bytes[10 + i / 16 * 32 + i % 16];
        IS(0, wrong);
    }
    OK(cuGraphDestroy(captured));
    OK(cuGraphDestroy(built));

    // Several boxes at once.
    CUDA_MEMCPY3D_BATCH_OP batch[2] = {};
    for (int i = 0; i < 2; i++) {
        batch[i].src.type = batch[i].dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
        batch[i].src.op.ptr.ptr = device + i * 100;
        batch[i].src.op.ptr.rowLength = 10;
        batch[i].src.op.ptr.layerHeight = 5;
        batch[i].dst.op.ptr.ptr = other + i * 30;
        batch[i].dst.op.ptr.rowLength = 6;
        batch[i].dst.op.ptr.layerHeight = 5;
        batch[i].extent.width = 6;
        batch[i].extent.height = 5;
        batch[i].extent.depth = 1;
        batch[i].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    }
    OK(cuMemcpy3DBatchAsync(2, batch, 0, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemcpyDtoH(back.data(), other, 60));
    wrong = 0;
    for (int i = 0; i < 60; i++) wrong += back[i] != bytes[i / 30 * 100 + i % 30 / 6 * 10 + i % 6];
    IS(0, wrong);
    OK(cuStreamDestroy(stream));
    OK(cuMemFree(device));
    OK(cuMemFree(other));
}

static void words() {
    CUstream stream;
    CUdeviceptr words;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc(&words, 32));
    OK(cuMemsetD32(words, 0, 8));
    OK(cuCtxSynchronize());
    CUstream_st *other;
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    OK(cuStreamWaitValue32(stream, words, 3, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuStreamWriteValue32(stream, words + 4, 30, 0));
    OK(cuStreamWaitValue64(stream, words + 8, 0x100000000ull, CU_STREAM_WAIT_VALUE_EQ));
    OK(cuStreamWriteValue64(stream, words + 16, 0x123456789abcull, 0));
    IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    CUstreamBatchMemOpParams both[2] = {};
    both[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    both[0].writeValue.address = words;
    both[0].writeValue.value = 4;
    both[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    both[1].writeValue.address = words + 8;
    both[1].writeValue.value64 = 0x100000000ull;
    OK(cuStreamBatchMemOp(other, 2, both, 0));
    OK(cuStreamSynchronize(stream));
    // The first forms of the same, which newer drivers have only where they are asked to.
    int has_first = 0;
    OK(cuDeviceGetAttribute(&has_first, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 0));
    CUresult want = has_first ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    IS(want, named("cuStreamWriteValue32", stream, words + 24, 8u, 0u));
    IS(want, named("cuStreamWaitValue32", stream, words + 24, 8u, (unsigned)CU_STREAM_WAIT_VALUE_EQ));
    IS(want, named("cuStreamWriteValue64", stream, words + 24, (cuuint64_t)9, 0u));
    IS(want, named("cuStreamWaitValue64", stream, words + 24, (cuuint64_t)9, (unsigned)CU_STREAM_WAIT_VALUE_EQ));
    IS(want, named("cuStreamBatchMemOp", stream, 1u, both, 0u));
    OK(cuStreamSynchronize(stream));
    unsigned long long found[4];
    OK(cuMemcpyDtoH(found, words, sizeof found));
    TRUE_THAT(found[0] == (4 | 30ull << 32) && found[1] == 0x100000000ull && found[2] == 0x123456789abcull && (!has_first || found[3] == 9));
    OK(cuStreamDestroy(other));
    OK(cuStreamDestroy(stream));
    OK(cuMemFree(words));
}

static void captures() {
    CUstream stream;
    CUdeviceptr words;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc(&words, 64));
    OK(named("cuStreamBeginCapture", stream));
    OK(cuMemsetD32Async(words, 1, 16, stream));
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0, again = 0;
    CUgraph graph = nullptr, same = nullptr;
    const CUgraphNode *nodes = nullptr;
    size_t count = 0;
    OK(named("cuStreamGetCaptureInfo", stream, &status, &id));
    IS(CU_STREAM_CAPTURE_STATUS_ACTIVE, status);
    OK(named("cuStreamGetCaptureInfo_v2", stream, &status, &again, &graph, &nodes, &count));
    TRUE_THAT(id == again && graph != nullptr && count == 1);
    CUgraphNode fill = nodes[0], node = nullptr;
    CUDA_MEMSET_NODE_PARAMS beside = {};
    beside.dst = words + 32;
    beside.value = 9;
    beside.elementSize = 4;
    beside.width = 4;
    beside.height = 1;
    CUcontext context;
    OK(cuCtxGetCurrent(&context));
    OK(cuGraphAddMemsetNode(&node, graph, &fill, 1, &beside, context));
    OK(named("cuStreamUpdateCaptureDependencies", stream, &node, (size_t)1, (unsigned)CU_STREAM_SET_CAPTURE_DEPENDENCIES));
    OK(cuStreamEndCapture(stream, &same));
    TRUE_THAT(graph == same);
    CUgraphExec exec;
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
    unsigned found[16];
    OK(cuMemcpyDtoH(found, words, sizeof found));
    int wrong = 0;
    for (int i = 0; i < 16; i++) wrong += found[i] != (i >= 8 && i < 12 ? 9 : 1);
    IS(0, wrong);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    OK(cuMemFree(words));
    OK(cuStreamDestroy(stream));
}

static void surfaces() {
    CUarray array = array_of(64, 4);
    CUDA_RESOURCE_DESC wanted = {}, told = {};
    wanted.resType = CU_RESOURCE_TYPE_ARRAY;
    wanted.res.array.hArray = array;
    CUarray surfaced;
    CUDA_ARRAY3D_DESCRIPTOR shape = {};
    shape.Width = 64;
    shape.Height = 4;
    shape.Format = CU_AD_FORMAT_UNSIGNED_INT8;
    shape.NumChannels = 1;
    shape.Flags = CUDA_ARRAY3D_SURFACE_LDST;
    OK(cuArray3DCreate(&surfaced, &shape));
    wanted.res.array.hArray = surfaced;
    CUsurfObject surface;
    OK(cuSurfObjectCreate(&surface, &wanted));
    OK(cuSurfObjectGetResourceDesc(&told, surface));
    TRUE_THAT(told.resType == CU_RESOURCE_TYPE_ARRAY && told.res.array.hArray == surfaced);
    OK(cuSurfObjectDestroy(surface));
    OK(cuArrayDestroy(surfaced));
    OK(cuArrayDestroy(array));
}

static void managed() {
    CUdeviceptr memory;
    CUstream stream;
    CUdevice device;
    OK(cuCtxGetDevice(&device));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAllocManaged(&memory, 1 << 20, CU_MEM_ATTACH_GLOBAL));
    memset((void *)memory, 3, 1 << 20);
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, device}, host = {CU_MEM_LOCATION_TYPE_HOST, 0};
    OK(cuMemAdvise(memory, 1 << 20, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, here));
    OK(cuMemPrefetchAsync(memory, 1 << 20, here, 0, stream));
    OK(cuMemPrefetchAsync(memory, 1 << 20, host, 0, stream));
    OK(cuStreamSynchronize(stream));
    int preferred = -7, read_mostly = -7;
    void *answers[] = {&preferred, &read_mostly};
    size_t sizes[] = {4, 4};
    CUmem_range_attribute asked[] = {CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY};
    OK(cuMemRangeGetAttributes(answers, sizes, asked, 2, memory, 1 << 20));
    IS(device, preferred);
    IS(0, read_mostly);
    CUdeviceptr parts[] = {memory, memory + (1 << 19)};
    size_t lengths[] = {1 << 19, 1 << 19}, which[] = {0};
    OK(cuMemPrefetchBatchAsync(parts, lengths, 2, &here, which, 1, 0, stream));
    OK(cuStreamSynchronize(stream));
    int sum = 0;
    for (int i = 0; i < 1 << 20; i += 4096) sum += ((volatile unsigned char *)memory)[i];
    IS(3 * 256, sum);
    OK(cuMemDiscardBatchAsync(parts, lengths, 1, 0, stream));
    OK(cuMemDiscardAndPrefetchBatchAsync(parts, lengths, 1, &here, which, 1, 0, stream));
    // Locations that don't begin with the first range, don't increase, or begin behind the last range; more than
    // ranges; the legacy default stream; a range that is not managed.
    CUmemLocation places[] = {here, here, here};
    size_t wrong[][3] = {{1, 2, 3}, {0, 0, 1}, {0, 2, 3}, {0, 1, 2}};
    for (int i = 0; i < 4; i++)
        IS(CUDA_ERROR_INVALID_VALUE, cuMemPrefetchBatchAsync(parts, lengths, 2, places, wrong[i], i < 3 ? 2 : 3, 0, stream));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemPrefetchBatchAsync(parts, lengths, 2, &here, which, 1, 0, CU_STREAM_LEGACY));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemDiscardBatchAsync(parts, lengths, 1, 0, CU_STREAM_LEGACY));
    CUdeviceptr plain;
    OK(cuMemAlloc(&plain, 4096));
    CUdeviceptr one_wrong[] = {memory, plain};
    size_t both[] = {1 << 19, 4096};
    CUmemLocation node = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    IS(CUDA_ERROR_INVALID_VALUE, cuMemPrefetchBatchAsync(one_wrong, both, 2, &host, which, 1, 0, stream));
    int last = -7;
    OK(cuMemRangeGetAttribute(&last, sizeof last, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, memory, 1 << 19));
    IS(here.id, last);
    OK(cuMemFree(plain));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemAdvise(memory, 1 << 20, CU_MEM_ADVISE_SET_ACCESSED_BY, node));
    OK(cuMemsetD8Async(memory, 8, 1 << 19, stream));
    OK(cuStreamSynchronize(stream));
    IS(8, ((volatile unsigned char *)memory)[77]);
    IS(3, ((volatile unsigned char *)memory)[(1 << 19) + 77]);
    OK(cuMemFree(memory));
    OK(cuStreamDestroy(stream));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    REQUIRE(cuInit(0) == CUDA_SUCCESS, "cuInit");
    CUdevice device;
    CUcontext context;
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    devices(device);
    modules();
    contexts(device);
    copies();
    words();
    captures();
    surfaces();
    managed();
    CUmemoryPool pool;
    OK(cuDeviceGetDefaultMemPool(&pool, device));
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cuMemPoolSetAccess(pool, &access, 1));
    OK(cuDevicePrimaryCtxRelease(device));
    return verdict();
}
