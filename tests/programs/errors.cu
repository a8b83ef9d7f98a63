// Every error that a user meets, with exactly the code that CUDA gives on a GPU in the same machine. All cases run,
// each mismatch gets a line, and the verdict comes last. Errors that end a context have a process each.
#define PROGRAM "errors"
#include "cases.h"

#include <sys/wait.h>
#include <unistd.h>
#include <vector>

__global__ void nothing() {}
__global__ void store(int *target, int value) { *target = value; }
__global__ void trap() { __trap(); }
__global__ void __launch_bounds__(64) bounded(int *target) {
    if (target) *target = threadIdx.x;
}
__global__ void static_shared(int *target) {
    __shared__ int words[40 * 256];  // 40 KiB
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (target) *target = words[0];
}
__device__ int variable[10];
static int not_a_symbol[10];
static void not_a_kernel() {}

// CUDA 13's runtime answers cudaErrorInvalidValue to every launch outside the device's limits, where CUDA 12's said
// cudaErrorInvalidConfiguration; and it takes an address that no kernel was registered for as a kernel handle, and
// so finds that handle invalid.
static void launches() {
    LAUNCH_LEAVES(cudaSuccess, nothing<<<1, 1024>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<1, 1025>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<1, 0>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<0, 1>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<1, dim3(32, 32, 2)>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<1, dim3(1, 1, 65)>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<dim3(1, 65536), 1>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<dim3(1, 1, 65536), 1>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<1, 1, 64 << 20>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, nothing<<<1, 1, 48 * 1024 + 1>>>());
    LAUNCH_LEAVES(cudaErrorInvalidValue, static_shared<<<1, 1, 16 * 1024>>>(nullptr));
    LAUNCH_LEAVES(cudaErrorInvalidValue, bounded<<<1, 65>>>(nullptr));
    void *arguments[] = {nullptr};
    RETURNS(cudaErrorInvalidResourceHandle, cudaLaunchKernel((const void *)not_a_kernel, dim3(1), dim3(1), arguments, 0, 0));
    RETURNS(cudaErrorInvalidValue, cudaLaunchKernel((const void *)nothing, dim3(1), dim3(1025), arguments, 0, 0));
    RETURNS(cudaErrorInvalidValue, cudaLaunchKernel((const void *)nothing, dim3(0), dim3(1), arguments, 0, 0));
    RETURNS(cudaErrorInvalidDeviceFunction, cudaLaunchKernel((const void *)nullptr, dim3(1), dim3(1), arguments, 0, 0));
    cudaFuncAttributes attributes;
    RETURNS(cudaSuccess, cudaFuncGetAttributes(&attributes, bounded));
    TRUE_THAT(attributes.maxThreadsPerBlock == 64);
    RETURNS(cudaSuccess, cudaFuncGetAttributes(&attributes, static_shared));
    TRUE_THAT(attributes.sharedSizeBytes == 40 * 1024);
    RETURNS(cudaErrorInvalidResourceHandle, cudaFuncGetAttributes(&attributes, (const void *)not_a_kernel));
    RETURNS(cudaErrorInvalidValue, cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 20));
    // None of this has harmed the context.
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
}

