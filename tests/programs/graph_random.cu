// Random graphs against a model of them on the CPU: kernels, fills, copies in one to three dimensions between device memory, arrays, managed, pinned
// and pageable memory, host functions, events and child graphs, built node by node and captured on several streams; launched often, and changed in between: a
// node's parameters, nodes switched off, a child graph's or a whole graph's at once.
#define PROGRAM "graph_random"
#include "common.h"

#include <deque>
#include <set>
#include <vector>

// Each node writes a place of its own, in one kind of memory, and reads those of nodes that it comes after. A place has 2 slices of 4 rows of 16 words.
constexpr int WIDE = 16, HIGH = 4, DEEP = 2, WORDS = WIDE * HIGH * DEEP;
constexpr size_t BYTES = WORDS * sizeof(int), PITCH = WIDE * sizeof(int);
constexpr int MOST = 40;

enum Space { DEVICE, MANAGED, PINNED, PAGEABLE, ARRAY };
enum Kind { KERNEL, COPY, BOX, FILL, CALL, NOTHING, RECORD, WAIT, CHILD };
static const char *kinds[] = {"kernel", "copy", "box", "fill", "call", "nothing", "record", "wait", "child"};

struct Call {
    const int *from;
    int *to;
    int value;
};

struct Work {
    Kind kind;
    Space space = DEVICE;     // where it writes
    int first = -1, second = -1;  // nodes that it reads
    int value = 0;
    // A fill's elements; rows more than one have a pitch.
    int element = 4, width = 1, height = 1;
    // A box: where it begins at both ends, and its extent.
    int from[3] = {}, to[3] = {}, extent[3] = {};
};

struct Node {
    Work work;
    std::vector<int> after;       // of the same graph
    std::set<int> ancestors;      // also those outside of the child graph
    int parent = -1;              // the node whose child graph it belongs to
    bool on = true;
    cudaGraphNode_t handle = nullptr;
    cudaGraph_t child = nullptr;
};

static int *memory[4];
static cudaArray_t arrays[MOST];
static cudaEvent_t events[MOST], outside, fork_event, join_event;
static std::vector<std::vector<int>> model;
static std::deque<Call> calls;  // stay where they are

__global__ void mix(int *out, const int *first, const int *second, int value) {
    int i = threadIdx.x;
    out[i] = (first ? first[i] * 3 : 0) + (second ? second[i] * 5 : 0) + value + i;
}
static void CUDART_CB called(void *data) {
    Call *call = (Call *)data;
    for (int i = 0; i < WORDS; i++) call->to[i] = ((call->from ? call->from[i] * 7 : 0) + call->value) ^ i;
}

static int *at(Space space, int node) { return memory[space] + (size_t)node * WORDS; }

struct Graph {
    Random &random;
    bool captured;
    std::vector<Node> nodes;

    // A node among those before this one that has a value in such memory; -1 if there is none.
    int source(const Node &node, std::set<Space> spaces) {
        std::vector<int> fit;
        for (int other : node.ancestors)
            if (nodes[other].work.kind <= CALL && spaces.count(nodes[other].work.space)) fit.push_back(other);
        return fit.empty() ? -1 : fit[random.below(fit.size())];
    }

    int number() { return (int)random.below(1 << 20); }

    // What an instance's node may become: everything of it that CUDA lets change.
    void change(Node &node) {
        Work &work = node.work;
        work.value = number();
        if (work.kind == KERNEL) {
            work.first = source(node, {DEVICE, MANAGED, PINNED});
            work.second = source(node, {DEVICE, MANAGED, PINNED});
        } else if (work.kind == COPY) {
            work.first = source(node, {nodes[work.first].work.space});
        } else if (work.kind == CALL) {
            work.first = source(node, {PINNED, PAGEABLE});
        } else if (work.kind == FILL && (work.element == 1 || captured)) {
            work.value &= 255;
        } else if (work.kind == FILL && work.element == 2) {
            work.value &= 65535;
        }
    }

