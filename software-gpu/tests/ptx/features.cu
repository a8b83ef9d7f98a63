// Less common features: tensor cores, asynchronous copies, cooperative groups, named barriers. Compiled by regenerate.sh.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/barrier>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

namespace cg = cooperative_groups;
using namespace nvcuda;

extern "C" __global__ void wmma_halves(float *d, const half *a, const half *b, int n)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    for (int k = 0; k < n; k += 16) {
        wmma::load_matrix_sync(fa, a + blockIdx.y * 16 * n + k, n);
        wmma::load_matrix_sync(fb, b + blockIdx.x * 16 * n + k, n);
        wmma::mma_sync(fc, fa, fb, fc);
    }
    for (int i = 0; i < fc.num_elements; i++)
        fc.x[i] *= 2;
    wmma::store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, fc, n, wmma::mem_row_major);
}

extern "C" __global__ void wmma_bytes(int *d, const signed char *a, const signed char *b)
{
    wmma::fragment<wmma::matrix_a, 32, 8, 16, signed char, wmma::col_major> fa;
    wmma::fragment<wmma::matrix_b, 32, 8, 16, signed char, wmma::row_major> fb;
    wmma::fragment<wmma::accumulator, 32, 8, 16, int> fc;
    wmma::fill_fragment(fc, 1);
    wmma::load_matrix_sync(fa, a, 32);
    wmma::load_matrix_sync(fb, b, 8);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(d, fc, 32, wmma::mem_col_major);
}

extern "C" __global__ void wmma_doubles(double *d, const double *a, const double *b, int n)
{
    wmma::fragment<wmma::matrix_a, 8, 8, 4, double, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 8, 8, 4, double, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 8, 8, 4, double> fc;
    wmma::fill_fragment(fc, 0.5);
    for (int k = 0; k < n; k += 4) {
        wmma::load_matrix_sync(fa, a + k, n);
        wmma::load_matrix_sync(fb, b + k, n);
        wmma::mma_sync(fc, fa, fb, fc);
    }
    wmma::store_matrix_sync(d, fc, 8, wmma::mem_row_major);
}

// A 16 x 8 tile, in the fragments that PTX defines.
extern "C" __global__ void mma_doubles(double *d, const double *a, const double *b)
{
    int group = threadIdx.x / 4, member = threadIdx.x % 4;
    double c[4] = {0, 0, 0, 0}, x[8], y[4];
    for (int i = 0; i < 8; i++) x[i] = a[(group + i % 2 * 8) * 16 + member + i / 2 * 4];
    for (int i = 0; i < 4; i++) y[i] = b[(member + i * 4) * 8 + group];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};"
                 : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
                 : "d"(x[0]), "d"(x[1]), "d"(x[2]), "d"(x[3]), "d"(x[4]), "d"(x[5]), "d"(x[6]), "d"(x[7]), "d"(y[0]), "d"(y[1]), "d"(y[2]), "d"(y[3]));
    for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + member * 2 + i % 2] = c[i];
}

// Sums over tiles of four warps, which use reserved shared memory; a canary guards the kernel's own.
extern "C" __global__ void wide_tiles(int *out, const int *in)
{
    __shared__ cg::block_tile_memory<256> memory;
    __shared__ int canary[16];
    if (threadIdx.x < 16) canary[threadIdx.x] = threadIdx.x;
    cg::thread_block block = cg::this_thread_block(memory);
    auto tile = cg::tiled_partition<128>(block);
    int i = blockIdx.x * 256 + threadIdx.x;
    out[i] = cg::reduce(tile, in[i], cg::plus<int>());
    block.sync();
    if (canary[threadIdx.x % 16] != threadIdx.x % 16) out[i] = -1;
}

// Blocks publish pairs with equal halves, and other blocks count how often they read halves of two stores.
extern "C" __global__ void pairs(ulonglong2 *cells, unsigned *torn, int rounds)
{
    ulonglong2 *cell = cells + threadIdx.x;
    for (int i = 1; i <= rounds; i++) {
        if (blockIdx.x % 2 == 0) {
            unsigned long long v = (unsigned long long)i * 0x100000001ull;
            asm volatile("st.relaxed.gpu.v2.u64 [%0], {%1, %1};" ::"l"(cell), "l"(v) : "memory");
        } else {
            unsigned long long a, b;
            asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(cell) : "memory");
            if (a != b) atomicAdd(torn, 1);
        }
    }
}

