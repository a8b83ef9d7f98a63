// The first CUDA program of everyone: c = a + b, with a last block that is not full.
#define PROGRAM "vectorAdd"
#include "common.h"

#include <vector>

__global__ void vector_add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int n = options.full ? (1 << 24) + 77 : 20000 + 77;
    const size_t size = n * sizeof(float);
    Random random(options.seed);
    std::vector<float> a(n), b(n), c(n, -1.0f);
    for (int i = 0; i < n; i++) {
        a[i] = random.unit();
        b[i] = random.unit();
    }

    float *device_a, *device_b, *device_c;
    CHECK(cudaMalloc(&device_a, size));
    CHECK(cudaMalloc(&device_b, size));
    CHECK(cudaMalloc(&device_c, size));
    CHECK(cudaMemcpy(device_a, a.data(), size, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), size, cudaMemcpyHostToDevice));
    vector_add<<<(n + 255) / 256, 256>>>(device_a, device_b, device_c, n);
    LAUNCHED();
    CHECK(cudaMemcpy(c.data(), device_c, size, cudaMemcpyDeviceToHost));

    for (int i = 0; i < n; i++) REQUIRE(c[i] == a[i] + b[i], "element %d is %g, not %g", i, c[i], a[i] + b[i]);
    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_c));
    return pass("%d elements", n);
}
