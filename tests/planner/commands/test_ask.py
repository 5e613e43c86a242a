""" "Will it fit, and how fast?", asked about real models by their config.

Some tests take seconds: they solve the integer program of a model, or many small ones.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from sqlalchemy import create_engine
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from offmated.cli.receipt_view import _fits_with, _helps, question
from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.commands.ask import ask
from planner.errors import UserError
from planner.job.schema import Job
from planner.machine.presets import preset, with_drives
from planner.models.hf_model import beyond_positions
from planner.models.written import said_of_dtype
from planner.reports.make_receipt import LAUNCHING
from planner.reports.receipt import Prospect, Receipt
from planner.search.make_plan import GAP
from planner.whatif.trace import problem_of, traced
from planner.whatif.traced import Traced
from planner.whatif.ways_to_fit import Way, _without_activations, _without_logits, ways_to_fit
from tests.support.analyses import analyse_once

GIB = 2**30
# meta-llama/Llama-3.1-8B
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    dtype="bfloat16",
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
QUARTER = LlamaConfig(**{**LLAMA_8B.to_dict(), "num_hidden_layers": 8})  # 2.8 billion parameters
SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    analyse_once(monkeypatch)


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    LLAMA_8B.save_pretrained(tmp_path / "llama-8b")
    return tmp_path / "llama-8b"


@pytest.fixture
def quarter(tmp_path: Path) -> Path:
    QUARTER.save_pretrained(tmp_path / "quarter")
    return tmp_path / "quarter"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    SMALL.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def job_of(model: Path | str, *, slices: int = 8, bf16: bool = True, clip: bool = True, length: int = 1024) -> Job:
    keys = {
        "model": str(model),
        "max_length": length,
        "per_device_train_batch_size": 1,
        "bf16": bf16,
        "gradient_accumulation_steps": slices,
        "max_grad_norm": float(clip),
    }
    return Job.question(json.dumps(keys), Path(str(model)).parent)


def asked(job: Job, name: str, ram: int) -> Receipt:
    return ask(job, preset(name, bf16=job.bf16, cpu_memory_bytes=ram * GIB))


def test_a_quarter_of_llama_8b_does_not_fit_a_3060_with_so_much_ram_and_why(quarter: Path) -> None:
    found = asked(job_of(quarter), "rtx3060", 16)
    assert found.status == "infeasible"
    assert found.parameters == found.trained_parameters == 2_795_573_248
    # Masters and moments are 12 bytes a parameter, working copies and gradients 2 each: 16 on the host, all but what
    # stays on the card.
    assert found.least_cpu_budget_bytes is not None
    assert 12 * found.parameters < found.least_cpu_budget_bytes <= 16 * found.parameters
    assert found.cpu_budget_bytes < found.least_cpu_budget_bytes
    assert "48 GiB of RAM (--cpu-memory 48GiB)" in found.fits_with
    assert any(re.fullmatch("LoRA: at least .*; --set method=lora", text) for text in found.fits_with)
    assert not any("max_length" in text for text in found.fits_with), "shorter rows are no help to a full host"
    assert {share.name: share.bytes for share in found.disk}["a checkpoint being written"] == 12 * found.parameters


def test_with_a_drive_as_much_ram_is_named_as_is_needed_beside_it(quarter: Path) -> None:
    # Rings, and the working copies of embedding and head, 38% of the quarter; 14 bytes a parameter without a drive.
    hardware = with_drives(preset("rtx3060", bf16=True, cpu_memory_bytes=2 * GIB), "pcie4")
    found = ask(job_of(quarter), hardware)
    assert found.status == "infeasible" and found.least_cpu_budget_bytes is not None
    assert found.cpu_budget_bytes < found.least_cpu_budget_bytes <= 1.5 * found.parameters
    assert "8 GiB of RAM (--cpu-memory 8GiB)" in found.fits_with


def test_llama_8b_on_a_3060_with_192_gib_computes_most_of_the_time(llama_8b: Path) -> None:
    found = asked(job_of(llama_8b), "rtx3060", 192)
    assert found.status in ("optimal", "feasible")
    assert found.gpu_peak_bytes <= found.gpu_budget_bytes < 12 * GIB
    assert sum(share.bytes for share in found.gpu) == found.gpu_peak_bytes
    assert sum(share.bytes for share in found.host) == found.cpu_peak_bytes
    # 8192 tokens at 6 operations per parameter and token, of which the card does 20 TFLOP/s: 19.4 s at least; a third
    # more when every activation is computed twice.
    least_s = 6 * found.parameters * 8192 / found.hardware.flops_per_s
    assert least_s < found.bound_s <= found.step_s < 1.5 * least_s
    assert found.loads[0].resource == "GPU computing"
    assert found.loads[0].share > 0.8
    assert found.tokens_per_s == pytest.approx(8192 / found.step_s)


def test_a_small_model_is_answered_with_what_would_help(small: Path) -> None:
    found = asked(job_of(small, slices=2, length=64), "rtx4090", 32)
    assert (found.status, found.cpu_update_share) == ("optimal", 0.0)
    # So small a model waits for its operations to be launched: twice the slices are no faster, larger ones are.
    assert found.loads[0].resource == LAUNCHING
    assert [change.text for change in found.changes] == [
        "larger slices, of 2 rows (per_device_train_batch_size: 2, gradient_accumulation_steps: 1)"
    ]
    assert 1.5 < found.changes[0].factor <= 2
    assert found.host == ()
    assert found.asked.model == str(small)


def test_a_mixture_that_learns_with_its_routers_loss_is_not_told_of_larger_slices(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "batched_mm"}
    shown = {}
    for learns in (True, False):
        config = MixtralConfig(**{**SMALL.to_dict(), **sizes, "model_type": "mixtral", "output_router_logits": learns})
        config.save_pretrained(tmp_path / str(learns))
        found = asked(job_of(tmp_path / str(learns), slices=2, length=64), "rtx4090", 32)
        assert found.loads[0].resource == LAUNCHING
        shown[learns] = [change.text for change in found.changes if change.text.startswith("larger slices")]
    assert shown[True] == [] and len(shown[False]) == 1


class Heard:
    """Keeps what an answer tells of itself before it is there."""

    def __init__(self) -> None:
        self.work: list[str] = []
        self.receipts: list[Receipt] = []

    def doing(self, text: str) -> None:
        self.work.append(text)

    def so_far(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)


def test_the_receipt_is_told_when_the_plan_is_there_and_each_line_of_help_as_it_comes(
    small: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    heard = Heard()
    found = ask(job_of(small, slices=2, length=64), preset("rtx4090", bf16=True), tell=heard, cache=Cache(url))
    first, *later = heard.receipts
    assert (first.changes, first.step_s, first.plan_key) == ((), found.step_s, found.plan_key)
    assert [len(receipt.changes) for receipt in later] == list(range(1, len(found.changes) + 1))
    assert later[-1].changes == found.changes
    assert heard.work[:3] == ["reading the model", "solving", "what would help"]
    count = len(heard.work) - 3
    assert heard.work[3:] == [f"what would help: {number} of {count}" for number in range(1, count + 1)]
    assert [plan.key for plan in Cache(url).plans()] == [found.plan_key]
    none = "none of the other machines and batches that were planned"
    other = replace(found, changes=(), unplanned=(Prospect(text="a link twice as fast", most=1.5),))
    assert dict(_helps(other))["would help"] == f"{none}; others, which may help, were not planned"
    assert dict(_helps(replace(other, unplanned=())))["would help"] == none


def test_a_model_is_a_folder_or_its_config(small: Path) -> None:
    hardware = preset("rtx4090", bf16=True)
    answers = [ask(job_of(model, length=64, slices=1), hardware) for model in (small, small / "config.json")]
    assert answers[0].gpu == answers[1].gpu
    with pytest.raises(UserError, match="there is no model config at"):
        job_of(small.parent / "nowhere")


def test_what_fits_on_the_same_machine_is_tried(small: Path) -> None:
    job = job_of(small, length=1024, bf16=False).model_copy(update={"gpu_budget": 6 * 2**20, "cpu_budget": GIB})
    found = ask(job, preset("rtx3060", bf16=False))
    assert found.status == "infeasible"
    assert found.least_gpu_budget_bytes is not None
    assert found.least_gpu_budget_bytes > 6 * 2**20
    assert found.least_cpu_budget_bytes is None, "no host helps a card that is too small for one turn"
    assert any(text.startswith("shorter rows") for text in found.fits_with)
    again = job.model_copy(update={"gpu_budget": found.least_gpu_budget_bytes})
    assert ask(again, preset("rtx3060", bf16=False)).status != "infeasible"


def tried(job: Job, *, runs: bool = False, gpu_bytes: int) -> tuple[list[str], list[Way]]:
    """The changes that are tried for a job that has so few bytes of device memory, in their order; and the ways."""
    cpu, texts = torch.device("cpu"), []
    problem = replace(problem_of(job, preset("rtx3060", bf16=job.bf16), cpu), gpu_budget_bytes=gpu_bytes)
    assert not problem.fits()
    trace = partial(traced, hardware=problem.hardware, runs=runs)
    ways = list(ways_to_fit(job, problem, trace, runs=runs, tell=texts.append))
    return texts, ways


def test_adapters_are_no_way_for_a_job_that_runs_as_it_is_without_weights(small: Path) -> None:
    job = job_of(small, length=64)
    asked_about, running = (tried(job, runs=runs, gpu_bytes=2**16)[0] for runs in (False, True))
    assert [text for text in asked_about if text not in running and " and " not in text] == [
        "LoRA",
        "LoRA on a base in 4 bits",
    ]
    (small / "model.safetensors").touch()
    assert tried(job, runs=True, gpu_bytes=2**16)[0] == asked_about


def test_adapters_in_place_of_some_weights_are_asked_about_without_the_key_that_names_these(small: Path) -> None:
    config = LlamaConfig(**{**SMALL.to_dict(), "hidden_size": 256, "intermediate_size": 1024})
    config.save_pretrained(small)
    job = job_of(small, length=64, bf16=False).model_copy(update={"trainable": ("model.layers.0",)})
    problem = problem_of(job, preset("rtx3060", bf16=False), torch.device("cpu"))
    assert {t.trainable for t in problem.chain.tensors()} == {True, False}
    least = problem.least_bytes()
    assert least is not None
    _, ways = tried(job, gpu_bytes=least - 1)
    (lora,) = (str(way) for way in ways if way.text == "LoRA, without trainable")
    assert lora.endswith("; --set method=lora --set trainable=null --set trainable_layers=null")


def test_changes_are_tried_in_the_order_of_what_they_cost_and_typed_as_they_are_shown(small: Path) -> None:
    job = job_of(small, length=1024, bf16=False).model_copy(update={"per_device_train_batch_size": 2})
    problem = problem_of(job, preset("rtx3060", bf16=False), torch.device("cpu"))
    least = problem.least_bytes()
    assert least is not None
    texts, ways = tried(job, gpu_bytes=least - 1)
    assert texts == [
        "the same step in smaller slices",
        "head and loss in chunks, not bitwise",
        "bf16 with fp32 masters",
        "LoRA",
        *texts[4:],
    ]
    assert "AdamW's moments in 8 bits, rounded" not in texts, "the host has room for all"
    found = [way.text for way in ways]
    assert found[:3] == texts[:3]
    # What is typed so is understood, and is the change that was meant.
    for way in ways:
        typed = re.findall(r"--set (\w+)=(\S+)", str(way))
        keys = {key: yaml.safe_load(value) for key, value in typed}
        same = {"model": str(small), "max_length": 1024, "bf16": False, "per_device_train_batch_size": 2}
        again = Job.question(json.dumps(same | {"gpu_budget": least - 1} | keys), small.parent)
        assert problem_of(again, preset("rtx3060", bf16=again.bf16), torch.device("cpu")).fits(), str(way)


def test_where_no_change_is_enough_two_together_are_tried_and_then_shorter_rows(small: Path) -> None:
    job = job_of(small, length=1024, bf16=False)
    one_by_one = {}
    cpu, hardware = torch.device("cpu"), preset("rtx3060", bf16=False)
    for keys in ({"exact": False}, {"bf16": True}, {"exact": False, "bf16": True}):
        least = problem_of(job.model_copy(update=keys), hardware, cpu).least_bytes()
        assert least is not None
        one_by_one[tuple(keys)] = least
    both = one_by_one["exact", "bf16"]
    assert both < min(one_by_one["exact",], one_by_one["bf16",])
    _, ways = tried(job, gpu_bytes=both)
    assert str(ways[0]).endswith("of GPU memory; --set exact=false --set bf16=true")
    half = problem_of(job.model_copy(update={"max_length": 512}), hardware, cpu).least_bytes()
    assert half is not None
    _, ways = tried(job, gpu_bytes=half)
    (shorter,) = (str(way) for way in ways if way.text.startswith("shorter rows"))
    assert "--set max_length=512" in shorter


def test_the_longest_rows_that_fit_are_found_with_few_traces(small: Path) -> None:
    job = job_of(small, length=8192).model_copy(update={"exact": False})
    cpu, rtx3060 = torch.device("cpu"), preset("rtx3060", bf16=True)
    for length in (4096, 1024, 256):
        least = problem_of(job.model_copy(update={"max_length": length}), rtx3060, cpu).least_bytes()
        assert least is not None
        problem = replace(problem_of(job, rtx3060, cpu), gpu_budget_bytes=least)
        lengths: list[int] = []

        def trace(changed: Job, lengths: list[int] = lengths) -> Traced:
            lengths.append(changed.max_length)
            return traced(changed, hardware=rtx3060)

        ways = list(ways_to_fit(job, problem, trace, runs=False))
        (shorter,) = (way for way in ways if way.text == "shorter rows")
        assert dict(shorter.keys)["max_length"] == length
        assert len([each for each in lengths if each < job.max_length]) <= 3, lengths


def test_chunks_that_cannot_be_enough_are_not_traced_and_their_bound_is_one(small: Path) -> None:
    job, cpu, rtx3060 = job_of(small, length=1024), torch.device("cpu"), preset("rtx3060", bf16=True)
    problem = problem_of(job, rtx3060, cpu)
    bound = _without_logits(problem).least_bytes()
    in_chunks = problem_of(job.model_copy(update={"exact": False}), rtx3060, cpu).least_bytes()
    without_rows = _without_activations(problem).least_bytes()
    assert bound is not None and in_chunks is not None and without_rows is not None
    assert without_rows < bound <= in_chunks < problem.gpu_budget_bytes
    for gpu_bytes, is_traced in ((bound - 1, False), (in_chunks, True)):
        seen: set[tuple[str, int, bool]] = set()

        def trace(changed: Job, seen: set[tuple[str, int, bool]] = seen) -> Traced:
            seen.add((changed.method, changed.max_length, changed.exact))
            return traced(changed, hardware=rtx3060)

        ways = list(ways_to_fit(job, replace(problem, gpu_budget_bytes=gpu_bytes), trace, runs=False))
        assert any(way.text == "head and loss in chunks, not bitwise" for way in ways) == is_traced
        assert (("full", 1024, False) in seen) == is_traced


def test_a_model_that_refuses_chunks_is_told_of_shorter_rows_without_them(small: Path) -> None:
    job, cpu, rtx3060 = job_of(small, length=1024), torch.device("cpu"), preset("rtx3060", bf16=True)
    least = problem_of(job.model_copy(update={"max_length": 256}), rtx3060, cpu).least_bytes()
    assert least is not None
    refused: list[int] = []

    def trace(changed: Job) -> Traced:
        if not changed.exact:
            refused.append(changed.max_length)
            raise UserError("The model uses its logits for more than the loss.", code="loss-not-in-chunks")
        return traced(changed, hardware=rtx3060)

    problem = replace(problem_of(job, rtx3060, cpu), gpu_budget_bytes=least)
    assert not _without_logits(problem).fits(), "chunks alone are excluded by their bound, not by a trace"
    (shorter,) = (way for way in ways_to_fit(job, problem, trace, runs=False) if way.text.startswith("shorter rows"))
    assert (shorter.text, dict(shorter.keys)["max_length"]) == ("shorter rows", 256)
    assert len(refused) <= 2


def test_where_nothing_makes_it_fit_that_is_said(small: Path) -> None:
    found = asked(job_of(small, length=64).model_copy(update={"gpu_budget": 2**16}), "rtx3060", 32)
    assert found.status == "infeasible"
    assert dict(_fits_with(replace(found, fits_with=())))["fits with"] == "nothing that was tried"


def test_a_model_that_is_written_in_another_dtype_than_it_computes_in_gets_a_word(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    job = job_of(small, length=64, bf16=True)
    note = said_of_dtype(job)
    assert note is not None and "The trained model is written in float32 (like its base" in note
    assert note in ask(job, preset("rtx3060", bf16=True)).notes


def test_a_budget_beyond_the_machine_gets_a_word(small: Path) -> None:
    job = job_of(small, length=64, slices=1)
    hardware = preset("rtx3060", bf16=True)
    (note,) = ask(job.model_copy(update={"gpu_budget": 40 * GIB}), hardware, helps=False).notes
    assert note.startswith("gpu_budget 40.0 GiB is more than the 11.2 GiB of GPU memory that a job may use")
    assert ask(job.model_copy(update={"gpu_budget": GIB}), hardware, helps=False).notes == ()


def test_rows_longer_than_the_models_positions_get_a_word(small: Path) -> None:
    assert beyond_positions(job_of(small, length=2048)) is None
    assert "max_length 2049 is beyond the 2048 positions" in str(beyond_positions(job_of(small, length=2049)))
    learned = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    learned.save_pretrained(small.parent / "learned")
    with pytest.raises(UserError, match=r"(?s)fewer positions than max_length.*hint: give max_length: 32, or less"):
        problem_of(job_of(small.parent / "learned", length=40), preset("rtx3060", bf16=True), torch.device("cpu"))


def test_the_same_step_in_smaller_slices_is_offered_and_fits(small: Path) -> None:
    rtx3060 = preset("rtx3060", bf16=True)
    keys = {"model": str(small), "max_length": 256, "per_device_train_batch_size": 8, "bf16": True}
    wide = Job.question(json.dumps(keys), small.parent)
    one = Job.question(json.dumps(keys | {"per_device_train_batch_size": 1}), small.parent)
    budget = 2 * ask(one, rtx3060).gpu_peak_bytes
    found = ask(wide.model_copy(update={"gpu_budget": budget}), rtx3060)
    assert found.status == "infeasible"
    (text,) = (text for text in found.fits_with if text.startswith("the same step in smaller slices: "))
    rows, slices = (int(number) for number in re.findall(r"_(?:size|steps)=(\d+)", text)[:2])
    assert rows * slices == 8
    keys |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": slices, "gpu_budget": budget}
    assert ask(Job.question(json.dumps(keys), small.parent), rtx3060).status != "infeasible"


def test_lora_and_loss_in_chunks_are_asked_about_without_weights(small: Path) -> None:
    rtx3060 = preset("rtx3060", bf16=True)
    keys = {"model": str(small), "max_length": 512, "per_device_train_batch_size": 4, "bf16": True}
    exact, chunks, lora = (
        ask(Job.question(json.dumps(keys | more), small.parent), rtx3060)
        for more in ({}, {"exact": False}, {"method": "lora", "lora_r": 4, "lora_target_modules": "q_proj,v_proj"})
    )
    assert chunks.gpu_peak_bytes < exact.gpu_peak_bytes
    # two layers, rank 4: q and v of width 64 (two of four heads in v), to and from the rank
    assert lora.trained_parameters == 2 * 4 * ((64 + 64) + (64 + 32))
    assert exact.trained_parameters == exact.parameters == lora.parameters - lora.trained_parameters


def test_auto_takes_the_split_with_the_shortest_step_of_those_asked_about_one_by_one(small: Path) -> None:
    rtx3060 = preset("rtx3060", bf16=True)
    keys = {"model": str(small), "max_length": 128, "bf16": True, "gpu_budget": 8 * 2**20}
    steps = {}
    for rows in (1, 2, 4, 8):
        split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
        found = ask(Job.question(json.dumps(keys | split), small.parent), rtx3060)
        steps[rows] = found.step_s or math.inf
    auto = Job.question(json.dumps(keys | {"train_batch_size": 8}), small.parent)
    chosen = ask(auto, rtx3060)
    assert chosen.asked.rows * chosen.asked.slices == 8
    assert chosen.step_s <= min(steps.values()) * (1 + 2 * GAP)
    assert min(steps.values()) < 0.9 * max(step for step in steps.values() if step < math.inf), "else nothing is chosen"


@pytest.mark.parametrize("preference", [None, "orpo", "dpo"])
def test_a_receipt_of_preferences_counts_pairs_and_tells_of_the_pass_before_the_first_step(
    small: Path, preference: str | None
) -> None:
    job = job_of(small, slices=2, length=64, clip=False).model_copy(update={"preference": preference})
    found = ask(job, preset("rtx4090", bf16=job.bf16, cpu_memory_bytes=32 * GIB), helps=False)
    notes = [note for note in found.notes if "the reference model scores each pair once" in note]
    assert len(notes) == (preference == "dpo")
    rows = "1 × 64" if preference is None else "1 pair × 2 × 64"
    assert f", 2 slices of {rows} tokens a step" in question(found)
    assert found.tokens_per_step == (128 if preference is None else 256)
    for note in notes:
        (share,) = re.findall(r"about (\d+)% of an epoch", note)
        assert 10 < int(share) < 60, note
