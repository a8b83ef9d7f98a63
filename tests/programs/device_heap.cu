// malloc and free in kernels: lists that one kernel builds, another reads and a third frees; memory for each thread; and NULL
// when the heap is used up, and room again when it was freed.
#define PROGRAM "device_heap"
#include "common.h"

struct Node {
    int value;
    Node *next;
};

constexpr int LISTS = 64, LENGTH = 20;

__global__ void build(Node **heads) {
    Node *head = nullptr;
    for (int i = 0; i < LENGTH; i++) {
        Node *node = (Node *)malloc(sizeof(Node));
        if (!node) return;
        *node = {(int)threadIdx.x * 1000 + i, head};
        head = node;
    }
    heads[threadIdx.x] = head;
}

__global__ void sum(Node **heads, int *sums) {
    int total = 0;
    for (Node *node = heads[threadIdx.x]; node; node = node->next) total += node->value;
    sums[threadIdx.x] = total;
}

__global__ void release(Node **heads) {
    for (Node *node = heads[threadIdx.x], *next; node; node = next) {
        next = node->next;
        free(node);
    }
    heads[threadIdx.x] = nullptr;
}

__global__ void scratch(int *wrong) {
    int n = 1 + threadIdx.x % 37;
    int *mine = (int *)malloc(n * sizeof(int));
    double *pair = new double[2];
    if (!mine || !pair || ((size_t)mine & 15) || ((size_t)pair & 15)) atomicAdd(wrong, 1);
    if (mine && pair) {
        for (int i = 0; i < n; i++) mine[i] = threadIdx.x * 100 + i;
        pair[0] = threadIdx.x, pair[1] = blockIdx.x;
        __syncwarp();
        for (int i = 0; i < n; i++)
            if (mine[i] != (int)threadIdx.x * 100 + i) atomicAdd(wrong, 1);
        if (pair[0] != threadIdx.x || pair[1] != blockIdx.x) atomicAdd(wrong, 1);
    }
    free(mine);
    delete[] pair;
    free(nullptr);
}

struct Made {
    float a, b;
    __device__ Made() : a(1), b(2) {}
};

struct Ended {
    double a;
    int *ended;
    __device__ Ended() : a(3), ended(nullptr) {}
    __device__ ~Ended() {
        if (ended) atomicAdd(ended, 1);
    }
};

// Arrays of what has a constructor, and a destructor too: nvcc notes their lengths, the former's before the memory that malloc gives.
__global__ void arrays(int *ended, int *wrong) {
    int n = threadIdx.x % 5 + 1;
    Made *made = new Made[n];
    Ended *end = new Ended[n];
    Ended *one = new Ended;
    for (int i = 0; i < n; i++) {
        if (made[i].a != 1 || made[i].b != 2 || end[i].a != 3) atomicAdd(wrong, 1);
        end[i].ended = ended;
    }
    one->ended = ended;
    delete[] end;
    delete one;
    delete[] made;
}

__global__ void exhaust(char **chunks, int *count, int most) {
    int n = 0;
    while (n < most && (chunks[n] = (char *)malloc(1 << 20))) {
        chunks[n][0] = 1, chunks[n][(1 << 20) - 1] = 2;
        n++;
    }
    *count = n;
    for (int i = 0; i < n; i++) free(chunks[i]);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    // Before any kernel that uses the heap.
    CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));
    Node **heads;
    int *sums, host[LISTS], *wrong, zero = 0, got;
    CHECK(cudaMalloc(&heads, LISTS * sizeof *heads));
    CHECK(cudaMalloc(&sums, sizeof host));
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(heads, 0, LISTS * sizeof *heads));
    for (int round = 0; round < 3; round++) {
        build<<<1, LISTS>>>(heads);
        sum<<<1, LISTS>>>(heads, sums);
        CHECK(cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < LISTS; i++) {
            int want = LENGTH * i * 1000 + LENGTH * (LENGTH - 1) / 2;
            REQUIRE(host[i] == want, "list %d comes to %d, not %d", i, host[i], want);
        }
        release<<<1, LISTS>>>(heads);
    }
    CHECK(cudaMemcpy(wrong, &zero, sizeof zero, cudaMemcpyHostToDevice));
    scratch<<<4, 128>>>(wrong);
    CHECK(cudaMemcpy(&got, wrong, sizeof got, cudaMemcpyDeviceToHost));
    REQUIRE(got == 0, "%d threads had no memory of their own", got);

    CHECK(cudaMemset(sums, 0, sizeof(int)));
    arrays<<<3, 50>>>(sums, wrong);
    CHECK(cudaMemcpy(&got, wrong, sizeof got, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(host, sums, sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(got == 0 && host[0] == 3 * (10 * 15 + 50), "%d wrong elements of arrays, %d ended", got, host[0]);

    char **chunks;
    int first = 0;
    CHECK(cudaMalloc(&chunks, 64 * sizeof *chunks));
    for (int round = 0; round < 3; round++) {
        exhaust<<<1, 1>>>(chunks, wrong, 64);
        CHECK(cudaMemcpy(&got, wrong, sizeof got, cudaMemcpyDeviceToHost));
        REQUIRE(got >= 8 && got <= 16, "%d MiB from a heap of 16 MiB", got);
        if (round == 0) first = got;
        REQUIRE(got == first, "%d MiB after %d MiB were freed", got, first);
    }
    return pass("%d lists, memory for each thread, a heap used up", LISTS);
}
