#!/usr/bin/env python3
"""jax.profiler natively and under rgpu: which kernels, copies and fills it sees of some training steps, and for how many it knows XLA's operation.

    jax_profiler.py compare RGPUCTL FOLDER   natively, over local, over tcp; files go to FOLDER
    jax_profiler.py record FOLDER            one run: prints what the profiler saw, a line for each name

The server needs NVIDIA's CUPTI: that of PyTorch's packages is found by LD_LIBRARY_PATH. The exit status of `compare` is 1 if names or counts differ.
"""

import os
import pathlib
import subprocess
import sys
from collections import Counter

STEPS = 5


def record(folder):
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(jax.nn.softmax(x) ** 2)

    @jax.jit
    def step(weights, x):
        value, slopes = jax.value_and_grad(loss)(weights, x)
        return [w - 0.1 * slope for w, slope in zip(weights, slopes)], value

    weights = [jax.random.normal(jax.random.key(i), (512, 512)) for i in range(4)]
    x = jax.random.normal(jax.random.key(9), (64, 512))
    for _ in range(3):
        weights, value = step(weights, x)
    value.block_until_ready()
    with jax.profiler.trace(folder):
        for _ in range(STEPS):
            weights, value = step(weights, x)
        print(f"loss {float(value):.6f}")
    files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
    seen, named, spans = Counter(), Counter(), Counter()
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                seen[event.name] += 1
                named[event.name] += any(key == "hlo_op" for key, _ in event.stats)
                spans["longer than nothing"] += event.duration_ns > 0
    for name in sorted(seen):
        print(f"{name}: {seen[name]} times, {named[name]} with XLA's operation")
    print(f"{sum(seen.values())} in all, {spans['longer than nothing']} longer than nothing")


def compare(rgpuctl, folder):
    from torch_profiler import environment

    outputs = {}
    for way in ("native", "local", "tcp"):
        prefix = [] if way == "native" else [rgpuctl, "run", "--backend", "cuda", "--transport", way, "--"]
        command = [*prefix, sys.executable, __file__, "record", f"{folder}/{way}"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        outputs[way] = (done.returncode, done.stdout)
        print(f"{way}: exit status {done.returncode}\n{done.stdout}", flush=True)
        # XLA's profiler says on stderr which function of CUPTI has failed, and goes on without it.
        if done.returncode or "rgpu" in done.stderr or "cupti" in done.stderr:
            print(done.stderr[:3000], flush=True)
    different = [way for way, output in outputs.items() if output != outputs["native"] or output[0]]
    print("the same everywhere" if not different else f"differs: {', '.join(different)}")
    return bool(different)


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"] and len(sys.argv) == 3:
        record(sys.argv[2])
    elif sys.argv[1:2] == ["compare"] and len(sys.argv) == 4:
        sys.exit(compare(*sys.argv[2:]))
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
