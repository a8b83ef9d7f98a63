#!/usr/bin/env python3
"""Two builds side by side on this machine's GPU: what calls cost and what copies carry, before a change and after it.

    before_after.py BEFORE AFTER [REPETITIONS]

BEFORE and AFTER are folders that `cargo xtask dist` makes. The script compiles ../bench/bench.cu (it needs nvcc), starts a server of each build, and runs the
program natively, and over `local` and `tcp` with each build in turn, REPETITIONS times (default: 3). It prints the medians of the repetitions: microseconds,
launches a second, or GB/s for copies that have a size. "after/before" above 1 is slower for times and faster for rates. The last line names the worst change
of each transport. The program compares all data that it copies. Exit status: 1 if a run failed.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
OUT = pathlib.Path(os.environ.get("OUT") or tempfile.mkdtemp())
# Figures that are better when they are higher.
RATES = ("pinned", "pageable", "launches")


def start(dist, name, port):
    addresses = [f"unix:{OUT}/{name}.sock", f"tcp:127.0.0.1:{port}"]
    listen = [word for address in addresses for word in ("--listen", address)]
    log = open(OUT / f"server-{name}.log", "w", encoding="utf-8")
    server = subprocess.Popen([dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", *listen], stderr=log)
    return server, {"local": addresses[0], "tcp": addresses[1].removeprefix("tcp:")}


def run(command):
    begin = repr(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e9)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=dict(os.environ, RGPU_BENCH_START=begin)
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit status {done.returncode}: {done.stdout[-200:]} {done.stderr[-400:]}")
    figures = {}
    for line in done.stdout.splitlines():
        name, size, median, _, _ = line.split()
        figures[f"{name}/{size}" if name.startswith(("pinned", "pageable")) else name] = float(median)
    return figures


def main():
    builds = {"before": pathlib.Path(sys.argv[1]).resolve(), "after": pathlib.Path(sys.argv[2]).resolve()}
    repetitions = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    program = OUT / "bench"
    subprocess.run(["nvcc", "-O2", "-arch=native", "-o", program, HERE.parent / "bench/bench.cu"], check=True)
    servers = {name: start(dist, name, 9790 + n) for n, (name, dist) in enumerate(builds.items())}
    time.sleep(4)
    found = {}
    try:
        for _ in range(repetitions):
            found.setdefault("native", []).append(run([program]))
            for way in ("local", "tcp"):
                for name, dist in builds.items():
                    command = [dist / "bin/rgpuctl", "run", "--insecure", "--server", servers[name][1][way], "--", program]
                    found.setdefault((way, name), []).append(run(command))
    finally:
        for server, _ in servers.values():
            server.terminate()
            server.wait()
    median = {key: {name: statistics.median(one[name] for one in all) for name in all[0]} for key, all in found.items()}
    print(f"{'':26}{'native':>12}{'local before':>14}{'after':>12}{'ratio':>7}{'tcp before':>14}{'after':>12}{'ratio':>7}")
    worst = {}
    for name in median["native"]:
        line = f"{name:26}{median['native'][name]:12.4g}"
        for way in ("local", "tcp"):
            before, after = median[way, "before"][name], median[way, "after"][name]
            ratio = after / before
            slower = 1 / ratio if name.startswith(RATES) else ratio
            worst[way] = max(worst.get(way, (0, "")), (slower, name))
            line += f"{before:14.4g}{after:12.4g}{ratio:7.2f}"
        print(line)
    print("the worst change:", "; ".join(f"{way}: {name}, {slower:.2f} times as slow" for way, (slower, name) in worst.items()))


if __name__ == "__main__":
    main()
