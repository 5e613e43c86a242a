"""LoRA of peft on parameters, such as the experts of a mixture, which are no layers of their own."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from planner.models.packed_experts import Unpacking


def keep_modules(adapted: nn.Module) -> None:
    """Let layers of peft on parameters compute as ever, and leave the modules that they are around as they are.

    peft's own code makes each such weight a parametrization for the time of a forward, and a plain parameter again
    after it. A trace has other tensors in the places of weights, which come back as buffers; and torch computes a
    parametrization once more as it is made.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for module in adapted.modules():
        if isinstance(module, ParamWrapper):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`ParamWrapper.forward` of an adapter that is on and not merged: what is inside runs with the adapted weight."""
    name = self.parameter_name
    if (packed := Unpacking.of(self.get_base_layer(), name)) is not None:
        with packed.followed_by(lambda weight: _adapted(self, weight)):
            return self.base_layer(x, *args, **kwargs)
    inside = self.get_base_layer()._parameters
    weight = inside[name]
    inside[name] = _adapted(self, weight)
    try:
        return self.base_layer(x, *args, **kwargs)
    finally:
        inside[name] = weight


def _adapted(layer: Any, weight: Tensor) -> Tensor:
    """The weight with its adapter, by the operation that peft takes: since 0.21 one for all experts at once."""
    from peft.tuners.lora import layer as peft_layer

    own: Any = peft_layer
    (adapter,) = layer.active_adapters
    if layer.num_experts > 1 and hasattr(layer, "get_delta_factors"):
        adapted: Tensor = own._LoraFactorsProxy(*layer.get_delta_factors(adapter))(weight)
    else:
        adapted = own._LoraParameterProxy(layer.get_delta_weight(adapter))(weight)
    return adapted
