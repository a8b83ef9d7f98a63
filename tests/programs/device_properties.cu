// Everything that the device says of itself, printed, so that what is told of a remote GPU can be compared with the GPU.
#define PROGRAM "device_properties"
#include "cases.h"
#include <algorithm>
#include <cuda.h>

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaDeviceProp p;
    memset(&p, 0xee, sizeof p);
    RETURNS(cudaSuccess, cudaGetDeviceProperties(&p, 0));
    printf("%s; luid mask %u\n", p.name, p.luidDeviceNodeMask);
#define N(field) printf(#field " %lld\n", (long long)p.field);
    N(totalGlobalMem) N(sharedMemPerBlock) N(regsPerBlock) N(warpSize) N(memPitch) N(maxThreadsPerBlock) N(maxThreadsDim[0])
    N(maxThreadsDim[1]) N(maxThreadsDim[2]) N(maxGridSize[0]) N(maxGridSize[1]) N(maxGridSize[2]) N(totalConstMem) N(major) N(minor)
    N(textureAlignment) N(texturePitchAlignment) N(multiProcessorCount) N(integrated) N(canMapHostMemory) N(maxTexture1D)
    N(maxTexture1DMipmap) N(maxTexture2D[0]) N(maxTexture2D[1]) N(maxTexture2DMipmap[0]) N(maxTexture2DLinear[0])
    N(maxTexture2DLinear[2]) N(maxTexture2DGather[0]) N(maxTexture3D[0]) N(maxTexture3DAlt[2]) N(maxTextureCubemap)
    N(maxTexture1DLayered[1]) N(maxTexture2DLayered[2]) N(maxTextureCubemapLayered[1]) N(maxSurface1D) N(maxSurface2D[0])
    N(maxSurface3D[0]) N(maxSurface1DLayered[1]) N(maxSurface2DLayered[2]) N(maxSurfaceCubemap) N(maxSurfaceCubemapLayered[1])
    N(surfaceAlignment) N(concurrentKernels) N(ECCEnabled) N(tccDriver) N(asyncEngineCount)
    N(unifiedAddressing) N(memoryBusWidth) N(l2CacheSize) N(persistingL2CacheMaxSize) N(maxThreadsPerMultiProcessor)
    N(streamPrioritiesSupported) N(globalL1CacheSupported) N(localL1CacheSupported) N(sharedMemPerMultiprocessor)
    N(regsPerMultiprocessor) N(managedMemory) N(isMultiGpuBoard) N(multiGpuBoardGroupID) N(hostNativeAtomicSupported)
    N(pageableMemoryAccess) N(computePreemptionSupported)
    N(cooperativeLaunch) N(sharedMemPerBlockOptin) N(pageableMemoryAccessUsesHostPageTables) N(directManagedMemAccessFromHost)
    N(maxBlocksPerMultiProcessor) N(accessPolicyMaxWindowSize) N(reservedSharedMemPerBlock) N(hostRegisterSupported)
    N(hostRegisterReadOnlySupported) N(memoryPoolsSupported)
   
    N(ipcEventSupported) N(clusterLaunch)
    TRUE_THAT(p.warpSize == 32 && p.major >= 7 && strlen(p.name) > 0);

    // The same by single questions, and what is only told that way.
    // But not what depends on the machine that the GPU is in, which is not this program's when the GPU is remote: managed access, host pointers, RDMA, handles of other interfaces, NUMA nodes.
    const int elsewhere[] = {33, 34, 50, 89, 91, 96, 110, 112, 114, 116, 117, 118, 119, 121, 124, 128, 129, 131, 134, 141, 142, 144, 145};
    printf("attributes:");
    for (int i = 1; i < CU_DEVICE_ATTRIBUTE_MAX; i++) {
        int of_runtime = -77, of_driver = -77;
        cudaError_t told = cudaDeviceGetAttribute(&of_runtime, (cudaDeviceAttr)i, 0);
        CUresult answer = cuDeviceGetAttribute(&of_driver, (CUdevice_attribute)i, 0);
        cases++;
        if (told == cudaSuccess && answer == CUDA_SUCCESS && of_runtime != of_driver)
            not_met(("attribute " + std::to_string(i) + " is " + std::to_string(of_runtime) + " and " + std::to_string(of_driver)).c_str());
        if (std::find(std::begin(elsewhere), std::end(elsewhere), i) == std::end(elsewhere)) printf(" %d:%d/%d/%d", i, (int)told, (int)answer, answer == CUDA_SUCCESS ? of_driver : 0);
    }
    printf("\n");
    cudaGetLastError();
    IS(p.multiProcessorCount, [] { int v = 0; cudaDeviceGetAttribute(&v, cudaDevAttrMultiProcessorCount, 0); return v; }());

    char name[300], id[64], by_runtime[64];
    size_t total = 0;
    CUuuid uuid;
    IS(CUDA_SUCCESS, cuDeviceGetName(name, sizeof name, 0));
    TRUE_THAT(strcmp(name, p.name) == 0);
    IS(CUDA_SUCCESS, cuDeviceTotalMem(&total, 0));
    IS(p.totalGlobalMem, total);
    IS(CUDA_SUCCESS, cuDeviceGetUuid(&uuid, 0));
    TRUE_THAT(memcmp(&uuid, &p.uuid, sizeof uuid) == 0);
    IS(CUDA_SUCCESS, cuDeviceGetPCIBusId(id, sizeof id, 0));
    RETURNS(cudaSuccess, cudaDeviceGetPCIBusId(by_runtime, sizeof by_runtime, 0));
    TRUE_THAT(strcmp(id, by_runtime) == 0);
    int found = 99;
    RETURNS(cudaSuccess, cudaDeviceGetByPCIBusId(&found, id));
    IS(0, found);
    RETURNS(cudaErrorInvalidDevice, cudaDeviceGetByPCIBusId(&found, "ffff:ff:1f.0"));
    RETURNS(cudaErrorInvalidValue, cudaDeviceGetByPCIBusId(&found, "nonsense"));
    IS(CUDA_SUCCESS, cuDeviceGetName(name, 5, 0));
    TRUE_THAT(strlen(name) == 4 && strncmp(name, p.name, 4) == 0);

    // The device that fits a wish.
    cudaDeviceProp wish = {};
    wish.major = p.major;
    RETURNS(cudaSuccess, cudaChooseDevice(&found, &wish));
    IS(0, found);
    int valid[] = {0};
    RETURNS(cudaSuccess, cudaSetValidDevices(valid, 1));
    int driver = 0, runtime = 0;
    RETURNS(cudaSuccess, cudaDriverGetVersion(&driver));
    RETURNS(cudaSuccess, cudaRuntimeGetVersion(&runtime));
    printf("driver %d, runtime %d\n", driver, runtime);
    // One device: it is no peer of its own.
    int peer = 9;
    RETURNS(cudaSuccess, cudaDeviceCanAccessPeer(&peer, 0, 0));
    IS(0, peer);
    RETURNS(cudaErrorPeerAccessUnsupported, cudaDeviceEnablePeerAccess(0, 0));
    RETURNS(cudaErrorInvalidDevice, cudaDeviceCanAccessPeer(&peer, 0, 1000));
    RETURNS(cudaErrorPeerAccessNotEnabled, cudaDeviceDisablePeerAccess(0));
    return verdict();
}
