"""Host memory of full fine-tuning in bf16 with fp32 masters and exact clipping, loading and saving included.

    python benchmarks/host_memory.py [--width 1280] [--layers 8] [--json FILE]

The trainer runs as a process of its own, on a folder with random bf16 weights, under a plan that streams every layer's
weights and updates them on the CPU: some steps, a checkpoint, the model folder. Its anonymous memory (RssAnon: all that
is not a file's) is read every few milliseconds. On the CPU the device's bytes are in the same memory: the meter's peak
is taken off, and so is what the same job with a model of almost no weights takes at its peak, which is Python, torch,
traced code and data. What is left is what weights, states, gradients and offloaded activations take on the host.
malloc is told to give freed buffers back: what it keeps for later would be counted twice, here and by the meter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.pydoc import prepare
from planner.candidate.candidate import assemble
from planner.candidate.setting import Budgets, Setting
from planner.codec import to_json
from planner.greedy.streaming import profile, streamed
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse
from planner.measure.times import OptionTimes, Times
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import cpu_peak_bytes, gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.search.problem import Problem
from planner.search.states_on_disk import with_all_on_disk
from worker.training.metrics import read_metrics

_ROOT = Path(__file__).resolve().parent.parent
_UNLIMITED = 2**50
_MACHINE = Hardware(
    name="any",
    gpu_bytes=_UNLIMITED,
    cpu_bytes=_UNLIMITED,
    h2d_bytes_per_s=1e10,
    d2h_bytes_per_s=1e10,
    gpu_update_parameters_per_s=1e9,
    cpu_update_parameters_per_s=1e9,
    cpu_memory_bytes_per_s=1e10,
)
_EVERY_S = 0.004
_TINY_WIDTH = 64
_RETURNED_BYTES = 2**20  # buffers of the "device" that are larger go back to the system when they are freed
STEPS = 4
SAVES = (2, 4)  # of two steps more, where there is a drive: of what these two write between two checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One run: parameters, the most anonymous bytes while it loads, steps and saves, the device's metered peak, what
    the plan says the host holds, and what each step writes, as planned and by the kernel's count of the process."""

    parameters: int
    loading_bytes: int
    steps_bytes: int
    saving_bytes: int
    device_bytes: int
    planned_host_bytes: int
    planned_written_bytes: int
    written_bytes: float

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return max(self.loading_bytes, self.steps_bytes, self.saving_bytes)


def make_job(folder: Path, width: int, layers: int, drive: Path | None) -> Job:
    """A job on the example's text, whose model has random bf16 weights in several files; with a folder for optimizer
    states."""
    prepare(folder)
    config = LlamaConfig.from_pretrained(
        folder / "model",
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="100MB")
    keys = {
        "model": str(folder / "model"),
        "dataset": str(folder / "text.jsonl"),
        "bf16": True,
        "max_length": 64,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "save_steps": SAVES[0],
        "max_steps": STEPS + 2 * (drive is not None),
        "max_grad_norm": 1.0,
        "learning_rate": 1e-4,
        **({"disk_paths": [str(drive)], "save_total_limit": 1} if drive is not None else {}),
    }
    return Job.parse(yaml.safe_dump(keys), folder)


def plan_of(job: Job) -> tuple[Plan, Chain]:
    """Every weight that may leave the device does, and the CPU updates it; its states are on disk where a folder is
    given for that."""
    analysis = analyse(job, torch.device("cpu"))
    times = tuple(
        OptionTimes(kind=kind, option=option, forward_s=1.0, backward_s=2.0)
        for kind, codes in analysis.pairs.items()
        for option in codes
    )
    chain = analysis.chain(Times(options=times, device="none", measured=False))
    budgets = Budgets(gpu_bytes=_UNLIMITED, cpu_bytes=_UNLIMITED)
    slices = job.gradient_accumulation_steps
    if job.disk_paths:
        asked = Problem(
            chain=chain,
            hardware=_MACHINE,
            gpu_budget_bytes=_UNLIMITED,
            cpu_budget_bytes=_UNLIMITED,
            slices=slices,
            clip=True,
        )
        chain = with_all_on_disk(asked).chain
    setting = Setting(chain=chain, hardware=_MACHINE, budgets=budgets, slices=slices, clip=True)
    candidate = streamed(setting, profile(setting, "recompute"), ahead=False, source="streamed")
    plan = assemble(chain, candidate, slices=slices, clip=True)
    program = compile_program(plan, chain)
    verify(program, chain)
    peak = gpu_peak_bytes(program, chain)
    return replace(plan, gpu_budget_bytes=peak, gpu_peak_bytes=peak), chain


