#!/usr/bin/env python3
"""Device memory beyond what the device has: sessions that work in turn, through rgpu and with CUDA's managed memory natively.

    swap.py DIST [--backend cuda|software] [--limit-mib N] [--percent N] [--sessions N] [--rounds N] [--host-mib N] [--folder FOLDER] [--created [whole|twice]] [--busy SECONDS] [--native]

DIST is a folder that `cargo xtask dist` makes. The server lets its sessions use --limit-mib of the device at a time (default: 30720), and each of --sessions programs (default: 4) allocates --percent of that
(default: 60). They take turns, --rounds each (default: 4). In its turn a program launches a first small kernel, then one that checks and changes all of its memory. The script prints, for each turn, the milliseconds until the
first launch was done and for the whole turn, and at the end GB/s each way while memory moved, as the workers measured it, and the sessions' own memory in GB. The first round is not in the summary: programs
allocate then, and memory of the server's machine is page-locked for the first time.

With --busy, the programs do not take turns: each works for so many seconds without a rest, and the script prints how often each went through its memory. With --created, the programs' memory is that of cuMemCreate: mapped once as a whole, as PyTorch's expandable segments are; or at two addresses, which take turns, too. --native runs the same programs afterwards without rgpu with managed memory, while another program holds all of the device but --limit-mib: by default they have 2.4 times as much managed memory as is free, which can hang a GPU that others use, too; with --busy they take turns. --folder moves what does not fit into --host-mib (default: that of all sessions and a bit)
to files there. Exit status: 1 if a program found wrong data or failed.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none.
"""

import argparse
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

PTX = b"""
.version 7.8
.target sm_80
.address_size 64
.visible .entry step(.param .u64 memory, .param .u64 count, .param .u32 expected, .param .u32 next, .param .u64 wrong)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %d<8>;
    ld.param.u64 %d1, [memory];
    ld.param.u64 %d2, [count];
    ld.param.u32 %r1, [expected];
    ld.param.u32 %r2, [next];
    ld.param.u64 %d3, [wrong];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mov.u32 %r6, %nctaid.x;
    mul.wide.u32 %d4, %r3, %r4;
    cvt.u64.u32 %d5, %r5;
    add.u64 %d4, %d4, %d5;
    mul.wide.u32 %d5, %r6, %r4;
AGAIN:
    setp.ge.u64 %p1, %d4, %d2;
    @%p1 bra DONE;
    shl.b64 %d6, %d4, 2;
    add.u64 %d6, %d1, %d6;
    cvt.u32.u64 %r7, %d4;
    mul.lo.u32 %r7, %r7, 2654435761;
    add.u32 %r8, %r7, %r1;
    ld.global.u32 %r9, [%d6];
    setp.eq.u32 %p2, %r8, %r9;
    @%p2 bra RIGHT;
    atom.global.add.u32 %r10, [%d3], 1;
RIGHT:
    add.u32 %r8, %r7, %r2;
    st.global.u32 [%d6], %r8;
    add.u64 %d4, %d4, %d5;
    bra AGAIN;
DONE:
    ret;
}
\0"""
PIECE = 1 << 30


