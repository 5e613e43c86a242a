"""Sixty questions about whether a model fits a home machine and how fast it is, answered as by `offmate plan`.

    python -m benchmarks.questions [--only TEXT] [--every N] [--beside 8] [--json FILE]

For each question it prints: processor seconds until the receipt is there, and until the answer is whole with what would
help (both with all processes of the answer); the same for the question asked again; how far the step may be above the
best, as far as proven; and a digest of plan and answer. `--beside N` asks each question once more beside N busy
processes: all digests must be equal. What does not fit is followed by the changes that make it fit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16"}
_QWEN = {"vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16", "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "LlamaConfig",
        _LLAMA
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    ),
    "Llama-3.1-8B": (
        "LlamaConfig",
        _LLAMA
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8},
    ),
    "Qwen3-32B": (
        "Qwen3Config",
        _QWEN
        | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
        | {"num_key_value_heads": 8},
    ),
    "Llama-3.1-70B": (
        "LlamaConfig",
        _LLAMA
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8},
    ),
    "Mixtral-8x7B": ("MixtralConfig", {"dtype": "bfloat16"}),
    "gpt-oss-20b": ("GptOssConfig", {"dtype": "bfloat16", "num_hidden_layers": 24, "num_local_experts": 32}),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        _QWEN
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
}
MIXTURES = ("Mixtral-8x7B", "gpt-oss-20b", "Qwen3-30B-A3B")
CARDS = ("rtx3070", "rtx3060", "rtx4080", "rtx4090", "rtx5090")  # 8, 12, 16, 24, 32 GiB
RAM_GIB = (32, 64, 128)
TOKENS = (1024, 4096, 16384, 65536)
METHODS = ("full", "LoRA", "LoRA on 4 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question: `slices` micro-batches of one row with `tokens` tokens."""

    model: str
    card: str
    ram_gib: int
    tokens: int
    method: str
    slices: int = 4

    def __str__(self) -> str:
        return f"{self.model}, {self.method}, {self.slices} × {self.tokens} tokens, {self.card}, {self.ram_gib} GiB"

    def options(self, models: Path) -> dict[str, Any]:
        """The options of `offmate plan`, with the configs of the models in the folder `models`."""
        lora = {"lora": 16} if self.method != "full" else {}
        settings = ("load_in_4bit=true",) if self.method == METHODS[2] else ()
        if lora and self.model in MIXTURES:  # adapters on experts have no dropout
            settings += ("lora_dropout=0",)
        asked = {"model": str(models / self.model), "max_length": self.tokens, "slices": self.slices}
        return {**asked, **lora, "settings": settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An answer. `receipt_s`, `answer_s`: processor seconds. `over`: how far the step may be above the best (0.01 =
    1%)."""

    digest: str
    status: str
    receipt_s: float
    answer_s: float
    step_s: float
    over: float
    fits_with: tuple[str, ...]


def questions() -> list[Asked]:
    """The sixty questions: the usual ones, and each model on each size of card, all else drawn by chance."""
    usual = [
        Asked(model="Llama-3.1-8B", card="rtx4090", ram_gib=64, tokens=4096, method="LoRA"),
        Asked(model="Llama-3.1-8B", card="rtx3060", ram_gib=128, tokens=1024, method="full", slices=8),
        Asked(model="Llama-3.1-8B", card="rtx5090", ram_gib=64, tokens=16384, method="LoRA on 4 bits", slices=2),
        Asked(model="Llama-3.1-70B", card="rtx4090", ram_gib=64, tokens=2048, method="LoRA on 4 bits"),
        Asked(model="Mixtral-8x7B", card="rtx4090", ram_gib=64, tokens=4096, method="LoRA on 4 bits"),
    ]
    draw = random.Random(0)
    pairs = [(model, card) for card in CARDS for model in MODELS]
    drawn = [
        Asked(
            model=model,
            card=card,
            ram_gib=draw.choice(RAM_GIB),
            tokens=draw.choice(TOKENS),
            method=draw.choice(METHODS),
        )
        for model, card in (*pairs, *pairs[:20])
    ]
    return [*usual, *drawn]


def asked(question: Asked, models: Path, home: Path) -> Seen:
    """Ask in a new process, whose files lie in `home`."""
    words = [sys.executable, "-m", "benchmarks.questions", "--probe", json.dumps(asdict(question)), str(models)]
    environment = {**os.environ, "OFFMATE_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    try:
        seen = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{question}: no answer\n{done.stderr[-2000:]}") from None
    receipt = seen["receipt"]
    told = {name: value for name, value in receipt.items() if name != "answer_s"}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]
    bounds = [receipt["bound_s"], receipt["lp_step_s"] * (1 - receipt["solver_gap"])]
    best = max(bounds) if receipt["status"] != "infeasible" else 0.0
    return Seen(
        digest=digest,
        status=receipt["status"],
        receipt_s=seen["receipt_s"],
        answer_s=seen["answer_s"],
        step_s=receipt["step_s"],
        over=receipt["step_s"] / best - 1 if best else 0.0,
        fits_with=tuple(receipt["fits_with"]),
    )


def probe(question: Asked, models: Path) -> None:
    """Answer in this process, and print the receipt with the processor seconds of this process and its own."""
    from offmated.cli import planner_process
    from offmated.paths import traces_folder
    from planner.codec import to_json
    from planner.commands.ask import ask
    from planner.commands.kept_traces import Traces
    from planner.machine.presets import preset
    from planner.reports.receipt import Receipt

    receipt_s: list[float] = []

    class Hears:
        def doing(self, text: str) -> None:
            pass

        def so_far(self, receipt: Receipt) -> None:
            receipt_s.append(used_s())

    job = planner_process.question(None, question.options(models))
    machine = preset(question.card, bf16=job.bf16, cpu_memory_bytes=question.ram_gib * 2**30)
    receipt = ask(job, machine, tell=Hears(), traces=Traces(traces_folder()))
    print(json.dumps({"receipt_s": receipt_s[0], "answer_s": used_s(), "receipt": to_json(receipt)}))


def used_s() -> float:
    """Processor seconds of this process, and of its processes that have ended."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in each)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """A context in which `count` processes compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def write_models(folder: Path) -> None:
    """Write the configs of the models, without weights, into folders of `folder`."""
    import transformers

    for name, (kind, values) in MODELS.items():
        getattr(transformers, kind)(**values).save_pretrained(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="questions that contain TEXT")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one in N of these")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="also ask beside N busy processes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)  # one question, answered in this process
    options = parser.parse_args()
    if options.probe:
        probe(Asked(**json.loads(options.probe[0])), Path(options.probe[1]))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="offmate-questions-") as scratch:
        write_models(Path(scratch))
        chosen = [question for question in questions() if options.only in str(question)][:: options.every]
        for number, question in enumerate(chosen):
            home = Path(scratch) / f"home-{number}"
            began = time.monotonic()
            first, again = asked(question, Path(scratch), home), asked(question, Path(scratch), home)
            seen = {"first": first, "again": again}
            if options.beside:
                with busy(options.beside):
                    seen["beside"] = asked(question, Path(scratch), Path(scratch) / f"beside-{number}")
            equal = len({each.digest for each in seen.values()}) == 1
            row = {"question": asdict(question), "equal": equal, **{name: asdict(one) for name, one in seen.items()}}
            rows.append(row)
            quality = f"{first.step_s:8.2f} s {first.over:6.1%}" if first.step_s else f"{'does not fit':>17}"
            seconds = f"{first.receipt_s:5.1f} {first.answer_s:6.1f} {again.receipt_s:5.1f} {again.answer_s:6.1f}"
            told = "equal" if equal else "DIFFERENT"
            print(f"{question!s:75} {quality} | {seconds} | {first.digest} {told} ({time.monotonic() - began:.0f} s)")
            for way in first.fits_with:
                print(f"    {way}")
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    _summary(rows)


def _summary(rows: Sequence[dict[str, Any]]) -> None:
    for name, which in (("receipt", "receipt_s"), ("whole answer", "answer_s")):
        for turn in ("first", "again"):
            times = [row[turn][which] for row in rows]
            print(f"{name}, {turn}: median {statistics.median(times):.1f} s, worst {max(times):.1f} s")
    fitting = [row["first"]["over"] for row in rows if row["first"]["status"] != "infeasible"]
    if fitting:
        print(
            f"{len(fitting)} of {len(rows)} fit; above the best: median {statistics.median(fitting):.1%}, "
            f"worst {max(fitting):.1%}"
        )
    print(f"different answers: {sum(not row['equal'] for row in rows)}")


if __name__ == "__main__":
    main()
