// Random work of several threads on streams that they share: kernels, fills, copies of every kind, stream-ordered
// memory, graphs and host functions on buffers that pass from thread to thread and from stream to stream, ordered by
// events, or because a thread has waited or was told by a query that the work is done. The host knows what each buffer
// has to hold: whatever comes too early, too late or from elsewhere shows as other words. With two devices, buffers are
// copied between them, too.
#define PROGRAM "shared_streams"
#include "common.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

__global__ void mix(unsigned *words, unsigned n, unsigned value) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        words[i] = words[i] * 1664525u + value + i * 2654435761u;
}
__global__ void add(unsigned *words, const unsigned *others, unsigned n) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) words[i] += others[i];
}

constexpr int THREADS = 4, STREAMS = 3, BUFFERS = 6;

static int devices;
static unsigned most_words;
static std::atomic<unsigned long long> verified{0};

// A stream, which any thread may use while it holds `gate`, and replace while it alone holds it.
struct Place {
    std::shared_mutex gate;
    cudaStream_t stream;
    int device;
    bool blocking;
    unsigned generation = 0;

    void make() { CHECK(cudaStreamCreateWithFlags(&stream, blocking ? cudaStreamDefault : cudaStreamNonBlocking)); }
};

// Device memory. `owner` is held by whoever uses it or waits for it.
struct Buffer {
    std::mutex owner;
    int device;
    unsigned *words;
    // Only its own device may access it, by default.
    bool is_from_pool;
    std::vector<unsigned> expected;
    // The stream of its last work, in which `done` of that stream's device was recorded behind it. NULL: there is no unfinished work.
    Place *last = nullptr;
    unsigned generation = 0;
    // `last` is the legacy default stream of this place's device.
    bool in_legacy = false;
    cudaEvent_t done[2];
    std::vector<const char *> history;

    unsigned n() const { return unsigned(expected.size()); }
};

// Page-locked memory of a thread, and when its last copy is over.
struct Piece {
    unsigned *words;
    cudaEvent_t done[2];
    int device = -1;
};

static Place places[2][STREAMS];
static Buffer buffers[2][BUFFERS];

static void compare(const Buffer &buffer, const unsigned *found, unsigned begin, unsigned n, const char *how) {
    for (unsigned i = 0; i < n; i++) {
        if (found[i] == buffer.expected[begin + i]) continue;
        std::string history;
        for (const char *step : buffer.history) history += std::string(" ") + step;
        unsigned wrong = 0;
        for (unsigned k = i; k < n; k++) wrong += found[k] != buffer.expected[begin + k];
        fail("%s: word %u of %u is %#x instead of %#x, and %u of %u are wrong; the buffer's last steps:%s", how, begin + i, buffer.n(), found[i], buffer.expected[begin + i], wrong, n, history.c_str());
    }
    verified += n;
}

// What a host function compares.
struct Check {
    const unsigned *found;
    std::vector<unsigned> expected;
    static void CUDART_CB run(void *data) {
        std::unique_ptr<Check> check(static_cast<Check *>(data));
        for (size_t i = 0; i < check->expected.size(); i++)
            if (check->found[i] != check->expected[i]) fail("a host function: word %zu of %zu is %#x instead of %#x", i, check->expected.size(), check->found[i], check->expected[i]);
        verified += check->expected.size();
    }
};

class Worker {
public:
    explicit Worker(uint64_t seed) : random(seed) {
        for (Piece &piece : pieces) {
            CHECK(cudaHostAlloc((void **)&piece.words, most_words * sizeof(unsigned), cudaHostAllocPortable));
            make_events(piece.done);
        }
        for (int device = 0; device < devices; device++) {
            CHECK(cudaSetDevice(device));
            CHECK(cudaStreamCreateWithFlags(&own[device], cudaStreamNonBlocking));
        }
    }

    static void make_events(cudaEvent_t *events) {
        for (int device = 0; device < devices; device++) {
            CHECK(cudaSetDevice(device));
            CHECK(cudaEventCreateWithFlags(&events[device], cudaEventDisableTiming));
        }
    }

    void step() {
        if (random.below(40) == 0) return replace();
        int device = random.below(devices);
        Buffer &buffer = buffers[device][random.below(BUFFERS)];
        std::unique_lock<std::mutex> held(buffer.owner, std::try_to_lock);
        if (!held) return std::this_thread::yield();
        // Of the other device only for copies.
        bool copies = random.below(3) != 0;
        Place &place = places[copies ? random.below(devices) : device][random.below(STREAMS)];
        std::shared_lock<std::shared_mutex> gate(place.gate);
        CHECK(cudaSetDevice(place.device));
        if (copies) copy(buffer, place);
        else compute(buffer, place);
    }

