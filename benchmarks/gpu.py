"""One training, many ways, on this machine's GPU in one go: plain PyTorch, offmate under four budgets, DeepSpeed.

    python benchmarks/gpu.py [--dtype bf16 fp32] [--layers 16] [--width 1024] [--length 512] [--batch 4] [--slices 4]
                             [--rounds 5] [--steps 3] [--shares 0.5 0.25 0.1] [--device cuda]
                             [--planning-seconds 20] [--json FILE]

The budgets are shares of plain PyTorch's peak, and the least that the planner can do with. Machine and blocks
are measured first, as a job does. Every contender is a process of its own (contenders.py), forked from this one, which
has imported all and made the weights, and never uses the device itself. A contender takes turns with plain PyTorch,
which stays there all the time: a ratio is of two visits of one round, a visit being `--steps` steps in a row, the last
update included. The defaults are for a card of 12 GB, which must hold plain PyTorch and another contender together.
What cannot run is named with its reason. JSON is written after every contender, and how far it is, with the seconds
since the start, to stdout. `--device cpu` tries the script on a tiny model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as planner and trainer do, before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's begin with the import, and a fork has them no more
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.contenders import Visit, Work, serve
from benchmarks.forked import Ended, Forks, check_cuda, said
from benchmarks.spread import Spread
from planner.arrange.pack import can_arrange
from planner.codec import Json, from_json, to_json
from planner.errors import UserError
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse_model, measure_times
from planner.measure.machine_rates import measure_hardware
from planner.measure.times import device_name
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem

ZERO = {"DeepSpeed ZeRO-Offload": "zero-offload", "DeepSpeed ZeRO-3 offload": "zero-3-offload"}
RESULTS = Path(__file__).with_name("results")


class Missing(Exception):
    """A contender that cannot run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """A contender against plain PyTorch, visit by visit; the one that warmed up apart. Budget and predictions (a
    step's seconds, peak bytes, the bound for any schedule) are of offmate's plans."""

    name: str
    budget_bytes: int | None = None
    plan_source: str = ""
    predicted_s: float | None = None
    bound_s: float | None = None
    predicted_bytes: int | None = None
    warm: Visit | None = None
    visits: tuple[Visit, ...] = ()
    plain: tuple[Visit, ...] = ()
    missing: str = ""

    @property
    def step(self) -> Spread:
        """Seconds of a step."""
        return Spread.of(v.step_s for v in self.visits)

    @property
    def ratio(self) -> Spread:
        """Step time over plain PyTorch's of the same round."""
        return Spread.of_ratios((v.step_s for v in self.visits), (v.step_s for v in self.plain))

    @property
    def waited(self) -> Spread | None:
        """Seconds of a step that issuing computation waited; None where nobody counts."""
        waited = [v.waited_s for v in self.visits if v.waited_s is not None]
        return Spread.of(waited) if waited else None

    @property
    def issuing(self) -> Spread:
        """Seconds of a step until all of it was issued."""
        return Spread.of(v.issuing_s for v in self.visits)

    @property
    def peak_bytes(self) -> int | None:
        """The most in any visit."""
        visits = (*([self.warm] if self.warm else []), *self.visits)
        return max((v.peak_bytes for v in visits if v.peak_bytes is not None), default=None)

    def summary(self) -> Json:
        """The figures of the table, and all that they come from."""
        found: dict[str, Json] = {"figures": None}
        if self.visits:
            found["figures"] = {
                "step_s": to_json(self.step),
                "ratio": to_json(self.ratio),
                "waited_s": to_json(self.waited),
                "issuing_s": to_json(self.issuing),
                "peak_bytes": self.peak_bytes,
                "measured_over_predicted": self.step.median / self.predicted_s if self.predicted_s else None,
            }
        return {"heat": to_json(self), **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The machine, and the blocks on it."""

    device: str
    hardware: Hardware
    chain: Chain


def measure(work: Work) -> Measured:
    """Machine and blocks, as a job measures them."""
    check_cuda()
    device = torch.device(work.device)
    hardware = measure_hardware(device, work.torch_dtype)
    arranged = device.type == "cuda" and can_arrange()
    analysis = analyse_model(work.model(), work.batches()[0], device=device, arranged=arranged)
    times = measure_times(analysis, device, hardware, slices=work.slices)
    return Measured(device=device_name(device), hardware=hardware, chain=analysis.chain(times))


class Child:
    """A contender's process. Raises Missing where it fails; what it says of that is on stderr."""

    def __init__(self, name: str, work: Work, folder: Path, forks: Forks) -> None:
        self._name = name
        self._forked = forks.start(partial(serve, name, work, folder))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._forked.__exit__()

    def visit(self, steps: int) -> Visit:
        """So many steps."""
        with suppress(OSError):  # where it has ended, its answer says so
            self._forked.tell(steps)
        return self.answer()

    def answer(self) -> Visit:
        """The next one."""
        try:
            found = self._forked.answer()
        except Ended as error:
            raise Missing(f"{self._name} ended: {error}") from None
        if isinstance(found, dict) and "error" in found:
            raise Missing(f"{self._name}: {found['error']}")
        return from_json(Visit, found)


class Bench:
    """One dtype's heats, in a folder of files for the contenders. This process computes nothing: what does is forked
    from it, so that only one imports, and makes the weights."""

    def __init__(
        self,
        work: Work,
        folder: Path,
        forks: Forks,
        *,
        rounds: int,
        steps: int,
        shares: Sequence[float],
        planning_s: float,
    ) -> None:
        self._shares, self._forks = shares, forks
        self.work, self._folder = work, folder
        self._rounds, self._steps, self._planning_s = rounds, steps, planning_s
        work.prepare()
        said(f"{work.dtype}: the weights are made")
        (found,) = forks.answers([lambda: to_json(measure(work))], 1)
        self.measured = from_json(Measured, found)
        said("machine and blocks are measured")

    def heats(self) -> Iterator[Heat]:
        """Plain PyTorch's own figures, then every contender beside it."""
        with self._child("plain") as plain:
            alone = Heat(name="plain PyTorch")
            try:
                warm = plain.answer()
                own = tuple(plain.visit(self._steps) for _ in range(self._rounds))
            except Missing as error:  # then there is nothing to compare with
                yield replace(alone, missing=str(error))
                return
            yield replace(alone, warm=warm, visits=own, plain=own)
            assert warm.peak_bytes is not None
            for heat, plan in self._planned(warm.peak_bytes):
                yield heat if plan is None else self._offmate(heat, plan, plain)
            for name, kind in ZERO.items():
                if importlib.util.find_spec("deepspeed") is None:
                    yield Heat(name=name, missing="deepspeed is not installed")
                else:
                    yield self._heat(Heat(name=name), kind, plain)

    def _planned(self, peak_bytes: int) -> Iterator[tuple[Heat, Plan | None]]:
        """For each budget the plan, all made before the first contender runs: planning beside it would take its
        processor's time. None where there is none, which the heat then says."""
        names = [*(f"offmate, {share:.0%} of plain" for share in self._shares), "offmate, least possible"]
        budgets = [*(int(share * peak_bytes) for share in self._shares), None]
        at_once = max(1, len(os.sched_getaffinity(0)) // 2)
        found = [*self._forks.answers([partial(self._plan, budget) for budget in budgets], at_once)]
        said("all plans are made")
        for name, answer in zip(names, found, strict=True):
            assert isinstance(answer, dict)
            budget = from_json(int, answer["budget"])
            if answer["plan"] is None:
                yield Heat(name=name, budget_bytes=budget, missing=str(answer["missing"])), None
                continue
            plan = from_json(Plan, answer["plan"])
            yield (
                Heat(
                    name=name,
                    budget_bytes=budget,
                    predicted_s=plan.step_s,
                    bound_s=plan.bound_s,
                    predicted_bytes=plan.gpu_peak_bytes,
                    plan_source=plan.source,
                ),
                plan,
            )

    def _plan(self, budget_bytes: int | None) -> Json:
        """For so many bytes, or for the least that the planner can do with."""
        hardware = self.measured.hardware
        problem = Problem(
            chain=self.measured.chain,
            hardware=hardware,
            gpu_budget_bytes=budget_bytes or 0,
            cpu_budget_bytes=hardware.cpu_bytes,
            slices=self.work.slices,
            clip=False,
        )
        if budget_bytes is None:
            problem = replace(problem, gpu_budget_bytes=problem.least().gpu_bytes)
        try:
            plan, missing = to_json(problem.plan()), ""
        except UserError as error:
            plan, missing = None, "; ".join((str(error).splitlines()[0], *error.numbers))
        return {"budget": problem.gpu_budget_bytes, "plan": plan, "missing": missing}

    def _offmate(self, heat: Heat, plan: Plan, plain: Child) -> Heat:
        made = {"plan": to_json(plan), "chain": to_json(self.measured.chain)}
        (self._folder / "plan.json").write_text(json.dumps(made), "utf-8")
        return self._heat(heat, "offmate", plain)

    def _heat(self, heat: Heat, kind: str, plain: Child) -> Heat:
        """The contender's visits and plain PyTorch's in turns, each first in every other round."""
        pairs: list[tuple[Visit, Visit]] = []
        warm, missing = None, ""
        with self._child(kind) as child:
            try:
                warm = child.answer()
                said(f"{heat.name} has warmed up")
                for number in range(self._rounds):
                    order = (child, plain) if number % 2 else (plain, child)
                    found = {id(one): one.visit(self._steps) for one in order}
                    pairs.append((found[id(child)], found[id(plain)]))
                    said(f"{heat.name}: {pairs[-1][0].step_s / pairs[-1][1].step_s:.3f} of plain PyTorch's step")
            except Missing as error:
                missing = str(error)
        return replace(
            heat, warm=warm, visits=tuple(p[0] for p in pairs), plain=tuple(p[1] for p in pairs), missing=missing
        )

    def _child(self, kind: str) -> Child:
        return Child(kind, self.work, self._folder, self._forks)


def show_head(work: Work, hardware: Hardware) -> None:
    """What the table of one dtype is of, the rates its predictions rest on, and its columns."""
    tokens = f"{work.slices} × {work.batch} × {work.length}"
    print(f"\n{work.dtype}: {work.layers} layers of width {work.width}, {tokens} tokens")
    print(hardware.name)
    print(
        f"link {hardware.h2d_bytes_per_s / 1e9:.1f} GB/s there, {hardware.d2h_bytes_per_s / 1e9:.1f} back; updates "
        f"{hardware.gpu_update_parameters_per_s / 1e9:.2f} G parameters/s on the device, "
        f"{hardware.cpu_update_parameters_per_s / 1e9:.2f} on the CPU; host memory "
        f"{hardware.cpu_memory_bytes_per_s / 1e9:.1f} GB/s; {hardware.flops_per_s / 1e12:.2f} TFLOP/s; "
        f"launching {hardware.launch_s * 1e3:.2f} ms a block"
    )
    print(
        f"{'':26s}{'MB: budget':>12s}{'predicted':>10s}{'measured':>10s}{'ms: predicted':>15s}{'measured':>10s}"
        f"{'issuing':>9s}{'waited':>9s}   ratio to plain: median (least, greatest)",
        flush=True,
    )


def show(heat: Heat) -> None:
    """A line of the table."""
    sizes = [_cell(n, 1e-6) for n in (heat.budget_bytes, heat.predicted_bytes, heat.peak_bytes)]
    if heat.missing:
        print(f"{heat.name:26s}{sizes[0]:>12s}  missing: {heat.missing}", flush=True)
        return
    waited_s = heat.waited.median if heat.waited else None
    times = [_cell(n, 1e3) for n in (heat.predicted_s, heat.step.median, heat.issuing.median, waited_s)]
    cells = zip((*sizes, *times), (12, 10, 10, 15, 10, 9, 9), strict=True)
    print(f"{heat.name:26s}{''.join(f'{cell:>{width}s}' for cell, width in cells)}   {heat.ratio:.3f}", flush=True)


def _cell(number: float | None, factor: float) -> str:
    return "" if number is None else f"{number * factor:,.1f}"


SIZES = {
    "layers": (16, 4),
    "width": (1024, 256),
    "vocabulary": (16384, 64),
    "length": (512, 16),
    "batch": (4, 2),
    "slices": (4, 2),
    "rounds": (5, 2),
    "steps": (3, 1),
}
"""Defaults on a GPU, and on the CPU."""


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line, or `words`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp32"), default=("bf16", "fp32"))
    for name, (usual, tiny) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {usual}, on the CPU {tiny}")
    parser.add_argument("--shares", nargs="*", type=float, default=(0.5, 0.25, 0.1), help="budgets, of plain's peak")
    parser.add_argument("--planning-seconds", type=float, default=20.0, help="for each plan at most")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu-DEVICE.json, on the CPU none")
    given = parser.parse_args(words)
    for name, sizes in SIZES.items():
        if getattr(given, name) is None:
            setattr(given, name, sizes[given.device == "cpu"])
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Run everything; the exit status is 1 where plain PyTorch, or offmate with a plan, could not run."""
    given = arguments(words)
    said("all is imported")
    forks = Forks()
    if given.device == "cuda" and [*forks.answers([torch.cuda.is_available], 1)] != [True]:
        sys.exit("there is no CUDA device here; --device cpu tries the script")
    results: list[dict[str, Json]] = []
    failed = False
    for dtype in given.dtype:
        sizes = {name: getattr(given, name) for name in SIZES if name not in ("rounds", "steps")}
        work = Work(**sizes, dtype=dtype, device=given.device)
        heats: list[Json] = []
        with tempfile.TemporaryDirectory(prefix="offmate-gpu-") as folder:
            bench = Bench(
                work,
                Path(folder),
                forks,
                rounds=given.rounds,
                steps=given.steps,
                shares=given.shares,
                planning_s=given.planning_seconds,
            )
            device, hardware = bench.measured.device, bench.measured.hardware
            results.append({"work": to_json(work), "hardware": to_json(hardware), "contenders": heats})
            path = given.json
            if path is None and given.device == "cuda":
                path = RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower())}.json"
            about = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "results": results}
            show_head(work, hardware)
            for number, heat in enumerate(bench.heats()):
                show(heat)
                failed |= bool(heat.missing) and (number == 0 or heat.predicted_s is not None)
                heats.append(heat.summary())
                if path:
                    path.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
