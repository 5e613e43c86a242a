"""Records a forward of a model some of whose layers look at their data (`if x.sum() > 0`). Such layers fail on fake
tensors, so they run on random data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import UserError
from planner.graph.eager import EagerPair
from planner.graph.fake import FakeMode
from planner.graph.record import ModuleCall, Record, record_forward
from planner.graph.repeats import Repeats
from planner.graph.signature import flatten_call, mappings_of


class Opaque:
    """The layers of a model whose code looks at its data, and so cannot run on fake tensors. Of equal layers one runs,
    on random data; the record has one operation for each call of a layer. `codes`: id of a layer -> its own code."""

    def __init__(self, model: nn.Module) -> None:
        self.codes: dict[int, EagerPair] = {}
        self._model = model
        self._reasons: dict[int, str] = {}
        self._alike: dict[object, EagerPair] = {}

    def add(self, names: Sequence[str], error: UserError) -> bool:
        """Add a layer that failed on fake tensors, and its siblings of the same class. `names`: the modules that were
        running, outermost first. The layer is the outermost of them that is in a ModuleList or Sequential and was not
        added before. False if there is no such module, or no sibling of its class."""
        for name in names:
            module, parent = (self._model.get_submodule(n) for n in (name, name.rpartition(".")[0]))
            if isinstance(parent, (nn.ModuleList, nn.Sequential)) and id(module) not in self._reasons:
                like = [child for child in parent if type(child) is type(module)]
                self._reasons.update({id(child): error.what for child in like})
                return len(like) > 1
        return False

    @contextlib.contextmanager
    def stand_in(self, record: Record, mode: FakeMode) -> Iterator[None]:
        """A context in which each call of these layers is recorded as one operation and returns fake results."""
        layers = [(name, module) for name, module in self._model.named_modules() if id(module) in self._reasons]
        own_forwards = [module.__dict__.get("forward") for _, module in layers]

        def call(name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
            module.forward = forward
            try:
                with _disable_current_modes():
                    code = self._code(name, module, args, kwargs)
                    results = mode.fresh(code.output_values)
            finally:
                module.forward = functools.partial(call, name, module, forward)
            tensors = flatten_call(args, kwargs)[1]
            record.add_layer(module, tensors, results)
            differentiable = zip(results, code.result.differentiable, strict=True)
            results = [t.requires_grad_(d) for t, d in differentiable]
            return code.result.deliver(results, tensors, mappings_of(args, kwargs))

        for name, module in layers:
            module.forward = functools.partial(call, name, module, module.forward)
        try:
            yield
        finally:
            for (_, module), forward in zip(layers, own_forwards, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _code(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EagerPair:
        weights = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters())
        alike = type(module), repr(module), flatten_call(args, kwargs)[0].key, weights
        if alike not in self._alike:
            reason = self._reasons[id(module)]
            self._alike[alike] = EagerPair.measured(module, args, kwargs, name=name, reason=reason)
        self.codes[id(module)] = self._alike[alike]
        return self._alike[alike]


def record_with_opaque_layers(
    model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[ModuleCall, Record, Mapping[int, EagerPair]]:
    """Record a forward of `model` with `batch`. Returns the tree of module calls; the record of operations; and, for
    each layer whose code looks at its data (`if x.sum() > 0`), the code that runs it, by the layer's id. Raises
    UserError."""
    opaque = Opaque(model)

    @contextlib.contextmanager
    def around(record: Record, mode: FakeMode) -> Iterator[None]:
        with opaque.stand_in(record, mode), Repeats(model, record, mode).stand_in():
            yield

    while True:
        running: list[str] = []
        try:
            root, record = record_forward(model, batch, device, running, around)
        except UserError as error:
            if not opaque.add(running, error):
                raise
        else:
            return root, record, opaque.codes
