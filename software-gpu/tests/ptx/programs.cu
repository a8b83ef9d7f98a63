// Ordinary programs, which CI and the demonstration run. Compiled by regenerate.sh.
#include <cassert>
#include <cstdio>

extern "C" __global__ void vector_add(const float *a, const float *b, float *c, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        c[i] = a[i] + b[i];
}

template <int BLOCK> __device__ void matrix_mul(float *C, const float *A, const float *B, int wA, int wB)
{
    __shared__ float As[BLOCK][BLOCK], Bs[BLOCK][BLOCK];
    int bx = blockIdx.x, by = blockIdx.y, tx = threadIdx.x, ty = threadIdx.y;
    float sum = 0;
    for (int a = wA * BLOCK * by, b = BLOCK * bx; a < wA * BLOCK * by + wA; a += BLOCK, b += BLOCK * wB) {
        As[ty][tx] = A[a + wA * ty + tx];
        Bs[ty][tx] = B[b + wB * ty + tx];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BLOCK; ++k)
            sum += As[ty][k] * Bs[k][tx];
        __syncthreads();
    }
    C[wB * BLOCK * by + BLOCK * bx + wB * ty + tx] = sum;
}
extern "C" __global__ void matrix_mul_16(float *C, const float *A, const float *B, int wA, int wB)
{
    matrix_mul<16>(C, A, B, wA, wB);
}
extern "C" __global__ void matrix_mul_32(float *C, const float *A, const float *B, int wA, int wB)
{
    matrix_mul<32>(C, A, B, wA, wB);
}

extern "C" __global__ void reduce(const double *in, double *out, int n)
{
    extern __shared__ double s[];
    double v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        v += in[i];
    s[threadIdx.x] = v;
    __syncthreads();
    for (int k = blockDim.x / 2; k >= 32; k >>= 1) {
        if (threadIdx.x < k)
            s[threadIdx.x] += s[threadIdx.x + k];
        __syncthreads();
    }
    if (threadIdx.x < 32) {
        v = s[threadIdx.x];
        for (int o = 16; o; o >>= 1)
            v += __shfl_down_sync(~0u, v, o);
        if (threadIdx.x == 0)
            atomicAdd(out, v);
    }
}

extern "C" __global__ void transpose(float *out, const float *in, int w, int h)
{
    __shared__ float t[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < w && y + j < h)
            t[threadIdx.y + j][threadIdx.x] = in[(y + j) * w + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < h && y + j < w)
            out[(y + j) * h + x] = t[threadIdx.x][threadIdx.y + j];
}

extern "C" __global__ void histogram(const unsigned char *data, unsigned *bins, int n)
{
    __shared__ unsigned local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[data[i]], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        atomicAdd(&bins[i], local[i]);
}

__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
extern "C" __global__ void recursive(int *out) { out[threadIdx.x] = fib(threadIdx.x % 15); }

typedef int (*operation)(int, int);
__device__ int op_add(int a, int b) { return a + b; }
__device__ int op_mul(int a, int b) { return a * b; }
__device__ int op_xor(int a, int b) { return a ^ b; }
__device__ operation table[3] = {op_add, op_mul, op_xor};
extern "C" __global__ void pointers(int *out) { out[threadIdx.x] = table[threadIdx.x % 3](threadIdx.x, 7); }

__constant__ float coefficients[4] = {1, 2, 3, 4};
__device__ int counter = 5;
struct Big {
    int a;
    double b;
    char name[9];
};
extern "C" __global__ void constants(float *out, Big big)
{
    out[threadIdx.x] = coefficients[threadIdx.x & 3] * big.b + big.a + big.name[threadIdx.x % 9];
    atomicAdd(&counter, 1);
}

extern "C" __global__ void prints(int x)
{
    if (threadIdx.x < 2)
        printf("thread %d of %s: %5.2f|%-6d|%06x|%c|%g|%llu%%\n", threadIdx.x, "block", x / 3.0, x, x, 'q', 1e10,
               1ull << 40);
}

extern "C" __global__ void asserts(int x) { assert(threadIdx.x < x); }
extern "C" __global__ void out_of_bounds(int *p, int i) { p[i] = 1; }
extern "C" __global__ void traps() { __trap(); }
extern "C" __global__ void misaligned(char *p) { *(int *)(p + 1) = 1; }
extern "C" __global__ void forever(volatile int *p)
{
    while (!*p)
        ;
}

// Threads of one warp take the same lock in turn, which requires forward progress of diverged threads.
extern "C" __global__ void locks(int *lock, int *sum)
{
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *(volatile int *)sum += threadIdx.x;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
extern "C" __global__ void spin_lock(int *lock, int *sum)
{
    while (atomicCAS(lock, 0, 1) != 0)
        ;
    __threadfence();
    *(volatile int *)sum += threadIdx.x;
    __threadfence();
    atomicExch(lock, 0);
}

extern "C" __global__ void votes(unsigned *out)
{
    unsigned t = threadIdx.x;
    out[t * 8 + 0] = __ballot_sync(~0u, t & 1);
    out[t * 8 + 1] = __any_sync(~0u, t == 5);
    out[t * 8 + 2] = __all_sync(~0u, t < 32);
    out[t * 8 + 3] = __shfl_xor_sync(~0u, t * t, 3);
    out[t * 8 + 4] = __shfl_up_sync(~0u, t, 2, 8);
    out[t * 8 + 5] = __shfl_sync(~0u, t, 3, 4);
    if (t % 3 == 0)
        out[t * 8 + 6] = __activemask();
    else
        out[t * 8 + 6] = __popc(__match_any_sync(__activemask(), t / 8));
    out[t * 8 + 7] = __syncthreads_count(t > 10) * 4 + __syncthreads_or(t == 3) * 2 + __syncthreads_and(t != 3);
}

extern "C" __global__ void switches(int *out)
{
    int t = threadIdx.x, r = 0;
    for (int i = 0; i < t; i++) {
        switch ((i * 7 + t) % 9) {
        case 0: r += 3; break;
        case 1: r ^= t; break;
        case 2: r *= 3; break;
        case 3: r -= i; break;
        case 4: r = r << 1 | 1; break;
        case 5: r = __brev(r) >> 3; break;
        case 6: if (r & 1) continue; r += __clz(r); break;
        case 7: r ^= __funnelshift_l(r, t, i); break;
        default: r += __popc(r) + __ffs(r); break;
        }
        if (r == 12345) break;
    }
    out[t] = r;
}

extern "C" __global__ void heap(int **out)
{
    int *p = (int *)malloc(64);
    p[3] = threadIdx.x;
    if (threadIdx.x % 2) {
        free(p);
        p = nullptr;
    }
    out[threadIdx.x] = p;
}

extern "C" __global__ void fast_math(float *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] = sinf(x[i]) + expf(x[i]) * logf(1 + x[i]) + powf(x[i], 1.5f) + rsqrtf(x[i] + 1) + tanf(x[i]) + erff(x[i]);
}
extern "C" __global__ void double_math(double *x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] = sin(x[i]) + exp(x[i]) * log(1 + x[i]) + pow(x[i], 1.5) + rsqrt(x[i] + 1) + tan(x[i]) + erf(x[i]);
}
