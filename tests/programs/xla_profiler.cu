// Uses CUPTI as XLA's profiler does (jax.profiler): callbacks for the driver's calls and for graphs, and activity records, from the first call to cuptiFinalize, twice.
// XLA gives up all of it as soon as one function fails.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <cuda.h>
#include <cupti.h>

#define PROGRAM "xla_profiler"
#include "driver.h"

__global__ void add(int *data, int what)
{
    data[blockIdx.x * blockDim.x + threadIdx.x] += what;
}

#define FUNCTIONS(F)                                                                                                   \
    F(cuptiActivityEnable) F(cuptiActivityDisable) F(cuptiActivityRegisterCallbacks) F(cuptiActivityFlushAll)          \
    F(cuptiActivityGetNextRecord) F(cuptiActivityGetNumDroppedRecords) F(cuptiActivitySetAttribute)                    \
    F(cuptiGetTimestamp) F(cuptiSubscribe) F(cuptiUnsubscribe) F(cuptiEnableCallback) F(cuptiFinalize)                 \
    F(cuptiGetDeviceId) F(cuptiGetGraphId) F(cuptiGetGraphExecId) F(cuptiGetGraphNodeId) F(cuptiSetThreadIdType)

#include "cupti_calls.h"

static const uint32_t RESOURCES[] = { CUPTI_CBID_RESOURCE_GRAPH_CREATED, CUPTI_CBID_RESOURCE_GRAPH_CLONED, CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED,
                                      CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED };
static const uint32_t CALLS[] = { CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2,
                                  CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2, CUPTI_DRIVER_TRACE_CBID_cuMemsetD32Async, CUPTI_DRIVER_TRACE_CBID_cuGraphCreate,
                                  CUPTI_DRIVER_TRACE_CBID_cuGraphAddKernelNode_v2, CUPTI_DRIVER_TRACE_CBID_cuGraphAddMemsetNode, CUPTI_DRIVER_TRACE_CBID_cuGraphClone,
                                  CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithFlags, CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate_v2, CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch };
static const CUpti_ActivityKind KINDS[] = { CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
                                            CUPTI_ACTIVITY_KIND_OVERHEAD, CUPTI_ACTIVITY_KIND_MEMSET };

// What XLA keeps of a thread's graph calls. Everything here happens in one thread.
struct Graphs {
    uint32_t graph, original;
    std::map<uint64_t, uint64_t> nodes;
};
static Graphs graphs;
// The annotation of each call, by its number.
static const char *annotation = "";
static std::map<uint32_t, std::string> annotations;
static std::map<uint32_t, int> heard;
static std::map<std::string, int> devices_work;
static uint32_t launched, graph_of_records, context_of_calls, context_of_records;
static uint64_t began, ended;

static void about_a_graph(uint32_t id, const CUpti_ResourceData *resource)
{
    const CUpti_GraphData *data = (const CUpti_GraphData *)resource->resourceDescriptor;
    uint64_t node = 0, original = 0;
    heard[id]++;
    switch (id) {
    case CUPTI_CBID_RESOURCE_GRAPH_CREATED:
        OK(cuptiGetGraphId(data->graph, &graphs.graph));
        graphs.original = 0;
        break;
    case CUPTI_CBID_RESOURCE_GRAPH_CLONED:
        OK(cuptiGetGraphId(data->graph, &graphs.graph));
        OK(cuptiGetGraphId(data->originalGraph, &graphs.original));
        break;
    case CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED:
        OK(cuptiGetGraphExecId(data->graphExec, &graphs.graph));
        OK(cuptiGetGraphId(data->graph, &graphs.original));
        break;
    case CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED:
        OK(cuptiGetGraphNodeId(data->node, &node));
        graphs.nodes[node] = 0;
        break;
    case CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED:
        OK(cuptiGetGraphNodeId(data->node, &node));
        OK(cuptiGetGraphNodeId(data->originalNode, &original));
        EXPECT_THAT(original && node != original, "node %llu of %llu", (unsigned long long)node, (unsigned long long)original);
        graphs.nodes[node] = original;
        break;
    default: EXPECT_THAT(false, "resource %u", id);
    }
}

static void callback(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data)
{
    if (domain == CUPTI_CB_DOMAIN_RESOURCE) return about_a_graph(id, (const CUpti_ResourceData *)data);
    const CUpti_CallbackData *call = (const CUpti_CallbackData *)data;
    EXPECT_THAT(user == &heard && domain == CUPTI_CB_DOMAIN_DRIVER_API && call->context, "domain %d", (int)domain);
    uint32_t device = 77;
    OK(cuptiGetDeviceId(call->context, &device));
    EXPECT_THAT(device == 0, "device %u", device);
    context_of_calls = call->contextUid;
    if (call->callbackSite == CUPTI_API_ENTER) {
        *call->correlationData = 4711;
        return;
    }
    EXPECT_THAT(*call->correlationData == 4711, "%llu", (unsigned long long)*call->correlationData);
    if (id == CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch) OK(cuptiGetGraphExecId(((const cuGraphLaunch_params *)call->functionParams)->hGraph, &launched));
    annotations[call->correlationId] = annotation;
}