    Work any_work(Node &node) {
        Work &work = node.work;
        switch (random.below(captured ? 8 : 10)) {
        case 0: case 1:
            work.kind = KERNEL;
            work.space = (Space)random.below(3);
            break;
        case 2: case 3: {
            work.first = source(node, {DEVICE, MANAGED, PINNED, PAGEABLE});
            work.kind = work.first < 0 ? KERNEL : COPY;
            if (work.first >= 0) work.space = (Space)random.below(4);
            break;
        }
        case 4: case 5: {
            work.first = source(node, {DEVICE, MANAGED, PINNED, PAGEABLE, ARRAY});
            work.kind = work.first < 0 ? FILL : BOX;
            if (work.first >= 0) work.space = (Space)random.below(5);
            int sizes[] = {WIDE, HIGH, DEEP};
            for (int i = 0; i < 3; i++) {
                work.extent[i] = 1 + random.below(sizes[i]);
                work.from[i] = random.below(sizes[i] - work.extent[i] + 1);
                work.to[i] = random.below(sizes[i] - work.extent[i] + 1);
            }
            break;
        }
        case 6: work.kind = FILL; break;
        case 7:
            work.kind = CALL;
            work.space = random.below(2) ? PINNED : PAGEABLE;
            break;
        case 8: work.kind = NOTHING; break;
        default: work.kind = random.below(2) ? RECORD : WAIT;
        }
        if (work.kind == FILL) {
            work.space = (Space)random.below(3);
            work.element = captured ? 1 : 1 << random.below(3);
            bool rows = random.below(2);
            work.height = rows ? 2 + random.below(HIGH * DEEP - 1) : 1;
            int room = (rows ? (int)PITCH : (int)BYTES) / work.element;
            work.width = 1 + random.below(room);
        }
        return work;
    }

    int add(int parent, int begin) {
        int id = (int)nodes.size();
        nodes.emplace_back();
        Node &node = nodes.back();
        node.parent = parent;
        if (parent >= 0) node.ancestors = nodes[parent].ancestors;
        for (int other = begin; other < id; other++) {
            if (nodes[other].parent != parent || random.below(4)) continue;
            node.after.push_back(other);
            node.ancestors.insert(other);
            node.ancestors.insert(nodes[other].ancestors.begin(), nodes[other].ancestors.end());
            for (int inner = other + 1; inner < id; inner++)
                if (nodes[inner].parent == other) node.ancestors.insert(inner);
        }
        any_work(node);
        change(node);
        return id;
    }

    Graph(Random &random, bool captured) : random(random), captured(captured) {
        int count = 3 + random.below(20);
        nodes.reserve(MOST);
        while ((int)nodes.size() < count) {
            bool child = !captured && nodes.size() + 8 < MOST && random.below(8) == 0;
            int id = add(-1, 0);
            if (!child) continue;
            nodes[id].work = Work{CHILD};
            for (int i = random.below(5); i > 0; i--) add(id, id + 1);
        }
    }

    const void *read_from(int node) { return node < 0 ? nullptr : at(nodes[node].work.space, node); }

    cudaMemcpyKind direction(const Work &work) {
        Space source = nodes[work.first].work.space;
        if (source == MANAGED || work.space == MANAGED) return cudaMemcpyDefault;
        bool from = source != PINNED && source != PAGEABLE;
        bool to = work.space != PINNED && work.space != PAGEABLE;
        return to ? from ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice : from ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    }

