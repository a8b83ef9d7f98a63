// Green contexts: parts of a device, contexts that have only a part, their streams, and what they wait for.
#define PROGRAM "green_contexts"
#include "cases.h"
#include <cuda.h>
#include <vector>

__global__ void fill(int *to, int value) { to[blockIdx.x * blockDim.x + threadIdx.x] = value; }

// Work that takes a while, and then writes.
__global__ void late(int *to, int value, int rounds) {
    volatile int x = value;
    for (int i = 0; i < rounds; i++) x = x * 1664525 + 1013904223;
    to[threadIdx.x] = x == 12345678 ? 0 : value;
}

__global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }

static void tell(const char *what, const CUdevResource &r) {
    printf("%s: type %d, %u multiprocessors in parts of at least %u and multiples of %u\n", what, r.type, r.sm.smCount, r.sm.minSmPartitionSize, r.sm.smCoscheduledAlignment);
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    CUcontext primary, now;
    IS(CUDA_SUCCESS, cuInit(0));
    IS(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&primary, 0));
    IS(CUDA_SUCCESS, cuCtxSetCurrent(primary));

    // The whole, and its parts.
    CUdevResource all, of_context, none;
    int count = 0;
    IS(CUDA_SUCCESS, cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
    IS(CUDA_SUCCESS, cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    tell("device", all);
    IS(count, (int)all.sm.smCount);
    IS(CUDA_SUCCESS, cuCtxGetDevResource(primary, &of_context, CU_DEV_RESOURCE_TYPE_SM));
    IS(all.sm.smCount, of_context.sm.smCount);
    printf("no kind: %d\n", cuDeviceGetDevResource(0, &none, CU_DEV_RESOURCE_TYPE_INVALID));
    IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetDevResource(99, &none, CU_DEV_RESOURCE_TYPE_SM));

    unsigned groups = 0, least = all.sm.smCount / 2 / all.sm.smCoscheduledAlignment * all.sm.smCoscheduledAlignment;
    IS(CUDA_SUCCESS, cuDevSmResourceSplitByCount(nullptr, &groups, &all, nullptr, 0, least));
    printf("%u groups of %u\n", groups, least);
    CUdevResource half[2] = {}, rest;
    groups = 2;
    IS(CUDA_SUCCESS, cuDevSmResourceSplitByCount(half, &groups, &all, &rest, 0, least));
    IS(2u, groups);
    tell("first", half[0]);
    tell("second", half[1]);
    printf("rest: type %d\n", rest.type);
    TRUE_THAT(half[0].sm.smCount >= least && half[0].sm.smCount == half[1].sm.smCount);

    // Contexts of them.
    CUdevResourceDesc described[2];
    CUgreenCtx green[2];
    CUcontext as_context[2];
    for (int i = 0; i < 2; i++) {
        IS(CUDA_SUCCESS, cuDevResourceGenerateDesc(&described[i], &half[i], 1));
        IS(CUDA_SUCCESS, cuGreenCtxCreate(&green[i], described[i], 0, CU_GREEN_CTX_DEFAULT_STREAM));
        IS(CUDA_SUCCESS, cuCtxFromGreenCtx(&as_context[i], green[i]));
        CUdevResource has;
        IS(CUDA_SUCCESS, cuGreenCtxGetDevResource(green[i], &has, CU_DEV_RESOURCE_TYPE_SM));
        IS(half[i].sm.smCount, has.sm.smCount);
        IS(CUDA_SUCCESS, cuCtxGetDevResource(as_context[i], &has, CU_DEV_RESOURCE_TYPE_SM));
        IS(half[i].sm.smCount, has.sm.smCount);
    }
    CUgreenCtx refused;
    printf("without the flag: %d\n", cuGreenCtxCreate(&refused, described[0], 0, 0));
    unsigned long long id[3];
    for (int i = 0; i < 2; i++) IS(CUDA_SUCCESS, cuCtxGetId(as_context[i], &id[i]));
    IS(CUDA_SUCCESS, cuCtxGetId(primary, &id[2]));
    TRUE_THAT(as_context[0] != as_context[1] && as_context[0] != primary);
    TRUE_THAT(id[0] != id[1]);

    // One as the current context: its default stream is its own; memory and code are the primary context's.
    int *data, host[256];
    IS(CUDA_SUCCESS, cuCtxSetCurrent(as_context[0]));
    IS(CUDA_SUCCESS, cuCtxGetCurrent(&now));
    TRUE_THAT(now == as_context[0]);
    CUdevice device = 9;
    IS(CUDA_SUCCESS, cuCtxGetDevice(&device));
    IS(0, device);
    CUgreenCtx in;
    IS(CUDA_SUCCESS, cuStreamGetGreenCtx(nullptr, &in));
    TRUE_THAT(in == green[0]);
    IS(CUDA_ERROR_INVALID_HANDLE, cuStreamGetCtx_v2(CU_STREAM_PER_THREAD, &now, &in));
    RETURNS(cudaSuccess, cudaMalloc(&data, 4 * sizeof host));
    for (int round = 1; round < 4; round++) {
        fill<<<1, 256>>>(data, round);
        RETURNS(cudaSuccess, cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
        TRUE_THAT(host[0] == round && host[255] == round);
        std::vector<int> sent(256, 10 * round);
        RETURNS(cudaSuccess, cudaMemcpy(data, sent.data(), sizeof host, cudaMemcpyHostToDevice));
        copy<<<1, 256>>>(data, data + 256);
        RETURNS(cudaSuccess, cudaMemcpy(host, data + 256, sizeof host, cudaMemcpyDeviceToHost));
        TRUE_THAT(host[0] == 10 * round && host[255] == 10 * round);
    }
    cudaStream_t by_runtime;
    RETURNS(cudaSuccess, cudaStreamCreateWithFlags(&by_runtime, cudaStreamNonBlocking));
    IS(CUDA_SUCCESS, cuStreamGetGreenCtx(by_runtime, &in));
    TRUE_THAT(in == green[0]);
    fill<<<1, 256, 0, by_runtime>>>(data, 77);
    RETURNS(cudaSuccess, cudaStreamSynchronize(by_runtime));
    RETURNS(cudaSuccess, cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    TRUE_THAT(host[128] == 77);
    RETURNS(cudaSuccess, cudaDeviceSynchronize());
    IS(CUDA_SUCCESS, cuCtxPushCurrent(as_context[1]));
    IS(CUDA_SUCCESS, cuStreamGetGreenCtx(nullptr, &in));
    TRUE_THAT(in == green[1]);
    IS(CUDA_SUCCESS, cuCtxPopCurrent(&now));
    TRUE_THAT(now == as_context[1]);
    IS(CUDA_SUCCESS, cuCtxSetCurrent(primary));
    IS(CUDA_SUCCESS, cuStreamGetGreenCtx(nullptr, &in));
    TRUE_THAT(in == nullptr);

    // Streams of a green context, made while another context is current.
    CUstream stream, beside;
    IS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxStreamCreate(&stream, green[0], CU_STREAM_DEFAULT, 0));
    IS(CUDA_SUCCESS, cuGreenCtxStreamCreate(&stream, green[0], CU_STREAM_NON_BLOCKING, 0));
    IS(CUDA_SUCCESS, cuStreamGetGreenCtx(stream, &in));
    TRUE_THAT(in == green[0]);
    IS(CUDA_SUCCESS, cuStreamGetCtx(stream, &now));
    TRUE_THAT(now == as_context[0]);
    IS(CUDA_SUCCESS, cuStreamGetCtx_v2(stream, &now, &in));
    TRUE_THAT(now == primary && in == green[0]);
    IS(CUDA_SUCCESS, cuStreamCreate(&beside, CU_STREAM_NON_BLOCKING));
    IS(CUDA_SUCCESS, cuStreamGetGreenCtx(beside, &in));
    TRUE_THAT(in == nullptr);

    // What is recorded of a green context stands for all its streams; what it waits for, all of them wait for, those that are made later too.
    CUevent event, other;
    IS(CUDA_SUCCESS, cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    IS(CUDA_SUCCESS, cuEventCreate(&other, CU_EVENT_DISABLE_TIMING));
    const int rounds = 200000;
    for (int round = 0; round < 3; round++) {
        RETURNS(cudaSuccess, cudaMemset(data, 0, 4 * sizeof host));
        RETURNS(cudaSuccess, cudaDeviceSynchronize());
        late<<<1, 256, 0, stream>>>(data, 5, rounds);
        late<<<1, 256, 0, by_runtime>>>(data + 256, 6, rounds);
        if (round < 2) IS(CUDA_SUCCESS, cuGreenCtxRecordEvent(green[0], event));
        else IS(CUDA_SUCCESS, cuCtxRecordEvent(primary, event));
        IS(CUDA_SUCCESS, cuStreamWaitEvent(beside, event, 0));
        copy<<<1, 256, 0, beside>>>(data, data + 512);
        copy<<<1, 256, 0, beside>>>(data + 256, data + 768);
        IS(CUDA_SUCCESS, cuStreamSynchronize(beside));
        RETURNS(cudaSuccess, cudaMemcpy(host, data + 512, sizeof host, cudaMemcpyDeviceToHost));
        TRUE_THAT(host[0] == 5 && host[255] == 5);
        RETURNS(cudaSuccess, cudaMemcpy(host, data + 768, sizeof host, cudaMemcpyDeviceToHost));
        TRUE_THAT(host[0] == 6 && host[255] == 6);

        late<<<1, 256, 0, beside>>>(data, 40 + round, rounds);
        IS(CUDA_SUCCESS, cuEventRecord(other, beside));
        if (round < 2) IS(CUDA_SUCCESS, cuGreenCtxWaitEvent(green[0], other));
        else IS(CUDA_SUCCESS, cuCtxWaitEvent(primary, other));
        CUstream later;
        IS(CUDA_SUCCESS, cuGreenCtxStreamCreate(&later, green[0], CU_STREAM_NON_BLOCKING, 0));
        copy<<<1, 256, 0, later>>>(data, data + 256);
        copy<<<1, 256, 0, stream>>>(data, data + 512);
        IS(CUDA_SUCCESS, cuStreamSynchronize(later));
        IS(CUDA_SUCCESS, cuStreamSynchronize(stream));
        for (int part = 1; part < 3; part++) {
            RETURNS(cudaSuccess, cudaMemcpy(host, data + 256 * part, sizeof host, cudaMemcpyDeviceToHost));
            TRUE_THAT(host[0] == 40 + round && host[255] == 40 + round);
        }
        IS(CUDA_SUCCESS, cuStreamDestroy(later));
    }

    // Captured, launched, and timed like other streams.
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    fill<<<1, 256, 0, stream>>>(data, 99);
    IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuGreenCtxRecordEvent(green[0], event));
    RETURNS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    RETURNS(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    fill<<<1, 256, 0, stream>>>(data, 99);
    RETURNS(cudaSuccess, cudaStreamEndCapture(stream, &graph));
    RETURNS(cudaSuccess, cudaGraphInstantiate(&exec, graph, 0));
    RETURNS(cudaSuccess, cudaGraphLaunch(exec, stream));
    RETURNS(cudaSuccess, cudaStreamSynchronize(stream));
    RETURNS(cudaSuccess, cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    TRUE_THAT(host[7] == 99);
    RETURNS(cudaSuccess, cudaGraphExecDestroy(exec));
    RETURNS(cudaSuccess, cudaGraphDestroy(graph));

    // Their end.
    IS(CUDA_SUCCESS, cuStreamDestroy(stream));
    IS(CUDA_SUCCESS, cuStreamDestroy(beside));
    RETURNS(cudaSuccess, cudaStreamDestroy(by_runtime));
    IS(CUDA_SUCCESS, cuEventDestroy(event));
    IS(CUDA_SUCCESS, cuEventDestroy(other));
    IS(CUDA_SUCCESS, cuGreenCtxDestroy(green[1]));
    IS(CUDA_SUCCESS, cuGreenCtxDestroy(green[0]));

    // Nothing ends a descriptor, and there may be any number.
    CUdevResourceDesc again;
    for (int i = 0; i < 5000; i++) IS(CUDA_SUCCESS, cuDevResourceGenerateDesc(&again, &half[0], 1));
    IS(CUDA_SUCCESS, cuGreenCtxCreate(&green[0], again, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    IS(CUDA_SUCCESS, cuGreenCtxDestroy(green[0]));
    fill<<<1, 256>>>(data, 3);
    RETURNS(cudaSuccess, cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    TRUE_THAT(host[9] == 3);
    RETURNS(cudaSuccess, cudaFree(data));
    return verdict();
}
