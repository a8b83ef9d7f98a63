// The driver API: contexts, a module from PTX text, launches with an array and with a buffer of parameters, memory,
// memsets of 8, 16 and 32 bits, streams, events, and the errors of each.
#define PROGRAM "driver_ptx"
#include "common.h"

#include <cuda.h>
#include <vector>

static const char *name(CUresult status) {
    const char *text = nullptr;
    if (cuGetErrorName(status, &text) != CUDA_SUCCESS || text == nullptr) text = "an unknown code";
    return text;
}

#define DRIVER(want, call)                                                                                               \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == (want), "line %d: %s: expected %s, got %s (%d)", __LINE__, #call, name(want), name(got_), (int)got_); \
    } while (0)
#define OK(call) DRIVER(CUDA_SUCCESS, call)

// Written by hand, so that what is loaded does not depend on a compiler.
static const char ptx[] = R"(
.version 7.0
.target sm_75
.address_size 64

.global .align 4 .u32 launches = 7;
.const .align 4 .u32 bias[4] = {100, 200, 300, 400};

// c[i] = a[i] * factor + b[i] for i < n
.visible .entry scale_add(
    .param .u64 p_a,
    .param .u64 p_b,
    .param .u64 p_c,
    .param .f32 p_factor,
    .param .u32 p_n
)
{
    .reg .pred %p<2>;
    .reg .f32 %f<5>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<10>;

    ld.param.u64 %rd1, [p_a];
    ld.param.u64 %rd2, [p_b];
    ld.param.u64 %rd3, [p_c];
    ld.param.f32 %f1, [p_factor];
    ld.param.u32 %r1, [p_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd4, %rd1;
    cvta.to.global.u64 %rd5, %rd2;
    cvta.to.global.u64 %rd6, %rd3;
    mul.wide.u32 %rd7, %r5, 4;
    add.s64 %rd4, %rd4, %rd7;
    add.s64 %rd5, %rd5, %rd7;
    add.s64 %rd6, %rd6, %rd7;
    ld.global.f32 %f2, [%rd4];
    ld.global.f32 %f3, [%rd5];
    fma.rn.f32 %f4, %f2, %f1, %f3;
    st.global.f32 [%rd6], %f4;
    setp.ne.u32 %p1, %r5, 0;
    @%p1 bra DONE;
    atom.global.add.u32 %r6, [launches], 1;
DONE:
    ret;
}

// Reverses one block's words through shared memory and adds a constant that depends on the place.
.visible .entry reverse(
    .param .u64 p_data
)
{
    .reg .b32 %r<10>;
    .reg .b64 %rd<8>;
    .shared .align 4 .b8 words[1024];

    ld.param.u64 %rd1, [p_data];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r3, [%rd3];
    mov.u64 %rd4, words;
    add.s64 %rd5, %rd4, %rd2;
    st.shared.u32 [%rd5], %r3;
    bar.sync 0;
    sub.s32 %r4, %r2, %r1;
    sub.s32 %r4, %r4, 1;
    mul.wide.u32 %rd6, %r4, 4;
    add.s64 %rd6, %rd4, %rd6;
    ld.shared.u32 %r5, [%rd6];
    and.b32 %r6, %r1, 3;
    mul.wide.u32 %rd7, %r6, 4;
    mov.u64 %rd2, bias;
    add.s64 %rd7, %rd2, %rd7;
    ld.const.u32 %r7, [%rd7];
    add.s32 %r5, %r5, %r7;
    st.global.u32 [%rd3], %r5;
    ret;
}
)";

