"""Jobs of encoder-decoders: pairs as rows, plain PyTorch's numbers, adapters, and the keys that say nothing of them.
Some tests take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as T
from peft import PeftModel
from tokenizers.processors import TemplateProcessing

from planner.codec import to_json
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import pairs_of
from planner.run.folder import RunFolder
from planner.search.problem import Problem
from tests.support.plain_engine import PlainEngine
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.check.__main__ import main
from worker.check.verify_resume import differences
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.sample import answers
from worker.training.learning_rate import learning_rate, optimizer_of
from worker.training.merged import write_merged
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

STEPS = 2
EOS, PAD = 256, 257

pytestmark = pytest.mark.usefixtures("one_thread")


def tokenizer() -> T.PreTrainedTokenizerFast:
    """Bytes; like T5's it closes each text itself."""
    made = byte_tokenizer()
    made._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    return made


def ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def t5_job(tmp_path: Path, records: list[dict[str, str]] | None = None, **keys: object) -> Job:
    config = T.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        vocab_size=260,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    config.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    records = records or [{"prompt": f"the {i} of", "completion": "xy"[: 1 + i % 2] * 3} for i in range(8)]
    small = {
        "max_length": 16,
        "max_target_length": 8,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
    }
    return make_job(tmp_path / "model", write_jsonl(tmp_path / "data.jsonl", records), **{**small, **keys})


def run_of(tmp_path: Path, job: Job) -> RunFolder:
    """A run folder with a plan near the least budget."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.resolved.write_text(job.resolved_yaml(), "utf-8")
    analysis, hardware = analyse(job, torch.device("cpu")), estimate_hardware(torch.device("cpu"))
    chain = analysis.chain(estimate_times(analysis, hardware))
    setting = {"cpu_budget_bytes": 2**30, "slices": job.gradient_accumulation_steps, "clip": True}
    least = Problem(chain=chain, hardware=hardware, gpu_budget_bytes=0, **setting).least().gpu_bytes
    plan = Problem(chain=chain, hardware=hardware, gpu_budget_bytes=int(1.1 * least), **setting).plan()
    parts = {"plan": to_json(plan), "chain": to_json(chain), "hardware": to_json(hardware)}
    run.plan.write_text(json.dumps({"format": 1, **parts}))
    return run


class PlainMean(torch.nn.Module):
    """The model as its authors wrote it, with one more line: the mean over all tokens of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, num_items_in_batch: torch.Tensor, **batch: torch.Tensor) -> object:
        found = self.inner(**batch)
        found.loss = found.loss * ((batch["labels"] != -100).sum() / num_items_in_batch)
        return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("slices", [1, 2])
