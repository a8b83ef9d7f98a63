// Contexts of the driver API: the primary one's state and flags, made ones and their stack, whose memory and streams belong to
// which, and what is left when one is destroyed.
#define PROGRAM "contexts"
#include "cases.h"
#include <cuda.h>

static CUcontext current() {
    CUcontext context = (CUcontext)1;
    IS(CUDA_SUCCESS, cuCtxGetCurrent(&context));
    return context;
}

static void primary(CUdevice device) {
    unsigned flags = 99;
    int active = 99;
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxGetState(device, &flags, &active));
    IS(0, active);
    IS(0, flags);
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxSetFlags(device, CU_CTX_SCHED_BLOCKING_SYNC));
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxGetState(device, &flags, &active));
    IS(0, active);
    IS(CU_CTX_SCHED_BLOCKING_SYNC, flags);
    IS(CUDA_ERROR_INVALID_VALUE, cuDevicePrimaryCtxSetFlags(device, 0x800000));
    CUcontext one = nullptr, two = nullptr;
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&one, device));
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&two, device));
    TRUE_THAT(one == two && one != nullptr);
    TRUE_THAT(current() == nullptr);
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxGetState(device, &flags, &active));
    IS(1, active);
    IS(CUDA_SUCCESS, cuCtxSetCurrent(one));
    IS(CUDA_SUCCESS, cuCtxGetFlags(&flags));
    printf("flags of the primary context: %u\n", flags);
    CUdeviceptr p;
    IS(CUDA_SUCCESS, cuMemAlloc(&p, 100));
    // It cannot be destroyed as made ones are.
    IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy(one));
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxRelease(device));
    IS(CUDA_SUCCESS, cuMemFree(p));
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxRelease(device));
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxGetState(device, &flags, &active));
    IS(0, active);
    IS(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(device));
    // It stays the thread's context, whose device is known.
    TRUE_THAT(current() == one);
    CUdevice found = 99;
    IS(CUDA_SUCCESS, cuCtxGetDevice(&found));
    IS(device, found);
    IS(CUDA_SUCCESS, cuCtxSetCurrent(nullptr));
}

static void made(CUdevice device) {
    CUcontext a = nullptr, b = nullptr, popped = nullptr;
    IS(CUDA_SUCCESS, cuCtxCreate(&a, nullptr, CU_CTX_SCHED_YIELD, device));
    TRUE_THAT(current() == a);
    IS(CUDA_SUCCESS, cuCtxCreate(&b, nullptr, 0, device));
    TRUE_THAT(current() == b && a != b);
    unsigned version = 0, flags = 99;
    unsigned long long id_a = 0, id_b = 0;
    IS(CUDA_SUCCESS, cuCtxGetApiVersion(a, &version));
    printf("version: %u\n", version);
    IS(CUDA_SUCCESS, cuCtxGetId(a, &id_a));
    IS(CUDA_SUCCESS, cuCtxGetId(b, &id_b));
    TRUE_THAT(id_a != id_b);
    CUdevice found = 99;
    IS(CUDA_SUCCESS, cuCtxGetDevice(&found));
    IS(device, found);

    CUdeviceptr in_b = 0;
    CUstream of_b = nullptr;
    IS(CUDA_SUCCESS, cuMemAlloc(&in_b, 64));
    IS(CUDA_SUCCESS, cuStreamCreate(&of_b, CU_STREAM_NON_BLOCKING));
    CUcontext owner = nullptr;
    IS(CUDA_SUCCESS, cuStreamGetCtx(of_b, &owner));
    TRUE_THAT(owner == b);
    IS(CUDA_SUCCESS, cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, in_b));
    TRUE_THAT(owner == b);

    // The stack: b above a.
    IS(CUDA_SUCCESS, cuCtxPopCurrent(&popped));
    TRUE_THAT(popped == b && current() == a);
    IS(CUDA_SUCCESS, cuCtxGetFlags(&flags));
    IS(CU_CTX_SCHED_YIELD, flags);
    // Its memory can be used from a: one address space. Its streams cannot take a's part.
    IS(CUDA_SUCCESS, cuMemsetD8(in_b, 3, 64));
    unsigned char bytes[64];
    IS(CUDA_SUCCESS, cuMemcpyDtoH(bytes, in_b, 64));
    IS(3, bytes[63]);
    IS(CUDA_SUCCESS, cuStreamSynchronize(of_b));
    IS(CUDA_SUCCESS, cuCtxPushCurrent(b));
    IS(CUDA_SUCCESS, cuCtxPushCurrent(b));
    TRUE_THAT(current() == b);
    IS(CUDA_SUCCESS, cuCtxPopCurrent(nullptr));
    TRUE_THAT(current() == b);
    IS(CUDA_SUCCESS, cuCtxSetCurrent(a));
    TRUE_THAT(current() == a);
    IS(CUDA_SUCCESS, cuCtxPopCurrent(&popped));
    TRUE_THAT(popped == a && current() == a);
    IS(CUDA_SUCCESS, cuCtxPopCurrent(&popped));
    TRUE_THAT(current() == nullptr);
    IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent(&popped));
    CUdeviceptr none;
    IS(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&none, 16));
    IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());

    // Destroyed: what belonged to it is gone with it.
    IS(CUDA_SUCCESS, cuCtxPushCurrent(a));
    IS(CUDA_SUCCESS, cuCtxDestroy(b));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(bytes, in_b, 64));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemFree(in_b));
    CUcontext c = nullptr;
    IS(CUDA_SUCCESS, cuCtxCreate(&c, nullptr, 0, device));
    IS(CUDA_SUCCESS, cuCtxDestroy(c));
    // Destroying the current one takes it off the stack.
    TRUE_THAT(current() == a);
    IS(CUDA_SUCCESS, cuCtxDestroy(a));
    TRUE_THAT(current() == nullptr);
    IS(CUDA_ERROR_INVALID_VALUE, cuCtxCreate(nullptr, nullptr, 0, device));
    IS(CUDA_ERROR_INVALID_VALUE, cuCtxCreate(&a, nullptr, 0x8000000, device));
    IS(CUDA_ERROR_INVALID_DEVICE, cuCtxCreate(&a, nullptr, 0, 99));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    IS(CUDA_ERROR_NOT_INITIALIZED, cuCtxSynchronize());
    IS(CUDA_SUCCESS, cuInit(0));
    IS(CUDA_ERROR_INVALID_VALUE, cuInit(1));
    IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
    CUdevice device = 99;
    IS(CUDA_SUCCESS, cuDeviceGet(&device, 0));
    IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, 1000));
    primary(device);
    made(device);
    // The runtime takes the context that is there, and else the primary.
    CUcontext own = nullptr, seen = nullptr;
    IS(CUDA_SUCCESS, cuCtxCreate(&own, nullptr, 0, device));
    void *p = nullptr;
    RETURNS(cudaSuccess, cudaMalloc(&p, 100));
    IS(CUDA_SUCCESS, cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)p));
    TRUE_THAT(seen == own);
    RETURNS(cudaSuccess, cudaSetDevice(0));
    TRUE_THAT(current() != own && current() != nullptr);
    IS(CUDA_SUCCESS, cuCtxDestroy(own));
    RETURNS(cudaErrorInvalidValue, cudaFree(p));
    RETURNS(cudaSuccess, cudaMalloc(&p, 100));
    RETURNS(cudaSuccess, cudaDeviceReset());
    RETURNS(cudaErrorInvalidValue, cudaFree(p));
    return verdict();
}
