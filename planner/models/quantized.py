"""Packs the linear layers of a frozen model in 4 or 8 bits, quantized by bitsandbytes. The weights stay packed in host
memory and while they are copied to the device.

A packed weight is one tensor of bytes, so a plan treats it as one weight. The operations that unpack it are in the
traced graph of its block. So a plan counts the packed bytes that are copied and, beside them, the unpacked weight,
which lives for one matrix product. Backward unpacks again (`planner.graph.block_code`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BitsAndBytesConfig, PreTrainedConfig

from planner.errors import Exit, UserError, first_line
from planner.fast_imports import compiled_when_called
from planner.job.schema import Job

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it warns of kernels that it lacks
_SAVED = (
    "load_in_4bit",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "bnb_4bit_quant_storage",
    "load_in_8bit",
    "llm_int8_skip_modules",
)
_UNPACKED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats in which models such as gpt-oss and DeepSeek's are published -> the transformers class that unpacks them as
they are read. After that the model is like any other of its dtype."""
_PACKED_NAMES = ("_blocks", "_scales", "_scale_inv", "activation_scale")


@torch.library.custom_op("offmate::unpack_int8", mutates_args=())
def unpack_int8(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [rows, columns] in `dtype`, from int8 `numbers` [rows, columns] and fp32 `scales` [rows], by
    bitsandbytes' operations. It is one custom operation: traced one by one, they would make a second copy in fp32."""
    return numbers.to(dtype).mul_(scales.unsqueeze(1))


@unpack_int8.register_fake
def _(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(numbers, dtype=dtype)


class Packed(nn.Module):
    """A frozen linear layer whose weight is stored as one tensor of bytes, `packed`; subclasses define the format."""

    packed: nn.Parameter
    bias: Tensor | None

    def __init__(self, layer: nn.Module, sizes: Sequence[int]) -> None:
        """`layer`: the bitsandbytes layer that this one replaces, on meta or quantized on the CPU. `sizes`: the bytes
        of each part from which the weight is unpacked (numbers, scales)."""
        super().__init__()
        its = cast(Any, layer)
        self.in_features, self.out_features = its.in_features, its.out_features
        self._places = places_of_parts(sizes)
        device = its.weight.device
        packed = packed_bytes(sizes, self._quantized(its.weight) if device.type != "meta" else None, device)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.packed.holds = its.in_features * its.out_features  # type: ignore[attr-defined]
        self.bias = its.bias

    def parts(self) -> list[Tensor]:
        """The parts from which the weight is unpacked (numbers, scales), as views of `packed`."""
        return [self.packed[start:end] for start, end in self._places]

    @staticmethod
    def _quantized(weight: Any) -> list[Tensor]:
        """The tensors whose bytes are stored: the quantized numbers and their scales."""
        raise NotImplementedError


class Packed8bit(Packed):
    """A frozen linear layer with a weight in 8 bits. It computes what `bitsandbytes.nn.Linear8bitLt` does on a CPU in
    training, by the same operations in the same order. On CUDA Linear8bitLt also rounds the layer's input to 8 bits;
    this layer does not."""

    def __init__(self, layer: nn.Module) -> None:
        its = cast(Any, layer)
        super().__init__(layer, (its.in_features * its.out_features, 4 * its.out_features))

    @staticmethod
    def _quantized(weight: Any) -> list[Tensor]:
        # The maximum of each row becomes its scale here: at each use that would make one more tensor.
        return [weight.data, weight.SCB.mul(1.0 / 127.0)]

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The unpacked weight [out_features, in_features] in `dtype`."""
        numbers, scales = self.parts()
        shape = (self.out_features, self.in_features)
        return cast(Tensor, unpack_int8(numbers.view(torch.int8).view(shape), scales.view(torch.float32), dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer's result for `x` [..., in_features], in the dtype of `x`."""
        return functional.linear(x, self.unpacked(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """The layer's sizes, for its repr."""
        return f"{self.in_features}, {self.out_features}"


class Packed4bit(Packed):
    """A frozen linear layer with a weight in 4 bits. It computes what `bitsandbytes.nn.Linear4bit` does, by the same
    operations in the same order. Results differ by rounding where bitsandbytes has a kernel for few tokens that
    unpacks inside the matrix product, as on CUDA."""

    def __init__(self, layer: nn.Module, code: Tensor, dtype: torch.dtype) -> None:
        """`layer`: the Linear4bit that this one replaces, on meta or quantized on the CPU. `code`: the 256 numbers
        that the bytes of scales stand for if the scales are quantized, too. `dtype`: the dtype in which it computes."""
        its = cast(Any, layer)
        self.kind: str = its.weight.quant_type
        self.nested: bool = its.weight.compress_statistics
        self.dtype = dtype
        super().__init__(layer, sizes_of_4bit(its.in_features * its.out_features, nested=self.nested))
        if self.nested:
            self.register_buffer("code", code, persistent=False)

    @staticmethod
    def _quantized(weight: Any) -> list[Tensor]:
        return parts_of_4bit(weight.data, weight.quant_state)

    def unpacked(self) -> Tensor:
        """The unpacked weight [out_features, in_features]."""
        code = cast(Tensor, self.code) if self.nested else None
        return unpacked_4bit(self.parts(), code, self.kind, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer's result for `x` [..., in_features], computed in the layer's dtype and converted to the
        dtype of `x`."""
        return functional.linear(x.to(self.dtype), self.unpacked(), self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """The layer's sizes and format, for its repr."""
        return f"{self.in_features}, {self.out_features}, {self.kind}, nested={self.nested}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the frozen model is quantized by bitsandbytes. `saved`: its weights were saved quantized."""

    config: BitsAndBytesConfig
    saved: bool

    @classmethod
    def of(cls, job: Job, config: PreTrainedConfig) -> Quantization | None:
        """The quantization that the job asks for, or the one with which bitsandbytes saved the model of this config;
        None for no quantization. Raises UserError for one that is not supported, and if bitsandbytes is missing."""
        its = _saved(config)
        by = its.get("quant_method") or ("bitsandbytes" if its.get("load_in_4bit") or its.get("load_in_8bit") else None)
        if by in _UNPACKED and not (job.load_in_4bit or job.load_in_8bit):
            return None
        if by is not None and (by != "bitsandbytes" or job.method != "lora" or job.use_dora):
            raise UserError(
                f"{job.model} was saved in a quantized form that this job cannot train.",
                code="base-quantized",
                exit_code=Exit.USAGE,
                numbers=(f"quantized by {by}, method: {job.method}",),
                hint="leave load_in_4bit and load_in_8bit out: the weights are then unpacked as they are read"
                if by in _UNPACKED
                else "a base quantized by bitsandbytes is trained by method: lora (without DoRA); "
                "or give the model as published in bf16",
            )
        if by is None and not (job.load_in_4bit or job.load_in_8bit):
            return None
        try:
            with compiled_when_called():
                import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise UserError(
                "A quantized base needs the package bitsandbytes.",
                code="bitsandbytes-missing",
                exit_code=Exit.USAGE,
                numbers=(first_line(error),),
                hint="pip install 'offmate[qlora]'",
            ) from error
        if by is not None:
            return cls(_config(**{key: its[key] for key in _SAVED if key in its}), saved=True)
        if job.load_in_8bit:
            return cls(_config(load_in_8bit=True), saved=False)
        wanted = _config(
            load_in_4bit=True,
            bnb_4bit_quant_type=job.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=job.bnb_4bit_use_double_quant,
        )
        return cls(wanted, saved=False)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained`. They make it quantize weights one by one as they are read, on the
        CPU, because a GPU may be busy with another job."""
        return {"device_map": {"": "cpu"}} | ({} if self.saved else {"quantization_config": self.config})

    def apply(self, model: nn.Module) -> None:
        """Put bitsandbytes' layers into `model` where `from_pretrained` puts them, without memory for their weights."""
        from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
        from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

        in_8_bits = bool(cast(Any, self.config).load_in_8bit)
        quantizer: Any = Bnb8BitHfQuantizer if in_8_bits else Bnb4BitHfQuantizer
        quantizer(self.config, pre_quantized=self.saved).preprocess_model(model=model, device_map=None)
        setattr(model, "is_loaded_in_8bit" if in_8_bits else "is_loaded_in_4bit", True)  # peft reads this attribute


def loading_options(job: Job, config: PreTrainedConfig) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained`, so that it quantizes the weights as the job asks, or unpacks those that
    were published packed. Raises UserError for a quantization that is not supported, and if bitsandbytes is missing."""
    if (quantized := Quantization.of(job, config)) is not None:
        return quantized.options
    if not unpacks(config):
        return {}
    from transformers.utils import quantization_config

    wanted = getattr(quantization_config, _UNPACKED[_saved(config)["quant_method"]])
    return {"quantization_config": wanted(dequantize=True)}


def unpacks(config: PreTrainedConfig) -> bool:
    """Whether the weights of the model with this config were published packed, in a format that transformers unpacks
    as it reads them."""
    return _saved(config).get("quant_method") in _UNPACKED


def as_unpacked(model: nn.Module, alike: nn.Module) -> None:
    """Make a model whose weights were unpacked as they were read like one that was published unpacked. Each parameter
    gets the dtype of that of `alike`; transformers leaves parameters that were not packed in their own dtype. The
    model will also be saved under the names of an unpacked model; transformers would save it under the names of packed
    weights, where no loading code finds them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for p, wanted in zip(model.parameters(), alike.parameters(), strict=True):
        p.data = p.data.to(wanted.dtype)
    its = cast(Any, model)
    own_conversions = {tuple(c.target_patterns): c for c in get_model_conversion_mapping(its, add_legacy=False)}
    names = [(c, tuple(c.target_patterns)) for c in getattr(model, "_weight_conversions", None) or ()]
    conversions = (own_conversions.get(targets) if _is_of_packed(c) else c for c, targets in names)
    its._weight_conversions = [c for c in conversions if c is not None]


def _is_of_packed(conversion: Any) -> bool:
    return any(name.endswith(_PACKED_NAMES) for name in (*conversion.source_patterns, *conversion.target_patterns))


def _saved(config: PreTrainedConfig) -> dict[str, Any]:
    """The quantization config with which the model's weights were saved; empty if they were not saved quantized."""
    quantization = getattr(config, "quantization_config", None) or {}
    return quantization if isinstance(quantization, dict) else cast(Any, quantization).to_dict()


def _config(**values: Any) -> BitsAndBytesConfig:
    return cast(BitsAndBytesConfig, cast(Any, BitsAndBytesConfig)(**values))


def computes_in(job: Job) -> torch.dtype:
    """The dtype to which quantized weights are unpacked, and in which their layers compute."""
    return torch.bfloat16 if job.bf16 else torch.float32


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let bitsandbytes' 4-bit layers in `model` compute in `dtype`, however they were saved. peft creates adapters in
    that dtype."""
    from bitsandbytes.nn.modules import Linear4bit

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.compute_dtype, layer.compute_type_is_set = dtype, True


def is_quantized(model: nn.Module) -> bool:
    """Whether `model` has bitsandbytes' layers, put there by `Quantization.apply` or `from_pretrained`."""
    return any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))


def parameters_of(model: nn.Module) -> int:
    """The number of a model's parameters; a quantized weight counts with the elements that it has unpacked."""
    return sum(
        p.nbytes * 2 if hasattr(p, "quant_state") else getattr(p, "holds", p.numel()) for p in model.parameters()
    )


def pack(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all bitsandbytes layers in `model` by layers whose weight is one tensor of bytes: `Packed4bit`, which
    computes in `dtype`, and `Packed8bit`, which computes in the dtype of its input. Layers are replaced one after
    another, and each old weight is freed. Raises UserError for weights that were quantized with other settings than
    bitsandbytes' own."""
    from bitsandbytes.functional import create_dynamic_map
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    code: Tensor | None = None
    for name, layer in list(model.named_modules()):
        weight = cast(Any, getattr(layer, "weight", None))
        if isinstance(layer, Linear8bitLt):
            model.set_submodule(name, Packed8bit(layer))
        elif isinstance(layer, Linear4bit):
            if code is None:
                code = cast(Any, create_dynamic_map)().to("cpu" if weight.is_meta else weight.device)
            if not weight.is_meta and not _is_usual(weight.quant_state, code):
                raise UserError(
                    "The model was quantized by bitsandbytes with settings other than its default.",
                    code="base-quantized",
                    exit_code=Exit.USAGE,
                    numbers=(f"layer: {name}",),
                    hint="give the model as published in bf16, and load_in_4bit: true",
                )
            model.set_submodule(name, Packed4bit(layer, code, dtype))
        else:
            continue
        cast(Any, layer).weight = None


def other_on_cuda(model: nn.Module) -> str | None:
    """How the results of `model` differ from those of bitsandbytes on CUDA, in words; None if no layer is quantized."""
    kinds = {type(module) for module in model.modules()}
    if Packed8bit in kinds:
        return (
            "its base is in 8 bits: bitsandbytes' kernel for CUDA rounds what comes into a layer to 8 bits, too, and "
            "here that is not rounded"
        )
    if Packed4bit in kinds:
        return "its base is in 4 bits: for few tokens bitsandbytes' kernel for CUDA differs from this by rounding"
    return None


def _is_usual(state: Any, code: Tensor) -> bool:
    if state.blocksize != GROUP or state.absmax.dtype != (torch.uint8 if state.nested else torch.float32):
        return False
    return not state.nested or (state.state2.blocksize == GROUPS and torch.equal(state.state2.code, code))


# ---- lays out all parts of a quantized weight in one tensor of bytes: [numbers | scales]. With double quantization:
# [numbers | scales of the scales | offset of the scales | quantized scales]


GROUP, GROUPS = 64, 256
"""How many numbers share a scale, and how many scales share a scale of their own, in bitsandbytes."""
_ALIGNED = 16


def places_of_parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end, in bytes, of each part when parts of these sizes are laid out one after another. Starts are
    multiples of 16."""
    places: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        start = -(-end // _ALIGNED) * _ALIGNED
        end = start + size
        places.append((start, end))
    return places


def packed_bytes(sizes: Sequence[int], parts: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """One uint8 tensor that holds the bytes of all `parts`, at the places that `places_of_parts` gives; zeros if
    `parts` is None. `sizes`: the bytes of each part."""
    places = places_of_parts(sizes)
    packed = torch.zeros(places[-1][1], dtype=torch.uint8, device=device)
    for (start, end), part in zip(places, parts or (), strict=parts is not None):
        packed[start:end] = part.contiguous().view(torch.uint8).reshape(-1)
    return packed


def sizes_of_4bit(count: int, *, nested: bool) -> list[int]:
    """Bytes of each part of a 4-bit weight with `count` elements: numbers and scales. `nested`: the scales are
    quantized, too, which adds parts."""
    scales = -(-count // GROUP)
    groups = -(-scales // GROUPS)
    return [-(-count // 2), *([4 * groups, 4, scales] if nested else [4 * scales])]


def parts_of_4bit(numbers: Tensor, state: Any) -> list[Tensor]:
    """The tensors of a 4-bit weight, in the order in which they are laid out. `numbers`: the quantized weight;
    `state`: the quantization state that bitsandbytes keeps with it, which has the scales."""
    return [numbers, *([state.state2.absmax, state.offset.reshape(1)] if state.nested else []), state.absmax]


def unpacked_4bit(
    parts: Sequence[Tensor], code: Tensor | None, kind: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The unpacked weight of this `shape` and `dtype`, computed by bitsandbytes' operations from its `parts`. `code`:
    the numbers that the bytes of scales stand for if scales are quantized, else None. `kind`: nf4 or fp4."""
    operations: Any = torch.ops.bitsandbytes
    numbers, *others = parts
    if code is not None:
        of_scales, offset, scales = others
        scales = operations.dequantize_blockwise.default(
            scales, of_scales.view(torch.float32), code, GROUPS, torch.float32
        ) + offset.view(torch.float32)
    else:
        scales = others[0].view(torch.float32)
    weight = operations.dequantize_4bit.default(numbers.view(-1, 1), scales, GROUP, kind, tuple(shape), dtype)
    return cast(Tensor, weight)
