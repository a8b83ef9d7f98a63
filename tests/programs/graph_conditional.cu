// Conditional nodes of graphs: a choice, a choice of two, a loop, a switch, one inside the other; their graphs built node by node and captured.
#define PROGRAM "graph_conditional"
#include "common.h"

typedef cudaGraphConditionalHandle Handle;

// What kernels work on: a count for each thing that may happen, and what decides.
struct State {
    int limit, steps, even, odd, taken[4], which;
};

__global__ void decide(State *state, Handle handle) { cudaGraphSetConditional(handle, state->limit > 10); }
__global__ void choose(State *state, Handle handle) { cudaGraphSetConditional(handle, state->which); }
__global__ void count(int *counter, int by) { *counter += by; }
// One round of the loop: what it is about is told to the condition inside it.
__global__ void round_begins(State *state, Handle parity) {
    state->steps++;
    cudaGraphSetConditional(parity, state->steps % 2);
}
__global__ void round_ends(State *state, Handle loop) { cudaGraphSetConditional(loop, state->steps < state->limit); }

static cudaGraphNode_t kernel(cudaGraph_t graph, cudaGraphNode_t after, void *function, void **arguments) {
    cudaKernelNodeParams params = {};
    params.func = function;
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after ? &after : nullptr, after ? 1 : 0, &params));
    return node;
}

static cudaGraphNode_t counts(cudaGraph_t graph, cudaGraphNode_t after, int *counter, int by) {
    void *arguments[] = {&counter, &by};
    return kernel(graph, after, (void *)count, arguments);
}

static cudaGraphNode_t sets(cudaGraph_t graph, cudaGraphNode_t after, void *function, State *state, Handle handle) {
    void *arguments[] = {&state, &handle};
    return kernel(graph, after, function, arguments);
}

static cudaGraphNode_t conditional(cudaGraph_t graph, cudaGraphNode_t after, Handle handle, cudaGraphConditionalNodeType type, unsigned size,
                                   cudaGraph_t *bodies) {
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = type;
    params.conditional.size = size;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddNode(&node, graph, after ? &after : nullptr, nullptr, after ? 1 : 0, &params));
    for (unsigned i = 0; i < size; i++) bodies[i] = params.conditional.phGraph_out[i];
    cudaGraphNodeType told;
    CHECK(cudaGraphNodeGetType(node, &told));
    REQUIRE(told == cudaGraphNodeTypeConditional, "a conditional node's type is %d", (int)told);
    return node;
}

