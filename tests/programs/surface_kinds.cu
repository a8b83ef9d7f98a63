// Surfaces and textures of the rarer kinds: lines, layers of lines, cubes and layers of cubes; arrays asked what they are.
#define PROGRAM "surface_kinds"
#include "cases.h"
#include <vector>

__global__ void write_lines(cudaSurfaceObject_t line, cudaSurfaceObject_t layers, int w, int d) {
    int x = threadIdx.x, z = blockIdx.x;
    if (x >= w) return;
    if (z == 0) surf1Dwrite(make_float2(x * 0.5f, -x), line, x * 8);
    if (z < d) surf1DLayeredwrite((short)(x * 10 + z), layers, x * 2, z);
}
__global__ void read_lines(cudaTextureObject_t line, cudaTextureObject_t layers, float *out, int w, int d) {
    int x = threadIdx.x, z = blockIdx.x;
    if (x >= w || z >= d) return;
    out[z * w + x] = tex1DLayered<short>(layers, x + 0.5f, z) + (z == 0 ? tex1D<float2>(line, x + 0.5f).y * 1000 : 0);
}
__global__ void write_cube(cudaSurfaceObject_t cube, int side) {
    int x = threadIdx.x, y = threadIdx.y, face = blockIdx.x;
    surfCubemapwrite(face * 100.0f + y * 10 + x, cube, x * 4, y, face);
    (void)side;
}
__global__ void read_cube(cudaTextureObject_t cube, float *out) {
    // The middle of each face, by its direction.
    const float3 directions[6] = {{1, 0, 0}, {-1, 0, 0}, {0, 1, 0}, {0, -1, 0}, {0, 0, 1}, {0, 0, -1}};
    float3 d = directions[threadIdx.x];
    out[threadIdx.x] = texCubemap<float>(cube, d.x + 0.01f, d.y + 0.01f, d.z + 0.01f);
}

static cudaResourceDesc resource_of(cudaArray_t array) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    return resource;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    const int w = 50, d = 4, side = 8;
    cudaArray_t line, layers, cube;
    cudaChannelFormatDesc two = cudaCreateChannelDesc<float2>(), small = cudaCreateChannelDesc<short>(), one = cudaCreateChannelDesc<float>();
    RETURNS(cudaSuccess, cudaMallocArray(&line, &two, w, 0, cudaArraySurfaceLoadStore));
    RETURNS(cudaSuccess, cudaMalloc3DArray(&layers, &small, make_cudaExtent(w, 0, d), cudaArrayLayered | cudaArraySurfaceLoadStore));
    cudaChannelFormatDesc told;
    cudaExtent extent;
    unsigned flags;
    RETURNS(cudaSuccess, cudaArrayGetInfo(&told, &extent, &flags, layers));
    TRUE_THAT(told.x == 16 && told.f == cudaChannelFormatKindSigned && extent.width == w && extent.height == 0 && extent.depth == d);
    IS(cudaArrayLayered | cudaArraySurfaceLoadStore, flags);

    cudaSurfaceObject_t to_line, to_layers, to_cube;
    cudaTextureObject_t of_line, of_layers, of_cube;
    cudaResourceDesc from_line = resource_of(line), from_layers = resource_of(layers);
    cudaTextureDesc reading = {};
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&to_line, &from_line));
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&to_layers, &from_layers));
    RETURNS(cudaSuccess, cudaCreateTextureObject(&of_line, &from_line, &reading, nullptr));
    RETURNS(cudaSuccess, cudaCreateTextureObject(&of_layers, &from_layers, &reading, nullptr));
    float *out;
    std::vector<float> got(w * d);
    RETURNS(cudaSuccess, cudaMalloc(&out, got.size() * 4));
    write_lines<<<d, 64>>>(to_line, to_layers, w, d);
    read_lines<<<d, 64>>>(of_line, of_layers, out, w, d);
    RETURNS(cudaSuccess, cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
    for (int z = 0; z < d; z++)
        for (int x = 0; x < w; x++) IS(x * 10 + z - (z == 0 ? x * 1000 : 0), got[z * w + x]);

    RETURNS(cudaSuccess, cudaMalloc3DArray(&cube, &one, make_cudaExtent(side, side, 6), cudaArrayCubemap | cudaArraySurfaceLoadStore));
    RETURNS(cudaErrorInvalidValue, cudaMalloc3DArray(&cube, &one, make_cudaExtent(side, side, 5), cudaArrayCubemap));
    RETURNS(cudaSuccess, cudaMalloc3DArray(&cube, &one, make_cudaExtent(side, side, 6), cudaArrayCubemap | cudaArraySurfaceLoadStore));
    cudaResourceDesc from_cube = resource_of(cube);
    RETURNS(cudaSuccess, cudaCreateSurfaceObject(&to_cube, &from_cube));
    reading.normalizedCoords = 1;
    RETURNS(cudaSuccess, cudaCreateTextureObject(&of_cube, &from_cube, &reading, nullptr));
    write_cube<<<6, dim3(side, side)>>>(to_cube, side);
    read_cube<<<1, 6>>>(of_cube, out);
    RETURNS(cudaSuccess, cudaMemcpy(got.data(), out, 24, cudaMemcpyDeviceToHost));
    for (int face = 0; face < 6; face++) {
        printf("face %d: %g\n", face, got[face]);
        TRUE_THAT(got[face] >= face * 100 && got[face] < face * 100 + 90);
    }
    for (cudaSurfaceObject_t each : {to_line, to_layers, to_cube}) RETURNS(cudaSuccess, cudaDestroySurfaceObject(each));
    for (cudaTextureObject_t each : {of_line, of_layers, of_cube}) RETURNS(cudaSuccess, cudaDestroyTextureObject(each));
    for (cudaArray_t each : {line, layers, cube}) RETURNS(cudaSuccess, cudaFreeArray(each));
    return verdict();
}
