// What a framework does before its first step is done: it loads library after library, asks about each kernel that it may use, and launches some. The calls are those of PyTorch with cuBLASLt, as they were
// traced. Before that, it copies its model. `first_steps COUNT` loads COUNT libraries, all of them this program's own code.
#define PROGRAM "first_steps"
#include "common.h"

#include <cuda.h>
#include <fstream>
#include <iterator>
#include <vector>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult status_ = (call);                                                                                       \
        REQUIRE(status_ == CUDA_SUCCESS, "%s:%d: %s: %d", __FILE__, __LINE__, #call, (int)status_);                      \
    } while (0)

struct Scale {
    int by;
    char name[3];
};

extern "C" __global__ void add(float *p, int n, Scale scale, double more) {
    extern __shared__ float s[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x] = i < n ? p[i] : 0;
    __syncthreads();
    if (i < n) p[i] = s[threadIdx.x] + scale.by + more;
}

extern "C" __global__ void __launch_bounds__(128) bounded(int *p) { p[threadIdx.x] = 1; }

static const int N = 128;

// The fat binary with this file's code, from the program's own file.
static std::vector<char> image() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    for (size_t at = 0; at + 16 <= bytes.size(); at += 8) {
        const unsigned char magic[8] = {0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0};
        unsigned long long size;
        memcpy(&size, &bytes[at + 8], 8);
        if (memcmp(&bytes[at], magic, 8) != 0 || size < 64 || size > bytes.size() - at - 16) continue;
        std::vector<char> found(bytes.begin() + at, bytes.begin() + at + 16 + size);
        CUlibrary library;
        CUkernel kernel;
        if (cuLibraryLoadData(&library, found.data(), nullptr, nullptr, 0, nullptr, nullptr, 0) != CUDA_SUCCESS) continue;
        bool mine = cuLibraryGetKernel(&kernel, library, "add") == CUDA_SUCCESS;
        OK(cuLibraryUnload(library));
        if (mine) return found;
    }
    REQUIRE(false, "the program's code is not in its file");
    return {};
}

static CUlibrary first_step(const std::vector<char> &code, CUdevice device, CUstream stream, CUdeviceptr data) {
    CUlibrary library;
    OK(cuLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    unsigned count = 0;
    OK(cuLibraryGetKernelCount(&count, library));
    REQUIRE(count == 2, "%u kernels", count);
    CUkernel kernel, bounds;
    CUfunction function, bounded;
    OK(cuLibraryGetKernel(&kernel, library, "add"));
    OK(cuLibraryGetKernel(&bounds, library, "bounded"));
    REQUIRE(cuLibraryGetKernel(&bounds, library, "missing") == CUDA_ERROR_NOT_FOUND, "a kernel that is not there");
    OK(cuKernelGetFunction(&function, kernel));
    OK(cuKernelGetFunction(&bounded, bounds));
    int value = 0;
    for (int attribute = 0; attribute <= CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE; attribute++)
        OK(cuKernelGetAttribute(&value, (CUfunction_attribute)attribute, kernel, device));
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, bounded));
    REQUIRE(value == 128, "%d threads", value);
    OK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100 << 10, kernel, device));
    OK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100, kernel, device));
    OK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, device));
    OK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, CU_CLUSTER_SCHEDULING_POLICY_SPREAD, kernel, device));
    for (int threads = 32; threads <= 1024; threads += 32) {
        int blocks = 0;
        OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, 1024));
        REQUIRE(blocks == (threads <= 64 ? 32 : 64 / (threads / 32)), "%d blocks of %d threads", blocks, threads);
    }
    size_t left = 0;
    OK(cuOccupancyAvailableDynamicSMemPerBlock(&left, function, 2, 128));
    REQUIRE(left == 100 << 10, "%zu bytes", left);
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    CUlaunchConfig config = {};
    config.gridDimX = 64;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    for (unsigned size = 1; size <= 16; size *= 2)
        for (unsigned shared = 0; shared <= 96 << 10; shared += 32 << 10) {
            attribute.value.clusterDim.x = size;
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
            config.blockDimX = 128;
            config.sharedMemBytes = shared;
            int clusters = -1;
            OK(cuOccupancyMaxActiveClusters(&clusters, function, &config));
            REQUIRE(clusters >= 0, "%d clusters of %u blocks", clusters, size);
            // The other kernel may not have so many blocks in a cluster.
            CUresult status = cuOccupancyMaxActiveClusters(&clusters, bounded, &config);
            REQUIRE(status == (size <= 8 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CLUSTER_SIZE), "clusters of %u blocks: %d", size, (int)status);
        }
    int n = N;
    Scale scale = {1, "ab"};
    double more = 0.5;
    void *arguments[] = {&data, &n, &scale, &more};
    OK(cuLaunchKernel((CUfunction)kernel, 4, 1, 1, 32, 1, 1, 128, stream, arguments, nullptr));
    REQUIRE(cuLaunchKernel(bounded, 1, 1, 1, 129, 1, 1, 0, stream, arguments, nullptr) == CUDA_ERROR_INVALID_VALUE, "more threads than bounds");
    return library;
}

