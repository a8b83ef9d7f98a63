#!/usr/bin/env python3
"""Copies between the devices of two servers by size: from worker to worker, and through the program's machine.

    peer_copies.py DIST [--backend cuda|software] [--most MIB] [--rate RATE] [--delay TIME] [--own-devices] [--markdown] [--study FOLDER]
    peer_copies.py --draw JSON FOLDER

DIST is a folder that `cargo xtask dist` makes. Two servers run on this machine, on its first device, and so they need no second GPU; with --own-devices, the second server has the second device. A program copies from one to the other, over TCP without TLS: sizes from 4 bytes to
--most MiB (default: 1024), first one copy at a time (cuMemcpyPeer, then a synchronize), then eight one after the other on a stream (cuMemcpyPeerAsync), each several times, of which the median counts. Each result is compared. This is done once with --direct-to and
once without it, and in one process on one device for comparison; and once with one connection between the servers (RGPU_DIRECT_CONNECTIONS). The last column compares with what as many plain TCP streams carry in the same run. --rate and --delay put the two servers and the program into network namespaces of their own, joined by a bridge whose
links have that rate and delay each (`tc` with tbf, or netem if there is a delay, e.g. 10gbit and 100us; needs root). Exit status: 1 if a run fails or a byte is wrong.

--study measures more ways, and writes peer-copies.json, peer-copies-latency.svg and peer-copies-bandwidth.svg into the folder; --draw makes the two plots of such a file again. Direct copies are made with pieces of one size, one at a time and several at a time, as the
program asks for each (RGPU_DIRECT_PIECE, RGPU_DIRECT_DEPTH); with sizes that depend on the copy's, asked for ("adaptive, asked", how servers before version 2.6 of the protocol copy) and by the servers themselves ("adaptive", the default), also with one connection; and so that small copies take
the way through the program ("hybrid", RGPU_DIRECT_LEAST). Beside them: copies through the program, on one device, natively (between the first two devices of this machine, or on its only one; not with the software GPU), and the same bytes over a plain TCP connection, each answered with a byte.
"""

import argparse
import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import time

import plot

PORT, PLAIN = 9790, 9793
# Connections of a large copy, at most.
MOST_CONNECTIONS = 4
# What is set for copies, by way.
STUDY = {
    "128 KiB, one at a time": {"RGPU_DIRECT_PIECE": "131072", "RGPU_DIRECT_DEPTH": "1"},
    "1 MiB, one at a time": {"RGPU_DIRECT_PIECE": "1048576", "RGPU_DIRECT_DEPTH": "1"},
    "256 KiB, eight at a time": {"RGPU_DIRECT_PIECE": "262144", "RGPU_DIRECT_DEPTH": "8"},
    "adaptive, asked": {"RGPU_DIRECT_DEPTH": "8"},
    "adaptive": {},
    "adaptive, one connection": {"RGPU_DIRECT_CONNECTIONS": "1"},
    "hybrid": {"RGPU_DIRECT_LEAST": "65537"},
}
# Ways that are none between two servers' workers.
THROUGH, ONE_DEVICE, NATIVE, PLAIN_WAY = "through the program", "one device", "natively", "a plain TCP connection"
OTHER_WAYS = (THROUGH, ONE_DEVICE, NATIVE, PLAIN_WAY)
# A size is measured until it has taken so long, in seconds, but within these numbers of times.
ENOUGH, TIMES = 0.2, (3, 30)
NAMESPACES = {"program": "10.97.8.1", "first": "10.97.8.2", "second": "10.97.8.3"}


def repeated(work):
    """The median time of it, in seconds."""
    times = []
    while len(times) < TIMES[0] or sum(times) < ENOUGH and len(times) < TIMES[1]:
        began = time.monotonic()
        work()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def sizes(most):
    lengths = [4]
    while lengths[-1] < most:
        lengths.append(min(most, lengths[-1] * 4))
    return lengths


