// Prints the results of runtime API calls, without addresses, times or anything else that differs between runs.
// compare.sh runs it with NVIDIA's libcudart and with ours over the same driver, and compares the output.

#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

// Prints a line per call: the call, its error, and the thread's last error, which is cleared.
#define R(call) report(#call, call)
static cudaError_t report(const char *what, cudaError_t error)
{
    cudaError_t last = cudaGetLastError();
    printf("%s: %s, last %s\n", what, cudaGetErrorName(error), cudaGetErrorName(last));
    return error;
}
#define SECTION(name) printf("== %s\n", name)

__device__ int variable[4] = {1, 2, 3, 4};
__constant__ float constants[4];
__managed__ int managed = 7;

__global__ void add(int *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) p[i] += variable[i & 3] + managed; }
__global__ void nothing() {}
__global__ void __launch_bounds__(128) bounded(int *p) { extern __shared__ int s[]; s[threadIdx.x] = 1; if (p) p[0] = s[0]; }
__global__ void fetch(cudaTextureObject_t t, float *out) { out[threadIdx.x] = tex2D<float>(t, threadIdx.x + 0.5f, 0.5f); }
__global__ void store(cudaSurfaceObject_t s) { surf2Dwrite(float(threadIdx.x), s, threadIdx.x * 4, 0); }
__global__ void crash(int *p) { *p = 1; }
static void not_a_kernel() {}

static void dump(const char *what, const void *p, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (i % 16 == 0)
            printf("%s%s +%zu:", i ? "\n" : "", what, i);
        printf(" %02x", ((const unsigned char *)p)[i]);
    }
    printf("\n");
}

static void devices()
{
    SECTION("devices");
    int n = -1, d = -1;
    R(cudaGetDeviceCount(&n)); printf("%d\n", n);
    R(cudaGetDevice(&d)); printf("%d\n", d);
    R(cudaSetDevice(-1)); R(cudaSetDevice(n)); R(cudaSetDevice(0));
    R(cudaGetDeviceCount(nullptr)); R(cudaGetDevice(nullptr));
    cudaDeviceProp prop;
    memset(&prop, 0, sizeof prop);
    R(cudaGetDeviceProperties(&prop, 0));
    dump("properties", &prop, sizeof prop);
    R(cudaGetDeviceProperties(&prop, 99));
    for (int a = 0; a < 160; a++) {
        int v = -12345;
        cudaError_t e = cudaDeviceGetAttribute(&v, (cudaDeviceAttr)a, 0);
        printf("attribute %d: %s %d\n", a, cudaGetErrorName(e), e ? 0 : v);
    }
    (void)cudaGetLastError();
    char bus[32] = "";
    R(cudaDeviceGetPCIBusId(bus, sizeof bus, 0)); printf("%s\n", bus);
    R(cudaDeviceGetPCIBusId(bus, 3, 0));
    R(cudaDeviceGetByPCIBusId(&d, bus)); R(cudaDeviceGetByPCIBusId(&d, "nonsense"));
    int can = -1; R(cudaDeviceCanAccessPeer(&can, 0, 0)); printf("%d\n", can);
    R(cudaDeviceCanAccessPeer(&can, 0, 99)); R(cudaDeviceEnablePeerAccess(0, 0)); R(cudaDeviceDisablePeerAccess(0));
    unsigned flags = 0; R(cudaGetDeviceFlags(&flags)); printf("%#x\n", flags);
    R(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync)); R(cudaGetDeviceFlags(&flags)); printf("%#x\n", flags);
    R(cudaSetDeviceFlags(0x10000)); R(cudaSetDeviceFlags(cudaDeviceScheduleAuto));
    int least = 0, greatest = 0; R(cudaDeviceGetStreamPriorityRange(&least, &greatest)); printf("%d %d\n", least, greatest);
    for (int l = 0; l < 9; l++) { size_t v = 0; cudaError_t e = cudaDeviceGetLimit(&v, (cudaLimit)l); printf("limit %d: %s %zu\n", l, cudaGetErrorName(e), v); }
    (void)cudaGetLastError();
    R(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 1 << 20)); R(cudaDeviceSetLimit((cudaLimit)77, 1));
    cudaFuncCache cache = {}; R(cudaDeviceGetCacheConfig(&cache)); printf("%d\n", cache);
    cudaDeviceProp wanted = {}; wanted.major = 3; R(cudaChooseDevice(&d, &wanted)); printf("%d\n", d);
    int version = 0; R(cudaRuntimeGetVersion(&version)); printf("%d\n", version); R(cudaRuntimeGetVersion(nullptr));
    R(cudaDriverGetVersion(&version)); printf("%d\n", version);
    cudaMemPool_t pool; R(cudaDeviceGetDefaultMemPool(&pool, 0)); R(cudaDeviceGetDefaultMemPool(&pool, 99));
    size_t width = 0; cudaChannelFormatDesc f = cudaCreateChannelDesc<float>();
    R(cudaDeviceGetTexture1DLinearMaxWidth(&width, &f, 0)); printf("%zu\n", width);
    for (int a = 0; a < 6; a++) { int v = -1; printf("p2p %d: %s\n", a, cudaGetErrorName(cudaDeviceGetP2PAttribute(&v, (cudaDeviceP2PAttr)a, 0, 0))); }
    (void)cudaGetLastError();
}

