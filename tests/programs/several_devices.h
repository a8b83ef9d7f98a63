// What programs with two devices share: memory with known words, a gate for a stream, and code with a managed variable.
#pragma once

#include "common.h"

#include <atomic>
#include <thread>
#include <vector>

inline std::vector<int> numbers(int n, int from) {
    std::vector<int> host(n);
    for (int i = 0; i < n; i++) host[i] = from + i;
    return host;
}

// New memory of a device, which becomes the current one, with ascending numbers.
inline int *on_device(int device, int n, int from) {
    CHECK(cudaSetDevice(device));
    int *data;
    CHECK(cudaMalloc(&data, n * sizeof(int)));
    CHECK(cudaMemcpy(data, numbers(n, from).data(), n * sizeof(int), cudaMemcpyHostToDevice));
    return data;
}

inline bool holds(const int *data, int n, int from) {
    std::vector<int> host(n, -1);
    CHECK(cudaMemcpy(host.data(), data, n * sizeof(int), cudaMemcpyDefault));
    return host == numbers(n, from);
}

// Holds a stream until it is opened.
struct Gate {
    std::atomic<bool> open{false};
    static void CUDART_CB wait(void *self) {
        while (!static_cast<Gate *>(self)->open) std::this_thread::yield();
    }
};

// A managed word, and a kernel that adds one to it.
static const char *const MANAGED_CODE = ".version 7.0\n.target sm_70\n.address_size 64\n"
                                        ".visible .global .attribute(.managed) .align 4 .u32 shared_word;\n"
                                        ".visible .entry bump() {\n"
                                        "  .reg .b32 %r<3>;\n  .reg .b64 %rd<2>;\n"
                                        "  mov.u64 %rd1, shared_word;\n  ld.global.u32 %r1, [%rd1];\n  add.s32 %r2, %r1, 1;\n"
                                        "  st.global.u32 [%rd1], %r2;\n  ret;\n}\n";
