// Constant and device variables: their initial values, and reading and writing them from the host by symbol and by
// address, whole and in part.
#define PROGRAM "globals"
#include "common.h"

#include <vector>

struct Mixed {
    char c;
    double d;
    short s[3];
};

__constant__ float coefficients[16] = {1.5f, 2.5f, 3.5f};
__constant__ int shift = 100;
__device__ int counter = 42;
__device__ int table[256];
__device__ Mixed mixed = {'x', 2.25, {1, -2, 3}};
__device__ int *pointer = nullptr;
__device__ int *into_table = &table[7];
static __device__ unsigned char bytes[33] = {1, 2, 3, 4, 5, 6, 7};

__global__ void use_constants(const float *input, float *output, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) output[i] = input[i] * coefficients[i % 16] + shift;
}

__global__ void use_variables(int addend) {
    int i = threadIdx.x;
    table[i] = table[i] * 2 + addend;
    atomicAdd(&counter, 1);
    if (i == 0) {
        mixed.c = mixed.c + 1;
        mixed.d = mixed.d * mixed.s[1];
        for (int j = 0; j < 33; j++) bytes[j] = bytes[j] + 1;
        if (pointer) *pointer = counter > 0 ? 1234 : 0;
    }
}

__global__ void through_initial_address() { *into_table = -7; }

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);

    int host_counter;
    CHECK(cudaMemcpyFromSymbol(&host_counter, counter, sizeof counter));
    REQUIRE(host_counter == 42, "the counter begins at %d, not 42", host_counter);
    Mixed host_mixed;
    CHECK(cudaMemcpyFromSymbol(&host_mixed, mixed, sizeof mixed));
    REQUIRE(host_mixed.c == 'x' && host_mixed.d == 2.25 && host_mixed.s[1] == -2, "a structure lost its initial value");
    float host_coefficients[16];
    CHECK(cudaMemcpyFromSymbol(host_coefficients, coefficients, sizeof coefficients));
    REQUIRE(host_coefficients[1] == 2.5f && host_coefficients[3] == 0.0f, "a constant array lost its initial values");

    size_t size;
    CHECK(cudaGetSymbolSize(&size, table));
    REQUIRE(size == sizeof(int) * 256, "the table has %zu bytes", size);
    CHECK(cudaGetSymbolSize(&size, bytes));
    REQUIRE(size == 33, "the bytes are %zu", size);

    // Constants, written whole and then in part.
    for (float &x : host_coefficients) x = random.unit();
    CHECK(cudaMemcpyToSymbol(coefficients, host_coefficients, sizeof coefficients));
    host_coefficients[5] = 9.0f;
    host_coefficients[6] = 10.0f;
    CHECK(cudaMemcpyToSymbol(coefficients, &host_coefficients[5], 2 * sizeof(float), 5 * sizeof(float)));
    int host_shift = -3;
    CHECK(cudaMemcpyToSymbolAsync(shift, &host_shift, sizeof shift, 0, cudaMemcpyHostToDevice, 0));
    const int n = 500;
    std::vector<float> input(n), output(n);
    for (float &x : input) x = random.unit();
    float *device;
    CHECK(cudaMalloc(&device, 2 * n * sizeof(float)));
    CHECK(cudaMemcpy(device, input.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    use_constants<<<5, 100>>>(device, device + n, n);
    LAUNCHED();
    CHECK(cudaMemcpy(output.data(), device + n, n * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        float want = input[i] * host_coefficients[i % 16] + host_shift, difference = output[i] - want;
        REQUIRE(difference < 1e-5f && difference > -1e-5f, "element %d is %g, not %g", i, output[i], want);
    }

    // Device variables, by symbol, by address, and through a pointer that is itself a device variable.
    std::vector<int> host_table(256), got(256);
    for (int &x : host_table) x = (int)random.below(1000000);
    void *address;
    CHECK(cudaGetSymbolAddress(&address, table));
    CHECK(cudaMemcpy(address, host_table.data(), 128 * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyToSymbol(table, &host_table[128], 128 * sizeof(int), 128 * sizeof(int)));
    int *cell;
    CHECK(cudaMalloc(&cell, sizeof(int)));
    CHECK(cudaMemcpyToSymbol(pointer, &cell, sizeof cell));
    use_variables<<<1, 256>>>(11);
    LAUNCHED();
    CHECK(cudaMemcpyFromSymbolAsync(got.data(), table, 256 * sizeof(int), 0, cudaMemcpyDeviceToHost, 0));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 256; i++)
        REQUIRE(got[i] == host_table[i] * 2 + 11, "table[%d] is %d, not %d", i, got[i], host_table[i] * 2 + 11);
    CHECK(cudaMemcpyFromSymbol(&host_counter, counter, sizeof counter));
    REQUIRE(host_counter == 42 + 256, "the counter is %d, not %d", host_counter, 42 + 256);
    CHECK(cudaMemcpyFromSymbol(&host_mixed, mixed, sizeof mixed));
    REQUIRE(host_mixed.c == 'y' && host_mixed.d == -4.5, "the structure was not changed as it should be");
    unsigned char host_bytes[33];
    CHECK(cudaMemcpyFromSymbol(host_bytes, bytes, 33));
    for (int j = 0; j < 33; j++) REQUIRE(host_bytes[j] == (j < 7 ? j + 2 : 1), "byte %d is %d", j, host_bytes[j]);
    int host_cell;
    CHECK(cudaMemcpy(&host_cell, cell, sizeof host_cell, cudaMemcpyDeviceToHost));
    REQUIRE(host_cell == 1234, "the write through the device's pointer left %d", host_cell);

    // A variable whose initial value is another's address.
    through_initial_address<<<1, 1>>>();
    LAUNCHED();
    CHECK(cudaMemcpyFromSymbol(&host_cell, table, sizeof(int), 7 * sizeof(int)));
    REQUIRE(host_cell == -7, "a pointer initialised with an address wrote elsewhere: table[7] is %d", host_cell);

    CHECK(cudaFree(cell));
    CHECK(cudaFree(device));
    return pass("constants and device variables by symbol and by address");
}
