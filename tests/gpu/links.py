#!/usr/bin/env python3
"""What share of a shaped link large copies fill, compared with iperf3 over the same link in the same run.

    links.py BINARIES LIBRARIES [--link PROGRAM] [--sysctl NAME=VALUE...] [--backend cuda|software] [--mib N] [--mbit N...] [RTT_US...]

BINARIES is a folder with rgpu-server and vhost-rgpu, LIBRARIES one with libcuda.so.1. The server and the host are in two network namespaces. Each rate (default: 1000 megabits a second) and round-trip time [µs]
(default: 200 1000 10000 30000) has a link of its own: of `netem` at both ends, or, where the kernel has none, of PROGRAM, which is `delay-link` (`cargo build --release -p rgpu-tests --bin delay-link`). Over
it go streams of iperf3, as many as a session has data connections, each way for 4 s after a first one; then a program copies N MiB (default: 256) to and from the device, in pinned and in pageable memory
(copies.py). Each --sysctl is set in both namespaces, for example TCP's congestion control. It prints a table of MB/s of iperf3, and of medians of the copies as shares of that. The program compares what comes back. Needs root. Exit status: 1 if a run fails.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
HOST, SERVER, PORT = "10.97.7.1", "10.97.7.2", 9796
NAMES = {"host": "rgpu-links-host", "server": "rgpu-links-server"}
DEVICES = {"host": "link-a", "server": "link-b"}
CONNECTIONS = 4
COPIES = ("pinned_up", "pinned_down", "pageable_up", "pageable_down")


def call(text):
    subprocess.run(text, shell=True, check=True)


def remove_namespaces():
    for name in NAMES.values():
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def link(program, mbit, rtt_us):
    """Joins the namespaces. Gives the program that does it, if there is one."""
    process = None
    if program:
        # On a busy machine, too, packets come at their time.
        process = subprocess.Popen(
            ["chrt", "--fifo", "1", program, "--rtt-us", str(rtt_us), "--mbit", str(mbit)], stdout=subprocess.PIPE, text=True
        )
        if process.stdout.readline() != "ready\n":
            sys.exit("there is no link")
    else:
        call(f"ip link add {DEVICES['host']} type veth peer name {DEVICES['server']}")
    for end, address in (("host", HOST), ("server", SERVER)):
        name, device = NAMES[end], DEVICES[end]
        call(f"ip link set {device} netns {name}")
        call(f"ip -n {name} addr add {address}/24 dev {device}")
        call(f"ip -n {name} link set {device} up txqueuelen 10000")
        if not program:
            # What a packet of the kernel's counts is up to 64 KiB.
            call(f"tc -n {name} qdisc add dev {device} root netem delay {rtt_us / 2}us rate {mbit}mbit limit 20000")
    return process


def until(what, condition):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.05)
    sys.exit(f"it does not come about that {what}")


def within(end, command):
    return ["ip", "netns", "exec", NAMES[end], *map(str, command)]


def run(end, command, **environment):
    command = within(end, command)
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode and "iperf3" not in command:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def start(end, command, log):
    command = within(end, command)
    return subprocess.Popen(command, stdout=log, stderr=log)


def answers(port):
    probe = f"import socket; socket.create_connection(('{SERVER}', {port}), 1)"
    command = within("host", [sys.executable, "-c", probe])
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def plain(way):
    """MB/s that iperf3 receives."""
    command = ["iperf3", "-c", SERVER, "-P", CONNECTIONS, "-O", 1, "-t", 4, "-J"] + (["-R"] if way == "down" else [])
    said = []
    # Its server takes one client at a time, and may not have done with the last one.
    until("iperf3 measures the link", lambda: said.append(json.loads(run("host", command))["end"]) or "sum_received" in said[-1])
    return said[-1]["sum_received"]["bits_per_second"] / 8e6


def measure(options, mbit, rtt_us, folder):
    processes, log = [link(options.link, mbit, rtt_us)], open(folder / "log", "ab")
    try:
        server = [options.binaries / "rgpu-server", "--backend", options.backend, "--insecure", "--listen", f"tcp:{SERVER}:{PORT}"]
        processes.append(start("server", server, log))
        processes.append(start("server", ["iperf3", "-s"], log))
        native = folder / "native.sock"
        native.unlink(missing_ok=True)
        host = [options.binaries / "vhost-rgpu", "--insecure", "--server", f"tcp:{SERVER}:{PORT}", "--native-socket", native]
        processes.append(start("host", host, log))
        until("the server is there", lambda: answers(PORT) and native.exists())
        streams = {way: plain(way) for way in ("up", "down")}
        environment = {"RGPU_SOCKET": str(native), "LD_LIBRARY_PATH": str(options.libraries)}
        said = run("host", [sys.executable, HERE / "copies.py", "--program", options.mib], **environment)
    finally:
        for process in reversed(processes):
            if process:
                process.terminate()
                process.wait()
        for device in DEVICES.values():
            subprocess.run(["ip", "-n", NAMES["host"], "link", "del", device], stderr=subprocess.DEVNULL)
    row = [f"{mbit / 1000:g} Gb/s, {rtt_us / 1000:g} ms", f"{streams['up']:.0f} / {streams['down']:.0f}"]
    for copy in COPIES:
        rates = [float(rate) for rate in re.findall(rf"^{copy} ([0-9.]+)$", said, re.M)]
        row.append(f"{statistics.median(rates) / streams[copy.split('_')[1]]:.2f}")
    return row


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("libraries", type=pathlib.Path)
    parser.add_argument("--link")
    parser.add_argument("--sysctl", action="append", default=[])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000])
    parser.add_argument("rtt_us", type=int, nargs="*")
    options = parser.parse_intermixed_args()
    print(f"| link | iperf3 up / down, MB/s | {' | '.join(copy.replace('_', ' ') for copy in COPIES)} |\n|---|---|{'---|' * len(COPIES)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for mbit in options.mbit:
            for rtt_us in options.rtt_us or [200, 1000, 10000, 30000]:
                remove_namespaces()
                for name in NAMES.values():
                    call(f"ip netns add {name}")
                    call(f"ip -n {name} link set lo up")
                    for setting in options.sysctl:
                        call(f"ip netns exec {name} sysctl -qw {setting}")
                try:
                    print(f"| {' | '.join(measure(options, mbit, rtt_us, pathlib.Path(folder)))} |", flush=True)
                finally:
                    remove_namespaces()


if __name__ == "__main__":
    main()
