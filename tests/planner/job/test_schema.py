"""A job file: what it means."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.errors import Exit, UserError
from planner.job.schema import Job
from tests.planner.conftest import BASE, parse, refusal


def test_values_of_a_template_are_a_mapping_of_its_own(folder: Path) -> None:
    head = "model: model\ndataset: text.jsonl\nchat_template_kwargs: "
    assert Job.parse(head + "{enable_thinking: false, date: null}", folder).chat_template_kwargs == {
        "enable_thinking": False
    }
    for wrong in ("[enable_thinking]", "true", "{tools: []}", "{add_generation_prompt: true}", "{1: 2}"):
        with pytest.raises(UserError) as refused:
            Job.parse(head + wrong, folder)
        (line,) = refused.value.numbers
        assert line.startswith("line 3: chat_template_kwargs: it is ")
        assert "; it must be a mapping of values that the chat template asks for" in line


def test_two_keys_are_enough_and_the_rest_has_defaults(folder: Path) -> None:
    job = parse("", folder)
    assert job.model == job.tokenizer == str(folder / "tiny")
    assert job.dataset == (str(folder / "text.jsonl"),)
    assert job.max_length == 1024
    assert job.per_device_train_batch_size == 8
    assert job.gradient_accumulation_steps == 1
    assert job.learning_rate == 5e-5
    assert job.max_grad_norm == 1.0
    assert job.gpu_budget is None
    assert job.exact and not job.bf16


def test_a_resolved_job_reads_back_equal(folder: Path) -> None:
    job = parse("gpu_budget: 10GiB\nlearning_rate: 5e-5\nchat_template: template.jinja\noutput_dir: out\n", folder)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job
    assert set(yaml.safe_load(job.resolved_yaml())) == set(Job.model_fields)


def test_a_resolved_id_stays_one_whatever_stands_beside_it(folder: Path) -> None:
    job = Job.parse("model: output/tiny\ndataset: [data/set, checkpoints]\nrun_name: x\n", folder)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    for name in ("output", "data", "checkpoints"):
        (folder / name).mkdir()
    assert Job.from_resolved(folder / "resolved.yaml") == job


def test_a_resolved_path_that_has_gone_is_named(folder: Path) -> None:
    (folder / "resolved.yaml").write_text(parse("", folder).resolved_yaml())
    (folder / "text.jsonl").unlink()
    with pytest.raises(UserError, match="there is no dataset at") as caught:
        Job.from_resolved(folder / "resolved.yaml")
    assert caught.value.exit_code == Exit.USAGE


def test_relative_paths_start_at_the_file_and_not_at_the_shell(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.yaml").write_text(BASE + "output_dir: ../out\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    job = Job.load(folder / "job.yaml")
    assert job.model == str(folder / "tiny")
    assert job.output_dir == str(folder.parent / "out")


def test_a_job_without_a_model_has_one_mistake(folder: Path) -> None:
    error = refusal("dataset: text.jsonl", folder)
    assert error.numbers == ("model: it is missing; it must be a path or Hugging Face id",)


def test_the_tokenizer_is_the_models_when_none_is_given(folder: Path) -> None:
    assert parse("tokenizer: null", folder) == parse("", folder)


def test_hub_ids_stay_as_they_are(folder: Path) -> None:
    job = Job.parse("model: Qwen/Qwen3-0.6B\ndataset: [roneneldan/TinyStories, text.jsonl]", folder)
    assert (job.model, job.tokenizer) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert job.dataset == ("roneneldan/TinyStories", str(folder / "text.jsonl"))


@pytest.mark.parametrize("second", ["drive", "./drive", "linked"])
def test_a_folder_for_states_that_comes_twice_is_refused(folder: Path, second: str) -> None:
    (folder / "linked").symlink_to(folder / "drive")
    (mistake,) = refusal(f"model: tiny\ndataset: text.jsonl\ndisk_paths: [drive, {second}]", folder).numbers
    assert "disk_paths" in mistake and "is there twice" in mistake
    assert parse("disk_paths: [drive, other]", folder).disk_paths == (str(folder / "drive"), str(folder / "other"))


def test_checkpoints_copy_no_states_on_a_drive_unless_the_file_says_so(folder: Path) -> None:
    def read(extra: str) -> tuple[int | None, int]:
        job, notes = Job.parse_with_notes(BASE + extra, folder)
        (folder / "resolved.yaml").write_text(job.resolved_yaml())
        assert Job.from_resolved(folder / "resolved.yaml") == job
        return job.save_total_limit, sum("save_total_limit is 1" in note for note in notes)

    assert [read(extra) for extra in ("", "disk_paths: null", "disk_paths: drive")] == [(2, 0), (2, 0), (1, 1)]
    for given, limit in (("2", 2), ("1", 1), ("null", None)):
        assert read(f"disk_paths: drive\nsave_total_limit: {given}") == (limit, 0)
    assert Job.question(BASE + "disk_paths: drive", folder).save_total_limit == 1


def test_what_may_be_written_to_a_drive_is_a_size_or_does_not_matter(folder: Path) -> None:
    for said, meant in (("1200TB", 1200 * 10**12), ("accept", "accept"), ("null", None)):
        job = parse(f"disk_rated_writes: {said}", folder)
        assert job.disk_rated_writes == meant
        (folder / "resolved.yaml").write_text(job.resolved_yaml())
        assert Job.from_resolved(folder / "resolved.yaml") == job
    (mistake,) = refusal(f"{BASE}disk_rated_writes: all of it", folder).numbers
    assert "it must be a size like 1200TB, accept, or null" in mistake


def test_axolotls_list_of_datasets_is_read(folder: Path) -> None:
    job = Job.parse(
        "base_model: tiny\nlearning_rate: 1e-4\ndatasets:\n  - {path: text.jsonl, type: alpaca}\n  - path: owner/set\n",
        folder,
    )
    assert [entry.path for entry in job.data] == [str(folder / "text.jsonl"), "owner/set"]
    assert [entry.type for entry in job.data] == ["instructions", None]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("learning_rate: 5e-5", "learning_rate", 5e-5),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("gpu_budget: 10GiB", "gpu_budget", 10 * 2**30),
        ("gpu_budget: 1.5 GB", "gpu_budget", 1_500_000_000),
        ("cpu_budget: 4096", "cpu_budget", 4096),
        ("max_grad_norm: 0", "max_grad_norm", None),
        ("max_grad_norm: null", "max_grad_norm", None),
        ("max_steps: -1", "max_steps", None),
        ("save_total_limit: null", "save_total_limit", None),
        ("save_minutes: 0", "save_minutes", None),
        ("save_minutes: 5", "save_minutes", 5.0),
        ("warmup_ratio: 0.03", "warmup_steps", 0.03),
        ("adapter: null", "method", "full"),
        ("train_on_inputs: true", "train_on", "all"),
        ("train_on_inputs: false", "train_on", "completions"),
        ("use_peft: false", "method", "full"),
        ("chat_template: tokenizer_default", "chat_template", None),
        ("report_to: wandb", "report_to", ("wandb",)),
        ("report_to: [tensorboard, wandb]", "report_to", ("tensorboard", "wandb")),
        ("run_name: 2024-02-30", "run_name", "2024-02-30"),
        ("run_name: 2024-02-03", "run_name", "2024-02-03"),
        ("report_to: []", "report_to", ()),
        ("chat_template: template.jinja", "chat_template", "{{ messages }}"),
        (
            "chat_template: '{% for m in messages %}{% endfor %}'",
            "chat_template",
            "{% for m in messages %}{% endfor %}",
        ),
    ],
)
def test_a_value_is_read_as_people_write_it(line: str, field: str, value: object, folder: Path) -> None:
    assert getattr(parse(line, folder), field) == value


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("micro_batch_size: auto", ("auto", 1, 8)),
        ("micro_batch_size: auto\ntrain_batch_size: 32", ("auto", 1, 32)),
        ("micro_batch_size: auto\ngradient_accumulation_steps: 1", ("auto", 1, 8)),
        ("train_batch_size: 32", ("auto", 1, 32)),
        ("train_batch_size: 32\nmicro_batch_size: 4", (4, 8, 32)),
        ("train_batch_size: 32\ngradient_accumulation_steps: 4", (8, 4, 32)),
        ("train_batch_size: 32\nmicro_batch_size: 4\ngradient_accumulation_steps: 8", (4, 8, 32)),
        ("micro_batch_size: 4\ngradient_accumulation_steps: 8", (4, 8, None)),
    ],
)
def test_the_rows_of_a_step_are_those_of_a_micro_batch_times_their_number(
    lines: str, found: tuple[object, ...], folder: Path
) -> None:
    job = parse(lines, folder)
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps, job.train_batch_size) == found
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job


def test_a_split_that_was_decided_reads_back(folder: Path) -> None:
    job = parse("train_batch_size: 32", folder).with_slices(4)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job
    assert (job.slice_rows, job.gradient_accumulation_steps, job.is_split) == (4, 8, True)


def test_notes_say_what_a_key_means_here(folder: Path) -> None:
    notes = parse("gradient_checkpointing: true\nmax_steps: 5\nnum_train_epochs: 1\n", folder).notes
    assert [note.split()[0] for note in notes] == ["gradient_checkpointing:", str(folder / "tiny"), "max_steps"]
    (folder / "tiny" / "model.safetensors").touch()
    assert parse("", folder).notes == ()


def test_a_job_does_not_change(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse("", folder).seed = 3  # type: ignore[misc]


def test_bf16_may_be_left_to_the_machine(folder: Path) -> None:
    assert parse("bf16: auto", folder).bf16 in (True, False)


@pytest.mark.parametrize(
    ("lines", "every"),
    [
        ("val_size: 0.1", None),
        ("val_size: 5\neval_strategy: epoch\neval_steps: 3", None),
        ("val_size: 5\neval_strategy: steps", 500),
        ("val_set_size: 5\neval_steps: 7", 7),
        ("val_size: 5\neval_steps: 0.1", 21),
        ("test_datasets: [{path: text.jsonl, type: completion}]\neval_batch_size: 4\neval_steps: 2", 2),
    ],
)
def test_evaluation_comes_by_epoch_unless_steps_are_given(lines: str, every: int | None, folder: Path) -> None:
    job = Job.parse(BASE + lines, folder)
    assert job.eval_every(205) == every


def test_evaluation_that_is_switched_off_asks_for_nothing(folder: Path) -> None:
    for lines in (
        "val_set_size: 0",
        "eval_strategy: no\nval_size: 0.1\neval_steps: 5",
        "eval_steps: null\nval_size:",
        'eval_strategy: "no"\neval_dataset: text.jsonl\neval_on_start: true',
    ):
        assert Job.parse(BASE + lines, folder) == Job.parse(BASE, folder)


def test_prompts_are_texts_or_messages_and_read_back_equal(folder: Path, tmp_path: Path) -> None:
    job = Job.parse(BASE + "sample_prompts: [hello, [{role: user, content: hi}]]", folder)
    assert job.sample_prompts == ("hello", ({"role": "user", "content": "hi"},))
    (tmp_path / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(tmp_path / "resolved.yaml") == job
    assert Job.parse(BASE + "sample_prompts: hello", folder).sample_prompts == ("hello",)
