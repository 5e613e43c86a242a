"""Updates on the CPU: this machine's streaming bandwidth, PyTorch's fused AdamW, DeepSpeedCPUAdam and ours, in one run.

    python benchmarks/cpu_adamw.py [--parameters 33554432] [--rounds 25] [--threads 1 2] [--json FILE]

fp32 masters and moments, bf16 gradients and working copies: 28 bytes a parameter, whatever a contender really moves.
In each round every contender runs once, in an order that turns, and a stream as often as makes about as many bytes;
shares are medians of each round's own ratio, so a slow moment of the machine meets both sides. They are given by the
clock and by processor time, which leaves out what other programs on a busy machine take, and waiting. Each number of
threads has a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from planner.cpu import build
from planner.cpu.adamw import ChunkedKernel, NativeKernel, Step, Target, fused
from planner.measure.machine_rates import machine_name

BYTES = 28
STREAMS = {"triad": 12, "copy": 8, "library_copy": 8, "in_place": 8, "torch_copy": 8}
"""Bytes that the loop names per element: where it writes what it has not read, hardware may move up to half more."""
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
COPIES = ("triad", "copy", "library_copy", "torch_copy")
IN_PLACE = ("in_place",)

Contender = Callable[[], object]


class State:
    """Parameters of one contender, drawn from the same seed as everybody's."""

    def __init__(self, n: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.master = torch.randn(n, generator=draw)
        self.gradient = torch.randn(n, generator=draw).mul_(1e-2).bfloat16()
        self.work = self.master.bfloat16()
        self.exp_avg, self.exp_avg_sq = torch.zeros(n), torch.zeros(n)
        self.count = 0

    def step(self) -> Step:
        self.count += 1
        return Step(
            learning_rate=SETTINGS["lr"],
            betas=SETTINGS["betas"],
            eps=SETTINGS["eps"],
            count=torch.tensor(float(self.count)),
            coefficient=None,
        )

    def kernel(self, kernel: ChunkedKernel | NativeKernel) -> None:
        parts = self.work, self.master, self.exp_avg, self.exp_avg_sq, self.gradient
        kernel.update([Target("all", SETTINGS["weight_decay"], *parts)], self.step())

    def whole(self) -> None:
        """PyTorch's kernel on the whole tensor, between two conversions."""
        gradient = self.gradient.float()
        fused([self.master], [gradient], [self.exp_avg], [self.exp_avg_sq], self.step(), SETTINGS["weight_decay"])
        self.work.copy_(self.master)


def deepspeed(state: State) -> Contender:
    """DeepSpeedCPUAdam between the conversions that ZeRO-Offload makes for it. Its first use builds it."""
    adam = importlib.import_module("deepspeed.ops.adam")
    parameter = torch.nn.Parameter(state.master)
    parameter.grad = gradient = torch.empty_like(state.master)
    optimizer = adam.DeepSpeedCPUAdam([parameter], adamw_mode=True, **SETTINGS)

    def run() -> None:
        gradient.copy_(state.gradient)
        optimizer.step()
        state.work.copy_(parameter.detach())

    return run


def updates(n: int) -> tuple[dict[str, Contender], dict[str, State], dict[str, str]]:
    """The contenders that this machine has, their parameters, and why the others are missing."""
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    states = {name: State(n) for name in ("torch_fused", "chunked", "native", "deepspeed")}
    found["torch_fused"] = states["torch_fused"].whole
    chunked = ChunkedKernel()
    found["chunked"] = lambda: states["chunked"].kernel(chunked)
    try:
        native = NativeKernel()
        found["native"] = lambda: states["native"].kernel(native)
    except build.CannotBuildError as error:
        missing["native"] = str(error)
    if importlib.util.find_spec("deepspeed") is None:
        missing["deepspeed"] = "not installed"
    else:
        found["deepspeed"] = deepspeed(states["deepspeed"])
    return found, {name: states[name] for name in found}, missing


def streams(n: int, threads: int) -> dict[str, Contender]:
    """Each over three arrays in turn: together they are as large as master and moments."""
    arrays = [torch.ones(n) for _ in range(3)]
    pool, part = ThreadPoolExecutor(threads), n // threads

    def turns(name: str) -> list[list[Tensor]]:
        return [arrays[k:] + arrays[:k] for k in range(BYTES // STREAMS[name])]

    def copy() -> None:
        for a, b, _ in turns("torch_copy"):
            a.copy_(b)

    def run(name: str, function: Any) -> None:
        def one(k: int) -> None:
            for order in turns(name):
                function(ctypes.c_long(part), *(ctypes.c_void_p(t.data_ptr() + 4 * part * k) for t in order))

        list(pool.map(one, range(threads)))

    found: dict[str, Contender] = {"torch_copy": copy}
    try:
        library = build.load(Path(__file__).with_name("streams.c"))
    except build.CannotBuildError:
        return found
    for name in STREAMS.keys() - found.keys():
        found[name] = functools.partial(run, name, getattr(library, name))
    return found


def measure(n: int, rounds: int, threads: int) -> dict[str, Any]:
    """Bytes per second of every contender, round by round."""
    torch.set_num_threads(threads)
    contenders, _, missing = updates(n)
    differing = {name: differing_from_torch(name) for name in contenders}
    contenders = {**contenders, **streams(n, threads)}
    for run in contenders.values():
        run()
    order = list(contenders)
    clock: dict[str, list[float]] = {name: [] for name in order}
    processor: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        for name in order:
            size = n * (BYTES // STREAMS[name] * STREAMS[name] if name in STREAMS else BYTES)
            start, own = time.perf_counter(), time.process_time()
            contenders[name]()
            processor[name].append(size * threads / (time.process_time() - own))
            clock[name].append(size / (time.perf_counter() - start))
        order.append(order.pop(0))
    return {
        "threads": threads,
        "parameters": n,
        "rounds": rounds,
        "missing": missing,
        "differing": differing,
        "load": os.getloadavg()[0],
        "clock": clock,
        "processor": processor,
    }


def differing_from_torch(name: str) -> float:
    """The share of parameters that differ from PyTorch's after ten steps, in any bit."""
    contenders, states, _ = updates(100_003)
    for _ in range(10):
        contenders[name]()
        contenders["torch_fused"]() if name != "torch_fused" else None
    ours, theirs = states[name].master, states["torch_fused"].master
    return float((ours != theirs).float().mean())


def share(rates: dict[str, list[float]], name: str, others: tuple[str, ...]) -> dict[str, Any] | None:
    """`name` over the fastest of `others` (by median), pair by pair; None when there is none of them."""
    medians = {other: statistics.median(rates[other]) for other in others if other in rates}
    if not medians:
        return None
    best = max(medians, key=lambda other: medians[other])
    ratios = [a / b for a, b in zip(rates[name], rates[best], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"of": best, "median": middle, "quarter": low, "three_quarters": high}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    found = {k: v for k, v in result.items() if k not in ("clock", "processor")}
    for kind in ("clock", "processor"):
        rates = result[kind]
        found[kind] = {
            "median_bytes_per_s": {name: statistics.median(values) for name, values in rates.items()},
            "shares": {
                name: {
                    "copies": share(rates, name, COPIES),
                    "in_place": share(rates, name, IN_PLACE),
                    "deepspeed": share(rates, name, ("deepspeed",)),
                }
                for name in result["differing"]
            },
        }
    return found


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['threads']} thread(s), {found['parameters']:,} parameters, load {found['load']:.1f}")
    for kind in ("clock", "processor"):
        rates = found[kind]["median_bytes_per_s"]
        print(f"  by {kind}: " + ", ".join(f"{name} {rates[name] / 1e9:.1f} GB/s" for name in STREAMS if name in rates))
        for name, shares in found[kind]["shares"].items():
            ratios = [
                f"{s['median']:.2f} ({s['quarter']:.2f} to {s['three_quarters']:.2f}) of {s['of']}"
                for s in shares.values()
                if s
            ]
            print(f"    {name:12s} {rates[name] / 1e9:5.1f} GB/s  {', '.join(ratios)}")
    print("  parameters that differ: " + ", ".join(f"{name} {x:.1%}" for name, x in found["differing"].items()))
    for name, why in found["missing"].items():
        print(f"  {name} is missing: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=1 << 25)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.parameters, options.rounds, options.threads[0])))
        return
    found = []
    for threads in options.threads:
        # Every OpenMP runtime in the process, DeepSpeed's too, reads them when it is loaded.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, __file__, "--inside", "--threads", str(threads)]
        command += ["--parameters", str(options.parameters), "--rounds", str(options.rounds)]
        answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found.append(summary(json.loads(answer.stdout.splitlines()[-1])))
        show(found[-1])
    if options.json:
        machine = {"machine": machine_name("cpu"), "cores": os.cpu_count()}
        versions = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}
        options.json.write_text(json.dumps({**machine, **versions, "results": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