static void pointer(const char *what, const void *p)
{
    cudaPointerAttributes a;
    memset(&a, 0x55, sizeof a);
    cudaError_t e = cudaPointerGetAttributes(&a, p);
    printf("%s: %s type %d device %d, device address %s, host address %s\n", what, cudaGetErrorName(e), a.type, a.device,
           a.devicePointer == p ? "same" : a.devicePointer ? "other" : "none", a.hostPointer == p ? "same" : a.hostPointer ? "other" : "none");
    (void)cudaGetLastError();
}

static void memory()
{
    SECTION("memory");
    int *p = nullptr, *q = nullptr, host[64] = {1, 2, 3}, back[64] = {};
    R(cudaFree(nullptr)); R(cudaMalloc(&p, 0)); printf("%s\n", p ? "some" : "null");
    R(cudaMalloc((void **)nullptr, 4)); R(cudaMalloc(&p, 1ull << 60)); R(cudaMalloc(&p, 4096)); R(cudaMalloc(&q, 4096));
    R(cudaMemcpy(p, host, sizeof host, cudaMemcpyHostToDevice));
    R(cudaMemcpy(back, p, sizeof host, cudaMemcpyDeviceToHost));
    printf("%d\n", memcmp(host, back, sizeof host));
    R(cudaMemcpy(p, host, 4, (cudaMemcpyKind)9)); R(cudaMemcpy(back, host, sizeof host, cudaMemcpyHostToHost));
    R(cudaMemcpy(p, host, 0, cudaMemcpyHostToDevice));
    R(cudaMemcpy(nullptr, host, 4, cudaMemcpyHostToDevice));
    R(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDefault));
    R(cudaMemcpy(host, back, 4, cudaMemcpyDeviceToHost));
    R(cudaMemcpy(host, back, 4, cudaMemcpyHostToDevice));
    R(cudaMemcpy(q, p, 4096, cudaMemcpyDeviceToDevice));
    R(cudaMemcpy(back, q, sizeof host, cudaMemcpyDefault)); R(cudaMemcpy(p, host, 1 << 20, cudaMemcpyHostToDevice));
    R(cudaMemset(p, 0x1ff, 4096)); R(cudaMemcpy(back, p, 4, cudaMemcpyDeviceToHost)); printf("%#x\n", back[0]);
    R(cudaMemset(nullptr, 0, 4)); R(cudaMemset(p, 0, 0));
    R(cudaFree(host)); R(cudaFree(p)); R(cudaFree(p)); R(cudaFree(q));
    char *pitched; size_t pitch = 0;
    R(cudaMallocPitch(&pitched, &pitch, 100, 10));
    printf("pitch %zu\n", pitch);
    R(cudaMemset2D(pitched, pitch, 3, 100, 10));
    R(cudaMemset2D(pitched, 10, 3, 100, 10));
    char rows[10][100] = {};
    R(cudaMemcpy2D(rows, 100, pitched, pitch, 100, 10, cudaMemcpyDeviceToHost));
    printf("%d %d\n", rows[0][0], rows[9][99]);
    R(cudaMemcpy2D(rows, 50, pitched, pitch, 100, 10, cudaMemcpyDeviceToHost));
    R(cudaMemcpy2D(rows, 100, pitched, pitch, 0, 10, cudaMemcpyDeviceToHost));
    R(cudaFree(pitched));
    R(cudaMallocPitch(&pitched, &pitch, 0, 10));
    printf("%s %zu\n", pitched ? "some" : "null", pitch);
    cudaPitchedPtr box;
    R(cudaMalloc3D(&box, make_cudaExtent(64, 4, 3)));
    printf("%zu %zu %zu\n", box.pitch, box.xsize, box.ysize);
    R(cudaMemset3D(box, 9, make_cudaExtent(64, 4, 3))); R(cudaMemset3D(box, 5, make_cudaExtent(8, 2, 2)));
    unsigned char cube[3][4][64] = {};
    cudaMemcpy3DParms c = {};
    c.srcPtr = box;
    c.dstPtr = make_cudaPitchedPtr(cube, 64, 64, 4);
    c.extent = make_cudaExtent(64, 4, 3);
    c.kind = cudaMemcpyDeviceToHost;
    R(cudaMemcpy3D(&c));
    dump("cube", cube, sizeof cube);
    c.kind = (cudaMemcpyKind)7;
    R(cudaMemcpy3D(&c));
    R(cudaMemcpy3D(nullptr));
    R(cudaFree(box.ptr));
    void *pinned, *mapped, *use; unsigned flags = 0;
    R(cudaMallocHost(&pinned, 4096));
    R(cudaHostAlloc(&mapped, 4096, cudaHostAllocMapped | cudaHostAllocWriteCombined));
    R(cudaHostAlloc(&use, 16, 0x100));
    R(cudaMallocHost(&use, 0));
    printf("%s\n", use ? "some" : "null");
    R(cudaHostGetFlags(&flags, pinned));
    printf("%#x\n", flags);
    R(cudaHostGetFlags(&flags, mapped));
    printf("%#x\n", flags);
    R(cudaHostGetFlags(&flags, host));
    R(cudaHostGetDevicePointer(&use, mapped, 0)); R(cudaHostGetDevicePointer(&use, host, 0));
    void *page = aligned_alloc(4096, 8192);
    R(cudaHostRegister(page, 8192, cudaHostRegisterDefault));
    R(cudaHostRegister(page, 8192, cudaHostRegisterDefault));
    pointer("registered", page);
    R(cudaHostUnregister(page));
    R(cudaHostUnregister(page));
    int *m;
    R(cudaMallocManaged(&m, 4096));
    R(cudaMallocManaged(&m, 0));
    R(cudaMallocManaged(&m, 16, 99));
    R(cudaMallocManaged(&m, 4096));
    R(cudaMalloc(&p, 64));
    pointer("device", p);
    pointer("inside", p + 1);
    pointer("pinned", pinned);
    pointer("mapped", mapped);
    pointer("managed", m);
    pointer("stack", host);
    pointer("null", nullptr);
    R(cudaPointerGetAttributes(nullptr, p));
    R(cudaFreeHost(nullptr));
    R(cudaFreeHost(pinned));
    R(cudaFreeHost(mapped));
    R(cudaFreeHost(page));
    R(cudaFree(m));
    R(cudaFree(p));
    free(page);
    size_t free_ = 0, total = 0; R(cudaMemGetInfo(&free_, &total)); printf("%zu\n", total); R(cudaMemGetInfo(nullptr, nullptr));
    R(cudaMallocAsync(&p, 4096, nullptr));
    R(cudaMallocAsync(&q, 0, nullptr));
    R(cudaFreeAsync(p, nullptr));
    R(cudaFreeAsync(nullptr, nullptr));
    R(cudaStreamSynchronize(nullptr));
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool; R(cudaMemPoolCreate(&pool, &props)); unsigned long long threshold = 1 << 20;
    R(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    threshold = 0;
    R(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    printf("%llu\n", threshold);
    R(cudaMallocFromPoolAsync(&p, 4096, pool, nullptr));
    R(cudaFree(p));
    R(cudaMemPoolTrimTo(pool, 0));
    R(cudaMemPoolDestroy(pool));
}

static void arrays()
{
    SECTION("arrays");
    cudaArray_t a, b; float in[8][16], out[8][16] = {}; for (int i = 0; i < 128; i++) in[0][i] = i;
    cudaChannelFormatDesc f = cudaCreateChannelDesc<float>(), odd = {32, 16, 0, 0, cudaChannelFormatKindFloat}, three = {32, 32, 32, 0, cudaChannelFormatKindFloat};
    R(cudaMallocArray(&a, &odd, 16, 8));
    R(cudaMallocArray(&a, &three, 16, 8));
    R(cudaMallocArray(&a, nullptr, 16, 8));
    R(cudaMallocArray(&a, &f, 0, 0));
    R(cudaMallocArray(&a, &f, 16, 8, cudaArraySurfaceLoadStore)); R(cudaMallocArray(&b, &f, 16, 8));
    cudaExtent e = {};
    unsigned flags = 0;
    cudaChannelFormatDesc d = {};
    R(cudaArrayGetInfo(&d, &e, &flags, a));
    printf("%d %d %d %d %d, %zu %zu %zu, %u\n", d.x, d.y, d.z, d.w, d.f, e.width, e.height, e.depth, flags);
    R(cudaMemcpy2DToArray(a, 0, 0, in, 64, 64, 8, cudaMemcpyHostToDevice));
    R(cudaMemcpy2DFromArray(out, 64, a, 0, 0, 64, 8, cudaMemcpyDeviceToHost));
    printf("%d\n", memcmp(in, out, sizeof in));
    R(cudaMemcpy2DToArray(a, 4, 1, in, 8, 16, 2, cudaMemcpyHostToDevice));
    R(cudaMemcpy2DToArray(a, 60, 0, in, 64, 64, 8, cudaMemcpyHostToDevice));
    R(cudaMemcpy2DArrayToArray(b, 8, 2, a, 0, 0, 16, 3));
    R(cudaMemcpy2DFromArray(out, 64, b, 8, 2, 16, 3, cudaMemcpyDeviceToHost));
    printf("%g\n", out[2][3]);
    cudaMemcpy3DParms c = {};
    c.srcArray = a;
    c.srcPos = make_cudaPos(2, 1, 0);
    c.dstPtr = make_cudaPitchedPtr(out, 64, 64, 8);
    c.dstPos = make_cudaPos(4, 0, 0);
    c.extent = make_cudaExtent(3, 2, 1);
    c.kind = cudaMemcpyDeviceToHost;
    R(cudaMemcpy3D(&c)); printf("%g %g\n", out[0][1], out[1][3]);
    cudaResourceDesc r = {};
    r.resType = cudaResourceTypeArray;
    r.res.array.array = a;
    cudaTextureDesc t = {};
    t.readMode = cudaReadModeElementType;
    t.addressMode[0] = cudaAddressModeClamp;
    t.filterMode = cudaFilterModeLinear;
    cudaTextureObject_t texture; cudaSurfaceObject_t surface; float *p; R(cudaMalloc(&p, 64));
    R(cudaCreateSurfaceObject(&surface, &r));
    store<<<1, 16>>>(surface);
    R(cudaGetLastError());
    R(cudaCreateTextureObject(&texture, &r, &t, nullptr));
    fetch<<<1, 16>>>(texture, p);
    R(cudaMemcpy(out, p, 64, cudaMemcpyDeviceToHost));
    printf("%g %g\n", out[0][0], out[0][15]);
    cudaResourceDesc r2;
    cudaTextureDesc t2;
    memset(&t2, 0x55, sizeof t2);
    R(cudaGetTextureObjectResourceDesc(&r2, texture));
    printf("%d %d\n", r2.resType, r2.res.array.array == a);
    R(cudaGetTextureObjectTextureDesc(&t2, texture));
    printf("%d %d %d %d %d %u %d\n", t2.addressMode[0], t2.filterMode, t2.readMode, t2.sRGB, t2.normalizedCoords, t2.maxAnisotropy, t2.seamlessCubemap);
    cudaResourceDesc l = {};
    l.resType = cudaResourceTypePitch2D;
    l.res.pitch2D.devPtr = p;
    l.res.pitch2D.desc = f;
    l.res.pitch2D.width = 16;
    l.res.pitch2D.height = 1;
    l.res.pitch2D.pitchInBytes = 64;
    cudaTextureObject_t linear;
    R(cudaCreateTextureObject(&linear, &l, &t, nullptr));
    R(cudaGetTextureObjectResourceDesc(&r2, linear));
    printf("%d %zu %zu %zu %d\n", r2.resType, r2.res.pitch2D.width, r2.res.pitch2D.height, r2.res.pitch2D.pitchInBytes, r2.res.pitch2D.desc.x);
    R(cudaDestroyTextureObject(linear));
    R(cudaDestroyTextureObject(texture));
    R(cudaDestroySurfaceObject(surface));
    R(cudaCreateTextureObject(&texture, nullptr, &t, nullptr));
    R(cudaDestroyTextureObject(0));
    cudaMipmappedArray_t mip;
    cudaArray_t level;
    R(cudaMallocMipmappedArray(&mip, &f, make_cudaExtent(16, 16, 0), 3));
    R(cudaGetMipmappedArrayLevel(&level, mip, 2));
    R(cudaArrayGetInfo(&d, &e, &flags, level));
    printf("%zu %zu\n", e.width, e.height);
    R(cudaGetMipmappedArrayLevel(&level, mip, 9));
    R(cudaFreeMipmappedArray(mip)); R(cudaFreeArray(a)); R(cudaFreeArray(b)); R(cudaFreeArray(nullptr)); R(cudaFree(p));
}

static void symbols()
{
    SECTION("symbols");
    int v[4] = {}, other = 0; void *p; size_t n = 0; float f[4] = {1, 2, 3, 4};
    R(cudaMemcpyFromSymbol(v, variable, sizeof v));
    printf("%d %d\n", v[0], v[3]);
    v[0] = 10;
    R(cudaMemcpyToSymbol(variable, v, 4));
    R(cudaMemcpyToSymbol(variable, v, 4, 16));
    R(cudaMemcpyToSymbol(variable, v, 8, 12));
    R(cudaMemcpyToSymbol(variable, v, 4, 0, cudaMemcpyDeviceToHost));
    R(cudaMemcpyToSymbol(other, v, 4));
    R(cudaMemcpyToSymbol(constants, f, 16));
    R(cudaGetSymbolSize(&n, constants));
    printf("%zu\n", n);
    R(cudaGetSymbolAddress(&p, variable));
    R(cudaMemcpy(v, p, 4, cudaMemcpyDeviceToHost));
    printf("%d\n", v[0]);
    R(cudaGetSymbolAddress(&p, other));
    R(cudaGetSymbolAddress(&p, managed));
    printf("%d\n", p == (void *)&managed);
    R(cudaGetSymbolSize(&n, managed));
    printf("%zu\n", n);
    managed = 8; cudaDeviceSynchronize();
}

static void launches()
{
    SECTION("launches");
    int *p, back = 0, n = 1; R(cudaMalloc(&p, 4096)); R(cudaMemset(p, 0, 4096));
    add<<<1, 64>>>(p, 64);
    R(cudaGetLastError());
    R(cudaMemcpy(&back, p, 4, cudaMemcpyDeviceToHost));
    printf("%d\n", back);
    add<<<1, 2048>>>(p, 64);
    R(cudaGetLastError());
    add<<<0, 1>>>(p, 64);
    R(cudaGetLastError());
    add<<<1, 0>>>(p, 64);
    R(cudaGetLastError());
    add<<<1, dim3(1, 1, 65)>>>(p, 64);
    R(cudaGetLastError());
    add<<<dim3(1, 65536), 1>>>(p, 64);
    R(cudaGetLastError());
    add<<<1, 1, 1 << 20>>>(p, 64);
    R(cudaGetLastError());
    bounded<<<1, 256, 1024>>>(p);
    R(cudaGetLastError());
    bounded<<<1, 64, 49 << 10>>>(p);
    R(cudaGetLastError());
    R(cudaFuncSetAttribute(bounded, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    bounded<<<1, 64, 60 << 10>>>(p);
    R(cudaGetLastError());
    R(cudaFuncSetAttribute(bounded, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 30));
    R(cudaFuncSetAttribute(bounded, (cudaFuncAttribute)3, 1));
    void *args[] = {&p, &n}; dim3 one(1);
    R(cudaLaunchKernel((void *)add, one, one, args, 0, nullptr));
    R(cudaLaunchKernel((void *)not_a_kernel, one, one, args, 0, nullptr));
    R(cudaLaunchKernel((void *)nullptr, one, one, args, 0, nullptr));
    R(cudaLaunchKernel((void *)nothing, one, one, nullptr, 0, nullptr));
    R(cudaLaunchCooperativeKernel((void *)add, one, one, args, 0, nullptr));
    R(cudaLaunchCooperativeKernel((void *)add, dim3(1 << 20), dim3(1024), args, 0, nullptr));
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(2);
    c.blockDim = dim3(32);
    cudaLaunchAttribute at[2] = {};
    at[0].id = cudaLaunchAttributeClusterDimension;
    at[0].val.clusterDim.x = 2;
    at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
    at[1].id = cudaLaunchAttributePriority;
    c.attrs = at;
    c.numAttrs = 2;
    R(cudaLaunchKernelExC(&c, (void *)add, args));
    at[0].val.clusterDim.x = 3;
    R(cudaLaunchKernelExC(&c, (void *)add, args));
    at[0].val.clusterDim.x = 2;
    int clusters = 0;
    R(cudaOccupancyMaxActiveClusters(&clusters, add, &c));
    printf("%d\n", clusters);
    R(cudaOccupancyMaxPotentialClusterSize(&clusters, add, &c));
    printf("%d\n", clusters);
    cudaFuncAttributes a; memset(&a, 0x55, sizeof a);
    for (auto k : {(const void *)add, (const void *)nothing, (const void *)bounded}) {
        R(cudaFuncGetAttributes(&a, k));
        dump("attributes", &a, sizeof a);
    }
    R(cudaFuncGetAttributes(&a, (const void *)not_a_kernel));
    R(cudaFuncGetAttributes(nullptr, (const void *)add));
    R(cudaFuncSetCacheConfig(add, cudaFuncCachePreferShared));
    R(cudaFuncSetCacheConfig(add, (cudaFuncCache)9));
    int blocks = 0;
    R(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 256, 0));
    printf("%d\n", blocks);
    R(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 0, 0));
    R(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 2048, 0));
    printf("%d\n", blocks);
    size_t smem = 0;
    R(cudaOccupancyAvailableDynamicSMemPerBlock(&smem, add, 2, 256));
    printf("%zu\n", smem);
    int grid = 0;
    R(cudaOccupancyMaxPotentialBlockSize(&grid, &blocks, add));
    printf("%d %d\n", grid, blocks);
    const char *name;
    size_t offset, size;
    R(cudaFuncGetName(&name, (const void *)add));
    printf("%s\n", name);
    R(cudaFuncGetParamInfo((const void *)add, 1, &offset, &size));
    printf("%zu %zu\n", offset, size);
    R(cudaFuncGetParamInfo((const void *)add, 2, &offset, &size));
    cudaKernel_t k;
    R(cudaGetKernel(&k, add));
    R(cudaLaunchKernel((void *)k, one, one, args, 0, nullptr));
    cudaFunction_t fn;
    R(cudaGetFuncBySymbol(&fn, (void *)add));
    R(cudaGetFuncBySymbol(&fn, (void *)not_a_kernel));
    R(cudaDeviceSynchronize()); R(cudaFree(p));
}

