"""Which data are read before a job has its turn, and why others are not."""

from __future__ import annotations

from pathlib import Path

from planner.job.at_hand import MOST_BYTES, why_not_at_hand
from planner.job.schema import Job


def test_a_reason_is_given_for_each_data_set_that_is_not_read(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "hello"}\n')

    def job(dataset: str, keys: str = "") -> Job:
        return Job.parse(f"model: owner/model\ndataset: {dataset}\n{keys}", tmp_path)

    def reason(dataset: str, keys: str = "") -> str | None:
        return why_not_at_hand(job(dataset, keys))

    assert reason("data.jsonl") is None
    assert reason("owner/data") == "owner/data is on the hub"
    assert reason("data.jsonl", "eval_dataset: owner/other\n") == "owner/other is on the hub"
    with data.open("ab") as file:
        file.truncate(MOST_BYTES)
    assert reason("data.jsonl") is None
    assert reason("data.jsonl", "eval_dataset: data.jsonl\n") == "the data have 128.0 MiB, more than 64.0 MiB"
    with data.open("ab") as file:
        file.truncate(MOST_BYTES + 2**20)
    assert reason("data.jsonl") == "the data have 65.0 MiB, more than 64.0 MiB"
    here = job("data.jsonl")
    data.unlink()
    assert why_not_at_hand(here) == f"there is no dataset at {data}"
