"""U-Nets of torch's parts alone, as Stable Diffusion has them: down, middle, up, and skips from side to side."""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """[rows, before, side, side] -> [rows, after, side, side], told the time [rows, times]."""

    def __init__(self, before: int, after: int, times: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(times, after)
        self.norm2, self.conv2 = nn.GroupNorm(groups, after), nn.Conv2d(after, after, 3, padding=1)
        self.short = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        every = self.q(x), self.k(context), self.v(context)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in every)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """Over the places of a picture, which look at a text [rows, tokens, context]."""

    def __init__(self, width: int, context: int, groups: int, heads: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.GroupNorm(groups, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, width, heads), Attention(width, context, heads)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.into(self.norm(x).flatten(2).transpose(1, 2))
        n = self.norm1(h)
        h = h + self.own(n, n)
        h = h + self.cross(self.norm2(h), context)
        value, gate = self.up(self.norm3(h)).chunk(2, -1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.out(h).transpose(1, 2).unflatten(2, x.shape[2:])


class Level(nn.Module):
    """Residual blocks of one size, with transformers behind them; those on the way up are given a skip each."""

    def __init__(self, before: list[int], after: int, unet: UNet, attends: bool, resize: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width, after, unet.times, unet.groups) for width in before)
        count = len(before) if attends else 0
        made = (Transformer(after, unet.context, unet.groups, unet.heads) for _ in range(count))
        self.attentions = nn.ModuleList(made)
        self.resize = resize

    def forward(
        self, x: Tensor, time: Tensor, context: Tensor, skips: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Its result, and all that it has made."""
        made = []
        for index, block in enumerate(self.blocks):
            x = block(torch.cat([x, skips[-1 - index]], 1) if skips else x, time)
            if len(self.attentions):
                x = self.attentions[index](x, context)
            made.append(x)
        if self.resize is not None:
            x = self.resize(x)
            made.append(x)
        return x, tuple(made)


class UNet(nn.Module):
    """Guesses the noise in pictures; its loss is how far off the guess is."""

    def __init__(self, widths: tuple[int, ...], *, context: int, blocks: int = 2, groups: int, heads: int) -> None:
        super().__init__()
        first, last = widths[0], widths[-1]
        self.context, self.groups, self.heads, self.times = context, groups, heads, 4 * first
        self.time = nn.Sequential(nn.Linear(first, self.times), nn.SiLU(), nn.Linear(self.times, self.times))
        self.into = nn.Conv2d(4, first, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before, skips = first, [first]
        for number, width in enumerate(widths):
            more = number < len(widths) - 1
            smaller = nn.Conv2d(width, width, 3, stride=2, padding=1) if more else None
            self.down.append(Level([before, *[width] * (blocks - 1)], width, self, more, smaller))
            before = width
            skips += [width] * (blocks + more)
        self.middle1, self.middle2 = (Residual(last, last, self.times, groups) for _ in range(2))
        self.attention = Transformer(last, context, groups, heads)
        for number, width in reversed(list(enumerate(widths))):
            given = []
            for _ in range(blocks + 1):
                given.append(before + skips.pop())
                before = width
            larger = nn.Upsample(scale_factor=2.0, mode="nearest")
            grow = nn.Sequential(larger, nn.Conv2d(width, width, 3, padding=1)) if number else None
            self.up.append(Level(given, width, self, number < len(widths) - 1, grow))
        self.norm, self.out = nn.GroupNorm(groups, first), nn.Conv2d(first, 4, 3, padding=1)

    def forward(self, picture: Tensor, step: Tensor, text: Tensor, noise: Tensor) -> types.SimpleNamespace:
        half = self.time[0].in_features // 2
        angles = step[:, None] * torch.exp(-9.2 / half * torch.arange(half, device=step.device))
        time = self.time(torch.cat([angles.cos(), angles.sin()], 1).to(picture.dtype))
        x = self.into(picture)
        skips = (x,)
        for level in self.down:
            x, made = level(x, time, text)
            skips += made
        x = self.middle2(self.attention(self.middle1(x, time), text), time)
        for level in self.up:
            count = len(level.blocks)
            x, _ = level(x, time, text, skips[-count:])
            skips = skips[:-count]
        guess = self.out(F.silu(self.norm(x)))
        return types.SimpleNamespace(loss=F.mse_loss(guess.float(), noise.float()), guess=guess)


def tiny_unet(dtype: torch.dtype = torch.float32) -> UNet:
    """Seeded."""
    torch.manual_seed(0)
    return UNet((8, 16), context=6, blocks=1, groups=4, heads=2).to(dtype)


def pictures(seed: int = 0, *, rows: int = 2, side: int = 8, context: int = 6, dtype: torch.dtype = torch.float32):
    """A batch for `UNet`."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "picture": torch.randn(rows, 4, side, side, generator=chance).to(dtype),
        "step": torch.randint(0, 1000, (rows,), generator=chance),
        "text": torch.randn(rows, 5, context, generator=chance).to(dtype),
        "noise": torch.randn(rows, 4, side, side, generator=chance).to(dtype),
    }


def large_unet() -> UNet:
    """As large as Stable Diffusion's, in bf16 on meta: 0.86 B parameters."""
    with torch.device("meta"):
        return UNet((320, 640, 1280, 1280), context=768, groups=32, heads=8).to(torch.bfloat16)
