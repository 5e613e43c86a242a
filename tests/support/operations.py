"""Parts of layers, each with an operation of PyTorch that code of models may use: [rows, length, width] in and out.

`length` and `width` are multiples of 4. What a part is made of is in `parts`, by the name under which its code has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Operation:
    """`parts(width)`: modules, parameters and (other tensors) buffers; `run(part, x)` computes with them."""

    run: Callable[[Part, Tensor], Tensor]
    parts: Callable[[int], Mapping[str, nn.Module | Tensor]] = lambda width: {}


class Part(nn.Module):
    """An operation of the tables below, with weights drawn from torch's generator."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name, self.width = name, width
        for key, made in ALL[name].parts(width).items():
            if isinstance(made, (nn.Module, nn.Parameter)):
                setattr(self, key, made)
            else:
                self.register_buffer(key, made)

    def forward(self, x: Tensor) -> Tensor:
        return ALL[self.name].run(self, x)


def P(*shape, scale=0.1):
    return nn.Parameter(torch.randn(*shape) * scale)


def linear(width, out=1, *, bias=True):
    return nn.Linear(width, out * width, bias=bias)


def image(x):
    """As an image of one channel."""
    return x[:, None]


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(part, x, *, dropout=0.0, causal=True):
    q, k, v = (heads(t, 2) for t in part.qkv(x).chunk(3, -1))
    p = dropout if part.training else 0.0
    made = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=p)
    return x + part.o(made.transpose(1, 2).flatten(2))


def attend_by_hand(part, x, dropout):
    q, k, v = (heads(t, 2) for t in part.qkv(x).chunk(3, -1))
    length = x.shape[1]
    scores = q @ k.transpose(-1, -2) / (part.width // 2) ** 0.5 + part.mask[:length, :length].to(x.dtype)
    weights = F.dropout(scores.softmax(-1), dropout, part.training)
    return x + part.o((weights @ v).transpose(1, 2).flatten(2))


def gated(part, x):
    a, b = part.a(x).chunk(2, -1)
    return x + a * b.sigmoid()


def in_place(part, x):
    made = x.clone()
    made[:, ::2] *= 2
    made[..., 0].add_(x[..., 1])
    return made


def solved(x, solve):
    """`solve` on a matrix per row that is far from singular."""
    square = x.transpose(1, 2) @ x / x.shape[1] + 3 * torch.eye(x.shape[2], device=x.device, dtype=x.dtype)
    return x + 0.1 * solve(square, x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]


def norm_by_hand(part, x):
    wide = x.float()
    return part.w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def as_complex(x):
    return torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())


def shift(x):
    return torch.cat([x, x.roll(1, 1)], -1)


def grid(x):
    turn = torch.eye(2, 3, device=x.device).expand(len(x), 2, 3) * 0.9
    with torch.autocast(x.device.type, enabled=False):  # of the points, see docs/explanation/exactness.md
        points = F.affine_grid(turn, [len(x), 1, *x.shape[1:]], align_corners=False)
    return F.grid_sample(image(x).float(), points, align_corners=False)[:, 0].to(x.dtype)


def encoded(m, x):
    with torch.autocast(x.device.type, enabled=False):  # its kernel for evaluation, see docs/explanation/exactness.md
        return m.a(x)


def of_qkv(d):
    return {"qkv": linear(d, 3), "o": linear(d)}


def two(d):
    return {"a": linear(d, 2), "b": nn.Linear(2 * d, d)}


