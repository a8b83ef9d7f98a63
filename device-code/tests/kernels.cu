// Kernels that differ in what a cubin says of them. `kernels.cubin` is made from this file by nvcc 13.0:
//
//   nvcc -arch=sm_90 -O2 -cubin -o kernels.cubin kernels.cu
//
// and `kernels-12.cubin` from the PTX that it makes, by ptxas 12.9, after `.version 9.0` was changed to 8.7.
struct Odd { char a; short b; double c; char d[3]; };
struct Big { char bytes[5000]; };
__constant__ int table[100];
extern "C" {
__global__ void empty() {}
__global__ void params(char a, double b, Odd c, short d, int *e, float f) { *e = a + b + c.c + d + f + table[d]; }
__global__ void big(Big b, int *p) { *p = b.bytes[threadIdx.x % 5000]; }
__global__ void __launch_bounds__(100) bounds(int *p) { p[threadIdx.x] = 1; }
__global__ void __cluster_dims__(2, 1, 1) clustered(float *p) { p[threadIdx.x] += 1; }
__global__ void frame(int *p, int n) { volatile char a[21]; for (int i = 0; i < n; i++) a[(i * 37) % 21] = i; p[threadIdx.x] = a[p[threadIdx.x] % 21]; }
__global__ void shared(char *p) { __shared__ char s[301]; s[threadIdx.x] = p[threadIdx.x]; __syncthreads(); p[threadIdx.x] = s[300 - threadIdx.x]; }
__global__ void barriers(float *p) { __syncthreads(); p[threadIdx.x] += 1; asm volatile("barrier.sync 5, 64;"); p[threadIdx.x] += 1; }
}
