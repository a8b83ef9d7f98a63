#!/usr/bin/env python3
"""PyTorch's own table of operators, run one by one, natively and through rgpu, and compared bit by bit.

    torch_opinfo.py sweep RGPUCTL FOLDER [SHARDS [SECONDS]]   runs everything and compares; files go to FOLDER
    torch_opinfo.py run INDEX/SHARDS                          one shard: a line for each operator, type and sample

Each line names an operator, a type and a sample, and the hash of its outputs, and of its gradients where it has any, or the error
that it raises. What differs between two native runs says nothing and is left out. The exit status of a sweep is 1 if a line differs,
or is missing in the remote run.
"""

import hashlib
import itertools
import os
import subprocess
import sys
import time

SAMPLES = 3
# What these return is whatever lay in the memory.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def digest(value, hasher):
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            value = value.to_dense()
        data = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        hasher.update(f"{tuple(data.shape)} {data.dtype}".encode())
        if data.numel():
            hasher.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (list, tuple)):
        for item in value:
            digest(item, hasher)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest(value[key], hasher)
    else:
        hasher.update(str(value).encode())


def short(value):
    hasher = hashlib.sha256()
    digest(value, hasher)
    return hasher.hexdigest()[:12]


def tensors(value):
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def gradients(op, sample, output):
    import torch

    leaves = [t for t in tensors([sample.input, *sample.args, *sample.kwargs.values()]) if t.requires_grad]
    outputs = [t for t in tensors(output) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not leaves or not outputs:
        return None
    return torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)


def run(index, shards):
    import warnings

    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    ops = sorted((op for op in op_db if op.name not in UNDEFINED), key=lambda op: (op.name, op.variant_test_name))
    for op in ops[index::shards]:
        supported = op.supported_dtypes("cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
            if dtype not in supported:
                continue
            grad = dtype is torch.float32 and op.supports_autograd
            torch.manual_seed(0)
            name = f"{op.name}/{op.variant_test_name}/{str(dtype).removeprefix('torch.')}"
            try:
                samples = list(itertools.islice(op.sample_inputs("cuda", dtype, requires_grad=grad), SAMPLES))
            except Exception as error:
                print(f"{name} no samples: {type(error).__name__}", flush=True)
                continue
            for number, sample in enumerate(samples):
                torch.manual_seed(1)
                try:
                    output = op(sample.input, *sample.args, **sample.kwargs)
                    result = short(output)
                    if grad:
                        result += " " + short(gradients(op, sample, output))
                except Exception as error:
                    result = type(error).__name__ + ": " + str(error).split("\n")[0][:100]
                print(f"{name}/{number} {result}", flush=True)


def start(command, folder, way, shards):
    environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", OMP_NUM_THREADS="1")
    processes = []
    for index in range(shards):
        out = open(os.path.join(folder, f"{way}.{index}"), "w")
        err = open(os.path.join(folder, f"{way}.{index}.err"), "w")
        words = [*command, sys.executable, os.path.abspath(__file__), "run", f"{index}/{shards}"]
        processes.append(subprocess.Popen(words, stdout=out, stderr=err, env=environment))
    return processes


def collect(processes, folder, way, begin, limit):
    lines = {}
    for index, process in enumerate(processes):
        try:
            process.wait(max(1, limit - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            print(f"{way}: shard {index} was ended after {limit} s", flush=True)
        for line in open(os.path.join(folder, f"{way}.{index}")):
            key, _, value = line.rstrip("\n").partition(" ")
            lines[key] = value
    print(f"{way}: {len(lines)} lines after {time.monotonic() - begin:.0f} s", flush=True)
    return lines


def sweep(rgpuctl, folder, shards, limit):
    os.makedirs(folder, exist_ok=True)
    found = {}
    # A native run beside each remote one: two native ones are needed, and the operators take more time on the CPU than on the GPU.
    for native, transport in (("native", "local"), ("again", "tcp")):
        begin = time.monotonic()
        remote = [rgpuctl, "run", "--backend", "cuda", "--transport", transport, "--"]
        both = {native: start([], folder, native, shards), transport: start(remote, folder, transport, shards)}
        for way, processes in both.items():
            found[way] = collect(processes, folder, way, begin, limit)
    steady = {key: value for key, value in found["native"].items() if found["again"].get(key) == value}
    bad = 0
    for transport in ("local", "tcp"):
        different = [key for key, value in steady.items() if found[transport].get(key) != value]
        bad += len(different)
        for key in different[:40]:
            print(f"  {transport} {key}: native {steady[key]}, remote {found[transport].get(key)}")
        print(f"{transport}: {len(steady) - len(different)} of {len(steady)} lines are the same ({len(found['native'])} natively, some of which differ from run to run)")
    return 1 if bad else 0


def main():
    words = sys.argv[1:]
    if len(words) == 2 and words[0] == "run":
        index, shards = words[1].split("/")
        run(int(index), int(shards))
    elif len(words) >= 3 and words[0] == "sweep":
        sys.exit(sweep(words[1], words[2], int(words[3]) if len(words) > 3 else 8, int(words[4]) if len(words) > 4 else 600))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
