// Kernels that launch kernels: a tree, streams and tail launches, invalid launches. Compiled by regenerate.sh.

__global__ void leaf(int *p, int value) { p[blockIdx.x * blockDim.x + threadIdx.x] += value; }

// Each node increments its part of the memory, splits it between two child nodes, and counts itself once they are done.
extern "C" __global__ void tree(int *p, int n, int depth)
{
    if (threadIdx.x) return;
    leaf<<<n / 32, 32>>>(p, 1);
    if (depth == 0) return;
    tree<<<1, 32, 0, cudaStreamFireAndForget>>>(p, n / 2, depth - 1);
    tree<<<1, 32, 0, cudaStreamFireAndForget>>>(p + n / 2, n / 2, depth - 1);
}

__global__ void append(int *list, int value) { list[1 + list[0]++] = value; }

// The order of launches: those of one stream in launch order, tail launches after everything else.
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

__global__ void __launch_bounds__(64) narrow() {}

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
    narrow<<<1, 65>>>();
    out[5] = cudaGetLastError();
}

// A kernel that continues by launching itself as a tail.
extern "C" __global__ void again(int *count, int times)
{
    if (++*count < times) again<<<1, 1, 0, cudaStreamTailLaunch>>>(count, times);
}

// Nested kernels.
extern "C" __global__ void deeper(int *out, int depth, int most)
{
    out[depth] = 1;
    if (depth >= most) return;
    deeper<<<1, 1>>>(out, depth + 1, most);
    out[128 + depth] = cudaGetLastError();
}

// More tail launches than can be pending.
extern "C" __global__ void tails(int *out, int count)
{
    int first = -1;
    for (int i = 0; i < count; i++) {
        append<<<1, 1, 0, cudaStreamTailLaunch>>>(out + 8, i);
        int code = cudaGetLastError();
        if (code && first < 0) {
            first = i;
            out[1] = code;
        }
        out[8] = 0;
    }
    out[0] = first;
}

// Copies and fills are ordered with the launches.
extern "C" __global__ void transfers(char *p, int *codes)
{
    cudaStream_t stream;
    cudaEvent_t event;
    int n = 0;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    codes[n++] = cudaMemsetAsync(p, 0, 64, stream);
    append<<<1, 1, 0, stream>>>((int *)p, 7);
    codes[n++] = cudaMemcpyAsync(p + 16, p, 8, cudaMemcpyDeviceToDevice, stream);
    append<<<1, 1, 0, stream>>>((int *)p, 8);
    codes[n++] = cudaMemset2DAsync(p + 64, 16, 3, 8, 4, stream);
    codes[n++] = cudaMemcpy2DAsync(p + 128, 8, p + 64, 16, 8, 4, cudaMemcpyDefault, stream);
    codes[n++] = cudaMemcpyAsync(p, p + 32, 8, cudaMemcpyHostToDevice, stream);
    codes[n++] = cudaGetLastError();
    codes[n++] = cudaMemsetAsync((void *)64, 1, 16, stream);
    codes[n++] = cudaGetLastError();
    codes[n++] = cudaEventCreateWithFlags(&event, cudaEventDefault);
    codes[n++] = cudaGetLastError();
    int device = -1, count = 0, version = 0;
    codes[n++] = cudaGetDevice(&device) + device;
    codes[n++] = cudaGetDeviceCount(&count) + count;
    codes[n++] = cudaRuntimeGetVersion(&version) + version;
    void *memory = nullptr;
    codes[n++] = cudaMalloc(&memory, 64) + (memory != nullptr);
    codes[n++] = cudaFree(memory);
    codes[n++] = cudaMalloc(&memory, 1ull << 40);
    const char *text = cudaGetErrorString((cudaError_t)codes[n - 1]), *name = cudaGetErrorName(cudaErrorInvalidClusterSize);
    codes[n++] = text[0] == 'o' && text[12] == 'y' && !text[13];
    codes[n++] = name[9] == 'I' && cudaGetErrorString((cudaError_t)12345)[0] == 'u';
}
