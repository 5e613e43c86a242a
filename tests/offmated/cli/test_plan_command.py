"""`offmate plan` about other machines and about chains, and `offmate plans`, as people run them. Some tests take
seconds: each process that they start imports PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from offmated.cli import main, planner_process
from offmated.cli.planner_process import question
from offmated.config import Config
from offmated.jobs.database import open_engine
from offmated.jobs.migrate import upgrade
from offmated.paths import Paths
from planner.cache.store import Cache, CachedPlan
from planner.codec import to_json
from planner.machine.cards import CARDS
from planner.machine.hardware import Hardware
from tests.support.chains import HARDWARE, chain, resident_plan
from tests.support.texts import tiny_llama_folder

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Shell:
    """The command in this process; the planner's is one of its own, as ever."""

    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.folder, self.captured = folder, captured

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.captured.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(words), prog_name="offmate")
        said = self.captured.readouterr()
        assert "Traceback" not in said.err, said.err
        return subprocess.CompletedProcess(words, int(left.value.code or 0), said.out, said.err)

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name, value in (("OFFMATE_HOME", str(tmp_path / "state")), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    (tmp_path / "chain.json").write_text(json.dumps(to_json(chain(4))))
    (tmp_path / "hardware.json").write_text(json.dumps(to_json(HARDWARE)))
    return Shell(tmp_path, capfd)


MISTAKE = "The question has one mistake.\n  "
CHAIN = ["plan", "--chain", "chain.json", "--hardware", "hardware.json"]
QUICK = CHAIN


def test_a_chain_on_a_machine_is_answered_with_one_object(shell: Shell) -> None:
    found = shell.json(*QUICK, "--gpu-budget", "8000", "--cpu-budget", "1GiB", "--slices", "2", "--clip", "exact")
    assert found.keys() >= {
        "status",
        "step_s",
        "lp_step_s",
        "bound_s",
        "solver_gap",
        "solve_s",
        "gpu_peak_bytes",
        "cpu_peak_bytes",
        "options",
        "cpu_update_share",
        "stages",
    }
    assert found["status"] in ("optimal", "feasible")
    assert 0 < found["bound_s"] <= found["step_s"]
    assert (len(found["options"]), len(found["stages"])) == (6, 11)
    assert found["stages"][5].keys() == {
        "block",
        "direction",
        "prefetch",
        "offload",
        "evict",
        "cpu_update",
        "gpu_update",
        "states_update",
    }
    assert (found["stages"][5]["block"], found["stages"][5]["direction"]) == (5, "H")
    assert found["gpu_peak_bytes"] <= 8000
    assert 0 < found["cpu_update_share"] < 1


def test_freedoms_can_be_taken_away(shell: Shell) -> None:
    words = [*QUICK, "--gpu-budget", "9000", "--gap", "0.05"]
    free = shell.json(*words)
    bound = shell.json(*words, "--no-cpu-updates", "--no-activation-offload")
    assert bound["cpu_update_share"] == 0.0 < free["cpu_update_share"]
    assert "offload" not in bound["options"]
    assert bound["step_s"] > free["step_s"]


def test_what_does_not_fit_exits_with_3_and_the_least_budget_which_fits(shell: Shell) -> None:
    done = shell.run(*CHAIN, "--gpu-budget", "3000", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["status"], found["code"]) == ("infeasible", "budget-too-small")
    assert done.stderr.startswith("No schedule fits this memory budget.\n")
    assert done.stderr.splitlines()[-1].startswith("  hint: offmate plan … --gpu-budget ")
    least = found["least_gpu_budget_bytes"]
    assert least > 3000
    assert shell.json(*QUICK, "--gpu-budget", str(least))["gpu_peak_bytes"] <= least
    assert shell.run(*QUICK, "--gpu-budget", str(least - 1)).returncode == 3


def test_a_host_without_memory_leaves_everything_to_the_device(shell: Shell) -> None:
    done = shell.run(*CHAIN, "--gpu-budget", "3000", "--cpu-budget", "512", "--json")
    assert done.returncode == 3
    least = json.loads(done.stdout)["least_gpu_budget_bytes"]
    assert shell.json(*QUICK, "--gpu-budget", str(least), "--cpu-budget", "512")["cpu_peak_bytes"] == 0


def test_a_chain_is_told_stage_by_stage(shell: Shell) -> None:
    lines = shell.run(*QUICK, "--gpu-budget", "8000").stdout.splitlines()
    assert [line.split()[0] for line in lines[:7]] == ["status", "step", "plan", "solver", "GPU", "host", "blocks"]
    assert lines[-1].strip().startswith("B0 ")


def test_a_field_that_is_wrong_exits_with_2_and_its_path(shell: Shell) -> None:
    text = (shell.folder / "chain.json").read_text()
    (shell.folder / "chain.json").write_text(text.replace('"forward_s": 0.5', '"forward_s": NaN'))
    done = shell.run(*CHAIN, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1] == "  $.blocks[5].options[0].forward_s is nan; it must be a finite number"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Give one thing to plan: a job FILE, --model or --chain."),
        (["job.yaml", "--model", "m"], "Give one thing to plan: a job FILE, --model or --chain."),
        (["--model", "m"], "--model needs a machine."),
        (["--chain", "chain.json"], "--chain needs a machine."),
        ([*CHAIN[1:], "--max-length", "8"], "--max-length does not go with offmate plan --chain --hardware."),
        (["job.yaml", "--cpu-memory", "8GiB"], "--cpu-memory does not go with offmate plan FILE."),
        (
            ["--model", "./m", "--hardware", "rtx3060"],
            "The question has one mistake.\n  model: there is no model config at ",
        ),
        (
            ["--model", "m", "--hardware", "rtx3060", "--set", "lora_r=4"],
            "--set has one mistake.\n  --set lora_r: it is for",
        ),
        (["--model", "m", "--hardware", "rtx3060", "--set", "max_length"], "--set takes KEY=VALUE, not max_length."),
        ([*CHAIN[1:], "--set", "max_length=8"], "--set does not go with offmate plan --chain --hardware."),
        (["--model", "me/none", "--hardware", "rtx9"], "There is no hardware called rtx9."),
        ([*CHAIN[1:], "--cpu-memory", "8GiB"], "--cpu-memory and --link are for machines given by name."),
        (["--model", "m", "--hardware", "hardware.json"], "A model's times cannot be estimated without"),
        ([*CHAIN[1:-1], "gone.yaml"], "Cannot use gone.yaml."),
        (["--hardware", "list", "--model", "m"], "Usage: "),
        (["job.yaml", "--hardware", "list"], "Usage: "),
        (
            ["--model", "me/none", "--hardware", "rtx3060", "--drive", "pcie4", "--set", "optim=adamw_8bit"],
            "--drive is for optimizer states, and states in 8 bits stay in memory.",
        ),
        (
            ["--model", "me/none", "--hardware", "rtx3060", "--drive", "pcie4", "--set", "optim=muon"],
            "--drive is for optimizer states, and Muon's states stay in memory.",
        ),
        ([*CHAIN[1:], "--clip", "some"], "Usage: "),
        ([*CHAIN[1:], "--gap", "1"], "Usage: "),
        ([*CHAIN[1:], "--slices", "0"], "Usage: "),
    ],
)
def test_words_that_do_not_go_together_exit_with_2(words: list[str], said: str, shell: Shell) -> None:
    done = shell.run("plan", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


@pytest.mark.parametrize("missing", [("launch_s",), ("flops_per_s", "launch_s")])
def test_a_model_is_asked_about_on_a_machine_whose_file_says_that_it_is_a_gpu(
    missing: tuple[str, ...], shell: Shell
) -> None:
    """Kernels of a GPU need scratch that those of a CPU do not."""
    machine = replace(HARDWARE, **{"flops_per_s": 1e12, "launch_s": 1e-3, **dict.fromkeys(missing, 0.0)})
    (shell.folder / "hardware.json").write_text(json.dumps(to_json(machine)))
    done = shell.run("plan", "--model", "m", "--hardware", "hardware.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"hardware.json has no {' and no '.join(missing)}\n" in done.stderr


@pytest.mark.parametrize(
    ("short", "lines"),
    [
        ({}, "gradient_accumulation_steps: 8\nper_device_train_batch_size: 1\n"),  # bf16, unless the card cannot
        (
            {"fp32": True, "batch_size": "4", "slices": 2, "max_length": 512, "clip": "none"},
            "gradient_accumulation_steps: 2\nmicro_batch_size: 4\nmax_length: 512\nmax_grad_norm: 0\nbf16: false\n",
        ),
        ({"batch_size": "auto", "lora": 8}, "micro_batch_size: auto\nbf16: true\nadapter: lora\nlora_r: 8\n"),
        ({"settings": ("train_batch_size=64", "exact=false")}, "train_batch_size: 64\nexact: false\nbf16: true\n"),
        (
            {"gpu_budget": "8GiB", "settings": ("bf16=false",)},
            "gpu_budget: 8GiB\ngradient_accumulation_steps: 8\nper_device_train_batch_size: 1\nbf16: false\n",
        ),
    ],
    ids=str,
)
def test_a_model_in_short_and_a_job_file_are_one_question(
    short: dict[str, object], lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    SMALL.save_pretrained("small")
    (tmp_path / "job.yaml").write_text(f"model: small\ndataset: not-there.jsonl\nlearning_rate: 3e-4\n{lines}")
    asked = question(None, {"model": "small/config.json", **short})
    assert asked == question(Path("job.yaml"), {})
    assert asked.model == str(tmp_path / "small")


def test_a_card_without_bf16_is_asked_about_in_fp32_unless_the_job_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    SMALL.save_pretrained("small")
    (tmp_path / "job.yaml").write_text("model: small\ndataset: not-there.jsonl\n")
    (tmp_path / "old.yaml").write_text("card: RTX 2080 Ti\ncpu_memory: 64GiB\n")
    (tmp_path / "wrong.yaml").write_text("card: [\n")
    for machine, bf16 in (("2080 Ti", False), ("old.yaml", False), ("4090", True), ("wrong.yaml", True)):
        assert question(Path("job.yaml"), {"hardware": machine}).bf16 == bf16
        assert question(None, {"model": "small", "hardware": machine}).bf16 == bf16
    assert question(Path("job.yaml"), {"hardware": "2080 Ti", "settings": ("bf16=true",)}).bf16


def test_a_machine_may_be_a_yaml_file_with_the_words_of_the_command_line(shell: Shell) -> None:
    (shell.folder / "my-box.yml").write_text("card: rtx3060\ncpu_memory: 32GiB\nlink: pcie3x8\n")
    words = ["plan", "--chain", "chain.json", "--gpu-budget", "8000", "--hardware"]
    by_file, by_name = (
        shell.json(*words, *machine)
        for machine in (["my-box.yml"], ["RTX 3060", "--cpu-memory", "32GiB", "--link", "pcie3x8"])
    )
    assert by_file["bound_s"] == by_name["bound_s"]


def test_all_cards_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--json"]):
        main(["plan", "--hardware", "list", *words], prog_name="offmate", standalone_mode=False)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "GiB", "GB/s", "FP32", "BF16", "link", "host"]
    assert "rtx4090              24   1008  82.6  165   pcie4x16  64 GiB, 89.6 GB/s" in lines
    assert "t4                   16   320   8.1   none  pcie3x16  512 GiB, 204.8 GB/s" in lines
    cards = json.loads("\n".join(lines[lines.index("[") :]))
    assert [card["hardware"] for card in cards] == list(CARDS)
    assert cards[0].keys() >= {"name", "memory_bytes", "bf16_flops_per_s", "link", "host"}


@pytest.fixture
def kept(shell: Shell) -> Shell:
    """A shell whose database keeps two plans, the first found twice."""
    paths = Paths.from_environment()
    paths.state.mkdir()
    engine = open_engine(Config.load(paths).database_url)
    upgrade(engine, paths)
    cache = Cache(engine)
    for key, model, machine in (("a" * 64, "one", "here"), ("ab" + "b" * 62, "two", "there")):
        cache.keep_plan(key, cached(machine), model=model)
    cache.find_plan("a" * 64)
    cache.find_plan("a" * 64)
    engine.dispose()
    return shell


def cached(machine: str) -> CachedPlan:
    hardware = Hardware(**(to_json(HARDWARE) | {"name": machine}))  # type: ignore[arg-type, operator]
    return CachedPlan(plan=resident_plan(chain(2)), chain=chain(2), hardware=hardware, solve_s=1.5)


def test_kept_plans_are_listed_with_their_hits(kept: Shell) -> None:
    rows = kept.json("plans", "list")
    assert [(row["model"], row["machine"], row["hits"], row["solve_s"]) for row in rows] == [
        ("one", "here", 2, 1.5),
        ("two", "there", 0, 1.5),
    ]
    lines = kept.run("plans", "list").stdout.splitlines()
    assert lines[0].split() == ["KEY", "MODEL", "MACHINE", "GPU", "HOST", "SLICES", "STEP", "HITS", "USED"]
    assert [line.split()[:3] for line in lines[1:]] == [["a" * 12, "one", "here"], ["ab" + "b" * 10, "two", "there"]]


def test_a_kept_plan_is_shown_by_the_beginning_of_its_key_and_looking_is_no_hit(kept: Shell) -> None:
    found = kept.json("plans", "show", "ab")
    assert (found["model"], found["hits"], len(found["plan"]["stages"])) == ("two", 0, 7)
    assert "resident" in found["plan"]
    assert kept.run("plans", "show", "ab").stdout.splitlines()[1] == "model        two"
    assert [row["hits"] for row in kept.json("plans", "list")] == [2, 0]
    unclear = kept.run("plans", "show", "a")
    assert (unclear.returncode, unclear.stderr.splitlines()[0]) == (2, "More than one plan begins with a.")
    missing = kept.run("plans", "show", "c")
    assert (missing.returncode, missing.stderr.splitlines()[0]) == (4, "There is no plan c.")


def test_plans_are_forgotten_one_by_one_or_all(kept: Shell) -> None:
    assert kept.run("plans", "forget").returncode == 2
    assert kept.run("plans", "forget", "ab", "--all").returncode == 2
    assert kept.run("plans", "forget", "ab").stdout == "Forgotten: 1\n"
    assert [row["model"] for row in kept.json("plans", "list")] == ["one"]
    assert kept.json("plans", "forget", "--all") == {"forgotten": 1}
    assert kept.run("plans", "list").stdout == "No plans are kept yet.\n"


def test_without_a_database_no_plans_are_kept_and_none_is_made(shell: Shell) -> None:
    assert shell.run("plans", "list").stdout == "No plans are kept yet.\n"
    assert shell.run("plans", "show", "a").returncode == 4
    assert not (shell.folder / "state").exists()


def test_a_question_asked_again_is_answered_from_the_cache_with_its_picture(kept: Shell) -> None:
    SMALL.save_pretrained(kept.folder / "small")
    (kept.folder / "job.yaml").write_text(
        "model: small\ndataset: not-there.jsonl\nmax_length: 64\nsave_total_limit: 3\nbf16: false\n"
    )
    short = ["--fp32", "--batch-size", "8", "--slices", "1", "--max-length", "64", "--set", "save_total_limit=3"]
    machine = ["--hardware", "rtx3060", "--gpu-budget", "1GiB"]
    first = kept.json("plan", "--model", "small", *short, *machine)
    again = kept.json("plan", "job.yaml", *machine, "--html", "plan.html")
    assert again == first, "answer_s too: nothing was computed"
    assert "<html" in (kept.folder / "plan.html").read_text()
    (plan,) = (row for row in kept.json("plans", "list") if row["key"] == first["plan_key"])
    assert (plan["machine"], plan["step_s"], plan["hits"]) == ("GeForce RTX 3060 12 GB", first["step_s"], 1)
    # What is forgotten is computed anew; and a job is told in words.
    assert kept.json("plans", "forget", first["plan_key"]) == {"forgotten": 1}
    lines = kept.run("plan", "job.yaml", *machine).stdout.splitlines()
    assert (
        lines[0] == "small (0.1 million parameters) in fp32 on GeForce RTX 3060 12 GB, 1 slice of 8 × 64 tokens a step"
    )
    assert lines[1].startswith("It fits: ")
    starts = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert starts >= {"plan", "limit", "updates", "blocks", "GPU", "disk", "would"}
    assert any("of 1.0 GiB" in line for line in lines)
    assert any(line.endswith("checkpoints kept: 3") for line in lines)
    (anew,) = (row for row in kept.json("plans", "list") if row["key"] == first["plan_key"])
    assert anew["hits"] == 0


def test_a_model_that_does_not_fit_exits_with_3_and_says_what_would_and_that_is_kept_too(kept: Shell) -> None:
    SMALL.save_pretrained(kept.folder / "small")
    words = ["plan", "--model", "small", "--hardware", "rtx3060", "--max-length", "1024", "--gpu-budget", "3MiB"]
    first = kept.run(*words, "--json")
    assert (first.returncode, json.loads(first.stdout)["status"]) == (3, "infeasible")
    again = kept.run(*words, "--json")
    assert (again.returncode, again.stdout) == (3, first.stdout), "answer_s too: nothing was computed"
    done = kept.run(*words)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert lines[1] == "It does not fit."
    assert lines[3].startswith("GPU          3.0 MiB for the job; at least ")
    assert any("more of this GPU (--gpu-budget " in line for line in lines)
    assert any("shorter rows" in line and "--set max_length=" in line for line in lines)


def test_a_models_own_code_does_not_run_though_somebody_says_yes(shell: Shell) -> None:
    model = tiny_llama_folder(shell.folder / "own")
    (model / "own_code.py").write_text("from pathlib import Path\nPath('it-ran').touch()\n")
    config = json.loads((model / "config.json").read_text("utf-8"))
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own_code.Own", "AutoModelForCausalLM": "own_code.Own"}}
    (model / "config.json").write_text(json.dumps(config | own))
    (shell.folder / "text.jsonl").write_text('{"text": "one"}\n')
    (shell.folder / "job.yaml").write_text("model: ./own\ndataset: text.jsonl\n")
    program = "from offmated.cli import main; main(prog_name='offmate')"
    command = [sys.executable, "-P", "-c", program, "plan", "job.yaml"]
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, cwd=shell.folder)
    assert done.returncode == 2, done.stderr
    assert done.stderr.rpartition("\n  auto_map")[0].endswith(
        f"{model} is a model with code of its own, which offmate never runs.\n  auto_map: AutoConfig: own_code.Own"
    )
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (shell.folder / "it-ran").exists()


def test_with_a_drive_one_checkpoint_is_kept_as_with_disk_paths(shell: Shell) -> None:
    SMALL.save_pretrained("small")
    drive, three = ["--drive", "pcie4"], ["--set", "save_total_limit=3"]
    for words, kept in ((drive, 1), ([*drive, *three], 3)):
        found = shell.json("plan", "--model", "small", "--hardware", "rtx3060", *words)
        assert f"checkpoints kept: {kept}" in [share["name"] for share in found["disk"]]


def test_a_plan_says_for_which_rows_it_is_and_why_where_nobody_counted_them(shell: Shell) -> None:
    model = tiny_llama_folder(shell.folder / "model")
    (shell.folder / "job.yaml").write_text(f"model: {model}\ndataset: data.jsonl\nmax_length: 128\nbf16: false\n")
    data = shell.folder / "data.jsonl"
    data.write_text('{"text": "hello"}\n{"text": "good morning"}\n')
    shown = shell.run("plan", "job.yaml")
    told = "planned for rows of 32 tokens: the longest row of data.jsonl has 13 tokens, and rows are padded to 32"
    assert f"{told}; 0 cut at max_length 128" in " ".join(shown.stdout.split())
    data.write_text(f'{{"text": "{"a" * 300}"}}\n{{"text": "{"b" * 200}"}}\n{{"text": "good morning"}}\n')
    for words, told in (
        ((), "rows of 128 tokens: the longest row of data.jsonl has 128 tokens; 2 cut at max_length 128"),
        (("dataset=me/data",), "rows of max_length, 128 tokens; the data were not counted: me/data is on the hub"),
    ):
        job = planner_process.job_of(Path("job.yaml"), {"settings": words})
        with planner_process.resolved(job) as resolved:
            counted, planned_for = planner_process.count_rows(job, resolved)
        assert planned_for == f"planned for {told}"
        assert (counted is None) == bool(words), "rows of max_length are planned for where nobody counted"


def test_a_plan_is_refused_for_what_the_job_would_be_refused_for(shell: Shell) -> None:
    model = tiny_llama_folder(shell.folder / "model")
    (shell.folder / "data.jsonl").write_text('{"text": "hello"}\n{"text": \n')
    (shell.folder / "job.yaml").write_text(f"model: {model}\ndataset: data.jsonl\nbf16: false\noutput_dir: state/out\n")
    refused = shell.run("plan", "job.yaml", "--gpu-budget", "900TB")
    assert (refused.returncode, refused.stdout) == (2, "")
    for told in (
        "3 things are wrong with this job.",
        "1. gpu_budget is more than the device has.",
        "[in-state-folder]",
        "3. A record of the dataset cannot be read.",
        "line 2 of data.jsonl is no JSON",
    ):
        assert told in refused.stderr
    assert not (shell.folder / "state").exists()


def test_several_machines_and_several_amounts_of_memory_are_asked_about_at_once(shell: Shell) -> None:
    SMALL.save_pretrained(shell.folder / "small")
    short = ["plan", "--model", "small", "--max-length", "64", "--slices", "2"]
    rows = shell.json(*short, "--compare", "rtx3060, 4090,")
    assert [row["hardware"]["name"] for row in rows] == ["GeForce RTX 3060 12 GB", "GeForce RTX 4090"]
    assert {row["status"] for row in rows} == {"optimal"}
    done = shell.run(*short, "--hardware", "rtx3060", "--gpu-budget", "64MiB", "--frontier", "--html", "over.html")
    lines = done.stdout.splitlines()
    assert lines[2].split() == ["GPU", "MEMORY", "STEP", "TOKENS/S", "SPEED"]
    assert lines[-2].startswith("64.0 MiB") and lines[-1] == "The step over GPU memory is drawn in over.html"
    assert (shell.folder / "over.html").read_text().count("<circle") == len(lines) - 4
    too_small = shell.run(*short, "--compare", "rtx3060", "--gpu-budget", "64kB")
    assert too_small.returncode == 3 and "does not fit" in too_small.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--compare", "rtx3060", "--hardware", "rtx4090"), "--compare does not go with --hardware"),
        (("--compare", "rtx3060,rtx9999"), "There is no hardware called rtx9999."),
        (("--compare", ","), "No machine is named."),
        (("--frontier",), "--model needs a machine."),
        (("--hardware", "rtx3060", "--frontier", "--trace", "t.json"), "--frontier does not go with --trace"),
    ],
)
def test_what_goes_with_neither_comparing_nor_the_frontier_is_refused(
    shell: Shell, words: tuple[str, ...], told: str
) -> None:
    SMALL.save_pretrained(shell.folder / "small")
    done = shell.run("plan", "--model", "small", *words)
    assert done.returncode == 2 and told in done.stderr
