"""What training by LSP-Offload (`method: lsp`) is worth: planned steps, the paper's figures, and what it learns.

    nice python -m benchmarks.lsp plans paper --json benchmarks/results/lsp.json
    nice python -m benchmarks.lsp learning --base FOLDER --json benchmarks/results/lsp.json

`plans`: steps of 8 B by full fine-tuning, LoRA and LSP, planned for two cards. `paper`: the paper's figures beside
ours, inputs first; see paper002.py. `learning`: a small model trained by each; see lsp_learning.py. `--json` keeps what
the file has of other parts. Tables are printed as README.md has them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import lsp_plans, paper002, questions
from benchmarks.lsp_plans import FULL, LORA, LORA_DROPS, LSP, Answer
from planner.codec import Json

_MIB = 2**20


def line(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    """Print the head of a table."""
    line(*cells)
    print("|" + "---|" * len(cells))


def seconds(answer: Answer) -> str:
    """The seconds of a step."""
    return f"{answer.step_s:.2f} s" if answer.fits else "does not fit"


def show_plans(options: argparse.Namespace) -> Json:
    """Planned steps of 8 B, side by side."""
    print(f"{lsp_plans.MODEL}, bf16, micro-batches of 1 × {lsp_plans.LENGTH} tokens; left out:")
    for text in lsp_plans.LEFT_OUT:
        print(f"  {text}")
    with tempfile.TemporaryDirectory(prefix="offmate-lsp-") as scratch:
        questions.write_models(Path(scratch))
        rows = []
        for row in lsp_plans.answers(Path(scratch)):
            rows.append(row)
            asked = f"{row.card}, {row.ram_gib} GiB, {row.slices}, {row.method}, {'' if row.clip else 'not '}clipped"
            print(f"{asked}: {seconds(row.answer)}", file=sys.stderr, flush=True)
    of = {(row.card, row.ram_gib, row.slices, row.method, row.clip): row.answer for row in rows}
    least, most = lsp_plans.LEAST_GIB, lsp_plans.MOST_GIB
    head(
        "card, tokens a step",
        f"full, {most} GiB: clipped (not)",
        *(f"{method}, {least} GiB ({most})" for method in (LORA, LSP)),
        "LSP over LoRA",
        "peaks: full, LoRA, LSP",
    )
    ratios = []
    for card, slices in itertools.product(lsp_plans.CARDS, lsp_plans.SLICES):
        full, free = (of[card, most, slices, FULL, clip] for clip in (True, False))
        lora, lsp = (of[card, least, slices, method, True] for method in (LORA, LSP))
        more = [of.get((card, most, slices, method, True)) for method in (LORA, LSP)]
        ratios.append(lsp.step_s / lora.step_s)
        line(
            f"{card}, {slices * lsp_plans.LENGTH}",
            f"{seconds(full)} ({seconds(free)})",
            *(
                seconds(answer) + (f" ({seconds(other)})" if other else "")
                for answer, other in zip((lora, lsp), more, strict=True)
            ),
            f"{ratios[-1]:.3f}",
            ", ".join(f"{answer.gpu_peak_bytes / _MIB:.0f}" for answer in (full, lora, lsp)) + " MiB",
        )
    for card in lsp_plans.CARDS:
        print(f"{card}, one slice: {FULL} with 64 GiB {seconds(of[card, 64, 1, FULL, True])},", end=" ")
        print(f"{LORA_DROPS} {seconds(of[card, least, 1, LORA_DROPS, True])}")
    trained = {row.method: row.answer.trained for row in rows if row.answer.fits}
    print("trained:", ", ".join(f"{method} {count / 1e6:.1f} M" for method, count in trained.items()))
    worst = max(ratios) - 1
    met = worst <= lsp_plans.NEAR
    print(f"bar: LSP at most {lsp_plans.NEAR:.0%} above LoRA: {'met' if met else 'NOT met'} (worst {worst:+.1%})")
    for card, most_s in lsp_plans.BARS_S.items():
        step_s = of[card, least, 1, LSP, True].step_s
        verdict = "met" if step_s <= most_s else "NOT met"
        print(f"bar: {card}, {least} GiB, 1024 tokens: {step_s:.2f} s of {most_s} s: {verdict}")
    used_s = sum(row.answer.used_s for row in rows)
    print(f"{len(rows)} questions, {used_s:.0f} s of processor time\n")
    return [asdict(row) for row in rows]


def show_paper(options: argparse.Namespace) -> Json:
    """Inputs, then the paper's figures and ours."""
    print("Paper 002 (LSP-Offload). Asked instead of what the paper has:")
    for name, value, source in paper002.INPUTS:
        print(f"  {name:14s} {value:36s} {source}")
    found: dict[str, Json] = {}
    with tempfile.TemporaryDirectory(prefix="offmate-lsp-") as scratch:
        paper002.write_models(Path(scratch))
        tables = {table.name: (table, paper002.sizes(table, Path(scratch))) for table in paper002.TABLES}
        head("", *(f"{name}: paper, ours" for name in tables))
        for label, of, unit, factor in _OF_TABLES:
            cells = [(of(table.figures), of(ours)) for table, ours in tables.values()]
            line(label, *(f"{_said(a, factor)}, {_said(b, factor)} {unit}".rstrip() for a, b in cells))
        found["tables"] = {name: [asdict(table), asdict(ours)] for name, (table, ours) in tables.items()}
        print()
        head(*_CASE_HEAD)
        cases: list[Json] = []
        for its in paper002.answers(Path(scratch)):
            lsp = its.lsp[512, 16]
            line(
                its.case,
                *map(seconds, (its.native, its.full)),
                f"{its.zero_s:.2f} s",
                ", ".join(f"{s}: {seconds(answer)}" for (s, _), answer in its.lsp.items()),
                its.case.over_zero or "–",
                f"{its.zero_s / lsp.step_s:.2f}",
                f"{its.full.step_s / lsp.step_s:.2f}" if its.full.fits else "–",
                f"{lsp.step_s / its.native.step_s - 1:+.0%}",
                f"{lsp.gpu_peak_bytes / _MIB:.0f} MiB",
            )
            cases.append(
                {
                    "case": asdict(its.case),
                    "zero_s": its.zero_s,
                    "native": asdict(its.native),
                    "full": asdict(its.full),
                    "lsp": {f"{s}, {d}": asdict(answer) for (s, d), answer in its.lsp.items()},
                }
            )
    found["cases"] = cases
    print("the authors' log of the last row:", ", ".join(f"{name} {s} s" for name, s in paper002.LOG_S.items()))
    return found