static void contexts(CUdevice device) {
    CUcontext current, other, popped;
    OK(cuCtxGetCurrent(&current));
    REQUIRE(current != nullptr, "no current context");
    OK(cuCtxCreate(&other, nullptr, 0, device));
    CUcontext now;
    OK(cuCtxGetCurrent(&now));
    REQUIRE(now == other, "a new context is not current");
    CUdevice its_device;
    OK(cuCtxGetDevice(&its_device));
    REQUIRE(its_device == device, "the context has device %d", its_device);
    // An event is recorded in its own context only.
    CUevent event;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cuCtxPopCurrent(&popped));
    REQUIRE(popped == other, "another context was popped");
    CUresult recorded = cuEventRecord(event, nullptr);
    REQUIRE(recorded == CUDA_ERROR_INVALID_HANDLE, "an event of another context: %d", recorded);
    OK(cuCtxGetCurrent(&now));
    REQUIRE(now == current, "the first context is not current again");
    OK(cuCtxPushCurrent(other));
    CUdeviceptr memory;
    OK(cuMemAlloc(&memory, 4096));
    OK(cuMemsetD8(memory, 1, 4096));
    OK(cuCtxSynchronize());
    OK(cuCtxDestroy(other));
    OK(cuCtxSetCurrent(current));
    unsigned flags;
    int active;
    OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
    REQUIRE(active == 1, "the primary context is not active");
}

