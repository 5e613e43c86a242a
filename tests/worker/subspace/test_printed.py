"""Cores under a plan against LSP-Offload as it is printed, which writes the weights in every step. Some tests take
seconds: a model is traced for its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from planner.job.schema import Job
from planner.models.lsp import Parts, Shape, layers_with_cores
from tests.support.lora_jobs import CPU, engine_of, plan_of, steps_of
from tests.support.lsp_jobs import lsp_job
from tests.support.printed_lsp import Printed, as_matrix, shapes_of, train_printed
from tests.support.texts import byte_tokenizer
from worker.check.plain_pytorch import PlainResult, PlainTraining
from worker.data.batches import Batches
from worker.engine.engine import Engine
from worker.storage.shards import Item
from worker.subspace.change import Changed, Projectors
from worker.subspace.projectors import new_projectors, projected
from worker.training.learning_rate import optimizer_of
from worker.training.model import load_model

torch.set_num_threads(1)

STEPS = 8
"""Changes come before steps 0, 3 and 6."""
PLAIN = {"max_steps": STEPS, "weight_decay": 0.0, "adam_epsilon": 1e-3}
"""There is no decay: it acts on S here, on W as printed. With Adam's usual 1e-8 a step's size does not depend on its
gradient's, also where that is rounding errors alone; so the two forms, in fp32, would be as far from fp64 as apart."""
UNCLIPPED = {**PLAIN, "max_grad_norm": 0}
"""Clipping measures the gradients of cores, not of weights, so it is off."""


@dataclass
class Trained:
    """What cores have learned. `weights`: merged. `changes`, and the projectors `taken` by each of them."""

    losses: list[Tensor]
    norms: list[Tensor | None]
    weights: dict[str, Tensor]
    changes: list[Changed]
    taken: dict[int, dict[str, tuple[Parts, Parts]]]


