#!/usr/bin/env python3
"""Programs that start together: when each has its first result, natively and through rgpu.

    together.py DIST [COUNT...]

DIST is a folder that `cargo xtask dist` makes. For each COUNT (default: 1 8 32) the script starts that many copies of first_result.cu at once, natively, over
`local` and over `tcp`, with one server for each transport, and prints how many were served, and the mean and the latest first result. It then measures how
long a device reset takes, and how long `rgpuctl run` with a private server takes to return after its program has ended. It needs nvcc. What the servers
logged, with the times in which contexts were made, is in $OUT or a temporary folder. Exit status: 1 if a program failed.
"""

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
    """The seconds to each first result, and what the programs that failed said."""
    times, failures, end = [], [], time.monotonic() + LIMIT
    for program in programs:
        try:
            output, errors = program.communicate(timeout=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            program.kill()
            output, errors = program.communicate()
        first = re.search(r"FIRST ([0-9.]+)", output)
        if first and program.returncode == 0:
            times.append(float(first.group(1)))
        else:
            failures.append(f"exit status {program.returncode}: {output.strip()[-200:]} {errors.strip()[-200:]}")
    return times, failures


def measure(way, command, counts):
    failed = 0
    for count in counts:
        begin = time.monotonic()
        times, failures = results(start_together(command, count))
        whole = time.monotonic() - begin
        figures = f"mean {statistics.mean(times):.3f} s, latest {max(times):.3f} s" if times else "none"
        print(f"{way:8}{count:4} at once: {len(times)} served; first result: {figures}; all ended after {whole:.2f} s", flush=True)
        for failure in failures[:3]:
            print(f"    {failure}")
        failed += len(failures)
        # The server makes its spare workers ready again.
        time.sleep(3)
    done = subprocess.run([*command, "0", "reset"], capture_output=True, text=True)
    print(f"{way:8}reset: {' '.join(re.findall('RESET [0-9.]+', done.stdout)) or 'failed: ' + done.stderr[-200:]}", flush=True)
    return failed


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
    dist = pathlib.Path(sys.argv[1]).resolve()
    counts = [int(count) for count in sys.argv[2:]] or [1, 8, 32]
    rgpuctl, program = dist / "bin/rgpuctl", OUT / "first_result"
    subprocess.run(["nvcc", "-O2", "-arch=native", "-o", program, HERE / "first_result.cu"], check=True)
    failed = measure("native", [program], counts)
    for way, address in (("local", f"unix:{OUT}/server.sock"), ("tcp", f"tcp:127.0.0.1:{PORT}")):
        with open(OUT / f"server-{way}.log", "w", encoding="utf-8") as log:
            server = subprocess.Popen(
                [dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--listen", address, "--log", "debug"], stderr=log
            )
        time.sleep(4)
        target = address.removeprefix("tcp:")
        failed += measure(way, [rgpuctl, "run", "--insecure", "--server", target, "--", program], counts)
        server.terminate()
        server.wait()
    failed += private_server(rgpuctl, program)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
