// Managed variables: scalars, arrays and structures that host and device name alike, also through their symbols.
#define PROGRAM "managed_variables"
#include "common.h"

#include <dlfcn.h>

struct Pair {
    double a;
    int b[3];
};

__managed__ int counter = 40;
__managed__ float table[5000];
__managed__ Pair pair = {1.5, {1, 2, 3}};
__managed__ int *link;
__device__ int device_only = 7;

__global__ void work() {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 5000) table[i] = table[i] * 2 + i;
    if (i == 0) {
        counter += device_only;
        pair.b[1] = (int)(pair.a * 100);
        if (link) *link += 1;
    }
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    REQUIRE(counter == 40 && pair.a == 1.5 && pair.b[2] == 3 && table[4999] == 0, "before: %d %f %d", counter, pair.a, pair.b[2]);
    for (int i = 0; i < 5000; i++) table[i] = i;
    CHECK(cudaMallocManaged(&link, sizeof *link));
    *link = 1;
    for (int round = 0; round < 3; round++) {
        work<<<20, 256>>>();
        CHECK(cudaDeviceSynchronize());
        counter++;
    }
    REQUIRE(counter == 40 + 3 * 8, "the counter is %d", counter);
    REQUIRE(pair.b[0] == 1 && pair.b[1] == 150 && pair.b[2] == 3, "the pair is %d %d %d", pair.b[0], pair.b[1], pair.b[2]);
    REQUIRE(*link == 4, "what the link leads to is %d", *link);
    for (int i = 0; i < 5000; i++) REQUIRE(table[i] == 15.0f * i, "table[%d] is %f", i, table[i]);

    // By their symbols.
    int value = 0, *address;
    size_t size;
    CHECK(cudaMemcpyFromSymbol(&value, counter, sizeof value));
    REQUIRE(value == counter, "the symbol has %d", value);
    value = 99;
    CHECK(cudaMemcpyToSymbol(counter, &value, sizeof value));
    REQUIRE(counter == 99, "after a copy to the symbol it is %d", counter);
    CHECK(cudaGetSymbolAddress((void **)&address, counter));
    CHECK(cudaGetSymbolSize(&size, table));
    REQUIRE(address == &counter && size == sizeof table, "address %d, size %zu", address == &counter, size);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, &counter));
    REQUIRE(attributes.type == cudaMemoryTypeManaged && attributes.devicePointer == &counter, "its type is %d", attributes.type);
    CHECK(cudaFree(link));

    // After a reset they are still there, and kernels use them. What they hold until something is written is not promised: NVIDIA's
    // runtime was seen to keep it, and rgpu's begins anew. NVIDIA's inside the program does not ask for them again.
    if (!dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD)) return pass("scalars, an array, a structure, a pointer, symbols");
    CHECK(cudaDeviceReset());
    CHECK(cudaFree(nullptr));
    counter = 40, pair.a = 1.5, link = nullptr;
    work<<<20, 256>>>();
    CHECK(cudaDeviceSynchronize());
    REQUIRE(counter == 47 && pair.b[1] == 150, "a kernel after a reset: %d %d", counter, pair.b[1]);
    CHECK(cudaGetSymbolAddress((void **)&address, counter));
    REQUIRE(address == &counter, "a symbol after a reset");
    return pass("scalars, an array, a structure, a pointer, symbols, a reset");
}