def anonymous_bytes(pid: int) -> int:
    """Of a process now; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def written_by(pid: int) -> int:
    """Bytes that a process has had written to drives; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), 0)


def measure(folder: Path, *, width: int, layers: int, drive: Path | None = None) -> Footprint:
    """Run the job in `folder`, which is empty or not there; with all optimizer states on the `drive`."""
    job = make_job(folder, width, layers, drive)
    plan, chain = plan_of(job)
    run = folder / "run"
    run.mkdir()
    (run / "resolved.yaml").write_text(job.resolved_yaml(), "utf-8")
    parts = {"plan": plan, "chain": chain, "hardware": _MACHINE}
    made = {name: to_json(part) for name, part in parts.items()}
    (run / "plan.json").write_text(json.dumps({"format": 1, **made}), "utf-8")
    samples: list[tuple[float, int, int]] = []
    with (folder / "log.txt").open("w") as log:
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        environment["MALLOC_MMAP_THRESHOLD_"] = str(_RETURNED_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.trainer", str(run)], stdout=log, stderr=log, env=environment
        )
        while process.poll() is None:
            samples.append((time.time(), anonymous_bytes(process.pid), written_by(process.pid)))
            time.sleep(_EVERY_S)
    if process.returncode:
        raise RuntimeError((folder / "log.txt").read_text("utf-8"))
    events = read_metrics(run / "metrics.jsonl")
    began = next(event["time"] for event in events if event["event"] == "start")
    steps = [event for event in events if event["event"] == "step"]
    of_saves = [events.index(steps[number - 1]) for number in SAVES if number < len(steps)]
    saves = [(events[k]["time"], events[k + 1]["time"]) for k in of_saves] + [(steps[-1]["time"], float("inf"))]

    def most(inside: list[tuple[float, float]]) -> int:
        return max(size for at, size, _ in samples if any(lo <= at <= hi for lo, hi in inside))

    def written_until(save: int) -> int:
        """When that checkpoint is there, nothing is under way."""
        end = events[of_saves[save] + 1]["time"]
        return next(count for at, _, count in samples if at >= end)

    written = 0.0
    if drive is not None:
        copied = sum(file.stat().st_size for file in (run / f"checkpoints/step-{SAVES[1]}").iterdir())
        written = (written_until(1) - written_until(0) - copied) / (SAVES[1] - SAVES[0])
    return Footprint(
        parameters=sum(t.elements for t in (*chain.tensors(), *chain.frame_tensors)),
        loading_bytes=most([(0.0, began)]),
        steps_bytes=most([(began, steps[-1]["time"])]),
        saving_bytes=most(saves),
        device_bytes=max(event["gpu_peak_bytes"] or 0 for event in steps),
        planned_host_bytes=cpu_peak_bytes(plan, chain),
        planned_written_bytes=chain.stored_bytes(plan.cpu_updated()),
        written_bytes=written,
    )


def bytes_per_parameter(big: Footprint, tiny: Footprint) -> float:
    """Host bytes per parameter of `big`; `tiny` says what a process takes whose model has next to no weights."""
    return (big.peak_bytes - tiny.peak_bytes - big.device_bytes + tiny.device_bytes) / (
        big.parameters - tiny.parameters
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny, big = (
            measure(Path(folder, str(width)), width=width, layers=options.layers)
            for width in (_TINY_WIDTH, options.width)
        )
    found = bytes_per_parameter(big, tiny)
    for run in (tiny, big):
        print(
            f"{run.parameters:13,d} parameters: loading {run.loading_bytes:,d}, steps {run.steps_bytes:,d}, "
            f"saving {run.saving_bytes:,d}; device {run.device_bytes:,d}, host as planned {run.planned_host_bytes:,d}"
        )
    print(f"{found:.2f} bytes per parameter on the host")
    if options.json:
        rows = {"tiny": asdict(tiny), "model": asdict(big), "bytes_per_parameter": round(found, 3)}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
