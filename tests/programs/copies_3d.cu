// Boxes of memory: copied between host and device in every direction, at offsets, with pitches wider than the rows, at once and
// in a stream, between devices' names, and filled.
#define PROGRAM "copies_3d"
#include "cases.h"
#include <vector>

struct Box {
    size_t pitch, rows, slices;
    size_t at(size_t x, size_t y, size_t z) const { return (z * rows + y) * pitch + x; }
    size_t bytes() const { return pitch * rows * slices; }
};

typedef std::vector<unsigned char> Bytes;

static void copy_on_host(Bytes &to, const Box &t, cudaPos at, const Bytes &from, const Box &f, cudaPos of, cudaExtent e) {
    for (size_t z = 0; z < e.depth; z++)
        for (size_t y = 0; y < e.height; y++)
            for (size_t x = 0; x < e.width; x++) to[t.at(at.x + x, at.y + y, at.z + z)] = from[f.at(of.x + x, of.y + y, of.z + z)];
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    cudaStream_t stream;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const size_t width = 100, height = 20, depth = 6;
    cudaPitchedPtr device, second;
    RETURNS(cudaSuccess, cudaMalloc3D(&device, make_cudaExtent(width, height, depth)));
    RETURNS(cudaSuccess, cudaMalloc3D(&second, make_cudaExtent(width, height, depth)));
    printf("pitch %zu\n", device.pitch);
    TRUE_THAT(device.pitch >= width && device.xsize == width && device.ysize == height);
    const Box on_device = {device.pitch, height, depth}, on_host = {133, height + 3, depth + 1};
    Bytes want(on_device.bytes()), source(on_host.bytes()), target(on_host.bytes()), image;
    random.fill(source.data(), source.size());
    unsigned char *pinned;
    RETURNS(cudaSuccess, cudaMallocHost(&pinned, on_host.bytes()));

    RETURNS(cudaSuccess, cudaMemset3D(device, 0x11, make_cudaExtent(width, height, depth)));
    for (size_t z = 0; z < depth; z++)
        for (size_t y = 0; y < height; y++) memset(&want[on_device.at(0, y, z)], 0x11, width);
    auto check = [&](const cudaPitchedPtr &memory, const char *what) {
        // By rows, so that what lies between them is not looked at.
        Bytes got(width * height * depth);
        RETURNS(cudaSuccess, cudaMemcpy2D(got.data(), width, memory.ptr, memory.pitch, width, height * depth, cudaMemcpyDeviceToHost));
        for (size_t z = 0; z < depth; z++)
            for (size_t y = 0; y < height; y++)
                if (memcmp(&got[(z * height + y) * width], &want[on_device.at(0, y, z)], width) != 0) fail("%s: row %zu of slice %zu is wrong", what, y, z);
    };
    check(device, "filled");
    for (int round = 0; round < 12; round++) {
        cudaExtent e = make_cudaExtent(1 + random.below(60), 1 + random.below(10), 1 + random.below(4));
        cudaPos from = make_cudaPos(random.below(30), random.below(8), random.below(2)), to = make_cudaPos(random.below(40), random.below(10), random.below(3));
        bool async = round & 1, use_pinned = round & 2;
        unsigned char *place = use_pinned ? pinned : source.data();
        if (use_pinned) memcpy(pinned, source.data(), source.size());
        cudaMemcpy3DParms copy = {};
        copy.srcPtr = make_cudaPitchedPtr(place, on_host.pitch, on_host.pitch, on_host.rows);
        copy.srcPos = from;
        copy.dstPtr = device;
        copy.dstPos = to;
        copy.extent = e;
        copy.kind = round & 4 ? cudaMemcpyDefault : cudaMemcpyHostToDevice;
        RETURNS(cudaSuccess, async ? cudaMemcpy3DAsync(&copy, stream) : cudaMemcpy3D(&copy));
        RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
        copy_on_host(want, on_device, to, source, on_host, from, e);
        check(device, "to the device");

        // From device to device, and back to the host.
        cudaMemcpy3DParms across = {};
        across.srcPtr = device;
        across.dstPtr = second;
        across.extent = make_cudaExtent(width, height, depth);
        across.kind = cudaMemcpyDeviceToDevice;
        RETURNS(cudaSuccess, cudaMemcpy3DAsync(&across, stream));
        cudaMemcpy3DParms back = {};
        back.srcPtr = second;
        back.srcPos = to;
        unsigned char *result = use_pinned ? pinned : target.data();
        memset(result, 0, target.size());
        back.dstPtr = make_cudaPitchedPtr(result, on_host.pitch, on_host.pitch, on_host.rows);
        back.dstPos = from;
        back.extent = e;
        back.kind = cudaMemcpyDeviceToHost;
        RETURNS(cudaSuccess, cudaMemcpy3DAsync(&back, stream));
        RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
        image.assign(target.size(), 0);
        copy_on_host(image, on_host, from, want, on_device, to, e);
        TRUE_THAT(memcmp(result, image.data(), image.size()) == 0);
        check(second, "on the device");
    }
    // Between devices, which are one here; and a line.
    cudaMemcpy3DPeerParms peers = {};
    peers.srcPtr = device;
    peers.dstPtr = second;
    peers.dstPos = make_cudaPos(3, 2, 1);
    peers.extent = make_cudaExtent(20, 5, 2);
    RETURNS(cudaSuccess, cudaMemcpy3DPeer(&peers));
    Bytes before = want;
    copy_on_host(want, on_device, make_cudaPos(3, 2, 1), before, on_device, make_cudaPos(0, 0, 0), make_cudaExtent(20, 5, 2));
    check(second, "between devices");
    RETURNS(cudaSuccess, cudaMemcpyPeerAsync(device.ptr, 0, second.ptr, 0, device.pitch * height * depth, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    check(device, "a line between devices");

    // Rows, and one column.
    RETURNS(cudaSuccess, cudaMemset2DAsync(device.ptr, device.pitch, 0x22, 1, height * depth, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    for (size_t i = 0; i < height * depth; i++) want[i * device.pitch] = 0x22;
    check(device, "a column");

    // What cannot be.
    cudaMemcpy3DParms wrong = {};
    wrong.srcPtr = make_cudaPitchedPtr(source.data(), 10, 10, 10);
    wrong.dstPtr = device;
    wrong.extent = make_cudaExtent(20, 1, 1);
    wrong.kind = cudaMemcpyHostToDevice;
    RETURNS(cudaErrorInvalidValue, cudaMemcpy3D(nullptr));
    RETURNS(cudaErrorInvalidValue, cudaMemcpy3D(&wrong));
    wrong.srcPtr = {};
    RETURNS(cudaErrorInvalidValue, cudaMemcpy3D(&wrong));
    RETURNS(cudaErrorInvalidValue, cudaMalloc3D(nullptr, make_cudaExtent(1, 1, 1)));
    RETURNS(cudaSuccess, cudaFree(device.ptr));
    RETURNS(cudaSuccess, cudaFree(second.ptr));
    RETURNS(cudaSuccess, cudaFreeHost(pinned));
    return verdict();
}
