// Many small checks in one program: all of them run, each that is not met gets a line, and the verdict comes last. A run on
// a machine with a GPU so tells all that differs at once.
#pragma once

#include "common.h"

static int cases = 0, mismatches = 0;
static std::string first_mismatch;

inline void not_met(const char *line) {
    printf("  %s\n", line);
    if (mismatches++ == 0) first_mismatch = line;
}

inline void expect_(const char *what, cudaError_t want, cudaError_t got) {
    cases++;
    if (want == got) return;
    char line[400];
    snprintf(line, sizeof line, "%s: expected %s (%d), got %s (%d)", what, cudaGetErrorName(want), (int)want,
             cudaGetErrorName(got), (int)got);
    not_met(line);
}

inline void expect_value(const char *what, long long want, long long got) {
    cases++;
    if (want == got) return;
    char line[400];
    snprintf(line, sizeof line, "%s: expected %lld, got %lld", what, want, got);
    not_met(line);
}

// A call of the runtime returns `want`, which also becomes the last error.
#define RETURNS(want, call)                                                                                              \
    do {                                                                                                                 \
        cudaGetLastError();                                                                                              \
        cudaError_t got_ = (call);                                                                                       \
        expect_(#call, want, got_);                                                                                      \
        if (want != cudaErrorNotReady) expect_("the last error after " #call, want, cudaGetLastError());                 \
    } while (0)

// The launch leaves `want` as the last error.
#define LAUNCH_LEAVES(want, ...)                                                                                         \
    do {                                                                                                                 \
        cudaGetLastError();                                                                                              \
        __VA_ARGS__;                                                                                                     \
        expect_(#__VA_ARGS__, want, cudaGetLastError());                                                                 \
    } while (0)

// A number, or a CUresult of the driver API.
#define IS(want, expression) expect_value(#expression, (long long)(want), (long long)(expression))

#define TRUE_THAT(condition)                                                                                             \
    do {                                                                                                                 \
        cases++;                                                                                                         \
        if (!(condition)) not_met("not so: " #condition);                                                                \
    } while (0)

// The closing line.
inline int verdict() {
    if (mismatches) fail("%d of %d: %s", mismatches, cases, first_mismatch.c_str());
    return pass("%d cases", cases);
}
