// A context's first non-blocking stream is made when a synchronous copy and other work have gone before. What is put on it finds the copied bytes, and does not wait for the other work: NVIDIA's
// driver returns from such a copy when the bytes are there.
#define PROGRAM "first_stream"
#include "common.h"
#include <cuda.h>
#include <vector>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);                                    \
    } while (0)

static const char ptx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry take(.param .u64 from, .param .u64 to)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.global.u32 %r1, [%rd1];
    st.global.u32 [%rd2], %r1;
    ret;
}
.visible .entry await(.param .u64 flag)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [flag];
AGAIN:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    ret;
}
)";

// `waits`: the work behind the copy waits for the stream. A stream that waited for it in turn would wait forever.
static void once(CUdevice device, unsigned size, unsigned value, bool waits) {
    CUcontext context;
    OK(cuCtxCreate(&context, nullptr, 0, device));
    CUmodule module;
    CUfunction take, await;
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&take, module, "take"));
    OK(cuModuleGetFunction(&await, module, "await"));
    CUdeviceptr bytes, results;
    OK(cuMemAlloc(&bytes, size));
    OK(cuMemAlloc(&results, 12));
    OK(cuMemsetD8(bytes, 0, size));
    OK(cuMemsetD8(results, 0, 12));
    // From here on nothing is under way.
    OK(cuCtxSynchronize());
    std::vector<unsigned> words(size / 4, value);
    OK(cuMemcpyHtoD(bytes, words.data(), size));
    CUdeviceptr last = bytes + size - 4, beside = results + 4, flag = results + 8;
    void *to_result[] = {&last, &results}, *to_beside[] = {&last, &beside}, *of_flag[] = {&flag};
    OK(cuLaunchKernel(take, 1, 1, 1, 1, 1, 1, 0, nullptr, to_beside, nullptr));
    if (waits) OK(cuLaunchKernel(await, 1, 1, 1, 1, 1, 1, 0, nullptr, of_flag, nullptr));
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuLaunchKernel(take, 1, 1, 1, 1, 1, 1, 0, stream, to_result, nullptr));
    OK(cuMemsetD32Async(flag, 1, 1, stream));
    OK(cuStreamSynchronize(stream));
    unsigned got[2];
    OK(cuMemcpyDtoH(got, results, 8));
    REQUIRE(got[0] == value && got[1] == value, "of a copy of %u bytes of %u, the new stream's kernel has read %u, and the one before it %u", size, value, got[0], got[1]);
    OK(cuCtxDestroy(context));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    OK(cuInit(0));
    CUdevice device;
    OK(cuDeviceGet(&device, 0));
    const unsigned rounds = options.full ? 30 : 10;
    for (unsigned size : {4u << 10, 64u << 10, 128u << 10})
        for (unsigned round = 1; round <= rounds; round++) once(device, size, round, round % 4 == 0);
    return pass("%u contexts", 3 * rounds);
}
