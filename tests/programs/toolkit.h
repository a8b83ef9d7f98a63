// A library of the CUDA toolkit, found where the toolkit is: what a program needs of it is loaded at run time, so that building
// needs nothing but the compiler.
#pragma once

#include "common.h"

#include <dlfcn.h>
#include <thread>

struct Toolkit {
    std::string name;
    void *handle = nullptr;
    explicit Toolkit(const char *library) : name(library) {
        for (const char *folder : {"", "/usr/local/cuda/lib64/", "/usr/local/cuda/targets/x86_64-linux/lib/"})
            for (const char *version : {"", ".13", ".12", ".11", ".10"}) {
                std::string path = std::string(folder) + library + version;
                if (!handle) handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
            }
        REQUIRE(handle, "no %s: is the CUDA toolkit installed?", library);
    }
    template <class F> F function(const char *symbol) {
        void *address = dlsym(handle, symbol);
        REQUIRE(address, "%s has no %s", name.c_str(), symbol);
        return (F)address;
    }
};

// A call of such a library that answers 0 when all is well.
#define ANSWERS(call)                                                                                                    \
    do {                                                                                                                 \
        int got_ = (int)(call);                                                                                          \
        REQUIRE(got_ == 0, "line %d: %s: %d", __LINE__, #call, got_);                                                    \
    } while (0)

// Calls a function in a thread that has no context yet, as programs do that make a library's handle in one thread and use it in others.
template <class F> void in_fresh_thread(F function) { std::thread(function).join(); }
