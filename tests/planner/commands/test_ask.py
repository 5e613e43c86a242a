""" "Will it fit, and how fast?", asked about real models by their config.

Some tests take seconds: they solve the integer program of a model, or many small ones.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from sqlalchemy import create_engine
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from offmated.cli.receipt_view import _fitting, _too_large
from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.commands.ask import PATIENCE_S, ask
from planner.errors import UserError
from planner.job.schema import Job
from planner.keys.lora import DEFAULTS
from planner.machine.presets import preset, with_drives
from planner.models.hf_model import beyond_positions
from planner.models.written import said_of_dtype
from planner.reports.make_receipt import LAUNCHING
from planner.reports.receipt import Prospect, Receipt
from planner.search.make_plan import GAP
from planner.whatif.ways_to_fit import problem_of, ways_to_fit
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
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that may be tried is tried, on a slow machine too."""
    monkeypatch.setattr("planner.commands.ask.PATIENCE_S", 300.0)


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


def asked(job: Job, name: str, ram: int, *, patience_s: float = PATIENCE_S) -> Receipt:
    hardware = preset(name, bf16=job.bf16, cpu_memory_bytes=ram * GIB)
    return ask(job, hardware, started_s=time.monotonic() - PATIENCE_S + patience_s)


@pytest.mark.usefixtures("time_enough")
def test_a_quarter_of_llama_8b_does_not_fit_a_3060_with_so_much_ram_and_why(quarter: Path) -> None:
    found = asked(job_of(quarter), "rtx3060", 16)
    assert found.status == "infeasible"
    assert found.parameters == found.trained_parameters == 2_795_573_248
    # Masters and moments are 12 bytes a parameter, working copies and gradients 2 each: 16 on the host, all but what
    # stays on the card.
    assert found.least_cpu_budget_bytes is not None
    assert 12 * found.parameters < found.least_cpu_budget_bytes <= 16 * found.parameters
    assert found.cpu_budget_bytes < found.least_cpu_budget_bytes
    assert "48 GiB of RAM" in found.fits_with
    assert any(text.startswith("LoRA (method: lora): at least ") for text in found.fits_with)
    assert not any("max_length" in text for text in found.fits_with), "shorter rows are no help to a full host"
    assert {share.name: share.bytes for share in found.disk}["a checkpoint being written"] == 12 * found.parameters


@pytest.mark.usefixtures("time_enough")
def test_with_a_drive_as_much_ram_is_named_as_is_needed_beside_it(quarter: Path) -> None:
    # Rings, and the working copies of embedding and head, 38% of the quarter; 14 bytes a parameter without a drive.
    hardware = with_drives(preset("rtx3060", bf16=True, cpu_memory_bytes=2 * GIB), "pcie4")
    found = ask(job_of(quarter), hardware, started_s=time.monotonic())
    assert found.status == "infeasible" and found.least_cpu_budget_bytes is not None
    assert found.cpu_budget_bytes < found.least_cpu_budget_bytes <= 1.5 * found.parameters
    assert "8 GiB of RAM" in found.fits_with


def test_llama_8b_on_a_3060_with_192_gib_computes_most_of_the_time(llama_8b: Path) -> None:
    found = asked(job_of(llama_8b), "rtx3060", 192, patience_s=40)  # it ends long before, on idle cores
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
    assert found.answer_s < 2 * PATIENCE_S
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