_CASE_HEAD = (
    "case",
    "unlimited memory",
    "our plan, all weights",
    "equation (1), our rates",
    "LSP by its size",
    "paper: LSP over Zero-Offload",
    "ours: over (1)",
    "over our plan",
    "LSP beside unlimited",
    "LSP's peak",
)
_OF_TABLES: tuple[tuple[str, Callable[[paper002.Figures], float], str, float], ...] = (
    ("parameters", lambda t: t.parameters_gb, "GB", 1),
    ("optimizer states", lambda t: t.states_gb, "GB", 1),
    ("gradients", lambda t: t.gradients_gb, "GB", 1),
    ("activations", lambda t: t.activations_gb, "GB", 1),
    ("layers", lambda t: t.layers, "", 1),
    ("a layer forward on the GPU", lambda t: t.forward_s, "ms", 1e3),
    ("a layer backward on the GPU", lambda t: t.backward_s, "ms", 1e3),
    ("a layer's update on the GPU", lambda t: t.gpu_update_s, "ms", 1e3),
    ("a layer's update on the CPU", lambda t: t.cpu_update_s, "ms", 1e3),
    ("all computing on the GPU, as the text counts it", lambda t: t.compute_s, "s", 1),
    ("a step of Zero-Offload by equation (1)", lambda t: t.zero_s, "s", 1),
)


def _said(value: float, factor: float) -> str:
    return f"{value * factor:.3g}" if value else "–"


def show_learning(options: argparse.Namespace) -> Json:
    """Shares of full fine-tuning's gain."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks import lsp_learning as learning

    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="offmate-lsp-") as scratch:
        base = options.base or Path(scratch) / "base"
        before = learning.held_out_loss(learning.base_model(base))
        print(f"held-out loss before {before:.4f}")
        head("method", "trained", "bytes a row", "rate", "loss", "share of full's gain", "least to most")
        full: Sequence[float] = ()
        rows: list[Json] = []
        met: dict[str, bool] = {}
        for its in learning.learned(base, Path(scratch)):
            full = full or its.losses
            shares = learning.shares(before, full, its.losses)
            mean = statistics.mean(shares)
            rest = its.row_bytes - its.rotation_bytes
            line(
                its.name,
                f"{its.trained:,}",
                f"{rest:.0f}" + (f", and {its.rotation_bytes:.0f} of rotations" if its.rotation_bytes else ""),
                f"{its.rate:g}",
                f"{statistics.mean(its.losses):.4f}",
                f"{mean:.1%}",
                f"{min(shares):.1%} to {max(shares):.1%}",
            )
            if its.name in learning.BARS:
                met[its.name] = mean >= learning.BARS[its.name]
            rows.append({**asdict(its), "tried": {f"{r:g}": loss for r, loss in its.tried.items()}, "shares": shares})
    for name, bar in learning.BARS.items():
        print(f"bar: {name} at least {bar:.0%}: {'met' if met[name] else 'NOT met'}")
    print(f"{time.process_time() - began:.0f} s of processor time\n")
    return {"before": before, "steps": learning.STEPS, "seeds": learning.SEEDS, "methods": rows, "met": dict(met)}


PARTS: dict[str, Callable[[argparse.Namespace], Json]] = {
    "plans": show_plans,
    "paper": show_paper,
    "learning": show_learning,
}


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="where learning keeps its base model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    for name in options.parts:
        found = PARTS[name](options)
        if options.json:
            known = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
            options.json.write_text(json.dumps(known | {name: found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
