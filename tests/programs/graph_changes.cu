// Nodes of an instance that are changed between launches: kernels, a fill and a copy. Kernels are also disabled and enabled. What is changed
// while it is disabled does its new work when it is enabled. (With a disabled fill, NVIDIA's driver 580 lets the copy behind it overtake the kernels before it.) `graph_changes times` also says how long a launch takes, in
// microseconds, if one of 1000 nodes was changed before it.
#define PROGRAM "graph_changes"
#include "common.h"
#include <chrono>
#include <functional>
#include <vector>

constexpr int KERNELS = 8, WORDS = 64, FILLED = 4;

__global__ void put(int *word, int value) { *word = value; }
__global__ void add(int *word, int value) { *word += value; }

static cudaStream_t stream;

struct Kernel {
    bool adds;
    int *word;
    int value;

    // Calls `use` with the parameters.
    void with(const std::function<void(const cudaKernelNodeParams &)> &use) const {
        int *to = word, number = value;
        void *arguments[] = {&to, &number};
        cudaKernelNodeParams params = {};
        params.func = adds ? (void *)add : (void *)put;
        params.gridDim = params.blockDim = dim3(1);
        params.kernelParams = arguments;
        use(params);
    }
};

// One node after the other, and what they do.
struct Chain {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    std::vector<cudaGraphNode_t> nodes;
    std::vector<Kernel> kernels;

    Chain() { CHECK(cudaGraphCreate(&graph, 0)); }

    size_t before() const { return nodes.empty() ? 0 : 1; }

    const cudaGraphNode_t *last() const { return nodes.empty() ? nullptr : &nodes.back(); }

    void kernel(const Kernel &kernel) {
        cudaGraphNode_t node;
        kernel.with([&](const cudaKernelNodeParams &p) { CHECK(cudaGraphAddKernelNode(&node, graph, last(), before(), &p)); });
        nodes.push_back(node);
        kernels.push_back(kernel);
    }

    void change(int place, const Kernel &kernel) {
        kernels[place] = kernel;
        kernel.with([&](const cudaKernelNodeParams &p) { CHECK(cudaGraphExecKernelNodeSetParams(exec, nodes[place], &p)); });
    }

    void launch() { CHECK(cudaGraphLaunch(exec, stream)); }
};

static cudaMemsetParams fill_of(int *at, int value) {
    cudaMemsetParams params = {};
    params.dst = at;
    params.value = value;
    params.elementSize = 4;
    params.width = FILLED;
    params.height = 1;
    return params;
}

static void rounds(Random &random, int *words, int count) {
    Chain chain;
    for (int i = 0; i < KERNELS; i++) chain.kernel({i % 2 == 1, words + i / 2, i});
    cudaMemsetParams fill = fill_of(words + 8, 7);
    cudaGraphNode_t node;
    CHECK(cudaGraphAddMemsetNode(&node, chain.graph, chain.last(), 1, &fill));
    chain.nodes.push_back(node);
    int *source = words, *target = words + 32;
    CHECK(cudaGraphAddMemcpyNode1D(&node, chain.graph, chain.last(), 1, target, source, 16, cudaMemcpyDeviceToDevice));
    chain.nodes.push_back(node);
    CHECK(cudaGraphInstantiate(&chain.exec, chain.graph, 0));

    std::vector<bool> enabled(KERNELS, true);
    std::vector<int> expected(WORDS, 0), got(WORDS);
    CHECK(cudaMemsetAsync(words, 0, WORDS * 4, stream));
    for (int round = 0; round < count; round++) {
        chain.launch();
        for (int i = 0; i < KERNELS; i++) {
            int &word = expected[chain.kernels[i].word - words], value = chain.kernels[i].value;
            if (enabled[i]) word = chain.kernels[i].adds ? word + value : value;
        }
        for (int i = 0; i < FILLED; i++) expected[(int *)fill.dst - words + i] = (int)fill.value;
        for (int i = 0; i < 4; i++) expected[target - words + i] = expected[source - words + i];
        CHECK(cudaMemcpyAsync(got.data(), words, WORDS * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < WORDS; i++) REQUIRE(got[i] == expected[i], "round %d: word %d is %d instead of %d", round, i, got[i], expected[i]);

        for (uint32_t changes = random.below(4); changes > 0; changes--) {
            int place = random.below(chain.nodes.size());
            if (place < KERNELS && random.below(3) == 0) {
                enabled[place] = !enabled[place];
                CHECK(cudaGraphNodeSetEnabled(chain.exec, chain.nodes[place], enabled[place]));
            } else if (place < KERNELS) {
                chain.change(place, {random.below(2) == 1, words + random.below(16), (int)random.below(1000)});
            } else if (place == KERNELS) {
                fill = fill_of(words + random.below(16), (int)random.below(1000));
                CHECK(cudaGraphExecMemsetNodeSetParams(chain.exec, chain.nodes[place], &fill));
            } else {
                source = words + random.below(16), target = words + 32 + random.below(16);
                CHECK(cudaGraphExecMemcpyNodeSetParams1D(chain.exec, chain.nodes[place], target, source, 16, cudaMemcpyDeviceToDevice));
            }
        }
    }
    CHECK(cudaGraphExecDestroy(chain.exec));
    CHECK(cudaGraphDestroy(chain.graph));
}

static void times(int *words) {
    Chain chain;
    for (int i = 0; i < 1000; i++) chain.kernel({true, words, 1});
    CHECK(cudaGraphInstantiate(&chain.exec, chain.graph, 0));
    auto measure = [&](const char *what, const std::function<void(int)> &change) {
        constexpr int LAUNCHES = 50;
        change(0), chain.launch(), change(1), chain.launch();
        CHECK(cudaStreamSynchronize(stream));
        auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < LAUNCHES; i++) {
            change(i);
            chain.launch();
            CHECK(cudaStreamSynchronize(stream));
        }
        std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        printf("%s: %.1f\n", what, took.count() / LAUNCHES);
    };
    measure("no change", [](int) {});
    measure("a changed kernel", [&](int i) { chain.change(500, {true, words, i}); });
    measure("a kernel disabled and enabled", [&](int i) { CHECK(cudaGraphNodeSetEnabled(chain.exec, chain.nodes[500], i % 2)); });
    measure("an update with one changed kernel", [&](int i) {
        Kernel{true, words, i}.with([&](const cudaKernelNodeParams &p) { CHECK(cudaGraphKernelNodeSetParams(chain.nodes[500], &p)); });
        cudaGraphExecUpdateResultInfo info;
        CHECK(cudaGraphExecUpdate(chain.exec, chain.graph, &info));
    });
    CHECK(cudaGraphExecDestroy(chain.exec));
    CHECK(cudaGraphDestroy(chain.graph));
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    Random random(options.seed);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int *words;
    CHECK(cudaMalloc(&words, WORDS * 4));
    int count = options.full ? 2000 : 100;
    rounds(random, words, count);
    if (options.word == "times") times(words);
    return pass("%d rounds of changes", count);
}