def test_a_plan_whose_search_was_cut_short_is_not_kept_and_the_receipt_says_so(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    job, hardware = job_of(small, slices=1, length=64), preset("rtx4090", bf16=True)

    with monkeypatch.context() as hurried:
        hurried.setattr("planner.commands.ask._PLAN_S", 0.0)
        hasty = ask(job, hardware, started_s=time.monotonic(), cache=Cache(url))
    assert (hasty.cut_short, hasty.complete, hasty.plan_key) == (True, False, "")
    assert Cache(url).plans() == []
    assert [(name, str(text)) for name, text in _fitting(hasty)][1:3] == [
        ("cut short", "the time limit ended the search for this plan, and it is not kept"),
        ("", "ask again for a better one, best on an idle machine"),
    ]

    found = ask(job, hardware, started_s=time.monotonic(), cache=Cache(url))
    assert not found.cut_short and "cut short" not in dict(_fitting(found))
    none = "none of the other machines and batches that were planned"
    late = replace(found, changes=(), unplanned=(Prospect(text="a link twice as fast", most=1.5),))
    assert dict(_fitting(late))["would help"] == f"{none}; others, which may help, were not planned"
    assert dict(_fitting(replace(late, unplanned=())))["would help"] == none
    assert [plan.key for plan in Cache(url).plans()] == [found.plan_key]


def test_a_model_is_a_folder_or_its_config(small: Path) -> None:
    hardware = preset("rtx4090", bf16=True)
    answers = [
        ask(job_of(model, length=64, slices=1), hardware, started_s=0.0) for model in (small, small / "config.json")
    ]
    assert answers[0].gpu == answers[1].gpu
    with pytest.raises(UserError, match="there is no model config at"):
        job_of(small.parent / "nowhere")


@pytest.mark.usefixtures("time_enough")
def test_what_fits_on_the_same_machine_is_tried(small: Path) -> None:
    job = job_of(small, length=1024, bf16=False).model_copy(update={"gpu_budget": 6 * 2**20, "cpu_budget": GIB})
    found = ask(job, preset("rtx3060", bf16=False), started_s=time.monotonic())
    assert found.status == "infeasible"
    assert found.least_gpu_budget_bytes is not None
    assert found.least_gpu_budget_bytes > 6 * 2**20
    assert found.least_cpu_budget_bytes is None, "no host helps a card that is too small for one turn"
    assert any(text.startswith("shorter rows (max_length: ") for text in found.fits_with)
    again = job.model_copy(update={"gpu_budget": found.least_gpu_budget_bytes})
    assert ask(again, preset("rtx3060", bf16=False), started_s=0.0).status != "infeasible"


def test_adapters_are_no_way_for_a_job_that_runs_as_it_is_without_weights(small: Path) -> None:
    job = job_of(small, length=64)
    cpu = torch.device("cpu")
    problem = replace(problem_of(job, preset("rtx3060", bf16=True), cpu), gpu_budget_bytes=2**20)
    no_time = time.monotonic()
    asked_about, running = (
        [way.text for way in ways_to_fit(job, problem, cpu, no_time, runs=runs) if way.least_bytes is None]
        for runs in (False, True)
    )
    assert [text for text in asked_about if text not in running] == ["LoRA (method: lora)"]
    (small / "model.safetensors").touch()
    there = [way.text for way in ways_to_fit(job, problem, cpu, no_time, runs=True) if way.least_bytes is None]
    assert there == asked_about


def test_adapters_in_place_of_some_weights_are_asked_about_without_the_key_that_names_these(small: Path) -> None:
    job = job_of(small, length=64, bf16=False).model_copy(update={"trainable": ("model.layers.0",)})
    problem = problem_of(job, preset("rtx3060", bf16=False), torch.device("cpu"))
    assert {t.trainable for t in problem.chain.tensors()} == {True, False}
    told = [str(way) for way in ways_to_fit(job, problem, torch.device("cpu"), 0.0, runs=False)]
    asking = "--set method=lora --set trainable=null --set trainable_layers=null"
    assert f"LoRA (method: lora, without trainable); to ask about it: offmate plan … {asking}" in told


def test_what_there_was_no_time_for_comes_with_the_command_that_asks_about_it(small: Path) -> None:
    job, hardware = job_of(small, length=1024, bf16=False), preset("rtx3060", bf16=False)
    job = job.model_copy(update={"gpu_budget": 2**20, "per_device_train_batch_size": 2})
    cpu = torch.device("cpu")
    untried = {
        way.text: str(way)
        for way in ways_to_fit(job, problem_of(job, hardware, cpu), cpu, 0.0, runs=False)
        if way.least_bytes is None
    }
    told = untried["LoRA (method: lora)"]
    assert told == "LoRA (method: lora); to ask about it: offmate plan … --set method=lora"
    assert all(re.search(r"; to ask about it: offmate plan … --set \w+=", text) for text in untried.values())
    # What is typed so is understood, and is the change that was meant.
    settings = [re.findall(r"--set (\w+)=(\S+)", text) for text in untried.values()]
    asked_keys = {key: yaml.safe_load(value) for pairs in settings for key, value in pairs}
    assert {"method": "lora", "bf16": True, "per_device_train_batch_size": 1}.items() <= asked_keys.items()
    keys = {"model": str(small), "method": asked_keys["method"]}
    assert Job.question(json.dumps(keys), small.parent).lora_r == DEFAULTS["lora_r"]


def test_what_helps_most_is_tried_before_what_helps_by_a_little(small: Path) -> None:
    job, hardware = job_of(small, length=1024, bf16=False), preset("rtx3060", bf16=False)
    job = job.model_copy(update={"gpu_budget": 2**20, "per_device_train_batch_size": 2})
    cpu = torch.device("cpu")
    texts = [way.text for way in ways_to_fit(job, problem_of(job, hardware, cpu), cpu, 0.0, runs=False)]
    assert [text.partition(" (")[0] for text in texts] == [
        "LoRA",
        "the same step in smaller slices",
        "bf16 with fp32 masters",
        "head and loss in chunks, not bitwise",
        "shorter rows",
    ]


def test_what_would_fit_is_looked_for_when_the_answer_is_late_and_nothing_untried_sounds_final(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.commands.ask._WAYS_S", 300.0)  # enough on a slow machine
    job = job_of(small, length=1024, bf16=False).model_copy(update={"gpu_budget": 5 * 2**20, "cpu_budget": GIB})
    late = time.monotonic() - 100 * PATIENCE_S
    found = ask(job, preset("rtx3060", bf16=False), started_s=late)
    assert any("max_length: 512" in text for text in found.fits_with), "a change that takes a trace"
    nothing = dict(_too_large(replace(found, fits_with=(), untried=("LoRA (method: lora)",))))
    assert nothing["fits with"] == "nothing that was tried; there was no time to try everything, and the rest may fit"
    assert dict(_too_large(replace(found, fits_with=(), untried=())))["fits with"] == "nothing that was tried"


def test_a_model_that_is_written_in_another_dtype_than_it_computes_in_gets_a_word(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    job = job_of(small, length=64, bf16=True)
    note = said_of_dtype(job)
    assert note is not None and "The trained model is written in float32 (like its base" in note
    assert note in ask(job, preset("rtx3060", bf16=True), started_s=time.monotonic()).notes


def test_rows_longer_than_the_models_positions_get_a_word(small: Path) -> None:
    assert beyond_positions(job_of(small, length=2048)) is None
    assert "max_length 2049 is beyond the 2048 positions" in str(beyond_positions(job_of(small, length=2049)))
    learned = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    learned.save_pretrained(small.parent / "learned")
    with pytest.raises(UserError, match=r"(?s)fewer positions than max_length.*hint: give max_length: 32, or less"):
        problem_of(job_of(small.parent / "learned", length=40), preset("rtx3060", bf16=True), torch.device("cpu"))


@pytest.mark.usefixtures("time_enough")
def test_the_same_step_in_smaller_slices_is_offered_and_fits(small: Path) -> None:
    rtx3060 = preset("rtx3060", bf16=True)
    keys = {"model": str(small), "max_length": 256, "per_device_train_batch_size": 8, "bf16": True}
    wide = Job.question(json.dumps(keys), small.parent)
    one = Job.question(json.dumps(keys | {"per_device_train_batch_size": 1}), small.parent)
    budget = 2 * ask(one, rtx3060, started_s=0.0).gpu_peak_bytes
    found = ask(wide.model_copy(update={"gpu_budget": budget}), rtx3060, started_s=time.monotonic())
    assert found.status == "infeasible"
    (text,) = (text for text in found.fits_with if text.startswith("the same step in smaller slices ("))
    rows, slices = (int(number) for number in re.findall(r"_(?:size|steps): (\d+)", text)[:2])
    assert rows * slices == 8
    keys |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": slices, "gpu_budget": budget}
    assert ask(Job.question(json.dumps(keys), small.parent), rtx3060, started_s=0.0).status != "infeasible"


def test_lora_and_loss_in_chunks_are_asked_about_without_weights(small: Path) -> None:
    rtx3060 = preset("rtx3060", bf16=True)
    keys = {"model": str(small), "max_length": 512, "per_device_train_batch_size": 4, "bf16": True}
    exact, chunks, lora = (
        ask(Job.question(json.dumps(keys | more), small.parent), rtx3060, started_s=0.0)
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
        found = ask(Job.question(json.dumps(keys | split), small.parent), rtx3060, started_s=0.0)
        steps[rows] = found.step_s or math.inf
    auto = Job.question(json.dumps(keys | {"train_batch_size": 8}), small.parent)
    chosen = ask(auto, rtx3060, started_s=0.0)
    assert chosen.asked.rows * chosen.asked.slices == 8
    assert chosen.step_s <= min(steps.values()) * (1 + 2 * GAP)
    assert min(steps.values()) < 0.9 * max(step for step in steps.values() if step < math.inf), "else nothing is chosen"
