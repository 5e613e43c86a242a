"""Makes peft's LoRA work on parameters that are no layers of their own, such as the experts of a mixture."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from planner.models.packed_experts import Unpacking


def keep_modules(adapted: nn.Module) -> None:
    """Let peft's layers on parameters compute the same results without changing the modules that they wrap.

    peft's own code turns each such weight into a parametrization during a forward, and back into a plain parameter
    after it. In a trace other tensors stand in for weights, and peft's code would put them back as buffers. Also torch
    computes a parametrization once more when it is made.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for module in adapted.modules():
        if isinstance(module, ParamWrapper):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`ParamWrapper.forward` for an active, unmerged adapter: the wrapped module runs with the adapted weight."""
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
    """The weight with its adapter, by peft's own operation: since peft 0.21 one operation for all experts at once."""
    from peft.tuners.lora import layer as peft_layer

    own: Any = peft_layer
    (adapter,) = layer.active_adapters
    if layer.num_experts > 1 and hasattr(layer, "get_delta_factors"):
        adapted: Tensor = own._LoraFactorsProxy(*layer.get_delta_factors(adapter))(weight)
    else:
        adapted = own._LoraParameterProxy(layer.get_delta_weight(adapter))(weight)
    return adapted