class Plain(PlainTraining):
    """Plain PyTorch, which is quick, as nothing is traced. It gives weights as an engine does."""

    def __init__(self, job: Job) -> None:
        model = self.model = load_model(job)
        optimizer = optimizer_of(job, model)
        super().__init__(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm, device=CPU, on_cpu=())

    def masters(self) -> Iterator[Item]:
        return self.state()

    def frozen(self, names: Iterable[str]) -> Iterator[Item]:
        return ((name, {"master": self.model.get_parameter(name).detach()}) for name in names)

    def written(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[Item]:
        return ((name, {"weight": self.model.get_parameter(name).to(dtype)}) for name, dtype in dtypes.items())

    def step(self, batches: list[dict[str, Tensor]], *, num_items_in_batch: Tensor, **kwargs: Any) -> PlainResult:
        return super().step(batches, items=num_items_in_batch, **kwargs)


def train_cores(job: Job, trains: Engine | Plain) -> Trained:
    model = load_model(job)  # an engine has taken over its own
    layers, projectors, batches = dict(layers_with_cores(model)), Projectors(model, job), Batches(job, byte_tokenizer())
    results, changes, taken = [], [], {}
    for step, (rows, seeds, items) in enumerate(steps_of(job, STEPS)):
        if projectors.due(step):
            sampled = batches.sampled(step)
            changes.append(projectors.change(trains, step, sampled, batches.num_items(sampled)))
            now = {name: parts["master"].clone() for name, parts in trains.frozen(projectors.names)}
            taken[step] = {f"{name}.weight": sides_of(now, name) for name in layers}
        results.append(trains.step(rows, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items))
    written = trains.written({f"{name}.weight": torch.float32 for name in layers})
    weights = {name: parts["weight"].clone() for name, parts in projectors.merged(trains, written)}
    losses = [loss.clone() for result in results for loss in result.losses]
    return Trained(losses, [result.grad_norm for result in results], weights, changes, taken)


def sides_of(tensors: dict[str, Tensor], layer: str) -> tuple[Parts, Parts]:
    left, right = (
        {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        for start in (f"{layer}.left.", f"{layer}.right.")
    )
    return left, right


def check_alike(job: Job, found: Trained) -> Printed:
    """Train as printed, and compare. Returns what that has learned."""
    printed, losses, norms = train_printed(job, STEPS, found.taken)
    before = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).state_dict()
    wanted = {name: p.detach() for name, p in printed.model.named_parameters()}
    assert found.weights.keys() == printed.weights.keys()
    moved = max(float((wanted[name] - before[name]).abs().max()) for name in found.weights)
    apart = max(float((wanted[name] - weight).abs().max()) for name, weight in found.weights.items())
    assert moved > 1e-2 and apart <= 1e-5 * moved, (moved, apart)
    torch.testing.assert_close(torch.stack(found.losses), torch.stack(losses), rtol=1e-5, atol=1e-5)
    others = wanted.keys() - found.weights.keys()
    assert others and all(torch.equal(wanted[name], before[name]) for name in others)
    numbers = [change.changed for change in found.changes]
    assert [*printed.changes] == [0, 3, 6] and [len(names) for names in printed.changes.values()] == numbers
    biases = [torch.tensor(list(change.before.values())).sort().values for change in found.changes[1:]]
    torch.testing.assert_close(biases, [torch.tensor(b).sort().values for b in printed.biases[1:]], rtol=1e-4, atol=0)
    if job.max_grad_norm is not None:
        assert min(norms) > 2 * job.max_grad_norm, "every step is clipped"
        torch.testing.assert_close([float(norm) for norm in found.norms], norms, rtol=1e-4, atol=0)
    return printed


KINDS = {"sparse": {}, "learned": {"lsp_fit_steps": 5}, "dense": {"lsp_nonzeros": None}}
CASES = {**{kind: {**UNCLIPPED, **keys} for kind, keys in KINDS.items()}, "clipped": {**PLAIN, "max_grad_norm": 0.2}}


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_cores_learn_what_the_printed_form_learns(tmp_path: Path, keys: dict[str, object]) -> None:
    job = lsp_job(tmp_path, **keys)
    check_alike(job, train_cores(job, Plain(job)))


@pytest.mark.later
@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_cores_under_a_plan_learn_what_the_printed_form_learns(tmp_path: Path, keys: dict[str, object]) -> None:
    """Takes about ten seconds: the model is traced for its plan, and again for its engine."""
    job = lsp_job(tmp_path, **keys)
    engine, _ = engine_of(job, *plan_of(job))
    found = train_cores(job, engine)
    engine.close()
    check_alike(job, found)


@pytest.mark.parametrize("threshold", [0.9, 2.0])
def test_only_layers_whose_bias_has_reached_the_threshold_change(tmp_path: Path, threshold: float) -> None:
    job = lsp_job(tmp_path, **UNCLIPPED, lsp_threshold=threshold)
    found = train_cores(job, Plain(job))
    check_alike(job, found)
    first, *later = (change.changed for change in found.changes)
    assert first == 21 and (later == [0, 0] if threshold > 1 else all(0 < number < 21 for number in later))
    for change in found.changes[1:]:
        stayed = [name for name, bias in change.before.items() if bias < threshold]
        assert len(stayed) == 21 - change.changed
        assert [change.after[name] for name in stayed] == [change.before[name] for name in stayed]


class TwoLayers(nn.Module):
    """In fp64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.x, self.y = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 4, requires_grad=number < 2)
            for number, shape in enumerate([(24, 20), (16, 24), (40, 20), (40, 16)])
        )

    def loss(self, first: Tensor, second: Tensor, rows: int = 40) -> Tensor:
        return functional.mse_loss(self.x[:rows] @ first.T @ second.T, self.y[:rows])


def drawn(name: str, gradient: Tensor, step: int, nonzeros: int | None, fit_steps: int) -> tuple[Tensor, Tensor]:
    shape = Shape(8, nonzeros, rotated=nonzeros is not None and not fit_steps)
    options = {"seed": (name, step), "dtype": torch.float32, "fit_steps": fit_steps}
    p, q = (as_matrix(side, 8).double() for side in new_projectors(gradient.float(), shape, **options))
    return p, q


@pytest.mark.parametrize(("nonzeros", "fit_steps"), [(2, 0), (2, 5), (None, 0)], ids=KINDS)
def test_the_two_recurrences_are_equal_in_fp64(nonzeros: int | None, fit_steps: int) -> None:
    """A check sees half of the rows: on all, Pᵀ G Q with singular vectors is diagonal, and the rest is rounding."""
    model, rate = TwoLayers(), 1e-2
    begun = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    printed = Printed(model, begun, lambda *args: drawn(*args, nonzeros, fit_steps), threshold=0.0, rate=rate)
    bases, sides = dict(begun), {}
    cores = {name: torch.zeros(8, 8, dtype=torch.float64, requires_grad=True) for name in begun}
    optimizer = torch.optim.Adam(cores.values(), lr=rate)
    for step in range(12):
        if step % 4 == 0:
            printed.check([model.loss(model.first, model.second, rows=20)])
            for name, (p, q) in printed.sides.items():
                if step:
                    state, (p_old, q_old), core = optimizer.state[cores[name]], sides[name], cores[name].detach()
                    moments = state["exp_avg"], state["exp_avg_sq"]
                    state["exp_avg"], state["exp_avg_sq"] = projected(moments, p.T @ p_old, q_old.T @ q)
                    bases[name] = bases[name] + p_old @ core @ q_old.T
                    core.zero_()
                sides[name] = p, q
        printed.step([model.loss(model.first, model.second)])
        optimizer.zero_grad()
        weights = {name: bases[name] + p @ cores[name] @ q.T for name, (p, q) in sides.items()}
        model.loss(**weights).backward()
        optimizer.step()
    for name, (p, q) in sides.items():
        weight = (bases[name] + p @ cores[name] @ q.T).detach()
        assert float((weight - begun[name]).abs().max()) > 1e-2
        torch.testing.assert_close(weight, getattr(model, name).detach(), rtol=0, atol=1e-12)


def test_the_matrices_and_kinds_of_the_printed_form_are_those_of_the_job(tmp_path: Path) -> None:
    job = lsp_job(tmp_path, lsp_size=60, lsp_nonzeros=3, trainable=[".*norm"])
    plain = AutoModelForCausalLM.from_pretrained(job.model)
    cores = layers_with_cores(load_model(job))
    assert shapes_of(job, plain) == {f"{name}.weight": layer.shape for name, layer in cores}
