// The driver's linker: PTX from memory and from a file, its messages, its errors, and several inputs that call one another.
#define PROGRAM "link_ptx"
#include "common.h"

#include <cuda.h>
#include <string>
#include <unistd.h>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);                                    \
    } while (0)
#define WANT(want, call)                                                                                                 \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == (want), "line %d: %s: expected %d, got %d", __LINE__, #call, (int)(want), (int)got_);            \
    } while (0)

#define HEAD ".version 7.0\n.target sm_75\n.address_size 64\n"

// Writes n * 3 + the variable's value, and counts its calls.
static const char whole[] = HEAD R"(
.visible .global .align 4 .u32 addend = 5;
.visible .entry triple(.param .u64 p_out, .param .u32 p_n)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p_out];
    ld.param.u32 %r1, [p_n];
    cvta.to.global.u64 %rd1, %rd1;
    ld.global.u32 %r2, [addend];
    mad.lo.u32 %r3, %r1, 3, %r2;
    st.global.u32 [%rd1], %r3;
    ret;
}
)";

static const char caller[] = HEAD R"(
.extern .func (.param .b32 result) square(.param .b32 p);
.visible .entry squares(.param .u64 p_out, .param .u32 p_n)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_out];
    ld.param.u32 %r1, [p_n];
    cvta.to.global.u64 %rd1, %rd1;
    {
        .param .b32 p0;
        .param .b32 back;
        st.param.b32 [p0], %r1;
        call (back), square, (p0);
        ld.param.b32 %r2, [back];
    }
    st.global.u32 [%rd1], %r2;
    ret;
}
)";

static const char callee[] = HEAD R"(
.visible .func (.param .b32 result) square(.param .b32 p)
{
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [p];
    mul.lo.u32 %r2, %r1, %r1;
    st.param.b32 [result], %r2;
    ret;
}
)";

static const char broken[] = HEAD ".visible .entry broken()\n{\n    not.an.instruction %r1;\n    ret;\n}\n";

static unsigned run(CUmodule module, const char *name, unsigned n) {
    CUfunction function;
    OK(cuModuleGetFunction(&function, module, name));
    CUdeviceptr out;
    OK(cuMemAlloc(&out, 4));
    void *arguments[] = {&out, &n};
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
    unsigned result;
    OK(cuMemcpyDtoH(&result, out, 4));
    OK(cuMemFree(out));
    return result;
}

// Reads 100 words, and then adds them up from the last to the first: all of them are at hand at once.
static std::string many() {
    std::string text = HEAD ".visible .entry many(.param .u64 p_out, .param .u32 p_n)\n{\n.reg .b32 %r<101>;\n.reg .b64 %rd;\nld.param.u64 %rd, [p_out];\n";
    for (int i = 0; i < 100; i++) text += "ld.volatile.global.u32 %r" + std::to_string(i) + ", [%rd];\n";
    text += "ld.param.u32 %r100, [p_n];\n";
    for (int i = 99; i >= 0; i--) text += "mad.lo.u32 %r100, %r100, 3, %r" + std::to_string(i) + ";\n";
    return text + "st.global.u32 [%rd], %r100;\nret;\n}\n";
}

