// Complex numbers: CUDA's own and libcu++'s, in kernels, against the host's; a discrete transform and the Mandelbrot set.
#define PROGRAM "complex_numbers"
#include "common.h"
#include <cmath>
#include <complex>
#include <cuComplex.h>
#include <cuda/std/complex>
#include <vector>

constexpr int N = 64, SIDE = 48;

__global__ void transform(const cuDoubleComplex *in, cuDoubleComplex *out) {
    cuDoubleComplex sum = make_cuDoubleComplex(0, 0);
    for (int j = 0; j < N; j++) {
        double angle = -2 * 3.14159265358979323846 * (threadIdx.x * j % N) / N;
        sum = cuCfma(in[j], make_cuDoubleComplex(cos(angle), sin(angle)), sum);
    }
    out[threadIdx.x] = sum;
}
__global__ void algebra(const cuda::std::complex<float> *in, cuda::std::complex<float> *out, float *lengths) {
    int i = threadIdx.x;
    cuda::std::complex<float> a = in[i], b = in[(i + 1) % N];
    out[i] = (a * b + conj(a)) / b;
    lengths[i] = norm(a) + b.real();
}
__global__ void escape(int *steps) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, n = 0;
    // Steps of 1/16, so that the numbers of the first rounds are exact.
    cuFloatComplex c = make_cuFloatComplex((x - 32) / 16.0f, (y - 24) / 16.0f), z = make_cuFloatComplex(0, 0);
    while (n < 40 && __fadd_rn(__fmul_rn(z.x, z.x), __fmul_rn(z.y, z.y)) <= 4) {
        z = make_cuFloatComplex(__fadd_rn(__fsub_rn(__fmul_rn(z.x, z.x), __fmul_rn(z.y, z.y)), c.x), __fadd_rn(__fmul_rn(__fmul_rn(2, z.x), z.y), c.y));
        n++;
    }
    steps[y * SIDE + x] = n;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    std::vector<std::complex<double>> in(N), out(N);
    std::vector<std::complex<float>> small(N), mixed(N);
    std::vector<float> lengths(N);
    for (int i = 0; i < N; i++) {
        in[i] = {random.unit() - 0.5, random.unit() - 0.5};
        small[i] = {(float)random.below(100) / 8 + 1, (float)random.below(100) / 8 - 3};
    }
    cuDoubleComplex *a, *b;
    cuda::std::complex<float> *c, *d;
    float *e;
    int *steps;
    CHECK(cudaMalloc(&a, N * 16));
    CHECK(cudaMalloc(&b, N * 16));
    CHECK(cudaMalloc(&c, N * 8));
    CHECK(cudaMalloc(&d, N * 8));
    CHECK(cudaMalloc(&e, N * 4));
    CHECK(cudaMalloc(&steps, SIDE * SIDE * 4));
    CHECK(cudaMemcpy(a, in.data(), N * 16, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(c, small.data(), N * 8, cudaMemcpyHostToDevice));
    transform<<<1, N>>>(a, b);
    algebra<<<1, N>>>(c, d, e);
    escape<<<dim3(SIDE / 16, SIDE / 8), dim3(16, 8)>>>(steps);
    LAUNCHED();
    CHECK(cudaMemcpy(out.data(), b, N * 16, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(mixed.data(), d, N * 8, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lengths.data(), e, N * 4, cudaMemcpyDeviceToHost));
    for (int k = 0; k < N; k++) {
        std::complex<double> sum = 0;
        for (int j = 0; j < N; j++) sum += in[j] * std::polar(1.0, -2 * M_PI * (k * j % N) / N);
        REQUIRE(std::abs(sum - out[k]) < 1e-12, "element %d of the transform is off by %g", k, std::abs(sum - out[k]));
        std::complex<double> x = small[k], y = small[(k + 1) % N], want = (x * y + std::conj(x)) / y;
        REQUIRE(std::abs(want - (std::complex<double>)mixed[k]) < 1e-4 * std::abs(want) + 1e-5, "element %d of the algebra is off", k);
        REQUIRE(std::fabs(lengths[k] - (std::norm(x) + y.real())) < 1e-3, "length %d is %f", k, lengths[k]);
    }
    std::vector<int> got(SIDE * SIDE);
    CHECK(cudaMemcpy(got.data(), steps, got.size() * 4, cudaMemcpyDeviceToHost));
    for (int y = 0; y < SIDE; y += 2) {
        for (int x = 0; x < SIDE; x++) {
            volatile float cx = (x - 32) / 16.0f, cy = (y - 24) / 16.0f, zx = 0, zy = 0;
            int n = 0;
            while (n < 40) {
                volatile float xx = zx * zx, yy = zy * zy, length = xx + yy, double_x = 2 * zx;
                if (!(length <= 4)) break;
                volatile float next = xx - yy, product = double_x * zy;
                zx = next + cx, zy = product + cy;
                n++;
            }
            REQUIRE(got[y * SIDE + x] == n, "%d,%d takes %d steps, not %d", x, y, got[y * SIDE + x], n);
            putchar(n == 40 ? '#' : n > 6 ? '+' : n > 3 ? '.' : ' ');
        }
        putchar('\n');
    }
    return pass("a transform, algebra, a set of %d points", SIDE * SIDE);
}
