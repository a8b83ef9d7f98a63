#!/usr/bin/env python3
"""Two everyday loops of PyTorch, timed: a training step of a small GPT in bf16, and decoding token by token.

    torch_speed.py [--no-cudnn-attention] [--steps N] [--tokens N]

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


def train(steps):
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1)).cuda()
    times, losses = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    print("training step:", median(times[10:] or times))
    print("losses:", " ".join(f"{losses[i]:.4f}" for i in (0, steps // 2, -1)))
    return model


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
    options.add_argument("--tokens", type=int, default=128, help="tokens to decode, of which the first 32 are not timed; 0: none")
    options = options.parse_args()
    trained = train(options.steps)
    if not options.tokens:
        raise SystemExit
    if options.no_cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    decode(trained, options.tokens)
