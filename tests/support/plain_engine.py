"""Training in plain PyTorch behind the engine's methods: the reference that bitwise tests compare with.

Gradient accumulation over the slices in their order, each micro-batch under its own seed; AdamW(fused=True), and for
matrices of a group of Muon `torch.optim.Muon`. With
weights narrower than fp32 the optimizer's parameters are fp32 masters, and gradients become fp32 before the clip.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.cpu.rounded import rounded
from planner.measure.forward_bytes import quiet
from planner.optimizers.adamw import AdamWGroup
from planner.optimizers.base import Group
from planner.optimizers.muon import MuonGroup
from worker.runtime.step_values import groups_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainResult:
    """Losses per slice, the gradients' global norm before clipping (None without clipping)."""

    losses: list[Tensor]
    grad_norm: Tensor | None
    peak_bytes: int | None = None
    figures: tuple[Tensor, ...] = ()


class PlainEngine:
    """The methods of worker.engine.engine.Engine, done by plain PyTorch on `model`'s own parameters."""

    waited_s = 0.0  # nothing runs beside

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Any,
        max_grad_norm: float | None,
        plan: object = None,
        chain: object = None,
        device: torch.device | str = "cpu",
        metered: bool = False,
        rounded: Collection[str] = (),
    ) -> None:
        """`rounded`: names of parameters whose moments are in 8 bits: so they are rounded after each step."""
        self.rounded = rounded
        self.model = model.train()
        self.device = torch.device(device)
        self.max_grad_norm = max_grad_norm
        self.steps_done = 0
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.weights.items()
        }
        groups = groups_of(optimizer)
        self.optimizers = [self._optimizer(group) for group in groups]
        self.matrices = {name for name in self.masters for g in groups if isinstance(g, MuonGroup) and g.has(name)}

    def _optimizer(self, group: Group) -> torch.optim.Optimizer:
        """PyTorch's own, of the tensors of one group."""
        own = {name: master for name, master in self.masters.items() if group.has(name)}
        decay = [m for name, m in own.items() if name in group.decay_names]
        rest = [m for name, m in own.items() if name not in group.decay_names]
        groups = [{"params": decay, "weight_decay": group.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        if isinstance(group, MuonGroup):
            return torch.optim.Muon(groups, momentum=group.momentum, adjust_lr_fn=group.adjust)
        assert isinstance(group, AdamWGroup)
        return torch.optim.AdamW(groups, betas=group.betas, eps=group.eps, fused=True)

    def optimizer_of(self, name: str) -> torch.optim.Optimizer:
        """Whose a tensor is."""
        owned = (o for o in self.optimizers for group in o.param_groups if self._is_in(name, group["params"]))
        return next(owned)

    def _is_in(self, name: str, params: list[nn.Parameter]) -> bool:
        return any(p is self.masters[name] for p in params)

    def step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        seeds: Sequence[int],
        learning_rate: float,
        **model_kwargs: Any,
    ) -> PlainResult:
        """One optimizer step over the slices `batches`, under `seeds`."""
        losses = []
        for batch, seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            loss = self.model(**{name: t.to(self.device) for name, t in batch.items()}, **model_kwargs).loss
            loss.backward()
            losses.append(loss.detach())
        for name, master in self.masters.items():
            weight = self.weights[name]
            if master is not weight and weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        norm = None
        if self.max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        for name in self.rounded:
            state = self.optimizer_of(name).state[self.masters[name]]
            for part, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                state[part].copy_(rounded(state[part], signed=signed))
        with torch.no_grad():
            for name, weight in self.weights.items():
                if self.masters[name] is not weight:
                    weight.copy_(self.masters[name])
        self.steps_done += 1
        return PlainResult(losses=losses, grad_norm=norm)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> PlainResult:
        """The loss of each batch, in evaluation mode."""
        self.model.eval()
        losses = [self.model(**{name: t.to(self.device) for name, t in batch.items()}).loss for batch in batches]
        self.model.train()
        return PlainResult(losses=losses, grad_norm=None)

    def check_evaluation(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """There is no budget."""

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, pad: int) -> list[list[int]]:
        """The likeliest tokens after each prompt, all prompts padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self.model.eval()
        answer = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=pad,
            **quiet(self.model),
        )
        self.model.train()
        return answer[:, longest:].tolist()

    def check_generation(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        """There is no budget."""

    def drain(self) -> None:
        """Nothing is ever pending."""

    def stop_metering(self) -> None:
        """Nothing is ever metered."""

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(name, {"master", "exp_avg", "exp_avg_sq"}) of every trained parameter, on the host; with "left_out" where no
        gradient reached it in so many steps."""
        for name, master in self.masters.items():
            state = self.optimizer_of(name).state[master]
            zeros = torch.zeros_like(master)
            if name in self.matrices:
                yield (
                    name,
                    {
                        "master": master.detach().cpu(),
                        "momentum_buffer": state.get("momentum_buffer", zeros).cpu(),
                    },
                )
                continue
            left_out = self.steps_done - float(state.get("step", 0))
            yield (
                name,
                {
                    "master": master.detach().cpu(),
                    "exp_avg": state.get("exp_avg", zeros).cpu(),
                    "exp_avg_sq": state.get("exp_avg_sq", zeros).cpu(),
                    **({"left_out": torch.tensor(left_out)} if left_out else {}),
                },
            )

    def load_state(self, tensors: Iterator[tuple[str, dict[str, Tensor]]], *, step: int) -> None:
        """Go on from `state()` after `step` steps."""
        with torch.no_grad():
            for name, parts in tensors:
                master = self.masters[name]
                master.copy_(parts["master"])
                self.weights[name].copy_(master)
                state = self.optimizer_of(name).state
                if name in self.matrices:
                    state[master] = {"momentum_buffer": parts["momentum_buffer"].to(master.device, copy=True)}
                    continue
                state[master] = {
                    "step": torch.tensor(step - float(parts.get("left_out", 0))),
                    "exp_avg": parts["exp_avg"].to(master.device, copy=True),
                    "exp_avg_sq": parts["exp_avg_sq"].to(master.device, copy=True),
                }
        self.steps_done = step

    def close(self) -> None:
        """Nothing to free."""