static void requested(uint8_t **buffer, size_t *size, size_t *most)
{
    *size = 32 << 10, *most = 0;
    *buffer = (uint8_t *)aligned_alloc(8, *size);
}

static void device_work(uint32_t correlation, uint32_t device, uint32_t context, uint32_t graph, uint64_t start, uint64_t end, const char *what)
{
    // XLA drops what seems to lie outside of the profile, and what is on no device that it knows.
    EXPECT_THAT(device == 0 && start >= began && end >= start, "%s on device %u from %llu to %llu", what, device, (unsigned long long)start, (unsigned long long)end);
    ended = end > ended ? end : ended;
    context_of_records = context;
    if (graph) graph_of_records = graph;
    EXPECT_THAT(annotations.count(correlation), "%s for an unknown call, %u", what, correlation);
    devices_work[annotations[correlation] + " " + what]++;
}

static void completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid)
{
    size_t dropped = 0;
    OK(cuptiActivityGetNumDroppedRecords(context, stream, &dropped));
    // NVIDIA's library counts one here, although all of this program's work is in the records.
    EXPECT_THAT(dropped <= 1, "%zu dropped", dropped);
    for (CUpti_Activity *record = nullptr;;) {
        CUptiResult result = p_cuptiActivityGetNextRecord(buffer, valid, &record);
        if (result == CUPTI_ERROR_MAX_LIMIT_REACHED) break;
        EXPECT_THAT(result == CUPTI_SUCCESS, "%d", (int)result);
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            auto k = (CUpti_ActivityKernel10 *)record;
            device_work(k->correlationId, k->deviceId, k->contextId, k->graphId, k->start, k->end, "kernel");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            auto c = (CUpti_ActivityMemcpy6 *)record;
            device_work(c->correlationId, c->deviceId, c->contextId, c->graphId, c->start, c->end, "copy");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            auto f = (CUpti_ActivityMemset4 *)record;
            device_work(f->correlationId, f->deviceId, f->contextId, f->graphId, f->start, f->end, "fill");
        } else {
            EXPECT_THAT(record->kind == CUPTI_ACTIVITY_KIND_OVERHEAD, "a record of kind %d", (int)record->kind);
        }
    }
    free(buffer);
}

static CUpti_SubscriberHandle subscriber;

static void enable_callbacks(uint32_t enable)
{
    for (uint32_t id : RESOURCES) OK(cuptiEnableCallback(enable, subscriber, CUPTI_CB_DOMAIN_RESOURCE, (CUpti_CallbackId)id));
    for (uint32_t id : CALLS) OK(cuptiEnableCallback(enable, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, (CUpti_CallbackId)id));
}

static void begin()
{
    heard.clear(), annotations.clear(), devices_work.clear();
    launched = graph_of_records = 0;
    OK(cuptiGetTimestamp(&began));
    OK(cuptiSubscribe(&subscriber, callback, &heard));
    enable_callbacks(1);
    OK(cuptiSetThreadIdType(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM));
    uint8_t yes = 1;
    size_t size = sizeof yes;
    p_cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER, &size, &yes);
    OK(cuptiActivityRegisterCallbacks(requested, completed));
    for (CUpti_ActivityKind kind : KINDS) OK(cuptiActivityEnable(kind));
}

