#!/usr/bin/env python3
"""NCCL's collectives between two GPUs in PyTorch, a process each, timed by size; the results are checked.

    collectives.py [--most MIB] [--only OPERATION] [--bytes N] [--times N]

Run it with the GPUs of two servers (`rgpuctl run --server A --server B -- collectives.py`), and natively with NCCL's own network between the two GPUs (NCCL_NET=Socket NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1). It prints a line for
each size: bytes, and for each operation the microseconds that it takes (median) and the bytes of one GPU in GB/s. "exchange" is a send and a receive at the same time. Sizes are 8 bytes to --most (default: 64 MiB). Exit status: 1 if a result is wrong.

To look at one operation and size alone, for example in a log of page faults: --only measures one of all_reduce, exchange and all_gather, --bytes one size, a multiple of 4, and --times so many of each (default: 20, and 6 above 1 MiB) after the first three. A barrier, for which NCCL does a small all-reduce, comes before each.
"""

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OPERATIONS = ("all_reduce", "exchange", "all_gather")


def operation(name, rank, size, count):
    """A function that does it once, and one that says whether its result is right."""
    mine = torch.full((count,), float(rank + 1), device="cuda")
    if name == "all_reduce":
        # The same result however often.
        return (lambda: dist.all_reduce(mine, op=dist.ReduceOp.MAX)), (lambda: bool((mine == size).all()))
    if name == "exchange":
        other = torch.zeros(count, device="cuda")
        pair = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]

        def exchange():
            for request in dist.batch_isend_irecv(pair):
                request.wait()

        return exchange, (lambda: bool((other == 2 - rank).all()))
    everything = torch.zeros(size * count, device="cuda")
    expected = torch.arange(1, size + 1, device="cuda").repeat_interleave(count)
    return (lambda: dist.all_gather_into_tensor(everything, mine)), (lambda: bool((everything == expected).all()))


def main(rank, size, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29532")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    right = True
    lengths = [options.bytes] if options.bytes else [8] + [4 << (2 * n) for n in range(3, 14) if 4 << (2 * n) <= options.most << 20]
    for length in lengths:
        line = f"{length}"
        for name in [options.only] if options.only else OPERATIONS:
            once, is_right = operation(name, rank, size, length // 4)
            for _ in range(3):
                once()
            torch.cuda.synchronize()
            times = []
            for _ in range(options.times or (20 if length <= 1 << 20 else 6)):
                dist.barrier()
                torch.cuda.synchronize()
                began = time.monotonic()
                once()
                torch.cuda.synchronize()
                times.append(time.monotonic() - began)
            right &= is_right()
            middle = statistics.median(times)
            line += f"  {name} {middle * 1e6:.0f} us {length / middle / 1e9:.3f} GB/s"
        if rank == 0:
            print(line + ("" if right else "  WRONG"), flush=True)
    dist.destroy_process_group()
    sys.exit(not right)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--only", choices=OPERATIONS)
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--times", type=int)
    mp.spawn(main, args=(2, parser.parse_args()), nprocs=2)
    print("PASS collectives")
