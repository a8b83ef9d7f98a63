// Batches of copies: bytes in a row and boxes, from and to pinned, pageable and device memory and arrays, in both versions of the functions.
#define PROGRAM "memcpy_batch"
#include "common.h"

#include <cuda.h>
#include <vector>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult got_ = (call);                                                                                          \
        REQUIRE(got_ == CUDA_SUCCESS, "line %d: %s: %d", __LINE__, #call, (int)got_);                                    \
    } while (0)

static const size_t COUNT = 24, MOST = 70000;

// What copy i moves: a few bytes, a few thousand, or more than one block of anything.
static size_t size_of(size_t i) { return i % 3 == 0 ? 1 + i : i % 3 == 1 ? 4096 + 7 * i : MOST - 13 * i; }

static cudaMemcpyAttributes attributes(cudaMemcpySrcAccessOrder order, unsigned flags = 0) {
    cudaMemcpyAttributes of = {};
    of.srcAccessOrder = order;
    of.flags = flags;
    return of;
}

// To the device from both kinds of host memory, inside it, and back.
static void lines(Random &random, cudaStream_t stream) {
    std::vector<unsigned char> pageable(COUNT * MOST);
    unsigned char *pinned, *back, *first, *second;
    CHECK(cudaMallocHost(&pinned, COUNT * MOST));
    CHECK(cudaMallocHost(&back, COUNT * MOST));
    CHECK(cudaMalloc(&first, COUNT * MOST));
    CHECK(cudaMalloc(&second, COUNT * MOST));
    random.fill(pageable.data(), pageable.size());
    random.fill(pinned, COUNT * MOST);
    memset(back, 0, COUNT * MOST);
    CHECK(cudaMemset(second, 0, COUNT * MOST));
    CHECK(cudaDeviceSynchronize());

    std::vector<void *> dsts;
    std::vector<const void *> srcs;
    std::vector<size_t> sizes;
    auto add = [&](void *dst, const void *src, size_t size) {
        dsts.push_back(dst);
        srcs.push_back(src);
        sizes.push_back(size);
    };
    auto go = [&](std::vector<cudaMemcpyAttributes> of, std::vector<size_t> from) {
        CHECK(cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), dsts.size(), of.data(), from.data(), of.size(), stream));
        dsts.clear(), srcs.clear(), sizes.clear();
    };
    for (size_t i = 0; i < COUNT; i++) add(first + i * MOST, (i < 10 ? pinned : pageable.data()) + i * MOST, size_of(i));
    go({attributes(cudaMemcpySrcAccessOrderStream), attributes(cudaMemcpySrcAccessOrderAny, cudaMemcpyFlagPreferOverlapWithCompute)}, {0, 10});
    for (size_t i = 0; i < COUNT; i++) add(second + (COUNT - 1 - i) * MOST, first + i * MOST, size_of(i));
    go({attributes(cudaMemcpySrcAccessOrderStream)}, {0});
    for (size_t i = 0; i < COUNT; i++) add(back + i * MOST, second + (COUNT - 1 - i) * MOST, size_of(i));
    go({attributes(cudaMemcpySrcAccessOrderStream)}, {0});
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < COUNT; i++) {
        const unsigned char *from = (i < 10 ? pinned : pageable.data()) + i * MOST;
        REQUIRE(memcmp(back + i * MOST, from, size_of(i)) == 0, "copy %zu of %zu bytes came back changed", i, size_of(i));
        REQUIRE(size_of(i) == MOST || back[i * MOST + size_of(i)] == 0, "copy %zu went too far", i);
    }

    // A source that is gone when the call returns, and one that the stream has yet to write.
    int once = 4711, twice = 0;
    memset(back, 0, 8);
    add(first, &once, sizeof once);
    go({attributes(cudaMemcpySrcAccessOrderDuringApiCall)}, {0});
    once = 0;
    add(back, first, sizeof once);
    go({attributes(cudaMemcpySrcAccessOrderStream)}, {0});
    add(second, back, sizeof once);
    go({attributes(cudaMemcpySrcAccessOrderStream)}, {0});
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&twice, second, sizeof twice, cudaMemcpyDeviceToHost));
    REQUIRE(twice == 4711, "a chain of batches came to %d", twice);

    // What is no batch.
    cudaMemcpyAttributes none = {}, stream_order = attributes(cudaMemcpySrcAccessOrderStream);
    void *dst = first;
    const void *src = second;
    size_t size = 16, zero = 0, one = 1;
    EXPECT(cudaErrorInvalidValue, cudaMemcpyBatchAsync(&dst, &src, &size, 1, &none, &zero, 1, stream));
    EXPECT(cudaErrorInvalidValue, cudaMemcpyBatchAsync(&dst, &src, &size, 1, &stream_order, &one, 1, stream));

    // The functions of CUDA 12.8, which tell where a batch is at fault.
    typedef CUresult (*Lines)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, size_t *, CUstream);
    Lines older = nullptr;
    CUdriverProcAddressQueryResult found;
    OK(cuGetProcAddress("cuMemcpyBatchAsync", (void **)&older, 12080, CU_GET_PROC_ADDRESS_DEFAULT, &found));
    REQUIRE(found == CU_GET_PROC_ADDRESS_SUCCESS && older != nullptr, "there is no cuMemcpyBatchAsync of 12.8");
    CUdeviceptr to[2] = {(CUdeviceptr)first, (CUdeviceptr)first + 4096}, from[2] = {(CUdeviceptr)pinned, (CUdeviceptr)pinned + 100};
    size_t lengths[2] = {4096, 50}, fault = 77;
    CUmemcpyAttributes of = {};
    of.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    OK(older(to, from, lengths, 2, &of, &zero, 1, &fault, stream));
    CHECK(cudaMemcpyAsync(back, first, 4146, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(memcmp(back, pinned, 4096) == 0 && memcmp(back + 4096, pinned + 100, 50) == 0, "the older function's copies");
    CHECK(cudaFree(first));
    CHECK(cudaFree(second));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(back));
}

