// CUPTI, opened by name, as a program that is not linked with it would.
//
// A program defines FUNCTIONS(F), a list of the functions that it calls, before it includes this file, and sets each `p_NAME` once it has opened the library.
#pragma once

#include <cuda.h>
#include <cupti.h>

#include "common.h"

#define DECLARE(name) static decltype(&::name) p_##name;
FUNCTIONS(DECLARE)

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        CUptiResult result_ = p_##call;                                                                                \
        if (result_ != CUPTI_SUCCESS) fail("%d: %s: %d", __LINE__, #call, (int)result_);                               \
    } while (0)

// Otherwise fails, with what is wrong.
#define EXPECT_THAT(what, format, ...)                                                                                 \
    do {                                                                                                               \
        if (!(what)) fail("%d: not so: %s: " format, __LINE__, #what, ##__VA_ARGS__);                                  \
    } while (0)
