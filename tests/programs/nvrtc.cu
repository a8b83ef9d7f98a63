// A program that compiles at run time: NVRTC from the toolkit, its PTX and its machine code loaded, a template's instance by its
// lowered name, and a log for what is wrong.
#define PROGRAM "nvrtc"
#include "toolkit.h"
#include <cuda.h>
#include <vector>

typedef struct Program_ *Program;

static const char source[] = R"(
template <class T> __global__ void scale(T *p, T factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = p[i] * factor + T(SHIFT);
}
__device__ int calls;
extern "C" __global__ void call() { atomicAdd(&calls, 1); }
)";

int main(int argc, char **argv) {
    parse_options(argc, argv);
    Toolkit rtc("libnvrtc.so");
    auto create = rtc.function<int (*)(Program *, const char *, const char *, int, const char *const *, const char *const *)>("nvrtcCreateProgram");
    auto add_name = rtc.function<int (*)(Program, const char *)>("nvrtcAddNameExpression");
    auto compile = rtc.function<int (*)(Program, int, const char *const *)>("nvrtcCompileProgram");
    auto lowered = rtc.function<int (*)(Program, const char *, const char **)>("nvrtcGetLoweredName");
    auto destroy = rtc.function<int (*)(Program *)>("nvrtcDestroyProgram");
    auto size_of_log = rtc.function<int (*)(Program, size_t *)>("nvrtcGetProgramLogSize");
    auto log_of = rtc.function<int (*)(Program, char *)>("nvrtcGetProgramLog");
    ANSWERS(cuInit(0));
    CUcontext context;
    ANSWERS(cuDevicePrimaryCtxRetain(&context, 0));
    ANSWERS(cuCtxSetCurrent(context));
    int major = 0, minor = 0;
    ANSWERS(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    ANSWERS(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0));
    const int n = 1000;
    for (const char *kind : {"PTX", "CUBIN"}) {
        Program program;
        ANSWERS(create(&program, source, "scale.cu", 0, nullptr, nullptr));
        ANSWERS(add_name(program, "scale<float>"));
        ANSWERS(add_name(program, "scale<long long>"));
        char arch[64];
        snprintf(arch, sizeof arch, "--gpu-architecture=%s_%d%d", *kind == 'P' ? "compute" : "sm", major, minor);
        const char *options[] = {arch, "-DSHIFT=2", "--std=c++17"};
        ANSWERS(compile(program, 3, options));
        size_t size = 0;
        ANSWERS(rtc.function<int (*)(Program, size_t *)>((std::string("nvrtcGet") + kind + "Size").c_str())(program, &size));
        std::vector<char> image(size + 1);
        ANSWERS(rtc.function<int (*)(Program, char *)>((std::string("nvrtcGet") + kind).c_str())(program, image.data()));
        CUmodule module;
        CUfunction of_float, of_long, call;
        const char *name;
        ANSWERS(cuModuleLoadData(&module, image.data()));
        ANSWERS(lowered(program, "scale<float>", &name));
        ANSWERS(cuModuleGetFunction(&of_float, module, name));
        ANSWERS(lowered(program, "scale<long long>", &name));
        ANSWERS(cuModuleGetFunction(&of_long, module, name));
        ANSWERS(cuModuleGetFunction(&call, module, "call"));
        ANSWERS(destroy(&program));

        CUdeviceptr p;
        std::vector<float> floats(n);
        std::vector<long long> longs(n);
        for (int i = 0; i < n; i++) floats[i] = (float)(longs[i] = i);
        ANSWERS(cuMemAlloc(&p, n * 8));
        ANSWERS(cuMemcpyHtoD(p, floats.data(), n * 4));
        float half = 0.5f;
        long long many = 1ll << 33;
        int count = n;
        void *first[] = {&p, &half, &count}, *second[] = {&p, &many, &count};
        ANSWERS(cuLaunchKernel(of_float, (n + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, first, nullptr));
        ANSWERS(cuMemcpyDtoH(floats.data(), p, n * 4));
        ANSWERS(cuMemcpyHtoD(p, longs.data(), n * 8));
        ANSWERS(cuLaunchKernel(of_long, (n + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, second, nullptr));
        ANSWERS(cuMemcpyDtoH(longs.data(), p, n * 8));
        for (int i = 0; i < n; i++) REQUIRE(floats[i] == i * 0.5f + 2 && longs[i] == i * many + 2, "%s: element %d is %f and %lld", kind, i, floats[i], longs[i]);
        ANSWERS(cuLaunchKernel(call, 3, 1, 1, 7, 1, 1, 0, nullptr, nullptr, nullptr));
        CUdeviceptr calls;
        int got = 0;
        ANSWERS(cuModuleGetGlobal(&calls, nullptr, module, "calls"));
        ANSWERS(cuMemcpyDtoH(&got, calls, 4));
        REQUIRE(got == 21, "%d calls", got);
        ANSWERS(cuModuleUnload(module));
        ANSWERS(cuMemFree(p));
    }
    Program program;
    ANSWERS(create(&program, "__global__ void f() { no_such_thing(); }", "wrong.cu", 0, nullptr, nullptr));
    int answer = compile(program, 0, nullptr);
    REQUIRE(answer == 6, "wrong source compiles: %d", answer);
    size_t size = 0;
    ANSWERS(size_of_log(program, &size));
    std::string log(size, 0);
    ANSWERS(log_of(program, &log[0]));
    REQUIRE(log.find("no_such_thing") != std::string::npos, "the log: %s", log.c_str());
    ANSWERS(destroy(&program));
    return pass("PTX and machine code, templates, a log");
}
