// Clusters of blocks: registers, barrier and shared memory, by cooperative groups and by PTX. Compiled by regenerate.sh.
#include <cooperative_groups.h>
#include <cuda/ptx>

namespace cg = cooperative_groups;
namespace ptx = cuda::ptx;

// Each block's view: its cluster, the number of clusters, its index in the cluster, the cluster's size, its rank.
extern "C" __global__ void places(unsigned *out)
{
    auto cluster = cg::this_cluster();
    dim3 at = cluster.block_index(), size = cluster.dim_blocks();
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned *mine = out + 16 * block;
    unsigned in[6];
    asm("mov.u32 %0, %%clusterid.x; mov.u32 %1, %%clusterid.y; mov.u32 %2, %%clusterid.z;" : "=r"(in[0]), "=r"(in[1]), "=r"(in[2]));
    asm("mov.u32 %0, %%nclusterid.x; mov.u32 %1, %%nclusterid.y; mov.u32 %2, %%nclusterid.z;" : "=r"(in[3]), "=r"(in[4]), "=r"(in[5]));
    unsigned values[16] = {in[0], in[1], in[2], in[3], in[4], in[5], at.x, at.y, at.z, size.x, size.y, size.z,
                           cluster.block_rank(), cluster.num_blocks(), cluster.thread_rank(), ptx::get_sreg_is_explicit_cluster()};
    if (threadIdx.x == 1) for (int i = 0; i < 16; i++) mine[i] = values[i];
}

// A histogram whose bins are distributed over the cluster's blocks.
extern "C" __global__ void histogram(unsigned *bins, const unsigned *data, int n, int each)
{
    extern __shared__ unsigned part[];
    auto cluster = cg::this_cluster();
    for (int i = threadIdx.x; i < each; i += blockDim.x) part[i] = 0;
    cluster.sync();
    int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        unsigned bin = data[i];
        atomicAdd(cluster.map_shared_rank(part, bin / each) + bin % each, 1);
    }
    cluster.sync();
    for (int i = threadIdx.x; i < each; i += blockDim.x)
        atomicAdd(bins + cluster.block_rank() * each + i, part[i]);
}

// Many rounds in which each block reads what its neighbor has just written; half of the threads exit immediately.
extern "C" __global__ void ring(unsigned *out, int rounds)
{
    __shared__ unsigned value[2];
    auto cluster = cg::this_cluster();
    if (threadIdx.x % 2) return;
    unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    if (threadIdx.x == 0) value[0] = cluster.block_rank();
    for (int i = 0; i < rounds; i++) {
        auto token = cluster.barrier_arrive();
        cluster.barrier_wait(std::move(token));
        if (threadIdx.x == 0) value[(i + 1) % 2] = *cluster.map_shared_rank(value + i % 2, next) + 1;
    }
    cluster.sync();
    if (threadIdx.x == 0) out[blockIdx.x] = value[rounds % 2];
}

// The block and the spaces of shared memory addresses, both generic and 32-bit.
extern "C" __global__ void addresses(unsigned *out)
{
    __shared__ unsigned value;
    auto cluster = cg::this_cluster();
    unsigned rank = cluster.block_rank(), next = (rank + 1) % cluster.num_blocks(), at, got, own, cta, all, far;
    if (threadIdx.x == 0) value = 10 + rank;
    cluster.sync();
    unsigned *other = cluster.map_shared_rank(&value, next);
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(&value)), "r"(next));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(got) : "r"(at));
    asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(own) : "r"(at));
    asm("{.reg .pred p; isspacep.shared::cta p, %1; selp.u32 %0, 1, 0, p;}" : "=r"(cta) : "l"(other));
    asm("{.reg .pred p; isspacep.shared::cluster p, %1; selp.u32 %0, 1, 0, p;}" : "=r"(all) : "l"(other));
    asm("{.reg .pred p; isspacep.shared::cta p, %1; selp.u32 %0, 1, 0, p;}" : "=r"(far) : "l"(&value));
    if (threadIdx.x == 0) {
        unsigned *mine = out + 8 * blockIdx.x;
        mine[0] = *other, mine[1] = got, mine[2] = own, mine[3] = cluster.query_shared_rank(other), mine[4] = cta, mine[5] = all, mine[6] = far,
        mine[7] = cluster.query_shared_rank(&value);
    }
    cluster.sync();
}

// Each block sends words to the next one, which waits at its own barrier for the bytes.
extern "C" __global__ void sent(unsigned *out)
{
    __shared__ uint64_t barrier;
    __shared__ unsigned words[4];
    auto cluster = cg::this_cluster();
    unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        for (int i = 0; i < 4; i++) words[i] = 1000;
    }
    cluster.sync();
    if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier, 16);
        unsigned *to = cluster.map_shared_rank(words, next);
        uint64_t *theirs = cluster.map_shared_rank(&barrier, next);
        unsigned pair[2] = {cluster.block_rank(), 7};
        ptx::st_async(to, pair, theirs);
        ptx::st_async(to + 2, 5u, theirs);
        ptx::red_async(ptx::op_add, to + 3, 11u, theirs);
    }
    while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}
    if (threadIdx.x < 4) out[4 * blockIdx.x + threadIdx.x] = words[threadIdx.x];
    cluster.sync();
}

// One block copies memory to all blocks of its cluster except its first.
extern "C" __global__ void multicast(unsigned *out, const unsigned *data)
{
    __shared__ alignas(16) unsigned words[64];
    __shared__ uint64_t barrier;
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 1);
    words[threadIdx.x] = 1;
    cluster.sync();
    uint16_t all = (1u << cluster.num_blocks()) - 2;
    if (cluster.block_rank() != 0 && threadIdx.x == 0)
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier, sizeof words);
    if (cluster.block_rank() == 1 && threadIdx.x == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
                     "r"((unsigned)__cvta_generic_to_shared(words)), "l"(data), "r"((unsigned)sizeof words),
                     "r"((unsigned)__cvta_generic_to_shared(&barrier)), "h"(all) : "memory");
    if (cluster.block_rank() != 0) while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}
    out[64 * blockIdx.x + threadIdx.x] = words[threadIdx.x];
    cluster.sync();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) pairs_of_blocks(unsigned *out)
{
    if (threadIdx.x == 0) out[blockIdx.x] = cg::this_cluster().num_blocks();
}

// The second block waits for the first, which never arrives.
extern "C" __global__ void alone()
{
    if (blockIdx.x % 2) cg::this_cluster().sync();
    else __nanosleep(100);
    __shared__ volatile int never;
    if (blockIdx.x % 2 == 0 && threadIdx.x == 0) asm volatile("bar.sync 1, 64;");
}

// An address in a block that the cluster does not have.
extern "C" __global__ void beyond(unsigned *out)
{
    __shared__ unsigned value;
    auto cluster = cg::this_cluster();
    value = 1;
    cluster.sync();
    out[threadIdx.x] = *cluster.map_shared_rank(&value, cluster.num_blocks());
}
