// A synchronous copy to a device's memory, and then work of another device's or another context's stream on the same bytes: it finds what was copied, and what it writes is not overwritten. And copies between devices in default streams. Each case runs in a process of its
// own, because what a process has done before may order the work.
#define PROGRAM "promises_across"
#include "cases.h"
#include "driver.h"
#include "several_devices.h"

#include <chrono>

// In the calling thread's own default stream.
extern "C" CUresult cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t bytes);

static const size_t LAST = 1000;
static size_t N;
static bool busy, held;

// Takes its time.
__global__ void late(int rounds, int *out) {
    unsigned x = threadIdx.x + 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525u + 1013904223u;
    *out = x;
}

__global__ void copy(int *to, const int *from, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}

// Memory of a device, and its last words, after a synchronous copy of all of it from pageable memory.
struct Copied {
    int *all, *last;
};

// The current device has `other`, which is filled first.
static Copied copied_to(int device, int *other) {
    CHECK(cudaMemset(other, 1, LAST * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(device));
    Copied made;
    CHECK(cudaMalloc(&made.all, N * sizeof(int)));
    CHECK(cudaMemset(made.all, 0, N * sizeof(int)));
    made.last = made.all + N - LAST;
    CHECK(cudaDeviceSynchronize());
    std::vector<int> host(N);
    for (size_t i = 0; i < N; i++) host[i] = int(i);
    if (busy) late<<<1, 1>>>(400000, made.all);
    if (held) {
        static Gate gate;
        CHECK(cudaLaunchHostFunc(cudaStreamLegacy, Gate::wait, &gate));
        std::thread([] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            gate.open = true;
        }).detach();
        DRIVER(cuMemcpyHtoD_v2_ptds((CUdeviceptr)made.all, host.data(), N * sizeof(int)));
        return made;
    }
    CHECK(cudaMemcpy(made.all, host.data(), N * sizeof(int), cudaMemcpyHostToDevice));
    return made;
}

// How many of the last words are the copy's.
static int copies_in(const int *words) {
    std::vector<int> host(LAST);
    CHECK(cudaMemcpy(host.data(), words, LAST * sizeof(int), cudaMemcpyDefault));
    int right = 0;
    for (size_t i = 0; i < LAST; i++) right += host[i] == int(N - LAST + i);
    return right;
}

// Writes at the end of its time.
__global__ void late_fill(int rounds, int *out, size_t n, int value) {
    unsigned x = threadIdx.x + 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525u + 1013904223u;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = x == 0 ? -1 : value;
}

static bool all_are(const std::vector<int> &host, int value) {
    for (int found : host) {
        if (found != value) return false;
    }
    return true;
}

// A copy in a default stream between two devices comes after what both devices' default streams have been given, and before what they get then, whichever device is current.
static void default_streams() {
    const int width = 50, height = 20;
    int *data[2], *filled[2];
    cudaArray_t arrays[2];
    cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
    std::vector<int> host(LAST);
    const size_t bytes = LAST * sizeof(int);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaMalloc(&data[i], bytes));
        CHECK(cudaMalloc(&filled[i], bytes));
        CHECK(cudaMallocArray(&arrays[i], &format, width, height));
    }
    int value = 1;
    for (int from = 0; from < 2; from++) {
        for (int current = 0; current < 2; current++) {
            for (int form = 0; form < 5; form++) {
                int to = 1 - from;
                for (int i = 0; i < 2; i++) {
                    CHECK(cudaSetDevice(i));
                    CHECK(cudaMemset(data[i], 0, bytes));
                    CHECK(cudaDeviceSynchronize());
                }
                // The source is written late, and written again behind the copy; so is what the copy overwrites.
                CHECK(cudaSetDevice(from));
                late_fill<<<1, 32>>>(400000, data[from], LAST, value);
                if (form == 4) CHECK(cudaMemcpy2DToArray(arrays[from], 0, 0, data[from], width * 4, width * 4, height, cudaMemcpyDeviceToDevice));
                CHECK(cudaSetDevice(to));
                late_fill<<<1, 32>>>(200000, data[to], LAST, -7);
                CHECK(cudaSetDevice(current));
                cudaMemcpy3DParms box = {};
                box.srcArray = arrays[from];
                box.dstArray = arrays[to];
                box.extent = make_cudaExtent(width, height, 1);
                box.kind = cudaMemcpyDeviceToDevice;
                if (form == 0) CHECK(cudaMemcpyPeer(data[to], to, data[from], from, bytes));
                if (form == 1) CHECK(cudaMemcpy(data[to], data[from], bytes, cudaMemcpyDefault));
                if (form == 2) CHECK(cudaMemcpyPeerAsync(data[to], to, data[from], from, bytes, 0));
                if (form == 3) CHECK(cudaMemcpy2D(data[to], width * 4, data[from], width * 4, width * 4 - 4, height, cudaMemcpyDeviceToDevice));
                if (form == 4) CHECK(cudaMemcpy3D(&box));
                CHECK(cudaSetDevice(to));
                if (form == 4) CHECK(cudaMemcpy2DFromArray(data[to], width * 4, arrays[to], 0, 0, width * 4, height, cudaMemcpyDeviceToDevice));
                copy<<<1, 256>>>(filled[to], data[to], LAST);
                CHECK(cudaSetDevice(from));
                late_fill<<<1, 32>>>(1, data[from], LAST, -9);
                CHECK(cudaSetDevice(to));
                CHECK(cudaMemcpy(host.data(), filled[to], bytes, cudaMemcpyDeviceToHost));
                for (int row = 0; form == 3 && row < height; row++) {
                    if (host[row * width + width - 1] == -7) host[row * width + width - 1] = value;
                }
                char line[100];
                snprintf(line, sizeof line, "form %d of a copy from %d to %d with %d current", form, from, to, current);
                expect_value(line, 1, all_are(host, value));
                value++;
            }
        }
    }
}

