"""Two GPUs in PyTorch: tensors that travel between them, DataParallel, NCCL's collectives in one process. Prints what should be the same wherever it runs."""

import torch
import torch.cuda.nccl as nccl

torch.manual_seed(7)
print("devices", torch.cuda.device_count(), torch.cuda.can_device_access_peer(0, 1))
a = torch.randn(1000, 1000)
there = a.cuda(0).to("cuda:1", non_blocking=True)
print("travelled", torch.equal(there.cpu(), a), (there @ there).sum().item())

model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).cuda(0)
parallel = torch.nn.DataParallel(model, device_ids=[0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data, target = torch.randn(256, 512).cuda(0), torch.randint(0, 10, (256,)).cuda(0)
for step in range(10):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(parallel(data), target)
    loss.backward()
    optimizer.step()
    print(f"step {step} {loss.item():.6f}")

parts = [torch.arange(1 << 20, dtype=torch.float32, device=f"cuda:{i}") * (i + 1) for i in range(2)]
nccl.all_reduce(parts)
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
print("all_reduce", all(torch.equal(p.cpu(), torch.arange(1 << 20, dtype=torch.float32) * 3) for p in parts))
nccl.broadcast(parts)
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
print("broadcast", torch.equal(parts[0].cpu(), parts[1].cpu()))
print("PASS two_gpus_torch")
