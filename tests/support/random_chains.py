"""Random chains and machines for property tests: irregular blocks, frozen and tied tensors, all figures of a block."""

from __future__ import annotations

from hypothesis import strategies as st

from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor

sizes = st.integers(0, 2000)
times = st.floats(0.0, 3.0)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> Tensor:
    """A tensor in fp32, or in two bytes with a master, trainable more often than not."""
    elements = draw(st.integers(1, 500))
    width = draw(st.sampled_from((4, 4, 2)))
    trainable = draw(st.integers(0, 3)) > 0
    return Tensor(
        name=name,
        elements=elements,
        bytes=width * elements,
        gradient_bytes=width * elements * trainable,
        state_bytes=(8 if width == 4 else 12) * elements * trainable,
        trainable=trainable,
    )


@st.composite
def layers(draw: st.DrawFn, index: int, in_frame: bool) -> Block:
    """A block in the middle: up to three tensors, one to four options."""
    own = tuple(draw(tensors(f"l{index}.{letter}")) for letter in "abc"[: draw(st.integers(0, 3))])
    saved, first = draw(sizes), draw(st.booleans())
    forward_s, backward_s = draw(times), draw(times)
    gradients = sum(t.gradient_bytes for t in own)
    peak, in_bytes = draw(sizes), draw(sizes) // 4
    options = [
        Option(
            name="keep",
            saved_bytes=saved,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_peak_bytes=saved + 50,
            backward_peak_bytes=peak,
            backward_first_peak_bytes=peak + gradients if first else None,
            reads_input=draw(st.booleans()),
        ),
        Option(
            name="recompute",
            forward_s=forward_s,
            backward_s=backward_s + forward_s,
            forward_peak_bytes=draw(sizes),
            backward_peak_bytes=saved + peak,
            recipe="recompute",
        ),
        Option(
            name="offload",
            offloaded_bytes=saved // 2,
            forward_s=forward_s,
            backward_s=backward_s * 1.1,
            forward_peak_bytes=saved,
            backward_peak_bytes=peak,
            recipe="offload",
        ),
        Option(
            name="offload-input",
            offloaded_bytes=in_bytes,
            forward_s=forward_s,
            backward_s=backward_s + forward_s,
            forward_peak_bytes=saved,
            backward_peak_bytes=saved + peak,
            recipe="offload-input",
            reads_input=False,
        ),
    ]
    return Block(
        name=f"layer{index}",
        kind=f"layer{index}",
        tensors=own,
        options=tuple(options[: draw(st.integers(1, 4))]),
        input_bytes=in_bytes,
        output_bytes=50,
        forward_held_bytes=draw(sizes) // 4,
        forward_frame_bytes=draw(sizes) // 4,
        backward_held_bytes=draw(sizes) // 4,
        backward_frame_bytes=draw(sizes) // 4,
        frame_gradient_bytes=draw(sizes) // 4 * in_frame,
    )


@st.composite
def chains(draw: st.DrawFn, most: int = 5) -> Chain:
    """Embedding, up to `most` layers, head; embedding and head tied now and then."""
    frame = (draw(tensors("norm")),) if draw(st.booleans()) else ()
    in_frame = any(t.trainable for t in frame)
    embedding = draw(tensors("e"))
    tied = draw(st.integers(0, 3)) == 0
    if tied and embedding.trainable:
        embedding = Tensor(
            name="e",
            elements=embedding.elements,
            bytes=embedding.bytes,
            gradient_bytes=embedding.gradient_bytes,
            state_bytes=embedding.state_bytes,
            row_bytes=embedding.bytes // embedding.elements,
        )
    first = Block(
        name="embedding",
        kind="embedding",
        tensors=(embedding,),
        output_bytes=50,
        forward_frame_bytes=draw(sizes) // 4,
        backward_held_bytes=50,
        frame_gradient_bytes=draw(sizes) // 4 * in_frame,
        options=(
            Option(
                name="keep",
                forward_s=draw(times),
                backward_s=draw(times),
                forward_peak_bytes=50,
                backward_peak_bytes=draw(sizes),
                reads_input=False,
                reads_weights=(),
            ),
        ),
    )
    head = embedding if tied else draw(tensors("h"))
    last = Block(
        name="head",
        kind="head",
        tensors=(head,),
        input_bytes=50,
        forward_held_bytes=50,
        forward_frame_bytes=54,
        frame_gradient_bytes=draw(sizes) // 4 * in_frame,
        options=(
            Option(
                name="keep",
                forward_s=draw(times),
                backward_s=draw(times),
                forward_peak_bytes=draw(sizes) + head.gradient_bytes,
            ),
        ),
    )
    middle = [draw(layers(i, in_frame)) for i in range(draw(st.integers(0, most)))]
    return Chain(
        blocks=(first, *middle, last),
        frame_bytes=draw(sizes),
        start_bytes=draw(sizes),
        frame_tensors=frame,
        slice_tokens=draw(st.integers(1, 20)),
    )


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """Rates from slow to fast against the chains' sizes."""
    rates = st.sampled_from((200.0, 1000.0, 5000.0, 50000.0))
    return Hardware(
        name="random",
        gpu_bytes=10**6,
        cpu_bytes=10**7,
        h2d_bytes_per_s=draw(rates),
        d2h_bytes_per_s=draw(rates),
        gpu_update_parameters_per_s=draw(rates),
        cpu_update_parameters_per_s=draw(rates),
        cpu_memory_bytes_per_s=20 * draw(rates),
        launch_s=draw(st.sampled_from((0.0, 0.05))),
        min_transfer_bytes=draw(st.sampled_from((0, 0, 400))),
    )
