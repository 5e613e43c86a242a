"""Where a file wants its figures told, as axolotl, LLaMA-Factory and TRL say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import UserError
from planner.job.frozen import fingerprint
from planner.job.schema import Job
from tests.planner.conftest import BASE, parse


@pytest.mark.parametrize(
    ("lines", "trackers"),
    [
        ("report_to: none", ()),
        ("report_to: mlflow", ("mlflow",)),
        ("report_to: [wandb, none, tensorboard, wandb]", ("wandb", "tensorboard")),
        ("use_wandb: true\nuse_mlflow: false", ("wandb",)),
        ("wandb_project: mine", ("wandb",)),
        ("wandb_project: mine\nuse_wandb: false", ()),
        ("wandb_project: mine\nreport_to: none", ()),
        ("wandb_project: mine\nwandb_mode: disabled", ()),
        ("mlflow_experiment_name: mine\nuse_tensorboard: true", ("tensorboard", "mlflow")),
        ("trackio_project_name: mine", ("trackio",)),
        ("project: huggingface", ()),
        ("report_to: [swanlab, trackio]", ("trackio",)),
        ("report_to: all", ()),
    ],
)
def test_who_is_told_is_what_the_file_says(lines: str, trackers: tuple[str, ...], folder: Path) -> None:
    job = parse(lines, folder)
    assert job.report_to == trackers
    file = folder / "resolved.yaml"
    file.write_text(job.resolved_yaml())
    assert Job.from_resolved(file) == job


def test_who_is_not_told_is_said(folder: Path) -> None:
    lines = "report_to: [swanlab, wandb]\nmlflow_tracking_uri: http://box:5000\n"
    _, notes = Job.parse_with_notes(BASE + lines, folder)
    assert (
        "not used: report_to: swanlab (offmate reports to tensorboard, wandb, trackio and mlflow only; "
        "metrics.jsonl has all figures)" in notes
    )
    assert "not used: mlflow_tracking_uri (it has no effect without report_to: mlflow)" in notes


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("report_to: 3", "wrong-type"),
        ("report_to: [{wandb: 1}]", "wrong-type"),
        ("use_wandb: often", "wrong-type"),
        ("report_to: wandb\nwandb_mode: dryrun", "bad-value"),
        ("report_to: mlflow\nmlflow_tracking_uri: https://me:secret@box/", "secret-in-job"),
        ("report_to: mlflow\nmlflow_tracking_uri: https://sometoken@box:5000", "secret-in-job"),
        ("report_to: mlflow\nmlflow_tracking_uri: http://box:5000/?api_key=abc", "secret-in-job"),
    ],
)
def test_what_cannot_be_meant_is_refused(lines: str, code: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        parse(lines, folder)
    assert refused.value.code == code
    assert "secret@" not in str(refused.value), "the error has the password"


def test_who_is_told_is_no_part_of_what_is_done(folder: Path) -> None:
    told = parse("report_to: mlflow\nmlflow_experiment_name: one\nmlflow_tracking_uri: http://box:5000", folder)
    assert fingerprint(told, {}) == fingerprint(parse("", folder), {})
