// Two registered ranges in neighboring pages, both used by kernels; one is unregistered, and the other is used on.
#define PROGRAM "registered_neighbors"
#include "common.h"

__global__ void add(int *p, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i]++;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    char *room = (char *)aligned_alloc(4096, 3 * 4096);
    memset(room, 0, 3 * 4096);
    int *below = (int *)(room + 1000), *page = (int *)(room + 4096), *above = (int *)(room + 2 * 4096);
    for (int *other : {below, above}) {
        CHECK(cudaHostRegister(page, 4096, cudaHostRegisterDefault));
        CHECK(cudaHostRegister(other, 400, cudaHostRegisterDefault));
        int start = page[0];
        add<<<1, 32>>>(page, 1024);
        add<<<1, 32>>>(other, 100);
        CHECK(cudaDeviceSynchronize());
        REQUIRE(other[0] == 1 && other[99] == 1, "the other range: %d, %d", other[0], other[99]);
        CHECK(cudaHostUnregister(other));
        for (int round = 2; round < 5; round++) {
            add<<<1, 32>>>(page, 1024);
            CHECK(cudaDeviceSynchronize());
            REQUIRE(page[0] == start + round && page[1023] == start + round, "after kernel %d: %d", round, page[0] - start);
        }
        CHECK(cudaHostUnregister(page));
        REQUIRE(page[0] == start + 4 && other[99] == 1, "at the end: %d", page[0] - start);
    }
    return pass("below and above");
}
