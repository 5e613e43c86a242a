"""What the commands do on macOS and on Windows, as far as Linux can show it.

Each command runs in a process in which offmate's own code, and that of the processes that it starts, sees only what
Python has on the other system (tests/support/other_system/sitecustomize.py). Nothing here has run on such a system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import Exit
from tests import ROOT
from tests.support.daemons import house
from tests.support.texts import CHATML, byte_tokenizer, tiny_llama_folder, write_jsonl

HIDING = ROOT / "tests" / "support" / "other_system"
SYSTEMS = ("darwin", "win32")
COMMAND = "from offmated.command import main; main()"
NOT_HERE = "offmate trains on Linux only; "


def child(system: str, folder: Path, code: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of Python on that system, with OFFMATE_HOME in the folder in which it runs."""
    environment = {
        **os.environ,
        "OTHER_SYSTEM": system,
        "PYTHONPATH": f"{HIDING}{os.pathsep}{ROOT}",
        "OFFMATE_HOME": str(folder / "state"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run(system: str, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command `offmate` on that system."""
    return child(system, folder, COMMAND, *words, **variables)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small model, four conversations, and a job file of offmate and of axolotl for them."""
    tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    byte_tokenizer(chat_template=CHATML).save_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(tmp_path / "data.jsonl", [{"messages": talk}] * 4)
    keys = "model: model\ndataset: data.jsonl\nmax_length: 64\ntrain_batch_size: 2\nnum_train_epochs: 3\n"
    (tmp_path / "job.yaml").write_text(keys + "pad_to_multiple_of: 8\n")
    (tmp_path / "other.yaml").write_text(
        "base_model: model\ndatasets:\n- path: data.jsonl\n  type: chat_template\nsequence_len: 64\n"
        "micro_batch_size: 2\nnum_epochs: 3\nlearning_rate: 1e-5\n"
    )
    return tmp_path


# ---- the imitation


@pytest.mark.parametrize(
    ("system", "statement"),
    [
        ("win32", "import resource"),
        ("win32", "import fcntl"),
        ("win32", "import signal; signal.SIGKILL"),
        ("win32", "import signal; signal.setitimer"),
        ("win32", "from signal import SIGHUP"),
        ("win32", "import os; os.getuid"),
        ("win32", "import os; os.O_CLOEXEC"),
        ("win32", "open('/proc/self/statm')"),
        ("darwin", "import os; os.sched_getaffinity"),
        ("darwin", "import os; os.open('/proc/self/statm', os.O_RDONLY)"),
        ("darwin", "from pathlib import Path; Path('/proc/self/statm').read_text()"),
    ],
)
def test_the_imitated_system_lacks_what_the_real_one_lacks_for_our_code_alone(
    system: str, statement: str, tmp_path: Path
) -> None:
    ours, others = (
        child(system, tmp_path, f"exec({statement!r}, {{'__name__': {name!r}}})")
        for name in ("planner.some_module", "somebody_elses")
    )
    assert ours.returncode == 1 and "Error: " in ours.stderr
    assert (others.returncode, others.stderr) == (0, "")


# ---- what works


@pytest.mark.parametrize("system", SYSTEMS)
def test_keys_and_cards_are_listed(system: str, tmp_path: Path) -> None:
    keys = run(system, tmp_path, "keys")
    assert (keys.returncode, keys.stderr) == (0, "") and "\n  learning_rate " in keys.stdout
    cards = run(system, tmp_path, "plan", "--hardware", "list", "--json")
    assert "rtx3060" in {card["hardware"] for card in json.loads(cards.stdout)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_of_another_tool_is_imported(system: str, folder: Path) -> None:
    done = run(system, folder, "import", "other.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nper_device_train_batch_size: 2 " in done.stdout


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_job_is_previewed(system: str, folder: Path) -> None:
    done = run(system, folder, "preview", "job.yaml", "--rows=1")
    assert done.returncode == 0, done.stderr
    assert "⟦yes<|im_end|>⟧" in done.stdout and "\n4 rows, " in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_job_is_planned_for_another_machine_and_changes_that_help_are_told(system: str, folder: Path) -> None:
    done = run(system, folder, "plan", "job.yaml", "--hardware", "rtx3060", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["status"] != "infeasible" and told["step_s"] > 0
    assert "Traceback" not in done.stderr
    assert told["changes"]  # by planning in further processes


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_job_file_is_written_for_another_machine(system: str, folder: Path) -> None:
    words = ("data.jsonl", "--model", "model", "--hardware", "rtx3060", "--start", "now", "--output", "new.yaml")
    done = run(system, folder, "init", *words)
    assert done.returncode == 0, done.stderr
    assert "\nmethod: full " in (folder / "new.yaml").read_text()


def test_a_pattern_that_takes_too_long_is_not_found_out_on_windows(tmp_path: Path) -> None:
    code = "from planner.keys.patterns import too_slow; print(too_slow(['(a*)*b']))"
    assert child("win32", tmp_path, code).stdout == "None\n"


@pytest.mark.parametrize(("system", "ends"), [("darwin", True), ("win32", False)])
def test_a_chat_template_is_stopped_after_its_time_where_there_are_timers(
    system: str, ends: bool, tmp_path: Path
) -> None:
    code = (
        "import time\nfrom planner.errors import UserError\nfrom worker.data import bounds\nbounds.MOST_S = 0.05\n"
        "try:\n    with bounds.bounded():\n        began = time.process_time()\n"
        "        while time.process_time() < began + 0.5: pass\n    print('to its end')\n"
        "except UserError as error: print(error.code)"
    )
    done = child(system, tmp_path, code)
    assert done.stdout == ("chat-template-too-much\n" if ends else "to its end\n"), done.stderr


# ---- what is refused


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "words",
    [
        *(["submit", "job.yaml"], ["run", "job.yaml"], ["plan", "job.yaml"], ["certify", "job.yaml"], ["up"], ["down"]),
        *(["status"], ["doctor"], ["export", "1", "x"], ["service", "install"], ["verify-resume", "job.yaml"]),
    ],
    ids=lambda words: words[0],
)
def test_other_commands_are_refused_in_one_line_with_a_hint(system: str, words: list[str], folder: Path) -> None:
    done = run(system, folder, *words)
    first, second = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert first.startswith(NOT_HERE) and "WSL2" in second and second.endswith("[linux-only]")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_daemon_itself_is_refused_too(system: str, tmp_path: Path) -> None:
    done = child(system, tmp_path, "import runpy; runpy.run_module('offmated', run_name='__main__')")
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith(NOT_HERE)


@pytest.mark.parametrize("system", SYSTEMS)
def test_python_plans_for_another_machine_only(system: str, tmp_path: Path) -> None:
    done = child(system, tmp_path, "import offmate\noffmate.plan('job.yaml')")
    assert f"UserError: {NOT_HERE}" in done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_help_of_a_refused_command_is_shown(system: str, tmp_path: Path) -> None:
    done = run(system, tmp_path, "submit", "--help")
    assert (done.returncode, done.stderr) == (0, "") and "--gpu-budget" in done.stdout


def test_the_daemon_of_a_linux_machine_takes_jobs_from_there(tmp_path: Path) -> None:
    with house() as there:
        address, token = there.client.page_url().split("#")
        where = {"OFFMATE_HOST": address, "OFFMATE_TOKEN": token}
        job = f"model: {there.home}/model\ndataset: {there.home}/text.jsonl\nmax_steps: 3\n"
        (tmp_path / "job.yaml").write_text(job)
        for number, system in enumerate(SYSTEMS, start=1):
            ended = run(system, tmp_path, "run", "job.yaml", **where)
            assert ended.returncode == 0, ended.stderr
            logs = run(system, tmp_path, "logs", str(number), **where)
            assert "trainer here, from step 0" in logs.stdout
        listed = run(system, tmp_path, "status", "--json", **where)
        assert [job["state"] for job in json.loads(listed.stdout)] == ["done", "done"]