static int registers(CUmodule module) {
    CUfunction function;
    OK(cuModuleGetFunction(&function, module, "many"));
    int count = 0;
    OK(cuFuncGetAttribute(&count, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
    OK(cuModuleUnload(module));
    return count;
}

struct Linker {
    char messages[4096] = "", errors[4096] = "";
    CUlinkState state = nullptr;
    CUjit_option options[5] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
                               CU_JIT_LOG_VERBOSE};
    void *values[5] = {messages, (void *)sizeof messages, errors, (void *)sizeof errors, (void *)1};
    Linker() { OK(cuLinkCreate(5, options, values, &state)); }
    ~Linker() { OK(cuLinkDestroy(state)); }
    CUresult add(const char *ptx, size_t size, const char *name) {
        return cuLinkAddData(state, CU_JIT_INPUT_PTX, (void *)ptx, size, name, 0, nullptr, nullptr);
    }
    // The image is loaded before the linker goes, which owns it.
    CUmodule load() {
        void *image = nullptr;
        size_t size = 0;
        OK(cuLinkComplete(state, &image, &size));
        REQUIRE(image != nullptr && size > 0, "the image has %zu bytes", size);
        CUmodule module;
        OK(cuModuleLoadData(&module, image));
        return module;
    }
};

int main(int argc, char **argv) {
    parse_options(argc, argv);
    OK(cuInit(0));
    CUdevice device;
    CUcontext context;
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));

    {
        Linker linker;
        OK(linker.add(whole, sizeof whole, "whole.ptx"));
        CUmodule module = linker.load();
        REQUIRE(run(module, "triple", 7) == 26, "from memory: %u", run(module, "triple", 7));
        CUdeviceptr addend;
        size_t size;
        OK(cuModuleGetGlobal(&addend, &size, module, "addend"));
        REQUIRE(size == 4, "a variable of %zu bytes", size);
        OK(cuMemsetD32(addend, 100, 1));
        REQUIRE(run(module, "triple", 7) == 121, "with another addend: %u", run(module, "triple", 7));
        OK(cuModuleUnload(module));
    }
    {
        char path[] = "/tmp/rgpu-link-XXXXXX";
        int file = mkstemp(path);
        REQUIRE(file >= 0, "no temporary file");
        REQUIRE(write(file, whole, sizeof whole - 1) == (ssize_t)sizeof whole - 1, "a short write");
        close(file);
        Linker linker;
        OK(cuLinkAddFile(linker.state, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr));
        unlink(path);
        CUmodule module = linker.load();
        REQUIRE(run(module, "triple", 1) == 8, "from a file: %u", run(module, "triple", 1));
        OK(cuModuleUnload(module));
    }
    {
        Linker linker;
        WANT(CUDA_ERROR_FILE_NOT_FOUND, cuLinkAddFile(linker.state, CU_JIT_INPUT_PTX, "/nowhere/at/all.ptx", 0, nullptr, nullptr));
    }
    {
        Linker linker;
        WANT(CUDA_ERROR_INVALID_PTX, linker.add(broken, sizeof broken, "broken.ptx"));
        REQUIRE(strstr(linker.errors, "ptxas") && strstr(linker.errors, "line 6"), "of a broken input is said \"%s\"", linker.errors);
    }
    {
        // The same of a module that is loaded at once; a log that has too little room is cut.
        char errors[1024] = "", few[8] = "";
        CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        void *values[] = {errors, (void *)sizeof errors};
        CUmodule module;
        WANT(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx(&module, broken, 2, options, values));
        REQUIRE(strstr(errors, "ptxas") && strstr(errors, "line 6"), "of a broken module is said \"%s\"", errors);
        void *less[] = {few, (void *)sizeof few};
        WANT(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx(&module, broken, 2, options, less));
        REQUIRE(few[sizeof few - 1] == 0 && strlen(few) > 0, "a short log is \"%.8s\"", few);
    }
    {
        Linker linker;
        OK(linker.add(callee, sizeof callee, "callee.ptx"));
        OK(linker.add(caller, sizeof caller, "caller.ptx"));
        CUmodule module = linker.load();
        REQUIRE(run(module, "squares", 12) == 144, "linked: %u", run(module, "squares", 12));
        OK(cuModuleUnload(module));
    }
    {
        // A call of what is nowhere.
        Linker linker;
        OK(linker.add(caller, sizeof caller, "caller.ptx"));
        void *image = nullptr;
        size_t size = 0;
        REQUIRE(cuLinkComplete(linker.state, &image, &size) != CUDA_SUCCESS, "a function that is missing was not missed");
        REQUIRE(linker.errors[0] != 0, "nothing is said of a missing function");
    }
    {
        // How many registers a kernel may have, as told to the linker and to a load.
        std::string text = many();
        CUjit_option option = CU_JIT_MAX_REGISTERS;
        void *most = (void *)40;
        CUlinkState state;
        OK(cuLinkCreate(1, &option, &most, &state));
        OK(cuLinkAddData(state, CU_JIT_INPUT_PTX, (void *)text.c_str(), text.size() + 1, "many.ptx", 0, nullptr, nullptr));
        void *image = nullptr;
        size_t size = 0;
        OK(cuLinkComplete(state, &image, &size));
        CUmodule module;
        OK(cuModuleLoadData(&module, image));
        OK(cuLinkDestroy(state));
        int linked = registers(module);
        OK(cuModuleLoadDataEx(&module, text.c_str(), 1, &option, &most));
        int loaded = registers(module);
        REQUIRE(linked > 0 && linked <= 40 && loaded > 0 && loaded <= 40, "registers linked with 40 at most: %d, loaded: %d", linked, loaded);
    }
    OK(cuDevicePrimaryCtxRelease(device));
    return pass("memory, a file, errors, several inputs");
}
