"""`preference: reward` trains the reward model that TRL's RewardTrainer trains, in every bit, and writes it in
transformers' or peft's form.

TRL's trainer gets the batches that the job has, in the job's order. Some tests take seconds: a model is traced for its
plan, and again for its engine.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import Tensor
from trl import RewardConfig, RewardTrainer

from planner.errors import UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.models.tokenizer import load_tokenizer
from tests.support.families import FAMILIES
from tests.support.lora_jobs import CPU, finished_run, plan_of
from tests.support.plain_engine import PlainEngine
from tests.support.preference_jobs import pairs, preference_job
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from tests.worker.subspace.test_change import StopAt, begun_run, trained
from worker.check.comparison import Comparison
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.export import main as export
from worker.sample import answers
from worker.training.ends import Ends
from worker.training.learning_rate import learning_rates, optimizer_of
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.usefixtures("one_thread")

Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""The loss and the gradients' norm of each step, and the trained weights."""
LORA = {"method": "lora", "lora_r": 4, "lora_dropout": 0.1}
METHODS = {"full": {}, "lora": LORA, "centered": {"center_rewards_coefficient": 0.01}}


def reward_job(tmp_path: Path, name: str = "llama", **keys: Any) -> Job:
    return preference_job(tmp_path, name, preference="reward", **keys)


def still_job(tmp_path: Path, family: str, **keys: Any) -> Job:
    """A job with a model whose code outside of layers has no dropout either: its draws are in no order."""
    cls, config = FAMILIES[family]
    still = {key: 0.0 for key in config if "drop" in key}
    torch.manual_seed(5)
    tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    folder = tiny_llama_folder(tmp_path / "model")
    T.AutoModelForCausalLM.from_config(cls(**{**config, **still, **tokens})).save_pretrained(folder)
    small = {"max_length": 48, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    data = write_jsonl(tmp_path / "data.jsonl", pairs(9))
    return make_job(folder, data, **{**small, "preference": "reward", "learning_rate": 1e-2, **keys})


def trained_plainly(job: Job) -> Trained:
    """In plain PyTorch, whose bits are the engine's."""
    batches, losses, norms, model = Batches(job, byte_tokenizer()), [], [], load_model(job)
    (optimizer,) = optimizer_of(job, model)
    engine = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
    for number in range(batches.total_steps):
        step = batches.step(number)
        result = engine.step(
            step,
            seeds=[micro_batch_seed(job.seed, number, k) for k in range(len(step))],
            learning_rate=learning_rates(job, number, batches.total_steps),
            num_items_in_batch=torch.tensor(batches.num_items(step)),
        )
        losses.append(float(torch.stack(list(result.losses)).sum()))
        norms.append(float(result.grad_norm))
    return losses, norms, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_by_trl(tmp_path: Path, job: Job) -> Trained:
    batches = Batches(job, byte_tokenizer())
    data = [batch for number in range(batches.total_steps) for batch in batches.step(number)]
    # As in test_against_trl.py: padding is on the right, where a mask would change no more than last bits.
    data = [{"input_ids": b["input_ids"], "attention_mask": torch.ones_like(b["input_ids"])} for b in data]

    class InOrder(RewardTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=None)

    settings = RewardConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=job.slice_rows,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        max_steps=batches.total_steps,
        max_length=job.max_length,
        learning_rate=job.learning_rate,
        center_rewards_coefficient=job.center_rewards_coefficient,
        seed=job.seed,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    model: Any = job.model  # TRL loads it under its seed, and its head begins as it does
    adapters = None
    if job.method == "lora":
        torch.manual_seed(job.seed)  # for the head; TRL seeds the adapters
        model = T.AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=1, dtype=torch.float32)
        adapters = LoraConfig(
            r=job.lora_r,
            lora_alpha=job.lora_alpha,
            lora_dropout=job.lora_dropout,
            target_modules="all-linear",
            modules_to_save=["score"],
            task_type="SEQ_CLS",
        )
    ids = [{"chosen_ids": [1, 2], "rejected_ids": [3]}]
    trainer = InOrder(
        model, settings, train_dataset=Dataset.from_list(ids), processing_class=byte_tokenizer(), peft_config=adapters
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    trained = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return [line["loss"] for line in logged], [line["grad_norm"] for line in logged], trained


def assert_trained_as_by_trl(tmp_path: Path, job: Job) -> None:
    ours, theirs = trained_plainly(job), trained_by_trl(tmp_path, job)
    assert ours[:2] == theirs[:2]
    assert ours[2].keys() == theirs[2].keys()
    assert [name for name in theirs[2] if not torch.equal(ours[2][name], theirs[2][name])] == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_losses_gradients_and_weights_are_those_of_trls_reward_trainer(
    tmp_path: Path, family: str, method: str
) -> None:
    assert_trained_as_by_trl(tmp_path, still_job(tmp_path, family, **METHODS[method]))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "phi3", "mistral", "gpt2"])
