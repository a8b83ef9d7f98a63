// More short asynchronous copies from pageable memory in a row than a device's queue holds, with more bytes than may be sent before there is room for them.
#define PROGRAM "many_small_copies"
#include "common.h"

#include <vector>

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    const int copies = options.full ? 5000 : 2000, turns = options.full ? 4 : 2;
    const size_t count = 4096, bytes = count * sizeof(int); // 16 KiB
    std::vector<int> host(count), back(count);
    std::vector<int *> device(copies);
    for (auto &at : device) CHECK(cudaMalloc(&at, bytes));
    for (int turn = 1; turn <= turns; turn++) {
        for (int i = 0; i < copies; i++) {
            // The bytes are the copy's own once the call has returned.
            for (size_t j = 0; j < count; j += 64) host[j] = turn * copies + i;
            CHECK(cudaMemcpyAsync(device[i], host.data(), bytes, cudaMemcpyHostToDevice));
        }
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < copies; i += copies / 50) {
            CHECK(cudaMemcpy(back.data(), device[i], bytes, cudaMemcpyDeviceToHost));
            for (size_t j = 0; j < count; j++) {
                int want = j % 64 == 0 ? turn * copies + i : 0;
                if (back[j] != want) fail("turn %d, copy %d: element %zu is %d, not %d", turn, i, j, back[j], want);
            }
        }
    }
    return pass("%d copies of %zu bytes, %d times", copies, bytes, turns);
}
