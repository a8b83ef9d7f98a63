// CUDA calls while the process ends, on the thread that ended it: in destructors of static objects and in functions of atexit. Those that were made after cuInit find the
// context current and its objects alive; those that were made before come after the driver's own end.
#define PROGRAM "exit_destructors"
#include "common.h"

#include <cuda.h>

#define OK(call)                                                                    \
    do {                                                                            \
        CUresult got_ = (call);                                                     \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_); \
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
    if (current != context) fail("the context is not current");
    OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
    OK(cuLaunchKernel(twice, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr));
    OK(cuEventRecord(event, stream));
    OK(cuEventSynchronize(event));
    OK(cuMemcpyDtoH(&value, word, sizeof value));
    OK(cuEventDestroy(event));
    return value;
}

// What was made after cuInit is destroyed before the driver ends.
struct Late {
    CUevent event = nullptr;
    CUstream stream = nullptr;
    ~Late() {
        // Nothing has waited for the event's stream.
        CUresult status;
        while ((status = cuEventQuery(event)) == CUDA_ERROR_NOT_READY) {}
        OK(status);
        OK(cuEventDestroy(event));
        unsigned own = work(CU_STREAM_PER_THREAD), made = work(stream);
        OK(cuStreamDestroy(stream));
        if (own != 8 || made != 16) fail("what the destructor of a late object found");
    }
};

static void late_at_exit() {
    if (work(nullptr) != 4) fail("what a late function of atexit found");
}

// What was made before comes after the driver's end, and is told so.
static void ended(const char *who) {
    CUcontext current;
    int device;
    if (cuCtxGetCurrent(&current) != CUDA_ERROR_DEINITIALIZED || cuCtxSynchronize() != CUDA_ERROR_DEINITIALIZED ||
        cuMemFree(word) != CUDA_ERROR_DEINITIALIZED || cuDeviceGet(&device, 0) != CUDA_ERROR_DEINITIALIZED)
        fail("%s", who);
}

struct Early {
    ~Early() {
        ended("what the destructor of an early object was told");
        printf("PASS exit_destructors of late and early objects\n");
        fflush(stdout);
    }
};

static Early early;

static void early_at_exit() { ended("what an early function of atexit was told"); }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CUmodule module;
    atexit(early_at_exit);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, text));
    OK(cuModuleGetFunction(&twice, module, "twice"));
    OK(cuMemAlloc(&word, sizeof(unsigned)));
    OK(cuMemsetD32(word, 1, 1));
    static Late late;
    OK(cuStreamCreate(&late.stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&late.event, CU_EVENT_DISABLE_TIMING));
    OK(cuEventRecord(late.event, late.stream));
    atexit(late_at_exit);
    if (work(CU_STREAM_PER_THREAD) != 2) fail("the first work");
    return 0;
}