static void memory() {
    void *p = (void *)1;
    RETURNS(cudaErrorInvalidValue, cudaMalloc((void **)nullptr, 4));
    RETURNS(cudaErrorMemoryAllocation, cudaMalloc(&p, (size_t)1 << 60));
    RETURNS(cudaErrorMemoryAllocation, cudaMalloc(&p, ~(size_t)0));
    size_t free_bytes, total;
    RETURNS(cudaSuccess, cudaMemGetInfo(&free_bytes, &total));
    RETURNS(cudaErrorMemoryAllocation, cudaMalloc(&p, total + 1));
    RETURNS(cudaSuccess, cudaMalloc(&p, 0));
    TRUE_THAT(p == nullptr);
    RETURNS(cudaSuccess, cudaFree(nullptr));
    RETURNS(cudaSuccess, cudaFreeHost(nullptr));

    char host[64] = {0}, *device;
    RETURNS(cudaSuccess, cudaMalloc(&device, 4096));
    RETURNS(cudaErrorInvalidValue, cudaFree(host));
    RETURNS(cudaErrorInvalidValue, cudaFree(device + 16));
    RETURNS(cudaErrorInvalidValue, cudaFreeHost(host));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy((void *)0x10000, host, 64, cudaMemcpyHostToDevice));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy(host, (void *)0x10000, 64, cudaMemcpyDeviceToHost));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy(device, (void *)0x10000, 64, cudaMemcpyDeviceToDevice));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy(nullptr, host, 64, cudaMemcpyHostToDevice));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy(device, nullptr, 64, cudaMemcpyHostToDevice));
    RETURNS(cudaErrorInvalidMemcpyDirection, cudaMemcpy(device, host, 64, (cudaMemcpyKind)77));
    RETURNS(cudaErrorInvalidValue, cudaMemset(host, 0, 64));
    RETURNS(cudaErrorInvalidValue, cudaMemset(nullptr, 0, 64));
    RETURNS(cudaErrorInvalidPitchValue, cudaMemcpy2D(device, 8, host, 16, 16, 2, cudaMemcpyHostToDevice));
    RETURNS(cudaErrorInvalidPitchValue, cudaMemcpy2D(device, 16, host, 8, 16, 2, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaMemcpy(device, host, 0, cudaMemcpyHostToDevice));

    // Past the end of an allocation that nothing follows within its mapping.
    char *big;
    const size_t two_mib = 2 << 20;
    std::vector<char> pattern(two_mib + 4096, 1);
    RETURNS(cudaSuccess, cudaMalloc(&big, two_mib));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy(big, pattern.data(), two_mib + 4096, cudaMemcpyHostToDevice));
    RETURNS(cudaErrorInvalidValue, cudaMemset(big, 1, two_mib + 4096));
    RETURNS(cudaSuccess, cudaFree(big));

    // Use after free, and double free.
    RETURNS(cudaSuccess, cudaMalloc(&big, two_mib));
    RETURNS(cudaSuccess, cudaFree(big));
    RETURNS(cudaErrorInvalidValue, cudaFree(big));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy(big, host, 64, cudaMemcpyHostToDevice));
    RETURNS(cudaErrorInvalidValue, cudaMemset(big, 0, 64));
    RETURNS(cudaSuccess, cudaFree(device));

    // Pinned memory.
    char *pinned;
    std::vector<char> pageable(8192);
    RETURNS(cudaSuccess, cudaMallocHost(&pinned, 100));
    RETURNS(cudaErrorInvalidValue, cudaFree(pinned));
    RETURNS(cudaSuccess, cudaFreeHost(pinned));
    RETURNS(cudaErrorInvalidValue, cudaFreeHost(pinned));
    RETURNS(cudaErrorInvalidValue, cudaHostRegister(nullptr, 4096, cudaHostRegisterDefault));
    RETURNS(cudaErrorInvalidValue, cudaHostRegister(pageable.data(), 0, cudaHostRegisterDefault));
    RETURNS(cudaErrorInvalidValue, cudaHostRegister(pageable.data(), 4096, 0x4000));
    RETURNS(cudaSuccess, cudaHostRegister(pageable.data(), 4096, cudaHostRegisterDefault));
    RETURNS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(pageable.data(), 4096, cudaHostRegisterDefault));
    RETURNS(cudaSuccess, cudaHostUnregister(pageable.data()));
    RETURNS(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(pageable.data()));

    // What a pointer is.
    cudaPointerAttributes attributes;
    RETURNS(cudaSuccess, cudaPointerGetAttributes(&attributes, host));
    TRUE_THAT(attributes.type == cudaMemoryTypeUnregistered);
    RETURNS(cudaSuccess, cudaMalloc(&device, 100));
    RETURNS(cudaSuccess, cudaPointerGetAttributes(&attributes, device + 50));
    TRUE_THAT(attributes.type == cudaMemoryTypeDevice && attributes.device == 0 && attributes.devicePointer == device + 50);
    RETURNS(cudaSuccess, cudaFree(device));
}