    cudaMemcpy3DParms box(int id) {
        const Work &work = nodes[id].work;
        cudaMemcpy3DParms p = {};
        Space from = nodes[work.first].work.space;
        bool elements = from == ARRAY || work.space == ARRAY;
        size_t unit = elements ? 1 : sizeof(int);
        if (from == ARRAY) p.srcArray = arrays[work.first];
        else p.srcPtr = make_cudaPitchedPtr(at(from, work.first), PITCH, WIDE, HIGH);
        if (work.space == ARRAY) p.dstArray = arrays[id];
        else p.dstPtr = make_cudaPitchedPtr(at(work.space, id), PITCH, WIDE, HIGH);
        p.srcPos = make_cudaPos(work.from[0] * unit, work.from[1], work.from[2]);
        p.dstPos = make_cudaPos(work.to[0] * unit, work.to[1], work.to[2]);
        p.extent = make_cudaExtent(work.extent[0] * unit, work.extent[1], work.extent[2]);
        p.kind = direction(work);
        return p;
    }

    cudaMemsetParams fill(int id) {
        const Work &work = nodes[id].work;
        cudaMemsetParams p = {};
        p.dst = at(work.space, id);
        p.elementSize = work.element;
        p.value = work.value;
        p.width = work.width;
        p.height = work.height;
        p.pitch = work.height > 1 ? PITCH : 0;
        return p;
    }

    Call *call(int id) {
        const Work &work = nodes[id].work;
        calls.push_back({(const int *)read_from(work.first), at(work.space, id), work.value});
        return &calls.back();
    }

    struct Arguments {
        int *out;
        const void *first, *second;
        int value;
        void *pointers[4] = {&out, &first, &second, &value};
        cudaKernelNodeParams params = {};
    };

    void arguments(int id, Arguments &a) {
        const Work &work = nodes[id].work;
        a.out = at(work.space, id);
        a.first = read_from(work.first);
        a.second = read_from(work.second);
        a.value = work.value;
        a.params.func = (void *)mix;
        a.params.gridDim = dim3(1);
        a.params.blockDim = dim3(WORDS);
        a.params.kernelParams = a.pointers;
    }

    // The nodes of the graph itself (-1), or of a node's child graph.
    cudaGraph_t build(int parent) {
        cudaGraph_t graph;
        CHECK(cudaGraphCreate(&graph, 0));
        for (int id = 0; id < (int)nodes.size(); id++) {
            Node &node = nodes[id];
            if (node.parent != parent) continue;
            std::vector<cudaGraphNode_t> after;
            for (int other : node.after) after.push_back(nodes[other].handle);
            cudaGraphNode_t *before = after.data();
            size_t count = after.size();
            const Work &work = node.work;
            switch (work.kind) {
            case KERNEL: {
                Arguments a;
                arguments(id, a);
                CHECK(cudaGraphAddKernelNode(&node.handle, graph, before, count, &a.params));
                break;
            }
            case COPY:
                CHECK(cudaGraphAddMemcpyNode1D(&node.handle, graph, before, count, at(work.space, id), read_from(work.first), BYTES, direction(work)));
                break;
            case BOX: {
                cudaMemcpy3DParms p = box(id);
                CHECK(cudaGraphAddMemcpyNode(&node.handle, graph, before, count, &p));
                break;
            }
            case FILL: {
                cudaMemsetParams p = fill(id);
                CHECK(cudaGraphAddMemsetNode(&node.handle, graph, before, count, &p));
                break;
            }
            case CALL: {
                cudaHostNodeParams p = {called, call(id)};
                CHECK(cudaGraphAddHostNode(&node.handle, graph, before, count, &p));
                break;
            }
            case NOTHING: CHECK(cudaGraphAddEmptyNode(&node.handle, graph, before, count)); break;
            case RECORD: CHECK(cudaGraphAddEventRecordNode(&node.handle, graph, before, count, events[id])); break;
            case WAIT: CHECK(cudaGraphAddEventWaitNode(&node.handle, graph, before, count, outside)); break;
            case CHILD: {
                cudaGraph_t child = build(id);
                CHECK(cudaGraphAddChildGraphNode(&node.handle, graph, before, count, child));
                CHECK(cudaGraphDestroy(child));
            }
            }
        }
        return graph;
    }