TRACED = {
    # Linear layers and what is made of them
    "mlp": Operation(lambda m, x: x + m.b(F.gelu(m.a(x))), two),
    "relu": Operation(lambda m, x: x + m.b(F.relu(m.a(x))), two),
    "tanh": Operation(lambda m, x: x + m.b(torch.tanh(m.a(x))), two),
    "glu": Operation(
        lambda m, x: x + m.b(F.silu(m.g(x)) * m.a(x)),
        lambda d: {"a": linear(d, 2, bias=False), "g": linear(d, 2, bias=False), "b": nn.Linear(2 * d, d, bias=False)},
    ),
    "chunk": Operation(gated, lambda d: {"a": linear(d, 2)}),
    "F.glu": Operation(lambda m, x: F.glu(m.a(x), -1), lambda d: {"a": linear(d, 2)}),
    "twice": Operation(lambda m, x: x + m.a(F.relu(m.a(x))), lambda d: {"a": linear(d, bias=False)}),
    "low rank": Operation(lambda m, x: x + x @ m.a @ m.b, lambda d: {"a": P(d, 3), "b": P(3, d)}),
    "unused": Operation(lambda m, x: x + m.a(x), lambda d: {"a": linear(d), "w": P(d, 5)}),
    "frozen": Operation(lambda m, x: x + m.a(x), lambda d: {"a": linear(d).requires_grad_(False)}),
    "half frozen": Operation(
        lambda m, x: x + F.linear(x, m.w, m.b), lambda d: {"w": P(d, d).requires_grad_(False), "b": P(d)}
    ),
    "in fp32": Operation(
        lambda m, x: x + F.linear(x.float(), m.a.weight.float()).to(x.dtype), lambda d: {"a": linear(d)}
    ),
    "in fp64": Operation(
        lambda m, x: x + F.linear(x.double(), m.a.weight.double()).to(x.dtype), lambda d: {"a": linear(d)}
    ),
    "detached": Operation(lambda m, x: x + m.a(x).detach() * 0.5 + m.a(x.detach()), lambda d: {"a": linear(d)}),
    "bilinear layer": Operation(lambda m, x: x + m.a(x, x), lambda d: {"a": nn.Bilinear(d, d, d)}),
    "einsum": Operation(
        lambda m, x: x + torch.einsum("blhe,hef->blhf", x.unflatten(-1, (2, -1)), m.w).flatten(2),
        lambda d: {"w": P(2, d // 2, d // 2)},
    ),
    "mixed positions": Operation(
        lambda m, x: x + m.w[: x.shape[1], : x.shape[1]].tril() @ x, lambda d: {"w": P(64, 64)}
    ),
    "gate": Operation(lambda m, x: x * m.w, lambda d: {"w": nn.Parameter(torch.tensor(0.7))}),
    "scale": Operation(lambda m, x: x * m.w, lambda d: {"w": nn.Parameter(torch.ones(d))}),
    "shifted": Operation(lambda m, x: x + m.a(shift(x)), lambda d: {"a": nn.Linear(2 * d, d)}),
    "looked up": Operation(lambda m, x: x + m.e(x.argmax(-1) % 7), lambda d: {"e": nn.Embedding(7, d)}),
    "bag": Operation(
        lambda m, x: x + m.e(torch.zeros(1, 3, dtype=torch.long, device=x.device)),
        lambda d: {"e": nn.EmbeddingBag(5, d)},
    ),
    "checkpointed": Operation(lambda m, x: x + checkpoint(lambda y: m.b(F.gelu(m.a(y))), x, use_reentrant=False), two),
    # Attention and recurrence
    "attention": Operation(attend, of_qkv),
    "attention with dropout": Operation(lambda m, x: attend(m, x, dropout=0.1), of_qkv),
    "attention, not causal": Operation(lambda m, x: attend(m, x, causal=False), of_qkv),
    "attention by hand": Operation(
        lambda m, x: attend_by_hand(m, x, 0.1),
        lambda d: {**of_qkv(d), "mask": torch.full((64, 64), float("-inf")).triu(1)},
    ),
    "multi-head": Operation(
        lambda m, x: m.a(x, x, x, need_weights=False)[0], lambda d: {"a": nn.MultiheadAttention(d, 2, batch_first=True)}
    ),
    "encoder layer": Operation(
        encoded, lambda d: {"a": nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.1, batch_first=True)}
    ),
    "rnn": Operation(lambda m, x: x + m.g(x)[0], lambda d: {"g": nn.RNN(d, d, batch_first=True)}),
    # Norms
    "layer norm": Operation(lambda m, x: m.n(x), lambda d: {"n": nn.LayerNorm(d)}),
    "RMS norm": Operation(lambda m, x: m.n(x), lambda d: {"n": nn.RMSNorm(d)}),
    "norm by hand": Operation(norm_by_hand, lambda d: {"w": nn.Parameter(torch.ones(d))}),
    "group norm": Operation(lambda m, x: m.n(x.transpose(1, 2)).transpose(1, 2), lambda d: {"n": nn.GroupNorm(2, d)}),
    "group norm of rows": Operation(
        lambda m, x: m.n(x.transpose(1, 2)).transpose(1, 2), lambda d: {"n": nn.GroupNorm(2, d, affine=False)}
    ),
    "instance norm": Operation(
        lambda m, x: m.n(x.transpose(1, 2)).transpose(1, 2), lambda d: {"n": nn.InstanceNorm1d(d, affine=True)}
    ),
    "batch norm, nothing kept": Operation(
        lambda m, x: m.n(x.transpose(1, 2)).transpose(1, 2),
        lambda d: {"n": nn.BatchNorm1d(d, track_running_stats=False)},
    ),
    "response norm": Operation(lambda m, x: F.local_response_norm(x.transpose(1, 2), 3).transpose(1, 2)),
    "normalize": Operation(lambda m, x: x + F.normalize(x, dim=1)),
    "variance": Operation(lambda m, x: (x - x.mean(1, True)) / x.var(1, keepdim=True).add(1e-3).sqrt()),
    "cosine": Operation(lambda m, x: x * F.cosine_similarity(x, x.roll(1, 1), dim=-1)[..., None]),
    "softmax": Operation(lambda m, x: x + F.softmax(x, 1)),
    "log softmax": Operation(lambda m, x: x + 0.1 * F.log_softmax(x, -1)),
    "prelu": Operation(lambda m, x: m.a(x.transpose(1, 2)).transpose(1, 2), lambda d: {"a": nn.PReLU(d)}),
    "activations": Operation(lambda m, x: F.hardswish(x) + F.mish(x) + F.softplus(x) + F.elu(x) + F.leaky_relu(x)),
    # Random numbers
    "dropout": Operation(lambda m, x: x + F.dropout(m.b(F.relu(m.a(x))), 0.2, m.training), two),
    "dropout of features": Operation(lambda m, x: F.dropout1d(x, 0.3, m.training)),
    "alpha dropout": Operation(lambda m, x: F.alpha_dropout(x, 0.3, m.training)),
    "gumbel": Operation(lambda m, x: x + F.gumbel_softmax(x, dim=1)),
    "noise": Operation(lambda m, x: x + 0.01 * torch.randn_like(x)),
    "bernoulli": Operation(lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.9)) / 0.9),
    # Convolutions, pooling, images
    "convolution": Operation(
        lambda m, x: x + m.c(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
        lambda d: {"c": nn.Conv1d(d, d, 3, padding=2)},
    ),
    "convolution per feature": Operation(
        lambda m, x: x + m.c(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
        lambda d: {"c": nn.Conv1d(d, d, 3, padding=2, groups=d)},
    ),
    "transposed convolution": Operation(
        lambda m, x: m.c(x.transpose(1, 2)).transpose(1, 2), lambda d: {"c": nn.ConvTranspose1d(d, d, 3, padding=1)}
    ),
    "image convolution": Operation(
        lambda m, x: x + m.c(image(x))[:, 0], lambda d: {"c": nn.Conv2d(1, 1, 3, padding=2, dilation=2)}
    ),
    "max pool": Operation(lambda m, x: F.max_pool2d(image(x), 3, 1, 1)[:, 0]),
    "average pool": Operation(lambda m, x: F.avg_pool2d(image(x), 3, 1, 1)[:, 0]),
    "adaptive pool": Operation(lambda m, x: x + F.adaptive_avg_pool1d(x, 4).repeat(1, 1, x.shape[2] // 4)),
    "adaptive max pool": Operation(lambda m, x: F.adaptive_max_pool1d(x, x.shape[2] // 2).repeat_interleave(2, 2)),
    "nearest": Operation(lambda m, x: F.interpolate(F.avg_pool2d(image(x), 2), scale_factor=2, mode="nearest")[:, 0]),
    "bilinear": Operation(lambda m, x: F.interpolate(F.avg_pool2d(image(x), 2), scale_factor=2, mode="bilinear")[:, 0]),
    "bicubic": Operation(lambda m, x: F.interpolate(F.avg_pool2d(image(x), 2), scale_factor=2, mode="bicubic")[:, 0]),
    "pixel shuffle": Operation(lambda m, x: F.pixel_shuffle(F.pixel_unshuffle(image(x), 2) * 1.1, 2)[:, 0]),
    "reflected": Operation(lambda m, x: F.pad(x, (1, 1), mode="reflect")[..., 2:]),
    "repeated at the edge": Operation(lambda m, x: F.pad(image(x), (2, 0, 2, 0), mode="replicate")[:, 0, :-2, :-2]),
    "circular": Operation(lambda m, x: F.pad(x, (2, 0), mode="circular")[..., : x.shape[2]]),
    "folded": Operation(lambda m, x: 0.2 * F.fold(F.unfold(image(x), 3, padding=1), x.shape[1:], 3, padding=1)[:, 0]),
    "sampled on a grid": Operation(lambda m, x: grid(x)),
    # Orders and sums
    "cumsum": Operation(lambda m, x: x + 0.1 * x.cumsum(1) / x.shape[1]),
    "cumprod": Operation(lambda m, x: x + 0.1 * x.sigmoid().cumprod(-1)),
    "logcumsumexp": Operation(lambda m, x: x + 0.1 * x.float().logcumsumexp(1).to(x.dtype)),
    "cummax": Operation(lambda m, x: x + 0.1 * x.cummax(-1).values),
    "sort": Operation(lambda m, x: x + 0.1 * x.sort(-1).values),
    "gathered": Operation(lambda m, x: x + 0.1 * x.gather(2, x.detach().argsort(2))),
    "scattered": Operation(lambda m, x: x + torch.zeros_like(x).scatter_add(2, x.detach().argsort(2), x) * 0.1),
    "indexed": Operation(lambda m, x: x + 0.1 * x[:, torch.arange(x.shape[1] - 1, -1, -1)]),
    "masked": Operation(lambda m, x: x.masked_fill(x.detach() > 0.5, 0.1)),
    "where": Operation(lambda m, x: torch.where(x > 0, x, x.exp() - 1)),
    "distances": Operation(
        lambda m, x: x + 0.1 * torch.cdist(m.a(x).float(), x.float() + 1).to(x.dtype) @ x, lambda d: {"a": linear(d)}
    ),
    # Linear algebra and numbers of other kinds
    "product of rows": Operation(
        lambda m, x: x + 0.1 * torch.bmm(torch.bmm(x, m.a(x).transpose(1, 2)), x), lambda d: {"a": linear(d)}
    ),
    "matrix exponential": Operation(
        lambda m, x: x + torch.matrix_exp(0.01 * (x @ x.transpose(1, 2)).float()).to(x.dtype) @ x
    ),
    "qr": Operation(lambda m, x: solved(x.float(), lambda a, b: torch.linalg.qr(a)[1] @ b).to(x.dtype)),
    "Fourier": Operation(lambda m, x: x + 0.1 * torch.fft.fft(x.float(), dim=-1).real.to(x.dtype)),
    "Fourier and back": Operation(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x.float(), dim=1), n=x.shape[1], dim=1).to(x.dtype)
    ),
    "complex": Operation(lambda m, x: torch.view_as_real(as_complex(x) * (1 + 0.5j)).flatten(2).to(x.dtype)),
    # Layouts
    "in place": Operation(in_place),
    "turned result": Operation(lambda m, x: (x * 1.5).transpose(1, 2).contiguous().transpose(1, 2)),
    "turned view": Operation(lambda m, x: (x.transpose(1, 2) * 1.1).transpose(1, 2)),
    "expanded": Operation(lambda m, x: x[..., :1].expand_as(x) + x),
    "expanded result": Operation(lambda m, x: (x.mean(1, keepdim=True) * 1.1).expand_as(x)),
    "rolled": Operation(lambda m, x: x.roll(2, 1) + x.flip(2)),
    "stacked": Operation(lambda m, x: torch.stack([x, x * 2], 0).sum(0)),
    "buffer": Operation(lambda m, x: x * m.w.to(x.dtype), lambda d: {"w": torch.linspace(0.9, 1.1, d)}),
}
"""Operations that a trace can follow."""


def branch(part, x):
    return x + (part.a(x) if float(x.detach().float().sum()) > 0 else part.b(x))


def mixture(part, x):
    flat = x.flatten(0, 1)
    weights, chosen = part.router(flat).softmax(-1).topk(1, -1)
    made = torch.zeros_like(flat)
    for number, expert in enumerate(part.experts):
        rows = (chosen[:, 0] == number).nonzero()[:, 0]
        if len(rows):
            made = made.index_add(0, rows, expert(flat[rows]) * weights[rows])
    return x + made.view_as(x)


def some_rows(part, x):
    keep = x.detach().mean(-1) > 0
    made = x.clone()
    made[keep] = made[keep] + part.a(made[keep])
    return made


def counted(part, x):
    part.c.add_(x.detach().float().mean((0, 1)).to(part.c.dtype))
    return x + part.a(x) * (1 + 0.01 * part.c.to(x.dtype).tanh())


def replaced(part, x):
    part.c = part.c * 0.9 + x.detach().mean((0, 1)).to(part.c.dtype) * 0.1
    return x + part.a(x) + part.c.to(x.dtype)


def expert(d):
    return nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))


OWN_CODE = {
    "rrelu": Operation(lambda m, x: F.rrelu(x, training=m.training)),
    "branch": Operation(branch, lambda d: {"a": linear(d), "b": linear(d)}),
    "mixture": Operation(
        mixture,
        lambda d: {"router": nn.Linear(d, 3, bias=False), "experts": nn.ModuleList(expert(d) for _ in range(3))},
    ),
    "some rows": Operation(some_rows, lambda d: {"a": linear(d)}),
    "counted": Operation(counted, lambda d: {"a": linear(d), "c": torch.zeros(d)}),
    "replaced": Operation(replaced, lambda d: {"a": linear(d), "c": torch.zeros(d)}),
    "batch norm": Operation(lambda m, x: m.n(x.transpose(1, 2)).transpose(1, 2), lambda d: {"n": nn.BatchNorm1d(d)}),
    "lstm": Operation(lambda m, x: x + m.g(x)[0], lambda d: {"g": nn.LSTM(d, d, batch_first=True)}),
    "gru": Operation(lambda m, x: x + m.g(x)[0], lambda d: {"g": nn.GRU(d, d, batch_first=True)}),
    "inverse": Operation(lambda m, x: solved(x.float(), lambda a, b: torch.linalg.inv(a) @ b).to(x.dtype)),
    "cholesky": Operation(lambda m, x: solved(x.float(), lambda a, b: torch.linalg.cholesky(a) @ b).to(x.dtype)),
    "checkpointed, counted": Operation(
        lambda m, x: counted(m, x) + checkpoint(lambda y: m.b(F.gelu(m.b(y))), x, use_reentrant=False),
        lambda d: {"a": linear(d), "b": linear(d), "c": torch.zeros(d)},
    ),
    "solve": Operation(lambda m, x: solved(x.float(), torch.linalg.solve).to(x.dtype)),
}
"""Operations that no trace can follow, or none as eager does them: a layer that has one runs by its own code."""

ALL = {**TRACED, **OWN_CODE}
