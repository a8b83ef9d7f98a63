// Drives rgpu's network for NCCL as NCCL does: through the structure that libnccl-net.so exports, with messages in memory that kernels use and in other host memory, several at a time, tested in any order, over many connections.
//
//   nccl_net                two devices of two servers in this process, everything
//   nccl_net staged         the same where the servers have no direct connection
//   nccl_net waiting        kernels wait for messages, and calls of the driver for the kernels
//   nccl_net bench          messages and bytes per second between the two devices
//   nccl_net receive        with the first device: prints a handle, receives from another process
//   nccl_net send HANDLE    with the first device: sends to that process
//   nccl_net endless        like receive, until the other process is gone or has failed
//   nccl_net flood HANDLE   like send, until the other process is gone or has failed
#define PROGRAM "nccl_net"
#include "common.h"

#include <cuda.h>
#include <dlfcn.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

// NCCL's src/include/plugin/net/net_v8.h.
struct Properties {
    char *name, *pciPath;
    uint64_t guid;
    int ptrSupport, regIsGlobal, speed, port;
    float latency;
    int maxComms, maxRecvs, netDeviceType, netDeviceVersion;
};
struct Net {
    const char *name;
    int (*init)(void *log);
    int (*devices)(int *);
    int (*getProperties)(int, Properties *);
    int (*listen)(int, void *handle, void **listener);
    int (*connect)(int, void *handle, void **comm, void **of_device);
    int (*accept)(void *listener, void **comm, void **of_device);
    int (*regMr)(void *comm, void *data, size_t size, int type, void **handle);
    int (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    int (*deregMr)(void *comm, void *handle);
    int (*isend)(void *comm, void *data, int size, int tag, void *handle, void **request);
    int (*irecv)(void *comm, int n, void **data, int *sizes, int *tags, void **handles, void **request);
    int (*iflush)(void *comm, int n, void **data, int *sizes, void **handles, void **request);
    int (*test)(void *request, int *done, int *size);
    int (*closeSend)(void *);
    int (*closeRecv)(void *);
    int (*closeListen)(void *);
    int (*getDeviceMr)(void *, void *, void **);
    int (*irecvConsumed)(void *, int, void *);
};
enum { POINTER_HOST = 1, POINTER_CUDA = 2 };
enum { SUCCESS = 0, REMOTE_ERROR = 6 };
struct Handle {
    char bytes[128];
};

static Net *net;
static std::mt19937 chance(1);

// Nothing here may take longer, however busy the machine is.
struct Deadline {
    std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    void check(const char *what) {
        if (std::chrono::steady_clock::now() > at) fail("%s did not end", what);
    }
};

#define NET(call)                                                                                                        \
    do {                                                                                                                 \
        int result_ = (call);                                                                                            \
        if (result_ != SUCCESS) fail("%s: %d", #call, result_);                                                          \
    } while (0)

static uint8_t pattern(int message, size_t at) { return (uint8_t)(message * 131 + at * 7 + (at >> 8) * 3 + 1); }
static const uint8_t UNTOUCHED = 0xee;

// Page-locked memory that kernels use, as NCCL's kernels do, or other.
enum { MAPPED, PLAIN };

// Memory for a message, of either kind. What kernels use is filled and checked by a device.
struct Memory {
    int device, type;
    size_t size;
    uint8_t *at = nullptr;
    void *handle = nullptr;

    Memory(void *comm, int device, int type, size_t size) : device(device), type(type), size(size) {
        CHECK(cudaSetDevice(device));
        size_t room = std::max(size, (size_t)1);
        CHECK(cudaHostAlloc(&at, room, type == MAPPED ? cudaHostAllocMapped : cudaHostAllocDefault));
        NET(net->regMr(comm, at, room, POINTER_HOST, &handle));
    }
    void put(const std::vector<uint8_t> &bytes) {
        if (type == PLAIN) memcpy(at, bytes.data(), bytes.size());
        else through_device([&](uint8_t *scratch) {
            CHECK(cudaMemcpy(scratch, bytes.data(), size, cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(at, scratch, size, cudaMemcpyDeviceToHost));
        });
    }
    std::vector<uint8_t> get() {
        std::vector<uint8_t> bytes(size), seen(at, at + size);
        if (type == PLAIN) return seen;
        through_device([&](uint8_t *scratch) {
            CHECK(cudaMemcpy(scratch, at, size, cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(bytes.data(), scratch, size, cudaMemcpyDeviceToHost));
        });
        if (bytes != seen) fail("the host and the device see different bytes");
        return bytes;
    }
    template <class Use> void through_device(Use use) {
        if (!size) return;
        CHECK(cudaSetDevice(device));
        uint8_t *scratch;
        CHECK(cudaMalloc(&scratch, size));
        use(scratch);
        CHECK(cudaFree(scratch));
    }
    void end(void *comm) {
        NET(net->deregMr(comm, handle));
        CHECK(cudaSetDevice(device));
        CHECK(cudaFreeHost(at));
    }
};

// What is sent, and how much room the receiver has.
struct Shape {
    size_t size, room;
    int from, to;
};

// One end's work: all messages, some at a time.
struct Side {
    void *comm;
    bool sends;
    std::vector<Shape> shapes;
    std::vector<Memory> memory;
    size_t next = 0, done = 0;
    struct Open {
        size_t message;
        void *request;
    };
    std::vector<Open> open;
    size_t most = 8;

    Side(void *comm, bool sends, int device, const std::vector<Shape> &shapes)
        : comm(comm), sends(sends), shapes(shapes) {
        for (size_t i = 0; i < shapes.size(); i++) {
            const Shape &shape = shapes[i];
            memory.emplace_back(comm, device, sends ? shape.from : shape.to, sends ? shape.size : shape.room);
            std::vector<uint8_t> bytes(memory.back().size, UNTOUCHED);
            if (sends) {
                for (size_t k = 0; k < bytes.size(); k++) bytes[k] = pattern((int)i, k);
            }
            memory.back().put(bytes);
        }
    }
    // Returns the error of the first call that fails.
    int step() {
        while (next < shapes.size() && open.size() < most) {
            void *request = nullptr, *at = memory[next].at;
            int size = (int)memory[next].size, tag = 0;
            int result = sends ? net->isend(comm, at, size, tag, memory[next].handle, &request)
                               : net->irecv(comm, 1, &at, &size, &tag, &memory[next].handle, &request);
            if (result != SUCCESS) return result;
            if (!request) break;
            open.push_back({next++, request});
        }
        std::shuffle(open.begin(), open.end(), chance);
        for (size_t i = 0; i < open.size();) {
            int finished = 0, size = -1;
            int result = net->test(open[i].request, &finished, &size);
            if (result != SUCCESS) return result;
            if (!finished) {
                i++;
                continue;
            }
            size_t want = shapes[open[i].message].size;
            if (size != (int)want) fail("message %zu has %d bytes instead of %zu", open[i].message, size, want);
            if (!sends) {
                void *at = memory[open[i].message].at, *request = this;
                NET(net->iflush(comm, 1, &at, &size, &memory[open[i].message].handle, &request));
                if (request) fail("there is something to flush");
            }
            open.erase(open.begin() + i);
            done++;
        }
        return SUCCESS;
    }
    bool finished() const { return done == shapes.size(); }
    void check() {
        for (size_t i = 0; !sends && i < shapes.size(); i++) {
            std::vector<uint8_t> bytes = memory[i].get();
            for (size_t k = 0; k < bytes.size(); k++) {
                uint8_t want = k < shapes[i].size ? pattern((int)i, k) : UNTOUCHED;
                if (bytes[k] != want) fail("message %zu: byte %zu is %d instead of %d", i, k, bytes[k], want);
            }
        }
    }
    void end() {
        for (Memory &one : memory) one.end(comm);
    }
};

static void finish_all(std::vector<Side *> sides) {
    Deadline deadline;
    for (;;) {
        bool all = true;
        for (Side *side : sides) {
            NET(side->step());
            all = all && side->finished();
        }
        if (all) break;
        deadline.check("a transfer");
    }
    for (Side *side : sides) {
        side->check();
        side->end();
    }
}

struct Pair {
    void *listener = nullptr, *send = nullptr, *receive = nullptr;
    Pair(int from, int to) {
        Handle handle;
        NET(net->listen(0, &handle, &listener));
        Deadline deadline;
        // As in NCCL's threads, the current device is that of the messages.
        while (!send || !receive) {
            CHECK(cudaSetDevice(from));
            if (!send) NET(net->connect(0, &handle, &send, nullptr));
            CHECK(cudaSetDevice(to));
            if (!receive) NET(net->accept(listener, &receive, nullptr));
            deadline.check("a connection");
        }
    }
    void close() {
        NET(net->closeSend(send));
        NET(net->closeRecv(receive));
        NET(net->closeListen(listener));
    }
};

static std::vector<Shape> kernels_only() {
    std::vector<Shape> shapes;
    for (size_t size : {(size_t)524288, (size_t)1, (size_t)0, (size_t)4096, (size_t)(3 << 20) + 7, (size_t)1 << 20, (size_t)9 << 20}) {
        shapes.push_back({size, size, MAPPED, MAPPED});
        shapes.push_back({size, size + 4096, MAPPED, MAPPED});
    }
    for (int i = 0; i < 40; i++) shapes.push_back({(size_t)i * 1000, 65536, MAPPED, MAPPED});
    return shapes;
}

static std::vector<Shape> all_kinds() {
    std::vector<Shape> shapes = kernels_only();
    for (size_t size : {(size_t)0, (size_t)5, (size_t)70000, (size_t)(3 << 20) + 7}) {
        shapes.push_back({size, size, PLAIN, PLAIN});
        shapes.push_back({size, size + 1, MAPPED, PLAIN});
        shapes.push_back({size, size + 100, PLAIN, MAPPED});
        shapes.push_back({size, size, MAPPED, MAPPED});
    }
    return shapes;
}

static size_t sum(const std::vector<Shape> &shapes, bool kernels) {
    size_t bytes = 0;
    for (const Shape &shape : shapes) {
        if (kernels == (shape.from == MAPPED && shape.to == MAPPED)) bytes += shape.size;
    }
    return bytes;
}

static size_t between_kernels = 0, others = 0;

static void transfer(Pair &pair, int from, int to, const std::vector<Shape> &shapes) {
    Side sender(pair.send, true, from, shapes), receiver(pair.receive, false, to, shapes);
    finish_all({&sender, &receiver});
    between_kernels += sum(shapes, true);
    others += sum(shapes, false);
}

static void one_connection() {
    Pair forth(0, 1), back(1, 0);
    void *handle = nullptr;
    uint8_t word[8];
    if (net->regMr(forth.send, word, sizeof word, POINTER_CUDA, &handle) == SUCCESS) fail("device memory is taken");
    transfer(forth, 0, 1, all_kinds());
    transfer(back, 1, 0, kernels_only());
    // Again, over the same connections.
    transfer(forth, 0, 1, kernels_only());
    forth.close();
    back.close();
}

// A short message in the page with the last bytes of a long one, which the host looks at all the time.
static void two_in_one_page() {
    const size_t LONG = ((size_t)9 << 20) + 2048, ALL = LONG + 100;
    Pair pair(0, 1);
    Memory from(pair.send, 0, MAPPED, ALL), to(pair.receive, 1, MAPPED, ALL);
    std::vector<uint8_t> bytes(ALL);
    for (size_t k = 0; k < ALL; k++) bytes[k] = pattern(5, k);
    from.put(bytes);
    to.put(std::vector<uint8_t>(ALL, UNTOUCHED));
    struct Message {
        size_t at, size;
        void *send, *receive;
    } messages[] = {{LONG, ALL - LONG, nullptr, nullptr}, {0, LONG, nullptr, nullptr}};
    Deadline deadline;
    for (Message &message : messages) {
        void *at = to.at + message.at;
        int size = (int)message.size, tag = 0, finished = 0;
        while (!message.receive) NET(net->irecv(pair.receive, 1, &at, &size, &tag, &to.handle, &message.receive));
        while (!message.send) {
            NET(net->isend(pair.send, from.at + message.at, size, 0, from.handle, &message.send));
            if (message.send) break;
            // The receiver says that it has room.
            NET(net->test(message.receive, &finished, nullptr));
            if (finished) fail("a message has come before it was sent");
            deadline.check("the room for a message");
        }
    }
    for (int open = 4; open;) {
        for (Message &message : messages) {
            for (void **request : {&message.send, &message.receive}) {
                int finished = 0, size = 0;
                if (!*request) continue;
                NET(net->test(*request, &finished, &size));
                for (size_t at = message.at; finished && request == &message.receive && at < message.at + message.size; at++)
                    if (to.at[at] != bytes[at]) fail("byte %zu is %d instead of %d", at, to.at[at], bytes[at]);
                if (finished) open--, *request = nullptr;
                (void)*(volatile uint8_t *)(to.at + LONG);
            }
        }
        deadline.check("a message beside another one");
    }
    from.end(pair.send);
    to.end(pair.receive);
    pair.close();
    between_kernels += ALL;
}

static void only_other_memory() {
    Pair pair(0, 1);
    transfer(pair, 0, 1, {{70000, 70000, PLAIN, PLAIN}, {0, 0, PLAIN, PLAIN}, {3 << 20, 4 << 20, PLAIN, PLAIN}});
    pair.close();
}

static void many_connections() {
    std::vector<Pair> pairs;
    for (int i = 0; i < 20; i++) pairs.emplace_back(i % 2, 1 - i % 2);
    std::vector<Shape> shapes;
    for (int i = 0; i < 30; i++) shapes.push_back({(size_t)(i * 7919), 300000, MAPPED, MAPPED});
    std::vector<Side *> sides;
    for (size_t i = 0; i < pairs.size(); i++) {
        int from = (int)i % 2;
        sides.push_back(new Side(pairs[i].send, true, from, shapes));
        sides.push_back(new Side(pairs[i].receive, false, 1 - from, shapes));
        between_kernels += sum(shapes, true);
    }
    std::shuffle(sides.begin(), sides.end(), chance);
    finish_all(sides);
    for (Side *side : sides) delete side;
    for (Pair &pair : pairs) pair.close();
}

// More than the servers keep at a time.
static void one_connection_after_the_other() {
    for (int i = 0; i < 100; i++) {
        Pair pair(0, 1);
        transfer(pair, 0, 1, {{1000, 1000, MAPPED, MAPPED}});
        pair.close();
    }
}

// Calls fail until one of this kind does.
static void ends_with_an_error(Side &side) {
    Deadline deadline;
    int result;
    while ((result = side.step()) == SUCCESS) {
        if (side.finished()) fail("messages are sent although nobody receives them");
        deadline.check("a connection whose other end is closed");
    }
    if (result != REMOTE_ERROR) fail("a connection whose other end is closed: %d", result);
}

static void closed_early() {
    std::vector<Shape> shapes(40, Shape{1 << 20, 1 << 20, MAPPED, MAPPED});
    for (bool sender_goes : {true, false}) {
        Pair pair(0, 1);
        Side sender(pair.send, true, 0, shapes), receiver(pair.receive, false, 1, shapes);
        Deadline deadline;
        while (receiver.done < 5) {
            NET(sender.step());
            NET(receiver.step());
            deadline.check("a transfer");
        }
        if (sender_goes) {
            NET(net->closeSend(pair.send));
            ends_with_an_error(receiver);
            NET(net->closeRecv(pair.receive));
        } else {
            NET(net->closeRecv(pair.receive));
            ends_with_an_error(sender);
            NET(net->closeSend(pair.send));
        }
        NET(net->closeListen(pair.listener));
        CHECK(cudaSetDevice(0));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceSynchronize());
    }
    // A listener that nobody connects to.
    Handle handle;
    void *listener;
    NET(net->listen(0, &handle, &listener));
    NET(net->closeListen(listener));
}

// A handle that does not come from this plugin, and one of somebody who does not listen.
static void wrong_handles() {
    Handle handle = {};
    void *comm = nullptr;
    if (net->connect(0, &handle, &comm, nullptr) == SUCCESS) fail("a handle of zeros is accepted");
    void *listener;
    NET(net->listen(0, &handle, &listener));
    NET(net->closeListen(listener));
    Deadline deadline;
    int result;
    while ((result = net->connect(0, &handle, &comm, nullptr)) == SUCCESS && !comm) deadline.check("a connection");
    if (result != REMOTE_ERROR) fail("nobody listens, and the answer is %d", result);
}

static void bench() {
    for (size_t size : {(size_t)8, (size_t)4096, (size_t)65536, (size_t)524288, (size_t)1 << 20}) {
        for (size_t most : {(size_t)1, (size_t)4, (size_t)8}) {
            Pair pair(0, 1);
            size_t count = size <= 65536 ? 1000 : 200;
            Memory from(pair.send, 0, MAPPED, size), to(pair.receive, 1, MAPPED, size);
            std::vector<void *> sends, receives;
            size_t sent = 0, posted = 0, done = 0;
            auto run = [&](size_t all) {
                Deadline deadline;
                while (done < all) {
                    void *request = nullptr, *at = to.at;
                    int bytes = (int)size, tag = 0, finished = 0;
                    if (posted < all && receives.size() < most) {
                        NET(net->irecv(pair.receive, 1, &at, &bytes, &tag, &to.handle, &request));
                        if (request) posted++, receives.push_back(request);
                    }
                    if (sent < all && sends.size() < most) {
                        NET(net->isend(pair.send, from.at, bytes, tag, from.handle, &request));
                        if (request) sent++, sends.push_back(request);
                    }
                    if (!sends.empty()) {
                        NET(net->test(sends[0], &finished, &bytes));
                        if (finished) sends.erase(sends.begin());
                    }
                    if (!receives.empty()) {
                        NET(net->test(receives[0], &finished, &bytes));
                        if (finished) done++, receives.erase(receives.begin());
                    }
                    deadline.check("the measurement");
                }
            };
            run(10);
            auto begin = std::chrono::steady_clock::now();
            run(count + 10);
            double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            printf("%8zu bytes, %zu at a time: %.1f us each, %.0f MB/s\n", size, most, seconds * 1e6 / count,
                   size * count / seconds / 1e6);
            from.end(pair.send);
            to.end(pair.receive);
            pair.close();
        }
    }
}

__global__ void wait_for(const volatile unsigned *word, unsigned value) {
    while (*word != value) {
    }
}

// Loads a module in a thread of its own, and returns when that waits for the answer.
struct Loader {
    std::atomic<long> number{0};
    std::thread thread;

    explicit Loader(int device) : thread([this, device] {
        number = syscall(SYS_gettid);
        CHECK(cudaSetDevice(device));
        CUmodule module;
        const char *text = ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry nothing() { ret; }\n";
        if (cuModuleLoadData(&module, text) != CUDA_SUCCESS) fail("a module is not loaded");
        if (cuModuleUnload(module) != CUDA_SUCCESS) fail("a module is not unloaded");
    }) {
        Deadline deadline;
        for (int asleep = 0; asleep < 10;) {
            std::ifstream file("/proc/self/task/" + std::to_string(number) + "/stat");
            std::string line;
            std::getline(file, line);
            size_t end = line.rfind(") ");
            asleep = end != std::string::npos && line[end + 2] == 'S' ? asleep + 1 : 0;
            usleep(1000);
            deadline.check("a call that waits for a kernel");
        }
    }
};

// A kernel on each device waits for a message from the other one, as those of a collective do. Then a module is loaded:
// NVIDIA's driver may wait in that call until the kernel has ended, and what comes after it waits with it. The messages must
// arrive all the same, in both directions.
static void while_kernels_wait() {
    const int ROUNDS = 20;
    Pair forth(0, 1), back(1, 0);
    Pair *to[2] = {&back, &forth}, *from[2] = {&forth, &back};
    std::vector<Memory> inbox, outbox;
    cudaStream_t streams[2];
    for (int device = 0; device < 2; device++) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking));
        // Its code is loaded with the first launch.
        inbox.emplace_back(to[device]->receive, device, MAPPED, sizeof(unsigned));
        inbox.back().put(std::vector<uint8_t>(sizeof(unsigned)));
        wait_for<<<1, 1, 0, streams[device]>>>((unsigned *)inbox.back().at, 0);
        CHECK(cudaDeviceSynchronize());
        outbox.emplace_back(from[device]->send, device, MAPPED, (ROUNDS + 1) * sizeof(unsigned));
        // What the host writes is sent as well.
        for (unsigned i = 0; i <= ROUNDS; i++) ((unsigned *)outbox.back().at)[i] = i;
    }
    for (int round = 1; round <= ROUNDS; round++) {
        std::unique_ptr<Loader> loaders[2];
        for (int device = 0; device < 2; device++) {
            CHECK(cudaSetDevice(device));
            wait_for<<<1, 1, 0, streams[device]>>>((unsigned *)inbox[device].at, round);
            CHECK(cudaGetLastError());
            loaders[device] = std::make_unique<Loader>(device);
        }
        std::vector<void *> open;
        for (int device = 0; device < 2; device++) {
            void *request = nullptr, *at = inbox[device].at;
            int size = sizeof(unsigned), tag = 0;
            NET(net->irecv(to[device]->receive, 1, &at, &size, &tag, &inbox[device].handle, &request));
            if (!request) fail("a message is not received");
            open.push_back(request);
        }
        Deadline deadline;
        for (int device = 0; device < 2; device++) {
            void *request = nullptr;
            while (!request) {
                NET(net->isend(from[device]->send, outbox[device].at + round * sizeof(unsigned), sizeof(unsigned), 0,
                               outbox[device].handle, &request));
                if (request) break;
                // The receiver says that it has room.
                int finished = 0;
                NET(net->test(open[1 - device], &finished, nullptr));
                if (finished) fail("a message has come before it was sent");
                deadline.check("the room for a message");
            }
            open.push_back(request);
        }
        while (!open.empty()) {
            for (size_t i = 0; i < open.size();) {
                int finished = 0, size = 0;
                NET(net->test(open[i], &finished, &size));
                if (finished && size != sizeof(unsigned)) fail("a message has %d bytes", size);
                if (finished) open.erase(open.begin() + i);
                else i++;
            }
            deadline.check("a message that a kernel waits for");
        }
        for (int device = 0; device < 2; device++) {
            CHECK(cudaSetDevice(device));
            CHECK(cudaStreamSynchronize(streams[device]));
            loaders[device]->thread.join();
        }
        between_kernels += 2 * sizeof(unsigned);
    }
    for (int device = 0; device < 2; device++) {
        inbox[device].end(to[device]->receive);
        outbox[device].end(from[device]->send);
    }
    forth.close();
    back.close();
}

