#!/usr/bin/env python3
"""Copies between the devices of two servers by size: from worker to worker, and through the program's machine.

    peer_copies.py DIST [--backend cuda|software] [--most MIB] [--rate RATE] [--delay TIME] [--own-devices] [--tls] [--both] [--markdown] [--study FOLDER]
    peer_copies.py --draw JSON FOLDER

DIST is a folder that `cargo xtask dist` makes. Two servers run on this machine, on its first device, and so they need no second GPU; with --own-devices, the second server has the second device. A program copies from one to the other, over TCP without TLS: sizes from 4 bytes to
--most MiB (default: 1024), first one copy at a time (cuMemcpyPeer, then a synchronize), then eight one after the other on a stream (cuMemcpyPeerAsync), each several times, of which the median counts. Each result is compared. This is done once with --direct-to and
once without it, and in one process on one device for comparison; and once with one connection between the servers (RGPU_DIRECT_CONNECTIONS). The last columns compare with what as many plain TCP streams carry in the same run. --rate and --delay put the two servers and the program into network namespaces of their own, joined by a bridge whose
links have that rate and delay each (`tc` with tbf, or netem if there is a delay, e.g. 10gbit and 100us; needs root). Exit status: 1 if a run fails, if a byte is wrong, or if servers that should copy directly have made no connection for it.

--tls measures direct copies and those through the program once more, with servers and a client that have keys of their own, which end with the run: the client has joined both servers, and all connections use TLS, but not the plain TCP streams.
--both makes a second table. "Both at once" are eight copies each way at the same time, on a stream of each device; GB/s of both ways together, compared with as many plain TCP streams each way at the same time. "A ring" is eight copies that each wait for the one before: the first goes from the first device to the second, the
next takes what came from there back to another place of the first, and so on, each on a stream of the device that it comes from, which waits for an event of the other's; microseconds of one of them and GB/s. Each result is compared here, too. The program takes ten times --most of device memory then.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none. --study is without --tls and --both.

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
import tempfile
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
# What the names of ways over TLS end with.
TLS = ", TLS"
# What a server logs of each direct connection that it makes.
CONNECTED = "a direct connection to another server is open"
# Copies of a ring.
HOPS = 8
# What plain streams carry, again and again.
CHUNK = os.urandom(1 << 20)
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


class End:
    """A device, with a stream and places of so many bytes in its memory. The first one may have what is copied."""

    def __init__(self, cuda, ordinal, places, most):
        self.cuda, self.kept = cuda, 0
        device, self.context, self.stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        cuda.call("cuDeviceGet", ctypes.byref(device), ordinal)
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.use()
        cuda.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.places = [ctypes.c_uint64() for _ in range(places)]
        for place in self.places:
            cuda.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(most))

    def use(self):
        self.cuda.call("cuCtxSetCurrent", self.context)

    def wait(self):
        self.use()
        self.cuda.call("cuStreamSynchronize", self.stream)

    def fill(self, data):
        self.kept = 1
        self.use()
        self.cuda.call("cuMemcpyHtoD_v2", self.places[0], data, ctypes.c_size_t(len(data)))

    def clear(self, length):
        """Clears so many bytes of each place but the one that was filled."""
        self.use()
        for place in self.places[self.kept :]:
            self.cuda.call("cuMemsetD8_v2", place, 0, ctypes.c_size_t(length))
        self.cuda.call("cuCtxSynchronize")

    def compare(self, place, expected):
        came = ctypes.create_string_buffer(len(expected))
        self.use()
        self.cuda.call("cuMemcpyDtoH_v2", came, self.places[place], ctypes.c_size_t(len(expected)))
        if came.raw != expected:
            sys.exit(f"{len(expected)} bytes came wrong")


class Cuda:
    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name, *arguments):
        result = getattr(self.library, name)(*arguments)
        if result:
            sys.exit(f"{name}: CUDA error {result}")


def program(most, both):
    """Copies between the first two devices; one line for each size: bytes, microseconds of one copy, GB/s of eight. With `both`, also GB/s of eight each way, microseconds of a ring's copy, and a ring's GB/s."""
    cuda, count, size = Cuda(), ctypes.c_int(), ctypes.c_size_t
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    ends = [End(cuda, min(ordinal, count.value - 1), 1 + HOPS // 2 if both else 1, most) for ordinal in range(2)]
    sent = [os.urandom(most) for _ in range(1 + both)]
    for end, data in zip(ends, sent):
        end.fill(data)
    first, second = ends
    events = []
    for hop in range(HOPS):
        ends[hop % 2].use()
        events.append(ctypes.c_void_p())
        cuda.call("cuEventCreate", ctypes.byref(events[hop]), 2)
    for length in sizes(most):
        def copy(here, source, there, target):
            cuda.call("cuMemcpyPeerAsync", there.places[target], there.context, here.places[source], here.context, size(length), here.stream)

        def one():
            cuda.call("cuMemcpyPeer", second.places[-1], second.context, first.places[0], first.context, size(length))
            cuda.call("cuCtxSynchronize")

        def eight():
            for _ in range(8):
                copy(first, 0, second, -1)
            first.wait()

        def both_at_once():
            for _ in range(8):
                for here, there in ((first, second), (second, first)):
                    here.use()
                    copy(here, 0, there, -1)
            first.wait()
            second.wait()

        def ring():
            for hop, event in enumerate(events):
                here, there = ends[hop % 2], ends[1 - hop % 2]
                here.use()
                copy(here, (hop + 1) // 2, there, hop // 2 + 1)
                cuda.call("cuEventRecord", event, here.stream)
                there.use()
                cuda.call("cuStreamWaitEvent", there.stream, event, 0)
            first.wait()

        def clear():
            for end in ends:
                end.clear(length)
            first.use()

        first.use()
        for _ in range(2):
            one()
        clear()
        seen = [repeated(one) * 1e6, 8 * length / repeated(eight) / 1e9]
        second.compare(-1, sent[0][:length])
        if both:
            clear()
            seen.append(16 * length / repeated(both_at_once) / 1e9)
            for end, data in zip(ends, reversed(sent)):
                end.compare(-1, data[:length])
            clear()
            # If a copy did not wait for the one before, what arrives is not what was sent.
            ring()
            first.compare(-1, sent[0][:length])
            hop = repeated(ring) / HOPS
            seen += [hop * 1e6, length / hop / 1e9]
        print(length, *(f"{value:.6g}" for value in seen), flush=True)


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
        """What TCP streams carry from the first server's place to the second's: GB/s of `size` bytes over one, over MOST_CONNECTIONS, and over so many each way at the same time, together; and one, as `measure`."""
        ends = [
            [*self.prefix(name), sys.executable, __file__, way, self.address("second"), str(size)]
            for name, way in (("second", "--take"), ("first", "--give"))
        ]
        with subprocess.Popen(ends[0], stdout=subprocess.PIPE, text=True) as taker:
            taker.stdout.readline()
            given = subprocess.run(ends[1], stdout=subprocess.PIPE, text=True, check=True).stdout
            one, several, there = (float(taker.stdout.readline()) for _ in range(3))
            return [one, several, there + float(given.split()[-1])], figures(given)


def give(connection, size):
    for _ in range(size >> 20):
        connection.sendall(CHUNK)
    connection.sendall(CHUNK[: size % (1 << 20)])


def give_all(connections, size):
    """So many bytes over all of them together, which end then."""
    with concurrent.futures.ThreadPoolExecutor(len(connections)) as threads:
        list(threads.map(lambda connection: give(connection, size // len(connections)), connections))
    for connection in connections:
        connection.shutdown(socket.SHUT_WR)


def both_ways(connections, gives, takes, size):
    """Gives and takes at the same time: GB/s of what comes."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        given = thread.submit(give_all, connections[gives], size)
        rate = receive(connections[takes])
        given.result()
    return rate