static void memory() {
    const size_t n = 1000;
    CUdeviceptr device, base;
    size_t size;
    OK(cuMemAlloc(&device, n * 4));
    OK(cuMemGetAddressRange(&base, &size, device + 1234));
    REQUIRE(base == device && size == n * 4, "the range of an allocation of %zu bytes has %zu", n * 4, size);
    std::vector<uint32_t> words(n), want(n);
    OK(cuMemsetD32(device, 0xdeadbeef, n));
    OK(cuMemsetD16(device + 200, 0x1234, 301));
    OK(cuMemsetD8(device + 2001, 0x56, 7));
    for (uint32_t &word : want) word = 0xdeadbeef;
    unsigned char *bytes = (unsigned char *)want.data();
    for (int i = 0; i < 301; i++) bytes[200 + 2 * i] = 0x34, bytes[200 + 2 * i + 1] = 0x12;
    memset(bytes + 2001, 0x56, 7);
    OK(cuMemcpyDtoH(words.data(), device, n * 4));
    REQUIRE(words == want, "memsets of 32, 16 and 8 bits left other bytes");
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuMemsetD32(device + 2, 0, 1));
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(0x1000, words.data(), 4));
    DRIVER(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&base, (size_t)1 << 60));
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&base, 0));
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuMemFree(device + 4));
    OK(cuMemFree(device));
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuMemFree(device));
    void *pinned;
    OK(cuMemAllocHost(&pinned, 10000));
    OK(cuMemFreeHost(pinned));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);

    int count;
    DRIVER(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    REQUIRE(count > 0, "there is no device");
    CUdevice device;
    OK(cuDeviceGet(&device, 0));
    DRIVER(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, count));
    OK(cuDeviceGet(&device, 0));
    char device_name[256];
    OK(cuDeviceGetName(device_name, sizeof device_name, device));
    size_t total;
    OK(cuDeviceTotalMem(&total, device));
    REQUIRE(device_name[0] && total > 0, "the device has no name or no memory");
    CUmodule module;
    DRIVER(CUDA_ERROR_INVALID_CONTEXT, cuModuleLoadData(&module, ptx));
    CUcontext context;
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    contexts(device);
    memory();

    DRIVER(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&module, ".version 7.0\n.target sm_75\n.address_size 64\nthis is no PTX\n"));
    OK(cuModuleLoadData(&module, ptx));
    CUfunction scale_add, reverse;
    OK(cuModuleGetFunction(&scale_add, module, "scale_add"));
    OK(cuModuleGetFunction(&reverse, module, "reverse"));
    CUfunction missing;
    DRIVER(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&missing, module, "missing"));
    int shared;
    OK(cuFuncGetAttribute(&shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, reverse));
    REQUIRE(shared == 1024, "the kernel uses %d bytes of shared memory, not 1024", shared);
    CUdeviceptr launches;
    size_t size;
    OK(cuModuleGetGlobal(&launches, &size, module, "launches"));
    REQUIRE(size == 4, "a word has %zu bytes", size);
    DRIVER(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal(&launches, &size, module, "missing"));
    OK(cuModuleGetGlobal(&launches, &size, module, "launches"));

    unsigned n = options.full ? 1 << 20 : 3000;
    std::vector<float> a(n), b(n), c(n);
    for (float &x : a) x = (float)random.below(1000);
    for (float &x : b) x = (float)random.below(1000);
    CUdeviceptr device_a, device_b, device_c;
    OK(cuMemAlloc(&device_a, n * 4));
    OK(cuMemAlloc(&device_b, n * 4));
    OK(cuMemAlloc(&device_c, n * 4));
    OK(cuMemcpyHtoD(device_a, a.data(), n * 4));
    // A copy from pageable memory may still be on its way, and a non-blocking stream does not wait for it.
    OK(cuCtxSynchronize());
    CUstream stream;
    CUevent start, end;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    OK(cuMemcpyHtoDAsync(device_b, b.data(), n * 4, stream));
    float factor = 3.0f;
    void *parameters[] = {&device_a, &device_b, &device_c, &factor, &n};
    OK(cuEventRecord(start, stream));
    OK(cuLaunchKernel(scale_add, (n + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters, nullptr));
    OK(cuEventRecord(end, stream));
    OK(cuMemcpyDtoHAsync(c.data(), device_c, n * 4, stream));
    OK(cuStreamSynchronize(stream));
    for (unsigned i = 0; i < n; i++)
        REQUIRE(c[i] == a[i] * 3 + b[i], "element %u is %g, not %g", i, c[i], a[i] * 3 + b[i]);
    float milliseconds = -1;
    OK(cuEventElapsedTime(&milliseconds, start, end));
    REQUIRE(milliseconds >= 0, "the kernel took %g ms", milliseconds);

    // The same kernel with its parameters packed by the caller.
    struct {
        CUdeviceptr a, b, c;
        float factor;
        unsigned n;
    } packed = {device_b, device_a, device_c, -2.0f, n};
    size_t packed_size = sizeof packed;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &packed_size, CU_LAUNCH_PARAM_END};
    OK(cuLaunchKernel(scale_add, (n + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, nullptr, extra));
    OK(cuCtxSynchronize());
    OK(cuMemcpyDtoH(c.data(), device_c, n * 4));
    for (unsigned i = 0; i < n; i++)
        REQUIRE(c[i] == b[i] * -2 + a[i], "packed: element %u is %g, not %g", i, c[i], b[i] * -2 + a[i]);
    unsigned counted;
    OK(cuMemcpyDtoH(&counted, launches, 4));
    REQUIRE(counted == 9, "the module's counter is %u, not 9", counted);

    unsigned words[256], reversed[256];
    random.fill(words, sizeof words);
    OK(cuMemcpyHtoD(device_c, words, sizeof words));
    OK(cuCtxSynchronize());
    void *one[] = {&device_c};
    OK(cuLaunchKernel(reverse, 1, 1, 1, 256, 1, 1, 0, stream, one, nullptr));
    OK(cuStreamSynchronize(stream));
    OK(cuMemcpyDtoH(reversed, device_c, sizeof reversed));
    for (int i = 0; i < 256; i++)
        REQUIRE(reversed[i] == words[255 - i] + 100 * (i % 4 + 1), "word %d is %u, not %u", i, reversed[i],
                words[255 - i] + 100 * (i % 4 + 1));

    DRIVER(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(reverse, 0, 1, 1, 1, 1, 1, 0, stream, one, nullptr));
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(reverse, 1, 1, 1, 1025, 1, 1, 0, stream, one, nullptr));
    DRIVER(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(reverse, 1, 1, 1, 1, 1, 1, 64 << 20, stream, one, nullptr));
    DRIVER(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream, one, nullptr));

    OK(cuEventDestroy(start));
    OK(cuEventDestroy(end));
    OK(cuStreamDestroy(stream));
    OK(cuMemFree(device_a));
    OK(cuMemFree(device_b));
    OK(cuMemFree(device_c));
    OK(cuModuleUnload(module));
    OK(cuDevicePrimaryCtxRelease(device));
    return pass("%u elements on %s", n, device_name);
}
