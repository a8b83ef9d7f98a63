#!/usr/bin/env python3
"""Step times of PyTorch next to the GPU and far from it, and the round trips of one step.

    distance.py DIST RELAY [RTT_US...]

DIST is a folder that `cargo xtask dist` makes, RELAY the program `delay-relay` (`cargo build --release -p rgpu-tests --bin delay-relay`). The script runs
torch_speed.py natively, over `local`, over `tcp`, and over `tcp` through the relay with each added round-trip time [µs] (default: 0 200 1000), and prints a
table. Losses and tokens must be the same everywhere. It then runs twice over `tcp` with different numbers of steps: the difference of the round trips that
RGPU_STATS counts is what a step needs. Exit status: 1 if a result differs or a run fails.
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
SERVER_PORT, RELAY_PORT = 9790, 9791


def wait_for(port):
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"nothing listens at port {port}")


def run(prefix, arguments=(), **environment):
    command = [*prefix, sys.executable, str(HERE / "torch_speed.py"), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        print(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done


def figures(output):
    times = [re.search(rf"^{what}: ([0-9.]+) ms", output, re.M) for what in ("training step", "token")]
    results = re.findall(r"^(?:losses|tokens): .*", output, re.M)
    return [float(time.group(1)) if time else float("nan") for time in times], results


def round_trips(prefix, steps, tokens):
    done = run(prefix, ("--steps", steps, "--tokens", tokens), RGPU_STATS="1")
    total = re.search(r"stats: pid=.* round_trips=(\d+)", done.stderr)
    calls = dict(re.findall(r"stats: (\w+) calls=.* round_trips=(\d+)", done.stderr))
    return int(total.group(1)) if total else -1, {name: int(count) for name, count in calls.items()}


def per_turn(what, turns, less, more):
    print(f"round trips of one {what}: {(more[0] - less[0]) / turns:.2f}")
    for name, count in sorted(more[1].items(), key=lambda item: -item[1]):
        difference = count - less[1].get(name, 0)
        if difference > 0:
            print(f"    {name}: {difference / turns:.2f}")


def main():
    dist, relay = pathlib.Path(sys.argv[1]), sys.argv[2]
    delays = [int(delay) for delay in sys.argv[3:]] or [0, 200, 1000]
    rgpuctl, failed = dist / "bin/rgpuctl", False
    tcp = [rgpuctl, "run", "--insecure", "--server", f"127.0.0.1:{SERVER_PORT}", "--"]
    server = subprocess.Popen(
        [dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--listen", f"tcp:127.0.0.1:{SERVER_PORT}"],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(SERVER_PORT)
        ways = {"native": [], "local": [rgpuctl, "run", "--backend", "cuda", "--"], "tcp": tcp}
        expected = None
        print(f"{'way':16}{'training step [ms]':>20}{'token [ms]':>12}")
        for way in [*ways, *delays]:
            between = None
            if way in delays:
                between = subprocess.Popen(
                    [relay, "--listen", f"127.0.0.1:{RELAY_PORT}", "--to", f"127.0.0.1:{SERVER_PORT}", "--rtt-us", str(way)]
                )
                wait_for(RELAY_PORT)
                prefix = [rgpuctl, "run", "--insecure", "--server", f"127.0.0.1:{RELAY_PORT}", "--"]
            else:
                prefix = ways[way]
            times, results = figures(run(prefix).stdout)
            if between:
                between.kill()
                between.wait()
            expected = expected or results
            same = results == expected and len(results) == 2
            failed |= not same
            name = f"tcp +{way / 1000:g} ms" if between else way
            print(f"{name:16}{times[0]:20.2f}{times[1]:12.2f}{'' if same else '   results differ: ' + '; '.join(results)}", flush=True)
        fewest = round_trips(tcp, 20, 48)
        per_turn("training step", 20, fewest, round_trips(tcp, 40, 48))
        per_turn("token", 48, fewest, round_trips(tcp, 20, 96))
    finally:
        server.terminate()
        server.wait()
    return failed


if __name__ == "__main__":
    sys.exit(main())