static void end()
{
    enable_callbacks(0);
    OK(cuptiUnsubscribe(subscriber));
    for (CUpti_ActivityKind kind : KINDS) OK(cuptiActivityDisable(kind));
    OK(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    OK(cuptiFinalize());
    uint64_t now = 0;
    OK(cuptiGetTimestamp(&now));
    EXPECT_THAT(ended <= now, "work ended at %llu of %llu", (unsigned long long)ended, (unsigned long long)now);
}

static void expect_work(const char *what, int times)
{
    EXPECT_THAT(devices_work[what] == times, "%s: %d times, not %d", what, devices_work[what], times);
}

int main()
{
    void *library = dlopen("libcupti.so.13", RTLD_NOW);
    EXPECT_THAT(library, "%s", dlerror());
#define FIND(name)                                                                                                     \
    p_##name = (decltype(p_##name))dlsym(library, #name);                                                              \
    EXPECT_THAT(p_##name, "there is no %s", #name);
    FUNCTIONS(FIND)

    const int n = 1024;
    int *data;
    std::vector<int> host(n, 1);
    cudaFunction_t function;
    CHECK(cudaMalloc(&data, n * sizeof(int)));
    CHECK(cudaGetFuncBySymbol(&function, (const void *)add));
    CUdeviceptr at = (CUdeviceptr)data;
    CUcontext context;
    CUstream stream;
    DRIVER(cuCtxGetCurrent(&context));
    DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    int what = 1;
    void *arguments[] = { &data, &what };
    CUDA_KERNEL_NODE_PARAMS kernel = {};
    kernel.func = function, kernel.gridDimX = 4, kernel.gridDimY = kernel.gridDimZ = 1, kernel.blockDimX = 256, kernel.blockDimY = kernel.blockDimZ = 1;
    kernel.kernelParams = arguments;
    CUDA_MEMSET_NODE_PARAMS fill = {};
    fill.dst = at, fill.elementSize = 4, fill.width = n, fill.height = 1, fill.value = 5;

    for (int profile = 0; profile < 2; profile++) {
        begin();
        annotation = "copy-start";
        DRIVER(cuMemcpyHtoDAsync(at, host.data(), n * sizeof(int), stream));
        annotation = "fusion";
        DRIVER(cuLaunchKernel(function, 4, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr));
        annotation = "broadcast";
        DRIVER(cuMemsetD32Async(at, 3, n, stream));

        // A command buffer, made and launched in the profile.
        annotation = "command_buffer";
        CUgraph graph, clone;
        CUgraphNode nodes[2], cloned;
        CUgraphExec instance;
        DRIVER(cuGraphCreate(&graph, 0));
        EXPECT_THAT(heard[CUPTI_CBID_RESOURCE_GRAPH_CREATED] > 0 && graphs.graph != 0, "%d, graph %u", heard[CUPTI_CBID_RESOURCE_GRAPH_CREATED], graphs.graph);
        uint32_t graph_id = graphs.graph, instance_id = 0, id = 0;
        uint64_t ids[2];
        for (int i = 0; i < 2; i++) {
            graphs.nodes.clear();
            if (i == 0) DRIVER(cuGraphAddMemsetNode(&nodes[0], graph, nullptr, 0, &fill, context));
            else DRIVER(cuGraphAddKernelNode(&nodes[1], graph, nodes, 1, &kernel));
            // XLA takes the first without looking whether there is one.
            EXPECT_THAT(!graphs.nodes.empty(), "no node");
            OK(cuptiGetGraphNodeId(nodes[i], &ids[i]));
            EXPECT_THAT(graphs.nodes.count(ids[i]), "another node than %llu", (unsigned long long)ids[i]);
        }
        EXPECT_THAT(ids[0] != ids[1], "two nodes are %llu", (unsigned long long)ids[0]);
        graphs.nodes.clear();
        DRIVER(cuGraphClone(&clone, graph));
        DRIVER(cuGraphNodeFindInClone(&cloned, nodes[1], clone));
        uint64_t clone_id = 0;
        OK(cuptiGetGraphNodeId(cloned, &clone_id));
        EXPECT_THAT(graphs.original == graph_id && graphs.graph != graph_id && graphs.nodes[clone_id] == ids[1], "a clone of %u, not %u", graphs.original, graph_id);
        DRIVER(cuGraphInstantiateWithFlags(&instance, graph, 0));
        OK(cuptiGetGraphExecId(instance, &instance_id));
        OK(cuptiGetGraphId(graph, &id));
        EXPECT_THAT(heard[CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED] > 0 && graphs.graph == instance_id && graphs.original == graph_id && id == graph_id, "%u of %u", graphs.graph, graphs.original);
        for (int i = 0; i < 3; i++) DRIVER(cuGraphLaunch(instance, stream));
        EXPECT_THAT(launched == instance_id, "%u was launched, not %u", launched, instance_id);
        annotation = "copy-done";
        DRIVER(cuMemcpyDtoHAsync(host.data(), at, n * sizeof(int), stream));
        DRIVER(cuStreamSynchronize(stream));
        end();

        EXPECT_THAT(host[0] == 6 && host[n - 1] == 6, "%d, %d", host[0], host[n - 1]);
        expect_work("copy-start copy", 1), expect_work("fusion kernel", 1), expect_work("broadcast fill", 1), expect_work("copy-done copy", 1);
        expect_work("command_buffer kernel", 3), expect_work("command_buffer fill", 3);
        EXPECT_THAT(devices_work.size() == 6, "%zu kinds of work", devices_work.size());
        EXPECT_THAT(graph_of_records == instance_id, "records are of graph %u, not %u", graph_of_records, instance_id);
        EXPECT_THAT(context_of_records == context_of_calls, "context %u, not %u", context_of_records, context_of_calls);

        // After the end, nobody is called.
        heard.clear(), annotations.clear();
        DRIVER(cuGraphLaunch(instance, stream));
        DRIVER(cuStreamSynchronize(stream));
        EXPECT_THAT(annotations.empty(), "%zu calls after the end", annotations.size());
        DRIVER(cuGraphExecDestroy(instance));
        DRIVER(cuGraphDestroy(graph));
        DRIVER(cuGraphDestroy(clone));
        EXPECT_THAT(p_cuptiGetGraphId(nullptr, &id) == CUPTI_ERROR_INVALID_PARAMETER, "a graph NULL");
        EXPECT_THAT(p_cuptiGetGraphNodeId(nullptr, &clone_id) == CUPTI_ERROR_INVALID_PARAMETER, "a node NULL");
    }
    CHECK(cudaFree(data));
    return pass("two profiles");
}
