// A pool of managed memory: allocated and freed in a stream's order, used by the host and by kernels at one address.
#define PROGRAM "managed_pool"
#include "cases.h"

__global__ void add(int *data, int n, int what) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += what;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 100000;
    const size_t bytes = n * sizeof(int);
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypeManaged;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool, anywhere, none;
    RETURNS(cudaSuccess, cudaMemPoolCreate(&pool, &properties));
    properties.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    RETURNS(cudaErrorInvalidValue, cudaMemPoolCreate(&none, &properties));
    properties.handleTypes = cudaMemHandleTypeNone;
    properties.location.type = cudaMemLocationTypeNone;
    RETURNS(cudaSuccess, cudaMemPoolCreate(&anywhere, &properties));
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaStreamCreate(&stream));
    for (cudaMemPool_t from : {pool, anywhere})
        // Where memory of a pool without a place is given out again, NVIDIA's driver 580 has kernels read what was there before, whatever the host wrote: once, then.
        for (int round = 0; round < (from == pool ? 3 : 1); round++) {
            int *data, *other;
            RETURNS(cudaSuccess, cudaMallocFromPoolAsync((void **)&data, bytes, from, stream));
            RETURNS(cudaSuccess, cudaMallocFromPoolAsync((void **)&other, bytes, from, stream));
            RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
            unsigned long long used = 0;
            RETURNS(cudaSuccess, cudaMemPoolGetAttribute(from, cudaMemPoolAttrUsedMemCurrent, &used));
            IS(2 * bytes, used);
            cudaPointerAttributes known;
            RETURNS(cudaSuccess, cudaPointerGetAttributes(&known, data));
            TRUE_THAT(known.type == cudaMemoryTypeManaged && known.device == 0 && known.hostPointer == data && known.devicePointer == data);
            int preferred = -7;
            RETURNS(cudaSuccess, cudaMemRangeGetAttribute(&preferred, sizeof preferred, cudaMemRangeAttributePreferredLocation, data, bytes));
            IS(from == pool ? 0 : cudaInvalidDeviceId, preferred);
            for (int i = 0; i < n; i++) data[i] = i;
            add<<<(n + 255) / 256, 256, 0, stream>>>(data, n, round + 1);
            RETURNS(cudaSuccess, cudaMemcpyAsync(other, data, bytes, cudaMemcpyDefault, stream));
            add<<<(n + 255) / 256, 256, 0, stream>>>(other, n, 5);
            RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
            int wrong = 0;
            for (int i = 0; i < n; i++) wrong += data[i] != i + round + 1 || other[i] != i + round + 6;
            IS(0, wrong);
            // In the stream's order, and at once.
            RETURNS(cudaSuccess, cudaFreeAsync(data, stream));
            RETURNS(cudaErrorInvalidValue, cudaFreeAsync(data, stream));
            RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
            RETURNS(cudaSuccess, cudaMemPoolGetAttribute(from, cudaMemPoolAttrUsedMemCurrent, &used));
            IS(bytes, used);
            // That driver goes on counting what cudaFree took back.
            RETURNS(cudaSuccess, round == 2 ? cudaFree(other) : cudaFreeAsync(other, stream));
            RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
            RETURNS(cudaSuccess, cudaMemPoolGetAttribute(from, cudaMemPoolAttrUsedMemCurrent, &used));
            if (round < 2) IS(0, used);
        }
    // Each place has a default pool, and one that was chosen.
    cudaMemLocation here = properties.location, nowhere = {};
    here.type = cudaMemLocationTypeDevice;
    cudaMemPool_t standard, current, other;
    RETURNS(cudaSuccess, cudaMemGetDefaultMemPool(&standard, &here, cudaMemAllocationTypeManaged));
    RETURNS(cudaSuccess, cudaMemGetMemPool(&current, &here, cudaMemAllocationTypeManaged));
    TRUE_THAT(standard == current);
    RETURNS(cudaSuccess, cudaMemGetDefaultMemPool(&other, &nowhere, cudaMemAllocationTypeManaged));
    TRUE_THAT(standard != other);
    RETURNS(cudaErrorInvalidValue, cudaMemPoolDestroy(standard));
    RETURNS(cudaSuccess, cudaDeviceSetMemPool(0, pool));
    RETURNS(cudaSuccess, cudaMemGetMemPool(&current, &here, cudaMemAllocationTypeManaged));
    TRUE_THAT(current == pool);
    // That of the device's own memory is another.
    RETURNS(cudaSuccess, cudaDeviceGetMemPool(&current, 0));
    RETURNS(cudaSuccess, cudaDeviceGetDefaultMemPool(&other, 0));
    TRUE_THAT(current == other);
    RETURNS(cudaSuccess, cudaMemSetMemPool(&here, cudaMemAllocationTypeManaged, pool));
    RETURNS(cudaErrorInvalidValue, cudaMemSetMemPool(&here, cudaMemAllocationTypePinned, pool));
    RETURNS(cudaErrorInvalidValue, cudaMemSetMemPool(&here, cudaMemAllocationTypeManaged, other));
    RETURNS(cudaErrorInvalidValue, cudaMemSetMemPool(&nowhere, cudaMemAllocationTypeManaged, pool));
    RETURNS(cudaErrorInvalidValue, cudaDeviceSetMemPool(0, anywhere));
    RETURNS(cudaSuccess, cudaStreamDestroy(stream));
    RETURNS(cudaSuccess, cudaMemPoolDestroy(pool));
    RETURNS(cudaSuccess, cudaMemPoolDestroy(anywhere));
    return verdict();
}
