// Matrix products by whole warps: half, bfloat16, TF32 and bytes, in the shapes and layouts of nvcuda::wmma.
#define PROGRAM "tensor_cores"
#include "common.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <vector>

using namespace nvcuda;

// What is compiled for GPUs before these types has empty kernels.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
struct Tf32 {};
#else
typedef wmma::precision::tf32 Tf32;
#endif

template <class In, class Out, int M, int N, int K, class Layout, class Kind> __global__ void product(const In *a, const In *b, Out *c) {
#if __CUDA_ARCH__ >= 800
    wmma::fragment<wmma::matrix_a, M, N, K, Kind, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, M, N, K, Kind, Layout> fb;
    wmma::fragment<wmma::accumulator, M, N, K, Out> fc;
    wmma::fill_fragment(fc, Out(1));
    wmma::load_matrix_sync(fa, a, K);
    wmma::load_matrix_sync(fb, b, std::is_same<Layout, wmma::row_major>::value ? N : K);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::mma_sync(fc, fa, fb, fc);
    for (int i = 0; i < fc.num_elements; i++) fc.x[i] = fc.x[i] + Out(1);
    wmma::store_matrix_sync(c, fc, N, wmma::mem_row_major);
#endif
}

static int done = 0;

template <class In, class Out, int M, int N, int K, class Layout, class Kind = In> static void check(const char *what, Random &random) {
    // Small whole numbers: exact in every type.
    std::vector<int> x(M * K), y(K * N);
    std::vector<In> a(M * K), b(K * N);
    std::vector<Out> c(M * N);
    for (int i = 0; i < M * K; i++) a[i] = In((float)(x[i] = (int)random.below(9) - (std::is_same<In, unsigned char>::value ? 0 : 4)));
    for (int i = 0; i < K * N; i++) b[i] = In((float)(y[i] = (int)random.below(9) - (std::is_same<In, unsigned char>::value ? 0 : 4)));
    In *da, *db;
    Out *dc;
    CHECK(cudaMalloc(&da, a.size() * sizeof(In)));
    CHECK(cudaMalloc(&db, b.size() * sizeof(In)));
    CHECK(cudaMalloc(&dc, c.size() * sizeof(Out)));
    CHECK(cudaMemcpy(da, a.data(), a.size() * sizeof(In), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), b.size() * sizeof(In), cudaMemcpyHostToDevice));
    product<In, Out, M, N, K, Layout, Kind><<<1, 32>>>(da, db, dc);
    LAUNCHED();
    CHECK(cudaMemcpy(c.data(), dc, c.size() * sizeof(Out), cudaMemcpyDeviceToHost));
    bool rows = std::is_same<Layout, wmma::row_major>::value;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            int want = 2;
            for (int k = 0; k < K; k++) want += 2 * x[i * K + k] * y[rows ? k * N + j : j * K + k];
            REQUIRE((double)(float)c[i * N + j] == want, "%s: %d,%d is %f, not %d", what, i, j, (double)(float)c[i * N + j], want);
        }
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(dc));
    done++;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    typedef wmma::row_major Rows;
    typedef wmma::col_major Columns;
    check<__half, float, 16, 16, 16, Rows>("half to float", random);
    check<__half, float, 16, 16, 16, Columns>("half to float, by columns", random);
    check<__half, float, 32, 8, 16, Rows>("half, tall", random);
    check<__half, float, 8, 32, 16, Columns>("half, wide", random);
    check<__half, __half, 16, 16, 16, Rows>("half to half", random);
    check<__nv_bfloat16, float, 16, 16, 16, Rows>("bfloat16", random);
    check<__nv_bfloat16, float, 32, 8, 16, Columns>("bfloat16, tall", random);
    check<float, float, 16, 16, 8, Rows, Tf32>("TF32", random);
    check<signed char, int, 16, 16, 16, Rows>("signed bytes", random);
    check<unsigned char, int, 16, 16, 16, Columns>("bytes", random);
    return pass("%d forms", done);
}
