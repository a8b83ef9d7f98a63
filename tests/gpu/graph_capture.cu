// Stream capture, instantiation and launches of graphs, and what goes wrong. It prints what it finds, so that the output of a run through rgpu can be
// compared with a native one line by line.
//
//   nvcc -cudart shared -arch=native -o graph_capture graph_capture.cu

#include <cstdio>
#include <cuda_runtime.h>
#include <vector>

#define SAY(call) printf("%s: %s\n", #call, cudaGetErrorName(call)), (void)cudaGetLastError()

__global__ void add(int *p, int n, int value)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        p[i] += value;
}
__global__ void sum(int *to, const int *a, const int *b, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = a[i] + b[i];
}

constexpr int N = 100003;

static void show(const char *what, const int *device)
{
    std::vector<int> host(N);
    SAY(cudaMemcpy(host.data(), device, N * sizeof(int), cudaMemcpyDefault));
    long long total = 0;
    for (int i = 0; i < N; i++)
        total += (long long)host[i] * (i % 7 + 1);
    printf("%s %d %d %lld\n", what, host[0], host[N - 1], total);
}

int main()
{
    int *a, *b, *c;
    SAY(cudaMalloc(&a, N * sizeof(int)));
    SAY(cudaMalloc(&b, N * sizeof(int)));
    SAY(cudaMalloc(&c, N * sizeof(int)));
    cudaStream_t s, t;
    cudaEvent_t fork, join;
    SAY(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    SAY(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    SAY(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    SAY(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    SAY(cudaMemset(a, 0, N * sizeof(int)));
    SAY(cudaMemset(b, 0, N * sizeof(int)));
    SAY(cudaDeviceSynchronize());

    dim3 grid((N + 255) / 256), block(256);
    cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    SAY(cudaStreamIsCapturing(s, &status));
    printf("status %d\n", status);
    SAY(cudaStreamIsCapturing(t, &status));
    printf("status %d\n", status);
    add<<<grid, block, 0, s>>>(a, N, 1);
    SAY(cudaEventRecord(fork, s));
    SAY(cudaStreamWaitEvent(t, fork, 0));
    SAY(cudaStreamIsCapturing(t, &status));
    printf("status %d\n", status);
    add<<<grid, block, 0, t>>>(b, N, 10);
    SAY(cudaMemsetAsync(c, 1, N * sizeof(int), s));
    SAY(cudaEventRecord(join, t));
    SAY(cudaStreamWaitEvent(s, join, 0));
    sum<<<grid, block, 0, s>>>(c, a, b, N);
    SAY(cudaMemcpyAsync(a, c, N / 2 * sizeof(int), cudaMemcpyDeviceToDevice, s));
    SAY(cudaStreamEndCapture(s, &graph));
    SAY(cudaStreamIsCapturing(t, &status));
    printf("status %d\n", status);
    size_t count = 0;
    SAY(cudaGraphGetNodes(graph, nullptr, &count));
    printf("%zu nodes\n", count);
    std::vector<cudaGraphNode_t> nodes(count);
    SAY(cudaGraphGetNodes(graph, nodes.data(), &count));
    int kinds[8] = {};
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType kind;
        if (cudaGraphNodeGetType(node, &kind) == cudaSuccess && kind < 8)
            kinds[kind]++;
    }
    printf("kernels %d copies %d fills %d\n", kinds[0], kinds[1], kinds[2]);
    SAY(cudaGraphGetRootNodes(graph, nullptr, &count));
    printf("%zu roots\n", count);
    show("nothing has run", a);

    SAY(cudaGraphInstantiate(&exec, graph, 0));
    SAY(cudaGraphUpload(exec, s));
    SAY(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) {
        SAY(cudaGraphLaunch(exec, i == 1 ? t : s));
        SAY(cudaDeviceSynchronize());
        show("a", a);
        show("b", b);
        show("c", c);
    }
    for (int i = 0; i < 200; i++)
        cudaGraphLaunch(exec, s);
    SAY(cudaStreamSynchronize(s));
    show("b after 200 more", b);
    SAY(cudaGraphExecDestroy(exec));

    printf("-- an empty graph\n");
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    SAY(cudaStreamGetCaptureInfo(s, &status, &id));
    printf("status %d, id %d\n", status, id != 0);
    SAY(cudaStreamEndCapture(s, &graph));
    SAY(cudaGraphInstantiate(&exec, graph, 0));
    SAY(cudaGraphLaunch(exec, s));
    SAY(cudaStreamSynchronize(s));
    SAY(cudaGraphExecDestroy(exec));
    SAY(cudaGraphDestroy(graph));

    printf("-- a stream that is not joined\n");
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    SAY(cudaEventRecord(fork, s));
    SAY(cudaStreamWaitEvent(t, fork, 0));
    add<<<grid, block, 0, t>>>(b, N, 10);
    SAY(cudaStreamEndCapture(s, &graph));
    SAY(cudaStreamIsCapturing(s, &status));
    printf("status %d\n", status);

    printf("-- a synchronization\n");
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    SAY(cudaStreamSynchronize(s));
    SAY(cudaStreamIsCapturing(s, &status));
    printf("status %d\n", status);
    SAY(cudaMemsetAsync(c, 1, 4, s));
    SAY(cudaStreamEndCapture(s, &graph));

    printf("-- an event of a capture\n");
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    SAY(cudaEventRecord(fork, s));
    SAY(cudaEventQuery(fork));
    SAY(cudaStreamEndCapture(s, &graph));
    SAY(cudaEventRecord(fork, s));
    SAY(cudaEventSynchronize(fork));

    printf("-- the wrong stream, and none\n");
    SAY(cudaStreamEndCapture(s, &graph));
    SAY(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed));
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    SAY(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    SAY(cudaStreamEndCapture(s, &graph));
    SAY(cudaGraphDestroy(graph));
    show("c at the end", c);
    return 0;
}
