// A module with a kernel that the device does not implement (multicast memory, on the GPU in software): it loads, its other
// kernels run, and what is asked about the kernel is answered. Only its launch fails, and leaves no error behind. A GPU that
// implements the kernel runs it. nvbandwidth's and NCCL's modules have such kernels.
#define PROGRAM "unsupported_kernels"
#include "common.h"

#include <cuda.h>

__device__ __noinline__ static void store_to_all(unsigned *to, unsigned value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.st.u32 [%0], %1;" ::"l"(to), "r"(value));
#endif
}

// Not through the multicast address unless `really`, which no test asks for: there is none.
__global__ void multicast(unsigned *out, unsigned value, bool really) {
    if (really) store_to_all(out, value);
    *out = value;
}

__global__ void plain(unsigned *out, unsigned value) { *out = value; }

static const char ptx[] = R"(
.version 8.1
.target sm_90
.address_size 64
.visible .entry reduces(.param .u64 p_out, .param .u32 p_really)
{
    .reg .pred %p; .reg .b32 %r<3>; .reg .b64 %out;
    ld.param.u64 %out, [p_out];
    ld.param.u32 %r0, [p_really];
    setp.eq.u32 %p, %r0, 0;
    @%p bra DONE;
    multimem.ld_reduce.and.b32 %r1, [%out];
DONE:
    mov.u32 %r2, 5;
    st.global.u32 [%out], %r2;
    ret;
}
.visible .entry writes(.param .u64 p_out)
{
    .reg .b32 %r; .reg .b64 %out;
    ld.param.u64 %out, [p_out];
    mov.u32 %r, 6;
    st.global.u32 [%out], %r;
    ret;
}
)";

#define OK(call)                                                                          \
    do {                                                                                  \
        CUresult got_ = (call);                                                           \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);     \
    } while (0)

static unsigned *out;

static unsigned word() {
    unsigned value = 0;
    CHECK(cudaMemcpy(&value, out, sizeof value, cudaMemcpyDefault));
    return value;
}

// The launch of a kernel that the device may lack: whether it was launched.
static bool launched(const char *what, int error, unsigned expected) {
    if (error == cudaErrorNoKernelImageForDevice) {
        (void)cudaGetLastError();  // the runtime's own, if the launch was the runtime's
        REQUIRE(cudaGetLastError() == cudaSuccess, "%s: the error stays", what);
        CHECK(cudaDeviceSynchronize());
        return false;
    }
    REQUIRE(error == 0, "%s: error %d", what, error);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(word() == expected, "%s: %u instead of %u", what, word(), expected);
    return true;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaMalloc(&out, sizeof *out));

    // What is asked about a kernel is answered, whether it can be launched or not.
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, multicast));
    int blocks = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, multicast, 256, 0));
    REQUIRE(blocks > 0 && attributes.maxThreadsPerBlock > 0, "%d blocks of %d threads", blocks, attributes.maxThreadsPerBlock);

    plain<<<1, 1>>>(out, 1);
    CHECK(cudaGetLastError());
    REQUIRE(word() == 1, "a kernel beside the one that may be missing: %u", word());
    multicast<<<1, 1>>>(out, 2, false);
    bool has = launched("a launch", cudaPeekAtLastError(), 2);
    plain<<<1, 1>>>(out, 3);
    CHECK(cudaGetLastError());
    REQUIRE(word() == 3, "a kernel after the one that may be missing: %u", word());

    // The same of PTX, with the compiler's log.
    char log[1024] = "";
    CUjit_option names[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log};
    CUmodule module;
    CUfunction reduces, writes;
    OK(cuModuleLoadDataEx(&module, ptx, 2, names, values));
    OK(cuModuleGetFunction(&reduces, module, "reduces"));
    OK(cuModuleGetFunction(&writes, module, "writes"));
    unsigned really = 0;
    void *parameters[] = {&out, &really};
    CUresult status = cuLaunchKernel(reduces, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
    bool second = launched("a launch of PTX", status, 5);
    REQUIRE(second == has, "one kernel can be launched, the other not");
    REQUIRE(has || (strstr(log, "multimem.ld_reduce.and.b32") && strstr(log, "kernel reduces")), "the log does not name the instruction: \"%s\"", log);
    OK(cuLaunchKernel(writes, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
    REQUIRE(word() == 6, "a kernel of PTX beside the one that may be missing: %u", word());
    OK(cuModuleUnload(module));
    CHECK(cudaFree(out));
    return pass(has ? "the device has multicast memory" : "refused by name");
}