// One warp's 16 x 8 tile from shared memory by ldmatrix and mma.
extern "C" __global__ void ldmatrix_mma(float *d, const half *a, const half *b)
{
    __shared__ __align__(16) half sa[16][16], sb[8][16];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32)
        sa[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32)
        sb[i / 16][i % 16] = b[i];
    __syncwarp();
    unsigned ra[4], rb[2];
    float c[4] = {0, 0, 0, 0};
    unsigned at = __cvta_generic_to_shared(&sa[lane % 16][lane / 16 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(at));
    unsigned bt = __cvta_generic_to_shared(&sb[lane % 8][lane / 8 % 2 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(bt));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    int row = lane / 4, col = lane % 4 * 2;
    d[row * 8 + col] = c[0];
    d[row * 8 + col + 1] = c[1];
    d[(row + 8) * 8 + col] = c[2];
    d[(row + 8) * 8 + col + 1] = c[3];
}

extern "C" __global__ void pipeline(int *out, const int *in, int n)
{
    __shared__ int4 buffer[2][64];
    int t = threadIdx.x;
    const int4 *from = (const int4 *)in;
    __pipeline_memcpy_async(&buffer[0][t], &from[t], 16);
    __pipeline_commit();
    int sum = 0;
    for (int i = 0; i < n; i++) {
        if (i + 1 < n)
            __pipeline_memcpy_async(&buffer[(i + 1) % 2][t], &from[(i + 1) * 64 + t], 16);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        int4 v = buffer[i % 2][63 - t];
        sum += v.x + 2 * v.y + 3 * v.z + 4 * v.w;
        __syncthreads();
    }
    out[t] = sum;
}

// A producer warp and consumer warps use barriers in shared memory.
extern "C" __global__ void barriers(int *out, int rounds)
{
    __shared__ cuda::barrier<cuda::thread_scope_block> full, empty;
    __shared__ int box[32];
    if (threadIdx.x == 0) {
        init(&full, blockDim.x);
        init(&empty, blockDim.x);
    }
    __syncthreads();
    int sum = 0;
    for (int r = 0; r < rounds; r++) {
        if (threadIdx.x < 32) {
            box[threadIdx.x] = r * 100 + threadIdx.x;
            (void)full.arrive();
            empty.arrive_and_wait();
        } else {
            full.arrive_and_wait();
            sum += box[(threadIdx.x + r) % 32];
            empty.arrive_and_wait();
        }
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void grid_sync(int *data, int *total, int rounds)
{
    cg::grid_group grid = cg::this_grid();
    int n = grid.size(), i = grid.thread_rank();
    for (int r = 0; r < rounds; r++) {
        int right = data[(i + 1) % n];
        grid.sync();
        data[i] += right;
        grid.sync();
    }
    cg::thread_block_tile<16> tile = cg::tiled_partition<16>(cg::this_thread_block());
    int sum = cg::reduce(tile, data[i], cg::plus<int>());
    if (tile.thread_rank() == 0)
        atomicAdd(total, sum);
    cg::coalesced_group some = cg::coalesced_threads();
    if (i % 3 == 0) {
        cg::coalesced_group third = cg::coalesced_threads();
        if (third.thread_rank() == 0)
            atomicAdd(total + 1, third.size());
    }
    if (some.thread_rank() == 0)
        atomicAdd(total + 2, 1);
}

// Each block waits for the previous one: a scan by decoupled look-back.
extern "C" __global__ void look_back(int *out, const int *in, volatile int *status, unsigned *ticket)
{
    __shared__ int base, block, sums[32];
    if (threadIdx.x == 0)
        block = atomicAdd(ticket, 1);
    __syncthreads();
    int i = block * blockDim.x + threadIdx.x, v = in[i], lane = threadIdx.x % 32;
    int scan = v;
    for (int o = 1; o < 32; o <<= 1) {
        int up = __shfl_up_sync(~0u, scan, o);
        if (lane >= o)
            scan += up;
    }
    if (lane == 31)
        sums[threadIdx.x / 32] = scan;
    __syncthreads();
    for (int w = 0; w < threadIdx.x / 32; w++)
        scan += sums[w];
    if (threadIdx.x == blockDim.x - 1) {
        int before = 0;
        if (block > 0) {
            while ((before = status[block - 1]) < 0)
                ;
            __threadfence();
        }
        base = before;
        __threadfence();
        status[block] = before + scan;
    }
    __syncthreads();
    out[i] = base + scan;
}

extern "C" __global__ void named_barriers(int *out)
{
    __shared__ int a[64], b[64];
    int t = threadIdx.x;
    if (t < 64) {
        a[t] = t;
        asm volatile("bar.sync 1, 64;" ::: "memory");
        out[t] = a[63 - t];
        b[t] = 1000 + t;
        asm volatile("bar.arrive 2, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
        out[t] = b[127 - t];
    }
}

extern "C" __global__ void divergent_shuffles(int *out)
{
    int t = threadIdx.x, v = t * t, r;
    // Both sides of a branch form one shuffle of the whole warp.
    if (t & 1)
        r = __shfl_xor_sync(~0u, v, 1) + 1000;
    else
        r = __shfl_xor_sync(~0u, v + 5, 1) + 2000;
    out[t] = r;
    // Lanes with the same key reduce among themselves.
    unsigned peers = __match_any_sync(~0u, t % 5);
    out[32 + t] = __reduce_add_sync(peers, t);
    out[64 + t] = __popc(__ballot_sync(peers, t > 15));
}

extern "C" __global__ void stack(int *out)
{
    int n = threadIdx.x % 7 + 1, sum = 0;
    int *p = (int *)alloca(n * sizeof(int));
    for (int i = 0; i < n; i++)
        p[i] = i * threadIdx.x;
    for (int i = 0; i < n; i++)
        sum += p[(i * 3) % n];
    out[threadIdx.x] = sum;
}

extern "C" __global__ void half_atomics(half2 *pairs, float4 *four, __nv_bfloat16 *brain)
{
    atomicAdd(pairs, __floats2half2_rn(1, 2));
    atomicAdd(four, make_float4(1, 2, 3, 4));
    atomicAdd(brain, __float2bfloat16(0.5f));
}

struct __align__(16) Wide {
    unsigned long long low, high;
};
// A 128-bit counter that all threads increment.
extern "C" __global__ void wide_cas(Wide *counter)
{
    Wide old = *counter, seen;
    do {
        seen = old;
        Wide next = {seen.low + 1, seen.high + 3};
        old = atomicCAS(counter, seen, next);
    } while (old.low != seen.low || old.high != seen.high);
}

extern "C" __global__ void formats(int x)
{
    printf("%5s|%-5s|%.2s|%+d|% d|%05d|%x|%#x|%#o|%*d|%.*f\n", "abc", "de", "fghi", x, x, x, -x, x, x, 6, x, 2, x / 7.0);
    printf("%e|%.3g|%G|%g|%a|%hhd|%lld|%llx|%c|%%|%F|%10.3e|\n", x * 1.5, x / 3.0, 1e-10 * x, 1e20, 1.0, x, (long long)x << 40,
           -1ll, 65 + x % 26, 2.5, 12345.678);
}

extern "C" __global__ void textures(float *out, cudaTextureObject_t flat, cudaTextureObject_t image, cudaTextureObject_t volume,
                                    cudaTextureObject_t layers)
{
    int t = threadIdx.x;
    float x = t * 0.37f - 3.0f, y = t * 0.21f - 1.0f;
    out[t] = tex1Dfetch<float>(flat, t);
    out[32 + t] = tex2D<float>(image, x, y);
    out[64 + t] = tex3D<float>(volume, x / 8, y / 4, t / 32.0f);
    float2 pair = tex2DLayered<float2>(layers, t % 4 + 0.5f, t / 4 % 4 + 0.5f, t % 2);
    out[96 + t] = pair.x * 100 + pair.y;
    out[128 + t] = tex2DLod<float>(image, 1.5f, 2.5f, 0);
}

extern "C" __global__ void surfaces(cudaSurfaceObject_t to, cudaSurfaceObject_t from, int n)
{
    int x = threadIdx.x, y = blockIdx.x;
    if (x < n) {
        uchar4 v;
        surf2Dread(&v, from, x * 4, y);
        surf2Dwrite(make_int2(v.x + 256 * v.y, v.z + 256 * v.w), to, x * 8, y);
    }
    int zero = 1;
    surf2Dread(&zero, from, -4, y, cudaBoundaryModeZero);
    if (zero)
        __trap();
}