class Program:
    """A program that takes turns: it reads lines from its standard input, and answers each with one."""

    def __init__(self, size, kind):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.call("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"step")
        self.wrong = self.allocate(4, "allocated")
        self.call("cuMemsetD32_v2", self.wrong, 0, ctypes.c_size_t(1))
        self.pieces = []
        while size > 0:
            piece = min(size, PIECE)
            addresses = self.create(piece, 2) if kind == "twice" else [self.allocate(piece, kind)]
            self.pieces.append((addresses, piece // 4))
            size -= piece

    def call(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result:
            sys.exit(f"{name}: CUDA error {result}")

    def allocate(self, size, kind):
        """`kind` is one of "allocated", "whole" and "managed"."""
        at = ctypes.c_uint64()
        if kind == "managed":
            self.call("cuMemAllocManaged", ctypes.byref(at), ctypes.c_size_t(size), 1)
        elif kind == "whole":
            at = self.create(size, 1)[0]
        else:
            self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at

    def create(self, size, times):
        """Memory of cuMemCreate that is mapped at so many addresses; these."""
        # CUmemAllocationProp: pinned memory of device 0. CUmemAccessDesc: device 0 may read and write.
        properties, access = (ctypes.c_uint32 * 8)(1, 0, 1, 0), (ctypes.c_uint32 * 3)(1, 0, 3)
        granularity, handle, addresses = ctypes.c_size_t(), ctypes.c_uint64(), []
        self.call("cuMemGetAllocationGranularity", ctypes.byref(granularity), properties, 0)
        size = ctypes.c_size_t(-(-size // granularity.value) * granularity.value)
        self.call("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        for _ in range(times):
            at = ctypes.c_uint64()
            self.call("cuMemAddressReserve", ctypes.byref(at), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
            self.call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            self.call("cuMemSetAccess", at, size, access, ctypes.c_size_t(1))
            addresses.append(at)
        return addresses

    def launch(self, memory, count, expected, following, blocks):
        values = [memory, ctypes.c_uint64(count), ctypes.c_uint32(expected), ctypes.c_uint32(following), self.wrong]
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", self.kernel, blocks, 1, 1, 256, 1, 1, 0, None, parameters, None)

    def wrong_words(self):
        wrong = ctypes.c_uint32()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(wrong), self.wrong, ctypes.c_size_t(4))
        return wrong.value

    def turn(self, seed, number):
        began = time.monotonic()
        if number == 0:
            # What is in new memory is not known.
            self.launch(self.pieces[0][0][0], 1, seed, seed, 1)
        else:
            self.launch(self.pieces[0][0][0], 1, seed + number - 1, seed + number - 1, 1)
        self.call("cuCtxSynchronize")
        first = time.monotonic() - began
        for addresses, count in self.pieces:
            self.launch(addresses[number % len(addresses)], count, seed + number - 1, seed + number, 2048)
        self.call("cuCtxSynchronize")
        whole = time.monotonic() - began
        if number == 0:
            self.call("cuMemsetD32_v2", self.wrong, 0, ctypes.c_size_t(1))
        return {"first_ms": first * 1e3, "whole_ms": whole * 1e3, "wrong": self.wrong_words()}


def program(size, seed, kind):
    running = Program(size, kind)
    for line in sys.stdin:
        print(json.dumps(running.turn(seed, int(line))), flush=True)


def busy(size, seed, kind, seconds):
    running = Program(size, kind)
    ends = [time.monotonic()]
    while ends[-1] - ends[0] < seconds:
        result = running.turn(seed, len(ends) - 1)
        if result["wrong"]:
            sys.exit(f"{result['wrong']} words are wrong in turn {len(ends) - 1}")
        ends.append(time.monotonic())
    waits = [later - one for one, later in zip(ends, ends[1:]) if later - one > 1]
    print(f"{len(ends) - 1} times through its memory in {ends[-1] - ends[0]:.1f} s; {len(waits)} times it took more than 1 s, {max(waits, default=0):.1f} s at most", flush=True)


def ballast(left):
    """Holds the device's memory but for so many bytes."""
    holder = Program(4, "allocated")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    holder.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    while free.value > left + (64 << 20):
        holder.allocate(min(PIECE, free.value - left), "allocated")
        holder.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    print("held", flush=True)
    sys.stdin.read()


def start(command, environment=None):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(child, line):
    child.stdin.write(line + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        raise RuntimeError(f"a program failed with exit status {child.wait()}")
    return answer


def take_turns(name, commands, rounds):
    """Whether all programs found what they had written."""
    children, firsts, wholes, right = [], [], [], True
    try:
        for number in range(rounds):
            for which, command in enumerate(commands):
                if number == 0:
                    children.append(start(command))
                child = children[which]
                result = json.loads(ask(child, str(number)))
                print(f"{name} round {number} session {which}: first launch {result['first_ms']:.1f} ms, whole turn {result['whole_ms']:.0f} ms, wrong words {result['wrong']}", flush=True)
                right &= result["wrong"] == 0
                if number:
                    firsts.append(result["first_ms"])
                    wholes.append(result["whole_ms"])
        if firsts:
            print(f"{name}: first launch {statistics.median(firsts):.0f} ms median, {max(firsts):.0f} ms at most; whole turn {statistics.median(wholes):.0f} ms median, {max(wholes):.0f} ms at most")
    except RuntimeError as failed:
        print(f"{name}: {failed}")
        right = False
    finally:
        for child in children:
            child.stdin.close()
            child.wait()
    return right


def all_busy(commands, seconds):
    """Whether all programs found what they had written, and all got on."""
    children = [start([*command, str(seconds)]) for command in commands]
    right = True
    for which, child in enumerate(children):
        said, _ = child.communicate()
        print(f"busy session {which}: {said.strip()}", flush=True)
        right &= child.returncode == 0 and int(said.split()[0]) > 1
    return right


def moves(log, size):
    """What the workers measured, from their log."""
    for way, what in (("out", "moved device memory to this machine"), ("back", "moved device memory back")):
        # The first move of each session makes the store's pages.
        found = [(int(of), int(ms)) for of, ms in re.findall(what + r".*?bytes=(\d+).*?ms=(\d+)", log) if int(of) >= size // 2]
        rates = sorted(of / 1e6 / max(ms, 1) for of, ms in found)
        if rates:
            print(f"moved {way}: {len(rates)} times, {statistics.median(rates):.1f} GB/s median, {rates[0]:.1f} least, {rates[-1]:.1f} most")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dist", type=pathlib.Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--limit-mib", type=int, default=30720)
    parser.add_argument("--percent", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--host-mib", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--created", nargs="?", const="whole", choices=("whole", "twice"))
    parser.add_argument("--busy", type=float)
    parser.add_argument("--native", action="store_true")
    options = parser.parse_args()
    size = options.limit_mib * options.percent // 100 << 20
    host = options.host_mib or (size >> 20) * options.sessions + 1024
    arguments = [[sys.executable, __file__, "--program", str(size), str(1000 * which)] for which in range(options.sessions)]
    print(f"{options.sessions} sessions with {size / 1e9:.1f} GB each on {options.limit_mib} MiB of the device; {host} MiB of the machine's memory", flush=True)
    right = True
    with tempfile.TemporaryDirectory() as folder:
        socket_path, log_path = pathlib.Path(folder) / "server.sock", pathlib.Path(os.environ.get("OUT", folder)) / "swap-server.log"
        daemon = [options.dist / "bin/rgpu-server", "--backend", options.backend, "--listen", f"unix:{socket_path}", "--status-socket", f"{folder}/status"]
        daemon += [f"--swap-memory={host}M", f"--swap-device-memory={options.limit_mib}M", f"--worker-memory={2 * host}M", "--swap-residency-ms=100"]
        daemon += [f"--swap-folder={options.folder}"] if options.folder else []
        daemon += [f"--software-memory={options.limit_mib}M"] if options.backend == "software" else []
        with open(log_path, "w", encoding="utf-8") as log:
            server = subprocess.Popen(daemon, stderr=log)
        try:
            for _ in range(600):
                if pathlib.Path(f"{folder}/status").exists():
                    break
                time.sleep(0.1)
            run = [options.dist / "bin/rgpuctl", "run", "--server", f"unix:{socket_path}", "--"]
            kind = options.created or "allocated"
            commands = [[*run, *command, kind] for command in arguments]
            right &= all_busy(commands, options.busy) if options.busy else take_turns("rgpu", commands, options.rounds)
            with socket.socket(socket.AF_UNIX) as status:
                status.connect(f"{folder}/status")
                print(f"status: {json.load(status.makefile())['swap']}")
        finally:
            server.terminate()
            server.wait()
        log = re.sub(r"\x1b\[[0-9;]*m", "", log_path.read_text(encoding="utf-8"))
        moves(log, size)
        if not right:
            print(log[-3000:])
    if options.native:
        holder = start([sys.executable, __file__, "--ballast", str(options.limit_mib << 20)])
        if holder.stdout.readline().strip() != "held":
            print("the rest of the device could not be held")
            return 1
        right &= take_turns("managed", [[*command, "managed"] for command in arguments], options.rounds)
        holder.stdin.close()
        holder.wait()
    return not right


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        size, seed, kind = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        busy(size, seed, kind, float(sys.argv[5])) if sys.argv[5:] else program(size, seed, kind)
    elif sys.argv[1:2] == ["--ballast"]:
        ballast(int(sys.argv[2]))
    else:
        sys.exit(main())
