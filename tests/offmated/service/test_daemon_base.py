"""A base that changes while a job waits under the daemon, with the real planner and trainer. Some tests take seconds:
each start of the real planner or trainer imports PyTorch."""

from __future__ import annotations

import os
import shutil
import signal

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


def paused_at(built: House, step: int) -> tuple[int, RunFolder]:
    """A LoRA job that was paused behind a step, and its run folder."""
    model_folder(built.home / "model", "llama")
    write_jsonl(built.home / "text.jsonl", sentences(40))
    number = int(built.client.submit(LORA, str(built.home))["id"])
    run = RunFolder(built.paths.run_folder(number))
    paused_again(built, number, halted_at(run, step, starts=1))
    return number, run


def paused_again(built: House, number: int, trainer: Process) -> None:
    """The job is paused while its trainer stands still."""
    built.client.change(number, "pause")
    trainer.send(signal.SIGCONT)
    until(lambda: (job := built.job(number))["state"] == "waiting" and job["hold"] == "paused", "it is paused")


def ended(built: House, number: int) -> str:
    until(lambda: built.job(number)["state"] in ("done", "failed"), f"the end; {built.log()}", 240)
    return str(built.job(number)["state"])


def test_a_job_does_not_go_on_with_another_base_unless_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with house(real=True) as built:
        number, run = paused_at(built, 15)
        weights = built.home / "model" / "model.safetensors"
        before = weights.stat()
        save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
        assert weights.stat().st_size == before.st_size
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
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
        assert len(resumed) == 2 and (resumed[1] or 0) >= 15, "the checkpoint was not thrown away"
        model_folder(built.home / "model", "llama")  # as it was first: by now the job is of the other
        for words in (["export", str(number), str(built.home / "merged")], ["sample", str(number), "the quick"]):
            assert runner.invoke(main, words, env=env).exit_code == 2
            assert "[base-changed]" in capfd.readouterr().err


def test_a_copy_of_the_base_will_do_and_without_a_note_of_it_the_base_is_that_of_the_next_start() -> None:
    with house(real=True) as built:
        number, run = paused_at(built, 15)
        model, copy = built.home / "model", built.home / "copy"
        shutil.copytree(model, copy, copy_function=shutil.copyfile)
        shutil.rmtree(model)
        copy.rename(model)
        built.client.change(number, "resume")
        paused_again(built, number, halted_at(run, 25, starts=2))
        assert (built.resumed_from(number)[1] or 0) >= 15, "it did not begin anew"
        run.base.unlink()
        built.client.change(number, "resume")
        trainer = halted_at(run, 35, starts=3)
        log = "".join(built.client.logs(number))
        assert log.count("the base was not noted at submission; from now on it is these ") == 1
        assert str(built.home / "model" / "model.safetensors") in (run.read_base() or {})
        paused_again(built, number, trainer)
        weights = built.home / "model" / "model.safetensors"
        save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
        built.client.change(number, "resume")
        assert ended(built, number) == "failed"
        assert (run.read_error() or {})["code"] == "base-changed"


def test_what_is_left_for_the_planner_to_read_is_read_and_a_change_before_that_is_refused() -> None:
    with house(real=True) as built:
        model_folder(built.home / "model", "llama")
        write_jsonl(built.home / "text.jsonl", sentences(40))
        built.client.change_machine("pause")
        number = int(built.client.submit(LORA, str(built.home))["id"])
        run, weights = RunFolder(built.paths.run_folder(number)), built.home / "model" / "model.safetensors"
        noted = run.read_base() or {}
        of, unread = weights.stat(), noted[str(weights)]
        status = [of.st_mtime_ns, of.st_ctime_ns, of.st_ino, of.st_dev]
        run.write_base({**noted, str(weights): {**unread, "hash": None, "status": status}})  # as of large ones
        built.client.change_machine("resume")
        assert ended(built, number) == "done", "".join(built.client.logs(number))
        assert (run.read_base() or {})[str(weights)]["hash"] == unread["hash"]
        built.client.change_machine("pause")
        number = int(built.client.submit(LORA, str(built.home))["id"])
        (built.home / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
        built.client.change_machine("resume")
        assert ended(built, number) == "failed"
        error = RunFolder(built.paths.run_folder(number)).read_error()
        assert error is not None and error["code"] == "base-changed"
        assert not RunFolder(built.paths.run_folder(number)).metrics.exists(), "no step was done"
