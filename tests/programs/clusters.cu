// Thread block clusters: how large they may be and how many run at once, launches by attribute and by the kernel's own size,
// shared memory of other blocks, and the codes for clusters that cannot be.
#define PROGRAM "clusters"
#include "cases.h"
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

__device__ void pass_on(int *out) {
#if __CUDA_ARCH__ >= 900
    __shared__ int mine;
    cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x == 0) mine = 100 * blockIdx.x;
    cluster.sync();
    unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    if (threadIdx.x == 0) out[blockIdx.x] = *cluster.map_shared_rank(&mine, next) + int(cluster.num_blocks());
    cluster.sync();
#endif
}
__global__ void any_size(int *out) { pass_on(out); }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OF_TWO __cluster_dims__(2, 1, 1)
#else
#define OF_TWO
#endif
__global__ void OF_TWO of_two(int *out) { pass_on(out); }

// Sums in the shared memory of the cluster's first block, by atomics from all of them.
__global__ void together(int *out) {
#if __CUDA_ARCH__ >= 900
    __shared__ int sum;
    cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x == 0) sum = 0;
    cluster.sync();
    atomicAdd(cluster.map_shared_rank(&sum, 0), (int)cluster.thread_rank());
    cluster.sync();
    if (cluster.block_rank() == 0 && threadIdx.x == 0) out[blockIdx.x] = sum;
#endif
}

static cudaLaunchConfig_t config(cudaLaunchAttribute *attribute, unsigned size, unsigned grid = 16) {
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim = {size, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = 32;
    config.attrs = attribute;
    config.numAttrs = 1;
    return config;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *out, got[16], clusters = 0, most = 0;
    cudaLaunchAttribute attribute;
    RETURNS(cudaSuccess, cudaMalloc(&out, sizeof got));
    cudaLaunchConfig_t four = config(&attribute, 4);
    RETURNS(cudaSuccess, cudaOccupancyMaxActiveClusters(&clusters, any_size, &four));
    RETURNS(cudaSuccess, cudaOccupancyMaxPotentialClusterSize(&most, any_size, &four));
    TRUE_THAT(clusters > 0 && most >= 4);
    printf("%d clusters of 4 at once, of %d blocks at most\n", clusters, most);
    for (unsigned size : {1u, 2u, 4u, 8u}) {
        cudaLaunchConfig_t launch = config(&attribute, size);
        RETURNS(cudaSuccess, cudaMemset(out, 0, sizeof got));
        RETURNS(cudaSuccess, cudaLaunchKernelEx(&launch, any_size, out));
        RETURNS(cudaSuccess, cudaMemcpy(got, out, sizeof got, cudaMemcpyDefault));
        for (unsigned i = 0; i < 16; i++) IS(100 * (i / size * size + (i + 1) % size) + size, got[i]);
        RETURNS(cudaSuccess, cudaLaunchKernelEx(&launch, together, out));
        RETURNS(cudaSuccess, cudaMemcpy(got, out, sizeof got, cudaMemcpyDefault));
        for (unsigned i = 0; i < 16; i += size) IS(32 * size * (32 * size - 1) / 2, got[i]);
    }
    of_two<<<16, 32>>>(out);
    RETURNS(cudaSuccess, cudaMemcpy(got, out, sizeof got, cudaMemcpyDefault));
    for (int i = 0; i < 16; i++) IS(100 * (i ^ 1) + 2, got[i]);

    // What cannot be: too large without asking, not a divisor of the grid, another size than the kernel's own.
    cudaLaunchConfig_t wrong = config(&attribute, 16);
    RETURNS(cudaErrorInvalidClusterSize, cudaLaunchKernelEx(&wrong, any_size, out));
    wrong = config(&attribute, 4, 6);
    RETURNS(cudaErrorInvalidClusterSize, cudaLaunchKernelEx(&wrong, any_size, out));
    wrong = config(&attribute, 4);
    RETURNS(cudaErrorInvalidClusterSize, cudaLaunchKernelEx(&wrong, of_two, out));
    LAUNCH_LEAVES(cudaErrorInvalidClusterSize, of_two<<<3, 32>>>(out));
    // 16 blocks, once the kernel allows it.
    RETURNS(cudaSuccess, cudaFuncSetAttribute(any_size, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchConfig_t large = config(&attribute, 16);
    RETURNS(cudaSuccess, cudaOccupancyMaxPotentialClusterSize(&most, any_size, &large));
    printf("%d when allowed\n", most);
    RETURNS(cudaSuccess, cudaLaunchKernelEx(&large, any_size, out));
    RETURNS(cudaSuccess, cudaMemcpy(got, out, sizeof got, cudaMemcpyDefault));
    for (int i = 0; i < 16; i++) IS(100 * ((i + 1) % 16) + 16, got[i]);
    cudaFuncAttributes attributes;
    RETURNS(cudaSuccess, cudaFuncGetAttributes(&attributes, of_two));
    printf("its own size: %d %d %d, must be set: %d\n", attributes.requiredClusterWidth, attributes.requiredClusterHeight, attributes.requiredClusterDepth,
           attributes.clusterDimMustBeSet);
    return verdict();
}
