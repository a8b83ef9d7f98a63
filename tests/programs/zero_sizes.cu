// Operations on nothing: what takes a size of zero, and what does not.
#define PROGRAM "zero_sizes"
#include "cases.h"
#include <cuda.h>

int main(int argc, char **argv) {
    parse_options(argc, argv);
    char host[64] = {}, *device, *pinned = (char *)1, *other = (char *)1;
    size_t pitch = 77;
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaMalloc(&device, 256));
    RETURNS(cudaSuccess, cudaStreamCreate(&stream));
    RETURNS(cudaSuccess, cudaMemset(device, 1, 256));

    RETURNS(cudaSuccess, cudaMalloc(&other, 0));
    TRUE_THAT(other == nullptr);
    RETURNS(cudaSuccess, cudaMallocHost(&pinned, 0));
    TRUE_THAT(pinned == nullptr);
    RETURNS(cudaSuccess, cudaMallocManaged(&other, 0));
    TRUE_THAT(other == nullptr);
    RETURNS(cudaSuccess, cudaMallocPitch(&other, &pitch, 0, 0));
    RETURNS(cudaSuccess, cudaFree(nullptr));
    RETURNS(cudaSuccess, cudaFreeHost(nullptr));

    RETURNS(cudaSuccess, cudaMemcpy(device, host, 0, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDefault));
    RETURNS(cudaSuccess, cudaMemcpyAsync(device, host, 0, cudaMemcpyHostToDevice, stream));
    RETURNS(cudaSuccess, cudaMemcpyAsync(host, device, 0, cudaMemcpyDeviceToHost, stream));
    RETURNS(cudaSuccess, cudaMemcpy2D(device, 16, host, 16, 0, 4, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaMemcpy2D(device, 16, host, 16, 16, 0, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaMemset(device, 9, 0));
    RETURNS(cudaSuccess, cudaMemsetAsync(device, 9, 0, stream));
    RETURNS(cudaSuccess, cudaMemset2D(device, 16, 9, 0, 4));
    RETURNS(cudaSuccess, cudaMemset2D(device, 16, 9, 8, 0));
    cudaPitchedPtr box = make_cudaPitchedPtr(device, 16, 16, 4);
    RETURNS(cudaSuccess, cudaMemset3D(box, 9, make_cudaExtent(0, 4, 1)));
    RETURNS(cudaSuccess, cudaMemset3D(box, 9, make_cudaExtent(8, 4, 0)));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(host, 16, 16, 4);
    copy.dstPtr = box;
    copy.kind = cudaMemcpyHostToDevice;
    RETURNS(cudaSuccess, cudaMemcpy3D(&copy));
    IS(CUDA_SUCCESS, cuMemcpyHtoD((CUdeviceptr)device, host, 0));
    IS(CUDA_SUCCESS, cuMemsetD32((CUdeviceptr)device, 9, 0));
    IS(CUDA_SUCCESS, cuMemsetD2D16((CUdeviceptr)device, 32, 9, 0, 3));
    CUdeviceptr none = 5;
    IS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&none, 0));
    void *no_host = (void *)5;
    IS(CUDA_SUCCESS, cuMemHostAlloc(&no_host, 0, 0));
    printf("no bytes of pinned memory: %s", no_host == nullptr ? "NULL" : no_host == (void *)5 ? "untouched" : "somewhere");
    no_host = (void *)5;
    IS(CUDA_SUCCESS, cuMemAllocHost(&no_host, 0));
    printf(", %s\n", no_host == nullptr ? "NULL" : no_host == (void *)5 ? "untouched" : "somewhere");
    IS(CUDA_SUCCESS, cuMemFree(0));

    // Nothing was done.
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    char back[256];
    RETURNS(cudaSuccess, cudaMemcpy(back, device, 256, cudaMemcpyDeviceToHost));
    for (char byte : back) TRUE_THAT(byte == 1);
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    RETURNS(cudaSuccess, cudaFree(device));
    return verdict();
}
