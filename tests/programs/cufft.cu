// cuFFT from the toolkit: transforms of one and two dimensions there and back, batches, real input, compared with the sums.
#define PROGRAM "cufft"
#include "toolkit.h"
#include <cmath>
#include <complex>
#include <vector>

typedef std::complex<double> Number;

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Toolkit fft("libcufft.so");
    auto plan_1d = fft.function<int (*)(int *, int, int, int)>("cufftPlan1d");
    auto plan_2d = fft.function<int (*)(int *, int, int, int)>("cufftPlan2d");
    auto run = fft.function<int (*)(int, void *, void *, int)>("cufftExecZ2Z");
    auto run_real = fft.function<int (*)(int, void *, void *)>("cufftExecD2Z");
    auto in_stream = fft.function<int (*)(int, cudaStream_t)>("cufftSetStream");
    auto destroy = fft.function<int (*)(int)>("cufftDestroy");
    const int Z2Z = 0x69, D2Z = 0x6a, FORWARD = -1, INVERSE = 1;
    Random random(options.seed);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int plan;
    for (int n : {16, 60, 97, 1024}) {
        const int batch = 3;
        std::vector<Number> in(n * batch), out(n * batch), back(n * batch);
        for (Number &value : in) value = {random.unit() - 0.5, random.unit() - 0.5};
        Number *a, *b;
        CHECK(cudaMalloc(&a, in.size() * 16));
        CHECK(cudaMalloc(&b, in.size() * 16));
        CHECK(cudaMemcpy(a, in.data(), in.size() * 16, cudaMemcpyHostToDevice));
        ANSWERS(plan_1d(&plan, n, Z2Z, batch));
        ANSWERS(in_stream(plan, stream));
        in_fresh_thread([&] { ANSWERS(run(plan, a, b, FORWARD)); });
        CHECK(cudaMemcpyAsync(out.data(), b, in.size() * 16, cudaMemcpyDeviceToHost, stream));
        ANSWERS(run(plan, b, b, INVERSE));
        CHECK(cudaMemcpyAsync(back.data(), b, in.size() * 16, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int row = 0; row < batch; row++)
            for (int k = 0; k < n; k += 1 + n / 20) {
                Number sum = 0;
                for (int j = 0; j < n; j++) sum += in[row * n + j] * std::polar(1.0, -2 * M_PI * (double)((long long)j * k % n) / n);
                REQUIRE(std::abs(sum - out[row * n + k]) < 1e-9 * n, "n %d: element %d is off by %g", n, k, std::abs(sum - out[row * n + k]));
            }
        for (int i = 0; i < n * batch; i++) REQUIRE(std::abs(back[i] / (double)n - in[i]) < 1e-12 * n, "n %d: there and back is off at %d", n, i);
        ANSWERS(destroy(plan));
        CHECK(cudaFree(a));
        CHECK(cudaFree(b));
    }
    // Two dimensions, of real input: one wave is one peak and its mirror.
    const int h = 24, w = 40;
    std::vector<double> wave(h * w);
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++) wave[y * w + x] = std::cos(2 * M_PI * (3.0 * x / w + 5.0 * y / h));
    double *real;
    Number *spectrum;
    std::vector<Number> got(h * (w / 2 + 1));
    CHECK(cudaMalloc(&real, wave.size() * 8));
    CHECK(cudaMalloc(&spectrum, got.size() * 16));
    CHECK(cudaMemcpy(real, wave.data(), wave.size() * 8, cudaMemcpyHostToDevice));
    ANSWERS(plan_2d(&plan, h, w, D2Z));
    in_fresh_thread([&] { ANSWERS(run_real(plan, real, spectrum)); });
    CHECK(cudaMemcpy(got.data(), spectrum, got.size() * 16, cudaMemcpyDeviceToHost));
    for (int y = 0; y < h; y++)
        for (int x = 0; x <= w / 2; x++) {
            double peak = x == 3 && y == 5 ? h * w / 2.0 : 0;
            REQUIRE(std::abs(got[y * (w / 2 + 1) + x] - peak) < 1e-9 * h * w, "%d,%d of the spectrum is %f", x, y, std::abs(got[y * (w / 2 + 1) + x]));
        }
    ANSWERS(destroy(plan));
    return pass("four lengths in batches, a wave in two dimensions");
}
