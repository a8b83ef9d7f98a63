// One step of each of several programs, as the driver sees it: the calls of a PyTorch training step, of a step of text generation, of a LAMMPS step with its GPU package, without and with long-range forces, of inference as a CUDA graph, of a token of llama.cpp, of a JAX
// training step, of a loop of CuPy with four streams, of a solver that iterates with a graph, of an algorithm of
// Thrust's, and of loops that copy results, in the order and number in which they were traced; and of a training step of torch.compile, as it is and with graphs, of a step of OpenMM with PME and of its iterations for
// constraints, of BabelStream's dot product, and of a short collective of NCCL's, with a wait and without, as these programs' sources make them. `framework_steps NAME COUNT` makes COUNT steps of one of them; without arguments it makes a few of each.
#define PROGRAM "framework_steps"
#include "common.h"

#include <atomic>
#include <condition_variable>
#include <cuda.h>
#include <mutex>
#include <thread>
#include <vector>

#define OK(call)                                                                                                         \
    do {                                                                                                                 \
        CUresult status_ = (call);                                                                                       \
        REQUIRE(status_ == CUDA_SUCCESS, "%s:%d: %s: %d", __FILE__, __LINE__, #call, (int)status_);                      \
    } while (0)

// Each block adds one to its floats, by way of as much shared memory as it was given.
__global__ void add(float *p, int n) {
    extern __shared__ float s[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x] = i < n ? p[i] : 0;
    __syncthreads();
    if (i < n) p[i] = s[threadIdx.x] + 1;
}

// What a block has found goes to memory of the host.
__global__ void partial_sums(const float *p, double *sums) {
    if (threadIdx.x == 0) sums[blockIdx.x] = p[0] + blockIdx.x;
}

// Tells the host whether so much is reached, by memory that it shares with the host.
__global__ void converged(const float *p, float enough, int *flag) {
    if (p[0] >= enough) *flag = 1;
}

// Words in as many pages, none of which are neighbors: the kernel's, one by which it tells the program that they are there, and the program's answer.
static const int PURPOSE = 2048, PURPOSES = 7, TELLS = 5, ANSWERS = 6;

__global__ void exchange_words(volatile int *words, int number) {
    for (int i = 0; i < TELLS; i++) words[i * PURPOSE] = number + i;
    __threadfence_system();
    words[TELLS * PURPOSE] = number;
    while (words[ANSWERS * PURPOSE] != number) {}
}

// Reads one texture, and writes it where another one reads.
__global__ void filter(cudaTextureObject_t from, cudaTextureObject_t before, float *to) {
    float last = tex1Dfetch<float>(before, threadIdx.x);
    to[threadIdx.x] = tex1Dfetch<float>(from, threadIdx.x) + (last < 0 ? last : 0);
}

static const int N = 128;
static CUkernel kernel, sums_kernel, converged_kernel, filter_kernel, collective_kernel;
static CUdevice device;
// Two arrays: what the steps count in, and one that nothing is read from.
static CUdeviceptr data;
static int launches = 0;

// As cuBLASLt launches: with attributes, by the kernel's own handle.
static void launch(CUstream stream, unsigned shared, bool with_attributes) {
    int n = N;
    void *arguments[] = {&data, &n};
    if (with_attributes) {
        CUlaunchAttribute attributes[2] = {};
        attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[0].value.clusterDim.x = 2;
        attributes[0].value.clusterDim.y = attributes[0].value.clusterDim.z = 1;
        attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[1].value.programmaticStreamSerializationAllowed = 0;
        CUlaunchConfig config = {};
        config.gridDimX = 4;
        config.blockDimX = 32;
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
        config.sharedMemBytes = shared;
        config.hStream = stream;
        config.attrs = attributes;
        config.numAttrs = 2;
        OK(cuLaunchKernelEx(&config, (CUfunction)kernel, arguments, nullptr));
    } else {
        OK(cuLaunchKernel((CUfunction)kernel, 4, 1, 1, 32, 1, 1, shared, stream, arguments, nullptr));
    }
    launches++;
}

static void check(float value) {
    REQUIRE(value == launches, "%f after %d launches", value, launches);
}

// Linear layers forwards and backwards, each a matrix product of cuBLASLt; then the optimizer. The loss is looked at in the end.
static void training(CUstream stream, int step) {
    for (int layer = 0; layer < 32; layer++) {
        CUdevice now;
        OK(cuCtxGetDevice(&now));
        CUstreamCaptureStatus capturing;
        OK(cuStreamIsCapturing(stream, &capturing));
        unsigned type = 0;
        OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, data));
        int shared = 1024 * (1 + (layer + step) % 4);
        OK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared, kernel, device));
        size_t limit = 0;
        OK(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
        launch(stream, shared, true);
        int size = 0;
        OK(cuKernelGetAttribute(&size, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel, device));
        launch(stream, 128, false);
    }
    OK(cuStreamSynchronize(stream));
}

