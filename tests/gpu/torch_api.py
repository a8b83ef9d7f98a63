#!/usr/bin/env python3
"""The less travelled parts of torch.cuda, one line a case, the same natively and remotely.

    torch_api.py [CASE...]
"""

import multiprocessing
import subprocess
import sys

import torch
import torch.nn.functional as F

import cases

torch.manual_seed(0)
@cases.case
def properties():
    p = torch.cuda.get_device_properties(0)
    return " ".join(f"{name}={getattr(p, name)}" for name in dir(p) if not name.startswith("_") and not callable(getattr(p, name)))


@cases.case
def nvml():
    names = ["utilization", "memory_usage", "temperature", "power_draw", "clock_rate", "device_memory_used"]
    return " ".join(f"{name} {type(getattr(torch.cuda, name)()).__name__}" for name in names)


@cases.case
def ranges():
    with torch.cuda.nvtx.range("a range"):
        torch.cuda.nvtx.mark("a mark")
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    return "marked"


@cases.case
def compiled_kernel():
    kernel = torch.cuda._compile_kernel(
        """
extern "C" __global__ void scale(const float *a, float *b, int by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) b[i] = a[i] * by;
}""",
        "scale",
    )
    a = torch.arange(1000.0, device="cuda")
    b = torch.empty_like(a)
    kernel((4, 1, 1), (256, 1, 1), (a, b, 3, 1000))
    return b.sum().item()


@cases.case
def jiterator():
    f = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x, T y, T alpha) { return x * alpha + y; }", alpha=2.0)
    a = torch.arange(100.0, device="cuda")
    return f(a, a).sum().item()


@cases.case
def flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")
    got = torch.compile(flex_attention)(q, k, v, block_mask=mask)
    return torch.allclose(got.float(), F.scaled_dot_product_attention(q, k, v, is_causal=True).float(), atol=2e-2)


@cases.case
def float8():
    a = torch.randn(64, 128, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(96, 128, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.tensor(1.0, device="cuda")
    return f"{torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16).float().sum().item():.3f}"


@cases.case
def memory_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(1 << 20, device="cuda")
    return f"{x.sum().item()} {len(pool.snapshot()) > 0}"


@cases.case
def green_context():
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(16, 0)
    context.set_context()
    total = (torch.ones(1000, device="cuda") * 2).sum().item()
    context.pop_context()
    return total


@cases.case
def streams():
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.cuda_stream)):
        x = torch.ones(100, device="cuda").sum()
    event = torch.cuda.Event(interprocess=True)
    event.record(stream)
    event.ipc_handle()
    stream.synchronize()
    return f"{x.item()} {stream.priority} {event.query()}"


@cases.case
def graphed_callables():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    graphed = torch.cuda.make_graphed_callables(net, (torch.randn(16, 64, device="cuda"),))
    y = graphed(torch.randn(16, 64, device="cuda")).sum()
    y.backward()
    return f"{y.item():.4f} {net[0].weight.grad.abs().sum().item():.3f}"


@cases.case
def compiled_to_graphs():
    f = torch.compile(lambda x: F.gelu(x @ x).relu().sum(), mode="reduce-overhead")
    x = torch.eye(128, device="cuda")
    return " ".join(f"{f(x * i).item():.4f}" for i in range(5))


@cases.case
def kept_graph():
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    x = torch.zeros(10, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
    graph.instantiate()
    graph.replay()
    graph.replay()
    return x.sum().item()


@cases.case
def pinned():
    x = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    y = torch.empty_like(x, pin_memory=True)
    y.copy_(x.to("cuda", non_blocking=True) * 2, non_blocking=True)
    torch.cuda.synchronize()
    runtime, z = torch.cuda.cudart(), torch.arange(1 << 16, dtype=torch.float32)
    registered = int(runtime.cudaHostRegister(z.data_ptr(), z.numel() * 4, 0)), z.is_pinned()
    return f"{(y == x * 2).all().item()} {registered} {int(runtime.cudaHostUnregister(z.data_ptr()))}"


@cases.case
def history():
    torch.cuda.memory._record_memory_history()
    x = torch.ones(1 << 22, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return f"{len(snapshot['segments']) > 0} {len(snapshot['device_traces'][0]) > 0} {x.numel()}"


@cases.case
def out_of_memory():
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as e:
        return str(e)[:60]


@cases.case
def linalg():
    a = torch.randn(3, 50, 50, device="cuda", dtype=torch.float64)
    a = a @ a.mT + 50 * torch.eye(50, device="cuda", dtype=torch.float64)
    sums = torch.linalg.cholesky(a), torch.linalg.eigvalsh(a), torch.linalg.lu_factor(a)[0], torch.linalg.svdvals(a), torch.linalg.inv(a)
    return " ".join(f"{s.sum().item():.9f}" for s in sums)


@cases.case
def recurrent():
    # cuDNN keeps the dropout's state, with an event that a static object's destructor destroys.
    net = torch.nn.LSTM(32, 64, 2, bidirectional=True, dropout=0.1).cuda()
    y, _ = net(torch.randn(20, 4, 32, device="cuda"))
    y.sum().backward()
    return f"{tuple(y.shape)} {net.weight_ih_l0.grad.isfinite().all().item()}"


@cases.case
def loaders():
    data = torch.utils.data.TensorDataset(torch.arange(256.0))
    loader = torch.utils.data.DataLoader(data, 32, num_workers=2, pin_memory=True)
    return sum(b.cuda(non_blocking=True).sum().item() for (b,) in loader)


@cases.case
def forked_child():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child():
        try:
            queue.put(torch.zeros(1, device="cuda").item())
        except RuntimeError as e:
            queue.put(str(e).splitlines()[0])

    process = context.Process(target=child)
    process.start()
    answer = queue.get(timeout=20)
    process.join()
    return answer


@cases.case
def device_assert():
    text = "import torch\nx = torch.zeros(3, device='cuda')\nx[torch.tensor([5], device='cuda')].cpu()"
    child = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    return f"{child.returncode} {'Assertion' in child.stderr} {'device-side assert triggered' in child.stderr}"


cases.run()