    // The buffer, as far as the host is told that all its work is done.
    void check(Buffer &buffer) {
        std::lock_guard<std::mutex> held(buffer.owner);
        wait_for(buffer);
        std::vector<unsigned> found(buffer.n());
        CHECK(cudaSetDevice(buffer.device));
        CHECK(cudaMemcpy(found.data(), buffer.words, found.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
        compare(buffer, found.data(), 0, buffer.n(), "at the end");
    }

private:
    Random random;
    Piece pieces[3];
    // For captures: a capture in a shared stream would take in what other threads put there.
    cudaStream_t own[2];

    void note(Buffer &buffer, const char *what) {
        if (buffer.history.size() == 12) buffer.history.erase(buffer.history.begin());
        buffer.history.push_back(what);
    }

    template <typename Query> static void ask(Query query) {
        cudaError_t status;
        while ((status = query()) == cudaErrorNotReady) std::this_thread::yield();
        CHECK(status);
        // It is remembered as an error, too.
        cudaGetLastError();
    }

    // The host waits until the buffer's work is done, or asks until it is.
    void wait_for(Buffer &buffer) {
        if (!buffer.last) return;
        cudaEvent_t done = buffer.done[buffer.last->device];
        // All of its stream, if that is still there and nobody is about to replace it.
        std::shared_lock<std::shared_mutex> gate(buffer.last->gate, std::defer_lock);
        bool is_there = !buffer.in_legacy && random.below(2) && gate.try_lock() && buffer.last->generation == buffer.generation;
        cudaStream_t stream = is_there ? buffer.last->stream : nullptr;
        if (random.below(2)) {
            CHECK(is_there ? cudaStreamSynchronize(stream) : cudaEventSynchronize(done));
        } else {
            ask([&] { return is_there ? cudaStreamQuery(stream) : cudaEventQuery(done); });
        }
        note(buffer, is_there ? "waited(stream)" : "waited(event)");
        buffer.last = nullptr;
    }

    // Orders a place's next work behind the buffer's.
    void follow(Buffer &buffer, Place &place) {
        if (!buffer.last || (buffer.last == &place && !buffer.in_legacy && buffer.generation == place.generation)) return;
        // A gate that this thread has may not be asked for again.
        if (random.below(3) == 0 && buffer.last != &place) return wait_for(buffer);
        CHECK(cudaStreamWaitEvent(place.stream, buffer.done[buffer.last->device], 0));
        note(buffer, "waits");
    }

    // The place has got work of the buffer's.
    void lead(Buffer &buffer, Place &place) {
        CHECK(cudaEventRecord(buffer.done[place.device], place.stream));
        buffer.last = &place, buffer.generation = place.generation, buffer.in_legacy = false;
    }

    Piece &piece() {
        Piece &piece = pieces[random.below(3)];
        if (piece.device >= 0) CHECK(cudaEventSynchronize(piece.done[piece.device]));
        piece.device = -1;
        return piece;
    }

    void use(Piece &piece, Place &place) {
        CHECK(cudaEventRecord(piece.done[place.device], place.stream));
        piece.device = place.device;
    }

    void range(unsigned n, unsigned &begin, unsigned &count) {
        begin = random.below(3) ? 0 : random.below(n);
        count = 1 + random.below(n - begin);
        if (random.below(3) == 0) begin = 0, count = n;
    }

    void replace() {
        Place &place = places[random.below(devices)][random.below(STREAMS)];
        std::unique_lock<std::shared_mutex> gate(place.gate, std::try_to_lock);
        if (!gate) return;
        CHECK(cudaSetDevice(place.device));
        CHECK(cudaStreamDestroy(place.stream));
        place.generation++;
        place.make();
    }

    void compute(Buffer &buffer, Place &place) {
        unsigned value = unsigned(random.next());
        switch (random.below(6)) {
        case 0: {
            unsigned begin, count;
            range(buffer.n(), begin, count);
            follow(buffer, place);
            CHECK(cudaMemsetAsync(buffer.words + begin, value & 0xff, count * sizeof(unsigned), place.stream));
            std::fill_n(buffer.expected.begin() + begin, count, (value & 0xff) * 0x01010101u);
            note(buffer, "fill");
            break;
        }
        case 1: {
            Buffer &other = buffers[buffer.device][random.below(BUFFERS)];
            if (&other == &buffer) return;
            std::unique_lock<std::mutex> held(other.owner, std::try_to_lock);
            if (!held) return;
            follow(buffer, place);
            follow(other, place);
            unsigned n = std::min(buffer.n(), other.n());
            add<<<4, 64, 0, place.stream>>>(buffer.words, other.words, n);
            LAUNCHED();
            for (unsigned i = 0; i < n; i++) buffer.expected[i] += other.expected[i];
            note(buffer, "add"), note(other, "added");
            lead(other, place);
            break;
        }
        case 2: {
            // Its words go to memory that is freed at once, and come back, or stay there.
            follow(buffer, place);
            size_t bytes = buffer.n() * sizeof(unsigned);
            unsigned *words;
            CHECK(cudaMallocAsync((void **)&words, bytes, place.stream));
            CHECK(cudaMemcpyAsync(words, buffer.words, bytes, cudaMemcpyDeviceToDevice, place.stream));
            mix<<<4, 64, 0, place.stream>>>(words, buffer.n(), value);
            LAUNCHED();
            mixed(buffer, value);
            if (buffer.is_from_pool && random.below(2)) {
                std::swap(words, buffer.words);
                note(buffer, "move");
            } else {
                CHECK(cudaMemcpyAsync(buffer.words, words, bytes, cudaMemcpyDeviceToDevice, place.stream));
                note(buffer, "there_and_back");
            }
            CHECK(cudaFreeAsync(words, place.stream));
            break;
        }
        case 3: {
            // A graph, which ends as soon as it was launched.
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            follow(buffer, place);
            CHECK(cudaStreamBeginCapture(own[place.device], cudaStreamCaptureModeThreadLocal));
            mix<<<4, 64, 0, own[place.device]>>>(buffer.words, buffer.n(), value);
            mix<<<4, 64, 0, own[place.device]>>>(buffer.words, buffer.n(), ~value);
            CHECK(cudaStreamEndCapture(own[place.device], &graph));
            CHECK(cudaGraphInstantiate(&exec, graph, 0));
            CHECK(cudaGraphDestroy(graph));
            CHECK(cudaGraphLaunch(exec, place.stream));
            CHECK(cudaGraphExecDestroy(exec));
            for (unsigned again : {value, ~value}) mixed(buffer, again);
            note(buffer, "graph");
            break;
        }
        default:
            follow(buffer, place);
            mix<<<4, 64, 0, place.stream>>>(buffer.words, buffer.n(), value);
            LAUNCHED();
            mixed(buffer, value);
            note(buffer, "mix");
        }
        lead(buffer, place);
    }

    static void mixed(Buffer &buffer, unsigned value) {
        for (unsigned i = 0; i < buffer.n(); i++) buffer.expected[i] = buffer.expected[i] * 1664525u + value + i * 2654435761u;
    }

    void copy(Buffer &buffer, Place &place) {
        unsigned begin, count;
        range(buffer.n(), begin, count);
        size_t bytes = count * sizeof(unsigned);
        std::vector<unsigned> words(count);
        switch (random.below(8)) {
        case 0: {
            follow(buffer, place);
            random.fill(words.data(), bytes);
            std::copy(words.begin(), words.end(), buffer.expected.begin() + begin);
            CHECK(cudaMemcpyAsync(buffer.words + begin, words.data(), bytes, cudaMemcpyHostToDevice, place.stream));
            // It has been read.
            std::fill(words.begin(), words.end(), 0xbad);
            note(buffer, "from_pageable");
            break;
        }
        case 1: {
            Piece &from = piece();
            follow(buffer, place);
            random.fill(words.data(), bytes);
            std::copy(words.begin(), words.end(), from.words);
            std::copy(words.begin(), words.end(), buffer.expected.begin() + begin);
            CHECK(cudaMemcpyAsync(buffer.words + begin, from.words, bytes, cudaMemcpyHostToDevice, place.stream));
            use(from, place);
            note(buffer, "from_pinned");
            break;
        }
        case 2:
            follow(buffer, place);
            CHECK(cudaMemcpyAsync(words.data(), buffer.words + begin, bytes, cudaMemcpyDeviceToHost, place.stream));
            // To pageable memory, the call returns when the copy is over.
            compare(buffer, words.data(), begin, count, "to pageable memory");
            note(buffer, "to_pageable");
            break;
        case 3: {
            Piece &to = piece();
            follow(buffer, place);
            CHECK(cudaMemcpyAsync(to.words, buffer.words + begin, bytes, cudaMemcpyDeviceToHost, place.stream));
            use(to, place);
            note(buffer, "to_pinned");
            if (random.below(2)) {
                CHECK(cudaEventSynchronize(to.done[place.device]));
            } else {
                ask([&] { return cudaEventQuery(to.done[place.device]); });
            }
            compare(buffer, to.words, begin, count, "to page-locked memory");
            break;
        }
        case 4: {
            Piece &to = piece();
            follow(buffer, place);
            CHECK(cudaMemcpyAsync(to.words, buffer.words + begin, bytes, cudaMemcpyDeviceToHost, place.stream));
            auto expected = buffer.expected.begin() + begin;
            CHECK(cudaLaunchHostFunc(place.stream, Check::run, new Check{to.words, {expected, expected + count}}));
            use(to, place);
            note(buffer, "host_function");
            break;
        }
        case 5: {
            // In the legacy default stream of the buffer's device, which comes behind blocking streams by itself.
            bool is_behind = buffer.last == &place && !buffer.in_legacy && buffer.generation == place.generation && place.blocking && place.device == buffer.device;
            if (buffer.last && !is_behind) {
                // A gate that this thread has may not be asked for again.
                if (buffer.last != &place) wait_for(buffer);
                else CHECK(cudaEventSynchronize(buffer.done[place.device]));
                buffer.last = nullptr;
            }
            Place &home = places[buffer.device][0];
            CHECK(cudaSetDevice(buffer.device));
            if (random.below(2)) {
                CHECK(cudaMemcpy(words.data(), buffer.words + begin, bytes, cudaMemcpyDeviceToHost));
                compare(buffer, words.data(), begin, count, "by a synchronous copy");
                note(buffer, "sync_to_host");
            } else {
                random.fill(words.data(), bytes);
                CHECK(cudaMemcpy(buffer.words + begin, words.data(), bytes, cudaMemcpyHostToDevice));
                std::copy(words.begin(), words.end(), buffer.expected.begin() + begin);
                note(buffer, "sync_to_device");
            }
            CHECK(cudaEventRecord(buffer.done[buffer.device], cudaStreamLegacy));
            buffer.last = &home, buffer.in_legacy = true;
            return;
        }
        default: {
            Buffer &other = buffers[random.below(devices)][random.below(BUFFERS)];
            if (&other == &buffer) return;
            std::unique_lock<std::mutex> held(other.owner, std::try_to_lock);
            if (!held) return;
            follow(buffer, place);
            follow(other, place);
            count = std::min(count, other.n());
            bytes = count * sizeof(unsigned);
            unsigned to = random.below(other.n() - count + 1);
            if (random.below(2)) CHECK(cudaMemcpyPeerAsync(other.words + to, other.device, buffer.words + begin, buffer.device, bytes, place.stream));
            else CHECK(cudaMemcpyAsync(other.words + to, buffer.words + begin, bytes, cudaMemcpyDefault, place.stream));
            std::copy_n(buffer.expected.begin() + begin, count, other.expected.begin() + to);
            note(buffer, "source"), note(other, buffer.device == other.device ? "copy" : "peer_copy");
            lead(other, place);
        }
        }
        lead(buffer, place);
    }
};

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    int steps = options.number ? (int)options.number : options.full ? 5000 : 200;
    most_words = options.full ? 1 << 20 : 1 << 15;
    CHECK(cudaGetDeviceCount(&devices));
    devices = std::min(devices, 2);
    Random random(options.seed);
    for (int device = 0; device < devices; device++) {
        for (int i = 0; i < STREAMS; i++) {
            Place &place = places[device][i];
            CHECK(cudaSetDevice(device));
            place.device = device, place.blocking = i == 0;
            place.make();
        }
        for (Buffer &buffer : buffers[device]) {
            Worker::make_events(buffer.done);
            CHECK(cudaSetDevice(device));
            // Few are large.
            unsigned n = 1 + random.below(most_words >> random.below(8));
            buffer.device = device;
            buffer.expected.resize(n);
            buffer.is_from_pool = devices == 1;
            if (buffer.is_from_pool) CHECK(cudaMallocAsync((void **)&buffer.words, n * sizeof(unsigned), places[device][0].stream));
            else CHECK(cudaMalloc(&buffer.words, n * sizeof(unsigned)));
            CHECK(cudaMemsetAsync(buffer.words, 0, n * sizeof(unsigned), places[device][0].stream));
            CHECK(cudaEventRecord(buffer.done[device], places[device][0].stream));
            buffer.last = &places[device][0];
        }
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++) {
        threads.emplace_back([steps, seed = random.next()] {
            Worker worker(seed);
            for (int step = 0; step < steps; step++) worker.step();
        });
    }
    for (std::thread &thread : threads) thread.join();
    Worker last(random.next());
    for (int device = 0; device < devices; device++)
        for (Buffer &buffer : buffers[device]) last.check(buffer);
    return pass("%d threads, %d steps each, %d device%s; %llu words compared", THREADS, steps, devices, devices == 1 ? "" : "s", verified.load());
}
