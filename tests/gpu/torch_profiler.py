#!/usr/bin/env python3
"""torch.profiler natively and under rgpu, and what rgpuctl trace costs.

    torch_profiler.py compare RGPUCTL FOLDER [ROUNDS]   kernels, copies and fills of some training steps: natively, over local, over tcp
    torch_profiler.py overhead RGPUCTL FOLDER [ROUNDS]  the time of a training step with and without rgpuctl trace --output
    torch_profiler.py record FILE                       one run: writes what the profiler saw, and a Chrome trace next to it
    torch_profiler.py steps                             one run: prints the time of a step, in milliseconds

The native and the remote runs take turns. Names and counts must be equal, and the mean time of each kernel within 5 % or a microsecond.
The server needs NVIDIA's CUPTI: that of PyTorch's packages is found by LD_LIBRARY_PATH. The exit status is 1 if something differs.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

STEPS = 4
TOLERANCE = 0.05
# Shorter differences than this, in microseconds, are between any two native runs.
LEAST = 1.0


def training():
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True), 4).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    data = torch.randn(8, 128, 256)

    def step():
        inputs = data.cuda()
        loss = model(inputs).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    return step


def record(path):
    import torch
    from torch.profiler import ProfilerActivity, profile

    step = training()
    # A graph, whose nodes are to be seen one by one.
    graph, static = torch.cuda.CUDAGraph(), torch.randn(1000, 1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = (static @ static).relu().sum()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # The first profile pays for starting the profiler.
    with profile(activities=activities):
        step()
        torch.cuda.synchronize()
    begun = time.time()
    with profile(activities=activities) as seen:
        for _ in range(STEPS):
            step()
        graph.replay()
        graph.replay()
        out.item()
        torch.cuda.synchronize()
    took = time.time() - begun
    chrome = path + ".trace.json"
    seen.export_chrome_trace(chrome)
    with open(chrome) as file:
        events = json.load(file)["traceEvents"]
    devices = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}
    early = [e["name"] for e in devices if e["args"]["correlation"] in calls and e["ts"] < calls[e["args"]["correlation"]]["ts"]]
    times = defaultdict(list)
    for event in devices:
        times[event["name"]].append(event["dur"])
    shape = sorted(f"{e['name']} {e['args']['grid']} {e['args']['block']} {e['args'].get('registers per thread')} {e['args'].get('shared memory')}" for e in devices if e["cat"] == "kernel")
    result = {
        "times": times,
        "shape": shape,
        "linked": sum("External id" in e["args"] for e in devices),
        "with a call": sum(e["args"]["correlation"] in calls for e in devices),
        "devices": len(devices),
        "calls": len(calls),
        "early": early,
        "took": took,
    }
    with open(path, "w") as file:
        json.dump(result, file)


def steps():
    import torch

    step = training()
    # The fastest of some blocks: other work of the machine only makes them slower.
    blocks = []
    for _ in range(6):
        times = []
        for _ in range(40):
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
        blocks.append(statistics.median(times))
    print(min(blocks))


def libraries():
    """Folders with NVIDIA's CUPTI."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    found = [os.path.join(place, "cu13", "lib") for place in (spec.submodule_search_locations if spec else [])]
    found.append("/usr/local/cuda/extras/CUPTI/lib64")
    return [folder for folder in found if os.path.exists(os.path.join(folder, "libcupti.so.13"))]


def environment():
    folders = libraries() + [f for f in os.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}


def run(command, env=None):
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        sys.exit(1)
    if "WARNING" in done.stderr or "rgpu" in done.stderr:
        print(f"  {' '.join(command[:4])} says:\n" + "\n".join("    " + line for line in done.stderr.splitlines()[:12]))
    return done.stdout


def ways(rgpuctl):
    return {
        "native": [],
        "local": [rgpuctl, "run", "--backend", "cuda", "--transport", "local", "--"],
        "tcp": [rgpuctl, "run", "--backend", "cuda", "--transport", "tcp", "--"],
    }


