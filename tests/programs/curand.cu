// cuRAND from the toolkit: the same seeds give the same numbers, on the device and on the host; each distribution is what it
// says; generators that go on where they were.
#define PROGRAM "curand"
#include "toolkit.h"
#include <cmath>
#include <vector>

typedef struct Generator_ *Generator;

int main(int argc, char **argv) {
    parse_options(argc, argv);
    Toolkit rand("libcurand.so");
    auto create = rand.function<int (*)(Generator *, int)>("curandCreateGenerator");
    auto create_host = rand.function<int (*)(Generator *, int)>("curandCreateGeneratorHost");
    auto seed = rand.function<int (*)(Generator, unsigned long long)>("curandSetPseudoRandomGeneratorSeed");
    auto offset = rand.function<int (*)(Generator, unsigned long long)>("curandSetGeneratorOffset");
    auto words = rand.function<int (*)(Generator, unsigned *, size_t)>("curandGenerate");
    auto uniform = rand.function<int (*)(Generator, float *, size_t)>("curandGenerateUniform");
    auto normal = rand.function<int (*)(Generator, double *, size_t, double, double)>("curandGenerateNormalDouble");
    auto destroy = rand.function<int (*)(Generator)>("curandDestroyGenerator");
    const int n = 20000;
    unsigned *device;
    double *doubles;
    CHECK(cudaMalloc(&device, n * 4));
    CHECK(cudaMalloc(&doubles, n * 8));
    for (int kind : {101 /* XORWOW */, 121 /* MRG32K3A */, 161 /* PHILOX4_32_10 */}) {
        Generator on_device, on_host;
        ANSWERS(create(&on_device, kind));
        ANSWERS(create_host(&on_host, kind));
        ANSWERS(seed(on_device, 1234));
        ANSWERS(seed(on_host, 1234));
        std::vector<unsigned> got(n), want(n), again(n);
        ANSWERS(words(on_device, device, n));
        CHECK(cudaMemcpy(got.data(), device, n * 4, cudaMemcpyDeviceToHost));
        ANSWERS(words(on_host, want.data(), n));
        REQUIRE(got == want, "generator %d: device and host differ", kind);
        unsigned sum = 0;
        for (unsigned word : got) sum = sum * 31 + word;
        printf("%d: %08x\n", kind, sum);
        ANSWERS(offset(on_device, 0));
        ANSWERS(words(on_device, device, n));
        CHECK(cudaMemcpy(again.data(), device, n * 4, cudaMemcpyDeviceToHost));
        REQUIRE(got == again, "generator %d: set back, it gives others", kind);
        in_fresh_thread([&] { ANSWERS(uniform(on_device, (float *)device, n)); });
        std::vector<float> floats(n);
        CHECK(cudaMemcpy(floats.data(), device, n * 4, cudaMemcpyDeviceToHost));
        double mean = 0;
        for (float value : floats) {
            REQUIRE(value > 0 && value <= 1, "%f is uniform", value);
            mean += value / n;
        }
        REQUIRE(std::fabs(mean - 0.5) < 0.02, "the mean is %f", mean);
        ANSWERS(normal(on_device, doubles, n, 10, 3));
        std::vector<double> spread(n);
        CHECK(cudaMemcpy(spread.data(), doubles, n * 8, cudaMemcpyDeviceToHost));
        double first = 0, second = 0;
        for (double value : spread) first += value / n, second += (value - 10) * (value - 10) / n;
        REQUIRE(std::fabs(first - 10) < 0.2 && std::fabs(second - 9) < 0.6, "mean %f, variance %f", first, second);
        ANSWERS(destroy(on_device));
        ANSWERS(destroy(on_host));
    }
    return pass("three generators, device and host");
}
