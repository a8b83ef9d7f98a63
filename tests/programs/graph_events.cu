// Events in captures: those that only order the captured streams, and external ones that a graph records and waits for at each
// launch, between it and work outside of it.
#define PROGRAM "graph_events"
#include "cases.h"

__global__ void step(int *p, int value) { *p = *p * 10 + value; }

int main(int argc, char **argv) {
    parse_options(argc, argv);
    cudaStream_t stream, side, outside;
    for (cudaStream_t *each : {&stream, &side, &outside}) RETURNS(cudaSuccess, cudaStreamCreateWithFlags(each, cudaStreamNonBlocking));
    cudaEvent_t fork, join, given, taken;
    for (cudaEvent_t *each : {&fork, &join, &given, &taken}) RETURNS(cudaSuccess, cudaEventCreateWithFlags(each, cudaEventDisableTiming));
    int *p, got = 0;
    RETURNS(cudaSuccess, cudaMalloc(&p, 8));
    RETURNS(cudaSuccess, cudaMemset(p, 0, 8));
    RETURNS(cudaSuccess, cudaDeviceSynchronize());

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    step<<<1, 1, 0, stream>>>(p, 1);
    RETURNS(cudaSuccess, cudaEventRecord(fork, stream));
    RETURNS(cudaSuccess, cudaStreamWaitEvent(side, fork, 0));
    step<<<1, 1, 0, side>>>(p, 2);
    RETURNS(cudaSuccess, cudaStreamWaitEvent(side, given, cudaEventWaitExternal));
    step<<<1, 1, 0, side>>>(p, 3);
    RETURNS(cudaSuccess, cudaEventRecord(join, side));
    RETURNS(cudaSuccess, cudaStreamWaitEvent(stream, join, 0));
    RETURNS(cudaSuccess, cudaEventRecordWithFlags(taken, stream, cudaEventRecordExternal));
    RETURNS(cudaSuccess, cudaStreamEndCapture(stream, &graph));

    size_t count = 0;
    RETURNS(cudaSuccess, cudaGraphGetNodes(graph, nullptr, &count));
    IS(5, count);
    cudaGraphNode_t nodes[5];
    RETURNS(cudaSuccess, cudaGraphGetNodes(graph, nodes, &count));
    int records = 0, waits = 0, kernels = 0;
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type;
        cudaEvent_t event = nullptr;
        RETURNS(cudaSuccess, cudaGraphNodeGetType(node, &type));
        if (type == cudaGraphNodeTypeEventRecord) {
            records++;
            RETURNS(cudaSuccess, cudaGraphEventRecordNodeGetEvent(node, &event));
            TRUE_THAT(event == taken);
        } else if (type == cudaGraphNodeTypeWaitEvent) {
            waits++;
            RETURNS(cudaSuccess, cudaGraphEventWaitNodeGetEvent(node, &event));
            TRUE_THAT(event == given);
        } else if (type == cudaGraphNodeTypeKernel) {
            kernels++;
        }
    }
    TRUE_THAT(records == 1 && waits == 1 && kernels == 3);
    RETURNS(cudaSuccess, cudaGraphInstantiate(&exec, graph, 0));

    for (int round = 0; round < 3; round++) {
        RETURNS(cudaSuccess, cudaMemsetAsync(p, 0, 4, outside));
        step<<<1, 1, 0, outside>>>(p + 1, 1);
        RETURNS(cudaSuccess, cudaEventRecord(given, outside));
        RETURNS(cudaSuccess, cudaStreamSynchronize(outside));
        RETURNS(cudaSuccess, cudaGraphLaunch(exec, stream));
        RETURNS(cudaSuccess, cudaStreamWaitEvent(outside, taken, 0));
        RETURNS(cudaSuccess, cudaMemcpyAsync(&got, p, 4, cudaMemcpyDeviceToHost, outside));
        RETURNS(cudaSuccess, cudaStreamSynchronize(outside));
        IS(123, got);
        RETURNS(cudaSuccess, cudaEventQuery(taken));
    }
    RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));

    // A stream that was not joined.
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    RETURNS(cudaSuccess, cudaEventRecord(fork, stream));
    RETURNS(cudaSuccess, cudaStreamWaitEvent(side, fork, 0));
    step<<<1, 1, 0, side>>>(p, 2);
    RETURNS(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(stream, &graph));
    // One that is part of a capture cannot be asked.
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    RETURNS(cudaSuccess, cudaEventRecord(fork, stream));
    RETURNS(cudaErrorCapturedEvent, cudaEventQuery(fork));
    RETURNS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    // The streams can be used again.
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    RETURNS(cudaSuccess, cudaStreamEndCapture(stream, &graph));
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
    RETURNS(cudaSuccess, cudaStreamIsCapturing(side, &status));
    IS(cudaStreamCaptureStatusNone, status);
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    return verdict();
}
