"""Settings of the command line above a job file: whose they are, and how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from offmated.cli.planner_process import job_of, question
from offmated.jobs.job_text import notes_on_settings, with_settings
from planner.errors import Exit, UserError


def test_settings_stand_above_the_file_by_any_of_a_keys_names(tmp_path: Path) -> None:
    text = "model: m\nlora_target:\n- q_proj\n- v_proj\nadapter: lora # why\n"
    settings = ["lora_target_modules=[o_proj, up_proj]", "method=full", "max_length=512"]
    assert yaml.safe_load(with_settings(text, settings)) == {
        "model": "m",
        "lora_target_modules": ["o_proj", "up_proj"],
        "method": "full",
        "max_length": 512,
    }


def test_settings_keep_every_character_in_one_line() -> None:
    text = with_settings("model: m # 🦙\n", ['run_name="naïve 東 🦙: #1 [\\L\\x7f]"', "learning_rate=1e-7"])
    name = "naïve 東 🦙: #1 [\u2028\x7f]"
    assert yaml.safe_load(text) == {"model": "m", "run_name": name, "learning_rate": 1e-7}
    assert len(text.splitlines()) == 3


def test_a_mistake_in_a_setting_is_blamed_on_the_setting_and_one_in_the_file_on_its_line(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "small")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}')
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    file = tmp_path / "job.yaml"
    file.write_text("model: small\ndataset: data.jsonl\nmax_length: 8\n")
    for ask in (question, job_of):
        with pytest.raises(UserError) as found:
            ask(file, {"settings": ("max_length=long", "lerning_rate=1")})
        assert found.value.what == "--set has 2 mistakes."
        assert found.value.numbers[0] == "--set lerning_rate: unknown key; did you mean learning_rate?"
        assert found.value.numbers[1].startswith('--set max_length: it is "long"; it must be a whole number')
        assert found.value.hint.startswith("correct --set ")
    file.write_text(file.read_text() + "seed: -1\n")
    with pytest.raises(UserError) as found:
        job_of(file, {"settings": ("max_length=1",)})
    assert found.value.what == "job.yaml with --set has 2 mistakes."
    assert [text.partition(": it is")[0] for text in found.value.numbers] == ["--set max_length", "line 4: seed"]


def test_a_setting_is_one_value_and_nothing_of_it_is_lost() -> None:
    found = with_settings("a: 1\n", ["b=q_proj,v_proj", "c="])
    assert yaml.safe_load(found) == {"a": 1, "b": "q_proj,v_proj", "c": None}
    for wrong in ("b=x, y: 2", "b=x\ny: 2", "b", "#b=3", "b c=3", "=3"):
        with pytest.raises(UserError) as found:
            with_settings("a: 1\n", [wrong])
        assert found.value.exit_code is Exit.USAGE


def test_notes_say_what_stands_above_the_file() -> None:
    text = "learning_rate: 2e-4\nmicro_batch_size: 2\n"
    assert notes_on_settings(text, ["learning_rate=1e-5", "per_device_train_batch_size=4", "seed=3"]) == (
        "--set learning_rate=1e-05, in place of the file's 0.0002",
        "--set per_device_train_batch_size=4, in place of the file's 2",
        "--set seed=3",
    )


def test_a_setting_does_not_make_a_file_another_tools() -> None:
    axolotl = "base_model: m\nsequence_len: 64\n"
    changed = yaml.safe_load(with_settings(axolotl, ["base_model=n", "max_length=32"]))
    assert changed == {"base_model": "n", "max_length": 32}
    with pytest.raises(UserError) as found:
        with_settings(axolotl, ["model=n"])
    assert found.value.what == "With --set model the file would not read as axolotl's any more, but as offmate's."
    assert found.value.hint == "--set base_model=…, as the file calls it"
    with pytest.raises(UserError, match="not read as TRL's any more, but as LLaMA-Factory's") as found:
        with_settings("model_name_or_path: m\n", ["cutoff_len=32"])
    assert found.value.hint == "write cutoff_len into the file if that is meant"


def test_a_setting_that_is_another_key_in_the_tools_file_is_refused() -> None:
    text = "model_name_or_path: m\nstage: sft\ncutoff_len: 32\n"
    with pytest.raises(UserError, match="--set max_length is something else in a file of LLaMA-Factory's") as found:
        with_settings(text, ["max_length=64"])
    assert found.value.hint == "--set cutoff_len=…"
    assert yaml.safe_load(with_settings(text, ["cutoff_len=64"]))["cutoff_len"] == 64


def test_keys_that_are_no_text_stay_for_whoever_reads_the_file_and_aliases_are_refused() -> None:
    assert with_settings("? [a, b]\n: 1\n", ["seed=3"]).endswith("seed: 3\n")
    for text in ("dataset: &d a.jsonl\neval_dataset: *d\n", "eval_dataset: &d a.jsonl\ndataset: *d\n"):
        with pytest.raises(UserError, match="eval_dataset cannot be overridden: in the file it is an alias"):
            with_settings(text, ["eval_dataset=e.jsonl"])


def test_a_number_with_two_readings_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(UserError) as caught:
        with_settings("model: m\n", ["max_steps=1:30"])
    said = "--set max_steps: YAML reads 1:30 as 90; write the number that is meant, or a text in quotes"
    assert (caught.value.code, caught.value.numbers) == ("unclear-number", (said,))
