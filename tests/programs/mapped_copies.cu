// Copies and fills of pinned memory that kernels use: a synchronous copy has read its source and written its target when it returns, while the device still has other work.
#define PROGRAM "mapped_copies"
#include "common.h"

#include <vector>

static const int WORDS = 1 << 20, ROWS = 64, WIDTH = 1000, PITCH = 4096;

// Writes numbers, after a while.
__global__ void write(int *memory, int first) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < WORDS; i += blockDim.x * gridDim.x) memory[i] = first + i;
}

static int *mapped(size_t words) {
    int *memory;
    CHECK(cudaHostAlloc(&memory, words * sizeof *memory, cudaHostAllocMapped));
    return memory;
}

__global__ void sample(cudaTextureObject_t texture, int *out, int words) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += blockDim.x * gridDim.x) out[i] = tex1Dfetch<int>(texture, i);
}

// With unified addressing, pinned memory also has a device address: it can be named as device memory. `asked`: the program has asked for its device pointer.
static void as_device(bool asked) {
    const int words = WIDTH * ROWS, slices = 4;
    const size_t row = WIDTH * sizeof(int), bytes = ROWS * row;
    int *from, *to, *device;
    CHECK(cudaHostAlloc(&from, bytes, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&to, bytes, cudaHostAllocDefault));
    CHECK(cudaMalloc(&device, ROWS * PITCH));
    for (int *memory : {from, to}) {
        int *same;
        if (asked) CHECK(cudaHostGetDevicePointer(&same, memory, 0));
    }
    for (int i = 0; i < words; i++) from[i] = 3 * i + asked;
    auto arrived = [&](const char *how) {
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < words; i++) {
            REQUIRE(to[i] == from[i], "%s, %sasked: word %d is %d instead of %d", how, asked ? "" : "not ", i, to[i], from[i]);
            to[i] = -1;
        }
    };
    CHECK(cudaMemcpy2D(device, PITCH, from, row, row, ROWS, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2D(to, row, device, PITCH, row, ROWS, cudaMemcpyDeviceToDevice));
    arrived("rows");
    CHECK(cudaMemcpy2D(device, row, from, row, row, ROWS, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2D(to, row, device, row, row, ROWS, cudaMemcpyDeviceToDevice));
    arrived("rows without gaps");
    CHECK(cudaMemcpy2D(to, row, from, row, row, ROWS, cudaMemcpyDeviceToDevice));
    arrived("rows on the host");
    cudaMemcpy3DParms there = {}, back = {};
    there.srcPtr = back.dstPtr = make_cudaPitchedPtr(from, row, row, ROWS / slices);
    there.dstPtr = back.srcPtr = make_cudaPitchedPtr(device, PITCH, row, ROWS / slices);
    back.dstPtr.ptr = to;
    there.extent = back.extent = make_cudaExtent(row, ROWS / slices, slices);
    there.kind = back.kind = cudaMemcpyDeviceToDevice;
    CHECK(cudaMemcpy3D(&there));
    CHECK(cudaMemcpy3D(&back));
    arrived("boxes");
    cudaArray_t array;
    cudaChannelFormatDesc word = cudaCreateChannelDesc<int>();
    CHECK(cudaMallocArray(&array, &word, WIDTH, ROWS));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, from, row, row, ROWS, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2DFromArray(to, row, array, 0, 0, row, ROWS, cudaMemcpyDeviceToDevice));
    arrived("an array");
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t first, second;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&first, graph, nullptr, 0, device, from, bytes, cudaMemcpyDeviceToDevice));
    CHECK(cudaGraphAddMemcpyNode1D(&second, graph, &first, 1, to, device, bytes, cudaMemcpyDeviceToDevice));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, 0));
    arrived("a graph's bytes");
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemcpy3DAsync(&there, stream));
    CHECK(cudaMemcpy3DAsync(&back, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    arrived("a graph's boxes");
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = from;
    resource.res.linear.desc = word;
    resource.res.linear.sizeInBytes = bytes;
    cudaTextureDesc desc = {};
    desc.readMode = cudaReadModeElementType;
    cudaTextureObject_t texture;
    CHECK(cudaCreateTextureObject(&texture, &resource, &desc, nullptr));
    for (int round = 0; round < 2; round++) {
        from[round] = -7 - round;
        sample<<<64, 256>>>(texture, device, words);
        CHECK(cudaMemcpy(to, device, bytes, cudaMemcpyDeviceToHost));
        arrived("a texture");
    }
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFreeArray(array));
    CHECK(cudaFree(device));
    for (int *memory : {from, to}) CHECK(cudaFreeHost(memory));
}

__global__ void write_late(int *memory, int words, int value, volatile int *count) {
    for (int i = 0; i < 200000; i++) *count = *count + 1;
    for (int i = 0; i < words; i++) memory[i] = value;
}