def test_other_families_are_trained_as_trl_trains_them(tmp_path: Path, family: str, method: str) -> None:
    more = {"gradient_accumulation_steps": 3, **METHODS[method]}
    assert_trained_as_by_trl(tmp_path, still_job(tmp_path, family, **more))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"gradient_accumulation_steps": 3, "center_rewards_coefficient": 0.1}),
        ("qwen2", LORA),
        ("gpt2", {"bf16": True}),  # its own loss takes no pairs
        ("llama", {**LORA, "bf16": True, "load_in_4bit": True}),
        ("mixtral", {}),
    ],
    ids=["centered", "lora", "bf16", "4-bit", "mixture"],
)
def test_a_plan_trains_the_bits_of_plain_pytorch(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    job = reward_job(tmp_path, name, **keys)
    batches = Batches(job, byte_tokenizer())
    compared = Comparison(job=job, batches=batches, steps=2, layers=3, device=CPU, folder=tmp_path)
    findings = compared.run(*plan_of(job)).findings
    assert {finding.what for finding in findings} == {"losses", "gradient norms", "parameters", "moments"}
    assert all(finding.equal == finding.count > 0 for finding in findings)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [said("user", "Why?"), said("assistant", "So."), said("user", "And?")]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "prompts": pairs(9),
    "texts": [{side: pair["prompt"] + pair[side] for side in ("chosen", "rejected")} for pair in pairs(9)],
    "talks": [
        {"prompt": TALK, **{side: [said("assistant", pair[side])] for side in ("chosen", "rejected")}}
        for pair in pairs(9)
    ],
    "whole talks": [
        {side: [*TALK, said("assistant", pair[side])] for side in ("chosen", "rejected")} for pair in pairs(9)
    ],
}


