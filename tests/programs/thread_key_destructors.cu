// A thread's CUDA objects are destroyed by the destructor of a pthread key, made before or after the first CUDA call.
#define PROGRAM "thread_key_destructors"
#include "common.h"

#include <atomic>
#include <pthread.h>
#include <thread>

struct Objects {
    void *memory;
    cudaStream_t stream;
    cudaEvent_t event;
};

static pthread_key_t early, late;
static std::atomic<int> destroyed;

static void destroy(void *value) {
    Objects *objects = (Objects *)value;
    CHECK(cudaStreamSynchronize(objects->stream));
    CHECK(cudaEventDestroy(objects->event));
    CHECK(cudaStreamDestroy(objects->stream));
    CHECK(cudaFree(objects->memory));
    delete objects;
    destroyed++;
}

static void use(pthread_key_t key) {
    Objects *objects = new Objects;
    CHECK(cudaMalloc(&objects->memory, 1024));
    CHECK(cudaStreamCreate(&objects->stream));
    CHECK(cudaEventCreate(&objects->event));
    CHECK(cudaMemsetAsync(objects->memory, 1, 1024, objects->stream));
    REQUIRE(pthread_setspecific(key, objects) == 0, "no value for a key");
}

int main() {
    REQUIRE(pthread_key_create(&early, destroy) == 0, "no key");
    CHECK(cudaFree(nullptr));
    REQUIRE(pthread_key_create(&late, destroy) == 0, "no second key");
    for (int i = 0; i < 3; i++) {
        std::thread([] { use(early), use(late); }).join();
    }
    REQUIRE(destroyed == 6, "%d of 6 destructors", destroyed.load());
    return pass("%d destructors", destroyed.load());
}