    cudaGraph_t capture(cudaStream_t *streams, const std::vector<int> &on) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
        CHECK(cudaEventRecord(fork_event, streams[0]));
        for (int i = 1; i < 3; i++) CHECK(cudaStreamWaitEvent(streams[i], fork_event, 0));
        for (int id = 0; id < (int)nodes.size(); id++) {
            const Work &work = nodes[id].work;
            cudaStream_t stream = streams[on[id]];
            for (int other : nodes[id].after)
                if (on[other] != on[id]) CHECK(cudaStreamWaitEvent(stream, events[other], 0));
            if (work.kind == KERNEL) {
                mix<<<1, WORDS, 0, stream>>>(at(work.space, id), (const int *)read_from(work.first), (const int *)read_from(work.second), work.value);
                LAUNCHED();
            } else if (work.kind == COPY) {
                CHECK(cudaMemcpyAsync(at(work.space, id), read_from(work.first), BYTES, direction(work), stream));
            } else if (work.kind == BOX) {
                cudaMemcpy3DParms p = box(id);
                CHECK(cudaMemcpy3DAsync(&p, stream));
            } else if (work.kind == FILL && work.height == 1) {
                CHECK(cudaMemsetAsync(at(work.space, id), work.value, work.width, stream));
            } else if (work.kind == FILL) {
                CHECK(cudaMemset2DAsync(at(work.space, id), PITCH, work.value, work.width, work.height, stream));
            } else {
                CHECK(cudaLaunchHostFunc(stream, called, call(id)));
            }
            CHECK(cudaEventRecord(events[id], stream));
        }
        for (int i = 1; i < 3; i++) {
            CHECK(cudaEventRecord(join_event, streams[i]));
            CHECK(cudaStreamWaitEvent(streams[0], join_event, 0));
        }
        CHECK(cudaStreamEndCapture(streams[0], &graph));
        return graph;
    }

    // What a launch leaves in the model.
    void compute() {
        for (int id = 0; id < (int)nodes.size(); id++) {
            const Work &work = nodes[id].work;
            if (!nodes[id].on) continue;
            std::vector<int> &out = model[id];
            const int *first = work.first < 0 ? nullptr : model[work.first].data();
            const int *second = work.second < 0 ? nullptr : model[work.second].data();
            unsigned char *bytes = (unsigned char *)out.data();
            switch (work.kind) {
            case KERNEL:
                for (int i = 0; i < WORDS; i++)
                    out[i] = (int)((first ? (unsigned)first[i] * 3 : 0) + (second ? (unsigned)second[i] * 5 : 0) + work.value + i);
                break;
            case COPY: out.assign(first, first + WORDS); break;
            case BOX:
                for (int z = 0; z < work.extent[2]; z++)
                    for (int y = 0; y < work.extent[1]; y++)
                        for (int x = 0; x < work.extent[0]; x++)
                            out[((work.to[2] + z) * HIGH + work.to[1] + y) * WIDE + work.to[0] + x] =
                                first[((work.from[2] + z) * HIGH + work.from[1] + y) * WIDE + work.from[0] + x];
                break;
            case FILL:
                for (int y = 0; y < work.height; y++)
                    for (int x = 0; x < work.width; x++) memcpy(bytes + y * PITCH + x * work.element, &work.value, work.element);
                break;
            case CALL:
                for (int i = 0; i < WORDS; i++) out[i] = (int)((first ? (unsigned)first[i] * 7 : 0) + work.value) ^ i;
                break;
            default: break;
            }
        }
    }
};

static cudaMemcpy3DParms whole_array(int id, int *words, bool out) {
    cudaMemcpy3DParms p = {};
    cudaPitchedPtr linear = make_cudaPitchedPtr(words, PITCH, WIDE, HIGH);
    if (out) p.srcArray = arrays[id], p.dstPtr = linear;
    else p.dstArray = arrays[id], p.srcPtr = linear;
    p.extent = make_cudaExtent(WIDE, HIGH, DEEP);
    p.kind = out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    return p;
}

