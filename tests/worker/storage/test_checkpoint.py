"""Checkpoints are whole or not there, and a torn one is never loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.errors import UserError
from planner.keys.lsp import LspKeys
from worker.storage.checkpoint import Checkpoints, Origin, TornCheckpoint, read_checkpoint
from worker.storage.shards import FileRecord, read_shards, write_shards

ORIGIN = Origin(job={"learning_rate": 0.1, "seed": 3}, data="abc", total_steps=10, plan="p")
NAMES = ("embed.weight", "layer.0.up.weight", "layer.0.up.bias", "norm.weight")
BYTES = 1000


def state(step: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields parts of one buffer again and again, as an engine with a staging buffer may."""
    buffer = torch.empty(18, 5)
    for index, name in enumerate(NAMES):
        buffer.copy_(torch.arange(90.0).view(18, 5) + 100 * index + step)
        yield name, {"master": buffer[:6], "exp_avg": buffer[6:12], "exp_avg_sq": buffer[12:].t()}


def expected(step: int) -> dict[str, dict[str, Tensor]]:
    return {name: {part: t.clone() for part, t in parts.items()} for name, parts in state(step)}


def checkpoints(folder: Path, *, keep: int | None = 2, origin: Origin = ORIGIN) -> Checkpoints:
    return Checkpoints(folder, keep=keep, origin=origin)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(folder: Path, step: int) -> None:
    latest = checkpoints(folder).latest()
    assert latest is not None
    assert latest.step == step
    found = dict(latest.tensors())
    want = expected(step)
    assert found.keys() == want.keys()
    for name, parts in want.items():
        assert found[name].keys() == parts.keys()
        assert all(torch.equal(found[name][part], tensor) for part, tensor in parts.items())


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(3, state(3), BYTES)
    assert_holds(tmp_path, 3)


def test_its_files_are_on_disk_before_it_has_its_name_and_that_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoints(tmp_path, keep=1)
    made.save(1, state(1), BYTES)
    events: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        events.append(("synced", str(path.relative_to(tmp_path)), path.stat().st_size if path.is_file() else 0))

    def renamed(path: Path, to: Path) -> None:
        rename(path, to)
        events.append(("renamed", str(path.relative_to(tmp_path)), 0))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    made.save(2, state(2), BYTES)
    named = events.index(("renamed", ".step-2.tmp", 0))
    folder = events.index(("synced", ".step-2.tmp", 0))
    files = {("synced", f".step-2.tmp/{file.name}", file.stat().st_size) for file in (tmp_path / "step-2").iterdir()}
    assert len(files) >= 2 and files <= {*events[:folder]}
    assert folder < named < events.index(("synced", ".", 0)) < events.index(("renamed", "step-1", 0))


@pytest.mark.parametrize("shard_bytes", [1, 300, 800, 10**6])
def test_tensors_survive_any_size_of_shard(tmp_path: Path, shard_bytes: int) -> None:
    paths = write_shards(tmp_path, "state", state(1), shard_bytes=shard_bytes)
    found = dict(read_shards(paths))
    for name, parts in expected(1).items():
        assert all(torch.equal(found[name][part], tensor) for part, tensor in parts.items())
    assert len(paths) == {1: 4, 300: 4, 800: 2, 10**6: 1}[shard_bytes]


def test_tensors_survive_in_any_number_shape_and_width(tmp_path: Path) -> None:
    widths = (torch.float32, torch.bfloat16, torch.float16)
    items = {
        f"layer.{number}": {
            "master": torch.full((number % 3, 3, 1), float(number), dtype=widths[number % 3]),
            "exp_avg": torch.tensor(float(number)),
        }
        for number in range(1000)
    }
    paths = write_shards(tmp_path, "state", items.items())
    assert len(paths) > 1  # a header has only so much room
    found = dict(read_shards(paths))
    assert found.keys() == items.keys()
    for name, parts in items.items():
        for part, tensor in parts.items():
            assert found[name][part].dtype == tensor.dtype and torch.equal(found[name][part], tensor)


def test_there_is_none_at_the_start(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "new").latest() is None


def truncate(path: Path) -> None:
    file = path / "state-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose(path: Path) -> None:
    (path / "state-00001.safetensors").unlink()


def flip(path: Path) -> None:
    file = path / "state-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def tear_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text()[:-20])


def alter_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 6', '"step": 7'))


