"""Does a job's steps in plain PyTorch, the reference of `offmate certify`.

It uses the model's own forward and backward, gradient accumulation in order, `clip_grad_norm_` and `AdamW(fused=True)`;
other optimizers are PyTorch's own, too. Where the weights are narrower than fp32, the optimizer has fp32 masters, and
gradients become fp32 before clipping and update. Where moments are in 8 bits, they are rounded to them after each
update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.measure.forward_bytes import eval_mode
from planner.models.lsp import requiring_gradients
from planner.optimizers.base import Group
from planner.optimizers.table import ADAMW, NONE, AnyOptimizer
from worker.storage.shards import Item
from worker.subspace.change import Revise


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainResult:
    """The result of one step of plain PyTorch: the loss of each slice (micro-batch), and the gradients' global norm
    before clipping (None without clipping)."""

    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None


class PlainTraining:
    """Trains `model` in plain PyTorch, after moving it to `device`. Tensors named in `on_cpu` are updated on the CPU,
    as the plan does: a GPU's arithmetic need not give the same last bits."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Sequence[Group],
        max_grad_norm: float | None,
        device: torch.device,
        on_cpu: Collection[str],
        optimizers: Mapping[str, AnyOptimizer] = NONE,
    ) -> None:
        """`optimizers`: parameter -> its optimizer, where that is not AdamW with moments in fp32."""
        self._model, self._device, self._max_norm = model.train().to(device), device, max_grad_norm
        self._kinds = optimizers
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: nn.Parameter(p.detach().to("cpu" if name in on_cpu else device, torch.float32))
            for name, p in self._weights.items()
        }
        self._optimizers = [
            (number, self._optimizer(group))
            for number, group in enumerate(optimizer)
            if any(map(group.has, self._masters))
        ]

    def _optimizer(self, group: Group) -> torch.optim.Optimizer:
        own = {name: master for name, master in self._masters.items() if group.has(name)}
        groups = [
            {"params": [m for n, m in own.items() if group.decay_of(n) == decay], "weight_decay": decay}
            for decay in dict.fromkeys(map(group.decay_of, own))
        ]
        return group.of_pytorch(groups)

    def step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        seeds: Sequence[int],
        learning_rate: float | Sequence[float],
        items: Tensor,
    ) -> PlainResult:
        """Do one optimizer step on `batches`, one for each slice (micro-batch); slice k runs under the random seed
        `seeds[k]`. `items`: the number of tokens by which the losses of all slices are divided. `learning_rate`: one
        for all parameter groups, or one for each."""
        losses = []
        for batch, seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            given = {name: tensor.to(self._device) for name, tensor in batch.items()}
            loss = self._model(**given, num_items_in_batch=items.to(self._device)).loss
            loss.backward()
            losses.append(loss.detach())
        norm = self._clip()
        for number, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate[number] if isinstance(learning_rate, Sequence) else learning_rate
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._kind(name).round_moments(self._state_of(master))
                self._weights[name].copy_(master)
        return PlainResult(losses=tuple(losses), grad_norm=norm)

    def figures(self, batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
        """What else than the loss the model's result has for each batch, with the model in evaluation mode: for
        preferences the log-probabilities of the lines, [lines]."""
        with eval_mode(self._model):
            return tuple(
                self._model(**{name: tensor.to(self._device) for name, tensor in batch.items()}).figures
                for batch in batches
            )

    def _clip(self) -> Tensor | None:
        """Move the gradients to the masters, clipped where the job asks for it; returns their norm, else None."""
        carriers = {name: nn.Parameter(w.grad.float()) for name, w in self._weights.items() if w.grad is not None}
        for name, carrier in carriers.items():
            carrier.grad, self._weights[name].grad = carrier.detach(), None
        norm = None
        if self._max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(list(carriers.values()), self._max_norm)
        for name, carrier in carriers.items():
            assert carrier.grad is not None
            self._masters[name].grad = carrier.grad.to(self._masters[name].device)
        return norm

    def state(self) -> Iterator[Item]:
        """Yield (name, {"master", "exp_avg", "exp_avg_sq"}) for every trained parameter, as tensors in host memory;
        only the moments that the parameter's optimizer has."""
        for name, master in self._masters.items():
            state = self._state_of(master)
            moments = {part: state.get(part, torch.zeros_like(master)).cpu() for part in self._kind(name).moments}
            yield name, {"master": master.detach().cpu(), **moments}

    def revise(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        names: Collection[str],
        revise: Revise,
        states: Callable[[], Iterable[Item]],
        **model_kwargs: Any,
    ) -> None:
        """Replace frozen weights by what `revise` makes of the gradient of each frozen weight in `names`, the sum over
        `batches` in fp32, with the model in evaluation mode, then trained ones by what `states` gives: see
        worker.engine.engine.Engine.revise."""
        parameters = dict(self._model.named_parameters())
        sums: dict[str, Tensor] = {}
        with requiring_gradients(self._model, names), eval_mode(self._model), torch.enable_grad():
            for batch in batches:
                given = {name: tensor.to(self._device) for name, tensor in batch.items()}
                options = {name: value.to(self._device) for name, value in model_kwargs.items()}
                self._model(**given, **options).loss.backward()
                for name in names:
                    if (gradient := parameters[name].grad) is not None:
                        sums[name] = gradient.float() if name not in sums else sums[name].add_(gradient)
                        parameters[name].grad = None
        with torch.no_grad():
            for name, total in sums.items():
                here = {name: parameter.detach() for name, parameter in parameters.items()}
                for own, value in revise(name, total, here).items():
                    parameters[own].copy_(value)
            self._replace(states())

    def _replace(self, tensors: Iterable[Item]) -> None:
        for name, parts in tensors:
            master = self._masters[name]
            master.copy_(parts["master"])
            self._weights[name].copy_(master)
            state = self._state_of(master)
            for part in self._kind(name).moments:
                if part in state:
                    state[part].copy_(parts[part])
            self._kind(name).round_moments(state)

    def _kind(self, name: str) -> AnyOptimizer:
        return self._kinds.get(name, ADAMW)

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        return next((optimizer.state[master] for _, optimizer in self._optimizers if master in optimizer.state), {})
