#!/usr/bin/env python3
"""Numba's CUDA target: what it compiles, launches, copies and shares. One line a case, the same natively and remotely.

    numba_ops.py [CASE...]
"""

import math
import sys

import numpy as np

import cases
from cases import digest

# Numba is often older than the NumPy beside it.
for old, new in (("row_stack", "vstack"), ("in1d", "isin"), ("trapz", "trapezoid")):
    if not hasattr(np, old):
        setattr(np, old, getattr(np, new))

from numba import cuda, float32, guvectorize, vectorize
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32


@cuda.jit
def axpy(a, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = a * x[i] + y[i]


@cases.case
def launch():
    x = np.arange(100000, dtype=np.float32)
    y = np.ones_like(x)
    axpy[(x.size + 255) // 256, 256](2.5, x, y)
    assert (y == 2.5 * x + 1).all()
    return digest(y)


TPB = 16


@cuda.jit
def matmul(A, B, C):
    sA = cuda.shared.array((TPB, TPB), float32)
    sB = cuda.shared.array((TPB, TPB), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    acc = float32(0)
    for i in range(A.shape[1] // TPB):
        sA[ty, tx] = A[y, tx + i * TPB]
        sB[ty, tx] = B[ty + i * TPB, x]
        cuda.syncthreads()
        for j in range(TPB):
            acc += sA[ty, j] * sB[j, tx]
        cuda.syncthreads()
    C[y, x] = acc


@cases.case
def shared():
    rng = np.random.default_rng(1)
    A, B = (rng.random((256, 256), dtype=np.float32) for _ in range(2))
    d = cuda.device_array((256, 256), np.float32)
    matmul[(16, 16), (16, 16)](cuda.to_device(A), cuda.to_device(B), d)
    C = d.copy_to_host()
    assert np.allclose(C, A @ B, rtol=1e-4)
    return digest(C)


@cuda.jit
def hist(x, h):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(h, x[i], 1)
        cuda.atomic.max(h, 255, i)


@cases.case
def atomics():
    x = np.random.default_rng(2).integers(0, 255, 1 << 18).astype(np.int32)
    h = np.zeros(256, np.int32)
    hist[x.size // 256, 256](x, h)
    assert (h[:255] == np.bincount(x, minlength=255)).all() and h[255] == x.size - 1
    return digest(h)


@cuda.reduce
def add(a, b):
    return a + b


@cases.case
def reduce():
    x = np.arange(1 << 17, dtype=np.float64)
    assert add(x) == x.sum()
    return str(add(x))


@vectorize(["float32(float32, float32)", "float64(float64, float64)"], target="cuda")
def hypot(a, b):
    return math.sqrt(a * a + b * b)


@cases.case
def ufunc():
    x = np.linspace(0, 5, 10007, dtype=np.float64)
    return digest(hypot(x, x[::-1].copy()))


@guvectorize(["(float32[:,:], float32[:,:], float32[:,:])"], "(m,n),(n,p)->(m,p)", target="cuda")
def gmul(A, B, C):
    for i in range(A.shape[0]):
        for j in range(B.shape[1]):
            s = float32(0)
            for k in range(A.shape[1]):
                s += A[i, k] * B[k, j]
            C[i, j] = s


@cases.case
def gufunc():
    r = np.random.default_rng(3)
    return digest(gmul(r.random((20, 5, 7), dtype=np.float32), r.random((20, 7, 3), dtype=np.float32)))


@cases.case
def streams():
    stream = cuda.stream()
    x = cuda.pinned_array(1 << 20, np.float32)
    y = cuda.pinned_array_like(x)
    x[:] = np.arange(x.size)
    y[:] = 1
    with stream.auto_synchronize():
        dx, dy = cuda.to_device(x, stream), cuda.to_device(y, stream)
        axpy[x.size // 256, 256, stream](3.0, dx, dy)
        dy.copy_to_host(y, stream)
    assert (y == 3 * x + 1).all()
    return digest(y)


@cases.case
def events():
    a, b = cuda.event(), cuda.event()
    x, y = (cuda.to_device(np.ones(1 << 20, np.float32)) for _ in range(2))
    a.record()
    axpy[4096, 256](1.0, x, y)
    b.record()
    b.synchronize()
    ms = a.elapsed_time(b)
    assert 0 < ms < 1000, ms
    return str(b.query())


@cases.case
def mapped():
    x = cuda.mapped_array(4096, np.float32)
    x[:] = 2
    y = cuda.mapped_array(4096, np.float32)
    y[:] = 1
    axpy[16, 256](5.0, x, y)
    cuda.synchronize()
    assert (np.asarray(y) == 11).all()
    return digest(np.asarray(y))


@cases.case
def managed():
    x = cuda.managed_array(1 << 16, np.float32)
    x[:] = 2
    y = cuda.managed_array(1 << 16, np.float32)
    y[:] = 1
    axpy[256, 256](5.0, x, y)
    cuda.synchronize()
    assert (y == 11).all()
    return digest(y)


@cuda.jit
def pi(states, n, out):
    i = cuda.grid(1)
    inside = 0
    for _ in range(n):
        x = xoroshiro128p_uniform_float32(states, i)
        y = xoroshiro128p_uniform_float32(states, i)
        if x * x + y * y <= 1:
            inside += 1
    out[i] = inside


@cases.case
def random():
    states = create_xoroshiro128p_states(64 * 24, seed=1)
    out = np.zeros(64 * 24, np.int32)
    pi[24, 64](states, 100, out)
    return f"{digest(out)} {4 * out.sum() / (100 * out.size):.5f}"


@cuda.jit
def grid_steps(a):
    g = cuda.cg.this_grid()
    i = cuda.grid(1)
    for step in range(5):
        left = a[step, (i - 1) % a.shape[1]]
        a[step + 1, i] = left + a[step, i]
        g.sync()


@cases.case
def cooperative():
    a = np.zeros((6, 1024), np.int64)
    a[0] = np.arange(1024)
    grid_steps[8, 128](a)
    want = np.arange(1024)
    for _ in range(5):
        want = want + np.roll(want, 1)
    assert (a[5] == want).all()
    return digest(a)


@cuda.jit
def warps(x, out):
    i = cuda.grid(1)
    v = x[i]
    for o in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(0xffffffff, v, o)
    out[i] = v + cuda.popc(cuda.ballot_sync(0xffffffff, x[i] & 1))


@cases.case
def shuffles():
    x = np.arange(256, dtype=np.int32)
    out = np.zeros_like(x)
    warps[2, 128](x, out)
    return digest(out)


@cuda.jit
def maths(x, out):
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
        out[i, 0] = math.sin(v)
        out[i, 1] = math.exp(v)
        out[i, 2] = math.log1p(v)
        out[i, 3] = math.erf(v)
        out[i, 4] = math.gamma(v + 1)
        out[i, 5] = v**1.7
        out[i, 6] = math.fmod(v, 0.3)


@cases.case
def libdevice():
    x = np.linspace(0.01, 4, 5000)
    out = np.zeros((5000, 7))
    maths[20, 256](x, out)
    assert np.allclose(out[:, 0], np.sin(x))
    return digest(out)


@cuda.jit
def bad(x):
    x[cuda.grid(1) + (1 << 40)] = 1


@cuda.jit
def says(n):
    if cuda.grid(1) < n:
        print("thread", cuda.grid(1))


@cases.case
def printing():
    sys.stdout.flush()
    says[1, 4](3)
    cuda.synchronize()
    return "printed"


@cuda.jit
def structs(rec):
    i = cuda.grid(1)
    if i < rec.size:
        rec[i]["x"] += i
        rec[i]["y"] = rec[i]["x"] * 0.5


@cases.case
def records():
    rec = np.zeros(1000, np.dtype([("x", np.int32), ("y", np.float64)], align=True))
    structs[4, 256](rec)
    assert (rec["y"] == np.arange(1000) * 0.5).all()
    return digest(rec["x"], rec["y"])


@cases.case
def slices():
    x = cuda.to_device(np.arange(10000, dtype=np.int32).reshape(100, 100))
    return digest(x[10:20, ::3].copy_to_host(), x.T.copy_to_host() if hasattr(x, "T") else x.copy_to_host())


@cases.case
def info():
    device = cuda.get_current_device()
    free, total = cuda.current_context().get_memory_info()
    return f"{device.name} {device.compute_capability} {device.MULTIPROCESSOR_COUNT} {total} {free < total} {cuda.runtime.get_version()}"


@cases.case
def occupancy():
    compiled = next(iter(axpy.overloads.values()))
    return f"regs {axpy.get_regs_per_thread(compiled.signature)} max {axpy.get_max_threads_per_block(compiled.signature)}"


@cases.case
def fault():
    x = cuda.to_device(np.zeros(16))
    try:
        bad[1, 32](x)
        cuda.synchronize()
    except Exception as e:
        return str(e).splitlines()[0]
    return "no error"

cases.run()
