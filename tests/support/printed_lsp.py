"""LSP-Offload in plain PyTorch as it is printed (Chen et al. 2024, algorithm 2): the oracle of the engine's cores.

Every matrix has its full gradient G from autograd, and every step writes the weight: W ← W + η P Δ Qᵀ, where Δ is
Adam's step on Pᵀ G Q. There is no core, no layer and no change of the product here; only projectors are drawn by the
product, so that both forms have the same, and not by a loss with a ridge. Two misprints are mended: of the norms in the
check none is squared, and the right factor of M and V is Q_oldᵀ Q. V's factors are squared element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from planner.job.schema import Job
from planner.models.lsp import Parts, Shape
from tests.support.texts import byte_tokenizer
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.subspace.projectors import bias, new_projectors

Draw = Callable[[str, Tensor, int], tuple[Tensor, Tensor]]
"""Makes P and Q for the matrix of this name with this gradient, after so many steps."""
Taken = Mapping[int, Mapping[str, tuple[Parts, Parts]]]
"""The tensors of P and Q, by step and by the matrix' name."""


@dataclass
class Printed:
    """A model that learns by algorithm 2. `matrices`: the names of its weights that do; the others stay. `losses` of
    the methods: those of slices, which are computed as they are asked for; their gradients add up. `biases`: what each
    check has found. `changes`: the matrices that have got new projectors, by step."""

    model: nn.Module
    matrices: Collection[str]
    draw: Draw
    threshold: float
    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_norm: float | None = None
    steps: int = 0
    biases: list[list[float]] = field(default_factory=list)
    changes: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {name: p for name, p in self.model.named_parameters() if name in self.matrices}
        self.sides: dict[str, tuple[Tensor, Tensor]] = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def gradients(self, losses: Iterable[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The losses, and G of each matrix."""
        self.model.zero_grad()
        found = []
        for loss in losses:
            loss.backward()
            found.append(loss.detach())
        return found, {name: weight.grad.clone() for name, weight in self.weights.items()}

    def check(self, losses: Iterable[Tensor]) -> None:
        """Algorithm 2, Main, the check: new projectors for each matrix of which they keep too little."""
        changed = self.changes[self.steps] = []
        biases: list[float] = []
        self.biases.append(biases)
        for name, g in self.gradients(losses)[1].items():
            if name in self.sides:
                p, q = self.sides[name]
                biases.append(float((p @ p.T @ g @ q @ q.T - g).norm() / g.norm()))
                if biases[-1] < self.threshold:
                    continue
            self.update_subspace(name, g)
            changed.append(name)

    def update_subspace(self, name: str, g: Tensor) -> None:
        """Algorithm 2, UpdateSubspace."""
        p, q = self.draw(name, g, self.steps)
        if name not in self.sides:
            self.moments[name] = g.new_zeros(p.shape[1], q.shape[1]), g.new_zeros(p.shape[1], q.shape[1])
        else:
            (p_old, q_old), (m, v) = self.sides[name], self.moments[name]
            self.moments[name] = (p.T @ p_old) @ m @ (q_old.T @ q), (p.T @ p_old) ** 2 @ v @ (q_old.T @ q) ** 2
        self.sides[name] = p, q

    @torch.no_grad()
    def step(self, losses: Iterable[Tensor]) -> tuple[list[Tensor], float]:
        """Algorithm 2, Main, the last four lines. Returns the losses, and the norm of all Pᵀ G Q, which is what
        `max_norm` clips."""
        with torch.enable_grad():
            found, gradients = self.gradients(losses)
        small = {name: self.sides[name][0].T @ g @ self.sides[name][1] for name, g in gradients.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in small.values()))
        share = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))
        self.steps += 1
        for name, g in small.items():
            (b1, b2), (m, v), (p, q) = self.betas, self.moments[name], self.sides[name]
            m, v = b1 * m + (1 - b1) * share * g, b2 * v + (1 - b2) * (share * g) ** 2
            delta = -(m / (1 - b1**self.steps)) / ((v / (1 - b2**self.steps)).sqrt() + self.eps)
            self.weights[name] += self.rate * p @ delta @ q.T
            self.moments[name] = m, v
        return found, norm


def as_matrix(parts: Mapping[str, Tensor], size: int) -> Tensor:
    """A projector from its tensors, written out."""
    if "dense" in parts:
        return parts["dense"].float()
    columns, values = parts["columns"].long(), parts["values"].float()
    places = torch.arange(len(values))[:, None].expand_as(columns), columns
    matrix = torch.zeros(len(values), size).index_put(places, values, accumulate=True)
    return matrix @ parts["rotation"].float() if "rotation" in parts else matrix


def shapes_of(job: Job, model: nn.Module) -> dict[str, Shape]:
    """The kind of projectors of every linear layer's weight but the head's."""
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            size, d = min(job.lsp_size, min(module.weight.shape) // 2), job.lsp_nonzeros
            size -= size % d if d else 0
            shapes[f"{name}.weight"] = Shape(size, d, rotated=bool(d) and job.lsp_fit_steps == 0)
    return shapes


def train_printed(job: Job, steps: int, taken: Taken) -> tuple[Printed, list[Tensor], list[float]]:
    """Train the job's model for so many steps, as printed. `taken`: the projectors that cores had from each check on,
    by its step. They are used here, too: singular vectors beyond a gradient's rank are made of its rounding errors.
    They must be as good as those drawn here, and sparse ones have the same columns. Returns what has learned, losses
    of slices, and norms."""
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.config.use_cache = False
    shapes = shapes_of(job, model)

    def draw(name: str, gradient: Tensor, step: int) -> tuple[Tensor, Tensor]:
        seed, options = (job.seed, name, step), {"dtype": torch.float32, "fit_steps": job.lsp_fit_steps}
        own = new_projectors(gradient, shapes[name], seed=seed, **options)
        for mine, theirs in zip(own, taken[step][name], strict=True):
            assert mine.keys() == theirs.keys() and ("dense" in mine or torch.equal(mine["columns"], theirs["columns"]))
        p, q, *both = (as_matrix(side, shapes[name].size) for side in (*taken[step][name], *own))
        assert abs(bias(p, q, gradient) - bias(*both, gradient)) < 1e-3
        return p, q

    printed = Printed(
        model,
        shapes,
        draw,
        job.lsp_threshold,
        job.learning_rate,
        (job.adam_beta1, job.adam_beta2),
        job.adam_epsilon,
        job.max_grad_norm,
    )
    batches = Batches(job, byte_tokenizer())

    def losses_of(rows: list[dict[str, Tensor]], seeds: list[int] | None) -> Iterable[Tensor]:
        items = torch.tensor(batches.num_items(rows))
        for k, batch in enumerate(rows):
            if seeds is not None:
                torch.manual_seed(seeds[k])
            yield model(**batch, num_items_in_batch=items).loss

    losses, norms = [], []
    for step in range(steps):
        if step % job.lsp_check_steps == 0:
            model.eval()  # without dropout
            printed.check(losses_of(batches.sampled(step), None))
        model.train()
        rows = batches.step(step)
        found, norm = printed.step(losses_of(rows, [micro_batch_seed(job.seed, step, k) for k in range(len(rows))]))
        losses += found
        norms.append(norm)
    return printed, losses, norms
