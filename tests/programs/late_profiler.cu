// CUPTI is opened after the program has called CUDA for a while, as a plugin or a Python module opens it: it sees the calls from then on.
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <unistd.h>
#include <vector>

#include <cupti.h>

#define PROGRAM "late_profiler"
#include "common.h"

static decltype(&cuptiActivityGetNextRecord) next_record;
static std::vector<uint32_t> fills;

static void requested(uint8_t **buffer, size_t *size, size_t *most)
{
    *size = 32 << 10, *most = 0;
    *buffer = (uint8_t *)aligned_alloc(8, *size);
}

static void completed(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t valid)
{
    CUpti_Activity *record = nullptr;
    while (next_record(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind != CUPTI_ACTIVITY_KIND_RUNTIME) continue;
        uint32_t id = ((CUpti_ActivityAPI *)record)->cbid;
        if (id == CUPTI_RUNTIME_TRACE_CBID_cudaMemset_v3020) fills.push_back(id);
    }
    free(buffer);
}

int main(int, char **arguments)
{
    // rgpuctl run has it loaded at the start.
    if (getenv("LD_PRELOAD")) {
        unsetenv("LD_PRELOAD");
        execv("/proc/self/exe", arguments);
    }
    REQUIRE(!dlopen("libcupti.so.13", RTLD_NOW | RTLD_NOLOAD), "CUPTI is loaded");
    void *memory;
    CHECK(cudaMalloc(&memory, 4096));
    CHECK(cudaMemset(memory, 1, 4096));

    void *library = dlopen("libcupti.so.13", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library, "%s", dlerror());
#define OK(name, ...) REQUIRE(((decltype(&name))dlsym(library, #name))(__VA_ARGS__) == CUPTI_SUCCESS, #name " has failed")
    next_record = (decltype(next_record))dlsym(library, "cuptiActivityGetNextRecord");
    OK(cuptiActivityRegisterCallbacks, requested, completed);
    OK(cuptiActivityEnable, CUPTI_ACTIVITY_KIND_RUNTIME);
    CHECK(cudaMemset(memory, 2, 4096));
    CHECK(cudaDeviceSynchronize());
    OK(cuptiActivityFlushAll, 1);
    OK(cuptiActivityDisable, CUPTI_ACTIVITY_KIND_RUNTIME);
    CHECK(cudaMemset(memory, 3, 4096));
    OK(cuptiActivityFlushAll, 1);
    REQUIRE(fills.size() == 1, "%zu fills", fills.size());
    CHECK(cudaFree(memory));
    return pass("a call seen");
}
