// What every test program shares: the closing PASS or FAIL line, options, random data and error checks.
//
// A program defines PROGRAM (its name as a string) before it includes this file, does its work, checks the result
// against the CPU, and ends with pass() or fail(). The last line on stdout and the exit status say the same thing:
// "PASS name detail…" and 0, or "FAIL name reason" and 1.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#ifndef PROGRAM
#error "define PROGRAM before including common.h"
#endif

struct Options {
    bool full = false;                // sizes for a real GPU instead of a software GPU on an emulated CPU
    uint64_t seed = 0x5eed0fca11;     // of all random data
    std::string word;                 // the first argument that is not an option
    uint64_t number = 0;              // the same, as a number; 0 without one
};

[[noreturn]] inline void finish(const char *verdict, int status, const char *format, va_list arguments) {
    printf("%s %s ", verdict, PROGRAM);
    vprintf(format, arguments);
    printf("\n");
    fflush(stdout);
    _Exit(status);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    finish("FAIL", 1, format, arguments);
}

// Unlike fail(), leaves through exit(), so that destructors and the libraries' own clean-up run as in any program.
__attribute__((format(printf, 1, 2))) inline int pass(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("PASS %s ", PROGRAM);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    return 0;
}

inline Options parse_options(int argc, char **argv) {
    Options options;
    for (int i = 1; i < argc; i++) {
        std::string argument = argv[i];
        if (argument == "--full") {
            options.full = true;
        } else if (argument == "--seed" && i + 1 < argc) {
            options.seed = strtoull(argv[++i], nullptr, 0);
        } else if (argument.rfind("--", 0) == 0) {
            fail("does not know the option %s (--full, --seed N)", argument.c_str());
        } else if (options.word.empty()) {
            options.word = argument;
            options.number = strtoull(argument.c_str(), nullptr, 0);
        } else {
            fail("one argument too many: %s", argument.c_str());
        }
    }
    return options;
}

// splitmix64: every 64-bit seed gives a full-period sequence, and it is three lines long.
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed) {}
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    uint32_t below(uint32_t bound) { return (uint32_t)(next() % bound); }
    float unit() { return (float)(next() >> 40) / (float)(1 << 24); }
    void fill(void *target, size_t size) {
        unsigned char *bytes = (unsigned char *)target;
        for (; size >= 8; size -= 8, bytes += 8) {
            uint64_t word = next();
            memcpy(bytes, &word, 8);
        }
        uint64_t word = next();
        memcpy(bytes, &word, size);
    }
};

#define REQUIRE(condition, ...)                                                                                          \
    do {                                                                                                                 \
        if (!(condition)) fail(__VA_ARGS__);                                                                             \
    } while (0)

#ifdef __CUDACC__
#include <cuda_runtime.h>

// A runtime call that must succeed.
#define CHECK(call)                                                                                                      \
    do {                                                                                                                 \
        cudaError_t status_ = (call);                                                                                    \
        if (status_ != cudaSuccess)                                                                                      \
            fail("%s:%d: %s: %s (%d)", __FILE__, __LINE__, #call, cudaGetErrorName(status_), (int)status_);              \
    } while (0)

// A runtime call that must fail in exactly this way; the last error is taken away again.
#define EXPECT(expected, call)                                                                                           \
    do {                                                                                                                 \
        cudaError_t status_ = (call);                                                                                    \
        if (status_ != (expected))                                                                                       \
            fail("%s:%d: %s: expected %s, got %s (%d)", __FILE__, __LINE__, #call, cudaGetErrorName(expected),           \
                 cudaGetErrorName(status_), (int)status_);                                                               \
        cudaGetLastError();                                                                                              \
    } while (0)

// After <<<>>>: the launch itself was accepted.
#define LAUNCHED() CHECK(cudaGetLastError())
#endif
