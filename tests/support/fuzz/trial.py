"""A case trained under a plan and in a plain loop, and what comes of it."""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from planner.errors import UserError
from planner.measure.analysis import Analysis, analyse_model
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.search.make_plan import make_plan
from planner.search.problem import Problem
from tests.support.fuzz.case import Case
from tests.support.fuzz.model import Model, batches_of, model_of
from tests.support.random_plans import random_plan
from worker import api
from worker.data.seeds import micro_batch_seed
from worker.engine.engine import Engine

FINE = ("same", "declared", "refused", "unusable")
SEED = 5
ROUNDING = {False: 2e-6, True: 1e-2}  # of losses and norm of the first step, in fp32 and bf16, as `certify` has it

Numbers = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`kind`: one of FINE ("unusable": plain PyTorch fails), or DIFFERS (other numbers, and nobody said so), OVER (more
    bytes than predicted), CRASHES (an error that is not for people). `text` says which, in a line."""

    kind: str
    text: str = ""

    @property
    def fine(self) -> bool:
        return self.kind in FINE


def judge(case: Case) -> Verdict:
    """Train both ways."""
    try:
        expected = _plainly(case)
    except Exception as error:
        return Verdict(kind="unusable", text=f"{type(error).__name__}: {error}"[:200])
    try:
        return _compared(case, expected, *_under_a_plan(case))
    except UserError as error:
        return Verdict(kind="refused", text=f"{error.code}: {error.what}")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict(kind="CRASHES", text=f"{type(error).__name__} in {place.name}: {error}"[:300])


def _compared(case: Case, expected: Numbers, got: Numbers, plan: Plan, peak: int, inexact: str) -> Verdict:
    if peak > plan.gpu_peak_bytes:
        return Verdict(kind="OVER", text=f"{peak} bytes, predicted were {plan.gpu_peak_bytes}; {plan.options}")
    if odd := sorted(expected.keys() ^ got.keys()):
        return Verdict(kind="DIFFERS", text=f"only one has {odd[0]}")
    wrong = [name for name, value in expected.items() if not _equal(value, got[name])]
    if not wrong:
        return Verdict(kind="same")
    off = {name: _difference(expected[name], got[name]) for name in wrong}
    worst = max(wrong, key=off.__getitem__)
    text = f"{wrong[0]} by {off[wrong[0]]:.1e} of its size, {worst} by {off[worst]:.1e}"
    begin = [off.get(name, 0.0) for name in ("loss 0", "norm 0")]
    if inexact and max(begin) <= ROUNDING[case.bf16 or "autocast" in case.features]:
        return Verdict(kind="declared", text=f"{text}; {inexact}")
    return Verdict(kind="DIFFERS", text=f"{text}; {inexact or plan.options}")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, with NaN equal to itself."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def _difference(wanted: Tensor, found: Tensor) -> float:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return float("inf")
    off = (wanted.double() - found.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)
    return float(off.nan_to_num(nan=float("inf")))


def _optimizer(case: Case, model: Model) -> tuple[torch.optim.AdamW, Any]:
    """Groups that differ in everything, and what changes their rates."""
    trained = [p for p in model.parameters() if p.requires_grad]
    every = [
        {
            "params": trained[number :: case.groups],
            "lr": 3e-3 / (number + 1),
            "weight_decay": 0.1 * number,
            "betas": (0.9 - 0.05 * number, 0.97),
            "eps": 10.0 ** -(8 - number),
        }
        for number in range(case.groups)
    ]
    optimizer = torch.optim.AdamW([group for group in every if group["params"]], fused=True)
    schedulers = torch.optim.lr_scheduler
    if case.seed % 3 == 0:
        return optimizer, schedulers.OneCycleLR(optimizer, max_lr=4e-3, total_steps=case.steps + 1)
    return optimizer, schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def _items(batches: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()


def _plainly(case: Case) -> Numbers:
    """What one would write without offmate. Weights narrower than fp32 have masters."""
    model, out = model_of(case), Numbers()
    optimizer, schedule = _optimizer(case, model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {n: torch.nn.Parameter(p.detach().float()) if case.bf16 else p for n, p in trained.items()}
    twin = {trained[name]: master for name, master in masters.items()}
    for group in optimizer.param_groups:
        group["params"] = [twin[p] for p in group["params"]]
    for step in range(case.steps):
        batches = batches_of(case, step)
        rest = {} if len(batches) == 1 else {"num_items_in_batch": _items(batches)}
        losses = []
        for k, batch in enumerate(batches):
            torch.manual_seed(micro_batch_seed(SEED, step, k))
            losses.append(model(**batch, **rest).loss)
            losses[-1].backward()
        for name, master in masters.items():
            if case.bf16 and (gradient := trained[name].grad) is not None:
                master.grad, trained[name].grad = gradient.float(), None
        if case.clip is not None:
            out[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(list(masters.values()), case.clip).clone()
        optimizer.step()
        optimizer.zero_grad()
        if case.bf16:
            with torch.no_grad():
                for name, master in masters.items():
                    trained[name].copy_(master)
        schedule.step()
        out[f"loss {step}"] = torch.stack([loss.detach() for loss in losses]).sum()
        if "evaluates" in case.features:
            model.eval()
            torch.manual_seed(step)
            with torch.no_grad():
                out[f"evaluation {step}"] = model(**batches[0]).loss
            model.train()
    for name, master in masters.items():
        if state := optimizer.state.get(master):
            out |= {f"{part} {name}": state[part] for part in ("exp_avg", "exp_avg_sq")}
            out[f"master {name}"] = master.detach()
    return out | _of_model(model)


def _of_model(model: torch.nn.Module) -> Numbers:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def _under_a_plan(case: Case) -> tuple[Numbers, Plan, int, str]:
    model, out, peaks = model_of(case), Numbers(), []
    optimizer, schedule = _optimizer(case, model)
    with _steered(case) as inexact:
        engine = api.prepare(
            model,
            batches_of(case, 0),
            optimizer=optimizer,
            max_grad_norm=case.clip,
            device="cpu",
            seed=SEED,
            measure=False,
        )
    try:
        for step in range(case.steps):
            batches = batches_of(case, step)
            loss = engine.step(batches)
            schedule.step()
            out[f"loss {step}"] = loss.clone()
            if engine.grad_norm is not None:
                out[f"norm {step}"] = engine.grad_norm.clone()
            assert engine.peak_bytes is not None
            peaks.append(engine.peak_bytes)
            del loss
            if "evaluates" in case.features:
                torch.manual_seed(step)
                out[f"evaluation {step}"] = engine.evaluate(batches[0])
            if "saves" in case.features and step == 1:
                with tempfile.TemporaryDirectory() as folder:
                    engine.save(folder)
                    engine.load(folder)
        for name, parts in engine._engine.state():
            if int(parts.pop("left_out", 0)) < case.steps:
                out |= {f"{part} {name.replace('.turns.0', '')}": t.clone() for part, t in parts.items()}
        plan = engine.plan
        return out | _of_model(engine.restore()), plan, max(peaks), "; ".join(inexact)
    finally:
        engine.close()


@contextlib.contextmanager
def _steered(case: Case) -> Iterator[list[str]]:
    """Inside, `prepare` plans for the case's budget and counts bytes. What it says of rounding comes into the list."""
    inexact: list[str] = []

    def analysed(*args: Any, **kwargs: Any) -> Analysis:
        analysis = analyse_model(*args, **kwargs)
        inexact.extend(analysis.inexact)
        return analysis

    def planned(problem: Problem) -> Plan:
        if case.share is None:
            plan = random_plan(problem.chain, random.Random(case.seed), slices=problem.slices, clip=problem.clip)
            return replace(plan, gpu_peak_bytes=gpu_peak_bytes(compile_program(plan, problem.chain), problem.chain))

        def at_once(budget_bytes: int) -> Plan:
            return make_plan(replace(problem, gpu_budget_bytes=budget_bytes).setting)

        least, most = problem.least().gpu_bytes, at_once(2**34).gpu_peak_bytes
        return at_once(least + int(case.share * max(0, most - least)))

    patches = {"analyse_model": analysed, "Engine": functools.partial(Engine, metered=True)}
    with mock.patch.multiple(api, **patches), mock.patch.object(Problem, "plan", planned):
        yield inexact
