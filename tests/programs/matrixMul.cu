// Tiled matrix multiplication through shared memory with barriers; sizes that no tile divides, static and dynamic
// shared memory.
#define PROGRAM "matrixMul"
#include "common.h"

#include <cmath>
#include <vector>

constexpr int TILE = 16;

// c (m × n) = a (m × k) · b (k × n), row-major.
__global__ void multiply_static(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float tile_a[TILE][TILE];
    __shared__ float tile_b[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y;
    int column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += TILE) {
        int ka = start + threadIdx.x, kb = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// The same with its tiles in dynamic shared memory.
__global__ void multiply_dynamic(const float *a, const float *b, float *c, int m, int n, int k) {
    extern __shared__ float tiles[];
    const int tile = blockDim.x;
    float *tile_a = tiles;
    float *tile_b = tiles + tile * tile;
    int row = blockIdx.y * tile + threadIdx.y;
    int column = blockIdx.x * tile + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += tile) {
        int ka = start + threadIdx.x, kb = start + threadIdx.y;
        tile_a[threadIdx.y * tile + threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0.0f;
        tile_b[threadIdx.y * tile + threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < tile; i++) sum += tile_a[threadIdx.y * tile + i] * tile_b[i * tile + threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

static void compare(const char *which, const std::vector<float> &got, const std::vector<double> &want, int n, int k) {
    for (size_t i = 0; i < want.size(); i++) {
        // Each of k additions of products below 1 may lose half a unit in the last place of a sum below k.
        double allowed = 1.2e-7 * k * k;
        REQUIRE(std::fabs(got[i] - want[i]) <= allowed, "%s: element (%zu, %zu) is %.9g, not %.9g", which, i / n, i % n,
                got[i], want[i]);
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int m = options.full ? 1000 : 50, n = options.full ? 730 : 37, k = options.full ? 517 : 45;
    Random random(options.seed);
    std::vector<float> a(m * k), b(k * n), c(m * n);
    for (float &x : a) x = random.unit();
    for (float &x : b) x = random.unit();
    std::vector<double> want(m * n, 0.0);
    for (int row = 0; row < m; row++)
        for (int i = 0; i < k; i++)
            for (int column = 0; column < n; column++)
                want[row * n + column] += (double)a[row * k + i] * b[i * n + column];

    float *device_a, *device_b, *device_c;
    CHECK(cudaMalloc(&device_a, a.size() * sizeof(float)));
    CHECK(cudaMalloc(&device_b, b.size() * sizeof(float)));
    CHECK(cudaMalloc(&device_c, c.size() * sizeof(float)));
    CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof(float), cudaMemcpyHostToDevice));

    dim3 block(TILE, TILE), grid((n + TILE - 1) / TILE, (m + TILE - 1) / TILE);
    multiply_static<<<grid, block>>>(device_a, device_b, device_c, m, n, k);
    LAUNCHED();
    CHECK(cudaMemcpy(c.data(), device_c, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
    compare("static shared memory", c, want, n, k);

    CHECK(cudaMemset(device_c, 0xff, c.size() * sizeof(float)));
    const int tile = 8;
    multiply_dynamic<<<dim3((n + tile - 1) / tile, (m + tile - 1) / tile), dim3(tile, tile),
                       2 * tile * tile * sizeof(float)>>>(device_a, device_b, device_c, m, n, k);
    LAUNCHED();
    CHECK(cudaMemcpy(c.data(), device_c, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
    compare("dynamic shared memory", c, want, n, k);

    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_c));
    return pass("%d×%d · %d×%d, static and dynamic shared memory", m, k, k, n);
}