@pytest.mark.parametrize("form", RECORDS)
def test_the_tokens_of_pairs_are_those_that_trl_scores(tmp_path: Path, form: str) -> None:
    job, records = reward_job(tmp_path, max_length=110), RECORDS[form]
    write_jsonl(tmp_path / "data.jsonl", records)
    tokenizer = byte_tokenizer(chat_template=CHATML)
    (rows,) = Batches(job, tokenizer).preferences
    ours = [tuple(ids.tolist() for ids, _ in rows.pieces(number)) for number in range(len(rows))]
    settings = RewardConfig(output_dir=str(tmp_path / "trl"), max_length=110, use_cpu=True, report_to=[], bf16=False)
    trainer = RewardTrainer(job.model, settings, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    theirs = [(row["chosen_ids"], row["rejected_ids"]) for row in trainer.train_dataset]
    assert ours == theirs and len(ours) > 3


def scores(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        values: Tensor = model.eval()(input_ids=batch["input_ids"]).logits[:, 0]
    return values


def classifier(folder: str | Path, **settings: Any) -> Any:
    model, info = T.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, **settings
    )
    return model, info


def test_a_run_writes_a_classifier_that_gives_the_scores_it_was_trained_to_give(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    job = reward_job(tmp_path, val_size=2)
    with caplog.at_level(logging.INFO):
        run = finished_run(job, tmp_path / "run")
    assert "model: score.weight, which gives texts their reward, starts at random under seed 42" in caplog.messages
    assert not [record for record in caplog.records if "at random" in record.message and record.levelname != "INFO"]
    assert "LOAD REPORT" not in caplog.text + capfd.readouterr().err
    assert "what is learned ends" not in caplog.text
    assert Ends(taught=(256,), before=(1,)).note(job, byte_tokenizer()) is None
    model, info = classifier(run.output)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = json.loads((run.output / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] == 257
    assert model.config.num_labels == 1 and not (run.output / "generation_config.json").exists()
    weights = trained_plainly(job)[2]
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    events = read_metrics(run.metrics)
    evaluation = Batches(job, byte_tokenizer()).evaluation
    assert evaluation is not None
    (batch,) = (evaluation.batch(number) for number in range(len(evaluation)))
    chosen, rejected = scores(model, batch).chunk(2)
    last = next(event for event in reversed(events) if event["event"] == "eval")
    assert last["eval_rewards_chosen"] == pytest.approx(float(chosen.mean()), rel=1e-6)
    assert last["eval_rewards_accuracies"] == float((chosen > rejected).float().mean())
    assert last["eval_loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()))
    told = {key for event in events if event["event"] == "step" for key in event if key.startswith(("reward", "logp"))}
    assert told == {"rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies"}
    end = events[-1]
    assert 0 < end["gpu_peak_bytes"] <= end["predicted_gpu_peak_bytes"]
    card = (run.output / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "- reward\n" in card and "It is a reward model" in card


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    job = reward_job(tmp_path, save_steps=2)
    run = begun_run(job, tmp_path / "run")
    assert not run_job(run, StopAt(run, 2))
    assert run_job(run, StopRequest())
    weights = trained_plainly(job)[2]
    assert all(torch.equal(weights[name], p) for name, p in trained(run).items())


def test_adapters_and_what_they_are_merged_into_give_the_scores_that_were_trained(tmp_path: Path) -> None:
    job = reward_job(tmp_path, **LORA)
    run = finished_run(job, tmp_path / "run")
    config = json.loads((run.output / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and "score" in config["modules_to_save"]
    assert "score" not in config["target_modules"]
    weights = trained_plainly(job)[2]
    base, _ = classifier(job.model, num_labels=1, pad_token_id=257)
    model = PeftModel.from_pretrained(base, run.output)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(weight, parameters[name]) for name, weight in weights.items())
    batch = Batches(job, byte_tokenizer()).step(0)[0]
    wanted = scores(model, batch)
    assert export([str(run.path), str(tmp_path / "merged")]) == 0
    merged, info = classifier(tmp_path / "merged")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert merged.config.num_labels == 1 and merged.config.pad_token_id == 257
    torch.testing.assert_close(scores(merged, batch), wanted, rtol=1e-4, atol=1e-5)

    again = reward_job(tmp_path, adapter_name_or_path=str(run.output), method="lora")
    assert (again.lora_modules_to_save, again.lora_r) == (("score",), 4)
    assert torch.equal(scores(load_model(again), batch), wanted)


def test_rewards_are_those_of_the_last_token_before_the_padding(tmp_path: Path) -> None:
    job = reward_job(tmp_path)
    batches, model = Batches(job, byte_tokenizer()), load_model(job).eval()
    assert model.config.pad_token_id == 257
    batch = batches.step(0)[0]
    with torch.no_grad():
        result = model(**batch)
        alone = [model(input_ids=ids[ids != 257][None]).logits[0, 0] for ids in batch["input_ids"]]
    torch.testing.assert_close(result.figures, torch.stack(alone), rtol=1e-4, atol=1e-6)


def test_the_end_token_pads_where_a_tokenizer_has_no_other(tmp_path: Path) -> None:
    job = reward_job(tmp_path)
    bare = byte_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(job.model)
    tokenizer = load_tokenizer(job)
    assert (tokenizer.pad_token_id, load_model(job).config.pad_token_id) == (256, 256)
    assert int(Batches(job, tokenizer).step(0)[0]["input_ids"][:, -1].min()) == 256
    bare.eos_token = None
    bare.save_pretrained(job.model)
    with pytest.raises(UserError) as told:
        load_model(job)
    assert told.value.code == "no-padding-token"
    named = reward_job(tmp_path, special_tokens={"pad_token": "<pad>"})
    bare.save_pretrained(job.model)
    assert (load_tokenizer(named).pad_token_id, load_model(named).config.pad_token_id) == (257, 257)


def test_pairs_that_are_too_long_are_left_out_as_in_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [max(len(p["chosen"]), len(p["rejected"])) + len(p["prompt"]) + 1 for p in pairs(9)]
    short = sorted(lengths)[4]
    job = reward_job(tmp_path, max_length=short)
    assert job.long_rows == "drop"
    batches = Batches(job, byte_tokenizer())
    left = sum(length <= short for length in lengths)
    assert batches.rows == left < 9
    assert f"data: {9 - left} of 9 pairs, longer than max_length {short}, are left out" in caplog.text
    with pytest.raises(UserError, match="longer than max_length") as told:
        Batches(reward_job(tmp_path, max_length=short, long_rows="refuse"), byte_tokenizer())
    assert told.value.hint == "use a larger max_length, or long_rows: drop"
    with pytest.raises(UserError) as told:
        Batches(reward_job(tmp_path, max_length=3), byte_tokenizer())
    assert told.value.code == "nothing-to-train"
    (tmp_path / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(tmp_path / "resolved.yaml") == job


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"long_rows": "cut"}, "the reward is that of an answer's end, which a cut would leave out"),
        ({"exact": False}, "a reward model has no logits that could be computed in chunks"),
        ({"sample_prompts": ["Hello"]}, "a reward model writes no text"),
        ({"loss_weighting": "documents"}, "whole answers get a reward, not their tokens"),
        ({"router_aux_loss_coef": 0.1}, "transformers' sequence classifiers have no loss of routers"),
        ({"preference_beta": 0.2}, "preference: reward does not use it"),
        ({"preference_smoothing": 0.2}, "preference: reward does not use it"),
        ({"sft_weight": 0.2}, "preference: reward does not use it"),
        ({"ref_model": "other"}, "preference: reward does not use it"),
        ({"label_smoothing_factor": 0.1}, "it cannot be used with preference"),
        ({"center_rewards_coefficient": -1.0}, "a number, 0 or more, or null for none"),
        ({"preference": "dpo", "center_rewards_coefficient": 0.1}, "preference: dpo does not use it, only reward"),
    ],
    ids=str,
)
def test_keys_that_a_reward_model_has_no_use_for_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    tiny_llama_folder(tmp_path / "model")
    data = write_jsonl(tmp_path / "data.jsonl", pairs(2))
    with pytest.raises(UserError) as told:
        make_job(tmp_path / "model", data, **{"preference": "reward", **keys})
    assert said in str(told.value)


def test_a_model_whose_classifier_does_not_score_the_last_token_is_refused(tmp_path: Path) -> None:
    tiny_llama_folder(tmp_path / "model")
    data = write_jsonl(tmp_path / "data.jsonl", pairs(2))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    for config in (T.BertConfig(vocab_size=260, **small), T.CohereConfig(vocab_size=260, **small)):
        config.save_pretrained(tmp_path / "model")
        with pytest.raises(UserError) as told:
            analyse(make_job(tmp_path / "model", data, preference="reward"), CPU)
        assert told.value.code == "no-reward-model"


def test_a_reward_model_is_not_asked_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(reward_job(tmp_path, max_steps=1), tmp_path / "run")
    with pytest.raises(UserError, match="A reward model writes no text"):
        answers(run, ("Hello",), 4)
    assert export([str(run.path), str(tmp_path / "model.gguf"), "--gguf=auto"]) == 2
    assert "A reward model is not written as GGUF" in capsys.readouterr().err
