// CUDA calls while the process ends: in the destructor of a static object and in a function of atexit, on the thread that ended it. The context is still
// current there, its objects live, and work is done.
#define PROGRAM "exit_destructors"
#include "common.h"

#include <cuda.h>
#include <unistd.h>

#define OK(call)                                                                                          \
    do {                                                                                                  \
        CUresult got_ = (call);                                                                           \
        if (got_ != CUDA_SUCCESS) {                                                                       \
            fprintf(stderr, "FAIL exit_destructors line %d: %s: %d\n", __LINE__, #call, (int)got_);       \
            fflush(nullptr);                                                                              \
            _exit(1);                                                                                     \
        }                                                                                                 \
    } while (0)

static const char text[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 at)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [at];
    ld.global.u32 %r1, [%rd1];
    add.u32 %r1, %r1, %r1;
    st.global.u32 [%rd1], %r1;
    ret;
}
)";

static CUcontext context;
static CUfunction twice;
static CUdeviceptr word;

// Doubles the word, and says what it is now.
static unsigned work(CUstream stream) {
    unsigned value = 0;
    void *params[] = {&word};
    CUcontext current = nullptr;
    CUevent event;
    OK(cuCtxGetCurrent(&current));
    if (current != context) {
        fprintf(stderr, "FAIL exit_destructors: the context is not current\n");
        _exit(1);
    }
    OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
    OK(cuLaunchKernel(twice, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr));
    OK(cuEventRecord(event, stream));
    OK(cuEventSynchronize(event));
    OK(cuMemcpyDtoH(&value, word, sizeof value));
    OK(cuEventDestroy(event));
    return value;
}

struct Keeper {
    CUevent event = nullptr;
    CUstream stream = nullptr;
    ~Keeper() {
        if (event == nullptr) return;
        OK(cuEventQuery(event));
        OK(cuEventDestroy(event));
        unsigned own = work(CU_STREAM_PER_THREAD), made = work(stream);
        OK(cuStreamDestroy(stream));
        OK(cuMemFree(word));
        OK(cuDevicePrimaryCtxRelease(0));
        if (own != 8 || made != 16) {
            fprintf(stderr, "FAIL exit_destructors: %u and %u in the destructor\n", own, made);
            _exit(1);
        }
        printf("PASS exit_destructors in main, in a function of atexit and in a destructor\n");
        fflush(stdout);
    }
};

// Made before main, so destroyed after everything that main has registered.
static Keeper keeper;

static void at_exit() {
    unsigned value = work(nullptr);
    if (value != 4) {
        fprintf(stderr, "FAIL exit_destructors: %u in a function of atexit\n", value);
        _exit(1);
    }
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CUmodule module;
    atexit(at_exit);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, text));
    OK(cuModuleGetFunction(&twice, module, "twice"));
    OK(cuMemAlloc(&word, sizeof(unsigned)));
    OK(cuMemsetD32(word, 1, 1));
    OK(cuStreamCreate(&keeper.stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&keeper.event, CU_EVENT_DISABLE_TIMING));
    OK(cuEventRecord(keeper.event, keeper.stream));
    REQUIRE(work(CU_STREAM_PER_THREAD) == 2, "in main");
    return 0;
}
