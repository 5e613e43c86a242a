"""LSP-Offload (Chen et al. 2024, "paper 002"): its tables 1 and 4 and its ratios, and what our planner makes of them.

The paper gives neither the length nor the number of the rows, so both are chosen here; `INPUTS` says what else is.
Its first version, which this is about, has four figures; 4c is the one with throughputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lsp_plans import Answer, Asked, ask, job_of, unlimited
from planner.commands.kept_traces import Traces
from planner.machine.hardware import Hardware
from planner.machine.presets import preset, usable_gpu_bytes
from planner.schedule.chain import Chain

_GIB = 2**30
INPUTS = (
    ("equation (1)", "theirs: 0.84 s is 1.7 : 3.5 ms", "table 1; ours computes layers again in backward"),
    ("link", "15 GB/s; laptop 12.5", "the middles of 10~20 and 10~15 GB/s (tables 1 and 4)"),
    ("RTX 4090", "the preset, 252 GiB of RAM", "section 6; a host of two channels, where theirs has four"),
    ("A1000 Laptop", "the desktop's RTX A1000, 4 GiB", "there is no preset of the laptop's; 32 GiB of RAM as there"),
    ("GPT2", "GPT-NeoX of its width and depth", "transformers' GPT2 has no linear layers, so LSP takes none of it"),
    ("GPT2-1.3B", "40 layers of width 1600", "table 4: 40 layers, 2.6 GB of parameters"),
    ("rows", "1 × 2048, 16 × 256, 4 × 256", "not given; batches of 16 and 4 for 3B and 774M (section 9.2.2)"),
    ("four cases", "774M, 1.3B, 3B, 7B in this order", "figure 4c is no text; 3.33 is the workstation's larger one"),
    ("gradients", "not clipped", "nothing of clipping in the paper"),
)
_LLAMA = {"dtype": "bfloat16", "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 32}
_GPT = {"dtype": "bfloat16", "vocab_size": 50257, "use_parallel_residual": False, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-7B": ("LlamaConfig", _LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}),
    "Llama-3B": ("LlamaConfig", _LLAMA | {"hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26}),
    "GPT2-774M": (
        "GPTNeoXConfig",
        _GPT
        | {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 36, "num_attention_heads": 20}
        | {"max_position_embeddings": 1024},
    ),
    "GPT2-1.3B": (
        "GPTNeoXConfig",
        _GPT
        | {"hidden_size": 1600, "intermediate_size": 6400, "num_hidden_layers": 40, "num_attention_heads": 25}
        | {"max_position_embeddings": 1024},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of table 1 or 4. Gigabytes; seconds are of one layer, but `compute_s`: a pass forward and backward
    as the text counts it, and `zero_s`: a step of Zero-Offload by equation (1). 0: the paper does not say, or, for
    `gradients_gb`, counts them as states."""

    parameters_gb: float
    states_gb: float
    gradients_gb: float
    activations_gb: float
    layers: int
    cpu_update_s: float
    forward_s: float
    backward_s: float
    gpu_update_s: float
    compute_s: float
    zero_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the paper's: its name, its model and what it says."""

    name: str
    model: str
    figures: Figures