def program(most):
    """Copies between the first two devices; one line for each size: bytes, microseconds of one copy, GB/s of eight."""
    cuda, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t

    def check(result):
        if result:
            sys.exit(f"CUDA error {result}")

    check(cuda.cuInit(0))
    count = ctypes.c_int()
    check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    ends = []
    for ordinal in range(min(count.value, 2)):
        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        check(cuda.cuDeviceGet(ctypes.byref(device), ordinal))
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(cuda.cuCtxSetCurrent(context))
        check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size(most)))
        ends.append((context, memory))
    if len(ends) == 1:
        memory = ctypes.c_uint64()
        check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size(most)))
        ends.append((ends[0][0], memory))
    (here, source), (there, target) = ends
    check(cuda.cuCtxSetCurrent(here))
    stream = ctypes.c_void_p()
    check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    sent = os.urandom(most)
    check(cuda.cuMemcpyHtoD_v2(source, sent, size(most)))
    for length in sizes(most):
        def one():
            check(cuda.cuMemcpyPeer(target, there, source, here, size(length)))
            check(cuda.cuCtxSynchronize())

        for _ in range(2):
            one()
        check(cuda.cuCtxSetCurrent(there))
        check(cuda.cuMemsetD8_v2(target, 0, size(length)))
        check(cuda.cuCtxSynchronize())
        check(cuda.cuCtxSetCurrent(here))
        def eight():
            for _ in range(8):
                check(cuda.cuMemcpyPeerAsync(target, there, source, here, size(length), stream))
            check(cuda.cuStreamSynchronize(stream))

        latency, rate = repeated(one), 8 * length / repeated(eight) / 1e9
        came = ctypes.create_string_buffer(length)
        check(cuda.cuMemcpyDtoH_v2(came, target, size(length)))
        if came.raw != sent[:length]:
            sys.exit(f"{length} bytes came wrong")
        print(length, f"{latency * 1e6:.1f} {rate:.12f}", flush=True)


def call(text):
    subprocess.run(text, shell=True, check=True)


def network(rate, delay):
    remove_network()
    call("ip netns add rgpu-peer-switch && ip -n rgpu-peer-switch link add joint type bridge && ip -n rgpu-peer-switch link set joint up")
    for name, address in NAMESPACES.items():
        space = f"rgpu-peer-{name}"
        call(f"ip netns add {space} && ip -n {space} link set lo up")
        call(f"ip -n {space} link add eth0 type veth peer name {name} netns rgpu-peer-switch")
        call(f"ip -n rgpu-peer-switch link set {name} master joint up")
        call(f"ip -n {space} addr add {address}/24 dev eth0 && ip -n {space} link set eth0 up")
        kind = f"netem rate {rate} delay {delay} limit 100000" if delay else f"tbf rate {rate} burst 1m latency 50ms"
        call(f"tc -n {space} qdisc add dev eth0 root {kind}")


def remove_network():
    for name in (*NAMESPACES, "switch"):
        subprocess.run(["ip", "netns", "del", f"rgpu-peer-{name}"], stderr=subprocess.DEVNULL, check=False)


def receive(connections):
    """Counts what comes on plain connections: GB/s of all together."""
    with concurrent.futures.ThreadPoolExecutor(len(connections)) as threads:
        seen = list(threads.map(receive_one, connections))
    began, ended = min(one[1] for one in seen), max(one[2] for one in seen)
    return sum(one[0] for one in seen) / (ended - began) / 1e9


def receive_one(connection):
    """The number of bytes that come, and when the first and the last one do."""
    total, buffer, began = 0, bytearray(1 << 20), None
    while got := connection.recv_into(buffer):
        began = began or time.monotonic()
        total += got
    return total, began, time.monotonic()


class Place:
    """Where the program and the servers run: all on this machine's loopback, or each in its own network namespace."""

    def __init__(self, apart):
        self.apart = apart

    def address(self, name):
        return NAMESPACES[name] if self.apart else "127.0.0.1"

    def prefix(self, name):
        return ["ip", "netns", "exec", f"rgpu-peer-{name}"] if self.apart else []

    def plain(self, size):
        """What TCP streams carry from the first server's place to the second's: GB/s of `size` bytes over one and over MOST_CONNECTIONS of them; and one, as `measure`."""
        ends = [
            [*self.prefix(name), sys.executable, __file__, way, self.address("second"), str(size)]
            for name, way in (("second", "--take"), ("first", "--give"))
        ]
        with subprocess.Popen(ends[0], stdout=subprocess.PIPE, text=True) as taker:
            taker.stdout.readline()
            given = subprocess.run(ends[1], stdout=subprocess.PIPE, text=True, check=True).stdout
            return [float(taker.stdout.readline()) for _ in (1, MOST_CONNECTIONS)], figures(given)


