// nvJitLink from the toolkit: two pieces of PTX, one with a function that the other calls, linked for this GPU and loaded; and
// its log where a piece is missing.
#define PROGRAM "nvjitlink"
#include "toolkit.h"
#include <cuda.h>
#include <vector>

typedef struct Linker_ *Linker;

static const char callee[] = R"(
.version 8.0
.target sm_75
.address_size 64
.visible .func (.reg .b32 out) square(.reg .b32 in)
{
    mul.lo.s32 out, in, in;
    ret;
}
)";
static const char caller[] = R"(
.version 8.0
.target sm_75
.address_size 64
.extern .func (.reg .b32 out) square(.reg .b32 in);
.visible .entry squares(.param .u64 p)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    call (%r2), square, (%r1);
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r2;
    ret;
}
)";

int main(int argc, char **argv) {
    parse_options(argc, argv);
    Toolkit link("libnvJitLink.so");
    auto symbol = [&](const char *name) {
        // Its functions carry the toolkit's version.
        for (const char *version : {"", "_13_0", "_13_1", "_12_9", "_12_8"}) {
            if (void *found = dlsym(link.handle, (std::string("__") + name + version).c_str())) return found;
            if (void *found = dlsym(link.handle, (std::string(name) + version).c_str())) return found;
        }
        fail("libnvJitLink.so has no %s", name);
    };
    auto create = (int (*)(Linker *, unsigned, const char **))symbol("nvJitLinkCreate");
    auto add = (int (*)(Linker, int, const void *, size_t, const char *))symbol("nvJitLinkAddData");
    auto complete = (int (*)(Linker))symbol("nvJitLinkComplete");
    auto size_of = (int (*)(Linker, size_t *))symbol("nvJitLinkGetLinkedCubinSize");
    auto take = (int (*)(Linker, void *))symbol("nvJitLinkGetLinkedCubin");
    auto log_size = (int (*)(Linker, size_t *))symbol("nvJitLinkGetErrorLogSize");
    auto log_text = (int (*)(Linker, char *))symbol("nvJitLinkGetErrorLog");
    auto destroy = (int (*)(Linker *))symbol("nvJitLinkDestroy");
    ANSWERS(cuInit(0));
    CUcontext context;
    ANSWERS(cuDevicePrimaryCtxRetain(&context, 0));
    ANSWERS(cuCtxSetCurrent(context));
    int major = 0, minor = 0;
    ANSWERS(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    ANSWERS(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0));
    char arch[32];
    snprintf(arch, sizeof arch, "-arch=sm_%d%d", major, minor);
    const char *options[] = {arch};
    const int PTX = 2;
    Linker linker;
    ANSWERS(create(&linker, 1, options));
    ANSWERS(add(linker, PTX, callee, sizeof callee, "callee"));
    ANSWERS(add(linker, PTX, caller, sizeof caller, "caller"));
    ANSWERS(complete(linker));
    size_t size = 0;
    ANSWERS(size_of(linker, &size));
    std::vector<char> image(size);
    ANSWERS(take(linker, image.data()));
    ANSWERS(destroy(&linker));
    CUmodule module;
    CUfunction squares;
    CUdeviceptr p;
    int got[64];
    ANSWERS(cuModuleLoadData(&module, image.data()));
    ANSWERS(cuModuleGetFunction(&squares, module, "squares"));
    ANSWERS(cuMemAlloc(&p, sizeof got));
    void *arguments[] = {&p};
    ANSWERS(cuLaunchKernel(squares, 1, 1, 1, 64, 1, 1, 0, nullptr, arguments, nullptr));
    ANSWERS(cuMemcpyDtoH(got, p, sizeof got));
    for (int i = 0; i < 64; i++) REQUIRE(got[i] == i * i, "the square of %d is %d", i, got[i]);
    ANSWERS(cuModuleUnload(module));

    ANSWERS(create(&linker, 1, options));
    ANSWERS(add(linker, PTX, caller, sizeof caller, "caller"));
    REQUIRE(complete(linker) != 0, "it links without the function");
    ANSWERS(log_size(linker, &size));
    std::string log(size, 0);
    ANSWERS(log_text(linker, &log[0]));
    REQUIRE(log.find("square") != std::string::npos, "the log: %s", log.c_str());
    ANSWERS(destroy(&linker));
    return pass("two pieces, and one too few");
}
