// Functions of the runtime that the other programs do not call: questions, older forms, and copies of arrays and managed memory that go by functions of their own.
#define PROGRAM "runtime_forms"
#include "cases.h"

#include <dlfcn.h>
#include <vector>

// Deprecated, and exported all the same.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#pragma nv_diag_suppress 1444, 2361

__global__ void add(int *out, int value) { *out += value; }

static void questions() {
    size_t width = 0;
    cudaChannelFormatDesc floats = cudaCreateChannelDesc<float>(), told;
    RETURNS(cudaSuccess, cudaDeviceGetTexture1DLinearMaxWidth(&width, &floats, 0));
    TRUE_THAT(width >= 1 << 20);
    int value = -1;
    RETURNS(cudaErrorInvalidDevice, cudaDeviceGetP2PAttribute(&value, cudaDevP2PAttrAccessSupported, 0, 0));
    RETURNS(cudaSuccess, cudaFree(nullptr));
    RETURNS(cudaSuccess, cudaCtxResetPersistingL2Cache());
    RETURNS(cudaSuccess, cudaInitDevice(0, 0, 0));
    int blocks = 0;
    RETURNS(cudaSuccess, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 64, 0));
    TRUE_THAT(blocks > 0);
    cudaKernel_t kernel = nullptr;
    RETURNS(cudaSuccess, cudaGetKernel(&kernel, (const void *)add));
    RETURNS(cudaSuccess, cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 25, 0));
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    RETURNS(cudaSuccess, cudaGetDriverEntryPointByVersion("cuInit", &function, 12000, cudaEnableDefault, &found));
    TRUE_THAT(function != nullptr && found == cudaDriverEntryPointSuccess);
    cudaArray_t array;
    RETURNS(cudaSuccess, cudaMallocArray(&array, &floats, 16, 4, cudaArraySurfaceLoadStore));
    RETURNS(cudaSuccess, cudaGetChannelDesc(&told, array));
    TRUE_THAT(told.x == 32 && told.y == 0 && told.f == cudaChannelFormatKindFloat);
    cudaResourceDesc resource = {}, again = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaSurfaceObject_t surface;
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&surface, &resource));
    RETURNS(cudaSuccess, cudaGetSurfaceObjectResourceDesc(&again, surface));
    TRUE_THAT(again.resType == cudaResourceTypeArray && again.res.array.array == array);
    RETURNS(cudaSuccess, cudaDestroySurfaceObject(surface));
    RETURNS(cudaSuccess, cudaFreeArray(array));
    cudaMemPool_t pool;
    RETURNS(cudaSuccess, cudaDeviceGetDefaultMemPool(&pool, 0));
    cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, 0}, cudaMemAccessFlagsProtReadWrite};
    RETURNS(cudaSuccess, cudaMemPoolSetAccess(pool, &access, 1));
}

static void arrays() {
    std::vector<unsigned char> bytes(192), back(192);
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = (unsigned char)(i * 5 + 3);
    cudaChannelFormatDesc byte = cudaCreateChannelDesc<unsigned char>();
    cudaArray_t array, other;
    RETURNS(cudaSuccess, cudaMallocArray(&array, &byte, 64, 3));
    RETURNS(cudaSuccess, cudaMallocArray(&other, &byte, 64, 3));
    // A row after the other, from inside the first on.
    RETURNS(cudaSuccess, cudaMemcpyToArray(array, 0, 0, bytes.data(), 192, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaMemcpyFromArray(back.data(), array, 10, 0, 150, cudaMemcpyDeviceToHost));
    TRUE_THAT(!memcmp(back.data(), bytes.data() + 10, 150));
    RETURNS(cudaSuccess, cudaMemcpyArrayToArray(other, 0, 0, array, 0, 1, 128, cudaMemcpyDeviceToDevice));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaMemcpyFromArrayAsync(back.data(), other, 0, 0, 128, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    TRUE_THAT(!memcmp(back.data(), bytes.data() + 64, 128));
    RETURNS(cudaSuccess, cudaMemcpyToArrayAsync(other, 5, 2, bytes.data(), 40, cudaMemcpyHostToDevice, stream));
    RETURNS(cudaSuccess, cudaMemcpyFromArrayAsync(back.data(), other, 5, 2, 40, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    TRUE_THAT(!memcmp(back.data(), bytes.data(), 40));
    RETURNS(cudaSuccess, cudaFreeArray(array));
    RETURNS(cudaSuccess, cudaFreeArray(other));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
}

static void boxes() {
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaStreamCreate(&stream));
    cudaPitchedPtr box, second;
    cudaExtent extent = make_cudaExtent(20, 4, 3);
    RETURNS(cudaSuccess, cudaMalloc3D(&box, extent));
    RETURNS(cudaSuccess, cudaMalloc3D(&second, extent));
    RETURNS(cudaSuccess, cudaMemset3DAsync(box, 0x5a, extent, stream));
    cudaMemcpy3DPeerParms peer = {};
    peer.srcPtr = box;
    peer.dstPtr = second;
    peer.extent = extent;
    RETURNS(cudaSuccess, cudaMemcpy3DPeerAsync(&peer, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    unsigned char host[240] = {};
    cudaMemcpy3DParms home = {};
    home.srcPtr = second;
    home.dstPtr = make_cudaPitchedPtr(host, 20, 20, 4);
    home.extent = extent;
    home.kind = cudaMemcpyDeviceToHost;
    RETURNS(cudaSuccess, cudaMemcpy3D(&home));
    int wrong = 0;
    for (unsigned char byte : host) wrong += byte != 0x5a;
    IS(0, wrong);
    RETURNS(cudaSuccess, cudaMemcpyPeer(box.ptr, 0, (char *)second.ptr + 4, 0, 16));
    RETURNS(cudaSuccess, cudaMemcpy(host, box.ptr, 16, cudaMemcpyDeviceToHost));
    IS(0x5a, host[0]);
    RETURNS(cudaSuccess, cudaFree(box.ptr));
    RETURNS(cudaSuccess, cudaFree(second.ptr));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
}

static void managed() {
    char *memory;
    const size_t half = 1 << 19;
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURNS(cudaSuccess, cudaMallocManaged(&memory, 2 * half));
    memset(memory, 4, 2 * half);
    cudaMemLocation here = {cudaMemLocationTypeDevice, 0};
    void *parts[] = {memory, memory + half};
    size_t sizes[] = {half, half}, which[] = {0};
    RETURNS(cudaSuccess, cudaMemPrefetchBatchAsync(parts, sizes, 2, &here, which, 1, 0, stream));
    int preferred = -7;
    void *answers[] = {&preferred};
    size_t lengths[] = {4};
    cudaMemRangeAttribute asked[] = {cudaMemRangeAttributePreferredLocation};
    RETURNS(cudaSuccess, cudaMemRangeGetAttributes(answers, lengths, asked, 1, memory, 2 * half));
    IS(cudaInvalidDeviceId, preferred);
    RETURNS(cudaSuccess, cudaMemDiscardBatchAsync(parts, sizes, 1, 0, stream));
    RETURNS(cudaSuccess, cudaMemDiscardAndPrefetchBatchAsync(parts, sizes, 1, &here, which, 1, 0, stream));
    RETURNS(cudaSuccess, cudaMemsetAsync(memory, 6, half, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    TRUE_THAT(memory[100] == 6 && memory[half + 100] == 4);
    RETURNS(cudaSuccess, cudaFree(memory));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    questions();
    arrays();
    boxes();
    managed();
    return verdict();
}
