#!/usr/bin/env python3
"""Three everyday loops of PyTorch, timed: a training step of a small GPT in bf16, the same as a CUDA graph, and decoding token by token.

    torch_speed.py [--no-cudnn-attention] [--steps N] [--graph-steps N] [--tokens N]

Run it natively and through rgpu in turn and compare the medians. It prints losses and tokens as well, which must be the same.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 8, 768, 12, 512, 8192, 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, cache=None):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None or t > 1)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.place = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, first=0, caches=None):
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.place(places)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(x)


def median(times):
    return f"{statistics.median(times) * 1e3:.2f} ms (from {min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})"


def training():
    """The model, its optimizer, and a function that computes the loss and the gradients of one step."""
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
    data = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1)).cuda()

    def forward_and_backward():
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        return loss

    return model, optimizer, forward_and_backward


def timed(step, steps):
    """Calls `step` and returns how long each call took, and the losses that they returned."""
    times, losses = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(step().item())
        times.append(time.perf_counter() - begin)
    return times, losses


def eager(optimizer, forward_and_backward):
    """A whole training step, without a graph, as a function that returns the loss."""

    def step():
        loss = forward_and_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def train(steps):
    model, optimizer, forward_and_backward = training()
    times, losses = timed(eager(optimizer, forward_and_backward), steps)
    print("training step:", median(times[10:] or times))
    print("losses:", " ".join(f"{losses[i]:.4f}" for i in (0, steps // 2, -1)))
    return model


def train_graph(steps):
    """The same steps, but captured once and launched as a graph."""
    _, optimizer, forward_and_backward = training()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            forward_and_backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = forward_and_backward()
        optimizer.step()

    def step():
        graph.replay()
        return loss

    times, losses = timed(step, steps)
    print("graph step:", median(times[10:] or times))
    print("graph losses:", " ".join(f"{losses[i]:.4f}" for i in (0, steps // 2, -1)))


@torch.no_grad()
def decode(model, count):
    model = model.bfloat16().eval()
    caches = [[] for _ in range(LAYERS)]
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    times, tokens = [], []
    for place in range(count):
        begin = time.perf_counter()
        token = model(token, place, caches)[:, -1:].argmax(-1)
        tokens.append(token.item())
        times.append(time.perf_counter() - begin)
    print("token:", median(times[32:] or times))
    print("tokens:", " ".join(map(str, tokens[-6:])))


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--no-cudnn-attention", action="store_true", help="use PyTorch's own attention for decoding")
    options.add_argument("--steps", type=int, default=40, help="training steps, of which the first 10 are not timed")
    options.add_argument("--graph-steps", type=int, default=0, help="training steps as a graph, of which the first 10 are not timed; 0: none")
    options.add_argument("--tokens", type=int, default=128, help="tokens to decode, of which the first 32 are not timed; 0: none")
    options = options.parse_args()
    trained = train(options.steps)
    if options.graph_steps:
        train_graph(options.graph_steps)
    if not options.tokens:
        raise SystemExit
    if options.no_cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    decode(trained, options.tokens)
