"""Makes projectors P (m × s) and Q (n × s) for a gradient G (m × n), and projects moments from old projectors to new.

The projectors are sparse ones, learned as LSP-Offload does it (Chen et al. 2024, section 4.1 and algorithm 2) or made
of G's first singular vectors with orthonormal columns, or dense ones: the first singular vectors themselves.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from planner.models.lsp import Parts, Shape, sketch_columns, spread, whole

_RATE = 0.05
"""Learning rate of projectors, which starts there and falls to 0 along a cosine."""
_JITTER = 1e-6
"""Added to PᵀP, as a share of its largest diagonal element: a column without nonzeros would leave it singular."""


def bias(left: Tensor, right: Tensor, gradient: Tensor) -> float:
    """The relative bias ‖P Pᵀ G Q Qᵀ − G‖ / ‖G‖ of what projectors keep of a gradient (algorithm 2); 0 if G is 0. All
    in fp32. Frobenius norms."""
    size = float(gradient.norm())
    if not size:
        return 0.0
    core = left.T @ gradient @ right
    return float(torch.addmm(gradient, left @ core, right.T, beta=-1).norm()) / size


def new_projectors(
    gradient: Tensor, shape: Shape, *, seed: tuple[object, ...], dtype: torch.dtype, fit_steps: int
) -> tuple[Parts, Parts]:
    """New projectors P and Q for `gradient` (fp32, m × n) with values in `dtype`, on the gradient's device. `seed`:
    whatever the random numbers depend on; these are drawn on the CPU, so that they are the same on every device.
    `fit_steps`: learn sparse projectors in so many steps; 0: make them of singular vectors."""
    generator = seeded(seed)
    if shape.nonzeros is None:
        first, second = _vectors(gradient, shape.size, generator)
        return {"dense": first.to(dtype)}, {"dense": second.to(dtype)}
    if fit_steps:
        sides = [_drawn(rows, shape, generator, gradient) for rows in gradient.shape]
        _learn(sides, gradient, shape, fit_steps)
    else:
        vectors = _vectors(gradient, shape.nonzeros, generator)
        sides = [_of_vectors(side, shape, generator) for side in vectors]
    left, right = ({**side, "values": side["values"].to(dtype)} for side in sides)
    return (_rotated(left, shape), _rotated(right, shape)) if shape.rotated else (left, right)


def projected(moments: tuple[Tensor, Tensor], left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's moments M and V of a core, for new projectors (algorithm 2, last lines): M ← L M R, and V likewise by the
    squares of L and R. `left`: L = Pᵀ P_old; `right`: R = Q_oldᵀ Q. (The paper prints Q_old Qᵀ, whose shape does not
    fit.) All s × s, fp32, on the CPU."""
    first, second = moments
    return left @ first @ right, left.square() @ second @ right.square()


def seeded(parts: tuple[object, ...]) -> torch.Generator:
    """A generator on the CPU whose numbers depend on `parts` alone."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _vectors(gradient: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """About the first `count` left and right singular vectors of the gradient, as columns: by a random sketch and two
    power iterations (Halko et al. 2011, algorithm 4.4)."""
    rows, columns = gradient.shape
    width = min(sketch_columns(count), rows, columns)
    sketch = gradient @ torch.randn(columns, width, generator=generator).to(gradient.device)
    for _ in range(2):
        back = gradient.T @ torch.linalg.qr(sketch).Q
        sketch = gradient @ torch.linalg.qr(back).Q
    basis = torch.linalg.qr(sketch).Q
    inner, _, vectors = torch.linalg.svd(basis.T @ gradient, full_matrices=False)
    return (basis @ inner)[:, :count], vectors[:count].T


def _columns(rows: int, shape: Shape, generator: torch.Generator, like: Tensor) -> Tensor:
    """A random column in each of d equal groups, for each row."""
    assert shape.nonzeros is not None
    wide = shape.size // shape.nonzeros
    drawn = torch.randint(0, wide, (rows, shape.nonzeros), generator=generator)
    return (drawn + wide * torch.arange(shape.nonzeros)).to(like.device, torch.int16)


def _drawn(rows: int, shape: Shape, generator: torch.Generator, like: Tensor) -> dict[str, Tensor]:
    """A random projector: normal values with variance 1 / d, so that the mean of P Pᵀ is 1 (section 4.1)."""
    assert shape.nonzeros is not None
    columns = _columns(rows, shape, generator, like)
    values = torch.randn(rows, shape.nonzeros, generator=generator) / math.sqrt(shape.nonzeros)
    return {"columns": columns, "values": values.to(like.device)}


def _of_vectors(vectors: Tensor, shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """A projector whose k-th group of columns holds the k-th of `vectors` (m × d): each column has the entries in its
    rows, scaled to the norm 1. So the vectors lie in its span."""
    columns = _columns(len(vectors), shape, generator, vectors)
    squares = vectors.new_zeros(shape.size).scatter_add(0, columns.long().flatten(), vectors.square().flatten())
    return {"columns": columns, "values": vectors / squares.sqrt().clamp(min=1e-12)[columns.long()]}


def _rotated(side: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The projector followed by L⁻ᵀ, where PᵀP = L Lᵀ: its columns become orthonormal, and their span stays."""
    matrix = whole(side, shape.size)
    gram = (matrix.T @ matrix).double().cpu()
    gram += _JITTER * gram.diagonal().max() * torch.eye(shape.size, dtype=torch.float64)
    unit = torch.eye(shape.size, dtype=torch.float64)
    rotation = torch.linalg.solve_triangular(torch.linalg.cholesky(gram).T, unit, upper=True)
    return {**side, "rotation": rotation.to(side["values"].device, side["values"].dtype)}


def _learn(sides: list[dict[str, Tensor]], gradient: Tensor, shape: Shape, steps: int) -> None:
    """Minimise the bias over the values of both `sides`, in place; their columns stay (the loss of algorithm 2, without
    its ridge). They begin with the best common factor: the drawn ones keep far more than the gradient."""
    left, right = (spread(side, shape.size) for side in sides)
    kept = left @ (left.T @ gradient @ right) @ right.T
    share = float((kept * gradient).sum() / kept.square().sum().clamp(min=1e-30))
    values = [nn.Parameter(side["values"] * max(share, 1e-12) ** 0.25) for side in sides]
    del left, right, kept
    size = gradient.norm().clamp(min=1e-30)
    optimizer = torch.optim.Adam(values, lr=_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _RATE * (1 + math.cos(math.pi * step / steps)) / 2
        with torch.enable_grad():
            left, right = (
                spread({"columns": side["columns"], "values": v}, shape.size)
                for side, v in zip(sides, values, strict=True)
            )
            kept = left @ (left.T @ gradient @ right) @ right.T
            ((kept - gradient) / size).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for side, learned in zip(sides, values, strict=True):
        side["values"] = learned.detach()
