"""A base that changes while a job waits under the daemon, with the real planner and trainer. The tests take up to two
minutes: each start of the real planner or trainer imports PyTorch."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from offmated.cli import main
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.offmated.service.test_daemon_resume import JOB, halted_at
from tests.support.daemons import House, house, until
from tests.support.lora_jobs import model_folder
from tests.support.texts import sentences, write_jsonl

LORA = f"{JOB}method: lora\nlora_r: 4\n"


def submitted(built: House) -> tuple[int, RunFolder, Path]:
    """A LoRA job that waits for the paused machine, its run folder, and the file with its model's weights."""
    model_folder(built.home / "model", "llama")
    write_jsonl(built.home / "text.jsonl", sentences(40))
    built.client.change_machine("pause")
    number = int(built.client.submit(LORA, str(built.home))["id"])
    return number, RunFolder(built.paths.run_folder(number)), built.home / "model" / "model.safetensors"


def paused(built: House, number: int, trainer: Process) -> None:
    """The job is paused while its trainer stands still."""
    built.client.change(number, "pause")
    trainer.send(signal.SIGCONT)
    until(lambda: (job := built.job(number))["state"] == "waiting" and job["hold"] == "paused", "it is paused")


def ended(built: House, number: int) -> str:
    until(lambda: built.job(number)["state"] in ("done", "failed"), f"the end; {built.log()}", 240)
    return str(built.job(number)["state"])


def negate(weights: Path) -> None:
    """Other weights in a file of the same size, with the same times."""
    before = weights.stat()
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    assert weights.stat().st_size == before.st_size
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_job_goes_on_with_a_copy_of_its_base_and_not_with_another_unless_that_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with house(real=True) as built:
        number, run, weights = submitted(built)
        noted = run.read_base() or {}
        of, unread = weights.stat(), noted[str(weights)]
        status = [of.st_mtime_ns, of.st_ctime_ns, of.st_ino, of.st_dev]
        # As the note of large weights is, which are not read at submission.
        run.write_base({**noted, str(weights): {**unread, "hash": None, "status": status}})
        built.client.change_machine("resume")
        paused(built, number, halted_at(run, 15, starts=1))
        assert (run.read_base() or {})[str(weights)]["hash"] == unread["hash"], "what was left unread has been read"

        model, copy = built.home / "model", built.home / "copy"
        shutil.copytree(model, copy, copy_function=shutil.copyfile)
        shutil.rmtree(model)
        copy.rename(model)
        built.client.change(number, "resume")
        paused(built, number, halted_at(run, 25, starts=2))
        assert (built.resumed_from(number)[1] or 0) >= 15, "it did not begin anew"

        run.base.unlink()
        built.client.change(number, "resume")
        trainer = halted_at(run, 35, starts=3)
        log = "".join(built.client.logs(number))
        assert log.count("the base was not noted at submission; from now on it is these ") == 1
        assert str(weights) in (run.read_base() or {})
        paused(built, number, trainer)

        negate(weights)
        built.client.change(number, "resume")
        assert ended(built, number) == "failed"
        error = run.read_error()
        assert error is not None and error["code"] == "base-changed"
        assert error["numbers"] == [f"{weights}: other content"]
        assert f"offmate retry {number} --allow-changed-model" in built.client.job(number)["error"]["hint"]
        assert f"offmate retry {number} --allow-changed-model" in "".join(built.client.logs(number))
        runner, env = CliRunner(), {**os.environ, **built.paths.environment()}
        refused = runner.invoke(main, ["retry", str(number)], env=env)
        assert refused.exit_code == 2 and "[base-changed]" in refused.output, refused.output
        taken = runner.invoke(main, ["retry", str(number), "--allow-changed-model"], env=env)
        assert taken.exit_code == 0, taken.output
        assert ended(built, number) == "done", "".join(built.client.logs(number))
        resumed = built.resumed_from(number)
        assert len(resumed) == 4 and (resumed[3] or 0) >= 35, "the checkpoint was not thrown away"
        model_folder(built.home / "model", "llama")  # as it was first: by now the job is of the other
        for words in (["export", str(number), str(built.home / "merged")], ["sample", str(number), "the quick"]):
            assert runner.invoke(main, words, env=env).exit_code == 2
            assert "[base-changed]" in capfd.readouterr().err


def test_a_base_that_changes_before_the_first_step_is_refused() -> None:
    with house(real=True) as built:
        number, run, _ = submitted(built)
        (built.home / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
        built.client.change_machine("resume")
        assert ended(built, number) == "failed"
        error = run.read_error()
        assert error is not None and error["code"] == "base-changed"
        assert not run.metrics.exists(), "no step was done"
