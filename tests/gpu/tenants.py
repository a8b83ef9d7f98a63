#!/usr/bin/env python3
"""PyTorch training tenants on one GPU: what all of them get together, next to native processes side by side, and their shares next to their weights.

    tenants.py DIST [--tenants N...] [--weights A:B] [--each N] [--seconds S]

DIST is a folder that `cargo xtask dist` makes. Each tenant trains the small GPT of torch_speed.py for --seconds (default: 10), all of them at the same time. For each number of tenants (default: 1 2 4 8) the script prints the steps a second of all
tenants together, natively and through one server (`local`), and the smallest and the largest share of a tenant. With rgpu, each tenant is a user of its own, and so a principal of its own. Then two tenants run with the weights A and B
(default: 3:1), with --each programs of their own (default: 1; one that waits for each step's result does not always have work for the GPU). Each tenant's losses must be those of the first one. Needs root, for the users. Exit status: 1 if a run fails or a loss differs.

RGPU_LIB_DIR names the folder of the guest libraries where DIST has none.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

# The tenants' users; those with weights have others, from WEIGHTED on.
USERS, WEIGHTED = 24_000, 24_100
# Losses of so many steps are compared.
COMPARED = 30


def tenant(seconds):
    """Prepares, says so, waits for a line, and trains for a while."""
    import torch
    from torch_speed import eager, timed, training

    # Otherwise the order of some sums changes from run to run, natively as well.
    torch.use_deterministic_algorithms(True)
    _, optimizer, forward_and_backward = training()
    step = eager(optimizer, forward_and_backward)
    _, losses = timed(step, COMPARED)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, begin = 0, time.monotonic()
    while time.monotonic() < begin + seconds:
        step().item()
        steps += 1
    print(steps / (time.monotonic() - begin), " ".join(f"{loss:.4f}" for loss in losses), flush=True)
    # The others end at the same time, and not on what this one leaves.
    sys.stdin.readline()


def together(prefix, count, seconds, first_user=None, each_user=1):
    """Steps a second of each of `count` programs that run at the same time, every `each_user` of them as another user if there is a first one, and their losses."""
    running = []
    for i in range(count):
        user = first_user + i // each_user if first_user else None
        as_user = {"user": user, "group": user, "extra_groups": []} if first_user else {}
        command = [*prefix, sys.executable, __file__, "--tenant", str(seconds)]
        # These users have no home and no entry in /etc/passwd; PyTorch asks for the name.
        environment = dict(os.environ, HOME=tempfile.gettempdir(), USER=f"tenant{i}", PYTHONDONTWRITEBYTECODE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, **as_user))
    if any(each.stdout.readline() != "ready\n" for each in running):
        sys.exit("a tenant did not begin")
    for each in running:
        each.stdin.write("go\n")
        each.stdin.flush()
    lines = [each.stdout.readline().split(" ", 1) for each in running]
    for each in running:
        each.communicate("end\n")
    if any(each.returncode or len(line) != 2 for each, line in zip(running, lines)):
        sys.exit("a tenant failed")
    return [float(line[0]) for line in lines], [line[1] for line in lines]


def differing(where, losses, expected):
    """A line for each tenant whose losses are not those of the first one: the first step that differs."""
    found = []
    for i, each in enumerate(losses):
        pairs = list(zip(each.split(), expected.split()))
        step = next((step for step, (one, other) in enumerate(pairs) if one != other), None)
        if step is not None:
            found.append(f"{where}, tenant {i}: loss {pairs[step][0]} in step {step} and not {pairs[step][1]}, at last {pairs[-1][0]} and not {pairs[-1][1]}")
    return found


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("dist", type=pathlib.Path, nargs="?")
    parser.add_argument("--tenants", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--weights", default="3:1")
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--tenant", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tenant:
        return tenant(options.tenant)
    weights = [int(weight) for weight in options.weights.split(":")]
    rgpuctl, wrong, expected = options.dist.resolve() / "bin/rgpuctl", [], None
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        socket, rules = f"{folder}/server.sock", pathlib.Path(folder, "clients.toml")
        rules.write_text("".join(f'[[client]]\nname = "uid:{WEIGHTED + i}"\nweight = {weight * 100}\n' for i, weight in enumerate(weights)))
        command = [options.dist / "bin/rgpu-server", "--backend", "cuda", "--listen", f"unix:{socket}", "--clients", rules]
        log = open(pathlib.Path(folder, "log"), "w", encoding="utf-8")
        server = subprocess.Popen(command, stderr=log)
        try:
            while not os.path.exists(socket) and server.poll() is None:
                time.sleep(0.1)
            os.chmod(socket, 0o666)
            remote = [rgpuctl, "run", "--server", f"unix:{socket}", "--"]
            print(f"{'tenants':>8}{'native, steps/s':>17}{'rgpu':>9}{'rgpu/native':>13}{'shares, native':>18}{'shares, rgpu':>18}")
            for count in options.tenants:
                totals, shares = [], []
                for prefix, users in (([], None), (remote, USERS)):
                    rates, losses = together(prefix, count, options.seconds, users)
                    expected = expected or losses[0]
                    wrong += differing(f"{count} {'with rgpu' if prefix else 'natively'}", losses, expected)
                    totals.append(sum(rates))
                    shares.append(f"{min(rates) / sum(rates):.3f} to {max(rates) / sum(rates):.3f}")
                print(f"{count:8}{totals[0]:17.1f}{totals[1]:9.1f}{totals[1] / totals[0]:13.2f}{shares[0]:>18}{shares[1]:>18}", flush=True)
            rates, losses = together(remote, len(weights) * options.each, options.seconds, WEIGHTED, options.each)
            expected = expected or losses[0]
            wrong += differing("with weights", losses, expected)
            rates = [sum(rates[i : i + options.each]) for i in range(0, len(rates), options.each)]
            print(f"weights {options.weights}: {sum(rates):.1f} steps/s, shares " + ", ".join(f"{rate / sum(rates):.3f}" for rate in rates))
        finally:
            server.terminate()
            server.wait()
            log.close()
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
