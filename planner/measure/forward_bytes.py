"""Measures the bytes that a forward without gradients needs (evaluation, generation), by running the model's own code
on fake tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from planner.cpu.meter import Meter
from planner.graph import BlockNames, EagerPair, flatten_call, mappings_of
from planner.graph.fake import FAKE_TYPES, FakeMode, fake_model
from planner.measure.frame_bytes import frame_alone
from planner.models.encoder_decoder import has_pairs
from planner.schedule.forward_program import ForwardBytes


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode and no gradients are recorded."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def measure_forward(
    model: nn.Module,
    names: BlockNames,
    run: Callable[[], object],
    tensors: Sequence[Tensor],
    device: torch.device,
    *,
    prepare: Callable[[], object] = lambda: None,
    eager: Collection[str] = (),
) -> ForwardBytes:
    """The bytes that `run` needs, which calls the model once, block by block. Its result counts as held at the end.
    Weights may be on any device, also on meta.

    `tensors`: tensors that are on the host or counted elsewhere, and so are not counted here. `prepare` runs before
    and may call the model, too: what it leaves is counted, its own peak is not. `eager`: names of blocks whose code
    looks at its data; they run on random data. Raises UserError.
    """
    mode, meter = FakeMode(), Meter(device.type, counted=FAKE_TYPES)
    held: list[int] = []
    peaks: list[int] = []

    def enter(index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        peaks.append(meter.mark())
        held.append(meter.now)
        if names.all[index] not in eager:
            return module.forward(*args, **kwargs)  # not the module itself, whose hooks have run already
        code = EagerPair.measured(module, args, kwargs, name=names.all[index], reason="its code looks at data")
        outputs = mode.fresh(code.output_values)
        meter.add(mode.block(code.forward_peak, device))  # stands for the block's peak, and is freed at once
        for tensor in outputs:
            meter.add(tensor)
        return code.result.deliver(outputs, flatten_call(args, kwargs)[1], mappings_of(args, kwargs))

    with frame_alone(model, names, fake_model(model, mode, device), enter), eval_mode(model):
        with meter.host():
            for tensor in (*model.parameters(), *model.buffers(), *tensors):
                meter.add(tensor)
        with meter.watch():
            prepare()
            peaks.clear()
            held.clear()
            meter.mark()
            result = run()
            peaks.append(meter.mark())
            held.append(meter.now)
        del result
    start, *each = peaks
    return ForwardBytes(start=start, held=tuple(held), peak=tuple(each))


def generator(model: nn.Module) -> nn.Module:
    """The module whose `generate` and `forward` write texts: the model itself or, if peft has wrapped it, the model
    inside."""
    return next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)


def quiet(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for a forward that generates text: they switch off the auxiliary loss of a mixture of experts,
    which fails on prompts with a mask."""
    known = inspect.signature(generator(model).forward).parameters
    return {"output_router_logits": False} if "output_router_logits" in known else {}


def measure_generation(
    model: nn.Module,
    names: BlockNames,
    rows: int,
    length: int,
    new_tokens: int,
    device: torch.device,
    *,
    eager: Collection[str] = (),
) -> ForwardBytes:
    """The bytes of any pass of `model.generate` over `rows` prompts of up to `length` tokens, greedy and with a cache,
    that writes `new_tokens` tokens. Two passes are measured: the first, over the prompts, and the last, whose cache is
    the largest.

    Blocks in `eager` look at their data and cannot be tried with a cache. With them one pass over prompts and answers
    is measured, and the bytes of the cache are added as the model's config gives them, which is more. For an
    encoder-decoder no cache is assumed: one pass over the prompts and all that is written is measured.
    """
    pairs = has_pairs(model)
    last = length + (0 if pairs else new_tokens)
    ids = torch.zeros((rows, last), dtype=torch.int64, device=device)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0  # code that looks for padding is to find some
    options: dict[str, Any] = {"use_cache": True, "return_dict": True, **quiet(model)}
    if "logits_to_keep" in inspect.signature(generator(model).forward).parameters:
        options["logits_to_keep"] = 1  # as generate does
    vocabulary = cast(Any, model).get_output_embeddings().weight.shape[0]
    # What generate itself holds: tokens, masks and positions; scores of the next token in fp32, up to four times.
    own_bytes = rows * (4 * 4 * vocabulary + 64 * last)
    if eager or pairs:
        options["use_cache"] = False
        if pairs:
            options["decoder_input_ids"] = ids.new_zeros((rows, new_tokens))
        else:
            own_bytes += _cache_bytes(cast(Any, model), rows * last)
        whole = measure_forward(
            model, names, lambda: model(input_ids=ids, attention_mask=mask, **options), (ids, mask), device, eager=eager
        )
        return whole.together(whole, own_bytes)
    caches: list[Any] = []

    def begin(tokens: int) -> Any:
        return model(input_ids=ids[:, :tokens], attention_mask=mask[:, :tokens], **options)

    def end() -> Any:
        return model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=caches.pop(), **options)

    first = measure_forward(model, names, lambda: begin(length), (ids, mask), device)
    final = measure_forward(
        model, names, end, (ids, mask), device, prepare=lambda: caches.append(begin(last - 1).past_key_values)
    )
    return first.together(final, own_bytes)


def _cache_bytes(model: Any, tokens: int) -> int:
    """Bytes of the cached keys and values of all layers, and of one layer again: the one that is
    extending its cache."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = model.get_output_embeddings().weight.element_size()
    return int(2 * (config.num_hidden_layers + 1) * tokens * heads * width * size)