// One token: its number goes to the device, every layer chooses its split by what fits, and the next number comes back.
static void decoding(CUstream stream, int step) {
    float token = 0;
    OK(cuMemcpyHtoDAsync(data + 4 * N, &token, sizeof token, stream));
    for (int layer = 0; layer < 16; layer++) {
        CUfunction function;
        OK(cuKernelGetFunction(&function, kernel));
        OK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 2048 + 1024 * (layer % 2)));
        OK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
        int blocks = 0, processors = 0, grid = 0, best = 0;
        OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 32, 1024));
        OK(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, function, 64 + 32 * (step % 3), 1024, CU_OCCUPANCY_DEFAULT));
        OK(cuOccupancyMaxPotentialBlockSize(&grid, &best, function, nullptr, 128, 0));
        OK(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
        REQUIRE(blocks > 0 && processors > 0 && grid > 0 && best > 0, "nothing fits");
        launch(stream, 1024, layer % 2);
    }
    float value = 0;
    OK(cuMemcpyDtoHAsync(&value, data, sizeof value, stream));
    OK(cuStreamSynchronize(stream));
    check(value);
}

// A timer of the GPU package: two events, asked for the time between them once the second has come.
struct Timer {
    CUevent start, stop;
    Timer() {
        OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
        OK(cuEventCreate(&stop, CU_EVENT_DEFAULT));
    }
    float time() {
        float milliseconds = -1;
        OK(cuEventSynchronize(stop));
        OK(cuEventElapsedTime(&milliseconds, start, stop));
        REQUIRE(milliseconds >= 0, "%f ms", milliseconds);
        return milliseconds;
    }
    template <class Work> void around(CUstream stream, Work work) {
        OK(cuEventRecord(start, stream));
        work();
        OK(cuEventRecord(stop, stream));
    }
    // What has not taken place took no time.
    void zero(CUstream stream) {
        around(stream, [] {});
    }
};

// Positions go to the device, forces come back, every part of it is timed.
static void lammps(CUstream stream, int step) {
    static Timer positions, neighbors, pair, answers;
    static float *pinned = nullptr;
    static double total = 0;
    if (!pinned) OK(cuMemHostAlloc((void **)&pinned, 4 * N, 0));
    positions.around(stream, [&] { OK(cuMemcpyHtoDAsync(data + 4 * N, pinned, 4 * N, stream)); });
    // Neighbors are sorted anew now and then.
    if (step % 10 == 0) neighbors.around(stream, [&] { launch(stream, 128, false); });
    pair.around(stream, [&] { launch(stream, 128, false); launch(stream, 128, false); });
    answers.around(stream, [&] { OK(cuMemcpyDtoHAsync(pinned, data, 4 * N, stream)); });
    OK(cuStreamSynchronize(stream));
    check(pinned[N - 1]);
    for (Timer *timer : {&positions, &neighbors, &pair, &answers}) total += timer->time();
    REQUIRE(total > 0, "no time has passed");
}

// With long-range forces, the program transforms a grid of charges between two kernels. It sets some of its timers to zero first, and so records their events twice in a step.
static void lammps_grid(CUstream stream, int step) {
    static Timer charges, spread, out, interpolate, answers;
    static float *grid = nullptr, *forces = nullptr;
    static double total = 0;
    if (!grid) {
        OK(cuMemHostAlloc((void **)&grid, 4 * N, 0));
        OK(cuMemHostAlloc((void **)&forces, 4 * N, 0));
    }
    charges.zero(stream);
    answers.zero(stream);
    charges.around(stream, [&] { OK(cuMemcpyHtoDAsync(data + 4 * N, forces, 4 * N, stream)); });
    spread.around(stream, [&] { launch(stream, 128, false); });
    out.around(stream, [&] { OK(cuMemcpyDtoHAsync(grid, data, 4 * N, stream)); });
    OK(cuEventSynchronize(out.stop));
    check(grid[N - 1]);
    OK(cuMemcpyHtoDAsync(data + 4 * N, grid, 4 * N, stream));
    interpolate.around(stream, [&] { launch(stream, 128, false); });
    answers.around(stream, [&] { OK(cuMemcpyDtoHAsync(forces, data, 4 * N, stream)); });
    OK(cuStreamSynchronize(stream));
    check(forces[N - 1]);
    for (Timer *timer : {&charges, &spread, &out, &interpolate, &answers}) total += timer->time();
    REQUIRE(total > 0, "no time has passed");
}

static void *pinned_bytes(size_t bytes) {
    void *memory;
    OK(cuMemHostAlloc(&memory, bytes, 0));
    return memory;
}