// Registered memory that neither begins nor ends on a page: the first and the last page are only partly the device's.
static void beside_other_memory() {
    const int words = ROWS * WIDTH, row = WIDTH * sizeof(int), width = row / 2;
    char *around = (char *)malloc(words * sizeof(int) + 8192);
    int *memory = (int *)(around + 4096 - (uintptr_t)around % 4096 + 48), *device, *count;
    CHECK(cudaHostRegister(memory, words * sizeof(int), cudaHostRegisterDefault));
    CHECK(cudaMalloc(&device, ROWS * PITCH));
    CHECK(cudaMalloc(&count, sizeof *count));
    std::vector<int> rows(ROWS * PITCH / sizeof(int));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    write_late<<<1, 1>>>(memory, words, 1, count);
    CHECK(cudaDeviceSynchronize());
    for (int round = 2; round < 6; round++) {
        write_late<<<1, 1>>>(memory, words, round, count);
        CHECK(cudaMemcpy2D(device, PITCH, memory, row, width, ROWS, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(rows.data(), device, ROWS * PITCH, cudaMemcpyDeviceToHost));
        for (int y = 0; y < ROWS; y++)
            for (int x = 0; x < width / 4; x++) {
                int found = rows[y * (PITCH / sizeof(int)) + x];
                REQUIRE(found == round, "row %d, word %d of registered memory: %d instead of %d", y, x, found, round);
            }
    }
    std::vector<int> source(words);
    for (int round = 0; round < 100; round++) {
        for (int i = 0; i < words; i++) source[i] = round + i;
        CHECK(cudaMemcpyAsync(memory, source.data(), words * sizeof(int), cudaMemcpyDefault, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i : {words - 1, 0, words / 2}) REQUIRE(memory[i] == round + i, "round %d: registered word %d is %d", round, i, memory[i]);
    }
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaHostUnregister(memory));
    CHECK(cudaFree(device));
    CHECK(cudaFree(count));
    free(around);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    int *device, *other, *source = mapped(WORDS), *target = mapped(WORDS), *rows = mapped(ROWS * PITCH / sizeof(int));
    const size_t bytes = WORDS * sizeof(int);
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMalloc(&other, bytes));
    cudaArray_t array;
    cudaChannelFormatDesc word = cudaCreateChannelDesc<int>();
    CHECK(cudaMallocArray(&array, &word, WIDTH, ROWS));
    for (int round = 0; round < 4; round++) {
        int first = round * 1000003;
        // The copy comes behind the kernel.
        write<<<64, 256>>>(device, first);
        CHECK(cudaMemcpy(target, device, bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < WORDS; i += 97) REQUIRE(target[i] == first + i, "word %d is %d instead of %d", i, target[i], first + i);
        write<<<64, 256>>>(device, -first);
        CHECK(cudaMemcpy2D(rows, PITCH, device, WIDTH * sizeof(int), WIDTH * sizeof(int), ROWS, cudaMemcpyDeviceToHost));
        for (int y = 0; y < ROWS; y++)
            for (int x = 0; x < WIDTH; x += 31) {
                int found = rows[y * (PITCH / sizeof(int)) + x], expected = -first + y * WIDTH + x;
                REQUIRE(found == expected, "row %d, word %d: %d instead of %d", y, x, found, expected);
            }
        // From an array, and to it.
        write<<<64, 256>>>(device, first + 5);
        CHECK(cudaMemcpy2DToArray(array, 0, 0, device, WIDTH * sizeof(int), WIDTH * sizeof(int), ROWS, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpy2DFromArray(rows, PITCH, array, 0, 0, WIDTH * sizeof(int), ROWS, cudaMemcpyDeviceToHost));
        for (int y = 0; y < ROWS; y++)
            for (int x = 0; x < WIDTH; x += 31) {
                int found = rows[y * (PITCH / sizeof(int)) + x], expected = first + 5 + y * WIDTH + x;
                REQUIRE(found == expected, "row %d of the array, word %d: %d instead of %d", y, x, found, expected);
                rows[y * (PITCH / sizeof(int)) + x] = -x;
            }
        write<<<64, 256>>>(device, 3);
        CHECK(cudaMemcpy2DToArray(array, 0, 0, rows, PITCH, WIDTH * sizeof(int), ROWS, cudaMemcpyHostToDevice));
        for (int x = 0; x < WIDTH; x += 31) rows[x] = 12345;
        CHECK(cudaMemcpy2DFromArray(target, WIDTH * sizeof(int), array, 0, 0, WIDTH * sizeof(int), ROWS, cudaMemcpyDeviceToHost));
        for (int x = 0; x < WIDTH; x += 31) REQUIRE(target[x] == -x, "word %d came from the array as %d", x, target[x]);
        // Its source may be changed at once.
        for (int i = 0; i < WORDS; i++) source[i] = first ^ i;
        write<<<64, 256>>>(device, 7);
        CHECK(cudaMemcpy(other, source, bytes, cudaMemcpyHostToDevice));
        for (int i = 0; i < WORDS; i += 5) source[i] = -1;
        CHECK(cudaMemcpy(target, other, bytes, cudaMemcpyDefault));
        for (int i = 0; i < WORDS; i++) REQUIRE(target[i] == (first ^ i), "copied word %d is %d instead of %d", i, target[i], first ^ i);
        // What is asynchronous is there when the stream is done.
        CHECK(cudaMemsetAsync(target, round + 1, bytes));
        CHECK(cudaMemcpyAsync(source, device, bytes, cudaMemcpyDeviceToHost));
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < WORDS; i += 89) {
            REQUIRE(target[i] == (round + 1) * 0x01010101, "a fill wrote %x", target[i]);
            REQUIRE(source[i] == 7 + i, "word %d came as %d", i, source[i]);
        }
    }
    for (int *memory : {source, target, rows}) CHECK(cudaFreeHost(memory));
    CHECK(cudaFree(device));
    CHECK(cudaFree(other));
    CHECK(cudaFreeArray(array));
    for (bool asked : {false, true}) as_device(asked);
    beside_other_memory();
    return pass("in both directions, in rows, from and to arrays, filled, named as device memory, beside other memory");
}
