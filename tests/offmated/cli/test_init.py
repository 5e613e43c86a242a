"""`offmate init`: the files that it writes for real data and models, and when it refuses. Tests that plan take seconds:
each of their processes imports PyTorch."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig

from offmated.cli import main
from offmated.cli.new_job import Machine, card_here, new_job, quoted, suggestions
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.job.survey import survey
from planner.machine.cards import CARDS
from planner.machine.presets import preset
from planner.machine.this_machine import device_bytes
from tests.offmated.cli import test_other_systems as other_systems
from tests.offmated.cli.test_other_systems import child
from tests.support.texts import CHATML, byte_tokenizer, tiny_llama_folder, write_jsonl
from worker.check.preview import answer as previewed

CARD = ("--hardware", "rtx3060")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs, with a small model in `model`; the hub is not asked."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("OFFMATE_HOME", str(tmp_path / "state")), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    return tmp_path


def run(*words: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(main, ["init", *words], input=answers)


def written(*words: str) -> tuple[Job, dict[str, Any]]:
    """The job of the file that the command writes, after a preview of it as `offmate preview` makes it; and what the
    command says of it as JSON."""
    done = run(*words, *CARD, "--model", "model", "--json")
    assert done.exit_code == 0, done.stderr
    job = Job.load(Path("job.yaml"))
    code, _ = previewed(job, argparse.Namespace(rows=1, json=True, color=False, asks="", database=None))
    assert code == Exit.DONE
    return job, json.loads(done.stdout)


def texts(path: Path, count: int = 3, **more: Any) -> Path:
    return write_jsonl(path, [{"text": "word " * (number + 1), **more} for number in range(count)])


# ---- files that pass submission's checks


def test_texts_get_full_fine_tuning_and_the_length_of_their_longest_row(folder: Path) -> None:
    texts(folder / "data.jsonl", 250)
    write_jsonl(folder / "data.jsonl", [{"text": "a" * 10}] * 249 + [{"text": "a" * 150}])
    job, told = written("data.jsonl", "--start", "night")
    assert (job.method, job.max_length, job.train_batch_size, job.val_size) == ("full", 192, 8, 0.05)
    assert job.schedule == "23:00-07:00"
    assert told["data"] | {"longest_tokens": 151, "longest_bytes": 150, "records": 250} == told["data"]
    assert told["plans"]["full"]["fits"] and told["plans"].keys() == {"full"}
    assert told["commands"][0] == "offmate preview job.yaml"
    assert job.output_dir == str(folder / "model-data")
    lines = Path("job.yaml").read_text().splitlines()
    assert lines[-1] == "# `offmate keys` lists all keys"
    assert len([line for line in lines if not line.startswith("#")]) <= 13
    assert all(len(line) <= 120 for line in lines)


def test_preferences_are_learned_by_dpo(folder: Path) -> None:
    pair = {"prompt": "2 + 2 = ", "chosen": "4, of course", "rejected": "5"}
    write_jsonl(folder / "pairs.jsonl", [pair] * 12)
    job, told = written("pairs.jsonl")
    assert (job.preference, job.train_batch_size, told["data"]["kind"]) == ("dpo", 8, "preference")
    assert told["data"]["longest_bytes"] == len("2 + 2 = 4, of course")


def test_conversations_are_read_with_the_models_template(folder: Path) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    write_jsonl(folder / "talks.jsonl", [{"messages": talk}] * 3)
    job, told = written("talks.jsonl")
    assert (job.train_batch_size, job.val_size, told["data"]["kind"]) == (3, None, "messages")
    assert told["data"]["longest_tokens"] > told["data"]["longest_bytes"]


def test_a_table_of_instructions_is_read(folder: Path) -> None:
    with (folder / "alpaca.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerows([("instruction", "input", "output"), ("Add", "2, 2", "4"), ("Say\nhello", "", "hello")])
    _, told = written("alpaca.csv")
    assert (told["data"]["kind"], told["data"]["records"]) == ("alpaca", 2)


def table(path: Path, *rows: tuple[str, ...]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_questions_with_answers_are_read_as_instructions_under_the_models_template(folder: Path) -> None:
    table(folder / "faq.csv", ("question", "answer", "source"), ("When?", "Now.", "a"), ("Where is it?", "Here.", "b"))
    job, told = written("faq.csv")
    (entry,) = job.data
    assert (entry.path, entry.type) == (str(folder / "faq.csv"), "instructions")
    assert entry.columns == {"instruction": "question", "output": "answer"}
    assert told["data"] | {"longest_bytes": len("Where is it?Here."), "records": 2, "broken": 0} == told["data"]
    assert told["data"]["longest_tokens"] > told["data"]["longest_bytes"]  # with the template's turns
    assert "# The columns question and answer are read as instructions" in Path("job.yaml").read_text()


@pytest.mark.parametrize(
    "names", [("query", "response"), ("input", "output"), ("prompt", "response"), ("user", "assistant")]
)
def test_other_names_of_questions_and_answers_are_known(folder: Path, names: tuple[str, str]) -> None:
    path = write_jsonl(folder / "data.jsonl", [{names[0]: "abc", names[1]: "de", "note": "f"}])
    found = survey(path)
    assert (found.kind, found.longest) == ("alpaca", 5)
    assert found.entry == {"type": "instructions", "columns": {"instruction": names[0], "output": names[1]}}


@pytest.mark.parametrize("names", [("Frage", "Antwort"), ("Question", "Answer"), ("question", "answer", "response")])
def test_columns_of_which_none_are_sure_to_be_meant_are_refused_with_an_entry_to_copy(
    folder: Path, names: tuple[str, ...]
) -> None:
    table(folder / "faq.csv", names, names)
    done = run("faq.csv", "--model", "some/model", *CARD)
    assert done.exit_code == Exit.USAGE and "[unknown-columns]" in done.stderr
    line = done.stderr.partition("such as ")[2].partition("   [")[0]
    (entry,) = Job.parse(f"model: some/model\n{line}\n", folder).data
    assert (entry.path, entry.type) == (str(folder / "faq.csv"), "instructions")
    assert entry.columns == {"instruction": names[0], "output": names[1]}


def test_a_file_for_prompts_and_completions_says_that_they_get_no_template(folder: Path) -> None:
    write_jsonl(folder / "data.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    assert run("data.jsonl", "--model", "some/model", *CARD).exit_code == 0
    said = " ".join(Path("job.yaml").read_text().replace("\n#", "").split())
    assert "joined as they are, without a chat template" in said
    instead = "dataset: [{path: data.jsonl, type: instructions, columns: {instruction: prompt, output: completion}}]"
    assert instead in said
    talk = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}
    assert not survey(write_jsonl(folder / "talks.jsonl", [talk])).as_they_are


def test_the_two_keys_that_are_changed_first_are_written_with_their_defaults(folder: Path) -> None:
    texts(folder / "data.jsonl")
    assert run("data.jsonl", "--model", "some/model", *CARD).exit_code == 0
    lines = Path("job.yaml").read_text().splitlines()
    default = Job.parse("model: some/model\ndataset: data.jsonl\n", folder)
    for key in ("learning_rate", "num_train_epochs"):
        (line,) = (line for line in lines if line.startswith(f"{key}: "))
        assert float(line.split()[1]) == getattr(default, key) and " # the default; " in line


def test_broken_records_are_left_out_and_the_file_says_which(folder: Path) -> None:
    (folder / "data.jsonl").write_text('{"text": "good"}\n{"text": 7}\nno json\n{"text": "better"}\n')
    job, told = written("data.jsonl")
    assert (job.broken_rows, told["data"]["broken"], job.train_batch_size) == ("skip", 2, 2)
    said = Path("job.yaml").read_text()
    assert "line 2 of data.jsonl" in said and "line 3 of data.jsonl" in said


# ---- what fits is the planner's answer


def test_the_first_of_full_lora_and_qlora_that_fits_is_written_and_the_file_says_why(folder: Path) -> None:
    texts(folder / "data.jsonl")
    machine = Machine(card="rtx3060", ram=2 * 2**30, is_here=False)
    model, told = str(large_model(folder / "eight")), list[str]()
    job = new_job(model, folder / "data.jsonl", machine, night=False, output=folder / "job.yaml", tell=told.append)
    found = job.to_json()
    assert [plan["fits"] for plan in found["plans"].values()] == [False, False, True]
    assert (found["keys"]["method"]["value"], found["keys"]["load_in_4bit"]["value"]) == ("lora", True)
    said = " ".join(job.text.replace("# ", "").split())
    assert "full fine-tuning needs" in said and "LoRA needs" in said and "a job may use" in said
    assert [line.partition(" on a GeForce")[0] for line in told if line.startswith("planning")] == [
        "planning full fine-tuning",
        "planning LoRA",
        "planning LoRA on a base in 4 bits (QLoRA)",
    ]


def test_a_model_for_which_no_method_fits_is_refused_with_three_reasons(folder: Path) -> None:
    texts(folder / "data.jsonl")
    machine = Machine(card="rtx3060", ram=2 * 2**30, is_here=False)
    model = str(large_model(folder / "thirty", times=2))
    with pytest.raises(UserError) as refused:
        new_job(model, folder / "data.jsonl", machine, night=False, output=folder / "job.yaml", tell=print)
    assert (refused.value.code, refused.value.exit_code) == ("does-not-fit", Exit.DOES_NOT_FIT)
    assert len(refused.value.numbers) == 3
    assert all("needs" in line and "a job may use" in line for line in refused.value.numbers)


def test_a_model_of_which_no_plan_can_be_made_is_refused_with_the_planners_reason(folder: Path) -> None:
    texts(folder / "data.jsonl")
    config, packed = folder / "model" / "config.json", {"quant_method": "gptq", "bits": 4}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": packed}))
    done = run("data.jsonl", "--model", "model", *CARD)
    assert done.exit_code == Exit.USAGE and "[not-planned]" in done.stderr
    assert done.stderr.count("in a quantized form that this job cannot train") == 3
    assert not Path("job.yaml").exists()


def large_model(folder: Path, *, times: int = 1) -> Path:
    """A folder with the config of a model of 8 billion parameters in 8 layers, `times` as wide, with a tokenizer and no
    weights."""
    LlamaConfig(
        vocab_size=128256,
        hidden_size=8192 * times,
        intermediate_size=28672 * times,
        num_hidden_layers=8,
        num_attention_heads=64 * times,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_that_is_not_here_gets_a_file_without_a_method_that_says_so(folder: Path) -> None:
    texts(folder / "data.jsonl")
    done = run("data.jsonl", "--model", "nobody/nothing-4B", *CARD)
    assert done.exit_code == 0, done.stderr
    text = Path("job.yaml").read_text()
    job = Job.load(Path("job.yaml"))
    assert (job.model, job.max_length) == ("nobody/nothing-4B", 64)
    assert "method:" not in [line.split()[0] for line in text.splitlines()]
    assert "# No plan was made: nobody/nothing-4B is not on this machine" in text
    assert "a guess" in text


# ---- a machine without a card


def test_without_a_card_the_file_is_for_this_machines_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    texts(folder / "data.jsonl")
    done = run("data.jsonl", "--model", "model", "--json")
    assert done.exit_code == 0, done.stderr
    told, job = json.loads(done.stdout), Job.load(Path("job.yaml"))
    assert told["machine"] | {"card": None, "is_here": True} == told["machine"]
    assert told["plans"]["full"]["fits"] and 0 < told["plans"]["full"]["gpu_peak_bytes"] < 2**30
    assert (job.method, job.gpu_budget) == ("full", None)
    assert "# The job runs on the CPU: " in Path("job.yaml").read_text()
    assert told["commands"][1] == "offmate plan job.yaml"


def test_a_model_that_is_too_large_for_this_machines_cpu_is_refused_with_the_plans_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    texts(folder / "data.jsonl")
    large_model(folder / "thirty", times=2)
    done = run("data.jsonl", "--model", "thirty")
    assert done.exit_code == Exit.DOES_NOT_FIT, done.stderr
    assert "No method fits on this machine's CPU" in done.stderr
    assert "full fine-tuning: does not fit (budget " in done.stderr
    assert "LoRA: job.yaml has one mistake; line " in done.stderr  # there are no weights


@pytest.mark.parametrize("answer", ["", "cpu", "CPU", "this machine"])
def test_the_question_for_the_card_has_this_machine_as_its_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(importlib.import_module("offmated.cli.init"), "on_terminal", lambda: True)
    texts(folder / "data.jsonl")
    done = run("data.jsonl", "--model", "some/model", "--start", "now", answers=f"{answer}\n")
    assert done.exit_code == 0, done.stderr
    assert "Graphics card [this machine's CPU; no card was found]: " in done.stderr
    assert "# Made by offmate init for this machine's CPU and " in Path("job.yaml").read_text()


@pytest.mark.parametrize("system", other_systems.SYSTEMS)
def test_a_system_that_runs_no_jobs_needs_a_card(folder: Path, system: str) -> None:
    texts(folder / "data.jsonl")
    done = other_systems.run(system, folder, "init", "data.jsonl", "--model", "some/model")
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    first, hint = done.stderr.splitlines()
    assert first == "--hardware must be given, as there is no terminal to ask at." and hint.endswith("[usage]")


# ---- questions


def test_what_is_not_given_is_asked_and_asked_again_after_a_mistake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("offmated.cli.init"), "on_terminal", lambda: True)
    texts(folder / "data.jsonl")
    answers = ["no-file.jsonl", "data.jsonl", "rtx9999", "rtx4090", "./no-model", "some/model", "later", "night"]
    done = run(answers="".join(f"{line}\n" for line in answers))
    assert done.exit_code == 0, done.stderr
    job = Job.load(Path("job.yaml"))
    assert (job.model, job.schedule) == ("some/model", "23:00-07:00")
    assert 'There is no file or folder "no-file.jsonl"' in done.stderr
    assert "There is no hardware called rtx9999" in done.stderr
    assert all(name in done.stderr for name in suggestions("rtx4090"))


def test_without_a_terminal_what_is_missing_is_named(folder: Path) -> None:
    done = run("data.jsonl", *CARD)
    assert (done.exit_code, done.stderr.splitlines()[0]) == (
        Exit.USAGE,
        "--model must be given, as there is no terminal to ask at.",
    )
    assert run().stderr.startswith("DATA, --model must be given")
    assert not Path("job.yaml").exists()


# ---- refusals


def test_a_file_that_is_there_is_replaced_only_by_force(folder: Path) -> None:
    texts(folder / "data.jsonl")
    Path("job.yaml").write_text("mine")
    words = ("data.jsonl", "--model", "some/model", *CARD)
    assert (run(*words).exit_code, Path("job.yaml").read_text()) == (Exit.USAGE, "mine")
    assert run(*words, "--force").exit_code == 0
    assert Job.load(Path("job.yaml")).model == "some/model"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("", "empty-dataset"),
        ("no json\n", "nothing-to-train"),
        ('{"text": 7}\n', "nothing-to-train"),
        ('{"a": "b"}\n', "unknown-columns"),
    ],
)
def test_data_without_anything_to_learn_are_refused_and_nothing_is_written(
    folder: Path, content: str, code: str
) -> None:
    (folder / "data.jsonl").write_text(content)
    done = run("data.jsonl", "--model", "some/model", *CARD)
    assert done.exit_code == Exit.USAGE and f"[{code}]" in done.stderr
    assert not Path("job.yaml").exists()


def test_a_folder_of_several_types_is_refused_with_what_can_be_done(folder: Path) -> None:
    (folder / "mixed").mkdir()
    texts(folder / "mixed" / "a.json")
    (folder / "mixed" / "b.txt").write_text("text")
    done = run("mixed", "--model", "some/model", *CARD)
    assert done.exit_code == Exit.USAGE and "[dataset-unreadable]" in done.stderr
    assert "give one file, or write the list of files into the job file by hand" in done.stderr


def test_what_submission_refuses_is_refused_in_its_words(folder: Path) -> None:
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    write_jsonl(folder / "talks.jsonl", [{"messages": [{"role": "assistant", "content": "good day"}]}])
    done = run("talks.jsonl", "--model", "model", *CARD)
    assert done.exit_code == Exit.USAGE and "[no-chat-template]" in done.stderr
    assert not Path("job.yaml").exists()


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("nowhere/job.yaml", "there is no folder nowhere"),
        ("data.jsonl/job.yaml", "there is no folder data.jsonl"),
        ("/sys/offmate/job.yaml", "there is no folder /sys/offmate"),
    ],
)
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_the_data_are_read(
    folder: Path, output: str, why: str
) -> None:
    texts(folder / "data.jsonl")
    done = run("data.jsonl", "--model", "some/model", *CARD, "--output", output)
    assert (done.exit_code, done.stderr.splitlines()) == (
        Exit.USAGE,
        [f"The file {output} cannot be written: {why}.", "  hint: --output names another file   [cannot-write]"],
    )


def test_a_file_that_the_system_does_not_let_be_written_is_refused(folder: Path) -> None:
    texts(folder / "data.jsonl")
    for output in ("a" * 300, "/proc/job.yaml"):  # root has the right to write into /proc, and the write fails
        done = run("data.jsonl", "--model", "some/model", *CARD, "--output", output)
        assert done.exit_code == Exit.USAGE and "[cannot-write]" in done.stderr


@pytest.mark.parametrize("data", ["~nobody-of-this-name/x", "x" * 5000, "no-file.jsonl"])
def test_data_that_cannot_be_there_are_refused_in_few_words(folder: Path, data: str) -> None:
    done = run(data, "--model", "some/model", *CARD)
    assert done.exit_code == Exit.USAGE and "[missing-file]" in done.stderr
    assert done.stderr.startswith("There is no file or folder ") and len(done.stderr) < 400


# ---- parts


def test_the_length_of_chinese_text_is_guessed_by_its_bytes(folder: Path) -> None:
    write_jsonl(folder / "data.jsonl", [{"text": "学" * 1000}])
    assert run("data.jsonl", "--model", "some/model", *CARD).exit_code == 0
    text = Path("job.yaml").read_text()
    assert Job.load(Path("job.yaml")).max_length == 1024
    assert "a guess: the longest record has 3000 bytes of text, about 1000 tokens; offmate preview counts" in text


def test_the_file_gives_no_duration_as_the_plan_is_not_of_the_file_itself(folder: Path) -> None:
    texts(folder / "data.jsonl")
    _, told = written("data.jsonl")
    assert "a step" not in " ".join(told["said"]) and "step_s" not in told["plans"]["full"]
    assert told["keys"]["method"]["why"].endswith(" of GPU memory in micro-batches of one row")


@pytest.mark.parametrize(("data", "dataset"), [(".", "."), ("..", None), ("../inner", "."), ("deep/..", ".")])
def test_folders_without_a_name_get_the_one_that_they_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: str, dataset: str | None
) -> None:
    inner = folder / "inner"
    (inner / "deep").mkdir(parents=True)
    monkeypatch.chdir(inner)
    for where in (inner, folder):
        texts(where / "a.jsonl")
    done = run(data, "--model", "some/model", *CARD)
    assert done.exit_code == 0, done.stderr
    lines = Path("job.yaml").read_text().splitlines()
    path = inner if dataset else folder
    found = dict(line.partition(" #")[0].strip().split(": ", 1) for line in lines if not line.startswith("#"))
    assert (found["dataset"], found["output_dir"]) == (dataset or str(folder), f"./model-{path.name}")
    assert Job.load(Path("job.yaml")).dataset == (str(path),)


def test_only_names_that_need_it_are_quoted_and_as_the_systems_shell_reads_them(folder: Path) -> None:
    names = ["job.yaml", "my job.yaml"]
    assert [quoted(name) for name in names] == ["job.yaml", "'my job.yaml'"]
    names.append("jobs\\a.yaml")
    told = child("win32", folder, f"from offmated.cli.new_job import quoted; print([*map(quoted, {names})])")
    assert told.stdout == "['job.yaml', '\"my job.yaml\"', 'jobs\\\\a.yaml']\n", told.stderr


def test_a_file_for_another_card_keeps_to_that_cards_memory_if_this_machine_has_as_much(folder: Path) -> None:
    texts(folder / "data.jsonl")
    here = device_bytes()
    for card in ("rtx3060", "b200"):
        assert run("data.jsonl", "--model", "some/model", "--hardware", card, "--force").exit_code == 0
        usable = preset(card, bf16=True).gpu_bytes
        wanted = None if card == card_here() or here is None or here < usable else usable
        assert Job.load(Path("job.yaml")).gpu_budget == wanted


def test_names_with_signs_of_yaml_and_folders_apart_are_read_back(folder: Path) -> None:
    (folder / "some: data #1").mkdir()
    texts(folder / "some: data #1" / "a.jsonl")
    (folder / "jobs").mkdir()
    done = run("some: data #1", "--model", "some/model", *CARD, "--output", "jobs/job.yaml")
    assert done.exit_code == 0, done.stderr
    job = Job.load(Path("jobs/job.yaml"))
    assert job.dataset == (str(folder / "some: data #1"),)
    assert Path(str(job.output_dir)).parent == folder / "jobs"


def test_every_card_has_models_to_suggest() -> None:
    assert all(len(suggestions(card)) == 3 for card in (*CARDS, None))


def test_a_column_that_is_not_read_is_told(folder: Path) -> None:
    path = write_jsonl(folder / "data.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    assert (survey(path).kind, survey(path).ignored) == ("prompt", ("label",))
