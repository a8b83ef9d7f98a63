#!/usr/bin/env python3
"""What CuPy does with a GPU, one line a case, the same natively and remotely.

    cupy_ops.py [CASE...]
"""

import cupy as cp
import numpy as np

import cases


def digest(*arrays):
    return cases.digest(*map(cp.asnumpy, arrays))


@cases.case
def random():
    rng = cp.random.RandomState(7)
    return digest(rng.rand(1000), rng.randn(1000), rng.randint(0, 100, 1000), cp.random.default_rng(3).standard_normal(1000))


@cases.case
def elementwise():
    x = cp.linspace(-3, 3, 10001, dtype=cp.float64)
    return digest(cp.sin(x), cp.exp(x), cp.arctan2(x, 2 - x), cp.special.erf(x) if hasattr(cp, "special") else x, x.astype(cp.float16))


@cases.case
def reductions():
    x = cp.arange(1 << 20, dtype=cp.float64).reshape(1024, 1024)
    return digest(x.sum(0), x.max(1), x.cumsum(1), x.var(), cp.argmax(x % 977, axis=1), cp.median(x, axis=0))


@cases.case
def sorting():
    x = cp.random.RandomState(1).randint(0, 1 << 30, 100000)
    values, counts = cp.unique(x % 1000, return_counts=True)
    return digest(cp.sort(x), cp.argsort(x), values, counts, cp.searchsorted(values, x % 1000), cp.partition(x, 500)[:500].sum())


@cases.case
def blas():
    rng = cp.random.RandomState(2)
    return digest(*(a @ b for a, b in [(rng.rand(128, 64).astype(t), rng.rand(64, 96).astype(t)) for t in (np.float32, np.float64, np.complex64)]))


@cases.case
def solver():
    a = cp.random.RandomState(3).rand(100, 100) + 100 * cp.eye(100)
    q, r = cp.linalg.qr(a)
    return digest(cp.linalg.solve(a, cp.ones(100)), cp.linalg.svd(a)[1], cp.linalg.eigh(a + a.T)[0], cp.linalg.inv(a), cp.linalg.cholesky(a @ a.T), q @ r)


@cases.case
def fourier():
    x = cp.random.RandomState(4).rand(64, 1000)
    return digest(cp.fft.fft(x), cp.fft.rfft2(x), cp.fft.irfft(cp.fft.rfft(x)), cp.fft.fftn(x.reshape(4, 16, 1000)))


@cases.case
def sparse():
    from cupyx.scipy import sparse

    a = sparse.random(500, 500, density=0.02, format="csr", random_state=5, dtype=np.float64)
    b = a.T.tocsr()
    return digest((a @ b).toarray(), a @ cp.ones(500), (a + b).tocsc().toarray())


@cases.case
def raw_kernel():
    kernel = cp.RawKernel(
        r"""
extern "C" __global__ void smooth(const float *x, float *y, int n, float w) {
    __shared__ float tile[258];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x + 1;
    tile[t] = i < n ? x[i] : 0;
    if (threadIdx.x == 0) tile[0] = i > 0 ? x[i - 1] : 0;
    if (threadIdx.x == blockDim.x - 1) tile[t + 1] = i + 1 < n ? x[i + 1] : 0;
    __syncthreads();
    if (i < n) y[i] = w * tile[t] + (1 - w) * 0.5f * (tile[t - 1] + tile[t + 1]);
}""",
        "smooth",
    )
    x = cp.arange(10000, dtype=cp.float32) % 97
    y = cp.empty_like(x)
    kernel((40,), (256,), (x, y, np.int32(x.size), np.float32(0.25)))
    return f"{digest(y)} {kernel.num_regs > 0} {kernel.max_threads_per_block}"


