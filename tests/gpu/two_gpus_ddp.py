"""Two GPUs in PyTorch, a process each: NCCL's collectives and DistributedDataParallel. Prints what should be the same wherever it runs."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def say(rank, *what):
    if rank == 0:
        print(*what, flush=True)


def main(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    n = 1 << 20
    mine = torch.arange(n, dtype=torch.float32, device="cuda") * (rank + 1)
    total = mine.clone()
    dist.all_reduce(total)
    say(rank, "all_reduce", torch.equal(total.cpu(), torch.arange(n, dtype=torch.float32) * 3))
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    say(rank, "all_gather", all(torch.equal(p.cpu(), torch.arange(n, dtype=torch.float32) * (i + 1)) for i, p in enumerate(parts)))
    half = torch.empty(n // size, device="cuda")
    dist.reduce_scatter_tensor(half, mine)
    say(rank, "reduce_scatter", torch.equal(half.cpu(), torch.arange(n // size, dtype=torch.float32) * 3))
    swapped = torch.empty_like(mine)
    dist.all_to_all_single(swapped, mine)
    say(rank, "all_to_all", swapped[: n // 2].sum().item(), swapped[n // 2 :].sum().item())
    other = torch.empty_like(mine)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]):
        request.wait()
    say(rank, "sendrecv", torch.equal(other.cpu(), torch.arange(n, dtype=torch.float32) * (2 - rank)))

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    data, target = torch.randn(256, 512).cuda(), torch.randint(0, 10, (256,)).cuda()
    for step in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        both = loss.detach().clone()
        dist.all_reduce(both, op=dist.ReduceOp.AVG)
        say(rank, f"step {step} {both.item():.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("devices", torch.cuda.device_count())
    sys.stdout.flush()
    mp.spawn(main, args=(2,), nprocs=2)
    print("PASS two_gpus_ddp")