// A graph of kernels, one after the other.
struct Graph {
    CUgraph graph;
    CUgraphExec exec;
    std::vector<CUgraphNode> nodes;
    int n = N;
    void *arguments[2] = {&data, &n};

    CUDA_KERNEL_NODE_PARAMS params(unsigned shared) {
        CUDA_KERNEL_NODE_PARAMS p = {};
        p.kern = kernel;
        p.gridDimX = 4;
        p.blockDimX = 32;
        p.gridDimY = p.gridDimZ = p.blockDimY = p.blockDimZ = 1;
        p.sharedMemBytes = shared;
        p.kernelParams = arguments;
        return p;
    }
    explicit Graph(int kernels) : nodes(kernels) {
        OK(cuGraphCreate(&graph, 0));
        auto p = params(128);
        for (int i = 0; i < kernels; i++) OK(cuGraphAddKernelNode(&nodes[i], graph, i ? &nodes[i - 1] : nullptr, i > 0, &p));
        OK(cuGraphInstantiate(&exec, graph, 0));
    }
    void launch(CUstream stream) {
        OK(cuGraphLaunch(exec, stream));
        launches += nodes.size();
    }
};

// A large graph of which each step changes one kernel: by its parameters, as GROMACS does, or by an update from a graph
// that was changed, as llama.cpp does.
static void updated_graph(CUstream stream, int step) {
    static Graph large(400);
    auto p = large.params(128 << step % 3);
    CUgraphNode changed = large.nodes[step * 7 % large.nodes.size()];
    if (step % 2) {
        OK(cuGraphExecKernelNodeSetParams(large.exec, changed, &p));
    } else {
        OK(cuGraphKernelNodeSetParams(changed, &p));
        CUgraphExecUpdateResultInfo result;
        OK(cuGraphExecUpdate(large.exec, large.graph, &result));
    }
    large.launch(stream);
    float value = 0;
    OK(cuMemcpyDtoHAsync(&value, data, sizeof value, stream));
    OK(cuStreamSynchronize(stream));
    check(value);
}

// The input goes into the graph's memory, the graph runs, and its result is looked at.
static void graph(CUstream stream, int) {
    static Graph inference(12);
    static void *input = pinned_bytes(4 * N);
    OK(cuMemcpyHtoDAsync(data + 4 * N, input, 4 * N, stream));
    inference.launch(stream);
    float value = 0;
    OK(cuMemcpyDtoHAsync(&value, data, sizeof value, stream));
    OK(cuStreamSynchronize(stream));
    check(value);
}

// A token of llama.cpp. Each input, in pageable or in page-locked memory, is copied on the thread's default stream, which
// is waited for, as it was when the program cleared memory there; what it cleared on the legacy default stream it never
// waited for. Then come a graph on a stream of its own, and the logits (and, to be checked, the inputs), to page-locked
// memory.
static void llama(CUstream stream, int step) {
    static Graph layers(12);
    static float *logits = nullptr, *pinned = nullptr, *inputs = nullptr;
    if (!logits) {
        logits = (float *)pinned_bytes(4 * N);
        pinned = (float *)pinned_bytes(4 * N);
        inputs = (float *)pinned_bytes(4 * N);
        OK(cuMemsetD8Async(data + 6 * N, 0, 2 * N, CU_STREAM_LEGACY));
        OK(cuMemsetD8Async(data + 4 * N, 0, 4 * N, CU_STREAM_PER_THREAD));
        OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
    }
    for (int input = 0; input < 6; input++) {
        // The next input is written where this one was.
        float pageable[N / 6], *source = input % 2 ? pageable : pinned;
        for (int i = 0; i < N / 6; i++) source[i] = 10 * step + input;
        OK(cuMemcpyHtoDAsync(data + 4 * N + input * sizeof pageable, source, sizeof pageable, CU_STREAM_PER_THREAD));
        OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
    }
    layers.launch(stream);
    OK(cuMemcpyDtoHAsync(logits, data, 4 * N, stream));
    OK(cuMemcpyDtoHAsync(inputs, data + 4 * N, 4 * N, stream));
    OK(cuStreamSynchronize(stream));
    check(logits[N - 1]);
    for (int i = 0; i < N / 6 * 6; i++) REQUIRE(inputs[i] == 10 * step + i / (N / 6), "input %d is %f", i, inputs[i]);
}

// A stream that the default stream waits for, and a synchronous copy in the default stream once that stream is done.
static void blocking(CUstream, int) {
    static CUstream own = nullptr;
    static float *result = nullptr;
    if (!own) {
        OK(cuStreamCreate(&own, CU_STREAM_DEFAULT));
        result = (float *)pinned_bytes(4 * N);
    }
    launch(own, 128, false);
    OK(cuMemcpyDtoHAsync(result, data, 4 * N, own));
    OK(cuStreamSynchronize(own));
    check(result[N - 1]);
    OK(cuMemcpyHtoD(data + 4 * N, std::vector<float>(N).data(), 4 * N));
}

