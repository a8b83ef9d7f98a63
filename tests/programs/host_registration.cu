// Memory of the program's own, registered: flags and what is told of them, overlaps and their errors, parts, copies and kernels
// that use it, and memory pinned by allocation beside it.
#define PROGRAM "host_registration"
#include "cases.h"
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

constexpr size_t PAGE = 4096, SIZE = 64 * PAGE;

int main(int argc, char **argv) {
    parse_options(argc, argv);
    char *room = (char *)mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(room != MAP_FAILED, "mmap failed");
    unsigned flags = 99;
    // Not at page boundaries, and then told whole.
    RETURNS(cudaSuccess, cudaHostRegister(room + 100, 10 * PAGE, cudaHostRegisterPortable));
    RETURNS(cudaSuccess, cudaHostGetFlags(&flags, room + 100));
    printf("registered portable: %u", flags);
    RETURNS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(room + 100, 10 * PAGE, cudaHostRegisterDefault));
    RETURNS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(room + 5 * PAGE, PAGE, cudaHostRegisterDefault));
    RETURNS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(room + 5 * PAGE, 20 * PAGE, cudaHostRegisterDefault));
    RETURNS(cudaErrorInvalidValue, cudaHostUnregister(room + 5 * PAGE));
    RETURNS(cudaSuccess, cudaHostRegister(room + 20 * PAGE, 4 * PAGE, cudaHostRegisterMapped));
    RETURNS(cudaSuccess, cudaHostGetFlags(&flags, room + 20 * PAGE));
    printf(", mapped: %u", flags);

    char *device, *seen = nullptr;
    RETURNS(cudaSuccess, cudaMalloc(&device, SIZE));
    for (size_t i = 0; i < SIZE; i++) room[i] = (char)(i * 7 + (i >> 12));
    RETURNS(cudaSuccess, cudaHostGetDevicePointer(&seen, room + 20 * PAGE, 0));
    TRUE_THAT(seen == room + 20 * PAGE);
    RETURNS(cudaErrorInvalidValue, cudaHostGetDevicePointer(&seen, room + 40 * PAGE, 0));
    RETURNS(cudaErrorInvalidValue, cudaHostGetDevicePointer(&seen, room + 20 * PAGE, 5));
    // Copies: inside, from registered to pageable at once, and back.
    RETURNS(cudaSuccess, cudaMemcpyAsync(device, room + 100, 10 * PAGE, cudaMemcpyHostToDevice, 0));
    RETURNS(cudaSuccess, cudaMemcpyAsync(device + 10 * PAGE, room + 20 * PAGE, 4 * PAGE, cudaMemcpyDefault, 0));
    RETURNS(cudaSuccess, cudaMemcpyAsync(room + 30 * PAGE, device, 14 * PAGE, cudaMemcpyDeviceToHost, 0));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    TRUE_THAT(memcmp(room + 30 * PAGE, room + 100, 10 * PAGE) == 0);
    TRUE_THAT(memcmp(room + 40 * PAGE, room + 20 * PAGE, 4 * PAGE) == 0);
    RETURNS(cudaSuccess, cudaMemsetAsync(device, 0x5a, PAGE, 0));
    RETURNS(cudaSuccess, cudaMemcpyAsync(room + 20 * PAGE, device, PAGE, cudaMemcpyDeviceToHost, 0));
    RETURNS(cudaSuccess, cudaStreamSynchronize(0));
    TRUE_THAT(room[20 * PAGE] == 0x5a && room[21 * PAGE - 1] == 0x5a);

    RETURNS(cudaSuccess, cudaHostUnregister(room + 100));
    RETURNS(cudaSuccess, cudaHostUnregister(room + 20 * PAGE));
    RETURNS(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(room + 20 * PAGE));
    RETURNS(cudaErrorInvalidValue, cudaHostGetFlags(&flags, room));
    // Registered over what were two.
    RETURNS(cudaSuccess, cudaHostRegister(room, SIZE, cudaHostRegisterDefault));
    RETURNS(cudaSuccess, cudaMemcpy(device, room, SIZE, cudaMemcpyHostToDevice));
    RETURNS(cudaSuccess, cudaHostUnregister(room));

    // Read only, if the device can.
    int read_only = 0;
    RETURNS(cudaSuccess, cudaDeviceGetAttribute(&read_only, cudaDevAttrHostRegisterReadOnlySupported, 0));
    printf("; read only: %d", read_only);
    RETURNS(cudaErrorInvalidValue, cudaHostRegister(room, PAGE, 0x80));
    RETURNS(cudaErrorInvalidValue, cudaHostRegister(nullptr, PAGE, 0));
    // A file that is mapped for reading, as llama.cpp registers a model.
    int file = memfd_create("model", 0);
    TRUE_THAT(file >= 0 && write(file, room, SIZE) == (ssize_t)SIZE);
    char *model = (char *)mmap(nullptr, SIZE, PROT_READ, MAP_SHARED, file, 0);
    REQUIRE(model != MAP_FAILED, "mmap of a file failed");
    cudaError_t registered = cudaHostRegister(model, SIZE, cudaHostRegisterPortable | cudaHostRegisterReadOnly);
    TRUE_THAT(registered == cudaSuccess || (!read_only && registered == cudaErrorNotSupported));
    if (registered == cudaSuccess) {
        RETURNS(cudaSuccess, cudaMemsetAsync(device, 0, SIZE, 0));
        RETURNS(cudaSuccess, cudaMemcpyAsync(device, model, SIZE, cudaMemcpyHostToDevice, 0));
        std::vector<char> back(SIZE);
        RETURNS(cudaSuccess, cudaMemcpy(back.data(), device, SIZE, cudaMemcpyDeviceToHost));
        TRUE_THAT(memcmp(back.data(), model, SIZE) == 0);
        RETURNS(cudaSuccess, cudaHostUnregister(model));
    } else {
        cudaGetLastError();
    }
    munmap(model, SIZE);
    close(file);

    // By allocation.
    for (unsigned wanted : {cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped, cudaHostAllocWriteCombined, cudaHostAllocPortable | cudaHostAllocMapped}) {
        char *pinned;
        RETURNS(cudaSuccess, cudaHostAlloc(&pinned, 3 * PAGE, wanted));
        RETURNS(cudaSuccess, cudaHostGetFlags(&flags, pinned));
        printf("; %u: %u", wanted, flags);
        RETURNS(cudaErrorInvalidValue, cudaHostRegister(pinned, PAGE, 0));
        RETURNS(cudaErrorInvalidValue, cudaHostUnregister(pinned));
        RETURNS(cudaSuccess, cudaFreeHost(pinned));
    }
    printf("\n");
    char *none;
    RETURNS(cudaErrorInvalidValue, cudaHostAlloc(&none, PAGE, 0x80));
    RETURNS(cudaErrorMemoryAllocation, cudaHostAlloc(&none, (size_t)1 << 55, 0));
    RETURNS(cudaSuccess, cudaFree(device));
    munmap(room, SIZE);
    return verdict();
}
