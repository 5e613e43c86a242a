"""Files of LLaMA-Factory's v1: which rows are learned, and which tokens of them, as its own code has them.

`llama_factory_v1.json` has what that code (of August 2026) made of each record under each template, with the tokenizer
of these tests: of each row what stands before the answer, the answer, and how many tokens these are; the name of its
error where it fails. `draws`: which records it takes by `size` and `weight`. `training`: the losses of its trainer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import UserError
from planner.importers.templates import named_template
from planner.job.data_check import check_data
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from tests.support.plain_engine import PlainEngine
from tests.worker.data.test_llama_factory import model
from worker.check.first_records import look
from worker.data.batches import Batches
from worker.data.corpus import encode
from worker.data.documents import documents_of
from worker.data.seeds import micro_batch_seed
from worker.training.learning_rate import learning_rates, optimizer_of
from worker.training.model import load_model

FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("llama_factory_v1.json").read_text("utf-8"))
Rows = list[list[Any] | str]


def job_of(folder: Path, datasets: dict[str, Any], lines: str = "") -> Job:
    (folder / "v1.yaml").write_text(yaml.safe_dump(datasets, sort_keys=False))
    return Job.parse(f"model: model\ntrain_dataset: v1.yaml\n{lines}", folder)


def of_records(folder: Path, converter: str | None, records: list[Any], lines: str = "", **more: Any) -> Job:
    (folder / "d.json").write_text(json.dumps(records))
    said = {"converter": converter} if converter else {}
    return job_of(folder, {"d": {"path": "d.json", "source": "local", **said, **more}}, lines)


def rows_of(job: Job) -> Rows:
    """Of each row what is not learned, what is, and how many tokens the first and both are."""
    tokenizer, found = load_tokenizer(job), list[Any]()
    for ids, learned in encode([*documents_of(job, tokenizer, False)], tokenizer):
        first = int(learned.argmax()) if learned.any() else len(ids)
        assert learned[first:].all(), "an answer is learned to the end"
        found.append([tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:]), first, len(ids)])
    return found


def shown(folder: Path, template: str, name: str) -> Rows | str:
    """The rows of one of the records; the code of its refusal where there is one."""
    record = FACTS["rows"][name]
    try:
        return rows_of(of_records(folder, record["converter"], [record["record"]]))
    except UserError as error:
        return error.code


@pytest.mark.parametrize("template", FACTS["templates"])
def test_every_token_and_label_is_as_in_its_own_code(template: str, tmp_path: Path) -> None:
    model(tmp_path / "model", chat_template=named_template(template) if template != "None" else None)
    for name, expected in FACTS["templates"][template].items():
        found = shown(tmp_path, template, name)
        if any(isinstance(row, str) for row in expected):  # its own code stops there
            assert isinstance(found, str), (name, found)
        elif found == "template-drops":  # calls, tools or thoughts that the template does not show
            assert template != "qwen3" and {*name.split()} & {"call", "calls", "tools", "thoughts"}, name
        else:
            assert found == expected, name


def named(place: int, count: int, name: str) -> list[dict[str, str]]:
    return [{"instruction": f"{name}{number}", "output": "x"} for number in range(place, place + count)]


@pytest.mark.parametrize("draw", FACTS["draws"], ids=str)
def test_the_rows_that_size_and_weight_draw_are_those_that_it_draws(draw: dict[str, Any], tmp_path: Path) -> None:
    model(tmp_path / "model")
    infos = {}
    for said in draw["datasets"]:
        name = said["name"]
        (tmp_path / f"{name}.json").write_text(json.dumps(named(0, said["rows"], name)))
        drawn = {key: said[key] for key in ("size", "weight") if said[key] is not None}
        infos[name] = {"path": f"{name}.json", "source": "local", "converter": "alpaca", **drawn}
    found = rows_of(job_of(tmp_path, infos, f"seed: {draw['seed']}\n"))
    asked = sorted(str(row[0]).split("user\n")[1].split("<|im_end|>")[0] for row in found)
    assert asked == draw["taken"]


def test_a_draw_is_of_all_answers_and_says_which_records_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model(tmp_path / "model")
    talk = FACTS["rows"]["sharegpt two"]["record"]
    job = of_records(tmp_path, "sharegpt", [talk, talk, {"conversations": []}, talk], "", size=2)
    job = job.model_copy(update={"broken_rows": "skip"})
    with caplog.at_level(logging.WARNING):
        assert len(rows_of(job)) == 2
    assert any("left out, as LLaMA-Factory does: size and weight" in line for line in caplog.messages)


def test_a_row_that_is_cut_before_its_answer_is_left_out_and_others_lose_their_end(tmp_path: Path) -> None:
    model(tmp_path / "model")
    long, short = {"instruction": "a" * 40, "output": "b"}, {"instruction": "a", "output": "b" * 40}
    job = of_records(tmp_path, "alpaca", [long, short], "cutoff_len: 40\n")
    batches = Batches(job, load_tokenizer(job))
    assert batches.rows == 1 and (batches.tokens, batches.learned) == (40, 20)


@pytest.mark.parametrize(
    ("converter", "record", "told"),
    [
        (None, {"messages": [{"role": "user", "content": [{"type": "image_url", "value": "a.png"}]}]}, "and no text"),
        (
            None,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "value": "a"}]},
                    {"role": "assistant", "content": [{"type": "text", "value": "b"}], "loss_weight": 0.5},
                ]
            },
            "loss_weight is 0.5; here answers are learned (1) or not (0)",
        ),
        ("alpaca", {"instruction": "see <image>", "output": "b"}, "it has <image>"),
        ("alpaca", {"instruction": "a", "output": "b", "images": ["a.png"]}, "it has images"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}]}, "it has no answer"),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]},
            "a function_call is JSON",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "someone", "value": "a"}, {"from": "gpt", "value": "b"}]},
            'a message is from "someone"',
        ),
    ],
)
def test_what_it_drops_or_fails_at_is_broken(
    converter: str | None, record: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model(tmp_path / "model")
    job = of_records(tmp_path, converter, [record])
    with pytest.raises(UserError) as refused:
        check_data(job)
    assert told in str(refused.value.numbers)


def test_the_first_records_are_looked_at_before_a_draw(tmp_path: Path) -> None:
    model(tmp_path / "model")
    job = of_records(tmp_path, "alpaca", named(0, 5, "a"), "", size=2)
    check_data(job)
    seen = look(job, job.data, load_tokenizer(job))
    assert seen is not None and len(seen.ends) == 5


TALKS = [
    {
        "conversations": [
            {"from": "human", "value": "a" * size},
            {"from": "gpt", "value": "b" * (3 * size)},
            {"from": "human", "value": "c"},
            {"from": "gpt", "value": "dd" * size},
        ]
    }
    for size in (1, 5)
]
KEYS = {"micro_batch_size": 2, "global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "max_grad_norm": 0.3}
OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "muon": {"optim_config": {"name": "muon", "wd": 0.5}}}
"""What of each file was trained by v1's own trainer: on a CPU, in fp32, as `TALKS` are four rows, which are a step."""