static void symbols() {
    int value = 5;
    size_t size;
    void *address;
    RETURNS(cudaErrorInvalidSymbol, cudaMemcpyToSymbol(not_a_symbol, &value, sizeof value));
    RETURNS(cudaErrorInvalidSymbol, cudaMemcpyFromSymbol(&value, not_a_symbol, sizeof value));
    RETURNS(cudaErrorInvalidSymbol, cudaGetSymbolAddress(&address, not_a_symbol));
    RETURNS(cudaErrorInvalidSymbol, cudaGetSymbolSize(&size, not_a_symbol));
    RETURNS(cudaErrorInvalidValue, cudaMemcpyToSymbol(variable, &value, sizeof value, sizeof variable));
    RETURNS(cudaErrorInvalidValue, cudaMemcpyFromSymbol(&value, variable, sizeof variable + 4));
    RETURNS(cudaErrorInvalidMemcpyDirection, cudaMemcpyToSymbol(variable, &value, sizeof value, 0, cudaMemcpyDeviceToHost));
}

static void devices() {
    cudaDeviceProp properties;
    int value, count;
    RETURNS(cudaSuccess, cudaGetDeviceCount(&count));
    RETURNS(cudaErrorInvalidDevice, cudaSetDevice(count));
    RETURNS(cudaErrorInvalidDevice, cudaSetDevice(-1));
    RETURNS(cudaErrorInvalidDevice, cudaGetDeviceProperties(&properties, count));
    RETURNS(cudaErrorInvalidDevice, cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, count));
    RETURNS(cudaErrorInvalidValue, cudaDeviceGetAttribute(&value, (cudaDeviceAttr)100000, 0));
    RETURNS(cudaErrorInvalidValue, cudaDeviceGetAttribute(nullptr, cudaDevAttrWarpSize, 0));
    RETURNS(cudaErrorInvalidValue, cudaGetDevice(nullptr));
    RETURNS(cudaErrorInvalidValue, cudaGetDeviceCount(nullptr));
    int device = -1;
    RETURNS(cudaSuccess, cudaGetDevice(&device));
    TRUE_THAT(device == 0);
}

static void handles() {
    cudaStream_t stream;
    cudaEvent_t event, other;
    RETURNS(cudaErrorInvalidResourceHandle, cudaStreamDestroy(nullptr));
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventDestroy(nullptr));
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventRecord(nullptr, 0));
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventQuery(nullptr));
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventSynchronize(nullptr));
    RETURNS(cudaErrorInvalidResourceHandle, cudaStreamWaitEvent(0, nullptr, 0));
    RETURNS(cudaErrorInvalidValue, cudaStreamCreate(nullptr));
    RETURNS(cudaErrorInvalidValue, cudaStreamCreateWithFlags(&stream, 0x80));
    RETURNS(cudaErrorInvalidValue, cudaEventCreateWithFlags(&event, 0x80));
    RETURNS(cudaErrorInvalidValue, cudaEventCreate(nullptr));
    RETURNS(cudaSuccess, cudaEventCreate(&event));
    RETURNS(cudaSuccess, cudaEventCreateWithFlags(&other, cudaEventDisableTiming));
    float milliseconds;
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, event, event));
    RETURNS(cudaSuccess, cudaEventRecord(event, 0));
    RETURNS(cudaSuccess, cudaEventRecord(other, 0));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    RETURNS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, event, other));
    RETURNS(cudaErrorInvalidValue, cudaEventElapsedTime(nullptr, event, event));
    RETURNS(cudaSuccess, cudaEventDestroy(event));
    RETURNS(cudaSuccess, cudaEventDestroy(other));
    RETURNS(cudaSuccess, cudaStreamQuery(0));
}

static void last_error() {
    cudaGetLastError();
    nothing<<<1, 1025>>>();
    expect_("cudaPeekAtLastError after a bad launch", cudaErrorInvalidValue, cudaPeekAtLastError());
    void *p;
    expect_("a good call after a bad launch", cudaSuccess, cudaMalloc(&p, 16));
    expect_("the last error after a good call", cudaErrorInvalidValue, cudaGetLastError());
    expect_("the last error once taken", cudaSuccess, cudaGetLastError());
    expect_("freeing", cudaSuccess, cudaFree(p));
    TRUE_THAT(strcmp(cudaGetErrorName(cudaErrorInvalidConfiguration), "cudaErrorInvalidConfiguration") == 0);
    TRUE_THAT(strcmp(cudaGetErrorString(cudaErrorInvalidConfiguration), "invalid configuration argument") == 0);
    TRUE_THAT(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);
    TRUE_THAT(strcmp(cudaGetErrorString(cudaSuccess), "no error") == 0);
    TRUE_THAT(strcmp(cudaGetErrorName((cudaError_t)12345), "unrecognized error code") == 0);
    TRUE_THAT(strcmp(cudaGetErrorString((cudaError_t)12345), "unrecognized error code") == 0);
}

