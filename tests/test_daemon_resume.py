"""A job interrupted under the daemon, with the real planner and trainer, ends where an undisturbed one does."""

from __future__ import annotations

import runpy
from pathlib import Path

from safetensors.numpy import load_file
from transformers import LlamaConfig

from planner.processes import Process
from tests.daemons import ROOT, House, house, until

JOB = """
model: model
dataset: text.jsonl
max_length: 64
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 120
save_steps: 10
learning_rate: 1e-3
"""


def prepare(home: Path) -> None:
    """The example's text and tokenizer, and a Llama of two small layers."""
    runpy.run_path(str(ROOT / "examples" / "pydoc.py"))["prepare"](home)
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=2048, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    ).save_pretrained(home / "model")  # fmt: skip


def done_steps(house: House, number: int) -> list[int]:
    """The steps the trainers reported, in the order they were done."""
    return [event["step"] for event in house.client.metrics(number) if event["event"] == "step"]


def test_a_killed_and_a_shut_down_run_end_with_the_weights_of_an_undisturbed_one() -> None:
    with house(real=True) as built:
        prepare(built.home)
        plain = int(built.client.submit(JOB, str(built.home))["id"])
        until(lambda: built.job(plain)["state"] in ("done", "failed"), "an undisturbed run", 240)
        assert built.job(plain)["state"] == "done", "".join(built.client.logs(plain))

        number = int(built.client.submit(JOB, str(built.home))["id"])
        until(lambda: 15 in done_steps(built, number), "step 15", 120)
        Process.parse((built.paths.run_folder(number) / "process").read_text()).kill()
        until(lambda: built.job(number)["attempts"] == 2 and max(done_steps(built, number)) >= 45, "step 45", 120)
        built.down()
        built.up()
        until(lambda: built.job(number)["state"] in ("done", "failed"), "the end", 120)

        job, starts = built.job(number), [e for e in built.client.metrics(number) if e["event"] == "start"]
        assert (job["state"], job["attempts"], job["crashes"]) == ("done", 3, 0), "".join(built.client.logs(number))
        assert starts[1]["resumed_from"] >= 10 and starts[2]["resumed_from"] >= 45
        ours, theirs = (load_file(Path(built.job(n)["output"]) / "model.safetensors") for n in (number, plain))
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