def compare(rgpuctl, folder, rounds):
    os.makedirs(folder, exist_ok=True)
    seen = defaultdict(list)
    for number in range(rounds):
        for way, prefix in ways(rgpuctl).items():
            path = os.path.join(folder, f"{way}-{number}.json")
            run(prefix + [sys.executable, __file__, "record", path], environment() if prefix else None)
            with open(path) as file:
                seen[way].append(json.load(file))
    wrong = 0

    def means(way):
        all_times = defaultdict(list)
        for one in seen[way]:
            for name, times in one["times"].items():
                all_times[name] += times
        return {name: (len(times), statistics.mean(times), statistics.median(times)) for name, times in all_times.items()}

    native = means("native")
    for way in seen:
        one = seen[way][0]
        print(f"{way}: {one['devices']} kernels, copies and fills, {one['linked']} linked with an operator, {one['with a call']} with a call, {one['calls']} calls, took {one['took'] * 1e3:.1f} ms")
        if one["early"]:
            print(f"  {len(one['early'])} began before their call, such as {one['early'][0]}")
            wrong += way != "native"
    for way in ("local", "tcp"):
        other = means(way)
        missing = {name: count for name, (count, *_) in native.items() if other.get(name, (0,))[0] != count}
        extra = {name: count for name, (count, *_) in other.items() if name not in native}
        for name, count in missing.items():
            print(f"  {way}: {other.get(name, (0,))[0]} of {name[:90]}, natively {count}")
        for name, count in extra.items():
            print(f"  {way}: {count} of {name[:90]}, natively none")
        shapes = [seen[w][0]["shape"] for w in ("native", way)]
        if shapes[0] != shapes[1]:
            differing = set(shapes[0]) ^ set(shapes[1])
            print(f"  {way}: {len(differing)} launches of other shapes, such as {sorted(differing)[:2]}")
        wrong += len(missing) + len(extra) + (shapes[0] != shapes[1])
        worst, total, off = 0.0, [0.0, 0.0], 0
        for name, (count, mean, median) in sorted(native.items()):
            if name not in other:
                continue
            theirs = other[name]
            total[0] += mean * count
            total[1] += theirs[1] * theirs[0]
            by = abs(theirs[1] - mean)
            # A copy of the client's memory is the server's own, from other memory and perhaps in pieces: it is only told that there is one.
            copies = name.startswith("Memcpy") and ("Pageable" in name or "Pinned" in name)
            if by > max(TOLERANCE * mean, LEAST) and not copies:
                off += 1
                print(f"  {way}: {name[:80]}: {theirs[1]:.2f} us (median {theirs[2]:.2f}), natively {mean:.2f} (median {median:.2f}), {count} times")
            worst = max(worst, by / mean if mean > LEAST and not copies else 0)
        print(f"{way}: {len(other)} names, natively {len(native)}; all times together {total[1]:.0f} us, natively {total[0]:.0f}; largest difference of a mean {100 * worst:.1f} %; {off} beyond the tolerance")
        wrong += off
    return wrong


def overhead(rgpuctl, folder, rounds):
    os.makedirs(folder, exist_ok=True)
    wrong = 0
    for transport in ("local", "tcp"):
        times = defaultdict(list)
        for number in range(rounds):
            output = ["--output", os.path.join(folder, f"{transport}.trace.json")]
            for what, command in (
                ("off", [rgpuctl, "run"]),
                ("on", [rgpuctl, "trace"] + output),
                ("with devices", [rgpuctl, "trace", "--devices"] + output),
            ):
                if what == "with devices" and number > 0:
                    continue
                command = command + ["--backend", "cuda", "--transport", transport, "--", sys.executable, __file__, "steps"]
                done = subprocess.run(command, env=environment(), capture_output=True, text=True)
                if done.returncode != 0:
                    print(done.stdout, done.stderr)
                    return 1
                times[what].append(float(done.stdout.split()[-1]))
        off, on, devices = (min(times[what]) for what in ("off", "on", "with devices"))
        percent = 100 * (on / off - 1)
        print(f"{transport}: a step {off:.2f} ms, with a trace {on:.2f} ms: {percent:+.1f} %, with devices {devices:.2f} ms (each {[round(t, 2) for t in times['off']]} and {[round(t, 2) for t in times['on']]})")
        wrong += percent > 3
    return wrong


def main():
    what = sys.argv[1]
    if what == "record":
        record(sys.argv[2])
    elif what == "steps":
        steps()
    else:
        rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 3
        wrong = {"compare": compare, "overhead": overhead}[what](sys.argv[2], sys.argv[3], rounds)
        print("equal" if wrong == 0 else f"{wrong} differences")
        sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
