// A kernel that is running on another stream sees what copies and fills have written, once the program knows that they are done and tells it.
#define PROGRAM "watched_copies"
#include "common.h"

#include <cuda.h>

#include <vector>

const int COUNT = 1 << 19;
const int ROUNDS = 20;

// Once the first word of `flags` names a round, checks that the values are that round's, and answers in the second.
__global__ void watch(volatile int *flags, const volatile int *values, int rounds, int *wrong) {
    for (int round = 1; round <= rounds; round++) {
        while (flags[0] < round) {
        }
        __threadfence_system();
        int value = round * 0x01010101;
        if (values[0] != value || values[COUNT - 1] != value) ++*wrong;
        __threadfence_system();
        flags[1] = round;
    }
}

enum Form { PAGEABLE, PAGEABLE_DEFAULT, PAGEABLE_ROWS, REGISTERED, FILL, DEVICE, FORMS };

int main() {
    const char *names[] = {"a pageable copy", "a pageable copy in the default stream", "pageable rows", "a registered copy",
                           "a fill of memory that synchronizes", "a copy to memory that synchronizes"};
    const size_t size = COUNT * sizeof(int);
    int *values, *synchronizing, *other, *wrong;
    volatile int *flags;
    CHECK(cudaHostAlloc((void **)&flags, 2 * sizeof(int), cudaHostAllocMapped));
    CHECK(cudaMalloc(&values, size));
    CHECK(cudaMalloc(&synchronizing, size));
    CHECK(cudaMalloc(&other, size));
    CHECK(cudaMalloc(&wrong, sizeof(int)));
    CHECK(cudaMemset(wrong, 0, sizeof(int)));
    unsigned on = 1;
    CUresult set = cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (CUdeviceptr)synchronizing);
    REQUIRE(set == CUDA_SUCCESS, "the attribute could not be set: %d", (int)set);
    std::vector<int> host(COUNT);
    cudaStream_t copying, watching;
    CHECK(cudaStreamCreateWithFlags(&copying, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&watching, cudaStreamNonBlocking));

    for (int form = 0; form < FORMS; form++) {
        if (form == REGISTERED) CHECK(cudaHostRegister(host.data(), size, 0));
        int *target = form == FILL || form == DEVICE ? synchronizing : values;
        // Only a few of these: other copies between device memories wait for nothing, as tests/calls.txt says.
        const int rounds = form == DEVICE ? 3 : ROUNDS;
        CHECK(cudaMemset(target, 0, size));
        flags[0] = flags[1] = 0;
        CHECK(cudaDeviceSynchronize());
        watch<<<1, 1, 0, watching>>>((int *)flags, target, rounds, wrong);
        for (int round = 1; round <= rounds; round++) {
            for (int &value : host) value = round * 0x01010101;
            const void *from = host.data();
            switch (form) {
            case PAGEABLE:
                CHECK(cudaMemcpyAsync(target, from, size, cudaMemcpyHostToDevice, copying));
                CHECK(cudaStreamSynchronize(copying));
                break;
            case PAGEABLE_DEFAULT:
                CHECK(cudaMemcpyAsync(target, from, size, cudaMemcpyHostToDevice, 0));
                CHECK(cudaStreamSynchronize(0));
                break;
            case PAGEABLE_ROWS:
                CHECK(cudaMemcpy2DAsync(target, size / 2, from, size / 2, size / 2, 2, cudaMemcpyHostToDevice, copying));
                CHECK(cudaStreamSynchronize(copying));
                break;
            case REGISTERED:
                CHECK(cudaMemcpy(target, from, size, cudaMemcpyHostToDevice));
                break;
            case FILL:
                CHECK(cudaMemset(target, round, size));
                break;
            case DEVICE:
                CHECK(cudaMemset(other, round, size));
                CHECK(cudaMemcpy(target, other, size, cudaMemcpyDeviceToDevice));
                break;
            }
            __atomic_store_n((int *)flags, round, __ATOMIC_SEQ_CST);
            while (flags[1] < round) REQUIRE(round == rounds || cudaStreamQuery(watching) == cudaErrorNotReady, "the kernel has ended");
        }
        CHECK(cudaDeviceSynchronize());
        int found = -1;
        CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
        REQUIRE(found == 0, "%s: the kernel found old values in %d of %d rounds", names[form], found, rounds);
    }
    CHECK(cudaHostUnregister(host.data()));
    return pass("%d forms, %d rounds", (int)FORMS, ROUNDS);
}
