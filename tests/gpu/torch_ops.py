#!/usr/bin/env python3
"""What PyTorch does with a GPU, section by section, printed so that two runs can be compared line by line.

    torch_ops.py [SECTION...]

Each section prints its results as checksums and the largest error against the CPU; a section that fails says so and the next one
goes on. The exit status is the number of sections that failed. Times go to standard error, since they differ from run to run.
"""

import hashlib
import sys
import time
import traceback

import torch
import torch.nn.functional as F

SECTIONS = []


def section(function):
    SECTIONS.append(function)
    return function


def say(name, value):
    """A tensor's bytes as a short hash, or any other value as it is."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        digest = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
        value = f"{tuple(data.shape)} {data.dtype} {digest}"
    print(f"  {name}: {value}", flush=True)


def close(name, got, want, tolerance):
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    error = ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()
    assert error <= tolerance, f"{name}: relative error {error} is over {tolerance}"


def rand(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@section
def device():
    say("available", torch.cuda.is_available())
    say("count", torch.cuda.device_count())
    say("name", torch.cuda.get_device_name(0))
    say("capability", torch.cuda.get_device_capability(0))
    p = torch.cuda.get_device_properties(0)
    say("properties", (p.multi_processor_count, p.total_memory, p.warp_size, p.L2_cache_size))


@section
def elementwise():
    a, b = rand(1000, 1003), rand(1000, 1003, seed=2)
    x, y = a.cuda(), b.cuda()
    close("add", x + y, a + b, 0)
    close("where", torch.where(x > y, x, y), torch.maximum(a, b), 0)
    close("exp", x.exp(), a.exp(), 1e-6)
    close("sum", (x * y).sum(1), (a * b).sum(1), 1e-5)
    close("softmax", x.softmax(1), a.softmax(1), 1e-5)
    values, order = x.sort(1)
    close("sort", values, a.sort(1).values, 0)
    close("cumsum", x.cumsum(0), a.cumsum(0), 1e-4)
    close("index", x[order[0, :10]], a[order[0, :10].cpu()], 0)
    say("topk", x.topk(5, 1).values)
    say("unique", (x * 10).int().unique())
    say("nonzero", x.nonzero().shape)


@section
def random():
    torch.manual_seed(7)
    say("randn", torch.randn(1000, device="cuda"))
    say("randperm", torch.randperm(1000, device="cuda"))
    say("dropout", F.dropout(torch.ones(1000, device="cuda"), 0.3))
    say("bernoulli", torch.bernoulli(torch.full((1000,), 0.25, device="cuda")))


@section
def matmul():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-13)):
        for m, k, n in ((64, 64, 64), (513, 1025, 257), (2048, 1024, 4096)):
            a, b = rand(m, k, dtype=dtype), rand(k, n, dtype=dtype, seed=2)
            got = a.cuda() @ b.cuda()
            if m * n * k < 1 << 28:
                close("matmul", got, a.double() @ b.double(), tolerance)
            say(f"{dtype} {m}x{k}x{n}", got)
    a, b = rand(8, 128, 64).cuda(), rand(8, 64, 96, seed=2).cuda()
    say("bmm", torch.bmm(a, b))
    w, bias = rand(256, 64, dtype=torch.bfloat16).cuda(), rand(256, dtype=torch.bfloat16).cuda()
    say("linear", F.linear(rand(32, 64, dtype=torch.bfloat16).cuda(), w, bias))
    say("int8", torch._int_mm(torch.ones(32, 64, dtype=torch.int8).cuda(), torch.ones(64, 32, dtype=torch.int8).cuda()))


@section
def fp8():
    a = rand(64, 128).cuda().to(torch.float8_e4m3fn)
    b = rand(96, 128, seed=2).cuda().to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    say("scaled_mm", torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16))


@section
def convolution():
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    x, w = rand(4, 16, 33, 31), rand(32, 16, 3, 3, seed=2)
    got = F.conv2d(x.cuda(), w.cuda(), padding=1, stride=2)
    close("conv2d", got, F.conv2d(x, w, padding=1, stride=2), 1e-3)
    say("conv2d", got)
    say("conv2d bf16", F.conv2d(x.cuda().bfloat16(), w.cuda().bfloat16()))
    say("conv1d", F.conv1d(rand(2, 8, 100).cuda(), rand(4, 8, 5, seed=2).cuda()))
    say("conv3d", F.conv3d(rand(1, 3, 9, 9, 9).cuda(), rand(4, 3, 3, 3, 3, seed=2).cuda()))
    say("transposed", F.conv_transpose2d(x.cuda(), rand(16, 8, 3, 3).cuda()))
    say("batch norm", F.batch_norm(x.cuda(), torch.zeros(16).cuda(), torch.ones(16).cuda(), training=True))
    say("max pool", F.max_pool2d(x.cuda(), 2))
    lstm = torch.nn.LSTM(8, 16, 2)
    with torch.no_grad():
        for i, p in enumerate(lstm.parameters()):
            p.copy_(rand(*p.shape, seed=i) * 0.1)
    out, _ = lstm.cuda()(rand(5, 3, 8).cuda())
    say("lstm", out)


@section
def fft():
    x = rand(64, 1000)
    close("rfft", torch.view_as_real(torch.fft.rfft(x.cuda())), torch.view_as_real(torch.fft.rfft(x)), 1e-5)
    y = rand(8, 127, 64)
    close("fft2", torch.view_as_real(torch.fft.fft2(y.cuda())), torch.view_as_real(torch.fft.fft2(y)), 1e-5)
    say("irfft", torch.fft.irfft(torch.fft.rfft(x.cuda())))


@section
def linalg():
    a = rand(100, 100).double()
    s = a @ a.t() + 100 * torch.eye(100)
    close("solve", torch.linalg.solve(a.cuda(), s.cuda()), torch.linalg.solve(a, s), 1e-8)
    close("cholesky", torch.linalg.cholesky(s.cuda()), torch.linalg.cholesky(s), 1e-10)
    close("eigvalsh", torch.linalg.eigvalsh(s.cuda()), torch.linalg.eigvalsh(s), 1e-10)
    close("svd", torch.linalg.svdvals(a.cuda()), torch.linalg.svdvals(a), 1e-10)
    close("inverse", torch.linalg.inv(s.cuda()), torch.linalg.inv(s), 1e-9)
    q, r = torch.linalg.qr(a.cuda())
    close("qr", q @ r, a, 1e-10)
    close("batched", torch.linalg.solve(rand(50, 8, 8).cuda(), torch.eye(8).cuda()), torch.linalg.inv(rand(50, 8, 8)), 1e-2)


@section
def sparse():
    a = rand(200, 300) * (rand(200, 300, seed=3) > 1)
    b = rand(300, 40, seed=2)
    close("csr", a.cuda().to_sparse_csr() @ b.cuda(), a @ b, 1e-5)
    close("coo", torch.sparse.mm(a.cuda().to_sparse(), b.cuda()), a @ b, 1e-5)


@section
def attention():
    q, k, v = (rand(2, 8, 256, 64, dtype=torch.bfloat16, seed=i).cuda().requires_grad_() for i in range(3))
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            say(f"{backend.name}", out)
            grad = torch.autograd.grad(out.float().square().sum(), (q,))[0]
            say(f"{backend.name} backward", grad if backend == SDPBackend.MATH else tuple(grad.shape))


class Gpt(torch.nn.Module):
    def __init__(self, words=256, wide=128, heads=4, layers=2):
        super().__init__()
        self.embed = torch.nn.Embedding(words, wide)
        self.place = torch.nn.Embedding(64, wide)
        make = lambda: torch.nn.TransformerEncoderLayer(wide, heads, 4 * wide, 0.0, batch_first=True, norm_first=True, activation="gelu")
        self.layers = torch.nn.ModuleList(make() for _ in range(layers))
        self.norm = torch.nn.LayerNorm(wide)
        self.head = torch.nn.Linear(wide, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def gpt(steps, autocast=True, model=None):
    torch.manual_seed(3)
    net = Gpt().cuda()
    run = torch.compile(net) if model == "compile" else net
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    data = torch.randint(0, 256, (16, 65), generator=torch.Generator().manual_seed(5)).cuda()
    losses = []
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = run(data[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@section
def training():
    torch.use_deterministic_algorithms(True, warn_only=True)
    for autocast in (False, True):
        say(f"losses, autocast {autocast}", [f"{loss:.6f}" for loss in gpt(10, autocast)])
    torch.use_deterministic_algorithms(False)
    scaler = torch.amp.GradScaler("cuda")
    w = torch.ones(8, 8, device="cuda", requires_grad=True)
    scaler.scale((w.half() @ w.half()).sum()).backward()
    say("scaled gradient", w.grad)


@section
def memory():
    pinned = rand(1 << 20).pin_memory()
    say("pinned", pinned.is_pinned())
    there = pinned.to("cuda", non_blocking=True)
    back = torch.empty_like(pinned).pin_memory()
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    close("round trip", back, pinned, 0)
    before = torch.cuda.memory_allocated()
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    say("allocated", torch.cuda.memory_allocated() - before)
    big.fill_(7)
    say("sum", big.sum().item())
    del big
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    say("total", total)
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        raise AssertionError("32 TiB were allocated")
    except torch.cuda.OutOfMemoryError:
        say("out of memory", "said")
    loader = torch.utils.data.DataLoader(torch.arange(1000.0), batch_size=100, pin_memory=True, num_workers=2)
    say("loader", sum(batch.cuda(non_blocking=True).sum().item() for batch in loader))


@section
def streams():
    side = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = rand(1 << 22).cuda()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        start.record()
        y = x * 2 + 1
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    close("side stream", y, x * 2 + 1, 0)
    assert 0 < start.elapsed_time(end) < 1000
    say("query", end.query())
    say("priority", torch.cuda.Stream(priority=-1).priority)


@section
def graphs():
    x = rand(512, 512).cuda()
    w = rand(512, 512, seed=2).cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            y = torch.relu(x @ w) + 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.relu(x @ w) + 1
    for seed in range(3):
        x.copy_(rand(512, 512, seed=seed))
        graph.replay()
        close("replay", y, torch.relu(x @ w) + 1, 1e-6)
    say("replayed", y)


@section
def compiled():
    @torch.compile
    def f(a, b):
        return (torch.sin(a) * b + a.relu()).sum(-1).softmax(0)

    a, b = rand(300, 200), rand(300, 200, seed=2)
    close("fused", f(a.cuda(), b.cuda()), (torch.sin(a) * b + a.relu()).sum(-1).softmax(0), 1e-4)
    # Inductor chooses by timing, so two native runs differ in the fourth digit as well.
    say("losses", [f"{loss:.2f}" for loss in gpt(5, True, "compile")])


def main():
    wanted = sys.argv[1:]
    failed = []
    for function in SECTIONS:
        name = function.__name__
        if wanted and name not in wanted:
            continue
        print(f"{name}", flush=True)
        start = time.monotonic()
        try:
            function()
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(name)
            print(f"  FAILED: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}", flush=True)
            traceback.print_exc(limit=-3)
        print(f"{name}: {time.monotonic() - start:.2f} s", file=sys.stderr, flush=True)
    print(f"{len(failed)} failed: {' '.join(failed)}" if failed else "all passed")
    sys.exit(min(len(failed), 100))


if __name__ == "__main__":
    main()