@cases.case
def raw_module():
    module = cp.RawModule(
        code=r"""
__constant__ float factors[4];
template <typename T> __global__ void scale(T *x, int n) { int i = threadIdx.x; if (i < n) x[i] *= factors[i % 4]; }
""",
        name_expressions=["scale<float>", "scale<double>"],
        options=("-std=c++14",),
    )
    factors = cp.ndarray(4, cp.float32, module.get_global("factors"))
    factors[...] = cp.array([1, 2, 3, 4], cp.float32)
    out = []
    for name, kind in (("scale<float>", cp.float32), ("scale<double>", cp.float64)):
        x = cp.ones(64, kind)
        module.get_function(name)((1,), (64,), (x, np.int32(64)))
        out.append(x)
    return digest(*out)


@cases.case
def streams():
    a, b = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(priority=-1)
    start, end = cp.cuda.Event(), cp.cuda.Event()
    called = []
    with a:
        start.record()
        x = cp.arange(1 << 20, dtype=cp.float32) * 2
        end.record()
    b.wait_event(end)
    with b:
        y = x + 1
    b.launch_host_func(called.append, 5)
    b.synchronize()
    return f"{digest(y)} {called} {cp.cuda.get_elapsed_time(start, end) > 0}"


@cases.case
def capture():
    stream = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(1000, cp.float32)
    with stream:
        stream.begin_capture()
        cp.add(x, 3, out=x)
        cp.multiply(x, 2, out=x)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
    stream.synchronize()
    return digest(x)


@cases.case
def memory():
    pools = []
    for pool in (cp.cuda.MemoryPool(), cp.cuda.MemoryAsyncPool(), cp.cuda.MemoryPool(cp.cuda.malloc_managed)):
        with cp.cuda.using_allocator(pool.malloc):
            pools.append(digest(cp.arange(10000) * 3))
    pinned = cp.cuda.alloc_pinned_memory(4096)
    host = np.frombuffer(pinned, np.float32, 1000)
    cp.arange(1000, dtype=cp.float32).get(out=host)
    return f"{pools} {digest(host)}"


@cases.case
def textures():
    runtime, texture = cp.cuda.runtime, cp.cuda.texture
    channel = texture.ChannelFormatDescriptor(32, 0, 0, 0, runtime.cudaChannelFormatKindFloat)
    array = texture.CUDAarray(channel, 64, 32)
    array.copy_from(cp.arange(64 * 32, dtype=cp.float32).reshape(32, 64))
    descriptor = texture.TextureDescriptor((runtime.cudaAddressModeClamp,) * 2, runtime.cudaFilterModeLinear, runtime.cudaReadModeElementType)
    kernel = cp.RawKernel(
        r"""
extern "C" __global__ void look(float *y, cudaTextureObject_t t) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = tex2D<float>(t, (i % 80) * 0.8f - 2, (i / 80) * 1.25f - 1);
}""",
        "look",
    )
    y = cp.zeros(80 * 32, cp.float32)
    looked_at = texture.TextureObject(texture.ResourceDescriptor(runtime.cudaResourceTypeArray, cuArr=array), descriptor)
    kernel((10,), (256,), (y, looked_at))
    return digest(y)


@cases.case
def images():
    from cupyx.scipy import ndimage, signal

    x = cp.random.RandomState(6).rand(128, 128)
    return digest(ndimage.gaussian_filter(x, 2), ndimage.rotate(x, 30, order=1), ndimage.label(x > 0.6)[0], signal.convolve2d(x, x[:5, :5]))


@cases.case
def jit():
    from cupyx import jit

    @jit.rawkernel()
    def twice(x, y, n):
        i = jit.blockIdx.x * jit.blockDim.x + jit.threadIdx.x
        if i < n:
            y[i] = x[i] * 2

    x = cp.arange(1000, dtype=cp.float32)
    y = cp.empty_like(x)
    twice((8,), (128,), (x, y, np.uint32(1000)))
    return digest(y)


@cases.case
def device():
    d = cp.cuda.Device()
    p = cp.cuda.runtime.getDeviceProperties(0)
    return f"{d.compute_capability} {p['name']} {p['totalGlobalMem']} {p['multiProcessorCount']} {d.attributes['MaxBlockDimX']} {cp.cuda.runtime.runtimeGetVersion()}"


cases.run()
