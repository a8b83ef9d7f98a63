// Kernel templates over types, numbers and functors; structures and many parameters passed by value; local arrays;
// recursion-free device functions in every inlining; grids and blocks of three dimensions.
#define PROGRAM "templates"
#include "common.h"

#include <cmath>
#include <vector>

struct Square {
    template <typename T> __host__ __device__ T operator()(T x) const { return x * x; }
};

template <int N> struct Polynomial {
    int coefficients[N];
    template <typename T> __host__ __device__ T operator()(T x) const {
        T sum = 0;
        for (int i = N - 1; i >= 0; i--) sum = sum * x + (T)coefficients[i];
        return sum;
    }
};

template <typename T, int STRIDE, typename Function>
__global__ void transform(const T *input, T *output, int n, Function function) {
    int start = (blockIdx.x * blockDim.x + threadIdx.x) * STRIDE;
    for (int i = start; i < start + STRIDE && i < n; i++) output[i] = function(input[i]);
}

struct alignas(16) Large {
    long long values[40];
    char tag;
};

__global__ void many_parameters(char a, short b, int c, long long d, float e, double f, Large large, bool g, double *out) {
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = (double)d;
    out[4] = e;
    out[5] = f;
    long long sum = 0;
    for (int i = 0; i < 40; i++) sum += large.values[i];
    out[6] = (double)sum;
    out[7] = large.tag;
    out[8] = g ? 1 : 0;
}

__device__ __noinline__ unsigned mix(unsigned x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Counts the nibbles of 8 mixed values in an array that lives in local memory, indexed by data.
__global__ void histogram_in_local_memory(const unsigned *input, unsigned *output, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned bins[16] = {0};
    unsigned x = input[i];
    for (int round = 0; round < 8; round++) {
        x = mix(x);
        bins[x & 15] += round + 1;
    }
    unsigned result = 0;
    for (int bin = 0; bin < 16; bin++) result = result * 31 + bins[bin];
    output[i] = result;
}

static unsigned histogram_on_host(unsigned x) {
    unsigned bins[16] = {0};
    for (int round = 0; round < 8; round++) {
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x *= 0x846ca68bu;
        x ^= x >> 16;
        bins[x & 15] += round + 1;
    }
    unsigned result = 0;
    for (unsigned bin : bins) result = result * 31 + bin;
    return result;
}

__global__ void three_dimensions(int *output, int nx, int ny, int nz) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x < nx && y < ny && z < nz)
        output[(z * ny + y) * nx + x] = x + 1000 * y + 1000000 * z + (int)(gridDim.x * gridDim.y * gridDim.z);
}

template <typename T, int STRIDE, typename Function>
static void check_transform(const char *what, Random &random, Function function) {
    const int n = 777;
    std::vector<T> input(n), output(n);
    for (T &x : input) x = (T)((int)random.below(200) - 100);
    T *device;
    CHECK(cudaMalloc(&device, 2 * n * sizeof(T)));
    CHECK(cudaMemcpy(device, input.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    int threads = (n + STRIDE - 1) / STRIDE;
    transform<T, STRIDE><<<(threads + 63) / 64, 64>>>(device, device + n, n, function);
    LAUNCHED();
    CHECK(cudaMemcpy(output.data(), device + n, n * sizeof(T), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        double want = (double)function(input[i]), got = (double)output[i];
        REQUIRE(std::fabs(want - got) <= 1e-6 * std::fabs(want), "%s: element %d is %.9g, not %.9g", what, i, got, want);
    }
    CHECK(cudaFree(device));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    Polynomial<3> parabola = {{7, -3, 2}};
    Polynomial<5> quartic = {{1, 0, -2, 3, 1}};
    check_transform<int, 1>("int, square", random, Square());
    check_transform<float, 4>("float, square", random, Square());
    check_transform<double, 3>("double, parabola", random, parabola);
    check_transform<long long, 2>("long long, quartic", random, quartic);
    check_transform<short, 1>("short, parabola", random, Polynomial<2>{{5, 3}});
    check_transform<unsigned char, 5>("unsigned char, square", random, Square());

    double *out, results[9];
    CHECK(cudaMalloc(&out, sizeof results));
    Large large;
    long long sum = 0;
    for (int i = 0; i < 40; i++) sum += large.values[i] = (long long)random.below(1 << 30) << 12;
    large.tag = 'L';
    many_parameters<<<1, 1>>>('a', -2, 3, -40000000000ll, 5.5f, 6.25, large, true, out);
    LAUNCHED();
    CHECK(cudaMemcpy(results, out, sizeof results, cudaMemcpyDeviceToHost));
    const double want[] = {'a', -2, 3, -40000000000.0, 5.5, 6.25, (double)sum, 'L', 1};
    for (int i = 0; i < 9; i++) REQUIRE(results[i] == want[i], "parameter %d arrived as %g, not %g", i, results[i], want[i]);

    const int n = 600;
    std::vector<unsigned> input(n), output(n);
    random.fill(input.data(), n * sizeof(unsigned));
    unsigned *device;
    CHECK(cudaMalloc(&device, 2 * n * sizeof(unsigned)));
    CHECK(cudaMemcpy(device, input.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));
    histogram_in_local_memory<<<(n + 63) / 64, 64>>>(device, device + n, n);
    LAUNCHED();
    CHECK(cudaMemcpy(output.data(), device + n, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++)
        REQUIRE(output[i] == histogram_on_host(input[i]), "histogram %d is %u, not %u", i, output[i], histogram_on_host(input[i]));

    const int nx = 13, ny = 7, nz = 5;
    std::vector<int> cube(nx * ny * nz);
    int *device_cube;
    CHECK(cudaMalloc(&device_cube, cube.size() * sizeof(int)));
    dim3 block(8, 4, 2), grid(2, 2, 3);
    three_dimensions<<<grid, block>>>(device_cube, nx, ny, nz);
    LAUNCHED();
    CHECK(cudaMemcpy(cube.data(), device_cube, cube.size() * sizeof(int), cudaMemcpyDeviceToHost));
    for (int z = 0; z < nz; z++)
        for (int y = 0; y < ny; y++)
            for (int x = 0; x < nx; x++)
                REQUIRE(cube[(z * ny + y) * nx + x] == x + 1000 * y + 1000000 * z + 12, "cell (%d, %d, %d) is %d", x, y, z,
                        cube[(z * ny + y) * nx + x]);
    CHECK(cudaFree(out));
    CHECK(cudaFree(device));
    CHECK(cudaFree(device_cube));
    return pass("6 instantiations, 9 parameters, local arrays, three dimensions");
}
