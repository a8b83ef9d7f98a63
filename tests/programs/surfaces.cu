// Surfaces: kernels read and write arrays of one, two and three dimensions and of layers, in bytes of a row as CUDA counts them.
#define PROGRAM "surfaces"
#include "common.h"

#include <vector>

__global__ void turn(cudaSurfaceObject_t from, cudaSurfaceObject_t to, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < w && y < h) surf2Dwrite(surf2Dread<uchar4>(from, x * 4, y), to, (w - 1 - x) * 4, h - 1 - y);
}

__global__ void outside(cudaSurfaceObject_t surface, float *out, int w) {
    out[0] = surf1Dread<float>(surface, -4, cudaBoundaryModeZero);
    out[1] = surf1Dread<float>(surface, w * 4, cudaBoundaryModeZero);
    out[2] = surf1Dread<float>(surface, -8, cudaBoundaryModeClamp);
    out[3] = surf1Dread<float>(surface, (w + 3) * 4, cudaBoundaryModeClamp);
    surf1Dwrite(5.0f, surface, w * 4, cudaBoundaryModeZero);
}

__global__ void fill(cudaSurfaceObject_t surface, int w, int h, int d, bool layered) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w * h * d) return;
    int x = i % w, y = i / w % h, z = i / w / h;
    short2 value = make_short2(i, -i);
    if (layered) surf2DLayeredwrite(value, surface, x * 4, y, z);
    else surf3Dwrite(value, surface, x * 4, y, z);
}

static cudaSurfaceObject_t surface_of(cudaArray_t array) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaSurfaceObject_t surface;
    CHECK(cudaCreateSurfaceObject(&surface, &resource));
    return surface;
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const int w = 45, h = 31;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<uchar4>();
    std::vector<uint32_t> pixels(w * h), turned(w * h);
    for (uint32_t &p : pixels) p = (uint32_t)random.next();
    cudaArray_t from, to;
    CHECK(cudaMallocArray(&from, &format, w, h, cudaArraySurfaceLoadStore));
    CHECK(cudaMallocArray(&to, &format, w, h, cudaArraySurfaceLoadStore));
    CHECK(cudaMemcpy2DToArray(from, 0, 0, pixels.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
    cudaSurfaceObject_t a = surface_of(from), b = surface_of(to);
    turn<<<dim3(4, 4), dim3(16, 16)>>>(a, b, w, h);
    CHECK(cudaMemcpy2DFromArray(turned.data(), w * 4, to, 0, 0, w * 4, h, cudaMemcpyDeviceToHost));
    for (int i = 0; i < w * h; i++) REQUIRE(turned[i] == pixels[w * h - 1 - i], "pixel %d", i);
    CHECK(cudaDestroySurfaceObject(a));
    CHECK(cudaDestroySurfaceObject(b));

    cudaArray_t line;
    format = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&line, &format, w, 0, cudaArraySurfaceLoadStore));
    std::vector<float> values(w);
    for (int i = 0; i < w; i++) values[i] = i + 1.0f;
    CHECK(cudaMemcpy2DToArray(line, 0, 0, values.data(), w * 4, w * 4, 1, cudaMemcpyHostToDevice));
    float *device, edge[4];
    CHECK(cudaMalloc(&device, sizeof edge));
    a = surface_of(line);
    outside<<<1, 1>>>(a, device, w);
    CHECK(cudaMemcpy(edge, device, sizeof edge, cudaMemcpyDeviceToHost));
    REQUIRE(edge[0] == 0 && edge[1] == 0 && edge[2] == 1 && edge[3] == w, "outside: %g %g %g %g", edge[0], edge[1], edge[2], edge[3]);
    CHECK(cudaDestroySurfaceObject(a));

    for (int layered = 0; layered < 2; layered++) {
        const int d = 6;
        cudaArray_t box;
        format = cudaCreateChannelDesc<short2>();
        CHECK(cudaMalloc3DArray(&box, &format, make_cudaExtent(w, h, d), cudaArraySurfaceLoadStore | (layered ? cudaArrayLayered : 0)));
        a = surface_of(box);
        fill<<<(w * h * d + 127) / 128, 128>>>(a, w, h, d, layered);
        std::vector<short2> out(w * h * d);
        cudaMemcpy3DParms copy = {};
        copy.srcArray = box;
        copy.dstPtr = make_cudaPitchedPtr(out.data(), w * 4, w, h);
        copy.extent = make_cudaExtent(w, h, d);
        copy.kind = cudaMemcpyDeviceToHost;
        CHECK(cudaMemcpy3D(&copy));
        for (int i = 0; i < w * h * d; i++) REQUIRE(out[i].x == (short)i && out[i].y == (short)-i, "%s: element %d", layered ? "layers" : "box", i);
        CHECK(cudaDestroySurfaceObject(a));
        CHECK(cudaFreeArray(box));
    }
    return pass("two dimensions, edges, three dimensions, layers");
}
