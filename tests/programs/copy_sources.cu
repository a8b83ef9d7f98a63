// A copy to the device reads its source when the earlier work of its stream is done: functions, fills and copies that write it.
#define PROGRAM "copy_sources"
#include "common.h"

#include <unistd.h>

const size_t MOST = 4 << 20;

struct Writing {
    unsigned char *at;
    size_t size;
};

// Gives a copy that does not wait the time to read too early.
static void CUDART_CB write_late(void *data) {
    Writing *writing = (Writing *)data;
    usleep(20000);
    memset(writing->at, 7, writing->size);
}

static unsigned char *source, *pinned, *target;

// Puts work on a stream that writes 7 into the source.
static void write(int writer, Writing *writing, cudaStream_t stream) {
    if (writer == 0) CHECK(cudaLaunchHostFunc(stream, write_late, writing));
    if (writer == 1) CHECK(cudaMemsetAsync(source, 7, writing->size, stream));
    if (writer == 2) CHECK(cudaMemcpyAsync(source, pinned, writing->size, cudaMemcpyHostToHost, stream));
}

static void found(const char *copy, int writer, size_t size, bool registered) {
    const char *writers[] = {"a function", "a fill", "a copy"};
    unsigned char back[2] = {};
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(back, target, 1, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(back + 1, target + size - 2, 1, cudaMemcpyDeviceToHost));
    REQUIRE(back[0] == 7 && back[1] == 7, "%s of %zu %s bytes behind %s found %d and %d", copy, size,
            registered ? "registered" : "pageable", writers[writer], back[0], back[1]);
}

int main() {
    source = (unsigned char *)aligned_alloc(4096, MOST);
    CHECK(cudaMallocHost(&pinned, MOST));
    memset(pinned, 7, MOST);
    CHECK(cudaMalloc(&target, MOST));
    cudaStream_t blocking, beside;
    CHECK(cudaStreamCreate(&blocking));
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));

    int copies = 0;
    for (int registered = 0; registered < 2; registered++) {
        if (registered) CHECK(cudaHostRegister(source, MOST, 0));
        for (int writer = 0; writer < (registered ? 3 : 1); writer++) {
            for (size_t size : {(size_t)4, (size_t)65536, MOST}) {
                Writing writing = {source, size};
                auto begin = [&] {
                    CHECK(cudaDeviceSynchronize());
                    memset(source, 1, size);
                    copies++;
                };
                // The default stream comes behind the blocking one.
                for (cudaStream_t stream : {(cudaStream_t)0, blocking}) {
                    begin();
                    write(writer, &writing, stream);
                    CHECK(cudaMemcpy(target, source, size, cudaMemcpyHostToDevice));
                    found("a copy", writer, size, registered);
                    begin();
                    write(writer, &writing, stream);
                    CHECK(cudaMemcpy2D(target, size / 2, source, size / 2, size / 2 - 1, 2, cudaMemcpyHostToDevice));
                    found("a copy of rows", writer, size, registered);
                }
                if (!registered) continue;
                begin();
                write(writer, &writing, beside);
                CHECK(cudaMemcpyAsync(target, source, size, cudaMemcpyHostToDevice, beside));
                found("an asynchronous copy", writer, size, registered);
                begin();
                write(writer, &writing, beside);
                CHECK(cudaMemcpy2DAsync(target, size / 2, source, size / 2, size / 2 - 1, 2, cudaMemcpyHostToDevice, beside));
                found("an asynchronous copy of rows", writer, size, registered);
            }
        }
    }
    CHECK(cudaHostUnregister(source));
    return pass("%d copies", copies);
}