def plain_end(way, address, size):
    if way == "--take":
        listener = socket.create_server((address, PLAIN))
        print("listening", flush=True)
        answers, _ = listener.accept()
        answers.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(1 << 20)
        while asked := answers.recv(16, socket.MSG_WAITALL):
            left = int(asked)
            while left:
                left -= answers.recv_into(buffer, min(left, len(buffer)))
            answers.sendall(b"!")
        for count in (1, MOST_CONNECTIONS):
            print(receive([listener.accept()[0] for _ in range(count)]), flush=True)
        return
    chunk = os.urandom(1 << 20)

    def give(connection, size):
        for _ in range(size >> 20):
            connection.sendall(chunk)
        connection.sendall(chunk[: size % (1 << 20)])

    with socket.create_connection((address, PLAIN)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def exchange(size):
            connection.sendall(f"{size:16}".encode())
            give(connection, size)
            connection.recv(1)

        for length in sizes(size):
            exchange(length)
            latency, rate = repeated(lambda: exchange(length)), 8 * length / repeated(lambda: exchange(8 * length)) / 1e9
            print(length, f"{latency * 1e6:.1f} {rate:.12f}")
    for count in (1, MOST_CONNECTIONS):
        connections = [socket.create_connection((address, PLAIN)) for _ in range(count)]
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda connection: give(connection, size // len(connections)), connections))
        for connection in connections:
            connection.close()


def servers(options, place, direct):
    """Two servers, each of which may connect to the other if `direct` is set."""
    running, binary = [], options.dist / "bin/rgpu-server"
    addresses = {name: f"tcp:{place.address(name)}:{PORT + i}" for i, name in enumerate(("first", "second"))}
    for name, other in (("first", "second"), ("second", "first")):
        command = [*place.prefix(name), binary, "--backend", options.backend, "--insecure", "--listen", addresses[name]]
        command += ["--direct-to", addresses[other]] if direct else []
        own = {"CUDA_VISIBLE_DEVICES": str(len(running))} if options.own_devices else {}
        running.append(subprocess.Popen(command, env=os.environ | own, stderr=subprocess.DEVNULL))
    for i, name in enumerate(addresses):
        reach = f"import socket; socket.create_connection(('{place.address(name)}', {PORT + i}))"
        for _ in range(600):
            if not subprocess.run([*place.prefix("program"), sys.executable, "-c", reach], stderr=subprocess.DEVNULL, check=False).returncode:
                break
            time.sleep(0.1)
        else:
            sys.exit(f"nothing listens at {addresses[name]}")
    return running, [word for address in addresses.values() for word in ("--server", address.removeprefix("tcp:") + "/0")]


def figures(text):
    """Bytes to (microseconds of a copy, GB/s of eight)."""
    return {int(size): (float(one), float(rate)) for size, one, rate in re.findall(r"^(\d+) ([0-9.]+) ([0-9.]+)$", text, re.M)}


def measure(options, place, way, **environment):
    """The figures of a program's copies, which take this way."""
    running, named = servers(options, place, way not in OTHER_WAYS) if way != NATIVE else ([], [])
    if way == ONE_DEVICE:
        named = named[:2]
    try:
        run = [sys.executable, __file__, "--program", str(options.most << 20)]
        if way != NATIVE:
            run = [*place.prefix("program"), options.dist / "bin/rgpuctl", "run", "--insecure", *named, "--", *run]
        done = subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=False)
    finally:
        for server in running:
            server.terminate()
        for server in running:
            server.wait()
    if done.returncode:
        print(f"{way} failed: {done.stdout[-500:]} {done.stderr[-2000:]}")
        return None
    return figures(done.stdout)


def machine(options):
    """What is known about it, for who reads the figures later."""
    said = {"cpus": os.cpu_count(), "backend": options.backend, "own_devices": options.own_devices, "rate": options.rate, "delay": options.delay}
    if options.backend == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        said["gpus"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[:-1]
    return said


def study(options, place):
    """Measures all ways. Writes what was seen even if a way has failed."""
    began = time.monotonic()
    natively = {NATIVE: {}} if options.backend == "cuda" else {}
    ways = {}
    for way, environment in {**STUDY, THROUGH: {}, ONE_DEVICE: {}, **natively}.items():
        ways[way] = measure(options, place, way, **environment)
        print(f"{time.monotonic() - began:.0f} s: {way}", flush=True)
    streams, ways[PLAIN_WAY] = place.plain(options.most << 20)
    took = time.monotonic() - began
    options.study.mkdir(parents=True, exist_ok=True)
    seen = {"machine": machine(options), "plain_streams_gb_s": dict(zip((1, MOST_CONNECTIONS), streams)), "seconds": round(took), "us_and_gb_s_by_bytes": {way: figure for way, figure in ways.items() if figure}}
    file = options.study / "peer-copies.json"
    file.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    draw(file, options.study)
    print(f"{file}: {len(ways)} ways in {took:.0f} s; 1 and {MOST_CONNECTIONS} plain TCP streams carry {streams[0]:.2f} and {streams[1]:.2f} GB/s")
    return int(None in ways.values())


def draw(file, folder):
    """Plots of a study: microseconds by bytes, and GB/s from 4 KiB on, both logarithmic."""
    ways = json.loads(file.read_text(encoding="utf-8"))["us_and_gb_s_by_bytes"]
    ways = {way: {int(size): figure for size, figure in by_size.items()} for way, by_size in ways.items()}
    names = {4: "4 B", 64: "64 B", 1 << 10: "1 KiB", 1 << 14: "16 KiB", 1 << 18: "256 KiB", 1 << 22: "4 MiB", 1 << 26: "64 MiB", 1 << 30: "1 GiB"}
    most = max(max(by_size) for by_size in ways.values())
    for name, column, label, first in (("latency", 0, "µs of one copy", 4), ("bandwidth", 1, "GB/s of eight copies", 4096)):
        ways = {way: {size: figure for size, figure in by_size.items() if size >= first} for way, by_size in ways.items()}
        values = [figure[column] for by_size in ways.values() for figure in by_size.values()]
        decades = [10.0**n for n in range(-12, 12)]
        least = max(decade for decade in decades if decade <= min(values))
        greatest = min(decade for decade in decades if decade >= max(values))
        up = plot.Axis(label, least, greatest, {decade: f"{decade:g}" for decade in decades if least <= decade <= greatest}, True)
        across = plot.Axis("bytes", first, most, {size: text for size, text in names.items() if first <= size <= most}, True)
        lines = [
            (way, color, way in OTHER_WAYS, sorted((size, figure[column]) for size, figure in by_size.items()))
            for (way, by_size), color in zip(ways.items(), plot.COLORS)
        ]
        plot.draw(folder / f"peer-copies-{name}.svg", across, up, lines)


def main():
    if sys.argv[1:2] == ["--draw"]:
        draw(*map(pathlib.Path, sys.argv[2:4]))
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("dist", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--study", type=pathlib.Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--most", type=int, help="MiB; default: 1024, with --study 64")
    parser.add_argument("--rate")
    parser.add_argument("--delay")
    parser.add_argument("--own-devices", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    options.most = options.most or (64 if options.study else 1024)
    place = Place(bool(options.rate))
    try:
        if options.rate:
            network(options.rate, options.delay)
        if options.study:
            return study(options, place)
        ways = {"direct": {}, "one connection": {"RGPU_DIRECT_CONNECTIONS": "1"}, THROUGH: {}, ONE_DEVICE: {}}
        seen = [measure(options, place, way, **environment) for way, environment in ways.items()]
        (one, several), _ = place.plain(min(options.most, 512) << 20)
    finally:
        if options.rate:
            remove_network()
    if None in seen:
        return 1
    heading = ["bytes", *(f"{way}, {unit}" for way in ways for unit in ("µs", "GB/s")), "direct / through", f"direct / {MOST_CONNECTIONS} plain", "one connection / plain"]
    rows = []
    for size in seen[0]:
        rates = [figure[size][1] for figure in seen]
        rows.append([str(size), *(f"{value:.4g}" for figure in seen for value in figure[size]), f"{rates[0] / rates[2]:.2f}", f"{rates[0] / several:.2f}", f"{rates[1] / one:.2f}"])
    print(f"one plain TCP stream: {one:.2f} GB/s, {MOST_CONNECTIONS}: {several:.2f}; rate {options.rate or 'not limited'}, delay {options.delay or 'none'}")
    if options.markdown:
        rows.insert(0, ["---"] * len(heading))
    for row in [heading, *rows]:
        print("| " + " | ".join(row) + " |" if options.markdown else "\t".join(row))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(int(sys.argv[2]))
    elif sys.argv[1:2] in (["--take"], ["--give"]):
        plain_end(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
