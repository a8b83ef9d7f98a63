// Textures and surfaces of two devices, which may have equal handles.
#pragma once

#include "cases.h"
#include "several_devices.h"

static __global__ void read_texture(cudaTextureObject_t texture, int *to, int n) {
    for (int i = 0; i < n; i++) to[i] = tex1Dfetch<int>(texture, i);
}

static __global__ void write_surface(cudaSurfaceObject_t surface, int value) { surf2Dwrite(value, surface, 4, 0); }

static void texture_reads(int device, cudaTextureObject_t texture, int n, int from) {
    int *read = on_device(device, n, 0);
    read_texture<<<1, 1>>>(texture, read, n);
    LAUNCHED();
    expect_value("what a texture reads", 1, holds(read, n, from));
    CHECK(cudaFree(read));
}

static void surface_writes(int device, cudaSurfaceObject_t surface, cudaArray_t array, int value) {
    CHECK(cudaSetDevice(device));
    write_surface<<<1, 1>>>(surface, value);
    LAUNCHED();
    int words[2] = {};
    CHECK(cudaMemcpy2DFromArray(words, sizeof words, array, 0, 0, sizeof words, 1, cudaMemcpyDeviceToHost));
    expect_value("what a surface writes", value, words[1]);
}

static void textures() {
    const int n = 16;
    cudaTextureObject_t objects[2];
    int *data[2];
    for (int i = 0; i < 2; i++) {
        data[i] = on_device(i, n, 1000 * (i + 1));
        cudaResourceDesc resource = {};
        resource.resType = cudaResourceTypeLinear;
        resource.res.linear.devPtr = data[i];
        resource.res.linear.desc = cudaCreateChannelDesc<int>();
        resource.res.linear.sizeInBytes = n * sizeof(int);
        cudaTextureDesc description = {};
        description.readMode = cudaReadModeElementType;
        CHECK(cudaCreateTextureObject(&objects[i], &resource, &description, nullptr));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        cudaResourceDesc found;
        CHECK(cudaGetTextureObjectResourceDesc(&found, objects[i]));
        expect_value("the memory of a texture", 1, found.res.linear.devPtr == data[i]);
        texture_reads(i, objects[i], n, 1000 * (i + 1));
    }
    CHECK(cudaSetDevice(0));
    CHECK(cudaDestroyTextureObject(objects[0]));
    CHECK(cudaFree(data[0]));
    // The other device's is still there.
    texture_reads(1, objects[1], n, 2000);
    CHECK(cudaDestroyTextureObject(objects[1]));
    CHECK(cudaFree(data[1]));
}

static void surfaces() {
    cudaSurfaceObject_t objects[2];
    cudaArray_t arrays[2];
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        cudaChannelFormatDesc words = cudaCreateChannelDesc<int>();
        CHECK(cudaMallocArray(&arrays[i], &words, 4, 4, cudaArraySurfaceLoadStore));
        cudaResourceDesc resource = {};
        resource.resType = cudaResourceTypeArray;
        resource.res.array.array = arrays[i];
        CHECK(cudaCreateSurfaceObject(&objects[i], &resource));
    }
    for (int i = 0; i < 2; i++) surface_writes(i, objects[i], arrays[i], 10 + i);
    CHECK(cudaSetDevice(0));
    CHECK(cudaDestroySurfaceObject(objects[0]));
    surface_writes(1, objects[1], arrays[1], 12);
    CHECK(cudaDestroySurfaceObject(objects[1]));
    for (cudaArray_t array : arrays) CHECK(cudaFreeArray(array));
}
