#!/usr/bin/env python3
"""NVIDIA's CUDA samples natively and through rgpu, six at a time: the same exit status and the same words.

    samples.py DIST SAMPLES [NAME...]

DIST is a folder that `cargo xtask dist` makes, SAMPLES a checkout of github.com/NVIDIA/cuda-samples. Each sample (those of NAME, or all that can be built without graphics) is built for this machine's GPU with cmake and nvcc, and run
natively, over `local` and over `tcp`. Numbers, which are mostly times, and the order of lines do not count. It prints a line for each sample that differs; what all of them said is in $OUT/samples.log, or in a temporary folder. Exit
status: how many differ.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

TOGETHER, LIMIT = 6, 60
PORT = 9780
WAYS = ("native", "local", "tcp")


def call(command, folder=None, limit=LIMIT):
    """Exit status, output and errors. A command that takes too long has the status 124."""
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit, check=False)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace"), (late.stderr or b"").decode(errors="replace")


def is_program(path):
    return path.is_file() and os.access(path, os.X_OK) and "CMakeFiles" not in path.parts and ".so" not in path.name and path.open("rb").read(4) == b"\x7fELF"


def build(sample, build_folder):
    """The programs of a sample: (name, path, folder to run in)."""
    lists = sample / "CMakeLists.txt"
    lists.write_text(re.sub(r"set\(CMAKE_CUDA_ARCHITECTURES.*?\)", "set(CMAKE_CUDA_ARCHITECTURES native)", lists.read_text()))
    folder = build_folder / sample.name
    call(["cmake", "-S", sample, "-B", folder, "-DCMAKE_BUILD_TYPE=Release"], limit=300)
    call(["cmake", "--build", folder, "-j2"], limit=600)
    # Device code that a sample loads from a file is looked for where the sample runs.
    for path in folder.rglob("*"):
        if path.suffix in (".ptx", ".fatbin", ".cubin"):
            shutil.copy(path, sample)
    return [(path.name, path, sample) for path in folder.rglob("*") if is_program(path)]


def words(text):
    text = re.sub(r"0x[0-9a-fA-F]+|[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?", "#", text)
    return sorted(" ".join(line.split()) for line in text.splitlines() if line.strip())


def main():
    dist, samples, names = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve(), sys.argv[3:]
    out = pathlib.Path(os.environ.get("OUT") or tempfile.mkdtemp())
    work = pathlib.Path(tempfile.mkdtemp())
    rgpuctl, local = dist / "bin/rgpuctl", f"unix:{work}/server"
    folders = sorted(path.parent for path in samples.glob("Samples/*/*/CMakeLists.txt") if not names or path.parent.name in names)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as builders:
        programs = [program for built in builders.map(lambda folder: build(folder, work / "build"), folders) for program in built]
    print(f"built {len(programs)} programs of {len(folders)} samples in {time.monotonic() - began:.0f} s", flush=True)

    prefixes = {"native": []} | {way: [rgpuctl, "run", "--insecure", "--server", address, "--"] for way, address in (("local", local), ("tcp", f"127.0.0.1:{PORT}"))}

    def run(program, way):
        name, path, folder = program
        # Samples write files beside those that they read.
        own = work / "run" / f"{name}-{way}"
        shutil.copytree(folder, own)
        return call([*prefixes[way], path], own)

    with open(out / "samples-server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen([dist / "bin/rgpu-server", "--backend", "cuda", "--insecure", "--workers", str(TOGETHER), "--listen", local, "--listen", f"tcp:127.0.0.1:{PORT}"], stderr=log)
    time.sleep(2)
    results = {}
    try:
        with concurrent.futures.ThreadPoolExecutor(TOGETHER) as runners:
            for way in WAYS:
                began = time.monotonic()
                results[way] = list(runners.map(lambda program: run(program, way), programs))
                print(f"{way}: {sum(not status for status, *_ in results[way])} with exit status 0; {time.monotonic() - began:.0f} s for all", flush=True)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(work)

    differing = 0
    with open(out / "samples.log", "w", encoding="utf-8") as log:
        for place, (name, *_) in enumerate(programs):
            native = results["native"][place]
            for way in WAYS:
                status, said, errors = results[way][place]
                log.write(f"===== {name}, {way}: exit status {status}\n{said}----- errors\n{errors}")
                if status != native[0]:
                    print(f"{name}, {way}: exit status {status} instead of {native[0]}: {' '.join((said + errors).split()[-25:])}")
                elif words(said) != words(native[1]):
                    print(f"{name}, {way}: other words: {sorted(set(words(said)) ^ set(words(native[1])))[:4]}")
                else:
                    continue
                differing += 1
    print(f"{len(programs)} programs, {differing} runs differ")
    return differing


if __name__ == "__main__":
    sys.exit(main())
