// Half precision of both kinds, packed and not: arithmetic, comparisons, conversions and rounding, against the same steps in
// double rounded once.
#define PROGRAM "half_maths"
#include "common.h"
#include <cmath>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector>

constexpr int N = 4096, RESULTS = 8;

__global__ void halves(const __half *a, const __half *b, __half *out, int *less) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __half x = a[i], y = b[i];
    out[i * RESULTS + 0] = __hadd(x, y);
    out[i * RESULTS + 1] = __hmul(x, y);
    out[i * RESULTS + 2] = __hfma(x, y, x);
    out[i * RESULTS + 3] = __hsub(x, y);
    __half2 pair = __hfma2(__halves2half2(x, y), __float2half2_rn(2.0f), __halves2half2(y, x));
    out[i * RESULTS + 4] = __low2half(pair);
    out[i * RESULTS + 5] = __high2half(pair);
    out[i * RESULTS + 6] = __hmax(x, y);
    out[i * RESULTS + 7] = __habs(__hneg(x));
    less[i] = __hlt(x, y) + 2 * __heq(x, x) + 4 * __hge(x, y) + 8 * (__half2int_rz(x) == (int)__half2float(x)) + 16 * (__hisnan(x) != 0);
}

__global__ void brains(const __nv_bfloat16 *a, const __nv_bfloat16 *b, __nv_bfloat16 *out) {
#if __CUDA_ARCH__ >= 800
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __nv_bfloat16 x = a[i], y = b[i];
    out[i * RESULTS + 0] = __hadd(x, y);
    out[i * RESULTS + 1] = __hmul(x, y);
    out[i * RESULTS + 2] = __hfma(x, y, x);
    out[i * RESULTS + 3] = __float2bfloat16_rn(__bfloat162float(x) * 1.001f);
    __nv_bfloat162 pair = __hadd2(__halves2bfloat162(x, y), __halves2bfloat162(y, y));
    out[i * RESULTS + 4] = __low2bfloat16(pair);
    out[i * RESULTS + 5] = __high2bfloat16(pair);
    out[i * RESULTS + 6] = __hmin(x, y);
    out[i * RESULTS + 7] = __float2bfloat16_rz(__bfloat162float(x) * 1.001f);
#endif
}

// A double in the nearest half, by hand: ties to even, denormals, infinity.
static double nearest(double value, int digits, int least) {
    if (value == 0 || std::isnan(value) || std::isinf(value)) return value;
    int exponent;
    std::frexp(value, &exponent);
    int unit = (exponent < least ? least : exponent) - digits;
    return std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
}
static double nearest_half(double value) {
    double rounded = nearest(value, 11, -13);
    return std::fabs(rounded) > 65504 ? std::copysign(INFINITY, value) : rounded;
}
static double brain(double value) { return nearest(value, 8, -125); }

static bool same(double want, double got) { return want == got || (std::isnan(want) && std::isnan(got)); }

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    std::vector<__half> a(N), b(N), out(N * RESULTS);
    std::vector<__nv_bfloat16> c(N), d(N), out_b(N * RESULTS);
    for (int i = 0; i < N; i++) {
        double x = std::ldexp(random.unit() - 0.5, (int)random.below(30) - 14), y = std::ldexp(random.unit() - 0.5, (int)random.below(30) - 14);
        if (i % 97 == 0) x = INFINITY;
        if (i % 89 == 0) y = NAN;
        if (i % 83 == 0) x = -0.0;
        a[i] = __float2half((float)x), b[i] = __float2half((float)y);
        c[i] = __float2bfloat16((float)x), d[i] = __float2bfloat16((float)y);
    }
    __half *da, *db, *dout;
    __nv_bfloat16 *dc, *dd, *dout_b;
    int *dless;
    std::vector<int> less(N);
    CHECK(cudaMalloc(&da, N * 2));
    CHECK(cudaMalloc(&db, N * 2));
    CHECK(cudaMalloc(&dout, N * RESULTS * 2));
    CHECK(cudaMalloc(&dc, N * 2));
    CHECK(cudaMalloc(&dd, N * 2));
    CHECK(cudaMalloc(&dout_b, N * RESULTS * 2));
    CHECK(cudaMalloc(&dless, N * 4));
    CHECK(cudaMemcpy(da, a.data(), N * 2, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), N * 2, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dc, c.data(), N * 2, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dd, d.data(), N * 2, cudaMemcpyHostToDevice));
    halves<<<N / 128, 128>>>(da, db, dout, dless);
    brains<<<N / 128, 128>>>(dc, dd, dout_b);
    CHECK(cudaMemcpy(out.data(), dout, N * RESULTS * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(out_b.data(), dout_b, N * RESULTS * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(less.data(), dless, N * 4, cudaMemcpyDeviceToHost));
    auto larger = [](double x, double y) { return std::isnan(x) ? y : std::isnan(y) ? x : std::fmax(x, y); };
    auto smaller = [](double x, double y) { return std::isnan(x) ? y : std::isnan(y) ? x : std::fmin(x, y); };
    for (int i = 0; i < N; i++) {
        double x = __half2float(a[i]), y = __half2float(b[i]);
        double want[RESULTS] = {nearest_half(x + y), nearest_half(x * y), nearest_half(std::fma(x, y, x)), nearest_half(x - y), nearest_half(x * 2 + y), nearest_half(y * 2 + x), larger(x, y), std::fabs(x)};
        for (int k = 0; k < RESULTS; k++) {
            double got = __half2float(out[i * RESULTS + k]);
            REQUIRE(same(want[k], got), "half %g and %g, result %d: %g instead of %g", x, y, k, got, want[k]);
        }
        int flags = (x < y) + 2 * (x == x) + 4 * (x >= y) + 16 * std::isnan(x);
        REQUIRE((less[i] & ~8) == flags, "half %g and %g compare as %d, not %d", x, y, less[i], flags);
        x = __bfloat162float(c[i]), y = __bfloat162float(d[i]);
        float scaled = (float)x * 1.001f;
        uint32_t bits;
        memcpy(&bits, &scaled, 4);
        bits &= 0xffff0000u;
        float cut;
        memcpy(&cut, &bits, 4);
        double want_b[RESULTS] = {brain(x + y), brain(x * y), brain(std::fma(x, y, x)), brain(scaled), brain(x + y), brain(y + y), smaller(x, y), cut};
        for (int k = 0; k < RESULTS; k++) {
            double got = __bfloat162float(out_b[i * RESULTS + k]);
            REQUIRE(same(want_b[k], got), "bfloat16 %g and %g, result %d: %g instead of %g", x, y, k, got, want_b[k]);
        }
    }
    return pass("%d pairs, %d results of each kind", N, RESULTS);
}