static void say(const Handle &handle) {
    for (unsigned char byte : handle.bytes) printf("%02x", byte);
    printf("\n");
    fflush(stdout);
}

static Handle heard(const char *hex) {
    Handle handle = {};
    for (size_t i = 0; i < sizeof handle.bytes && hex[2 * i]; i++) {
        unsigned byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1) fail("%s is no handle", hex);
        handle.bytes[i] = (char)byte;
    }
    return handle;
}

static void *accepted(void **listener) {
    Handle handle;
    void *comm = nullptr;
    NET(net->listen(0, &handle, listener));
    say(handle);
    Deadline deadline;
    while (!comm) {
        NET(net->accept(*listener, &comm, nullptr));
        deadline.check("a connection");
    }
    return comm;
}

static void *connected(const char *hex) {
    Handle handle = heard(hex);
    void *comm = nullptr;
    Deadline deadline;
    while (!comm) {
        NET(net->connect(0, &handle, &comm, nullptr));
        deadline.check("a connection");
    }
    return comm;
}

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "--full") mode = "";
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    int direct_rdma = 0;
    CHECK(cudaDeviceGetAttribute(&direct_rdma, cudaDevAttrGPUDirectRDMASupported, 0));
    if (direct_rdma) fail("network cards of this machine do not reach the device");
    void *library = dlopen("libnccl-net.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) fail("%s", dlerror());
    net = (Net *)dlsym(library, "ncclNetPlugin_v8");
    if (!net) fail("libnccl-net.so has no ncclNetPlugin_v8");
    // The same library, not a second one.
    if (dlsym(library, "rgpu_libcuda") != dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "rgpu_libcuda")) fail("libcuda is there twice");
    // For everybody who has not chosen another one.
    setenv("NCCL_NET", "Socket", 1);
    if (net->init(nullptr) == SUCCESS) fail("the plugin is used although NCCL_NET is Socket");
    setenv("NCCL_P2P_NET_CHUNKSIZE", "17", 1);
    for (const char *chosen : {(const char *)nullptr, "", "rgpu"}) {
        if (chosen) setenv("NCCL_NET", chosen, 1);
        else unsetenv("NCCL_NET");
        NET(net->init(nullptr));
    }
    if (strcmp(getenv("NCCL_P2P_NET_CHUNKSIZE"), "17")) fail("the user's choice is gone");
    if (!getenv("NCCL_SHM_DISABLE")) fail("NCCL would use shared memory between two servers");
    int count = 0;
    NET(net->devices(&count));
    Properties properties = {};
    NET(net->getProperties(0, &properties));
    if (count != 1 || properties.ptrSupport != POINTER_HOST || properties.maxRecvs != 1 || properties.netDeviceType != 0 ||
        strcmp(properties.name, net->name))
        fail("wrong properties");

    if (mode == "receive" || mode == "send") {
        bool sends = mode == "send";
        if (sends && argc < 3) fail("send HANDLE");
        void *listener = nullptr, *comm = sends ? connected(argv[2]) : accepted(&listener);
        for (int round = 0; round < 2; round++) {
            Side side(comm, sends, 0, all_kinds());
            finish_all({&side});
        }
        NET(sends ? net->closeSend(comm) : net->closeRecv(comm));
        if (listener) NET(net->closeListen(listener));
        return pass("%zu bytes between kernels, %zu others", 2 * sum(all_kinds(), true), 2 * sum(all_kinds(), false));
    }
    if (mode == "endless" || mode == "flood") {
        bool sends = mode == "flood";
        if (sends && argc < 3) fail("flood HANDLE");
        void *listener = nullptr, *comm = sends ? connected(argv[2]) : accepted(&listener);
        std::vector<Shape> shapes(10, Shape{1 << 20, 1 << 20, MAPPED, MAPPED});
        int result = SUCCESS;
        size_t rounds = 0;
        Deadline deadline;
        while (result == SUCCESS) {
            Side side(comm, sends, 0, shapes);
            while (!side.finished() && (result = side.step()) == SUCCESS) deadline.check("an endless transfer");
            if (result == SUCCESS) {
                side.check();
                side.end();
                if (++rounds == 3) printf("under way\n"), fflush(stdout);
            }
        }
        NET(sends ? net->closeSend(comm) : net->closeRecv(comm));
        return pass("error %d after %zu rounds", result, rounds);
    }
    CHECK(cudaGetDeviceCount(&count));
    if (count < 2) fail("there are not two devices");
    if (mode == "bench") {
        bench();
        return pass("measured");
    }
    if (mode == "waiting") {
        while_kernels_wait();
        return pass("%zu bytes between kernels, %zu others", between_kernels, others);
    }
    one_connection();
    two_in_one_page();
    only_other_memory();
    many_connections();
    one_connection_after_the_other();
    closed_early();
    wrong_handles();
    one_connection();
    return pass("%zu bytes between kernels, %zu others", between_kernels, others);
}
