// Calls while a kernel runs that ends when the program says so: some come back although it runs, as with NVIDIA's driver, and a copy between page-locked memories waits for it.
#define PROGRAM "beside_kernel"
#include "common.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <unistd.h>
#include <vector>

static const char *stage = "at the start";
static void out_of_time(int) {
    printf("FAIL " PROGRAM " is stuck in %s\n", stage);
    fflush(stdout);
    _Exit(1);
}

static volatile int *flag;
static cudaStream_t stream, other;

__global__ void hold(volatile int *flag) {
    while (*flag == 0) {
    }
}

__global__ void set(int *to, int value) { *to = value; }
__global__ void sample(cudaTextureObject_t texture, int *to) { *to = tex2D<int>(texture, 3, 2); }
__global__ void load(cudaSurfaceObject_t surface, int *to) { *to = surf2Dread<int>(surface, 3 * 4, 2); }

// A kernel runs in `stream` from here until the flag is 1.
static void begin(const char *what) {
    stage = what;
    alarm(300);
    *flag = 0;
    hold<<<1, 1, 0, stream>>>(flag);
    LAUNCHED();
}

static void end() {
    *flag = 1;
    CHECK(cudaStreamSynchronize(stream));
}

struct Image {
    cudaArray_t array;
    cudaResourceDesc resource = {};

    explicit Image(int value) {
        cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
        CHECK(cudaMallocArray(&array, &format, 8, 4, cudaArraySurfaceLoadStore));
        std::vector<int> values(8 * 4, value);
        CHECK(cudaMemcpy2DToArray(array, 0, 0, values.data(), 32, 32, 4, cudaMemcpyHostToDevice));
        resource.resType = cudaResourceTypeArray;
        resource.res.array.array = array;
    }

    cudaTextureObject_t texture() const {
        cudaTextureDesc how = {};
        how.readMode = cudaReadModeElementType;
        cudaTextureObject_t made;
        CHECK(cudaCreateTextureObject(&made, &resource, &how, nullptr));
        return made;
    }

    cudaSurfaceObject_t surface() const {
        cudaSurfaceObject_t made;
        CHECK(cudaCreateSurfaceObject(&made, &resource));
        return made;
    }
};

// `late`: kernels behind the one that runs still use what is destroyed, and other objects come after it.
static void textures(bool late) {
    Image first(5), second(6);
    int *found, host[4];
    CHECK(cudaMalloc(&found, sizeof host));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaMemset(found, 0, sizeof host));
        cudaTextureObject_t texture = first.texture(), next = 0;
        cudaSurfaceObject_t surface = first.surface(), after = 0;
        CHECK(cudaDeviceSynchronize());
        begin("cudaDestroyTextureObject");
        if (late) {
            sample<<<1, 1, 0, stream>>>(texture, found);
            load<<<1, 1, 0, stream>>>(surface, found + 1);
        }
        CHECK(cudaDestroyTextureObject(texture));
        stage = "cudaDestroySurfaceObject";
        CHECK(cudaDestroySurfaceObject(surface));
        EXPECT(cudaErrorInvalidValue, cudaGetTextureObjectResourceDesc(&first.resource, texture));
        if (late) {
            next = second.texture();
            after = second.surface();
            sample<<<1, 1, 0, stream>>>(next, found + 2);
            load<<<1, 1, 0, stream>>>(after, found + 3);
        }
        end();
        CHECK(cudaMemcpy(host, found, sizeof host, cudaMemcpyDeviceToHost));
        if (!late) continue;
        REQUIRE(host[0] == 5 && host[1] == 5, "read %d and %d by what was destroyed later", host[0], host[1]);
        REQUIRE(host[2] == 6 && host[3] == 6, "read %d and %d by what was made later", host[2], host[3]);
        CHECK(cudaDestroyTextureObject(next));
        CHECK(cudaDestroySurfaceObject(after));
    }
    CHECK(cudaFreeArray(first.array));
    CHECK(cudaFreeArray(second.array));
    CHECK(cudaFree(found));
}

static void copies() {
    const size_t size = 1 << 16;
    unsigned char *from, *to;
    CHECK(cudaMallocHost(&from, size));
    CHECK(cudaMallocHost(&to, size));
    for (cudaMemcpyKind kind : {cudaMemcpyHostToHost, cudaMemcpyDefault}) {
        memset(from, kind + 1, size);
        begin("a copy between page-locked memories");
        std::atomic<bool> over{false};
        std::thread ends([&] {
            // A copy that does not wait is over by then.
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            over = true;
            *flag = 1;
        });
        CHECK(cudaMemcpyAsync(to, from, size, kind, stream));
        REQUIRE(over, "a copy of kind %d came back before the kernel was done", (int)kind);
        REQUIRE(memcmp(to, from, size) == 0, "a copy of kind %d came back before it was made", (int)kind);
        ends.join();
        end();
    }
    CHECK(cudaFreeHost(from));
    CHECK(cudaFreeHost(to));
}

static void until_done(cudaStream_t asked) {
    cudaError_t status;
    while ((status = cudaStreamQuery(asked)) == cudaErrorNotReady) std::this_thread::yield();
    CHECK(status);
    cudaGetLastError();
}

// Asking whether the default stream is done does not make other streams wait for it.
static void queries() {
    int *found, host[3];
    CHECK(cudaMalloc(&found, sizeof host));
    CHECK(cudaMemset(found, 0, sizeof host));
    CHECK(cudaDeviceSynchronize());
    begin("a stream beside one that the default stream would wait for");
    EXPECT(cudaErrorNotReady, cudaStreamQuery(nullptr));
    set<<<1, 1, 0, other>>>(found, 1);
    LAUNCHED();
    CHECK(cudaStreamSynchronize(other));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(nullptr));
    until_done(other);
    // Work of the default stream waits for the kernel, and other streams' for that work.
    set<<<1, 1>>>(found + 1, 2);
    LAUNCHED();
    EXPECT(cudaErrorNotReady, cudaStreamQuery(nullptr));
    set<<<1, 1, 0, other>>>(found + 2, 3);
    LAUNCHED();
    EXPECT(cudaErrorNotReady, cudaStreamQuery(nullptr));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(other));
    *flag = 1;
    until_done(nullptr);
    CHECK(cudaStreamQuery(nullptr));
    CHECK(cudaStreamQuery(other));
    CHECK(cudaMemcpy(host, found, sizeof host, cudaMemcpyDeviceToHost));
    REQUIRE(host[0] == 1 && host[1] == 2 && host[2] == 3, "found %d, %d and %d", host[0], host[1], host[2]);
    // What was waited for is done.
    set<<<1, 1, 0, other>>>(found, 4);
    CHECK(cudaStreamSynchronize(other));
    CHECK(cudaStreamQuery(nullptr));
    CHECK(cudaFree(found));
}

int main(int argc, char **argv) {
    std::string what = parse_options(argc, argv).word;
    signal(SIGALRM, out_of_time);
    CHECK(cudaHostAlloc((void **)&flag, 4, cudaHostAllocMapped));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&other));
    if (what.empty() || what == "textures") textures(false);
    if (what == "late") textures(true);
    if (what.empty() || what == "copies") copies();
    if (what.empty() || what == "queries") queries();
    CHECK(cudaDeviceSynchronize());
    return pass("calls beside a kernel");
}