static void poison(const Graph &graph, int value) {
    int count = (int)graph.nodes.size();
    model.assign(count, std::vector<int>(WORDS, value));
    std::vector<int> all(count * WORDS, value);
    CHECK(cudaMemcpy(memory[DEVICE], all.data(), count * BYTES, cudaMemcpyHostToDevice));
    memcpy(memory[MANAGED], all.data(), count * BYTES);
    memcpy(memory[PINNED], all.data(), count * BYTES);
    memcpy(memory[PAGEABLE], all.data(), count * BYTES);
    for (int id = 0; id < count; id++) {
        cudaMemcpy3DParms p = whole_array(id, all.data(), false);
        CHECK(cudaMemcpy3D(&p));
    }
    CHECK(cudaDeviceSynchronize());
}

static void compare(const Graph &graph, uint64_t seed, int round, const char *what) {
    int words[WORDS];
    for (int id = 0; id < (int)graph.nodes.size(); id++) {
        const Node &node = graph.nodes[id];
        if (node.work.kind > CALL) continue;
        if (node.work.space == ARRAY) {
            cudaMemcpy3DParms p = whole_array(id, words, true);
            CHECK(cudaMemcpy3D(&p));
        } else {
            CHECK(cudaMemcpy(words, at(node.work.space, id), BYTES, cudaMemcpyDefault));
            if (node.work.space == MANAGED) memcpy(words, at(MANAGED, id), BYTES);
        }
        for (int i = 0; i < WORDS; i++)
            REQUIRE(words[i] == model[id][i], "graph %#llx, round %d, %s: word %d of node %d (%s, memory %d, after %zu) is %#x and not %#x",
                    (unsigned long long)seed, round, what, i, id, kinds[node.work.kind], node.work.space, node.after.size(), words[i], model[id][i]);
    }
}