static cudaMemcpy3DOperand pointer(void *at, size_t row = 0, size_t layer = 0) {
    cudaMemcpy3DOperand operand = {};
    operand.type = cudaMemcpyOperandTypePointer;
    operand.op.ptr.ptr = at;
    operand.op.ptr.rowLength = row;
    operand.op.ptr.layerHeight = layer;
    return operand;
}

static cudaMemcpy3DOperand place(cudaArray_t array, size_t x, size_t y, size_t z) {
    cudaMemcpy3DOperand operand = {};
    operand.type = cudaMemcpyOperandTypeArray;
    operand.op.array.array = array;
    operand.op.array.offset = {x, y, z};
    return operand;
}

// Boxes of floats in pinned memory, linear memory with gaps, and an array.
static void boxes(Random &random, cudaStream_t stream) {
    const size_t w = 40, h = 12, d = 5, row = 64, layer = 20;
    float *host, *back, *device;
    CHECK(cudaMallocHost(&host, w * h * d * sizeof *host));
    CHECK(cudaMallocHost(&back, 2 * w * h * d * sizeof *back));
    CHECK(cudaMalloc(&device, row * layer * d * sizeof *device));
    CHECK(cudaMemset(device, 0, row * layer * d * sizeof *device));
    for (size_t i = 0; i < w * h * d; i++) host[i] = random.unit();
    memset(back, 0, 2 * w * h * d * sizeof *back);
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(cudaMalloc3DArray(&array, &format, make_cudaExtent(w + 4, h + 2, d + 1), 0));
    CHECK(cudaDeviceSynchronize());

    auto op = [](cudaMemcpy3DOperand src, cudaMemcpy3DOperand dst, cudaExtent extent) {
        cudaMemcpy3DBatchOp op = {};
        op.src = src;
        op.dst = dst;
        op.extent = extent;
        op.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        return op;
    };
    // Between pointers elements are bytes; with an array they are its own.
    cudaExtent bytes = make_cudaExtent(w * sizeof(float), h, d), floats = make_cudaExtent(w, h, d);
    cudaMemcpy3DBatchOp in[] = {op(pointer(host), pointer(device, row * sizeof(float), layer), bytes), op(pointer(host), place(array, 3, 1, 1), floats)};
    CHECK(cudaMemcpy3DBatchAsync(2, in, 0, stream));
    cudaMemcpy3DBatchOp out[] = {op(pointer(device, row * sizeof(float), layer), pointer(back), bytes),
                                 op(place(array, 3, 1, 1), pointer(back + w * h * d), floats)};
    CHECK(cudaMemcpy3DBatchAsync(2, out, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int copy = 0; copy < 2; copy++)
        REQUIRE(memcmp(back + copy * w * h * d, host, w * h * d * sizeof *host) == 0, "box %d came back changed", copy);

    cudaMemcpy3DBatchOp narrow = op(pointer(device, 8), pointer(back), make_cudaExtent(16, 1, 1));
    EXPECT(cudaErrorInvalidValue, cudaMemcpy3DBatchAsync(1, &narrow, 0, stream));
    CHECK(cudaFreeArray(array));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(host));
    CHECK(cudaFreeHost(back));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    lines(random, stream);
    boxes(random, stream);
    CHECK(cudaStreamDestroy(stream));
    return pass("%zu copies of 1 byte to %zu, boxes and an array", 3 * COUNT, MOST);
}
