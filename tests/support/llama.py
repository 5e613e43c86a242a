"""Llama-shaped chains on the paper's machine, for tests of the planner: real sizes, no model."""

from __future__ import annotations

from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor

GB = 10**9

RTX_3060 = Hardware(
    name="RTX 3060 of the papers",
    gpu_bytes=12 * GB,
    cpu_bytes=128 * GB,
    h2d_bytes_per_s=10.4e9,
    d2h_bytes_per_s=10.4e9,
    gpu_update_parameters_per_s=16.6e9 / 4,
    cpu_update_parameters_per_s=1.1e9 / 4,
    cpu_memory_bytes_per_s=40e9,
    launch_s=1e-3,
    min_transfer_bytes=2**20,
)


def llama(
    layers: int = 32,
    *,
    width: int = 4096,
    inner: int = 11008,
    vocabulary: int = 32000,
    tokens: int = 2048,
    saved: int = 40_800_000_000 // 32,
    seconds: float = 10.2,
) -> Chain:
    """Llama2-7B in fp32 by default; `saved` bytes of activations and `seconds` / 32 of computing per layer and step."""
    interface = 4 * tokens * width
    forward_s = seconds / 32 / 3
    offloaded = int(0.65 * saved)
    options = (
        Option(
            name="keep",
            saved_bytes=saved,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            forward_peak_bytes=saved + interface,
            backward_peak_bytes=2 * interface,
        ),
        Option(
            name="recompute",
            forward_s=forward_s,
            backward_s=3 * forward_s,
            forward_peak_bytes=saved // 3,
            backward_peak_bytes=saved + interface,
            recipe="recompute",
        ),
        Option(
            name="offload",
            offloaded_bytes=offloaded,
            forward_s=forward_s,
            backward_s=2.08 * forward_s,
            forward_peak_bytes=saved,
            backward_peak_bytes=saved // 2,
            recipe="offload",
        ),
    )
    square, wide = width * width, width * inner
    sizes = {"q": square, "k": square, "v": square, "o": square, "gate": wide, "up": wide, "down": wide, "norm": width}
    middle = [
        Block(
            name=f"layer{i}",
            kind="layer",
            tensors=tuple(_tensor(f"l{i}.{name}", n) for name, n in sizes.items()),
            options=options,
            input_bytes=interface,
            output_bytes=interface,
            forward_held_bytes=interface,
            forward_frame_bytes=interface,
            backward_held_bytes=interface,
            backward_frame_bytes=interface,
        )
        for i in range(layers)
    ]
    ends = _embedding(vocabulary * width, interface), _head(vocabulary * width, interface, tokens)
    return Chain(blocks=(ends[0], *middle, ends[1]))


def _tensor(name: str, elements: int) -> Tensor:
    return Tensor(
        name=name, elements=elements, bytes=4 * elements, gradient_bytes=4 * elements, state_bytes=8 * elements
    )


def _embedding(elements: int, interface: int) -> Block:
    keep = Option(
        name="keep",
        forward_s=1e-3,
        backward_s=1e-2,
        forward_peak_bytes=interface,
        backward_peak_bytes=interface,
        reads_input=False,
        reads_weights=(),
    )
    return Block(
        name="embedding",
        kind="embedding",
        tensors=(_tensor("embedding", elements),),
        options=(keep,),
        output_bytes=interface,
        forward_frame_bytes=interface,
        backward_held_bytes=interface,
    )


def _head(elements: int, interface: int, tokens: int) -> Block:
    logits = 4 * tokens * 32000
    keep = Option(name="keep", forward_s=0.1, backward_s=0.2, forward_peak_bytes=2 * logits + 4 * elements + interface)
    return Block(
        name="head",
        kind="head",
        tensors=(_tensor("head", elements),),
        options=(keep,),
        input_bytes=interface,
        forward_held_bytes=interface,
        forward_frame_bytes=interface,
    )
