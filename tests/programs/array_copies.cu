// Arrays and every way of copying from and to them: rows, rectangles, boxes, layers; pageable and pinned host memory, device memory, other arrays.
#define PROGRAM "array_copies"
#include "common.h"

#include <vector>

static void same(const std::vector<int> &got, const std::vector<int> &want, const char *what) {
    for (size_t i = 0; i < want.size(); i++) REQUIRE(got[i] == want[i], "%s: element %zu is %d instead of %d", what, i, got[i], want[i]);
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    const int w = 61, h = 37, d = 11;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
    std::vector<int> source(w * h * d), target(w * h * d);
    for (int &value : source) value = (int)random.next();

    // One and two dimensions.
    cudaArray_t flat, plane, other;
    CHECK(cudaMallocArray(&flat, &format, w));
    CHECK(cudaMallocArray(&plane, &format, w, h));
    CHECK(cudaMallocArray(&other, &format, w, h));
    CHECK(cudaMemcpy2DToArray(flat, 0, 0, source.data(), w * 4, w * 4, 1, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2DFromArray(target.data(), w * 4, flat, 0, 0, w * 4, 1, cudaMemcpyDeviceToHost));
    for (int x = 0; x < w; x++) REQUIRE(target[x] == source[x], "1D: element %d", x);
    CHECK(cudaMemcpy2DToArray(plane, 0, 0, source.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2DFromArray(target.data(), w * 4, plane, 0, 0, w * 4, h, cudaMemcpyDeviceToHost));
    for (int i = 0; i < w * h; i++) REQUIRE(target[i] == source[i], "2D: element %d", i);

    // A rectangle inside, from rows with gaps, through pinned memory, in a stream.
    cudaStream_t stream;
    int *pinned;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMallocHost(&pinned, w * h * 4));
    for (int i = 0; i < w * h; i++) pinned[i] = -i;
    CHECK(cudaMemcpy2DToArrayAsync(plane, 5 * 4, 7, pinned, w * 4, 20 * 4, 10, cudaMemcpyHostToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < w * h; i++) pinned[i] = 0;
    CHECK(cudaMemcpy2DFromArrayAsync(pinned, w * 4, plane, 0, 0, w * 4, h, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++) {
            bool inside = x >= 5 && x < 25 && y >= 7 && y < 17;
            int want = inside ? -((y - 7) * w + x - 5) : source[y * w + x];
            REQUIRE(pinned[y * w + x] == want, "rectangle: (%d,%d) is %d instead of %d", x, y, pinned[y * w + x], want);
        }

    // Device memory, and from array to array.
    int *device;
    size_t pitch;
    CHECK(cudaMallocPitch(&device, &pitch, w * 4, h));
    CHECK(cudaMemcpy2DFromArray(device, pitch, plane, 0, 0, w * 4, h, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2DToArray(other, 0, 0, device, pitch, w * 4, h, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2DArrayToArray(plane, 0, 0, other, 8, 3, 30 * 4, 20, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2DFromArray(target.data(), w * 4, plane, 0, 0, w * 4, h, cudaMemcpyDeviceToHost));
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++) {
            int want = x < 30 && y < 20 ? pinned[(y + 3) * w + x + 2] : pinned[y * w + x];
            REQUIRE(target[y * w + x] == want, "array to array: (%d,%d)", x, y);
        }

    // Three dimensions, and layers.
    for (unsigned flags : {0u, (unsigned)cudaArrayLayered}) {
        cudaArray_t box;
        cudaExtent extent = make_cudaExtent(w, h, d);
        CHECK(cudaMalloc3DArray(&box, &format, extent, flags));
        cudaMemcpy3DParms copy = {};
        copy.srcPtr = make_cudaPitchedPtr(source.data(), w * 4, w, h);
        copy.dstArray = box;
        copy.extent = extent;
        copy.kind = cudaMemcpyHostToDevice;
        CHECK(cudaMemcpy3D(&copy));
        cudaMemcpy3DParms back = {};
        back.srcArray = box;
        back.dstPtr = make_cudaPitchedPtr(target.data(), w * 4, w, h);
        back.extent = extent;
        back.kind = cudaMemcpyDeviceToHost;
        std::fill(target.begin(), target.end(), 0);
        CHECK(cudaMemcpy3D(&back));
        same(target, source, flags ? "layers" : "box");
        // A box inside.
        std::vector<int> small(10 * 6 * 4);
        cudaMemcpy3DParms part = {};
        part.srcArray = box;
        part.srcPos = make_cudaPos(13, 4, 2);
        part.dstPtr = make_cudaPitchedPtr(small.data(), 10 * 4, 10, 6);
        part.extent = make_cudaExtent(10, 6, 4);
        part.kind = cudaMemcpyDeviceToHost;
        CHECK(cudaMemcpy3DAsync(&part, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int z = 0; z < 4; z++)
            for (int y = 0; y < 6; y++)
                for (int x = 0; x < 10; x++)
                    REQUIRE(small[(z * 6 + y) * 10 + x] == source[((z + 2) * h + y + 4) * w + x + 13], "part: (%d,%d,%d)", x, y, z);
        cudaChannelFormatDesc found;
        cudaExtent size;
        unsigned flags_found;
        CHECK(cudaArrayGetInfo(&found, &size, &flags_found, box));
        REQUIRE(found.x == 32 && found.y == 0 && found.f == cudaChannelFormatKindSigned && size.width == w && size.height == h && size.depth == d && flags_found == flags,
                "cudaArrayGetInfo: %zu x %zu x %zu, flags %u", size.width, size.height, size.depth, flags_found);
        CHECK(cudaFreeArray(box));
    }

    // What must be refused.
    REQUIRE(cudaMemcpy2DToArray(plane, 4, 0, source.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "a rectangle that reaches out of the array");
    REQUIRE(cudaMemcpy2DToArray(plane, 0, h, source.data(), w * 4, w * 4, 1, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "a row that the array has not");
    cudaGetLastError();
    CHECK(cudaFreeArray(flat));
    CHECK(cudaFreeArray(plane));
    CHECK(cudaFreeArray(other));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));
    return pass("rows, rectangles, boxes and layers");
}