// The tensors of a model, one after the other, as PyTorch copies them: asynchronously from pageable memory, and then it waits for the stream.
static void model() {
    const int TENSORS = 100, MOST = 300 << 10;
    CUdeviceptr weights;
    CHECK(cudaMalloc((void **)&weights, MOST));
    std::vector<unsigned char> tensor(MOST), last(MOST);
    for (int i = 0; i < TENSORS; i++) {
        size_t size = i % 3 == 0 ? 64 : i % 3 == 1 ? 20000 : MOST;
        memset(tensor.data(), i, size);
        CHECK(cudaMemcpyAsync((void *)weights, tensor.data(), size, cudaMemcpyHostToDevice, 0));
        CHECK(cudaStreamSynchronize(0));
    }
    OK(cuMemcpyDtoH(last.data(), weights, MOST));
    for (int i = 0; i < MOST; i++) {
        int wrote = i < 64 ? TENSORS - 1 : TENSORS - 2;
        REQUIRE(last[i] == wrote, "byte %d is %d, not %d", i, last[i], wrote);
    }
}

// A kernel of PTX, which only the driver knows, and how large its clusters may be: as cuDNN asks, from the largest down.
static void largest_clusters() {
    const char *ptx = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n";
    CUmodule module;
    CUfunction function;
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&function, module, "nothing"));
    const int SHARED = 64 << 10;
    OK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED));
    OK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {1, 1, 1};
    CUlaunchConfig config = {};
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = 128;
    config.sharedMemBytes = SHARED;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int before = 0;
    for (int size = 16; size > 0; size--) {
        config.gridDimX = attribute.value.clusterDim.x = size;
        int clusters = -1;
        OK(cuOccupancyMaxActiveClusters(&clusters, function, &config));
        REQUIRE(clusters >= before, "%d clusters of %d blocks, and %d of %d", clusters, size, before, size + 1);
        before = clusters;
    }
    OK(cuModuleUnload(module));
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 3;
    CUdeviceptr data;
    CHECK(cudaMalloc((void **)&data, 4 * N));
    CHECK(cudaMemset((void *)data, 0, 4 * N));
    CHECK(cudaDeviceSynchronize());
    model();
    CUdevice device;
    OK(cuCtxGetDevice(&device));
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    std::vector<char> code = image();
    std::vector<CUlibrary> libraries;
    for (int i = 0; i < count; i++) libraries.push_back(first_step(code, device, stream, data));
    OK(cuStreamSynchronize(stream));
    std::vector<float> result(N);
    OK(cuMemcpyDtoH(result.data(), data, 4 * N));
    for (float value : result) REQUIRE(value == 1.5f * count, "%f after %d launches", value, count);
    for (CUlibrary library : libraries) OK(cuLibraryUnload(library));
    largest_clusters();
    return pass("%d libraries", count);
}
