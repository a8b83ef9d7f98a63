#!/usr/bin/env python3
"""A program over tcp whose link is cut and whose bridge is killed again and again gives the results of an undisturbed run.

    interrupted.py DIST RELAY [--backend cuda|software] [--cut-every S] [--kill-every S] [-- PROGRAM ARGUMENT...]
    interrupted.py train STEPS

DIST is a folder that `cargo xtask dist` makes, RELAY the program `delay-relay` (`cargo build --release -p rgpu-tests --bin delay-relay`). PROGRAM prints results that are the same in every run; without one, the script trains a small
GPT with PyTorch (`train`: deterministic algorithms, every loss printed with all of its bits). It runs PROGRAM natively (`--backend software`: over an undisturbed link), and then through the relay. Meanwhile the relay is killed and started again
every --cut-every seconds (default: 3), which resets all connections, and the device process of vhost-rgpu is killed every --kill-every seconds (default: 10). Both outputs must be equal. Exit status: 1 if they differ, or nothing was interrupted.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from ports import wait_for

HERE = pathlib.Path(__file__).parent
SERVER_PORT, RELAY_PORT = 9786, 9787
STEPS = 400


def train(steps):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    import torch.nn.functional as F
    from torch_speed import BATCH, CONTEXT, GPT, VOCABULARY

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = torch.randint(VOCABULARY, (64, BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        batch = data[step % len(data)].cuda()
        with torch.autocast("cuda", torch.bfloat16), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(step, loss.item().hex(), flush=True)


def children(pid):
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in text.read_text().split()] if text.exists() else []


def device_processes(pid):
    """Those of the private vhost-rgpu that `rgpuctl run` with this process id has started."""
    def name(pid):
        return pathlib.Path(f"/proc/{pid}/exe").resolve().name

    keepers = [child for child in children(pid) if name(child) == "vhost-rgpu"]
    return [child for keeper in keepers for child in children(keeper) if name(child) == "vhost-rgpu"]


def main():
    arguments = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1].strip())
    arguments.add_argument("dist", type=pathlib.Path)
    arguments.add_argument("relay", type=pathlib.Path)
    arguments.add_argument("--backend", default="cuda", choices=("cuda", "software"))
    arguments.add_argument("--cut-every", type=float, default=3)
    arguments.add_argument("--kill-every", type=float, default=10)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = arguments.parse_args(words[:end])
    program = words[end + 1 :] or [sys.executable, str(HERE / "interrupted.py"), "train", str(STEPS)]
    work = pathlib.Path(os.environ.get("OUT") or tempfile.mkdtemp())
    log = open(work / "interrupted-server.log", "w", encoding="utf-8")
    server = subprocess.Popen(
        [options.dist / "bin/rgpu-server", "--backend", options.backend, "--insecure", "--listen", f"tcp:127.0.0.1:{SERVER_PORT}"], stderr=log
    )
    relay = None

    def link():
        return subprocess.Popen(
            [options.relay, "--listen", f"127.0.0.1:{RELAY_PORT}", "--to", f"127.0.0.1:{SERVER_PORT}", "--rtt-us", "0"], stderr=subprocess.DEVNULL
        )

    try:
        wait_for(SERVER_PORT)
        far = [str(options.dist / "bin/rgpuctl"), "run", "--insecure", "--server"]
        undisturbed = program if options.backend == "cuda" else [*far, f"127.0.0.1:{SERVER_PORT}", "--", *program]
        began = time.monotonic()
        expected = subprocess.run(undisturbed, stdout=subprocess.PIPE, check=True).stdout
        print(f"undisturbed: {time.monotonic() - began:.1f} s, {len(expected.splitlines())} lines", flush=True)

        relay = link()
        wait_for(RELAY_PORT)
        began = cut = killed = time.monotonic()
        cuts = kills = 0
        with open(work / "interrupted.out", "w+b") as output, open(work / "interrupted.err", "w+b") as errors:
            run = subprocess.Popen([*far, f"127.0.0.1:{RELAY_PORT}", "--", *program], stdout=output, stderr=errors)
            while run.poll() is None:
                time.sleep(0.05)
                now = time.monotonic()
                if now - cut >= options.cut_every:
                    relay.kill()
                    relay.wait()
                    relay, cut, cuts = link(), now, cuts + 1
                if now - killed >= options.kill_every:
                    for process in device_processes(run.pid):
                        os.kill(process, signal.SIGKILL)
                        kills += 1
                    killed = now
            output.seek(0)
            errors.seek(0)
            result, said = output.read(), errors.read().decode(errors="replace")
        same = run.returncode == 0 and result == expected
        print(f"interrupted: {time.monotonic() - began:.1f} s, {cuts} cuts, {kills} device processes killed, exit status {run.returncode}, {'the same' if same else 'other'} results")
        if not same:
            print(said[-2000:])
            for line, (one, other) in enumerate(zip(expected.splitlines(), result.splitlines())):
                if one != other:
                    print(f"line {line + 1}: {one} became {other}")
                    break
        return not same or not cuts or not kills
    finally:
        for process in (relay, server):
            if process:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        sys.exit(train(int(sys.argv[2])))
    sys.exit(main())
