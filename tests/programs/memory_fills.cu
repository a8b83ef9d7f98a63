// Fills of memory: bytes, halves and words, at odd places and of odd sizes, rows apart, in streams, of pinned and managed memory;
// and nothing beside them touched.
#define PROGRAM "memory_fills"
#include "cases.h"
#include <cuda.h>
#include <vector>

typedef std::vector<unsigned char> Bytes;

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const size_t size = 64 << 10;
    unsigned char *device, *pinned, *managed;
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaMalloc(&device, size));
    RETURNS(cudaSuccess, cudaMallocHost(&pinned, size));
    RETURNS(cudaSuccess, cudaMallocManaged(&managed, size));
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (unsigned char *memory : {device, pinned, managed}) {
        Bytes want(size), got(size);
        random.fill(want.data(), size);
        RETURNS(cudaSuccess, cudaMemcpy(memory, want.data(), size, cudaMemcpyDefault));
        RETURNS(cudaSuccess, cudaDeviceSynchronize());
        for (int round = 0; round < 40; round++) {
            unsigned unit = 1u << random.below(3), value = (unsigned)random.next();
            bool rows = random.below(2), async = random.below(2);
            size_t width = 1 + random.below(rows ? 100 : 3000), height = rows ? 1 + random.below(20) : 1;
            size_t pitch = rows ? (width + random.below(50)) * unit : width * unit;
            size_t at = random.below((unsigned)(size - pitch * height)) / unit * unit;
            CUdeviceptr to = (CUdeviceptr)(memory + at);
            CUstream on = async ? stream : nullptr;
            CUresult answer;
            if (rows && unit == 1) answer = async ? cuMemsetD2D8Async(to, pitch, (unsigned char)value, width, height, on) : cuMemsetD2D8(to, pitch, (unsigned char)value, width, height);
            else if (rows && unit == 2) answer = async ? cuMemsetD2D16Async(to, pitch, (unsigned short)value, width, height, on) : cuMemsetD2D16(to, pitch, (unsigned short)value, width, height);
            else if (rows) answer = async ? cuMemsetD2D32Async(to, pitch, value, width, height, on) : cuMemsetD2D32(to, pitch, value, width, height);
            else if (unit == 1) answer = async ? cuMemsetD8Async(to, (unsigned char)value, width, on) : cuMemsetD8(to, (unsigned char)value, width);
            else if (unit == 2) answer = async ? cuMemsetD16Async(to, (unsigned short)value, width, on) : cuMemsetD16(to, (unsigned short)value, width);
            else answer = async ? cuMemsetD32Async(to, value, width, on) : cuMemsetD32(to, value, width);
            IS(CUDA_SUCCESS, answer);
            // Those of the default stream and of the other do not wait for each other.
            RETURNS(cudaSuccess, cudaDeviceSynchronize());
            for (size_t y = 0; y < height; y++)
                for (size_t x = 0; x < width; x++) memcpy(&want[at + y * pitch + x * unit], &value, unit);
        }
        RETURNS(cudaSuccess, cudaMemcpy(got.data(), memory, size, cudaMemcpyDefault));
        TRUE_THAT(got == want);
    }
    // Not at a place for its unit, a pitch narrower than the row, no memory of the device's, and too much.
    IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD16((CUdeviceptr)(device + 1), 1, 4));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD32((CUdeviceptr)(device + 2), 1, 4));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD2D8((CUdeviceptr)device, 8, 1, 16, 4));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8((CUdeviceptr)&options, 1, 4));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(0, 1, 4));
    RETURNS(cudaSuccess, cudaFree(device));
    RETURNS(cudaSuccess, cudaFree(managed));
    RETURNS(cudaSuccess, cudaFreeHost(pinned));
    return verdict();
}