static void streams()
{
    SECTION("streams");
    cudaStream_t s, t;
    cudaEvent_t a, b;
    float ms;
    unsigned flags = 0;
    int priority = 0, ran = 0;
    cudaStreamCaptureStatus status = {};
    R(cudaStreamCreate(&s));
    R(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    R(cudaStreamCreateWithFlags(&t, 99));
    R(cudaStreamCreateWithPriority(&t, cudaStreamNonBlocking, -1));
    R(cudaStreamGetFlags(t, &flags));
    printf("%u\n", flags);
    R(cudaStreamGetPriority(t, &priority));
    printf("%d\n", priority);
    R(cudaStreamGetFlags(nullptr, &flags));
    printf("%u\n", flags);
    R(cudaStreamGetPriority(cudaStreamPerThread, &priority));
    printf("%d\n", priority);
    R(cudaEventCreate(&a));
    R(cudaEventCreateWithFlags(&b, cudaEventDisableTiming));
    R(cudaEventCreateWithFlags(&b, 0x100));
    R(cudaEventQuery(a));
    R(cudaEventElapsedTime(&ms, a, a));
    R(cudaEventRecord(a, s));
    R(cudaEventRecord(b, s));
    R(cudaEventSynchronize(a));
    R(cudaEventElapsedTime(&ms, a, b));
    R(cudaStreamWaitEvent(t, a, 0));
    R(cudaStreamWaitEvent(t, a, 99));
    R(cudaLaunchHostFunc(s, [](void *p) { *(int *)p = 1; }, &ran));
    R(cudaStreamSynchronize(s));
    printf("%d\n", ran);
    R(cudaStreamAddCallback(s, [](cudaStream_t, cudaError_t e, void *p) { *(int *)p = 2 + e; }, &ran, 0));
    R(cudaStreamSynchronize(s));
    printf("%d\n", ran);
    R(cudaStreamQuery(s));
    R(cudaLaunchHostFunc(s, nullptr, nullptr));
    cudaLaunchAttributeValue v = {};
    R(cudaStreamGetAttribute(s, cudaLaunchAttributeSynchronizationPolicy, &v));
    printf("%d\n", v.syncPolicy);
    v.syncPolicy = cudaSyncPolicyYield;
    R(cudaStreamSetAttribute(s, cudaLaunchAttributeSynchronizationPolicy, &v));
    R(cudaStreamCopyAttributes(t, s));
    R(cudaStreamIsCapturing(s, &status));
    printf("%d\n", status);
    R(cudaStreamIsCapturing(nullptr, &status));
    cudaGraph_t g;
    R(cudaStreamEndCapture(s, &g));
    R(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal));
    R(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    R(cudaStreamIsCapturing(s, &status));
    printf("%d\n", status);
    int *p;
    R(cudaMalloc(&p, 64));
    R(cudaStreamSynchronize(s));
    R(cudaStreamEndCapture(s, &g));
    R(cudaMalloc(&p, 4096));
    R(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    add<<<1, 32, 0, s>>>(p, 32);
    R(cudaMemsetAsync(p, 0, 64, s));
    R(cudaMemcpyAsync(p + 32, p, 64, cudaMemcpyDeviceToDevice, s));
    R(cudaStreamEndCapture(s, &g));
    size_t nodes = 0;
    R(cudaGraphGetNodes(g, nullptr, &nodes));
    printf("%zu nodes\n", nodes);
    std::vector<cudaGraphNode_t> list(nodes);
    R(cudaGraphGetNodes(g, list.data(), &nodes));
    for (auto node : list) {
        cudaGraphNodeType type;
        R(cudaGraphNodeGetType(node, &type));
        printf("%d\n", type);
        if (type == cudaGraphNodeTypeKernel) {
            cudaKernelNodeParams kp;
            R(cudaGraphKernelNodeGetParams(node, &kp));
            printf("%d %u\n", kp.func == (void *)add, kp.blockDim.x);
        }
        if (type == cudaGraphNodeTypeMemcpy) {
            cudaMemcpy3DParms mp;
            R(cudaGraphMemcpyNodeGetParams(node, &mp));
            printf("%zu %zu %zu kind %d, from p %d to p+32 %d\n", mp.extent.width, mp.extent.height,
                   mp.extent.depth, mp.kind, mp.srcPtr.ptr == p, mp.dstPtr.ptr == p + 32);
        }
    }
    cudaGraphExec_t x;
    R(cudaGraphInstantiate(&x, g, 0));
    R(cudaGraphLaunch(x, s));
    R(cudaStreamSynchronize(s));
    R(cudaGraphExecDestroy(x));
    R(cudaGraphDestroy(g));
    R(cudaFree(p));
    R(cudaEventDestroy(a));
    R(cudaEventDestroy(b));
    R(cudaEventDestroy(nullptr));
    R(cudaEventRecord(nullptr, s));
    R(cudaStreamDestroy(s));
    R(cudaStreamDestroy(t));
    R(cudaStreamDestroy(nullptr));
}

static void graphs()
{
    SECTION("graphs");
    cudaGraph_t g;
    cudaGraphNode_t set, copy, kernel, host, symbol, empty;
    int *p, out[64] = {}, n = 64, ran = 0;
    R(cudaMalloc(&p, 256));
    R(cudaGraphCreate(&g, 0));
    R(cudaGraphCreate(&g, 7));
    R(cudaGraphCreate(&g, 0));
    cudaMemsetParams ms = {};
    ms.dst = p;
    ms.elementSize = 4;
    ms.width = 64;
    ms.height = 1;
    ms.value = 5;
    R(cudaGraphAddMemsetNode(&set, g, nullptr, 0, &ms));
    void *args[] = {&p, &n};
    cudaKernelNodeParams k = {};
    k.func = (void *)add;
    k.gridDim = dim3(1);
    k.blockDim = dim3(64);
    k.kernelParams = args;
    R(cudaGraphAddKernelNode(&kernel, g, &set, 1, &k));
    k.func = (void *)not_a_kernel;
    cudaGraphNode_t bad;
    R(cudaGraphAddKernelNode(&bad, g, &set, 1, &k));
    k.func = (void *)add;
    R(cudaGraphAddMemcpyNode1D(&copy, g, &kernel, 1, out, p, 256, cudaMemcpyDeviceToHost));
    R(cudaGraphAddMemcpyNodeFromSymbol(&symbol, g, &kernel, 1, out, variable, 16, 0, cudaMemcpyDeviceToHost));
    R(cudaGraphDestroyNode(symbol));
    cudaHostNodeParams h = {[](void *q) { ++*(int *)q; }, &ran};
    R(cudaGraphAddHostNode(&host, g, &copy, 1, &h));
    R(cudaGraphAddEmptyNode(&empty, g, &host, 1));
    cudaGraphExec_t x;
    R(cudaGraphInstantiateWithFlags(&x, g, 0));
    R(cudaGraphLaunch(x, nullptr));
    R(cudaDeviceSynchronize());
    printf("%d %d %d\n", out[0], out[63], ran);
    ms.value = 6;
    R(cudaGraphExecMemsetNodeSetParams(x, set, &ms));
    k.blockDim = dim3(32);
    R(cudaGraphExecKernelNodeSetParams(x, kernel, &k));
    R(cudaGraphExecMemcpyNodeSetParams1D(x, copy, out, p, 128, cudaMemcpyDeviceToHost));
    R(cudaGraphLaunch(x, nullptr));
    R(cudaDeviceSynchronize());
    printf("%d %d %d\n", out[0], out[63], ran);
    cudaKernelNodeParams kp;
    R(cudaGraphKernelNodeGetParams(kernel, &kp));
    printf("%d %u %d\n", kp.func == (void *)add, kp.blockDim.x, *(int *)kp.kernelParams[1]);
    cudaMemcpy3DParms mp;
    R(cudaGraphMemcpyNodeGetParams(copy, &mp));
    printf("%zu %zu %zu %d %d\n", mp.extent.width, mp.extent.height, mp.extent.depth, mp.kind, mp.dstPtr.ptr == out);
    cudaMemsetParams msp;
    R(cudaGraphMemsetNodeGetParams(set, &msp));
    printf("%u %u %zu\n", msp.value, msp.elementSize, msp.width);
    cudaGraphNodeParams np = {};
    np.type = cudaGraphNodeTypeKernel;
    np.kernel.func = (void *)add;
    np.kernel.gridDim = dim3(1);
    np.kernel.blockDim = dim3(8);
    np.kernel.kernelParams = args;
    R(cudaGraphNodeSetParams(kernel, &np));
    R(cudaGraphExecNodeSetParams(x, kernel, &np));
    cudaGraph_t clone;
    R(cudaGraphClone(&clone, g));
    cudaGraphExecUpdateResultInfo info;
    R(cudaGraphExecUpdate(x, clone, &info));
    printf("%d\n", info.result);
    R(cudaGraphDestroy(clone));
    R(cudaGraphLaunch(x, nullptr));
    R(cudaDeviceSynchronize());
    R(cudaGraphExecDestroy(x));
    cudaGraphNode_t alloc;
    cudaMemAllocNodeParams ap = {};
    ap.poolProps.allocType = cudaMemAllocationTypePinned;
    ap.poolProps.location.type = cudaMemLocationTypeDevice;
    ap.bytesize = 4096;
    R(cudaGraphAddMemAllocNode(&alloc, g, nullptr, 0, &ap));
    printf("%d\n", ap.dptr != nullptr);
    cudaGraphNode_t release;
    R(cudaGraphAddMemFreeNode(&release, g, &alloc, 1, ap.dptr));
    R(cudaGraphInstantiateWithFlags(&x, g, 0));
    R(cudaGraphLaunch(x, nullptr));
    R(cudaDeviceSynchronize());
    R(cudaGraphExecDestroy(x));
    R(cudaGraphDestroy(g));
    R(cudaDeviceGraphMemTrim(0));
    R(cudaFree(p));
}

static const char *PTX = R"(
.version 7.0
.target sm_70
.address_size 64
.global .u32 word = 5;
.visible .entry twice(.param .u64 q)
{
    .reg .u64 %a;
    .reg .u32 %v;
    ld.param.u64 %a, [q];
    cvta.to.global.u64 %a, %a;
    ld.global.u32 %v, [%a];
    add.u32 %v, %v, %v;
    st.global.u32 [%a], %v;
    ret;
}
)";

static void libraries()
{
    SECTION("libraries and the driver");
    cudaLibrary_t l;
    cudaKernel_t k;
    unsigned count = 0;
    int *p, v = 21;
    R(cudaMalloc(&p, 4));
    R(cudaMemcpy(p, &v, 4, cudaMemcpyHostToDevice));
    R(cudaLibraryLoadData(&l, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    R(cudaLibraryGetKernel(&k, l, "twice"));
    R(cudaLibraryGetKernel(&k, l, "thrice"));
    R(cudaLibraryGetKernel(&k, l, "twice"));
    R(cudaLibraryGetKernelCount(&count, l));
    printf("%u\n", count);
    void *args[] = {&p};
    R(cudaLaunchKernel((void *)k, dim3(1), dim3(1), args, 0, nullptr));
    R(cudaMemcpy(&v, p, 4, cudaMemcpyDeviceToHost));
    printf("%d\n", v);
    void *d;
    size_t n = 0;
    R(cudaLibraryGetGlobal(&d, &n, l, "word"));
    printf("%zu\n", n);
    R(cudaLibraryGetGlobal(&d, &n, l, "nothing"));
    R(cudaLibraryUnload(l));
    R(cudaLibraryLoadData(&l, "nonsense", nullptr, nullptr, 0, nullptr, nullptr, 0));
    typedef CUresult (*Current)(CUcontext *);
    typedef CUresult (*Set)(CUcontext);
    Current current;
    Set set;
    cudaDriverEntryPointQueryResult q;
    void *f = nullptr;
    R(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", (void **)&current, 12000, cudaEnableDefault, &q));
    printf("%d\n", q);
    R(cudaGetDriverEntryPointByVersion("cuCtxSetCurrent", (void **)&set, 12000, cudaEnableDefault, &q));
    R(cudaGetDriverEntryPointByVersion("cuNothing", &f, 12000, cudaEnableDefault, &q));
    printf("%d %d\n", q, f == nullptr);
    R(cudaGetDriverEntryPointByVersion("cuNothing", &f, 12000, cudaEnableDefault, nullptr));
    R(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &f, 12000, 77, &q));
    CUcontext c = nullptr;
    current(&c);
    printf("%d\n", c != nullptr);
    set(nullptr);
    int device = -1;
    R(cudaGetDevice(&device));
    printf("%d\n", device);
    R(cudaMemset(p, 0, 4));
    current(&c);
    printf("%d\n", c != nullptr);
    R(cudaFree(p));
    std::thread([] { int other = -1; R(cudaGetDevice(&other)); printf("%d\n", other); R(cudaPeekAtLastError()); R(cudaFree(nullptr)); R(cudaSetDevice(55)); }).join();
    R(cudaPeekAtLastError());
    fflush(stdout);
    if (fork() == 0) { int m; R(cudaGetDeviceCount(&m)); R(cudaFree(nullptr)); fflush(stdout); _exit(0); } wait(nullptr);
}

static void errors()
{
    SECTION("errors");
    for (int i = -1; i < 1000; i++) printf("%d %s %s\n", i, cudaGetErrorName((cudaError_t)i), cudaGetErrorString((cudaError_t)i));
    crash<<<1, 1>>>((int *)16);
    R(cudaDeviceSynchronize());
    int *p;
    R(cudaMalloc(&p, 4));
    R(cudaGetLastError());
    R(cudaPeekAtLastError());
    R(cudaStreamSynchronize(nullptr));
    std::thread([] { R(cudaPeekAtLastError()); R(cudaFree(nullptr)); R(cudaDeviceSynchronize()); }).join();
    R(cudaDeviceReset());
    R(cudaGetLastError());
    R(cudaMalloc(&p, 4));
    R(cudaDeviceSynchronize());
    R(cudaFree(p));
    nothing<<<1, 1>>>();
    R(cudaGetLastError());
    R(cudaDeviceSynchronize());
}

int main()
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        fprintf(stderr, "there is no GPU to compare on\n");
        return 77;
    }
    devices(); memory(); arrays(); symbols(); launches(); streams(); graphs(); libraries(); errors();
    return 0;
}
