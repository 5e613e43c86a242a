"""Plans the job files in examples/jobs and writes into the first two lines of each what its plan says.

    python -m benchmarks.examples [--only TEXT] [--check]

The machine is the card at the end of a file's name, with the RAM that its first line names. Models are taken from
their configs alone, which are written here; nothing is downloaded and nothing is measured.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import questions
from offmated.jobs.job_text import with_settings
from planner.commands.ask import ask
from planner.commands.kept_traces import Traces
from planner.job.schema import Job
from planner.keys.source import read_yaml
from planner.machine.cards import CARDS
from planner.machine.presets import preset
from planner.reports.receipt import Receipt

FOLDER = questions.ROOT / "examples" / "jobs"
ROWS = 1000
"""The minutes are those of so many rows, once."""
_QWEN = {"vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16", "head_dim": 128}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.2-1B-Instruct": questions.MODELS["Llama-3.2-1B"],
    "Qwen/Qwen3-4B": (
        "Qwen3Config",
        _QWEN
        | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": (
        "Qwen3Config",
        _QWEN
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": questions.MODELS["Llama-3.1-8B"],
    "mistralai/Mistral-Nemo-Instruct-2407": (
        "MistralConfig",
        {"vocab_size": 131072, "max_position_embeddings": 131072, "dtype": "bfloat16", "head_dim": 128}
        | {"hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "sliding_window": None},
    ),
    "openai/gpt-oss-20b": (
        "GptOssConfig",
        questions.MODELS["gpt-oss-20b"][1] | {"quantization_config": _MXFP4},
    ),
}
"""Hub id -> the class and the values of the model's config."""
_FIRST = re.compile(
    r"# Planned for an? .+ and (?P<ram>\d+) GiB of RAM: (?P<step>[\d.]+) s a step, "
    r"(?P<rate>[\d,]+) tokens/s, (?P<minutes>[\d.]+) min for 1,000 rows\n"
    r"# with (?P<gpu>[\d.]+) GiB of GPU memory and (?P<host>[\d.]+) GiB of RAM\.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the first two lines of a file say: the host's memory in GiB, seconds of a step, tokens per second, minutes
    for `ROWS` rows, and the peaks of the GPU's and the host's memory in GiB."""

    ram: int
    step_s: float
    tokens_per_s: float
    minutes: float
    gpu_gib: float
    host_gib: float

    @classmethod
    def read(cls, file: Path) -> Figures:
        """The figures in the first two lines of `file`. Raises ValueError where these have another form."""
        found = _FIRST.match(file.read_text("utf-8"))
        if found is None:
            raise ValueError(f"{file} does not begin with what is planned")
        rate = float(found["rate"].replace(",", ""))
        step_s, minutes, gpu, host = (float(found[name]) for name in ("step", "minutes", "gpu", "host"))
        return cls(ram=int(found["ram"]), step_s=step_s, tokens_per_s=rate, minutes=minutes, gpu_gib=gpu, host_gib=host)

    @classmethod
    def of(cls, receipt: Receipt, ram: int) -> Figures:
        """The figures of a plan on a host with `ram` GiB."""
        rows = receipt.asked.rows * receipt.asked.slices
        return cls(
            ram=ram,
            step_s=receipt.step_s,
            tokens_per_s=receipt.tokens_per_s,
            minutes=receipt.step_s * ROWS / rows / 60,
            gpu_gib=receipt.gpu_peak_bytes / 2**30,
            host_gib=receipt.cpu_peak_bytes / 2**30,
        )

    def lines(self, card: str) -> str:
        """The first two lines of a file for the card with the short name `card`."""
        title = CARDS[card].name.removeprefix("GeForce ")
        size = f"{CARDS[card].memory_bytes // 2**30} GB"
        return (
            f"# Planned for an {title.removesuffix(size).strip()} ({size}) and {self.ram} GiB of RAM: "
            f"{self.step_s:.2f} s a step, {self.tokens_per_s:,.0f} tokens/s, {self.minutes:.1f} min for 1,000 rows\n"
            f"# with {self.gpu_gib:.1f} GiB of GPU memory and {self.host_gib:.1f} GiB of RAM.\n"
        )


def card_of(file: Path) -> str:
    """The short name of the card that a file is for."""
    return file.stem.rpartition("-")[2]


def planned(file: Path, models: Path, traces: Traces, *, settings: Sequence[str] = ()) -> Receipt:
    """The receipt of the job in `file` on its machine, without what would help. `models`: the folder with the configs,
    from `write_models`. `settings`: keys that replace the file's, each KEY=VALUE."""
    text = file.read_text("utf-8")
    name = read_yaml(text, file.name).values["model"]
    job = Job.question(with_settings(text, [f"model={models / name}", *settings]), models, name=file.name)
    ram = Figures.read(file).ram * 2**30
    return ask(job, preset(card_of(file), bf16=job.bf16, cpu_memory_bytes=ram), traces=traces, helps=False)


def write_models(folder: Path) -> None:
    """Write the configs of the models, without weights, into folders of `folder` that are called as on the hub."""
    import transformers

    for name, (kind, values) in MODELS.items():
        getattr(transformers, kind)(**values).save_pretrained(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="files whose name contains TEXT")
    parser.add_argument("--check", action="store_true", help="print these lines and leave the files as they are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="offmate-examples-") as scratch:
        write_models(Path(scratch))
        traces = Traces()
        for file in sorted(FOLDER.glob("*.yaml")):
            if options.only not in file.name:
                continue
            receipt = planned(file, Path(scratch), traces)
            if receipt.status == "infeasible":
                raise SystemExit(f"{file.name} does not fit")
            lines = Figures.of(receipt, Figures.read(file).ram).lines(card_of(file))
            print(f"{file.name}\n{lines}", flush=True)
            if not options.check:
                file.write_text(_FIRST.sub(lines, file.read_text("utf-8"), count=1), "utf-8")


if __name__ == "__main__":
    main()
