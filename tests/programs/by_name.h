// Functions of the driver's library under their very names.
#pragma once

#include "common.h"

#include <cuda.h>
#include <dlfcn.h>

// Calls a function of libcuda.so.1: cuda.h gives the newest form of most.
template <typename... Arguments>
static CUresult named(const char *name, Arguments... arguments) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : nullptr;
    REQUIRE(found, "libcuda.so.1 has no %s", name);
    return ((CUresult(*)(Arguments...))found)(arguments...);
}
