// Kernels that launch kernels: a tree of them, streams and tails, launches that cannot be. Compiled by regenerate.sh.

__global__ void leaf(int *p, int value) { p[blockIdx.x * blockDim.x + threadIdx.x] += value; }

// Each node adds one to its part of the memory, halves it for two more nodes, and counts itself once they are done.
extern "C" __global__ void tree(int *p, int n, int depth)
{
    if (threadIdx.x) return;
    leaf<<<n / 32, 32>>>(p, 1);
    if (depth == 0) return;
    tree<<<1, 32, 0, cudaStreamFireAndForget>>>(p, n / 2, depth - 1);
    tree<<<1, 32, 0, cudaStreamFireAndForget>>>(p + n / 2, n / 2, depth - 1);
}

__global__ void append(int *list, int value) { list[1 + list[0]++] = value; }

// What order launches have: those of one stream as they were made, tails after everything else.
extern "C" __global__ void order(int *list)
{
    cudaStream_t stream;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    append<<<1, 1, 0, cudaStreamTailLaunch>>>(list, 4);
    append<<<1, 1, 0, cudaStreamTailLaunch>>>(list, 5);
    append<<<1, 1, 0, stream>>>(list, 1);
    cudaEventRecord(event, stream);
    cudaStreamWaitEvent(stream, event, 0);
    append<<<1, 1, 0, stream>>>(list, 2);
    append<<<1, 1, 0, stream>>>(list, 3);
    cudaStreamDestroy(stream);
    cudaEventDestroy(event);
}

extern "C" __global__ void refused(int *out)
{
    leaf<<<1, 2000>>>(out, 1);
    out[0] = cudaPeekAtLastError();
    out[1] = cudaGetLastError();
    out[2] = cudaGetLastError();
    leaf<<<0, 32>>>(out, 1);
    out[3] = cudaGetLastError();
    append<<<1, 1>>>(out + 8, 77);
    out[4] = cudaGetLastError();
}

// A kernel that goes on by launching itself as its own tail.
extern "C" __global__ void again(int *count, int times)
{
    if (++*count < times) again<<<1, 1, 0, cudaStreamTailLaunch>>>(count, times);
}

// Kernels inside kernels, until that is refused.
extern "C" __global__ void deeper(int *out, int depth)
{
    out[depth] = 1;
    deeper<<<1, 1>>>(out, depth + 1);
    out[64 + depth] = cudaGetLastError();
}
