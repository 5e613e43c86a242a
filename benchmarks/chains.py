"""Chains and machines for the benchmarks: Llama-like models from their shapes, and irregular random ones.

A layer's tensors are whole: q, k, v, o, gate, up, down and two norms. Times come from operations at one speed, bytes
from shapes; `benchmarks/papers.py` says where it replaces them by published figures.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama by its sizes; `key_width` is the width of keys and of values (grouped heads: less than `width`).

    `outputs`: what the head puts out per token: the vocabulary's logits, or the scores of a few classes.
    """

    name: str
    layers: int
    width: int
    key_width: int
    inner: int
    vocabulary: int
    heads: int
    outputs: int

    @property
    def layer_tensors(self) -> dict[str, int]:
        """Elements of each tensor of a layer."""
        h, k, f = self.width, self.key_width, self.inner
        return {
            "input_norm": h,
            "q": h * h,
            "k": h * k,
            "v": h * k,
            "o": h * h,
            "post_norm": h,
            "gate": h * f,
            "up": h * f,
            "down": h * f,
        }

    @property
    def layer_parameters(self) -> int:
        return sum(self.layer_tensors.values())

    @property
    def parameters(self) -> int:
        """All of them; embedding and head are two tensors, the last norm belongs to the frame."""
        return self.layers * self.layer_parameters + (self.vocabulary + self.outputs + 1) * self.width


