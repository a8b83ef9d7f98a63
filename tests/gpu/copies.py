#!/usr/bin/env python3
"""What share of a link large copies fill, compared with plain streams over the same link in the same run.

    copies.py DIST RELAY [--backend cuda|software] [--mib N] [--mbit N] [--fixed] [RTT_US...]

DIST is a folder that `cargo xtask dist` makes, RELAY the program `delay-relay` (`cargo build --release -p rgpu-tests --bin delay-relay`). For each added round-trip time [µs] (default: 0 1000 10000)
the script sends N MiB (default: 256) through the relay, over as many connections as a session has for data, as plain streams both ways; then a program copies as much to and from the device, in pinned and
in pageable memory. It prints MB/s and the share of the plain streams' rate. --mbit limits the relay's rate. --fixed keeps the windows at
their least sizes. The program compares what comes back. Exit status: 1 if a run fails.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none.
"""

import argparse
import ctypes
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

from ports import wait_for

PORTS = {"server": 9796, "relay": 9797, "sink": 9798, "plain": 9799}
CONNECTIONS = 4
ROUNDS = 5


def program(mib):
    """The program that copies: the driver API alone."""
    cuda, size = ctypes.CDLL("libcuda.so.1"), mib << 20

    def check(result):
        if result:
            sys.exit(f"CUDA error {result}")

    check(cuda.cuInit(0))
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
    for kind in ("pinned", "pageable"):
        if kind == "pinned":
            up, down = ctypes.c_void_p(), ctypes.c_void_p()
            check(cuda.cuMemHostAlloc(ctypes.byref(up), ctypes.c_size_t(size), 0))
            check(cuda.cuMemHostAlloc(ctypes.byref(down), ctypes.c_size_t(size), 0))
        else:
            buffers = [ctypes.create_string_buffer(size) for _ in range(2)]
            up, down = (ctypes.c_void_p(ctypes.addressof(buffer)) for buffer in buffers)
        ctypes.memmove(up, os.urandom(1 << 20) * mib, size)
        ctypes.memset(down, 0, size)
        for turn in range(ROUNDS + 1):
            began = time.monotonic()
            check(cuda.cuMemcpyHtoD_v2(memory, up, ctypes.c_size_t(size)))
            check(cuda.cuCtxSynchronize())
            between = time.monotonic()
            check(cuda.cuMemcpyDtoH_v2(down, memory, ctypes.c_size_t(size)))
            ended = time.monotonic()
            # The first turn is not measured: windows grow then.
            if turn:
                print(f"{kind}_up {size / (between - began) / 1e6:.1f}", flush=True)
                print(f"{kind}_down {size / (ended - between) / 1e6:.1f}", flush=True)
        if ctypes.string_at(up, size) != ctypes.string_at(down, size):
            sys.exit(f"{kind}: what came back differs")


def sink(listener):
    """Takes connections. A byte says which way the data goes: `u` is read and counted, `d` is sent."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve(connection):
    way, size = connection.recv(1), int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    if way == b"u":
        take(connection, size)
        connection.sendall(b"!")
    else:
        give(connection, size)


def take(connection, size):
    buffer = bytearray(1 << 20)
    while size > 0:
        size -= connection.recv_into(buffer, min(size, len(buffer)))


def give(connection, size):
    chunk = os.urandom(1 << 20)
    for _ in range(size >> 20):
        connection.sendall(chunk)


def plain(mib):
    """MB/s of plain streams through the relay, both ways."""
    rates = {}
    for way in ("up", "down"):
        best = 0
        for _ in range(ROUNDS):
            connections = [socket.create_connection(("127.0.0.1", PORTS["plain"])) for _ in range(CONNECTIONS)]
            each = mib // CONNECTIONS << 20

            def run(connection):
                connection.sendall(way[0].encode() + each.to_bytes(8, "little"))
                if way == "up":
                    give(connection, each)
                    connection.recv(1)
                else:
                    take(connection, each)

            threads = [threading.Thread(target=run, args=(connection,)) for connection in connections]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            best = max(best, CONNECTIONS * each / (time.monotonic() - began) / 1e6)
            for connection in connections:
                connection.close()
        rates[way] = best
    return rates


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dist", type=pathlib.Path)
    parser.add_argument("relay")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("rtt_us", type=int, nargs="*")
    options = parser.parse_intermixed_args()
    listener = socket.create_server(("127.0.0.1", PORTS["sink"]))
    threading.Thread(target=sink, args=(listener,), daemon=True).start()
    daemon = [options.dist / "bin/rgpu-server", "--backend", options.backend, "--insecure", "--listen", f"tcp:127.0.0.1:{PORTS['server']}"]
    environment = dict(os.environ)
    if options.fixed:
        daemon += ["--ahead-memory", "16M"]
        environment["RGPU_ARENA_MOST_MIB"] = "0"
    server = subprocess.Popen(daemon, stderr=subprocess.DEVNULL)
    failed = False
    try:
        wait_for(PORTS["server"])
        print(f"{'RTT [ms]':>9}{'way':>16}{'plain [MB/s]':>14}{'copy [MB/s]':>13}{'share':>8}")
        for delay in options.rtt_us or [0, 1000, 10000]:
            relays = []
            for here, there in (("relay", "server"), ("plain", "sink")):
                ends = ["--listen", f"127.0.0.1:{PORTS[here]}", "--to", f"127.0.0.1:{PORTS[there]}"]
                line = ["--rtt-us", str(delay), "--mbit", str(options.mbit)]
                relays.append(subprocess.Popen([options.relay, *ends, *line]))
                wait_for(PORTS[here])
            streams = plain(options.mib)
            run = [options.dist / "bin/rgpuctl", "run", "--insecure", "--server", f"127.0.0.1:{PORTS['relay']}", "--"]
            run += [sys.executable, __file__, "--program", str(options.mib)]
            done = subprocess.run(run, env=environment, capture_output=True, text=True)
            for relay in relays:
                relay.kill()
                relay.wait()
            if done.returncode:
                print(f"failed at {delay} µs: {done.stderr[-2000:]}")
                failed = True
                continue
            best = {}
            for name, rate in re.findall(r"^(\w+) ([0-9.]+)$", done.stdout, re.M):
                best[name] = max(best.get(name, 0), float(rate))
            for name, rate in best.items():
                whole = streams[name.rsplit("_")[1]]
                print(f"{delay / 1000:9g}{name:>16}{whole:14.0f}{rate:13.0f}{rate / whole:8.2f}", flush=True)
    finally:
        server.terminate()
        server.wait()
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(int(sys.argv[2]))
    else:
        sys.exit(main())
