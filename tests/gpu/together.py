#!/usr/bin/env python3
"""Programs that start together: when each has its first result, and how much they do, natively and through rgpu.

    together.py DIST [--seconds SECONDS] [COUNT...]

DIST is a folder that `cargo xtask dist` makes. For each COUNT (default: 1 8 32) the script starts that many copies of tests/programs/turns.cu at once,
natively, over `local` and over `tcp`, with one server for each transport. Each makes turns (4 KiB up, a kernel, 4 KiB down, verified) until SECONDS (default: 4)
after its first result. The script prints how many were served; the mean and the latest first result; and the turns of all programs: how many, per second from the
start of the first to the end of the last, and the sum of what each made per second of its own. It then measures how long a device reset takes, and how long
`rgpuctl run` with a private server takes to return after its program has ended. It needs nvcc. What the servers logged, with the times in which contexts were
made, is in $OUT or a temporary folder. Exit status: 1 if a program failed.
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

HERE = pathlib.Path(__file__).parent
OUT = pathlib.Path(os.environ.get("OUT") or tempfile.mkdtemp())
PORT = 9792
# A program that waits longer than this counts as failed.
LIMIT = 300


def start_together(command, count):
    return [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(count)]


def results(programs):
    """Of each program, the seconds to its first result and its turns; and what the programs that failed said."""
    served, failures, end = [], [], time.monotonic() + LIMIT
    for program in programs:
        try:
            output, errors = program.communicate(timeout=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            program.kill()
            output, errors = program.communicate()
        first = re.search(r"^FIRST ([0-9.]+)$", output, re.MULTILINE)
        turns = re.search(r"^PASS turns ([0-9]+) turns$", output, re.MULTILINE)
        if first and turns and program.returncode == 0:
            served.append((float(first.group(1)), int(turns.group(1))))
        else:
            failures.append(f"exit status {program.returncode}: {output.strip()[-200:]} {errors.strip()[-200:]}")
    return served, failures


def measure(way, command, counts, seconds):
    failed = 0
    for count in counts:
        begin = time.monotonic()
        served, failures = results(start_together([*command, str(seconds)], count))
        whole = time.monotonic() - begin
        figures = "none"
        if served:
            times, turns = zip(*served)
            figures = (
                f"mean {statistics.mean(times):.3f} s, latest {max(times):.3f} s; {sum(turns)} turns in {whole:.2f} s: "
                f"{sum(turns) / whole:.0f} per second, {sum(turns) / seconds:.0f} by each program's own time"
            )
        print(f"{way:8}{count:4} at once: {len(served)} served; first result: {figures}", flush=True)
        for failure in failures[:3]:
            print(f"    {failure}")
        failed += len(failures)
        # The server makes its spare workers ready again.
        time.sleep(3)
    done = subprocess.run([*command, "reset"], capture_output=True, text=True)
    reset = re.findall("RESET [0-9.]+", done.stdout)
    print(f"{way:8}reset: {' '.join(reset) or 'failed: ' + (done.stdout + done.stderr)[-200:]}", flush=True)
    return failed + (not reset)


def private_server(rgpuctl, program):
    """Seconds from the program's end to rgpuctl's, with a server of its own."""
    script = f'{program} > {OUT}/private; status=$?; date +%s.%N > {OUT}/ended; exit $status'
    gaps = []
    for _ in range(3):
        done = subprocess.run([rgpuctl, "run", "--backend", "cuda", "--", "sh", "-c", script], capture_output=True, text=True)
        if done.returncode:
            print(f"rgpuctl run failed: {done.stderr[-300:]}")
            return 1
        gaps.append(time.time() - float((OUT / "ended").read_text()))
    print(f"rgpuctl run with a private server returned {max(gaps) * 1e3:.0f} ms after its program at most")
    return 0


def main():
    parser = argparse.ArgumentParser(description="Programs that start together; see this file's first lines.")
    parser.add_argument("dist", type=pathlib.Path)
    parser.add_argument("counts", type=int, nargs="*")
    parser.add_argument("--seconds", type=int, default=4)
    options = parser.parse_intermixed_args()
    dist, counts = options.dist.resolve(), options.counts or [1, 8, 32]
    rgpuctl, program = dist / "bin/rgpuctl", OUT / "turns"
    source = HERE.parent / "programs/turns.cu"
    subprocess.run(["nvcc", "-std=c++17", "-O2", "-arch=native", "-o", program, source], check=True)
    failed = measure("native", [program], counts, options.seconds)
    for way, address in (("local", f"unix:{OUT}/server.sock"), ("tcp", f"tcp:127.0.0.1:{PORT}")):
        with open(OUT / f"server-{way}.log", "w", encoding="utf-8") as log:
            server = subprocess.Popen(
                [dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--listen", address, "--log", "debug"], stderr=log
            )
        time.sleep(4)
        target = address.removeprefix("tcp:")
        failed += measure(way, [rgpuctl, "run", "--insecure", "--server", target, "--", program], counts, options.seconds)
        server.terminate()
        server.wait()
    failed += private_server(rgpuctl, program)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
