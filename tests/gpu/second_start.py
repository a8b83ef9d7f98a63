#!/usr/bin/env python3
"""What a server's cache saves of a program's second start over a slow link, and what it costs when it has nothing.

    second_start.py BINARIES LIBRARIES [--backend cuda|software] [--rate RATE] [--relay] [--runs N] PROGRAM [ARGUMENT...]

BINARIES is a folder with rgpu-server and vhost-rgpu, LIBRARIES one with libcuda.so.1. The server and the host are in two network namespaces, joined by a link of RATE each way (`tc` tbf, default: 1gbit). With --relay, for
a machine without such links, both are where this script is, joined by BINARIES/delay-relay with 1000 megabits a second and 0.2 ms. In turn, --runs times (default: 5), the program is run on the same machine (`local`),
over the link without a cache, with a cache that is empty, and with one that is filled. It prints what each run took, from the program's start to its end, and what was sent over the link (with all headers of the
network; with --relay, without them), and the medians. Needs root. Exit status: 1 if a run fails.
"""

import argparse
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HOST, SERVER, PORT, RELAY_PORT = "10.97.9.1", "10.97.9.2", 9796, 9798
NAMES = {"host": "rgpu-second-host", "server": "rgpu-second-server"}


def call(text):
    subprocess.run(text, shell=True, check=True)


def network(rate):
    if not NAMES:
        return
    remove_network()
    for name in NAMES.values():
        call(f"ip netns add {name}")
    call(f"ip -n {NAMES['host']} link add eth0 type veth peer name eth0 netns {NAMES['server']}")
    for end, address in (("host", HOST), ("server", SERVER)):
        call(f"ip -n {NAMES[end]} addr add {address}/24 dev eth0")
        call(f"ip -n {NAMES[end]} link set eth0 up")
        call(f"ip -n {NAMES[end]} link set lo up")
        call(f"tc -n {NAMES[end]} qdisc add dev eth0 root tbf rate {rate} burst 256k latency 50ms")


def remove_network():
    for name in NAMES.values():
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def sent_over_link():
    """Bytes that the host has sent, with all headers. Nothing counts them where there are no namespaces."""
    if not NAMES:
        return 0
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    shown = ["ip", "netns", "exec", NAMES["host"], "cat", path]
    return int(subprocess.run(shown, check=True, capture_output=True).stdout)


def status(path):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(path))
        text = b""
        while part := stream.recv(1 << 16):
            text += part
    return json.loads(text)


def until(what, condition):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
    sys.exit(f"it does not come about that {what}")


class Daemons:
    """A server, and a host whose programs use it."""

    def __init__(self, options, folder, local, cache):
        self.folder, self.processes = folder, []
        path = lambda name: str(folder / name)
        server = [options.binaries / "rgpu-server", "--backend", options.backend, "--insecure", "--workers", "2"]
        server += ["--listen", f"unix:{path('server.sock')}", "--listen", f"tcp:{SERVER}:{PORT}"]
        server += ["--status-socket", path("server.status")] + (["--cache", str(cache)] if cache else [])
        if options.relay:
            self.start("relay", [options.binaries / "delay-relay", "--listen", f"{SERVER}:{RELAY_PORT}", "--to", f"{SERVER}:{PORT}", "--rtt-us", "200", "--mbit", "1000"])
        address = f"unix:{path('server.sock')}" if local else f"tcp:{SERVER}:{RELAY_PORT if options.relay else PORT}"
        host = [options.binaries / "vhost-rgpu", "--insecure", "--name", "second-start", "--server", address]
        host += ["--native-socket", path("native.sock"), "--status-socket", path("host.status")]
        self.start("server", server)
        until("the server is ready", lambda: self.server()["workers_ready"] == 2)
        self.start("host", host)
        until("the host is ready", lambda: pathlib.Path(path("native.sock")).exists() and self.host())

    def start(self, end, command):
        log = open(self.folder / f"{end}.log", "ab")
        within = ["ip", "netns", "exec", NAMES[end]] if NAMES else []
        command = within + [str(word) for word in command]
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def server(self):
        return status(self.folder / "server.status")

    def host(self):
        return status(self.folder / "host.status")

    def end(self):
        for process in reversed(self.processes):
            process.terminate()
            process.wait()


def settle(daemons, cache):
    """Waits until the session is over, and the cache has everything."""
    until("the session ends", lambda: not daemons.host()["sessions"] and not daemons.server()["sessions"])
    if cache:
        before = -1
        while before != (now := daemons.server()["cache"]["bytes"]):
            before = now
            time.sleep(0.3)


def run(options, folder, way, cache):
    daemons = Daemons(options, folder, way == "local", cache)
    try:
        environment = os.environ | {"RGPU_SOCKET": str(folder / "native.sock"), "LD_LIBRARY_PATH": str(options.libraries)}
        before, began = sent_over_link(), time.monotonic()
        done = subprocess.run([options.program] + options.arguments, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - began
        if done.returncode:
            sys.exit(f"{way}: the program failed:\n{done.stdout}{done.stderr}")
        settle(daemons, cache)
        totals = daemons.host()["totals"]
        link = sent_over_link() - before if NAMES else totals["control_bytes_sent"] + totals["data_bytes_sent"]
        return seconds, link, totals["data_bytes_sent"], totals["data_bytes_known"]
    finally:
        daemons.end()


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("libraries", type=pathlib.Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--relay", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.relay:
        globals().update(HOST="127.0.0.1", SERVER="127.0.0.1", NAMES={})
    network(options.rate)
    figures = {way: [] for way in ("local", "no cache", "empty", "filled")}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        try:
            # Fills the cache, and warms up everything else.
            run(options, folder, "filling", folder / "filled")
            for turn in range(options.runs):
                for way, runs in figures.items():
                    shutil.rmtree(folder / "empty", ignore_errors=True)
                    cache = folder / way if way in ("empty", "filled") else None
                    runs.append(run(options, folder, way, cache))
                    seconds, link, data, known = runs[-1]
                    print(f"{turn + 1} {way:9} {seconds:7.3f} s {link:12} bytes on the link, data: {data:12} sent, {known:12} known", flush=True)
        finally:
            remove_network()
    print("medians:")
    for way, runs in figures.items():
        seconds, link, data, known = (statistics.median(row[column] for row in runs) for column in range(4))
        print(f"  {way:9} {seconds:7.3f} s {link:12.0f} bytes on the link, data: {data:12.0f} sent, {known:12.0f} known")


if __name__ == "__main__":
    main()