// The parts that end a context: each is a child of its own.
static void sticky(const std::string &what) {
    char *device;
    void *other;
    expect_("cudaMalloc", cudaSuccess, cudaMalloc(&device, 4096));
    cudaError_t want = cudaErrorIllegalAddress;
    if (what == "illegal") {
        store<<<1, 1>>>((int *)0x10, 1);
    } else if (what == "misaligned") {
        store<<<1, 1>>>((int *)(device + 2), 1);
        want = cudaErrorMisalignedAddress;
    } else {
        trap<<<1, 1>>>();
        want = cudaErrorLaunchFailure;
    }
    expect_("the launch itself", cudaSuccess, cudaGetLastError());
    expect_("cudaDeviceSynchronize after the kernel", want, cudaDeviceSynchronize());
    expect_("cudaDeviceSynchronize again", want, cudaDeviceSynchronize());
    expect_("cudaMalloc afterwards", want, cudaMalloc(&other, 16));
    int word;
    expect_("cudaMemcpy afterwards", want, cudaMemcpy(&word, device, 4, cudaMemcpyDeviceToHost));
    nothing<<<1, 1>>>();
    expect_("a launch afterwards", want, cudaGetLastError());
    expect_("the last error once taken", cudaSuccess, cudaGetLastError());
    expect_("a call after it was taken", want, cudaMalloc(&other, 16));
    expect_("cudaPeekAtLastError after that call", want, cudaPeekAtLastError());
    cudaStream_t stream;
    expect_("cudaStreamCreate afterwards", want, cudaStreamCreate(&stream));
    expect_("cudaFree afterwards", want, cudaFree(device));
    int count;
    expect_("cudaGetDeviceCount afterwards", cudaSuccess, cudaGetDeviceCount(&count));
}

// A process that forked after CUDA began gets an error in the child, and keeps its own context whole.
static void fork_after_init() {
    int *device;
    expect_("cudaMalloc before the fork", cudaSuccess, cudaMalloc(&device, 16));
    expect_("cudaMemset before the fork", cudaSuccess, cudaMemset(device, 0x01, 16));
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0, "fork failed");
    if (child == 0) {
        void *p;
        int word;
        expect_("cudaMalloc in the child", cudaErrorInitializationError, cudaMalloc(&p, 16));
        expect_("cudaMemcpy in the child", cudaErrorInitializationError, cudaMemcpy(&word, device, 4, cudaMemcpyDeviceToHost));
        expect_("cudaDeviceSynchronize in the child", cudaErrorInitializationError, cudaDeviceSynchronize());
        fflush(stdout);
        _exit(mismatches ? 1 : 0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child, "waitpid failed");
    TRUE_THAT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    int word = 0;
    expect_("cudaMemcpy in the parent", cudaSuccess, cudaMemcpy(&word, device, 4, cudaMemcpyDeviceToHost));
    TRUE_THAT(word == 0x01010101);
    expect_("cudaFree in the parent", cudaSuccess, cudaFree(device));
}

static void run_child(const char *self, const char *part) {
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0, "fork failed");
    if (child == 0) {
        execl("/proc/self/exe", self, part, (char *)nullptr);
        _exit(127);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child, "waitpid failed");
    cases++;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) not_met((std::string("the part failed: ") + part).c_str());
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    if (!options.word.empty()) {
        if (options.word == "fork") fork_after_init();
        else sticky(options.word);
        return mismatches ? 1 : 0;
    }
    // Before this process's own first CUDA call, so that its children are ordinary ones.
    for (const char *part : {"illegal", "misaligned", "trap", "fork"}) run_child(argv[0], part);
    launches();
    memory();
    symbols();
    devices();
    handles();
    last_error();
    return verdict();
}