int main(int argc, char **argv) {
    // As in "read", "held-read" or "busy-read-8000000": behind a host function, or a kernel, and so many words.
    std::string what = parse_options(argc, argv).word;
    busy = what.rfind("busy-", 0) == 0;
    held = what.rfind("held-", 0) == 0;
    if (busy || held) what = what.substr(5);
    size_t dash = what.find('-');
    N = dash == std::string::npos ? 2 * LAST : strtoull(what.c_str() + dash + 1, nullptr, 10);
    what = what.substr(0, dash);
    const size_t bytes = LAST * sizeof(int);
    if (what == "contexts") {
        // The same device, in another context of the program's own.
        DRIVER(cuInit(0));
        CUcontext contexts[2];
        CUdeviceptr data, found;
        CUstream stream;
        for (CUcontext &context : contexts) DRIVER(cuCtxCreate(&context, nullptr, 0, 0));
        DRIVER(cuMemAlloc(&found, bytes));
        DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        DRIVER(cuCtxSetCurrent(contexts[0]));
        DRIVER(cuMemAlloc(&data, N * sizeof(int)));
        DRIVER(cuMemsetD8(data, 0, N * sizeof(int)));
        DRIVER(cuCtxSynchronize());
        std::vector<int> host(N, 5), back(LAST);
        if (busy) late<<<1, 1>>>(400000, (int *)data);
        DRIVER(cuMemcpyHtoD(data, host.data(), N * sizeof(int)));
        DRIVER(cuCtxSetCurrent(contexts[1]));
        DRIVER(cuMemcpyDtoDAsync(found, data + (N - LAST) * sizeof(int), bytes, stream));
        DRIVER(cuStreamSynchronize(stream));
        DRIVER(cuMemcpyDtoH(back.data(), found, bytes));
        expect_value("what another context reads", 1, back == std::vector<int>(LAST, 5));
        return verdict();
    }
    if (what == "default") {
        default_streams();
        return verdict();
    }
    int *other;
    cudaStream_t stream;
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc(&other, bytes));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int can = 0;
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
    if (what == "kernel" && !can) return pass("no peer access");
    if (what == "kernel") CHECK(cudaDeviceEnablePeerAccess(1, 0));
    Copied data = copied_to(1, other);
    CHECK(cudaSetDevice(0));
    if (what == "read") {
        CHECK(cudaMemcpyPeerAsync(other, 0, data.last, 1, bytes, stream));
        CHECK(cudaStreamSynchronize(stream));
        expect_value("what the other device's stream copies", LAST, copies_in(other));
    } else if (what == "write") {
        CHECK(cudaMemcpyPeerAsync(data.last, 1, other, 0, bytes, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceSynchronize());
        expect_value("words that were overwritten by the copy before", 0, copies_in(data.last));
    } else if (what == "fill") {
        CHECK(cudaMemsetAsync(data.last, 9, bytes, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceSynchronize());
        expect_value("words that were overwritten by the copy before", 0, copies_in(data.last));
    } else if (what == "send") {
        std::vector<int> host(LAST, 9);
        CHECK(cudaMemcpyAsync(data.last, host.data(), bytes, cudaMemcpyHostToDevice, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceSynchronize());
        expect_value("words that were overwritten by the copy before", 0, copies_in(data.last));
    } else if (what == "receive") {
        std::vector<int> host(LAST);
        CHECK(cudaMemcpyAsync(host.data(), data.last, bytes, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        expect_value("what the other device's stream sends to the host", 1, host == numbers(LAST, N - LAST));
    } else if (what == "kernel") {
        copy<<<1, 256, 0, stream>>>(other, data.last, LAST);
        CHECK(cudaStreamSynchronize(stream));
        expect_value("what the other device's kernel reads", LAST, copies_in(other));
    } else {
        fail("knows read, write, fill, send, receive, kernel, contexts and default");
    }
    return verdict();
}
