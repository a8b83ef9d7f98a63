// Started without standard streams, as some daemons are: what the program still prints there disturbs no call.
#define PROGRAM "closed_streams"
#include "common.h"

#include <fcntl.h>
#include <unistd.h>

__global__ void twice(int *values) { values[threadIdx.x] *= 2; }

int main() {
    const int kept = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 100);
    REQUIRE(kept >= 0, "cannot copy stdout");
    for (int fd = 0; fd < 3; fd++) close(fd);

    int *values = nullptr, *pinned = nullptr, sum = 0;
    cudaError_t status = cudaFree(nullptr);
    for (int round = 0; round < 10 && status == cudaSuccess; round++) {
        const char line[] = "a line of output, as programs print it without a look at whether somebody reads it\n";
        for (int fd = 1; fd < 3; fd++) {
            if (write(fd, line, sizeof line) < 0) continue;
        }
        const int one = 1;
        if ((status = cudaMallocHost(&pinned, 5 << 20))) break;
        if ((status = cudaMalloc(&values, 32 * sizeof(int)))) break;
        for (int i = 0; i < 32; i++) pinned[i] = one;
        if ((status = cudaMemcpy(values, pinned, 32 * sizeof(int), cudaMemcpyHostToDevice))) break;
        twice<<<1, 32>>>(values);
        if ((status = cudaMemcpy(pinned, values, 32 * sizeof(int), cudaMemcpyDeviceToHost))) break;
        for (int i = 0; i < 32; i++) sum += pinned[i];
        if ((status = cudaFree(values))) break;
        status = cudaFreeHost(pinned);
    }
    dup2(kept, STDOUT_FILENO);
    CHECK(status);
    REQUIRE(sum == 10 * 64, "a sum of %d instead of 640", sum);
    return pass("10 rounds");
}
