// A launch that the driver refuses (its kernel requires blocks of another shape) is reported: by the launch, or by the next copy that the program waits for. No copy returns
// old bytes as if the kernel had run.
#define PROGRAM "refused_launches"
#include "common.h"

#include <atomic>
#include <cuda.h>
#include <thread>
#include <vector>

#define OK(call)                                                                          \
    do {                                                                                  \
        CUresult got_ = (call);                                                           \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);     \
    } while (0)

static const char ptx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 out, .param .u32 count, .param .u32 value) .reqntid 64
{
    .reg .pred %done;
    .reg .b32 %i, %n, %v;
    .reg .b64 %at, %step;
    ld.param.u64 %at, [out];
    ld.param.u32 %n, [count];
    ld.param.u32 %v, [value];
    mov.u32 %i, %tid.x;
    mul.wide.u32 %step, %i, 4;
    add.u64 %at, %at, %step;
NEXT:
    setp.ge.u32 %done, %i, %n;
    @%done ret;
    st.global.u32 [%at], %v;
    add.u64 %at, %at, 256;
    add.u32 %i, %i, 64;
    bra NEXT;
}
)";

static const unsigned WIDTH = 512, HEIGHT = 512, COUNT = WIDTH * HEIGHT;
static CUdeviceptr memory;
static CUfunction fill;

static CUresult launch(unsigned threads, unsigned value) {
    unsigned count = COUNT;
    void *parameters[] = {&memory, &count, &value};
    return cuLaunchKernel(fill, 1, 1, 1, threads, 1, 1, 0, nullptr, parameters, nullptr);
}

// Waits for the copy of `words` words that `copy` makes to `to`, after a launch that is refused and after one that is not.
template <class Copy> static void copies(const char *name, unsigned *to, size_t words, Copy copy) {
    static unsigned value = 0;
    OK(launch(64, ++value));
    OK(cuCtxSynchronize());
    CUresult launched = launch(32, value + 1), copied = copy();
    REQUIRE(launched != CUDA_SUCCESS || copied != CUDA_SUCCESS, "%s: nothing says that the launch was refused", name);
    REQUIRE(launched == CUDA_SUCCESS || copied == CUDA_SUCCESS, "%s: the launch failed with %d, and the copy with %d", name, launched, copied);
    value++;
    OK(launch(64, ++value));
    CUresult again = copy();
    REQUIRE(again == CUDA_SUCCESS, "%s: the error stays: %d", name, again);
    for (size_t i = 0; i < words; i++) REQUIRE(to[i] == value, "%s: word %zu is %u instead of %u", name, i, to[i], value);
}

static std::atomic<bool> go, reached;

// Calls `release` when a launch behind a held stream has been refused, and again. The first call releases the memory, even if it is what says that the launch was refused.
template <class Release> static void releases(const char *name, Release release) {
    go = reached = false;
    OK(cuLaunchHostFunc(nullptr, [](void *) { while (!go) std::this_thread::yield(); }, nullptr));
    CUresult launched = launch(32, 0);
    OK(cuLaunchHostFunc(nullptr, [](void *) { reached = true; }, nullptr));
    go = true;
    while (!reached) std::this_thread::yield();
    CUresult released = release();
    REQUIRE((launched == CUDA_SUCCESS) != (released == CUDA_SUCCESS), "%s: the launch returned %d, and the call %d", name, (int)launched, (int)released);
    CUresult again = release();
    REQUIRE(again != CUDA_SUCCESS, "%s: nothing was released: %d", name, (int)again);
    OK(cuCtxSynchronize());
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CUmodule module;
    CHECK(cudaFree(nullptr));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&fill, module, "fill"));
    OK(cuMemAlloc(&memory, COUNT * sizeof(unsigned)));
    std::vector<unsigned> pageable(COUNT);
    unsigned *pinned;
    OK(cuMemAllocHost((void **)&pinned, COUNT * sizeof *pinned));
    copies("a few bytes", pageable.data(), 1, [&] { return cuMemcpyDtoH(pageable.data(), memory, sizeof(unsigned)); });
    copies("a megabyte", pageable.data(), COUNT, [&] { return cuMemcpyDtoH(pageable.data(), memory, COUNT * sizeof(unsigned)); });
    copies("to pinned memory", pinned, COUNT, [&] { return cuMemcpyDtoH(pinned, memory, COUNT * sizeof(unsigned)); });
    copies("a rectangle", pageable.data(), WIDTH / 2, [&] {
        CUDA_MEMCPY2D copy = {};
        copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = memory;
        copy.dstMemoryType = CU_MEMORYTYPE_HOST;
        copy.dstHost = pageable.data();
        copy.srcPitch = copy.dstPitch = WIDTH * sizeof(unsigned);
        copy.WidthInBytes = WIDTH / 2 * sizeof(unsigned);
        copy.Height = HEIGHT;
        return cuMemcpy2D(&copy);
    });
    copies("behind the launch", pinned, COUNT, [&] {
        CUresult status = cuMemcpyDtoHAsync(pinned, memory, COUNT * sizeof(unsigned), nullptr);
        return status == CUDA_SUCCESS ? cuStreamSynchronize(nullptr) : status;
    });
    releases("cuMemFreeHost", [&] { return cuMemFreeHost(pinned); });
    CUdeviceptr device;
    OK(cuMemAlloc(&device, 1 << 20));
    releases("cuMemFree", [&] { return cuMemFree(device); });
    OK(cuMemAllocAsync(&device, 1 << 20, nullptr));
    releases("cuMemFreeAsync", [&] { return cuMemFreeAsync(device, nullptr); });
    OK(cuMemHostRegister(pageable.data(), pageable.size() * sizeof(unsigned), 0));
    releases("cuMemHostUnregister", [&] { return cuMemHostUnregister(pageable.data()); });
    OK(cuMemFree(memory));
    OK(cuModuleUnload(module));
    return pass("no copy hides a refused launch, and no free fails because of one");
}