int main(int argc, char **argv) {
    Options options = parse_options(argc, argv);
    int turns = options.number ? (int)options.number : options.full ? 300 : 24;
    CHECK(cudaMalloc(&memory[DEVICE], MOST * BYTES));
    CHECK(cudaMallocManaged(&memory[MANAGED], MOST * BYTES));
    CHECK(cudaMallocHost(&memory[PINNED], MOST * BYTES));
    memory[PAGEABLE] = (int *)malloc(MOST * BYTES);
    cudaChannelFormatDesc word = cudaCreateChannelDesc<int>();
    for (cudaArray_t &array : arrays) CHECK(cudaMalloc3DArray(&array, &word, make_cudaExtent(WIDE, HIGH, DEEP)));
    for (cudaEvent_t &event : events) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (cudaEvent_t *event : {&outside, &fork_event, &join_event}) CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    cudaStream_t streams[5] = {nullptr, nullptr, nullptr, cudaStreamLegacy, cudaStreamPerThread};
    for (int i = 0; i < 3; i++) CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    CHECK(cudaEventRecord(outside, streams[2]));

    int all = 0, launches = 0;
    for (int turn = 0; turn < turns; turn++) {
        uint64_t seed = options.seed + turn;
        Random random(seed);
        bool captured = turn % 3 == 2;
        Graph graph(random, captured);
        all += (int)graph.nodes.size();
        std::vector<int> on;
        for (size_t i = 0; i < graph.nodes.size(); i++) on.push_back(random.below(3));
        auto make = [&] { return captured ? graph.capture(streams, on) : graph.build(-1); };
        cudaGraph_t made = make();
        cudaGraphExec_t exec;
        const unsigned long long flags[] = {0, cudaGraphInstantiateFlagAutoFreeOnLaunch, cudaGraphInstantiateFlagUseNodePriority};
        CHECK(cudaGraphInstantiate(&exec, made, flags[random.below(3)]));
        if (random.below(3) == 0) CHECK(cudaGraphUpload(exec, streams[0]));
        const char *what = "as made";
        for (int round = 0; round < 6; round++) {
            poison(graph, (int)random.next());
            // Launches of one instance follow each other on whatever streams they are.
            for (int times = 1 + random.below(3); times > 0; times--) {
                CHECK(cudaGraphLaunch(exec, streams[random.below(5)]));
                launches++;
            }
            graph.compute();
            CHECK(cudaDeviceSynchronize());
            for (int id = 0; id < (int)graph.nodes.size(); id++)
                if (graph.nodes[id].work.kind == RECORD) CHECK(cudaEventQuery(events[id]));
            compare(graph, seed, round, what);

            if (captured || random.below(3) == 0) {
                what = "a whole update";
                for (Node &node : graph.nodes) {
                    // What is switched off stays so, and takes over what it would do.
                    if (!node.on && random.below(2)) {
                        node.on = true;
                        CHECK(cudaGraphNodeSetEnabled(exec, node.handle, 1));
                    }
                    if (random.below(2)) graph.change(node);
                }
                // Nodes keep the names that they have in the first graph.
                std::vector<cudaGraphNode_t> names;
                for (Node &node : graph.nodes) names.push_back(node.handle);
                cudaGraph_t other = make();
                cudaGraphExecUpdateResultInfo info;
                cudaError_t status = cudaGraphExecUpdate(exec, other, &info);
                REQUIRE(status == cudaSuccess && info.result == cudaGraphExecUpdateSuccess, "graph %#llx: an update ends with %s, result %d",
                        (unsigned long long)seed, cudaGetErrorName(status), (int)info.result);
                CHECK(cudaGraphDestroy(other));
                for (size_t i = 0; i < names.size(); i++) graph.nodes[i].handle = names[i];
                continue;
            }
            what = "nodes changed";
            for (int id = 0; id < (int)graph.nodes.size(); id++) {
                Node &node = graph.nodes[id];
                Work &work = node.work;
                if (node.parent >= 0 || random.below(2)) continue;
                if (work.kind == CHILD) {
                    for (Node &inner : graph.nodes)
                        if (inner.parent == id) graph.change(inner);
                    std::vector<cudaGraphNode_t> names;
                    for (Node &each : graph.nodes) names.push_back(each.handle);
                    cudaGraph_t child = graph.build(id);
                    CHECK(cudaGraphExecChildGraphNodeSetParams(exec, node.handle, child));
                    CHECK(cudaGraphDestroy(child));
                    for (size_t i = 0; i < names.size(); i++) graph.nodes[i].handle = names[i];
                    continue;
                }
                if ((work.kind == KERNEL || work.kind == COPY || work.kind == BOX || work.kind == FILL) && random.below(3) == 0) {
                    node.on = !node.on;
                    CHECK(cudaGraphNodeSetEnabled(exec, node.handle, node.on));
                    continue;
                }
                if (work.kind == BOX) continue;
                graph.change(node);
                if (work.kind == KERNEL) {
                    Graph::Arguments a;
                    graph.arguments(id, a);
                    CHECK(cudaGraphExecKernelNodeSetParams(exec, node.handle, &a.params));
                } else if (work.kind == COPY) {
                    CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec, node.handle, at(work.space, id), graph.read_from(work.first), BYTES,
                                                             graph.direction(work)));
                } else if (work.kind == FILL) {
                    cudaMemsetParams p = graph.fill(id);
                    CHECK(cudaGraphExecMemsetNodeSetParams(exec, node.handle, &p));
                } else if (work.kind == CALL) {
                    cudaHostNodeParams p = {called, graph.call(id)};
                    CHECK(cudaGraphExecHostNodeSetParams(exec, node.handle, &p));
                }
            }
        }
        bool first = random.below(2);
        if (first) CHECK(cudaGraphDestroy(made));
        CHECK(cudaGraphExecDestroy(exec));
        if (!first) CHECK(cudaGraphDestroy(made));
    }
    return pass("%d graphs, %d nodes, %d launches", turns, all, launches);
}