// The same kernel on the array that nothing is read from.
static void launch_elsewhere(CUstream stream) {
    CUdeviceptr other = data + 4 * N;
    int n = N;
    void *arguments[] = {&other, &n};
    OK(cuLaunchKernel((CUfunction)kernel, 4, 1, 1, 32, 1, 1, 128, stream, arguments, nullptr));
}

// How Inductor launches a kernel of Triton's: it looks for a context, and at every tensor's address.
static void triton(CUstream stream) {
    CUcontext context;
    OK(cuCtxGetCurrent(&context));
    REQUIRE(context, "there is no context");
    for (CUdeviceptr tensor : {data, data + 4 * N, data + 8}) {
        CUdeviceptr there = 0;
        OK(cuPointerGetAttribute(&there, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, tensor));
        REQUIRE(there == tensor, "another address");
    }
    launch(stream, 256, false);
}

// A training step of torch.compile: kernels of Triton's between matrix products of cuBLASLt, forwards and backwards, one of the optimizer, and the loss.
static void compiled(CUstream stream, int step) {
    for (int layer = 0; layer < 8; layer++) {
        CUdevice now;
        OK(cuCtxGetDevice(&now));
        CUstreamCaptureStatus capturing;
        OK(cuStreamIsCapturing(stream, &capturing));
        OK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024 * (1 + (layer + step) % 4), kernel, device));
        launch(stream, 1024, true);
        triton(stream);
    }
    OK(cuMemsetD8Async(data + 4 * N, 0, 4 * N, stream));
    triton(stream);
    float loss = 0;
    OK(cuMemcpyDtoHAsync(&loss, data, sizeof loss, stream));
    OK(cuStreamSynchronize(stream));
    check(loss);
}

// The same with mode="reduce-overhead": the inputs are copied to where two graphs, forwards and backwards, expect them.
static void compiled_graphs(CUstream stream, int) {
    static Graph forwards(6), backwards(9);
    CUstreamCaptureStatus capturing;
    OK(cuStreamIsCapturing(stream, &capturing));
    OK(cuMemcpyDtoDAsync(data + 4 * N, data, 2 * N, stream));
    forwards.launch(stream);
    OK(cuMemcpyDtoDAsync(data + 4 * N, data, 4 * N, stream));
    backwards.launch(stream);
    triton(stream);
    float loss = 0;
    OK(cuMemcpyDtoHAsync(&loss, data, sizeof loss, stream));
    OK(cuStreamSynchronize(stream));
    check(loss);
}

