// Calls of CUDA's driver API.
#pragma once

#include <cuda.h>

#include "common.h"

// A call that must succeed.
#define DRIVER(call)                                                                       \
    do {                                                                                   \
        CUresult result_ = (call);                                                         \
        const char *name_ = "?";                                                           \
        if (result_ != CUDA_SUCCESS) {                                                     \
            cuGetErrorName(result_, &name_);                                               \
            REQUIRE(false, "%s:%d: %s: %s", __FILE__, __LINE__, #call, name_);             \
        }                                                                                  \
    } while (0)
