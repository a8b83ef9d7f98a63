#!/usr/bin/env python3
"""What JAX does with a GPU, one line a case, the same natively and remotely.

    jax_ops.py [CASE...]

XLA chooses algorithms by timing them; the flag below has it take the first that works, so that two runs can be compared.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

import cases


def digest(*arrays):
    return cases.digest(*jax.tree.leaves(arrays))


KEY = jax.random.key(0)


@cases.case
def devices():
    return f"{jax.default_backend()} {[d.device_kind for d in jax.devices()]}"


@cases.case
def random():
    return digest(jax.random.normal(KEY, (1000,)), jax.random.permutation(KEY, 1000))


@cases.case
def jit():
    return digest(jax.jit(lambda x: jnp.sin(x) ** 2 + jnp.cumsum(x))(jnp.linspace(0, 9, 10000)))


@cases.case
def matrices():
    a = jax.random.normal(KEY, (200, 200))
    return digest(a @ a, (a.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16)).astype(jnp.float32), jnp.einsum("ij,kj->ik", a, a))


@cases.case
def linalg():
    a = jax.random.normal(KEY, (64, 64))
    s = a @ a.T + 64 * jnp.eye(64)
    return digest(jnp.linalg.cholesky(s), jnp.linalg.svd(a, compute_uv=False), jnp.linalg.eigh(s)[0], jnp.linalg.solve(s, a), jnp.linalg.qr(a)[1])


@cases.case
def fourier():
    return digest(jnp.fft.fft(jax.random.normal(KEY, (32, 500))), jnp.fft.irfft2(jnp.fft.rfft2(jax.random.normal(KEY, (64, 64)))))


@cases.case
def convolution():
    x, w = jax.random.normal(KEY, (4, 8, 32, 32)), jax.random.normal(KEY, (16, 8, 3, 3))
    return f"{float(jnp.abs(jax.lax.conv(x, w, (1, 1), 'SAME')).sum()):.1f}"


@cases.case
def control():
    def step(carry, x):
        return carry * 0.9 + x, carry

    scanned = jax.lax.scan(step, jnp.zeros(16), jnp.arange(160.0).reshape(10, 16))
    looped = jax.lax.while_loop(lambda s: s[0] < 20, lambda s: (s[0] + 1, s[1] * 1.1), (0, jnp.ones(8)))
    chosen = jax.lax.cond(looped[0] > 5, lambda x: x + 1, lambda x: x - 1, looped[1])
    return digest(scanned, looped, chosen)


@cases.case
def sorting():
    x = jax.random.randint(KEY, (10000,), 0, 1 << 30)
    return digest(jnp.sort(x), jnp.argsort(x), jax.lax.top_k(x, 10))


@cases.case
def training():
    def loss(w, x, y):
        return jnp.mean((jax.nn.gelu(x @ w[0]) @ w[1] - y) ** 2)

    k = jax.random.split(KEY, 4)
    w = [jax.random.normal(k[0], (32, 64)) * 0.1, jax.random.normal(k[1], (64, 4)) * 0.1]
    x, y = jax.random.normal(k[2], (128, 32)), jax.random.normal(k[3], (128, 4))
    step = jax.jit(lambda w: (loss(w, x, y), jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y))))
    losses = []
    for _ in range(20):
        value, w = step(w)
        losses.append(float(value))
    return f"{losses[0]:.6f} {losses[-1]:.6f}"


@cases.case
def callbacks():
    def host(x):
        return np.asarray(x) * 2

    return digest(jax.jit(lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1)(jnp.arange(100.0)))


@cases.case
def printing():
    jax.jit(lambda x: jax.debug.print("x is {}", x))(jnp.float32(3))
    jax.effects_barrier()
    return "printed"


cases.run()
