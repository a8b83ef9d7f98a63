// Memory is unmapped while a kernel runs, which ends only after another thread has copied to other mapped memory.
#define PROGRAM "vmm_unmap"
#include "driver.h"

#include <atomic>
#include <chrono>
#include <thread>

__global__ void wait_for(volatile int *flag) {
    while (*flag == 0) {
    }
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CHECK(cudaFree(nullptr));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t granule = 0;
    DRIVER(cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at[2];
    CUmemGenericAllocationHandle memory[2];
    for (int i = 0; i < 2; i++) {
        DRIVER(cuMemAddressReserve(&at[i], granule, 0, 0, 0));
        DRIVER(cuMemCreate(&memory[i], granule, &prop, 0));
        DRIVER(cuMemMap(at[i], granule, 0, memory[i], 0));
        DRIVER(cuMemSetAccess(at[i], granule, &access, 1));
    }
    volatile int *flag;
    CHECK(cudaHostAlloc((void **)&flag, 4, cudaHostAllocMapped));
    *flag = 0;
    cudaStream_t waiting, copying;
    CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&copying, cudaStreamNonBlocking));
    CHECK(cudaMemset((void *)at[1], 0, granule));
    CHECK(cudaDeviceSynchronize());
    wait_for<<<1, 1, 0, waiting>>>(flag);
    LAUNCHED();

    static std::atomic<bool> unmapping{false}, over{false};
    int value = 5, got = 0;
    std::thread other([&] {
        while (!unmapping) std::this_thread::yield();
        // Most likely the other thread waits by then.
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        CHECK(cudaMemcpyAsync((void *)at[1], &value, 4, cudaMemcpyHostToDevice, copying));
        *flag = 1;
    });
    std::thread([] {
        for (int i = 0; i < 3000 && !over; i++) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        if (!over) fail("the copy waits for the other thread");
    }).detach();
    unmapping = true;
    DRIVER(cuMemUnmap(at[0], granule));
    other.join();
    REQUIRE(cuMemUnmap(at[0], granule) == CUDA_SUCCESS, "addresses without memory may be unmapped");
    CHECK(cudaDeviceSynchronize());
    over = true;
    CHECK(cudaMemcpy(&got, (void *)at[1], 4, cudaMemcpyDeviceToHost));
    REQUIRE(got == value, "copied %d", got);
    DRIVER(cuMemUnmap(at[1], granule));
    for (int i = 0; i < 2; i++) {
        DRIVER(cuMemRelease(memory[i]));
        DRIVER(cuMemAddressFree(at[i], granule));
    }
    REQUIRE(cuMemUnmap(at[0], granule) == CUDA_ERROR_INVALID_VALUE, "addresses that are not reserved are unmapped");
    CHECK(cudaFreeHost((void *)flag));
    return pass("a copy beside it");
}