DAMAGE = {
    truncate: r"state-00001.safetensors has \d+ bytes, not \d+",
    lose: "state-00001.safetensors is missing",
    flip: "state-00001.safetensors does not match its checksum",
    lose_manifest: "manifest.json is missing",
    tear_manifest: "manifest.json is not a manifest",
    alter_manifest: "manifest.json does not match its checksum",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    both = checkpoints(tmp_path)
    both.save(3, state(3), BYTES)
    damage(both.save(6, state(6), BYTES))
    with pytest.raises(TornCheckpoint, match=DAMAGE[damage]):
        read_checkpoint(tmp_path / "step-6")
    assert_holds(tmp_path, 3)
    assert "step-6 is damaged and not used" in caplog.text


def test_a_leftover_of_an_unfinished_save_is_removed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints(tmp_path).save(3, state(3), BYTES)
    shutil.copytree(tmp_path / "step-3", tmp_path / ".step-6.tmp")
    assert_holds(tmp_path, 3)
    assert names(tmp_path) == ["step-3"]
    assert ".step-6.tmp was not finished; removed" in caplog.text


def test_a_save_that_fails_leaves_nothing_and_takes_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield from list(state(6))[:2]
        raise RuntimeError("the device is gone")

    some = checkpoints(tmp_path, keep=1)
    some.save(3, state(3), BYTES)
    with pytest.raises(RuntimeError, match="the device is gone"):
        some.save(6, failing(), BYTES)
    assert names(tmp_path) == ["step-3"]
    assert_holds(tmp_path, 3)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    some = checkpoints(tmp_path, keep=2)
    for step in (2, 4, 10, 12):
        some.save(step, state(step), BYTES)
    assert names(tmp_path) == ["step-10", "step-12"]


def test_all_are_kept_without_a_limit(tmp_path: Path) -> None:
    some = checkpoints(tmp_path, keep=None)
    for step in (2, 4, 10):
        some.save(step, state(step), BYTES)
    assert names(tmp_path) == ["step-10", "step-2", "step-4"]


def test_a_torn_checkpoint_does_not_count_and_goes_once_a_newer_one_is_durable(tmp_path: Path) -> None:
    for step in (3, 6):
        checkpoints(tmp_path).save(step, state(step), BYTES)
    flip(tmp_path / "step-6")
    after = checkpoints(tmp_path)
    assert after.latest().step == 3
    assert names(tmp_path) == ["step-3", "step-6"]
    after.save(5, state(5), BYTES)
    assert names(tmp_path) == ["step-3", "step-5"]


def test_a_torn_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (3, 6):
        checkpoints(tmp_path).save(step, state(step), BYTES)
    lose(tmp_path / "step-6")
    after = checkpoints(tmp_path)
    after.latest()
    after.save(6, state(6), BYTES)
    assert names(tmp_path) == ["step-3", "step-6"]
    assert_holds(tmp_path, 6)


def test_a_changed_job_does_not_go_on_from_the_old_ones_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(3, state(3), BYTES)
    changed = Origin(job={"learning_rate": 0.2, "seed": 3}, data="abd", total_steps=10, plan="q")
    with pytest.raises(UserError) as caught:
        checkpoints(tmp_path, origin=changed).latest()
    assert str(caught.value) == (
        "The job has changed since its checkpoint at step 3.\n"
        "  learning_rate: 0.2, was 0.1\n"
        "  data: fingerprint abd, was abc\n"
        f"  hint: submit it as a new job, or undo the change; the checkpoint is {tmp_path}/step-3   [job-changed]"
    )


def origin_of(**keys: object) -> Origin:
    return Origin(job={**ORIGIN.job, **keys}, data="abc", total_steps=10, plan="p")


def test_keys_newer_than_a_checkpoint_are_at_their_defaults_in_it(tmp_path: Path) -> None:
    checkpoints(tmp_path, origin=origin_of(exact=False)).save(3, state(3), BYTES)
    assert checkpoints(tmp_path, origin=origin_of(exact=False, compile="auto", packing=False)).latest() is not None
    with pytest.raises(UserError, match=r"3\.\n  compile: off, was auto\n  packing: True, was False\n  hint"):
        checkpoints(tmp_path, origin=origin_of(exact=False, compile="off", packing=True)).latest()


def test_exact_jobs_may_say_of_compiling_what_they_like() -> None:
    before, now = origin_of(exact=True, compile="auto"), origin_of(exact=True, compile="off")
    assert before.differences(now) == now.differences(before) == ()


@pytest.mark.parametrize("key", LspKeys.model_fields)
def test_each_key_of_lsp_changes_what_is_learned(key: str) -> None:
    default = LspKeys.model_fields[key].default
    assert origin_of().differences(origin_of(**{key: 3})) == (f"{key}: 3, was {default}",)


def test_a_disk_without_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"The disk has no room for the checkpoint of step 3\.\n  needed 909\.5 TiB, free"
    ):
        checkpoints(tmp_path).save(3, state(3), 10**15)
    assert names(tmp_path) == []


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    some = checkpoints(tmp_path, keep=1)
    some.save(3, state(3), BYTES)
    bad = expected(6)
    bad["norm.weight"]["exp_avg"][1, 2] = torch.inf
    with pytest.raises(UserError) as caught:
        some.save(6, bad.items(), BYTES)
    assert str(caught.value) == (
        "The training has diverged: exp_avg of norm.weight is not finite at step 6.\n"
        f"  last checkpoint: {tmp_path}/step-3\n"
        "  hint: use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0   [non-finite]"
    )
    assert names(tmp_path) == ["step-3"]


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = checkpoints(tmp_path).save(3, state(3), BYTES)
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert {entry["name"] for entry in manifest["files"]} == set(names(path)) - {"manifest.json"}


def test_a_disk_that_does_not_answer_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        checkpoints(tmp_path).save(step, state(step), BYTES)
    read = FileRecord.of

    def unwilling(path: Path) -> FileRecord:
        if path.parent.name == "step-2":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(FileRecord, "of", unwilling)
    now = checkpoints(tmp_path)
    with pytest.raises(UserError) as told:
        now.latest()
    assert str(told.value) == (
        "The checkpoint step-2 cannot be read now.\n"
        "  [Errno 5] Input/output error\n"
        f"  hint: it is kept; check the disk and the rights of {tmp_path}/step-2   [checkpoint-not-readable]"
    )
    assert names(tmp_path) == ["step-1", "step-2"]
    monkeypatch.setattr(FileRecord, "of", read)
    now.save(3, state(3), BYTES)
    assert names(tmp_path) == ["step-2", "step-3"]
    assert_holds(tmp_path, 3)
