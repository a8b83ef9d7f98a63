#!/usr/bin/env python3
"""Loops of frameworks in their steady state: which calls each turn makes, and how many of them wait for the server.

    loops.py DIST [NAME...]

DIST is a folder that `cargo xtask dist` makes. Each loop (those of NAME; default: all) runs twice under rgpu over `tcp`, with different numbers of turns; the difference of what RGPU_STATS counts is what a turn needs. A turn ends with one
value that the program reads, which takes one round trip. tests/tests/round_trips.rs repeats such calls without a GPU. Exit status: how many loops make more than one round trip in a turn, or fail.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none.
"""

import os
import pathlib
import re
import subprocess
import sys

from ports import wait_for

PORT = 9797
FEW, MANY = 10, 30


def torch_compile():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(64, 512, device="cuda")

    @torch.compile
    def loss_of(data):
        return (model(data) - data).square().mean()

    def turn():
        loss = loss_of(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return turn


def torch_graph():
    import torch

    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True), 4).cuda().eval()
    data, graph = torch.randn(8, 128, 256, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            model(data)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = model(data).square().mean()
    inputs = [torch.randn(8, 128, 256).pin_memory() for _ in range(2)]
    turns = iter(range(1 << 30))

    def turn():
        data.copy_(inputs[next(turns) % 2], non_blocking=True)
        graph.replay()
        return out.item()

    return turn


def jax_step():
    import jax
    import jax.numpy as jnp

    def forward(weights, data):
        return jnp.tanh(data @ weights["in"]) @ weights["out"]

    @jax.jit
    def step(weights, data):
        loss, slopes = jax.value_and_grad(lambda weights: jnp.mean((forward(weights, data) - data) ** 2))(weights)
        return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, slopes), loss

    keys = jax.random.split(jax.random.key(0), 3)
    state = {"weights": {"in": jax.random.normal(keys[0], (256, 512)) * 0.05, "out": jax.random.normal(keys[1], (512, 256)) * 0.05}}
    data = jax.random.normal(keys[2], (64, 256))

    def turn():
        state["weights"], loss = step(state["weights"], data)
        return float(loss)

    return turn


def jax_scan():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def run(start):
        return jax.lax.scan(lambda carry, _: (jnp.fft.ifft(jnp.fft.fft(carry)).real * 0.999 + 0.001, None), start, None, 16)[0].sum()

    start = jnp.arange(4096, dtype=jnp.float32)
    return lambda: float(run(start))


def cupy_arrays():
    import cupy

    left, right = cupy.random.default_rng(0).random((2, 512, 512), dtype=cupy.float32)
    square = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x + 1", "square_plus")

    def turn():
        product = square(left) @ right
        order = cupy.sort(product, axis=1)
        return float(cupy.abs(cupy.fft.rfft(order, axis=1)).sum())

    return turn


def cupy_streams():
    import cupy

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    host = [cupy.cuda.alloc_pinned_memory(1 << 20) for _ in streams]
    arrays = [cupy.arange(1 << 18, dtype=cupy.float32) for _ in streams]
    cupy.cuda.Device().synchronize()
    done = [cupy.cuda.Event(disable_timing=True) for _ in streams]

    def turn():
        for stream, memory, array, event in zip(streams, host, arrays, done):
            with stream:
                array *= 1.5
                array.data.copy_to_host_async(memory.ptr, 1 << 20)
                event.record()
        for event in done:
            streams[0].wait_event(event)
        streams[0].synchronize()

    return turn


LOOPS = {loop.__name__: loop for loop in (torch_compile, torch_graph, jax_step, jax_scan, cupy_arrays, cupy_streams)}


def counted(prefix, name, turns):
    """Calls and round trips by function, and all round trips, of a run with so many turns."""
    done = subprocess.run([*prefix, sys.executable, __file__, "--loop", name, str(turns)], env=os.environ | {"RGPU_STATS": "1"}, capture_output=True, text=True, check=False)
    total = re.search(r"stats: pid=.* round_trips=(\d+)", done.stderr)
    if done.returncode or not total:
        return None, done.stderr[-1500:]
    rows = re.findall(r"stats: (\w+) calls=(\d+).* round_trips=(\d+)", done.stderr)
    return {"all": (0, int(total.group(1)))} | {function: (int(calls), int(trips)) for function, calls, trips in rows}, done.stdout.strip()


def main():
    if sys.argv[1:2] == ["--loop"]:
        turn = LOOPS[sys.argv[2]]()
        # What frameworks do only at first: compile, choose, grow their pools.
        for _ in range(8):
            turn()
        for _ in range(int(sys.argv[3])):
            last = turn()
        print(last)
        return 0
    dist = pathlib.Path(sys.argv[1])
    server = subprocess.Popen([dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--listen", f"tcp:127.0.0.1:{PORT}"], stderr=subprocess.DEVNULL)
    prefix, many = [dist / "bin/rgpuctl", "run", "--insecure", "--server", f"127.0.0.1:{PORT}", "--"], 0
    try:
        wait_for(PORT)
        for name in sys.argv[2:] or LOOPS:
            (few, _), (more, said) = counted(prefix, name, FEW), counted(prefix, name, MANY)
            if few is None or more is None:
                many += 1
                print(f"{name}: failed: {said}", flush=True)
                continue
            per_turn = {function: tuple((after - before) / (MANY - FEW) for before, after in zip(few.get(function, (0, 0)), counts)) for function, counts in more.items()}
            trips = per_turn.pop("all")[1]
            many += trips > 1.05
            print(f"{name}: {trips:.2f} round trips a turn (result {said})")
            for function, (calls, waits) in sorted(per_turn.items(), key=lambda row: -row[1][0]):
                if calls > 0.04 or waits > 0.04:
                    print(f"    {function}: {calls:.2f} calls" + (f", {waits:.2f} round trips" if waits else ""), flush=True)
    finally:
        server.terminate()
        server.wait()
    return many


if __name__ == "__main__":
    sys.exit(main())