def plain_end(way, address, size):
    halves = slice(0, MOST_CONNECTIONS), slice(MOST_CONNECTIONS, None)
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
        print(both_ways([listener.accept()[0] for _ in range(2 * MOST_CONNECTIONS)], halves[1], halves[0], size), flush=True)
        return
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
        give_all([socket.create_connection((address, PLAIN)) for _ in range(count)], size)
    print(both_ways([socket.create_connection((address, PLAIN)) for _ in range(2 * MOST_CONNECTIONS)], halves[0], halves[1], size))


def succeed(command):
    """What the command says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed: {done.stderr}")
    return done.stdout


def servers(options, place, direct, folder, tls):
    """Two servers, each of which may connect to the other if `direct` is set, and rgpuctl's options for using both."""
    running, binaries = [], options.dist / "bin"
    addresses = {name: f"{place.address(name)}:{PORT + i}" for i, name in enumerate(("first", "second"))}
    for name, other in (("first", "second"), ("second", "first")):
        command = [*place.prefix(name), binaries / "rgpu-server", "--backend", options.backend, "--listen", f"tcp:{addresses[name]}"]
        command += ["--direct-to", f"tcp:{addresses[other]}"] if direct else []
        command += ["--identity", folder / name, "--admin-socket", folder / f"{name}.admin"] if tls else ["--insecure"]
        own = {"CUDA_VISIBLE_DEVICES": str(len(running))} if options.own_devices else {}
        with open(folder / f"{name}.log", "wb") as log:
            running.append(subprocess.Popen(command, env=os.environ | own, stderr=log))
    for i, name in enumerate(addresses):
        reach = f"import socket; socket.create_connection(('{place.address(name)}', {PORT + i}))"
        for _ in range(600):
            if not subprocess.run([*place.prefix("program"), sys.executable, "-c", reach], stderr=subprocess.DEVNULL, check=False).returncode:
                break
            time.sleep(0.1)
        else:
            sys.exit(f"nothing listens at {addresses[name]}")
        if tls:
            enroll = [binaries / "rgpuctl", "enroll", "program", "--socket", folder / f"{name}.admin", "--address", addresses[name]]
            token = succeed(enroll).split()[-1]
            succeed([*place.prefix("program"), binaries / "rgpuctl", "join", "--identity", folder / "program", token])
    named = [word for address in addresses.values() for word in ("--server", f"{address}/0")]
    return running, named, ["--identity", folder / "program"] if tls else ["--insecure"]


