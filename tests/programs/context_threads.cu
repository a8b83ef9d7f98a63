// Contexts that threads hand to each other: one works in it at a time, each finds what the one before left; and threads that
// each have one of their own at the same time.
#define PROGRAM "context_threads"
#include "common.h"
#include <cuda.h>
#include <thread>
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
.global .align 4 .u32 visits;
.visible .entry visit(.param .u64 p, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    atom.global.add.u32 %r7, [visits], 1;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r6, [%rd1];
    add.u32 %r6, %r6, 1;
    st.global.u32 [%rd1], %r6;
DONE:
    ret;
}
)";

constexpr int THREADS = 6, N = 1000;

struct Work {
    CUcontext context;
    CUmodule module;
    CUfunction visit;
    CUdeviceptr values;
};

static void begin(Work &work, CUdevice device) {
    OK(cuCtxCreate(&work.context, nullptr, 0, device));
    OK(cuModuleLoadData(&work.module, ptx));
    OK(cuModuleGetFunction(&work.visit, work.module, "visit"));
    OK(cuMemAlloc(&work.values, N * 4));
    OK(cuMemsetD32(work.values, 10, N));
}

static void visit(Work &work) {
    unsigned n = N;
    void *arguments[] = {&work.values, &n};
    OK(cuLaunchKernel(work.visit, (N + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
}

static void check(Work &work, unsigned want) {
    std::vector<unsigned> host(N);
    OK(cuMemcpyDtoH(host.data(), work.values, N * 4));
    for (unsigned value : host) REQUIRE(value == 10 + want, "after %u visits a value is %u", want, value);
    CUdeviceptr counter;
    size_t size;
    unsigned visits;
    OK(cuModuleGetGlobal(&counter, &size, work.module, "visits"));
    OK(cuMemcpyDtoH(&visits, counter, 4));
    REQUIRE(size == 4 && visits == want * N, "%u visits instead of %u", visits, want * N);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    OK(cuInit(0));
    CUdevice device;
    OK(cuDeviceGet(&device, 0));
    Work shared;
    begin(shared, device);
    OK(cuCtxPopCurrent(nullptr));
    for (int i = 0; i < THREADS; i++)
        std::thread([&] {
            CUcontext mine = (CUcontext)1;
            OK(cuCtxGetCurrent(&mine));
            REQUIRE(mine == nullptr, "a new thread has a context");
            OK(cuCtxPushCurrent(shared.context));
            visit(shared);
            OK(cuCtxPopCurrent(&mine));
            REQUIRE(mine == shared.context, "another context was popped");
        }).join();
    OK(cuCtxPushCurrent(shared.context));
    check(shared, THREADS);

    // All at once in the one context, and each in its own as well.
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++)
        threads.emplace_back([&, i] {
            Work own;
            begin(own, device);
            for (int round = 0; round <= i; round++) {
                visit(own);
                OK(cuCtxPushCurrent(shared.context));
                visit(shared);
                OK(cuCtxPopCurrent(nullptr));
            }
            check(own, i + 1);
            OK(cuCtxDestroy(own.context));
        });
    for (auto &thread : threads) thread.join();
    check(shared, THREADS + THREADS * (THREADS + 1) / 2);
    OK(cuCtxDestroy(shared.context));
    return pass("%d threads, one context and one each", THREADS);
}
