// System calls on managed memory: a file is read into what the device had last, and written from it.
#define PROGRAM "managed_files"
#include "common.h"

#include <stdio.h>
#include <unistd.h>

__global__ void invert(unsigned char *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = ~data[i];
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int n = 300000;
    unsigned char *data;
    CHECK(cudaMallocManaged(&data, n));
    FILE *file = tmpfile();
    REQUIRE(file != nullptr, "no temporary file");
    for (int i = 0; i < n; i++) data[i] = i * 7;
    invert<<<(n + 255) / 256, 256>>>(data, n);
    CHECK(cudaDeviceSynchronize());
    // write(2) reads what only the device has.
    REQUIRE(write(fileno(file), data, n) == n, "write");
    invert<<<(n + 255) / 256, 256>>>(data, n);
    CHECK(cudaDeviceSynchronize());
    // And read(2) writes there.
    REQUIRE(pread(fileno(file), data, n, 0) == n, "pread");
    for (int i = 0; i < n; i++) REQUIRE(data[i] == (unsigned char)~(i * 7), "byte %d of the file is %d", i, data[i]);
    invert<<<(n + 255) / 256, 256>>>(data, n);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(data[i] == (unsigned char)(i * 7), "byte %d is %d", i, data[i]);
    fclose(file);
    CHECK(cudaFree(data));
    return pass("written from, read into");
}