TABLE_1 = Table(
    name="table 1, RTX 4090",
    model="llama-7B",
    figures=Figures(
        parameters_gb=14,
        states_gb=42,
        gradients_gb=0,
        activations_gb=8,
        layers=32,
        cpu_update_s=0.06,
        forward_s=0.0017,
        backward_s=0.0035,
        gpu_update_s=0.001,
        compute_s=0.84,
        zero_s=0.27 + max(0.57, 14 / 15) + max(32 * 0.06, 14 / 15),
    ),
)
TABLE_4 = Table(
    name="table 4, A1000 Laptop",
    model="GPT2-1.3B",
    figures=Figures(
        parameters_gb=2.6,
        states_gb=7.8,
        gradients_gb=0,
        activations_gb=0.5,
        layers=40,
        cpu_update_s=0.08,
        forward_s=0.0045,
        backward_s=0.0087,
        gpu_update_s=0.0079,
        compute_s=0,
        zero_s=40 * 0.0045 + max(40 * 0.0087, 2.6 / 12.5) + max(40 * 0.08, 2.6 / 12.5),
    ),
)
TABLES = (TABLE_1, TABLE_4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on one of the paper's machines. `over_zero`: the paper's throughput with a subspace of 512 over that of
    Zero-Offload. `sizes`: LSP's (size, nonzeros in a row) that are asked about."""

    model: str
    workstation: bool
    rows: int
    length: int
    over_zero: float | None
    sizes: tuple[tuple[int, int], ...] = ((512, 16),)

    def __str__(self) -> str:
        return f"{self.model}, {self.rows} × {self.length} tokens, {'RTX 4090' if self.workstation else 'A1000 4 GB'}"


CASES = (
    Case(model="GPT2-774M", workstation=False, rows=4, length=256, over_zero=2.03),
    Case(model="GPT2-1.3B", workstation=False, rows=4, length=256, over_zero=3.09),
    Case(model="Llama-3B", workstation=True, rows=16, length=256, over_zero=2.04),
    Case(
        model="llama-7B",
        workstation=True,
        rows=1,
        length=2048,
        over_zero=3.33,
        sizes=((512, 16), (1024, 16), (2048, 16)),
    ),
)
LOG = Case(model="llama-7B", workstation=True, rows=4, length=1024, over_zero=None, sizes=((512, 16), (2048, 8)))
LOG_S = {"Zero-Offload": 4.11, "LSP 2048, d = 8": 1.97, "native": 1.63}
"""Seconds of a step in a log of the authors' public repository, of 6.7 B and 4 × 1024 tokens on an RTX 4090."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Our figures for a case. `zero_s`: the paper's equation (1) with our rates. `native`: full fine-tuning with
    unlimited memory; `full`: on the card. `lsp`: (size, nonzeros) -> answer."""

    case: Case
    zero_s: float
    native: Answer
    full: Answer
    lsp: dict[tuple[int, int], Answer]


def machine(case: Case) -> Hardware:
    """The paper's machine, as near as it can be asked about."""
    if case.workstation:
        return preset("rtx4090", bf16=True, cpu_memory_bytes=252 * _GIB, link="15GB")
    card = preset("a1000", bf16=True, cpu_memory_bytes=32 * _GIB, link="12.5GB")
    return replace(card, name="RTX A1000 with 4 GiB", gpu_bytes=usable_gpu_bytes(4 * _GIB))


def write_models(folder: Path) -> None:
    """Write the configs of the models, without weights, into folders of `folder`."""
    import transformers

    for name, (kind, values) in MODELS.items():
        getattr(transformers, kind)(**values).save_pretrained(folder / name)


def answers(models: Path) -> Iterator[Found]:
    """Our figures for each case and for the authors' log."""
    traces = Traces()
    for case in (*CASES, LOG):
        hardware = machine(case)

        def asked(case: Case = case, **keys: Any) -> Asked:
            return Asked(model=models / case.model, keys=keys, length=case.length, rows=case.rows, clip=False)

        chain = traces.of(job_of(asked()), hardware).chain_on(hardware)
        yield Found(
            case=case,
            zero_s=zero_s(chain, hardware),
            native=ask(asked(), unlimited(hardware), traces),
            full=ask(asked(), hardware, traces),
            lsp={(s, d): ask(asked(method="lsp", lsp_size=s, lsp_nonzeros=d), hardware, traces) for s, d in case.sizes},
        )


def sizes(table: Table, models: Path) -> Figures:
    """Our figures beside those of a table."""
    case = next(case for case in CASES if case.model == table.model)
    hardware = machine(case)
    job = job_of(Asked(model=models / case.model, keys={}, length=case.length, rows=case.rows, clip=False))
    chain = Traces().of(job, hardware).chain_on(hardware)
    tensors = [*{t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}.values()]
    layer = chain.blocks[len(chain.blocks) // 2]
    kept = max(layer.options, key=lambda option: option.saved_bytes)
    elements = sum(t.elements for t in layer.tensors)
    forward_s, backward_s = passes_s(chain)
    return Figures(
        parameters_gb=sum(t.bytes for t in tensors) / 1e9,
        states_gb=sum(t.state_bytes for t in tensors) / 1e9,
        gradients_gb=sum(t.gradient_bytes for t in tensors) / 1e9,
        activations_gb=sum(max(o.saved_bytes for o in block.options) for block in chain.blocks) / 1e9,
        layers=sum(block.kind == layer.kind for block in chain.blocks),
        cpu_update_s=elements / hardware.cpu_update_parameters_per_s,
        forward_s=kept.forward_s,
        backward_s=kept.backward_s,
        gpu_update_s=elements / hardware.gpu_update_parameters_per_s,
        compute_s=forward_s + backward_s,
        zero_s=zero_s(chain, hardware),
    )


def passes_s(chain: Chain) -> tuple[float, float]:
    """Seconds of computing, forward and backward, where all activations are kept."""
    kept = [max(block.options, key=lambda option: option.saved_bytes) for block in chain.blocks]
    return sum(option.forward_s for option in kept), sum(option.backward_s for option in kept)


def zero_s(chain: Chain, hardware: Hardware) -> float:
    """Equation (1), a step of Zero-Offload, with our rates: forward, then backward beside gradients that leave, then
    updates beside weights that come. Layers are computed again in backward, as in the paper."""
    forward_s, backward_s = passes_s(chain)
    trained = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}.values()
    out_s = sum(t.gradient_bytes for t in trained) / hardware.d2h_bytes_per_s
    back_s = sum(t.bytes for t in trained) / hardware.h2d_bytes_per_s
    update_s = sum(t.elements for t in trained) / hardware.cpu_update_parameters_per_s
    return forward_s + max(forward_s + backward_s, out_s) + max(update_s, back_s)