def test_a_job_gives_the_numbers_of_plain_pytorch(tmp_path: Path, slices: int) -> None:
    rows = 4 // slices
    job = t5_job(tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=slices, val_size=2)
    run = run_of(tmp_path, job)
    torch.manual_seed(job.seed)
    config = T.AutoConfig.from_pretrained(job.model)
    config.use_cache = False  # which is of no use in training, and makes keys by other operations
    model = T.T5ForConditionalGeneration(config).train()
    plain = PlainMean(model) if slices > 1 else model
    (settings,) = optimizer_of(job, plain)
    engine = PlainEngine(plain, max_grad_norm=job.max_grad_norm, optimizer=settings)
    batches, losses = Batches(job, tokenizer(), pairs=True), []
    for step in range(STEPS):
        data = batches.step(step)
        items = {"num_items_in_batch": torch.tensor(batches.num_items(data))} if slices > 1 else {}
        seeds = [micro_batch_seed(job.seed, step, k) for k in range(slices)]
        result = engine.step(data, seeds=seeds, learning_rate=learning_rate(job, step, STEPS), **items)
        losses.append(float(torch.stack(result.losses).sum()))

    assert run_job(run, StopRequest())

    events = read_metrics(run.metrics)
    found = [event["loss"] for event in events if event["event"] == "step"]
    trained = T.AutoModelForSeq2SeqLM.from_pretrained(run.output)
    pairs = list(zip(trained.parameters(), model.parameters(), strict=True))
    if slices == 1:
        assert found == losses
        assert all(torch.equal(a, b) for a, b in pairs)
    else:  # the embedding is the encoder's, the decoder's and the head's: its gradients add up in another order
        assert found == pytest.approx(losses, rel=1e-5)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    held_out, model = batches.evaluation, model.eval()
    assert held_out is not None
    batch = held_out.batch(0)
    del batch["num_items_in_batch"]
    with torch.no_grad():
        assert events[-2]["eval_loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)


def test_adapters_are_saved_as_those_of_an_encoder_decoder(tmp_path: Path) -> None:
    whole = t5_job(tmp_path)
    load_model(whole).save_pretrained(tmp_path / "model")
    lora = {"method": "lora", "lora_r": 2, "exact": False, "max_steps": 1}
    job = make_job(tmp_path / "model", tmp_path / "data.jsonl", max_length=16, max_target_length=8, **lora)
    run = run_of(tmp_path, job)
    assert run_job(run, StopRequest())
    config = json.loads((run.output / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_2_SEQ_LM"
    assert "text2text-generation" in (run.output / "README.md").read_text()
    write_merged(job, run.output, tmp_path / "merged")
    base = T.AutoModelForSeq2SeqLM.from_pretrained(job.model)
    wanted = PeftModel.from_pretrained(base, run.output).merge_and_unload().state_dict()
    found = T.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_stop_in_the_middle_changes_no_bit(tmp_path: Path) -> None:
    job = t5_job(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4)
    whole = run_of(tmp_path, job)
    stopped = RunFolder(tmp_path / "stopped")
    shutil.copytree(whole.path, stopped.path)
    for run, step in ((whole, "3"), (stopped, "1"), (stopped, "3")):
        assert main(["train-until", str(run.path), step]) == Exit.STOPPED
    assert [e["resumed_from"] for e in read_metrics(stopped.metrics) if e["event"] == "start"] == [None, 1]
    assert differences(whole, stopped, 3) == []


def test_a_row_is_a_prompt_and_its_completion_each_padded_by_itself(tmp_path: Path) -> None:
    records = [{"prompt": "ab", "completion": "c"}, {"prompt": "", "completion": "defg"}]
    batches = Batches(t5_job(tmp_path, records, per_device_train_batch_size=2), tokenizer(), pairs=True)
    (batch,) = batches.step(0)
    rows = {tuple(row[0]): row[1:] for row in zip(*(t.tolist() for t in batch.values()), strict=True)}
    assert rows[(*ids("ab"), EOS, PAD)] == ([1, 1, 1, 0], [*ids("c"), EOS, *[-100] * 6])
    assert rows[(EOS, PAD, PAD, PAD)] == ([1, 0, 0, 0], [*ids("defg"), EOS, *[-100] * 3])
    assert batches.num_items([batch]) == 7
    assert batches.learned == 7 and batches.tokens == 11
    assert {batches.shown(0).pieces, batches.shown(1).pieces} == {
        (("ab<eos>", False), ("c<eos>", True)),
        (("<eos>", False), ("defg<eos>", True)),
    }


def test_a_prompt_that_is_cut_keeps_its_end_and_a_completion_has_none(tmp_path: Path) -> None:
    records = [{"instruction": "a" * 30, "output": "b" * 9}]
    job = t5_job(tmp_path, records, max_length=8, max_target_length=4, per_device_train_batch_size=1)
    (batch,) = Batches(job, tokenizer(), pairs=True).step(0)
    assert batch["input_ids"].tolist() == [[*ids("Below i"), EOS]]  # the Alpaca prompt
    assert batch["labels"].tolist() == [ids("bbbb")]
    with pytest.raises(UserError) as caught:
        Batches(job.model_copy(update={"long_rows": "refuse"}), tokenizer(), pairs=True)
    assert caught.value.code == "rows-too-long"


@pytest.mark.parametrize(
    "keys",
    [
        {"packing": True},
        {"packing": "wrapped"},
        {"train_on": "all"},
        {"long_rows": "split"},
        {"chat_template": "{{ messages }}"},
        {"add_tokens": ["<a>"]},
    ],
    ids=lambda keys: next(reversed(keys)),
)
def test_a_key_that_says_nothing_of_an_encoder_decoder_is_refused(tmp_path: Path, keys: dict[str, object]) -> None:
    with pytest.raises(UserError) as caught:
        pairs_of(t5_job(tmp_path, **keys))
    assert caught.value.code == "key-not-for-model" and str(next(reversed(keys))) in str(caught.value)


def test_a_length_of_completions_is_refused_for_a_model_that_has_none(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "a"}])
    with pytest.raises(UserError) as caught:
        pairs_of(make_job(tiny_llama_folder(tmp_path / "llama"), data, max_target_length=8))
    assert caught.value.code == "key-not-for-model"


def test_texts_without_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Batches(t5_job(tmp_path, [{"text": "a"}]), tokenizer(), pairs=True)
    assert caught.value.code == "no-pairs"


@pytest.mark.parametrize("which", ["t5", "bart"])
def test_a_job_says_what_plain_generation_says(tmp_path: Path, which: str) -> None:
    prompts = ["the", "the 3 of"]
    job = t5_job(tmp_path, sample_prompts=prompts, sample_tokens=5, val_size=2, eval_steps=1)
    if which == "bart":
        T.BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=260,
            max_position_embeddings=32,
            pad_token_id=PAD,
            bos_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=PAD,
            forced_eos_token_id=EOS,
            num_beams=4,
        ).save_pretrained(tmp_path / "model")
    run = run_of(tmp_path, job)
    assert run_job(run, StopRequest())
    model = T.AutoModelForSeq2SeqLM.from_pretrained(run.output).eval()
    asked = byte_tokenizer()
    asked.padding_side, asked.pad_token = "right", asked.convert_ids_to_tokens(PAD)
    texts = [f"{prompt}{asked.convert_ids_to_tokens(EOS)}" for prompt in prompts]
    given = asked(texts, return_tensors="pt", padding=True)
    said = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        max_new_tokens=5,
        do_sample=False,
        num_beams=1,
    )
    wanted = tokenizer().batch_decode(said[:, 1:], skip_special_tokens=True)
    assert answers(run, tuple(prompts), 5) == wanted
    events = [event["text"] for event in read_metrics(run.metrics) if event["event"] == "sample"]
    assert events[-2:] == wanted