static State launch(cudaGraphExec_t exec, State *device, const State &from, cudaStream_t stream, int times = 1) {
    CHECK(cudaMemcpyAsync(device, &from, sizeof from, cudaMemcpyHostToDevice, stream));
    for (int i = 0; i < times; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    State state;
    CHECK(cudaMemcpy(&state, device, sizeof state, cudaMemcpyDeviceToHost));
    return state;
}

static cudaGraphExec_t instantiated(cudaGraph_t graph) {
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

// if (limit > 10) { even += 1; odd = 0 } and with an else: else { odd += 100 }
static void choices(State *device, cudaStream_t stream) {
    for (unsigned size = 1; size <= 2; size++) {
        cudaGraph_t graph, bodies[2];
        CHECK(cudaGraphCreate(&graph, 0));
        Handle handle;
        CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 0, cudaGraphCondAssignDefault));
        cudaGraphNode_t first = sets(graph, nullptr, (void *)decide, device, handle);
        cudaGraphNode_t node = conditional(graph, first, handle, cudaGraphCondTypeIf, size, bodies);
        counts(graph, node, &device->steps, 7);
        cudaGraphNode_t counted = counts(bodies[0], nullptr, &device->even, 1), cleared;
        cudaMemsetParams clear = {};
        clear.dst = &device->odd;
        clear.elementSize = 4;
        clear.width = clear.height = 1;
        CHECK(cudaGraphAddMemsetNode(&cleared, bodies[0], &counted, 1, &clear));
        if (size == 2) counts(bodies[1], nullptr, &device->odd, 100);
        cudaGraphExec_t exec = instantiated(graph);
        State from = {};
        from.odd = 5;
        from.limit = 11;
        State yes = launch(exec, device, from, stream);
        REQUIRE(yes.even == 1 && yes.odd == 0 && yes.steps == 7, "taken: %d %d %d", yes.even, yes.odd, yes.steps);
        from.limit = 10;
        State no = launch(exec, device, from, stream, 2);
        REQUIRE(no.even == 0 && no.odd == (size == 2 ? 205 : 5) && no.steps == 14, "not taken: %d %d %d", no.even, no.odd, no.steps);
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
}

// while (steps < limit) { steps++; if (steps % 2) odd++ else even++ }, the loop's graph captured, the condition inside of the outer graph.
static void loops(State *device, cudaStream_t stream) {
    cudaGraph_t graph, body, halves[2];
    CHECK(cudaGraphCreate(&graph, 0));
    Handle loop, parity;
    CHECK(cudaGraphConditionalHandleCreate(&loop, graph, 1, cudaGraphCondAssignDefault));
    CHECK(cudaGraphConditionalHandleCreate(&parity, graph, 0, cudaGraphCondAssignDefault));
    conditional(graph, nullptr, loop, cudaGraphCondTypeWhile, 1, &body);
    cudaGraphNode_t begins = sets(body, nullptr, (void *)round_begins, device, parity);
    cudaGraphNode_t inner = conditional(body, begins, parity, cudaGraphCondTypeIf, 2, halves);
    counts(halves[0], nullptr, &device->odd, 1);
    cudaStream_t capturing;
    CHECK(cudaStreamCreate(&capturing));
    CHECK(cudaStreamBeginCaptureToGraph(capturing, halves[1], nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
    count<<<1, 1, 0, capturing>>>(&device->even, 1);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(&device->taken[0], &device->even, sizeof(int), cudaMemcpyDeviceToDevice, capturing));
    cudaGraph_t captured;
    CHECK(cudaStreamEndCapture(capturing, &captured));
    REQUIRE(captured == halves[1], "the capture ended in another graph");
    CHECK(cudaStreamDestroy(capturing));
    sets(body, inner, (void *)round_ends, device, loop);
    cudaGraphExec_t exec = instantiated(graph);
    for (int limit : {1, 2, 25}) {
        State from = {};
        from.limit = limit;
        State state = launch(exec, device, from, stream);
        REQUIRE(state.steps == limit && state.odd == (limit + 1) / 2 && state.even == limit / 2 && state.taken[0] == state.even,
                "a loop of %d: %d steps, %d odd, %d even, %d", limit, state.steps, state.odd, state.even, state.taken[0]);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

// switch (which) over three graphs; a number beyond them takes none.
static void switches(State *device, cudaStream_t stream) {
    cudaGraph_t graph, bodies[3];
    CHECK(cudaGraphCreate(&graph, 0));
    Handle handle;
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 0, 0));
    cudaGraphNode_t first = sets(graph, nullptr, (void *)choose, device, handle);
    conditional(graph, first, handle, cudaGraphCondTypeSwitch, 3, bodies);
    for (int i = 0; i < 3; i++) {
        cudaGraphNode_t node = counts(bodies[i], nullptr, &device->taken[i], 1);
        counts(bodies[i], node, &device->steps, 10 * (i + 1));
    }
    cudaGraphExec_t exec = instantiated(graph);
    for (int which = 0; which < 5; which++) {
        State from = {};
        from.which = which;
        State state = launch(exec, device, from, stream, 2);
        for (int i = 0; i < 3; i++)
            REQUIRE(state.taken[i] == (i == which ? 2 : 0), "switch %d: graph %d ran %d times", which, i, state.taken[i]);
        REQUIRE(state.steps == (which < 3 ? 20 * (which + 1) : 0), "switch %d: %d", which, state.steps);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    State *device;
    CHECK(cudaMalloc(&device, sizeof *device));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    choices(device, stream);
    loops(device, stream);
    switches(device, stream);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return pass("choices, loops and switches");
}
