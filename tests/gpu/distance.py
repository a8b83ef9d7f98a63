#!/usr/bin/env python3
"""Step times of PyTorch next to the GPU and far from it, and the round trips of one step.

    distance.py [--plot FILE] DIST RELAY [RTT_US...]

DIST is a folder that `cargo xtask dist` makes, RELAY the program `delay-relay` (`cargo build --release -p rgpu-tests --bin delay-relay`). The script runs
torch_speed.py natively, over `local`, over `tcp`, and over `tcp` through the relay with each added round-trip time [µs] (default: 0 200 1000), and prints a
table. Losses and tokens must be the same everywhere. With --plot, it also draws the times against the round-trip time, as SVG. It then runs twice over `tcp` with different numbers of steps: the difference of the round trips that
RGPU_STATS counts is what a step needs. Last, it times processes that make one training step, from their start to their end: natively, and through the relay
with 10 ms to a server with a cache, which is empty the first time. Exit status: 1 if a result differs or a run fails.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import plot as svg
from ports import wait_for

HERE = pathlib.Path(__file__).parent
SERVER_PORT, RELAY_PORT, CACHE_PORT = 9790, 9791, 9789
KINDS = ("training step", "graph step", "token")
COLORS = ("#1f77b4", "#2ca02c", "#d62728")
START_RTT_US, STARTS = 10_000, 3


def run(prefix, arguments=(), **environment):
    command = [*prefix, sys.executable, str(HERE / "torch_speed.py"), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        print(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done


def figures(output):
    times = [re.search(rf"^{kind}: ([0-9.]+) ms", output, re.M) for kind in KINDS]
    results = re.findall(r"^(?:losses|graph losses|tokens): .*", output, re.M)
    return [float(time.group(1)) if time else float("nan") for time in times], results


def round_trips(prefix, steps, tokens, graph_steps=0):
    done = run(prefix, ("--steps", steps, "--graph-steps", graph_steps, "--tokens", tokens), RGPU_STATS="1")
    total = re.search(r"stats: pid=.* round_trips=(\d+)", done.stderr)
    calls = dict(re.findall(r"stats: (\w+) calls=.* round_trips=(\d+)", done.stderr))
    return int(total.group(1)) if total else -1, {name: int(count) for name, count in calls.items()}


def per_turn(what, turns, less, more):
    print(f"round trips of one {what}: {(more[0] - less[0]) / turns:.2f}")
    for name, count in sorted(more[1].items(), key=lambda item: -item[1]):
        difference = count - less[1].get(name, 0)
        if difference > 0:
            print(f"    {name}: {difference / turns:.2f}")


def start(way, prefix, native=None):
    """How long one process with one step takes, and how many round trips that is more than `native` seconds."""
    began = time.monotonic()
    done = run(prefix, ("--steps", 1, "--tokens", 0), RGPU_STATS="1")
    seconds = time.monotonic() - began
    counted = re.search(r"stats: pid=.* round_trips=(\d+)", done.stderr)
    line = f"{way:32}{seconds:8.2f} s"
    if native is not None:
        line += f", native + {(seconds - native) / START_RTT_US * 1e6:.0f} times {START_RTT_US / 1e3:g} ms"
    print(line + (f", {counted.group(1)} round trips counted" if counted else ""), flush=True)
    return seconds, done.returncode == 0 and re.findall(r"^losses: .*", done.stdout, re.M)


def starts(dist, relay):
    """True if all starts gave the same losses."""
    with tempfile.TemporaryDirectory() as cache:
        server = subprocess.Popen(
            [dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--listen", f"tcp:127.0.0.1:{CACHE_PORT}", "--cache", cache],
            stderr=subprocess.DEVNULL,
        )
        between = subprocess.Popen(
            [relay, "--listen", f"127.0.0.1:{RELAY_PORT}", "--to", f"127.0.0.1:{CACHE_PORT}", "--rtt-us", str(START_RTT_US)]
        )
        try:
            wait_for(CACHE_PORT)
            wait_for(RELAY_PORT)
            start("native, not counted", [])
            native = [start("native", []) for _ in range(STARTS)]
            seconds = statistics.median(time for time, _ in native)
            prefix = [dist / "bin/rgpuctl", "run", "--insecure", "--server", f"127.0.0.1:{RELAY_PORT}", "--"]
            far = [start(f"tcp +{START_RTT_US / 1e3:g} ms, start {turn + 1}", prefix, seconds) for turn in range(STARTS)]
        finally:
            for process in (between, server):
                process.terminate()
                process.wait()
        return all(losses == native[0][1] and losses for _, losses in native + far)


def plot(file, native, far):
    """Draws the times [ms] of `far`, by added round-trip time [ms], and for each kind a line: native and one round trip."""
    most_x = max(far)
    most_y = 1.05 * max(max(times) for times in [*far.values(), [time + most_x for time in native]])
    axes = [svg.Axis(label, 0, most, range(0, int(most) + 1, 10)) for label, most in (("added round-trip time, ms", most_x), ("ms", most_y))]
    lines = []
    for i, (kind, color) in enumerate(zip(KINDS, COLORS)):
        lines.append(("", color, True, [(0, native[i]), (most_x, native[i] + most_x)]))
        lines.append((f"{kind}; dashed: native + 1 round trip", color, False, [(rtt, times[i]) for rtt, times in sorted(far.items())]))
    svg.draw(file, *axes, lines)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("dist", type=pathlib.Path)
    parser.add_argument("relay")
    parser.add_argument("--plot")
    parser.add_argument("delays", type=int, nargs="*", default=[0, 200, 1000])
    options = parser.parse_args()
    dist, relay = options.dist, options.relay
    rgpuctl, failed = dist / "bin/rgpuctl", False
    tcp = [rgpuctl, "run", "--insecure", "--server", f"127.0.0.1:{SERVER_PORT}", "--"]
    server = subprocess.Popen(
        [dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--listen", f"tcp:127.0.0.1:{SERVER_PORT}"],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(SERVER_PORT)
        ways = {"native": [], "local": [rgpuctl, "run", "--backend", "cuda", "--"], "tcp": tcp}
        expected, measured = None, {}
        print(f"{'way':16}" + "".join(f"{kind + ' [ms]':>20}" for kind in KINDS))
        for way in [*ways, *options.delays]:
            between = None
            if way in options.delays:
                between = subprocess.Popen(
                    [relay, "--listen", f"127.0.0.1:{RELAY_PORT}", "--to", f"127.0.0.1:{SERVER_PORT}", "--rtt-us", str(way)]
                )
                wait_for(RELAY_PORT)
                prefix = [rgpuctl, "run", "--insecure", "--server", f"127.0.0.1:{RELAY_PORT}", "--"]
            else:
                prefix = ways[way]
            times, results = figures(run(prefix, ("--graph-steps", 40)).stdout)
            if between:
                between.kill()
                between.wait()
            expected = expected or results
            same = results == expected and len(results) == len(KINDS)
            failed |= not same
            measured[way] = times
            name = f"tcp +{way / 1000:g} ms" if between else way
            print(f"{name:16}" + "".join(f"{time:20.2f}" for time in times) + ("" if same else "   results differ: " + "; ".join(results)), flush=True)
        if options.plot:
            plot(options.plot, measured["native"], {delay / 1000: measured[delay] for delay in options.delays})
        fewest = round_trips(tcp, 20, 48)
        per_turn("training step", 20, fewest, round_trips(tcp, 40, 48))
        per_turn("token", 48, fewest, round_trips(tcp, 20, 96))
        per_turn("graph step", 20, round_trips(tcp, 20, 0, 20), round_trips(tcp, 20, 0, 40))
    finally:
        server.terminate()
        server.wait()
    failed |= not starts(dist, relay)
    return failed


if __name__ == "__main__":
    sys.exit(main())