LLAMA2_7B = Shape(
    name="Llama2-7B", layers=32, width=4096, key_width=4096, inner=11008, vocabulary=32000, heads=32, outputs=32000
)
LLAMA3_70B = Shape(
    name="Llama-3-70B", layers=80, width=8192, key_width=1024, inner=28672, vocabulary=128256, heads=64, outputs=128256
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One slice: rows × length tokens, activations and weights of `number_bytes`, and the optimizer's bytes."""

    rows: int
    length: int
    number_bytes: int
    state_bytes: int  # per parameter

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """What one layer costs on one slice. `all_bytes`: everything a keeping layer saves, its input included.

    `offloaded_bytes`: results that travel (matrix products); `cheap_s` recomputes the rest from them. `forward_work`
    and `backward_work` are the most bytes of temporary tensors in a forward that saves nothing, and of gradients of
    activations in a backward.
    """

    forward_s: float
    backward_s: float
    cheap_s: float
    all_bytes: int
    offloaded_bytes: int
    forward_work: int
    backward_work: int


def layer_figures(
    shape: Shape, batch: Batch, *, flops_per_s: float, memory_bytes_per_s: float, scores: bool
) -> LayerFigures:
    """A layer from its shape. `scores`: attention keeps its matrix of scores (no fused kernel)."""
    h, k, f, tokens, b = shape.width, shape.key_width, shape.inner, batch.tokens, batch.number_bytes
    wide, keys, inner = tokens * h * b, tokens * k * b, tokens * f * b
    matrix = batch.rows * shape.heads * batch.length**2 * b if scores else 0
    attention_flops = 4 * tokens * batch.length * h
    forward_s = (2 * tokens * (2 * h * h + 2 * h * k + 3 * h * f) + attention_flops) / flops_per_s
    cheap_bytes = 10 * wide + 5 * matrix + 5 * inner  # reads and writes of norms, rotary, softmax, gate
    return LayerFigures(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        cheap_s=attention_flops / flops_per_s + cheap_bytes / memory_bytes_per_s,
        # Input, both norms' results and their outputs, q, attention's result; k, v; scores; gate, silu, up, product.
        all_bytes=7 * wide + 2 * keys + matrix + 4 * inner,
        offloaded_bytes=2 * wide + 2 * keys + 2 * inner,  # q, k, v, o, gate, up
        forward_work=max(2 * wide + 2 * keys + 2 * matrix, 2 * wide + 4 * inner),
        backward_work=3 * inner + 2 * wide,
    )


def head_s(shape: Shape, batch: Batch, *, flops_per_s: float) -> float:
    """Forward seconds of the head."""
    return 2 * batch.tokens * shape.width * shape.outputs / flops_per_s


def tensor(name: str, elements: int, batch: Batch) -> Tensor:
    size = elements * batch.number_bytes
    return Tensor(
        name=name, elements=elements, bytes=size, gradient_bytes=size, state_bytes=elements * batch.state_bytes
    )


def llama_chain(shape: Shape, batch: Batch, layer: LayerFigures, *, head_forward_s: float) -> Chain:
    """Embedding, layers with the options keep, recompute and offload, and the head, for a batch of one slice."""
    interface = batch.tokens * shape.width * batch.number_bytes
    embedding = Block(
        name="embedding",
        kind="embedding",
        tensors=(tensor("embedding", shape.vocabulary * shape.width, batch),),
        output_bytes=interface,
        forward_frame_bytes=interface,
        backward_held_bytes=interface,
        options=(Option(name="keep", forward_peak_bytes=interface, reads_input=False, reads_weights=()),),
    )
    layers = [
        Block(
            name=f"layer{i}",
            kind="layer",
            options=_options(layer, interface),
            tensors=tuple(tensor(f"{i}.{name}", n, batch) for name, n in shape.layer_tensors.items()),
            input_bytes=interface,
            output_bytes=interface,
            forward_held_bytes=interface,
            forward_frame_bytes=interface,
            backward_held_bytes=interface,
            backward_frame_bytes=interface,
        )
        for i in range(shape.layers)
    ]
    logits = 4 * batch.tokens * shape.outputs
    head_parameters = shape.outputs * shape.width
    head = Block(
        name="head",
        kind="head",
        tensors=(tensor("head", head_parameters, batch),),
        input_bytes=interface,
        forward_held_bytes=interface,
        forward_frame_bytes=interface,
        options=(
            # Logits, their log-softmax and gradients; the gradient of the weight.
            Option(
                name="keep",
                forward_s=head_forward_s,
                backward_s=2 * head_forward_s,
                forward_peak_bytes=3 * logits + head_parameters * batch.number_bytes,
            ),
        ),
    )
    norm = tensor("norm", shape.width, batch)
    return Chain(
        blocks=(embedding, *layers, head),
        frame_bytes=norm.bytes + norm.gradient_bytes + norm.state_bytes,
        frame_tensors=(norm,),
        slice_tokens=batch.tokens,
    )


def _options(layer: LayerFigures, interface: int) -> tuple[Option, ...]:
    saved = layer.all_bytes - interface
    return (
        Option(
            name="keep",
            saved_bytes=saved,
            forward_s=layer.forward_s,
            backward_s=layer.backward_s,
            forward_peak_bytes=saved + interface,
            backward_peak_bytes=layer.backward_work,
        ),
        Option(
            name="recompute",
            forward_s=layer.forward_s,
            backward_s=layer.backward_s + layer.forward_s,
            forward_peak_bytes=layer.forward_work,
            backward_peak_bytes=saved + layer.backward_work,
            recipe="recompute",
        ),
        Option(
            name="offload",
            offloaded_bytes=layer.offloaded_bytes,
            forward_s=layer.forward_s,
            backward_s=layer.backward_s + layer.cheap_s,
            forward_peak_bytes=layer.offloaded_bytes + layer.forward_work,
            backward_peak_bytes=max(0, saved - layer.offloaded_bytes) + layer.backward_work,
            recipe="offload",
        ),
    )


# A large GPU's worth of links and a server's memory: what 70B parameters with 22 GB on the device need.
SERVER = Hardware(
    name="22 GB, 20 GB/s links",
    gpu_bytes=22 * GB,
    cpu_bytes=2000 * GB,
    h2d_bytes_per_s=20.0 * GB,
    d2h_bytes_per_s=20.0 * GB,
    gpu_update_parameters_per_s=20.0 * GB,
    cpu_update_parameters_per_s=2.0 * GB,
    cpu_memory_bytes_per_s=100.0 * GB,
    launch_s=0.005,
    flops_per_s=60e12,
)


def random_chain(seed: int, *, layers: int | None = None) -> tuple[Chain, Hardware]:
    """An irregular chain of 4 to 14 blocks, or of so many layers, and a machine: sizes and times differ between blocks
    by up to ten times."""
    draw = random.Random(seed)
    count = draw.randint(2, 12)
    count = count if layers is None else layers
    blocks = [_end_block("embedding", draw)]
    for i in range(count):
        blocks.append(_random_layer(i, draw))
    blocks.append(_end_block("head", draw))
    rate = 10 ** draw.uniform(8.5, 10.5)
    machine = Hardware(
        name=f"random {seed}",
        gpu_bytes=2**62,
        cpu_bytes=2**62,
        h2d_bytes_per_s=rate,
        d2h_bytes_per_s=rate * draw.uniform(0.8, 1.2),
        gpu_update_parameters_per_s=rate * draw.uniform(0.2, 1.0),
        cpu_update_parameters_per_s=rate * draw.uniform(0.01, 0.1),
        cpu_memory_bytes_per_s=rate * draw.uniform(2, 6),
        launch_s=draw.choice((0.0, 0.002)),
    )
    return Chain(blocks=tuple(blocks)), machine


def _random_tensors(name: str, draw: random.Random, count: int) -> tuple[Tensor, ...]:
    batch = Batch(rows=1, length=1, number_bytes=2, state_bytes=12)
    return tuple(tensor(f"{name}.{i}", draw.randint(10**5, 2 * 10**7), batch) for i in range(count))


def _end_block(name: str, draw: random.Random) -> Block:
    seconds, interface = draw.uniform(0.001, 0.05), 10**6
    return Block(
        name=name,
        kind=name,
        tensors=_random_tensors(name, draw, 1),
        output_bytes=interface,
        input_bytes=interface * (name == "head"),
        forward_held_bytes=interface * (name == "head"),
        forward_frame_bytes=interface,
        backward_held_bytes=interface * (name != "head"),
        options=(
            Option(
                name="keep",
                forward_s=seconds,
                backward_s=2 * seconds,
                forward_peak_bytes=10**7,
                reads_input=name == "head",
            ),
        ),
    )


def _random_layer(index: int, draw: random.Random) -> Block:
    interface, seconds = 10**6, draw.uniform(0.005, 0.05)
    saved = draw.randint(10**7, 2 * 10**8)
    layer = LayerFigures(
        forward_s=seconds,
        backward_s=draw.uniform(1.5, 2.5) * seconds,
        cheap_s=draw.uniform(0.02, 0.3) * seconds,
        all_bytes=saved + interface,
        offloaded_bytes=int(saved * draw.uniform(0.2, 0.7)),
        forward_work=saved // 3,
        backward_work=saved // 4,
    )
    return Block(
        name=f"layer{index}",
        kind=f"layer{index}",
        options=_options(layer, interface),
        tensors=_random_tensors(f"{index}", draw, draw.randint(2, 9)),
        input_bytes=interface,
        output_bytes=interface,
        forward_held_bytes=interface,
        forward_frame_bytes=interface,
        backward_held_bytes=interface,
        backward_frame_bytes=interface,
    )