// A step of OpenMM. The number of interactions comes back from the neighbor list and is looked at when all forces are on their way; PME has a stream of its own. Now and then the atoms are put in another order.
static void openmm(CUstream, int step) {
    static CUstream pme = nullptr;
    static CUevent counted, begun, done;
    static float *count = nullptr;
    static CUcontext context;
    if (!pme) {
        OK(cuStreamCreate(&pme, CU_STREAM_NON_BLOCKING));
        for (CUevent *event : {&counted, &begun, &done}) OK(cuEventCreate(event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
        OK(cuMemHostAlloc((void **)&count, 8, CU_MEMHOSTALLOC_PORTABLE));
        OK(cuCtxGetCurrent(&context));
    }
    OK(cuCtxPushCurrent(context));
    // Buffers are cleared, and PME waits for the positions.
    launch(nullptr, 128, false);
    OK(cuEventRecord(begun, nullptr));
    OK(cuStreamWaitEvent(pme, begun, 0));
    // The neighbor list, with a sort of its blocks.
    for (int i = 0; i < 7; i++) launch(nullptr, 128, false);
    OK(cuMemcpyDtoHAsync(count, data, 8, nullptr));
    OK(cuEventRecord(counted, nullptr));
    float expected = launches;
    // Grid indices and their sort at times, charges, two transforms with a convolution between them, forces.
    for (int i = step % 4 ? 4 : 0; i < 12; i++) launch_elsewhere(pme);
    OK(cuEventRecord(done, pme));
    // Bonded and nonbonded forces.
    launch(nullptr, 128, false);
    launch(nullptr, 1024, false);
    OK(cuEventSynchronize(counted));
    REQUIRE(count[0] == expected, "%f after %f launches", count[0], expected);
    OK(cuStreamWaitEvent(nullptr, done, 0));
    for (int i = 0; i < 5; i++) launch(nullptr, 128, false);
    if (step % 50 == 49) {
        std::vector<float> positions(N), velocities(N);
        OK(cuMemcpyDtoH(positions.data(), data, 4 * N));
        OK(cuMemcpyDtoH(velocities.data(), data + 4 * N, 4 * N));
        check(positions[N - 1]);
        OK(cuMemcpyHtoD(data, positions.data(), 4 * N));
        OK(cuMemcpyHtoD(data + 4 * N, velocities.data(), 4 * N));
    }
    CUcontext popped;
    OK(cuCtxPopCurrent(&popped));
}

static void launch_with(CUkernel which, unsigned blocks, CUstream stream, void **arguments) {
    OK(cuLaunchKernel((CUfunction)which, blocks, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr));
}

// OpenMM's iterations for constraints: a kernel sets a flag in memory that it shares with the host, which looks at it after every fourth iteration. These are done after eight.
static void constraints(CUstream, int) {
    static int *flag = nullptr;
    static CUdeviceptr there;
    static CUevent event;
    if (!flag) {
        OK(cuMemHostAlloc((void **)&flag, sizeof *flag, CU_MEMHOSTALLOC_DEVICEMAP));
        OK(cuMemHostGetDevicePointer(&there, flag, 0));
        OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    }
    float enough = launches + 8;
    int i = 0;
    *flag = 0;
    for (; i < 150; i++) {
        void *arguments[] = {&data, &enough, &there};
        launch(nullptr, 128, false);
        launch_with(converged_kernel, 1, nullptr, arguments);
        if (i % 4 == 3) OK(cuEventRecord(event, nullptr));
        launch_elsewhere(nullptr);
        launch_elsewhere(nullptr);
        if (i % 4 < 3) continue;
        OK(cuEventSynchronize(event));
        if (*(volatile int *)flag) break;
    }
    REQUIRE(i == 7, "converged after %d iterations", i);
}

// BabelStream's dot product: each block writes its sum to page-locked memory, and the host adds them up. There are four for each multiprocessor of a H100.
static void dot(CUstream stream, int) {
    static const int blocks = 4 * 132;
    static double *sums = (double *)pinned_bytes(sizeof(double) * blocks);
    launch(stream, 128, false);
    void *arguments[] = {&data, &sums};
    launch_with(sums_kernel, blocks, stream, arguments);
    OK(cuStreamSynchronize(stream));
    double sum = 0;
    for (int i = 0; i < blocks; i++) sum += sums[i];
    double expected = (double)launches * blocks + blocks * (blocks - 1) / 2;
    REQUIRE(sum == expected, "%f is not %f", sum, expected);
}

// The same sums in several arrays, each of which the host reads once the stream is done.
static void sums(CUstream stream, int) {
    static double *arrays[4];
    for (double *&array : arrays) {
        if (!array) array = (double *)pinned_bytes(sizeof(double) * N);
        void *arguments[] = {&data, &array};
        launch_with(sums_kernel, N, stream, arguments);
    }
    OK(cuStreamSynchronize(stream));
    for (double *array : arrays)
        for (int i = 0; i < N; i++) REQUIRE(array[i] == launches + i, "sum %d is %f after %d launches", i, array[i], launches);
}

// A short collective of NCCL's: its kernel writes words into pages of page-locked memory that each have another purpose, tells the program, and waits for its answer. The program finds what the kernel wrote before it told it.
static void answered(CUstream stream, int step) {
    static volatile int *words = (volatile int *)pinned_bytes(PURPOSES * PURPOSE * sizeof(int));
    int number = step + 1;
    void *arguments[] = {&words, &number};
    launch_with(collective_kernel, 1, stream, arguments);
    while (words[TELLS * PURPOSE] != number) {}
    for (int i = 0; i < TELLS; i++) REQUIRE(words[i * PURPOSE] == number + i, "step %d: word %d is %d", step, i, words[i * PURPOSE]);
    words[ANSWERS * PURPOSE] = number;
}

static void collective(CUstream stream, int step) {
    answered(stream, step);
    OK(cuStreamSynchronize(stream));
}

struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    int steps = 0;
};

static void CUDA_CB announce(void *to) {
    Done *done = (Done *)to;
    std::lock_guard<std::mutex> lock(done->mutex);
    done->steps++;
    done->changed.notify_all();
}

static void CUDA_CB nothing(void *) {}

// XLA changes the nodes of its graph before each launch, gets the result on another stream, and learns from a host function that it is there.
static void xla(CUstream stream, int step) {
    static Graph command_buffer(8);
    static Done done;
    static float *result = (float *)pinned_bytes(sizeof(float));
    static CUstream other = nullptr;
    static CUevent events[3];
    if (!other) {
        OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
        for (CUevent &event : events) OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    }
    auto p = command_buffer.params(128 + 128 * (step % 2));
    for (CUgraphNode node : command_buffer.nodes) OK(cuGraphExecKernelNodeSetParams(command_buffer.exec, node, &p));
    command_buffer.launch(stream);
    OK(cuEventRecord(events[0], stream));
    OK(cuStreamWaitEvent(other, events[0], 0));
    OK(cuMemcpyDtoHAsync(result, data, sizeof *result, other));
    OK(cuEventRecord(events[1], other));
    OK(cuLaunchHostFunc(other, announce, &done));
    OK(cuStreamWaitEvent(stream, events[1], 0));
    OK(cuLaunchHostFunc(stream, nothing, nullptr));
    std::unique_lock<std::mutex> lock(done.mutex);
    static int steps = 0;
    steps++;
    done.changed.wait(lock, [&] { return done.steps == steps; });
    check(*result);
}

// Four streams, each with a kernel and a download; the first waits for the others.
static void cupy(CUstream, int) {
    static CUstream streams[4] = {};
    static CUevent done[4];
    static float *results[4];
    for (int i = 0; i < 4 && !streams[3]; i++) {
        OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
        OK(cuEventCreate(&done[i], CU_EVENT_DISABLE_TIMING));
        results[i] = (float *)pinned_bytes(4 * N);
    }
    for (int i = 0; i < 4; i++) {
        if (i) OK(cuStreamWaitEvent(streams[i], done[i - 1], 0));
        launch(streams[i], 128, false);
        OK(cuMemcpyDtoHAsync(results[i], data, 4 * N, streams[i]));
        OK(cuEventRecord(done[i], streams[i]));
    }
    for (CUevent event : done) OK(cuStreamWaitEvent(streams[0], event, 0));
    OK(cuStreamSynchronize(streams[0]));
    check(results[3][N - 1]);
}

// A solver's graph copies what is left of the error to a variable of the host; its kernel gets other parameters after each iteration.
static void solver(CUstream stream, int step) {
    static Graph iteration(1);
    static float left = 0;
    if (!step) {
        OK(cuGraphExecDestroy(iteration.exec));
        CUcontext context;
        OK(cuCtxGetCurrent(&context));
        CUDA_MEMCPY3D copy = {};
        copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = data;
        copy.dstMemoryType = CU_MEMORYTYPE_HOST;
        copy.dstHost = &left;
        copy.WidthInBytes = sizeof left;
        copy.Height = copy.Depth = 1;
        CUgraphNode node;
        OK(cuGraphAddMemcpyNode(&node, iteration.graph, iteration.nodes.data(), 1, &copy, context));
        OK(cuGraphInstantiate(&iteration.exec, iteration.graph, 0));
    }
    iteration.launch(stream);
    OK(cuStreamSynchronize(stream));
    check(left);
    auto p = iteration.params(128 + 128 * (step % 2));
    OK(cuGraphExecKernelNodeSetParams(iteration.exec, iteration.nodes[0], &p));
}

// Thrust allocates, waits for its kernel, and copies a result of some bytes from what it has allocated.
static void thrust(CUstream, int) {
    CUdeviceptr scratch;
    float value = 0;
    OK(cuMemAlloc(&scratch, 4 * N));
    launch(nullptr, 128, false);
    OK(cuMemcpyDtoDAsync(scratch, data, 4 * N, nullptr));
    OK(cuStreamSynchronize(nullptr));
    OK(cuMemcpyDtoHAsync(&value, scratch, sizeof value, nullptr));
    OK(cuStreamSynchronize(nullptr));
    OK(cuMemFree(scratch));
    check(value);
}

// A kernel and its results, each copied where the host needs it; the last one is not always as long.
static void results(CUstream, int step) {
    int count = 1 + step % 5;
    float first = 0, second = 0, others[5] = {};
    launch(nullptr, 128, false);
    OK(cuMemcpyDtoH(&first, data, sizeof first));
    OK(cuMemcpyDtoH(&second, data + 4, sizeof second));
    OK(cuMemcpyDtoH(others, data + 8, count * sizeof(float)));
    check(first);
    check(second);
    for (int i = 0; i < 5; i++) REQUIRE(others[i] == (i < count ? launches : 0), "%f in place %d of %d", others[i], i, count);
}

// The same, but every eighth step changes the results between two copies.
static void changes(CUstream, int step) {
    float value = 0;
    launch(nullptr, 128, false);
    OK(cuMemcpyDtoH(&value, data, sizeof value));
    check(value);
    if (step % 8 == 7) launch(nullptr, 128, false);
    OK(cuMemcpyDtoH(&value, data + 4, sizeof value));
    check(value);
}

// After some steps, a stream that the wait does not wait for changes the result, and the program learns from an event that it has.
static void beside(CUstream stream, int step) {
    static CUevent done = nullptr;
    if (!done) OK(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
    float value = 0;
    launch(step < 8 ? nullptr : stream, 128, false);
    OK(cuEventRecord(done, step < 8 ? nullptr : stream));
    OK(cuMemsetD32Async(data + 4 * N, 0, 1, nullptr));
    OK(cuStreamSynchronize(nullptr));
    while (cuEventQuery(done) == CUDA_ERROR_NOT_READY) {}
    OK(cuMemcpyDtoH(&value, data, sizeof value));
    check(value);
}

// A result in memory that is freed every fourth step, before another wait.
static void freed(CUstream, int step) {
    static CUdeviceptr memory;
    float value = 0;
    if (step % 4 == 0) OK(cuMemAlloc(&memory, 96 << 20));
    launch(nullptr, 128, false);
    OK(cuMemcpyDtoDAsync(memory, data, 4 * N, nullptr));
    OK(cuStreamSynchronize(nullptr));
    OK(cuMemcpyDtoH(&value, memory, sizeof value));
    check(value);
    if (step % 4 < 3) return;
    OK(cuMemFree(memory));
    launch(nullptr, 128, false);
    OK(cuStreamSynchronize(nullptr));
    OK(cuCtxSynchronize());
}

static void CUDA_CB until_set(void *flag) {
    while (!*(std::atomic<bool> *)flag) std::this_thread::yield();
}

// The program has waited for one stream and reads what a kernel on another one will change, which it has destroyed meanwhile in every second step.
static void ended(CUstream stream, int step) {
    static int *flag = (int *)pinned_bytes(sizeof(int));
    static std::atomic<bool> goes_on;
    CUstream other;
    float enough = 0;
    void *arguments[] = {&data, &enough, &flag};
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    *flag = 0;
    goes_on = false;
    OK(cuLaunchHostFunc(other, until_set, &goes_on));
    launch_with(converged_kernel, 1, other, arguments);
    if (step % 2) OK(cuStreamDestroy(other));
    launch(stream, 128, false);
    OK(cuStreamSynchronize(stream));
    REQUIRE(*(volatile int *)flag == 0, "the flag is %d before its kernel", *flag);
    goes_on = true;
    while (*(volatile int *)flag == 0) {}
    if (step % 2) OK(cuCtxSynchronize());
    else {
        OK(cuStreamSynchronize(other));
        OK(cuStreamDestroy(other));
    }
}

// Quadrants: after each launch the host looks at a flag that the kernel may have set, and waits for nothing.
// Every fiftieth kernel sets it.
static void flags(CUstream stream, int step) {
    static int *flag = (int *)pinned_bytes(sizeof(int));
    float enough = step % 50 == 49 ? 0 : 1e30f;
    void *arguments[] = {&data, &enough, &flag};
    launch_with(converged_kernel, 1, stream, arguments);
    if (enough > 0) {
        REQUIRE(*(volatile int *)flag == 0, "step %d: the flag is %d", step, *flag);
        return;
    }
    while (*(volatile int *)flag == 0) {}
    OK(cuStreamSynchronize(stream));
    *flag = 0;
}

// Before each launch, a kernel of CUTLASS's gets tensor maps of its operands, and the next batch is elsewhere in them.
static void hopper(CUstream stream, int step) {
    CUtensorMap first;
    for (int operand = 0; operand < 4; operand++) {
        CUtensorMap map, moved;
        cuuint64_t sizes[] = {16, 8}, strides[] = {64};
        cuuint32_t box[] = {8, 8}, steps[] = {1, 1};
        void *address = (void *)(data + 512 * (step % 2));
        if (operand) box[1] = operand;
        OK(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, address, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
        moved = map;
        OK(cuTensorMapReplaceAddress(&moved, (void *)(data + 512 * ((step + 1) % 2))));
        // What one step makes is what the next one moves there.
        static CUtensorMap before[4];
        REQUIRE(!step || !memcmp(&before[operand], &map, sizeof map), "step %d: operand %d has another map", step, operand);
        before[operand] = moved;
        if (!operand) first = map;
        REQUIRE(operand == 0 || memcmp(&first, &map, sizeof map), "operand %d has the first one's map", operand);
        REQUIRE(memcmp(&moved, &map, sizeof map), "the moved map is where it was");
    }
    float value = 0;
    launch(stream, 128, false);
    OK(cuMemcpyDtoHAsync(&value, data, sizeof value, stream));
    OK(cuStreamSynchronize(stream));
    check(value);
}

// ffmpeg's filters: textures of the buffers of a frame, for one launch. Now and then the buffers are others.
static void video(CUstream stream, int step) {
    static CUdeviceptr frame = 0;
    if (step % 50 == 0) {
        if (frame) OK(cuMemFree(frame));
        OK(cuMemAlloc(&frame, 4 * N));
        OK(cuMemsetD8(frame, 0, 4 * N));
        OK(cuStreamSynchronize(nullptr));
    }
    launch(stream, 128, false);
    CUtexObject textures[2];
    CUdeviceptr memory[2] = {data, frame};
    for (int i = 0; i < 2; i++) {
        CUDA_RESOURCE_DESC from = {};
        from.resType = CU_RESOURCE_TYPE_LINEAR;
        from.res.linear.devPtr = memory[i];
        from.res.linear.format = CU_AD_FORMAT_FLOAT;
        from.res.linear.numChannels = 1;
        from.res.linear.sizeInBytes = 4 * N;
        CUDA_TEXTURE_DESC how = {};
        OK(cuTexObjectCreate(&textures[i], &from, &how, nullptr));
    }
    REQUIRE(textures[0] != textures[1], "two textures have one handle");
    void *arguments[] = {&textures[0], &textures[1], &frame};
    OK(cuLaunchKernel((CUfunction)filter_kernel, 1, 1, 1, N, 1, 1, 0, stream, arguments, nullptr));
    for (CUtexObject texture : textures) OK(cuTexObjectDestroy(texture));
    CUDA_RESOURCE_DESC gone;
    REQUIRE(cuTexObjectGetResourceDesc(&gone, textures[0]) == CUDA_ERROR_INVALID_VALUE, "a destroyed texture is there");
    float value = 0;
    OK(cuMemcpyDtoHAsync(&value, frame, sizeof value, stream));
    OK(cuStreamSynchronize(stream));
    check(value);
}

// RMM, and PyTorch's backend cudaMallocAsync: arrays of different sizes come from a pool that keeps all that it has, and
// the step waits for its stream.
static void pools(CUstream stream, int step) {
    static CUmemoryPool pool;
    if (!step) {
        CUmemPoolProps props = {};
        props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        props.location.id = device;
        OK(cuMemPoolCreate(&pool, &props));
        cuuint64_t all = UINT64_MAX;
        OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
    }
    float value = 0;
    for (size_t mib : {320, 300}) {
        CUdeviceptr array;
        OK(cuMemAllocFromPoolAsync(&array, mib << 20, pool, stream));
        launch(stream, 128, false);
        OK(cuMemcpyDtoDAsync(array, data, 4 * N, stream));
        OK(cuMemcpyDtoDAsync(data + 4 * N, array, 4 * N, stream));
        OK(cuMemFreeAsync(array, stream));
    }
    OK(cuMemcpyDtoHAsync(&value, data + 4 * N, sizeof value, stream));
    OK(cuStreamSynchronize(stream));
    check(value);
}

int main(int argc, char **argv) {
    struct {
        const char *name;
        void (*step)(CUstream, int);
    } const all[] = {{"training", training}, {"decoding", decoding}, {"lammps", lammps}, {"lammps_grid", lammps_grid}, {"graph", graph}, {"updated_graph", updated_graph}, {"llama", llama}, {"blocking", blocking}, {"xla", xla}, {"cupy", cupy}, {"solver", solver}, {"thrust", thrust}, {"results", results}, {"changes", changes}, {"beside", beside}, {"freed", freed}, {"compiled", compiled}, {"compiled_graphs", compiled_graphs}, {"openmm", openmm}, {"constraints", constraints}, {"dot", dot}, {"sums", sums}, {"collective", collective}, {"answered", answered}, {"ended", ended}, {"flags", flags}, {"hopper", hopper}, {"pools", pools}, {"video", video}};
    int count = argc > 2 ? atoi(argv[2]) : 4, made = 0;
    CHECK(cudaMalloc((void **)&data, 8 * N));
    CHECK(cudaMemset((void *)data, 0, 8 * N));
    // The stream of the steps does not wait for the default stream.
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGetKernel((cudaKernel_t *)&kernel, (const void *)add));
    CHECK(cudaGetKernel((cudaKernel_t *)&sums_kernel, (const void *)partial_sums));
    CHECK(cudaGetKernel((cudaKernel_t *)&converged_kernel, (const void *)converged));
    CHECK(cudaGetKernel((cudaKernel_t *)&filter_kernel, (const void *)filter));
    CHECK(cudaGetKernel((cudaKernel_t *)&collective_kernel, (const void *)exchange_words));
    OK(cuCtxGetDevice(&device));
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (auto &way : all) {
        if (argc > 1 && strcmp(argv[1], way.name) != 0) continue;
        for (int step = 0; step < count; step++, made++) way.step(stream, step);
    }
    REQUIRE(made > 0, "does not know %s", argc > 1 ? argv[1] : "");
    std::vector<float> result(N);
    OK(cuMemcpyDtoH(result.data(), data, 4 * N));
    for (float value : result) check(value);
    return pass("%d steps", made);
}