def weights_of(model: torch.nn.Module) -> None:
    """Weights that no generator draws."""
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            wave = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (1.7 + number)).reshape(weight.shape)
            weight.copy_(1 + 0.1 * wave if "norm" in name else 0.2 * wave)


def model_with_weights(folder: Path) -> None:
    model(folder, chat_template=named_template("qwen3"))
    config = LlamaConfig(
        vocab_size=LlamaConfig.from_pretrained(folder).vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    whole = LlamaForCausalLM(config)
    weights_of(whole)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_file_trains_what_its_own_trainer_trains(optimizer: str, tmp_path: Path) -> None:
    model_with_weights(tmp_path / "model")
    lines = yaml.safe_dump({**KEYS, **OPTIMIZERS[optimizer]})
    job = of_records(tmp_path, "sharegpt", TALKS, lines)
    batches, losses, trained = Batches(job, load_tokenizer(job)), [], load_model(job)
    plain = PlainEngine(trained, optimizer=optimizer_of(job, trained), max_grad_norm=job.max_grad_norm)
    for number in range(batches.total_steps):
        step = batches.step(number)
        result = plain.step(
            step,
            seeds=[micro_batch_seed(job.seed, number, k) for k in range(len(step))],
            learning_rate=learning_rates(job, number, batches.total_steps),
            num_items_in_batch=torch.tensor(batches.num_items(step)),
        )
        losses.append(float(torch.stack(list(result.losses)).sum()))
    expected, rel = FACTS["training"][optimizer], {"adamw": 1e-5, "muon": 1e-4}[optimizer]  # Muon's products are bf16
    assert losses == pytest.approx(expected["losses"], rel=rel), "positions from 1 round otherwise"
    sums = {name: float(weight.detach().sum()) for name, weight in trained.named_parameters() if "norm" in name}
    assert sums == pytest.approx(expected["sums"], rel=rel), "norms decay, too"
