"""Projectors by themselves: what they keep of gradients and of moments, and the layer between two of them."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.cpu.meter import Meter
from planner.models.lsp import (
    LinearWithCore,
    Parts,
    Projector,
    Shape,
    change_scratch_bytes,
    layers_with_cores,
    merged,
    whole,
    with_cores,
)
from tests.support.lsp_jobs import lsp_job
from tests.support.printed_lsp import as_matrix
from tests.support.tiny_models import batch_of, make_model
from worker.subspace.projectors import _drawn, bias, new_projectors, projected

torch.set_num_threads(1)
M, N, S, D = 96, 64, 16, 4
SPARSE, LEARNED, DENSE = Shape(S, D, rotated=True), Shape(S, D, rotated=False), Shape(S, None, rotated=False)
KINDS = {"sparse": (SPARSE, 0), "learned": (LEARNED, 5), "dense": (DENSE, 0)}
kinds = pytest.mark.parametrize(("shape", "fit_steps"), KINDS.values(), ids=KINDS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(rank: int, rows: int = M, columns: int = N, seed: int = 0) -> Tensor:
    return randn(rows, rank, seed=seed) @ randn(rank, columns, seed=seed + 1)


def made(
    gradient: Tensor, shape: Shape, fit_steps: int = 0, seed: object = 0, dtype: torch.dtype = torch.float32
) -> tuple[Parts, Parts]:
    return new_projectors(gradient, shape, seed=(seed,), dtype=dtype, fit_steps=fit_steps)


def matrices(gradient: Tensor, shape: Shape, fit_steps: int = 0, seed: object = 0) -> tuple[Tensor, Tensor]:
    left, right = (as_matrix(side, shape.size) for side in made(gradient, shape, fit_steps, seed))
    return left, right


def layer_of(gradient: Tensor, shape: Shape, fit_steps: int = 0, dtype: torch.dtype = torch.float32) -> LinearWithCore:
    """A layer with projectors made for the gradient, and with a core that is not 0."""
    layer = LinearWithCore(nn.Linear(*gradient.shape[::-1], dtype=dtype), shape)
    fill(layer, made(gradient, shape, fit_steps, dtype=dtype))
    return layer


@torch.no_grad()
def fill(layer: LinearWithCore, sides: tuple[Parts, Parts], core: float = 0.1) -> None:
    for projector, parts in zip((layer.left, layer.right), sides, strict=True):
        for name, tensor in projector.named_parameters():
            tensor.copy_(parts[name])
    layer.core.copy_(core * randn(*layer.core.shape, seed=7))


# ---- projectors


@kinds
def test_what_reads_a_gradient_is_adjoint_to_what_moves_a_weight(shape: Shape, fit_steps: int) -> None:
    gradient, core = randn(M, N), randn(S, S, seed=5)
    p, q = matrices(gradient_of(N, seed=8), shape, fit_steps)
    compressed = float(((p.T @ gradient @ q) * core).sum())
    moved = merged(torch.zeros(M, N), p, core, q)
    assert math.isclose(compressed, float((gradient * moved).sum()), rel_tol=1e-4)
    torch.testing.assert_close(moved, p @ core @ q.T)


@kinds
def test_a_projector_written_out_is_what_the_product_makes_of_it(shape: Shape, fit_steps: int) -> None:
    for parts in made(randn(M, N), shape, fit_steps):
        torch.testing.assert_close(whole(parts, S), as_matrix(parts, S))
        projector = Projector(shape, len(whole(parts, S)), torch.zeros(()))
        assert {name: (t.shape, t.dtype) for name, t in projector.named_parameters()} == {
            name: (t.shape, t.dtype) for name, t in parts.items()
        }


@pytest.mark.parametrize(("shape", "fit_steps"), [KINDS["sparse"], KINDS["learned"]], ids=["sparse", "learned"])
def test_a_row_of_a_sparse_projector_has_one_nonzero_in_each_group(shape: Shape, fit_steps: int) -> None:
    for parts, rows in zip(made(randn(M, N), shape, fit_steps), (M, N), strict=True):
        values = {name: parts[name] for name in ("columns", "values")}
        groups = as_matrix(values, S).view(rows, D, S // D)
        assert torch.equal((groups != 0).sum(2), torch.ones(rows, D, dtype=torch.int64))
        assert len(parts["columns"].unique()) == S, "every column has some"


def test_the_mean_of_drawn_projectors_loses_nothing() -> None:
    draws, rows = 4000, 12
    drawn = as_matrix(_drawn(draws * rows, LEARNED, torch.Generator().manual_seed(1), torch.zeros(())), S)
    every = drawn.view(draws, rows, S)
    mean = (every @ every.mT).mean(0)
    torch.testing.assert_close(mean, torch.eye(rows), rtol=0, atol=6 * math.sqrt(2 / D / draws))


@pytest.mark.parametrize("shape", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_projectors_have_orthonormal_columns(shape: Shape, dtype: torch.dtype, most: float) -> None:
    for parts in made(randn(M, N), shape, dtype=dtype):
        assert all(part.dtype == dtype for name, part in parts.items() if name != "columns")
        matrix = as_matrix({n: p if n == "columns" else p.float() for n, p in parts.items()}, S)
        torch.testing.assert_close(matrix.T @ matrix, torch.eye(S), rtol=0, atol=most)


@pytest.mark.parametrize("shape", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_a_gradient_of_low_rank_is_kept_whole(shape: Shape) -> None:
    for rank in (1, D):
        gradient = gradient_of(rank)
        assert bias(*matrices(gradient, shape), gradient) < 0.01
    gradient = gradient_of(2 * D)
    kept = bias(*matrices(gradient, shape), gradient)
    assert kept > 0.3 if shape is SPARSE else kept < 0.01


def test_bias_is_what_is_lost_as_a_share() -> None:
    gradient = randn(M, N)
    none, p = torch.zeros(M, S), matrices(gradient, SPARSE)[0]
    assert bias(none, torch.zeros(N, S), gradient) == 1
    assert bias(p, torch.eye(N)[:, :S], torch.zeros(M, N)) == 0
    assert bias(torch.eye(M), torch.eye(N), gradient) == 0
    assert math.isclose(bias(torch.eye(M), torch.eye(N) * 2**0.5, gradient), 1, rel_tol=1e-6), "twice the gradient"
    half = torch.eye(M)[:, : M // 2]
    assert math.isclose(
        bias(half, torch.eye(N), gradient), float(gradient[M // 2 :].norm() / gradient.norm()), rel_tol=1e-5
    )
    assert math.isclose(
        bias(p, torch.eye(N)[:, :S], 1e3 * gradient), bias(p, torch.eye(N)[:, :S], gradient), rel_tol=1e-4
    )


def test_learning_lowers_the_bias() -> None:
    gradient = gradient_of(8) + 0.1 * randn(M, N, seed=9)
    generator = torch.Generator().manual_seed(2)
    drawn = (as_matrix(_drawn(rows, LEARNED, generator, gradient), S) for rows in (M, N))
    little, much = (bias(*matrices(gradient, LEARNED, steps), gradient) for steps in (1, 100))
    assert bias(*drawn, gradient) > 2, "as drawn, the projectors keep far more than the gradient"
    assert much < 0.8 * little < 0.8 and much < 0.7


@kinds
def test_projectors_depend_on_the_seed_alone(shape: Shape, fit_steps: int) -> None:
    gradient, options = randn(M, N), {"dtype": torch.float32, "fit_steps": fit_steps}

    def values(*seed: object) -> list[Tensor]:
        return [part for side in new_projectors(gradient, shape, seed=seed, **options) for part in side.values()]

    first = values(1, "w", 3)
    torch.manual_seed(123)
    assert all(map(torch.equal, first, values(1, "w", 3)))
    for seed in ((2, "w", 3), (1, "v", 3), (1, "w", 4), (1, "w3", ""), (13, "w", "")):
        assert not any(map(torch.equal, first, values(*seed)))


# ---- moments


def test_moments_stay_where_projectors_do() -> None:
    gradient, first, second = randn(M, N), randn(S, S, seed=3), randn(S, S, seed=4).square()
    p, q = matrices(gradient, DENSE)
    same = projected((first, second), p.T @ p, q.T @ q)
    torch.testing.assert_close(same, (first, second), rtol=1e-4, atol=1e-4)
    nothing = projected((first, second), torch.zeros(S, S), torch.eye(S))
    assert not nothing[0].any() and not nothing[1].any()


def test_moments_are_projected_from_the_old_projectors_to_the_new() -> None:
    (p, q), (p_old, q_old) = (matrices(randn(M, N, seed=k), SPARSE, seed=k) for k in (1, 2))
    first, second = randn(S, S, seed=3), randn(S, S, seed=4).square()
    m, v = projected((first, second), p.T @ p_old, q_old.T @ q)
    torch.testing.assert_close(m, p.T @ (p_old @ first @ q_old.T) @ q, rtol=1e-4, atol=1e-5)
    turns = p.T @ p_old, q_old.T @ q
    wanted = torch.einsum("ij,jk,kl->il", turns[0] * turns[0], second, turns[1] * turns[1])
    torch.testing.assert_close(v, wanted, rtol=1e-4, atol=1e-7)
    assert float(v.min()) >= 0 and float(v.max()) > 0


# ---- the layer


@kinds
def test_a_layer_computes_with_the_whole_weight(shape: Shape, fit_steps: int) -> None:
    layer, x, error = layer_of(randn(M, N), shape, fit_steps), randn(3, 20, N), randn(3, 20, M, seed=1)
    p, q = (as_matrix(dict(side.named_parameters()), S).detach() for side in (layer.left, layer.right))
    weight = (layer.weight + p @ layer.core @ q.T).detach().requires_grad_()
    wanted = x @ weight.T + layer.bias
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    assert float((layer(x) - x @ layer.weight.T - layer.bias).detach().abs().max()) > 0.1, "the core matters"
    (gradient,) = torch.autograd.grad((wanted * error).sum(), weight)
    (layer(x) * error).sum().backward()
    torch.testing.assert_close(layer.core.grad, p.T @ gradient @ q, rtol=1e-4, atol=1e-3)
    assert not any(p.requires_grad for side in (layer.left, layer.right) for p in side.parameters())


@kinds
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_logits_are_alike_before_and_after_a_merge(
    tmp_path: Path, shape: Shape, fit_steps: int, dtype: torch.dtype, most: float
) -> None:
    job = lsp_job(tmp_path, lsp_size=S, lsp_nonzeros=shape.nonzeros, lsp_fit_steps=fit_steps)
    plain = make_model("llama", dtype).eval()
    model, inputs = with_cores(copy.deepcopy(plain), job), batch_of()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, plain(inputs).logits), "without cores' values nothing changes"
        for _, layer in layers_with_cores(model):
            fill(layer, made(randn(*layer.weight.shape), layer.shape, fit_steps, dtype=dtype), core=0.02)
        before = model(inputs).logits.float()
        for _, layer in layers_with_cores(model):
            p, q = (whole(dict(side.named_parameters()), layer.shape.size) for side in (layer.left, layer.right))
            layer.weight.copy_(merged(layer.weight, p, layer.core.float(), q))
            layer.core.zero_()
        after, begun = model(inputs).logits.float(), plain(inputs).logits.float()
    assert float((after - before).abs().max()) <= most
    assert float((after - begun).abs().max()) > 2 * most


def test_weights_in_bf16_lose_small_steps_that_a_core_keeps() -> None:
    base, rate = 0.02 * randn(128, 128).bfloat16(), 1e-5
    p, q = matrices(randn(128, 128, seed=1), SPARSE)
    core, each = torch.zeros(S, S), base.clone()
    for step in range(100):
        change = rate * (1 + randn(S, S, seed=step)).sign()
        core += change
        each = merged(each, p, change, q).bfloat16()
    moved = p @ core @ q.T
    torch.testing.assert_close(merged(base, p, core, q), base.float() + moved, rtol=0, atol=1e-8)

    def kept(weight: Tensor) -> float:
        return float(((weight.float() - base.float()) * moved).sum() / moved.square().sum())

    assert kept(each) < 0.2 and abs(kept(merged(base, p, core, q).bfloat16()) - 1) < 0.05


# ---- memory


@kinds
@pytest.mark.parametrize(("rows", "columns"), [(192, 96), (96, 192), (320, 320)], ids=str)
def test_a_change_of_one_layer_needs_no_more_than_counted(
    shape: Shape, fit_steps: int, rows: int, columns: int
) -> None:
    for size in (16, 48):
        shape = Shape(size, shape.nonzeros, shape.rotated)
        gradient, weight = randn(rows, columns), randn(rows, columns, seed=1)
        old = made(gradient, shape, fit_steps)
        core = torch.zeros(size, size)
        meter = Meter()
        for tensor in (gradient, weight, core, *old[0].values(), *old[1].values()):
            meter.add(tensor)
        before = meter.now
        with meter.watch():
            left, right = (whole(side, size) for side in old)
            bias(left, right, gradient)
            new = made(gradient, shape, fit_steps, seed=1)
            p, q = (whole(side, size) for side in new)
            bias(p, q, gradient)
            merged(weight, left, core, right)
            projected((core, core), p.T @ left, right.T @ q)
        used, counted = meter.peak - before, change_scratch_bytes(rows, columns, shape, fit_steps=fit_steps)
        assert used <= counted, (used, counted)
        assert counted < 6 * used, "not far more, either"
