// Pinned memory that kernels use and that is zero at first: the program clears it, leaves it alone or reads it, before or after a kernel writes there, and gets its address to a kernel that is running already.
#define PROGRAM "mapped_zeroes"
#include "common.h"

#include <atomic>
#include <cstring>

static const int WORDS = 1 << 20, STRIDE = 4099;

__host__ __device__ int written(int i) { return i * 3 + 1; }

// Counts the words that are not zero, and writes some.
__global__ void use(int *memory, int *found) {
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x)
        if (memory[i]) atomicAdd(found, 1);
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS / STRIDE; i += blockDim.x) memory[i * STRIDE] = written(i);
}

// Waits for the address of some memory and writes there.
__global__ void write_where_told(int *volatile *told) {
    while (!*told) {
    }
    __threadfence_system();
    int *memory = *told;
    for (int i = 0; i < WORDS / STRIDE; i++) memory[i * STRIDE] = written(i);
}

static int *mapped(size_t bytes) {
    int *memory;
    CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
    return memory;
}

// The words that a kernel has written are there, and all others are zero.
static void check(const char *what, const int *memory) {
    for (int i = 0; i < WORDS; i++) {
        int expected = i % STRIDE == 0 && i / STRIDE < WORDS / STRIDE ? written(i / STRIDE) : 0;
        REQUIRE(memory[i] == expected, "%s: word %d is %d instead of %d", what, i, memory[i], expected);
    }
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    // For counting what crosses the network.
    bool only_cleared = argc > 1 && !strcmp(argv[1], "cleared");
    int *found, count = -1;
    CHECK(cudaMalloc(&found, sizeof *found));
    CHECK(cudaMemset(found, 0, sizeof *found));
    CHECK(cudaDeviceSynchronize());
    int *cleared = mapped(WORDS * sizeof(int));
    memset(cleared, 0, WORDS * sizeof(int));
    use<<<1, 256>>>(cleared, found);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    REQUIRE(cleared[STRIDE] == written(1), "word %d is %d", STRIDE, cleared[STRIDE]);
    if (!only_cleared) {
        check("cleared", cleared);
        int *untouched = mapped(WORDS * sizeof(int)), *seen = mapped(WORDS * sizeof(int)), *marked = mapped(WORDS * sizeof(int));
        for (int i = 0; i < WORDS; i += 1024) REQUIRE(seen[i] == 0, "word %d is %d at first", i, seen[i]);
        marked[7] = 5;
        use<<<1, 256>>>(untouched, found);
        use<<<1, 256>>>(seen, found);
        CHECK(cudaDeviceSynchronize());
        check("untouched", untouched);
        check("seen", seen);
        CHECK(cudaMemcpy(&count, found, sizeof count, cudaMemcpyDeviceToHost));
        REQUIRE(count == 0, "kernels found %d words that were not zero", count);
        use<<<1, 256>>>(marked, found);
        CHECK(cudaDeviceSynchronize());
        REQUIRE(marked[7] == 5, "the program's word is %d", marked[7]);
        marked[7] = 0;
        check("marked", marked);
        CHECK(cudaMemcpy(&count, found, sizeof count, cudaMemcpyDeviceToHost));
        REQUIRE(count == 1, "kernels found %d words that were not zero instead of one", count);
        int *volatile *told = (int *volatile *)mapped(sizeof *told);
        *told = nullptr;
        write_where_told<<<1, 1>>>(told);
        CHECK(cudaGetLastError());
        int *later = mapped(WORDS * sizeof(int));
        std::atomic_thread_fence(std::memory_order_seq_cst);
        *told = later;
        CHECK(cudaDeviceSynchronize());
        check("told to a running kernel", later);
        for (int *memory : {untouched, seen, marked, (int *)told, later}) CHECK(cudaFreeHost(memory));
    }
    CHECK(cudaFreeHost(cleared));
    CHECK(cudaFree(found));
    return pass("cleared, read and left alone");
}