def figures(text):
    """Bytes to what was measured: microseconds of a copy, GB/s of eight, and what else the line has."""
    return {int(size): [float(value) for value in rest.split()] for size, rest in re.findall(r"^(\d+)((?: [0-9.e+-]+)+)$", text, re.M)}


def measure(options, place, way, **environment):
    """The figures of a program's copies, which take this way."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_in(pathlib.Path(folder), options, place, way, environment)


def measure_in(folder, options, place, way, environment):
    tls, direct = way.endswith(TLS), way.removesuffix(TLS) not in OTHER_WAYS
    running, named, secured = servers(options, place, direct, folder, tls) if way != NATIVE else ([], [], [])
    if way == ONE_DEVICE:
        named = named[:2]
    try:
        run = [sys.executable, __file__, "--both" if options.both else "--program", str(options.most << 20)]
        if way != NATIVE:
            run = [*place.prefix("program"), options.dist / "bin/rgpuctl", "run", *secured, *named, "--", *run]
        done = subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=False)
    finally:
        for server in running:
            server.terminate()
        for server in running:
            server.wait()
    logs = [log.read_text(encoding="utf-8") for log in sorted(folder.glob("*.log"))]
    if done.returncode or direct and any(CONNECTED not in log for log in logs[: 1 + options.both]):
        print(f"{way} failed: {done.stdout[-500:]} {done.stderr[-2000:]}", *(log[-2000:] for log in logs), sep="\n")
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
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.study and (options.tls or options.both):
        parser.error("--study is without --tls and --both")
    options.most = options.most or (64 if options.study else 1024)
    place = Place(bool(options.rate))
    try:
        if options.rate:
            network(options.rate, options.delay)
        if options.study:
            return study(options, place)
        ways = {"direct": {}, "one connection": {"RGPU_DIRECT_CONNECTIONS": "1"}, THROUGH: {}, ONE_DEVICE: {}}
        ways |= {f"direct{TLS}": {}, THROUGH + TLS: {}} if options.tls else {}
        seen = {way: measure(options, place, way, **environment) for way, environment in ways.items()}
        (one, several, each_way), _ = place.plain(min(options.most, 512) << 20)
    finally:
        if options.rate:
            remove_network()
    if None in seen.values():
        return 1
    print(f"one plain TCP stream: {one:.2f} GB/s, {MOST_CONNECTIONS}: {several:.2f}, {MOST_CONNECTIONS} each way: {each_way:.2f}; rate {options.rate or 'not limited'}, delay {options.delay or 'none'}")
    shares = {"direct / through": ("direct", THROUGH), f"direct / {MOST_CONNECTIONS} plain": ("direct", several), "one connection / plain": ("one connection", one)}
    if options.tls:
        secured = f"direct{TLS}"
        shares |= {f"{secured} / through{TLS}": (secured, THROUGH + TLS), f"{secured} / {MOST_CONNECTIONS} plain": (secured, several), f"{secured} / direct": (secured, "direct")}
    table(options, seen, {"µs": 0, "GB/s": 1}, 1, shares)
    if options.both:
        del shares["one connection / plain"]
        shares = {name: (way, each_way if other == several else other) for name, (way, other) in shares.items()}
        shares = {name.replace("plain", "plain each way"): share for name, share in shares.items()}
        print()
        table(options, seen, {"both at once, GB/s": 2, "a ring, µs": 3, "a ring, GB/s": 4}, 2, shares)
    return 0


def table(options, seen, columns, compared, shares):
    """Prints these columns of all ways by size; and shares: column `compared` of a way by that of another, or by so many GB/s."""
    heading = ["bytes", *(f"{way}, {column}" for way in seen for column in columns), *shares]
    rows = [["---"] * len(heading)] if options.markdown else []
    for size in seen["direct"]:
        row = [str(size), *(f"{figure[size][column]:.4g}" for figure in seen.values() for column in columns.values())]
        for way, other in shares.values():
            row.append(f"{seen[way][size][compared] / (seen[other][size][compared] if other in seen else other):.2f}")
        rows.append(row)
    for row in [heading, *rows]:
        print("| " + " | ".join(row) + " |" if options.markdown else "\t".join(row))


if __name__ == "__main__":
    if sys.argv[1:2] in (["--program"], ["--both"]):
        program(int(sys.argv[2]), sys.argv[1] == "--both")
    elif sys.argv[1:2] in (["--take"], ["--give"]):
        plain_end(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
