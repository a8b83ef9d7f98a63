#!/usr/bin/env python3
"""Copies between the devices of two servers by size: from worker to worker, and through the program's machine.

    peer_copies.py DIST [--backend cuda|software] [--most MIB] [--rate RATE] [--delay TIME] [--own-devices] [--markdown]

DIST is a folder that `cargo xtask dist` makes. Two servers run on this machine, on its first device, and so they need no second GPU; with --own-devices, the second server has the second device. A program copies from one to the other, over TCP without TLS: sizes from 4 bytes to
--most MiB (default: 1024), first one copy at a time (cuMemcpyPeer, then a synchronize; median), then eight one after the other on a stream (cuMemcpyPeerAsync). Each result is compared. This is done once with --direct-to and
once without it, and in one process on one device for comparison. The last column is what one plain TCP stream carries in the same run. --rate and --delay put the two servers and the program into network namespaces of their own, joined by a bridge whose
links have that rate and delay each (`tc` with tbf, or netem if there is a delay, e.g. 10gbit and 100us; needs root). Exit status: 1 if a run fails or a byte is wrong.
"""

import argparse
import ctypes
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

PORT, PLAIN = 9790, 9793
NAMESPACES = {"program": "10.97.8.1", "first": "10.97.8.2", "second": "10.97.8.3"}


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
    lengths = [4]
    while lengths[-1] < most:
        lengths.append(min(most, lengths[-1] * 4))
    for length in lengths:
        def one():
            check(cuda.cuMemcpyPeer(target, there, source, here, size(length)))
            check(cuda.cuCtxSynchronize())

        for _ in range(2):
            one()
        check(cuda.cuCtxSetCurrent(there))
        check(cuda.cuMemsetD8_v2(target, 0, size(length)))
        check(cuda.cuCtxSynchronize())
        check(cuda.cuCtxSetCurrent(here))
        times = []
        for _ in range(30 if length <= 1 << 20 else 3):
            began = time.monotonic()
            one()
            times.append(time.monotonic() - began)
        began = time.monotonic()
        for _ in range(8):
            check(cuda.cuMemcpyPeerAsync(target, there, source, here, size(length), stream))
        check(cuda.cuStreamSynchronize(stream))
        rate = 8 * length / (time.monotonic() - began) / 1e9
        came = ctypes.create_string_buffer(length)
        check(cuda.cuMemcpyDtoH_v2(came, target, size(length)))
        if came.raw != sent[:length]:
            sys.exit(f"{length} bytes came wrong")
        print(length, f"{statistics.median(times) * 1e6:.1f} {rate:.7f}", flush=True)


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


def receive(connection):
    """Counts what comes on a plain connection, and says how long it took."""
    total, buffer, began = 0, bytearray(1 << 20), None
    while got := connection.recv_into(buffer):
        began = began or time.monotonic()
        total += got
    return total / (time.monotonic() - began) / 1e9


class Place:
    """Where the program and the servers run: all on this machine's loopback, or each in its own network namespace."""

    def __init__(self, apart):
        self.apart = apart

    def address(self, name):
        return NAMESPACES[name] if self.apart else "127.0.0.1"

    def prefix(self, name):
        return ["ip", "netns", "exec", f"rgpu-peer-{name}"] if self.apart else []

    def plain(self, size):
        """GB/s of one TCP stream from the first server's place to the second's."""
        ends = [
            [*self.prefix(name), sys.executable, __file__, way, self.address("second"), str(size)]
            for name, way in (("second", "--take"), ("first", "--give"))
        ]
        with subprocess.Popen(ends[0], stdout=subprocess.PIPE, text=True) as taker:
            taker.stdout.readline()
            subprocess.run(ends[1], check=True)
            return float(taker.stdout.readline())


def plain_end(way, address, size):
    if way == "--take":
        listener = socket.create_server((address, PLAIN))
        print("listening", flush=True)
        print(receive(listener.accept()[0]))
        return
    with socket.create_connection((address, PLAIN)) as connection:
        chunk = os.urandom(1 << 20)
        for _ in range(size >> 20):
            connection.sendall(chunk)


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


def measure(options, place, way):
    """Bytes to (microseconds of a copy, GB/s of eight)."""
    running, named = servers(options, place, way == "direct")
    if way == "one device":
        named = named[:2]
    try:
        run = [*place.prefix("program"), options.dist / "bin/rgpuctl", "run", "--insecure", *named, "--", sys.executable, __file__, "--program", str(options.most << 20)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
    finally:
        for server in running:
            server.terminate()
        for server in running:
            server.wait()
    if done.returncode:
        print(f"{way} failed: {done.stdout[-500:]} {done.stderr[-2000:]}")
        return None
    return {int(size): (float(one), float(rate)) for size, one, rate in re.findall(r"^(\d+) ([0-9.]+) ([0-9.]+)$", done.stdout, re.M)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dist", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--most", type=int, default=1024)
    parser.add_argument("--rate")
    parser.add_argument("--delay")
    parser.add_argument("--own-devices", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    place = Place(bool(options.rate))
    try:
        if options.rate:
            network(options.rate, options.delay)
        ways = ("direct", "through the program", "one device")
        figures = [measure(options, place, way) for way in ways]
        plain = place.plain(min(options.most, 512) << 20)
    finally:
        if options.rate:
            remove_network()
    if None in figures:
        return 1
    heading = ["bytes", *(f"{way}, {unit}" for way in ways for unit in ("µs", "GB/s")), "direct / through", "direct / plain"]
    rows = []
    for size in figures[0]:
        rates = [figure[size][1] for figure in figures]
        rows.append([str(size), *(f"{value:.4g}" for figure in figures for value in figure[size]), f"{rates[0] / rates[1]:.2f}", f"{rates[0] / plain:.2f}"])
    print(f"a plain TCP stream: {plain:.2f} GB/s; rate {options.rate or 'not limited'}, delay {options.delay or 'none'}")
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
