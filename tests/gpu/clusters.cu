// Thread block clusters: occupancy, a launch with the cluster attribute, and distributed shared memory (Hopper and later).
//
//   nvcc -cudart shared -arch=native -o clusters clusters.cu

#include <cooperative_groups.h>
#include <cstdio>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

__global__ void pass_on(int *out)
{
    __shared__ int mine;
    cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x == 0)
        mine = 100 * blockIdx.x;
    cluster.sync();
    unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    if (threadIdx.x == 0)
        out[blockIdx.x] = *cluster.map_shared_rank(&mine, next) + int(cluster.num_blocks());
    cluster.sync();
}

int main()
{
    int *out, got[16], clusters = 0, size = 0;
    if (cudaMalloc(&out, sizeof got))
        return printf("FAIL allocation\n"), 1;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {4, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = 16;
    config.blockDim = 32;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, pass_on, &config);
    if (error || clusters <= 0)
        return printf("FAIL cudaOccupancyMaxActiveClusters: %s, %d\n", cudaGetErrorName(error), clusters), 1;
    error = cudaOccupancyMaxPotentialClusterSize(&size, pass_on, &config);
    if (error || size < 4)
        return printf("FAIL cudaOccupancyMaxPotentialClusterSize: %s, %d\n", cudaGetErrorName(error), size), 1;
    error = cudaLaunchKernelEx(&config, pass_on, out);
    if (!error)
        error = cudaMemcpy(got, out, sizeof got, cudaMemcpyDefault);
    if (error)
        return printf("FAIL launch: %s\n", cudaGetErrorName(error)), 1;
    for (int i = 0; i < 16; i++)
        if (got[i] != 100 * (i / 4 * 4 + (i + 1) % 4) + 4)
            return printf("FAIL block %d got %d\n", i, got[i]), 1;
    printf("PASS clusters %d active clusters of 4, %d blocks at most\n", clusters, size);
    return 0;
}
