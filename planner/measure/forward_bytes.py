"""Measures the bytes of a forward without gradients: the model's own code, blocks and frame, runs on fake tensors."""

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
from planner.graph.fake import FAKE_TYPES, FakeMode, fake_weights
from planner.measure.frame_bytes import frame_alone
from planner.models.encoder_decoder import has_pairs
from planner.schedule.forward_program import ForwardBytes


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and records no gradients."""
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
    """The bytes of `run`, which calls the model once; its result still counts as held at the end. Weights may be
    anywhere, also on meta. `tensors`: tensors that the caller has on the host or counts elsewhere. `prepare` may call
    the model, too: what it leaves is counted, its own peak is not. `eager`: names of blocks whose code looks at data;
    they run on random data. Raises UserError."""
    mode, meter = FakeMode(), Meter(device.type, counted=FAKE_TYPES)
    held: list[int] = []
    peaks: list[int] = []

    def enter(index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        peaks.append(meter.mark())
        held.append(meter.now)
        if names.all[index] not in eager:
            return module.forward(*args, **kwargs)  # not the module itself: its hooks have run, in the frame
        code = EagerPair.measured(module, args, kwargs, name=names.all[index], reason="its code looks at data")
        outputs = mode.fresh(code.output_values)
        meter.add(mode.block(code.forward_peak, device))  # and is freed again
        for tensor in outputs:
            meter.add(tensor)
        return code.result.deliver(outputs, flatten_call(args, kwargs)[1], mappings_of(args, kwargs))

    with frame_alone(model, names, fake_weights(model, mode, device, buffers=False), enter), eval_mode(model):
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
    """The module whose `generate` and `forward` write texts: with peft, the model inside the wrapper."""
    return next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)


def quiet(model: nn.Module) -> dict[str, Any]:
    """Arguments for a model that writes: they switch off a mixture's auxiliary loss, which fails on masked prompts."""
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
    """The bytes of any pass of `model.generate` over `rows` prompts of up to `length` tokens, greedy and with a cache:
    the first pass, over the prompts, and the last, whose cache is the largest, are measured. `eager` blocks cannot be
    tried with a cache. With them a pass over prompts and answers is measured, and the cache's bytes by the config are
    added, which is more. An encoder-decoder has no cache here: one pass over the prompts and all that is written is
    measured.
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
    """Bytes of the keys and values of all layers, and of one layer again: the one that is extending its cache."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = model.get_output_embeddings().weight.element_size()
    return int(2 * (config.num_hidden_layers + 1) * tokens * heads * width * size)
