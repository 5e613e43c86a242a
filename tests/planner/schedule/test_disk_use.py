"""What a run does to its drives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.machine.drives import Drive, check_place, drive_of, rated_bytes
from planner.reports.make_receipt import receipt
from planner.reports.receipt import Asked
from planner.schedule import disk_use as module
from planner.schedule.disk_use import DiskUse, disk_use
from tests.planner.search.test_states_on_disk import evaluate, streaming
from tests.support.chains import HARDWARE

TB = 10**12


def test_a_step_writes_the_states_of_what_the_cpu_updates_and_whose_are_on_disk():
    setting, made = streaming()
    plan, chain = evaluate(setting, made).plan, setting.chain
    states = sum(t.state_bytes for t in chain.tensors() if t.name in plan.cpu_updated())
    use = disk_use(plan, chain, (), 600 * TB, steps=None)
    assert use == DiskUse(written_bytes=states, rated_bytes=600 * TB, stated=True)
    assert disk_use(plan, chain, ["/"], "accept", steps=7).accepted
    blocks = (replace(b, tensors=tuple(replace(t, states_on_disk=False) for t in b.tensors)) for b in chain.blocks)
    in_memory = replace(chain, blocks=tuple(blocks))
    assert disk_use(plan, in_memory, (), None, steps=1) is None


def test_a_receipt_goes_by_what_the_job_says_of_the_drive_before_its_size():
    setting, made = streaming()
    plan, chain = replace(evaluate(setting, made).plan, step_s=1.0), setting.chain
    hardware = replace(HARDWARE, disk_bytes=2 * TB, disk_rated_bytes=1200 * TB)
    asked = Asked(model="m", dtype="bf16", length=1, rows=1, slices=1, clip=False)

    def use(said: int | str | None) -> DiskUse | None:
        return receipt(plan, chain, hardware, asked, gap=0.01, rated_writes=said).disk_use

    written = chain.stored_bytes(plan.cpu_updated())
    assert use(None) == DiskUse(written_bytes=written, rated_bytes=1200 * TB)
    assert use(600 * TB) == DiskUse(written_bytes=written, rated_bytes=600 * TB, stated=True)
    assert use("accept") == DiskUse(written_bytes=written, rated_bytes=1200 * TB, accepted=True)


@pytest.mark.parametrize(("steps", "refused"), [(None, False), (1000, False), (1001, True)])
def test_more_than_a_tenth_of_the_drives_life_has_to_be_asked_for(steps, refused):
    use = DiskUse(written_bytes=60 * 10**9, rated_bytes=600 * TB, stated=True, steps=steps)
    if not refused:
        use.check()
        return
    with pytest.raises(UserError) as raised:
        use.check()
    assert str(raised.value) == (
        "The run would wear the drive: more than 10% of its rated life.\n"
        "  each step reads and writes 60 GB of optimizer states\n"
        "  the run's 1001 steps write 60.1 TB, 10.01% of the drive's rated life\n"
        "  the drive is worn after 10000 steps: 600 TB rated, as stated\n"
        "  hint: submit it with disk_rated_writes: accept, or with what the drive's data sheet has"
        " (disk_rated_writes: 1200TB), or with a larger cpu_budget   [disk-worn]"
    )
    DiskUse(written_bytes=60 * 10**9, rated_bytes=600 * TB, accepted=True, steps=steps).check()


def test_where_nobody_says_it_a_drive_takes_600_times_its_size_and_folders_share_theirs(tmp_path, monkeypatch):
    here = drive_of(tmp_path / "not" / "there")
    assert here == drive_of(tmp_path) and here.file_system
    assert rated_bytes([tmp_path]) == 600 * here.bytes
    assert rated_bytes([tmp_path / "a", tmp_path / "b"]) == pytest.approx(600 * here.bytes, rel=1e-9)
    monkeypatch.setattr(module, "rated_bytes", lambda folders, parts: 2 * TB)
    setting, made = streaming()
    use = disk_use(evaluate(setting, made).plan, setting.chain, ["/drive"], None, steps=None)
    assert use is not None and use.rated_bytes == 2 * TB and not use.stated
    assert "600 times its size" in list(use.lines())[-1]


def test_drives_are_worn_as_soon_as_the_first_of_them_is(monkeypatch):
    sizes = {"/fast": 1, "/large": 4, "/large/too": 4}
    named = {"/fast": "a", "/large": "b", "/large/too": "b"}

    def drive(folder):
        at, size = named[str(folder)], sizes[str(folder)] * TB
        return Drive(source=at, mount=at, file_system="ext4", device=at, model="", bytes=size)

    monkeypatch.setattr("planner.machine.drives.drive_of", drive)
    two, three = list(map(Path, ("/fast", "/large"))), list(map(Path, sizes))
    assert rated_bytes(two) == 1200 * TB
    assert rated_bytes(two, (3, 1)) == 800 * TB  # three quarters on the small one
    assert rated_bytes(two, (0, 1)) == 2400 * TB
    assert rated_bytes(three, (1, 2, 2)) == 3000 * TB
    setting, made = streaming()
    plan, chain = evaluate(setting, made).plan, setting.chain
    use = disk_use(plan, chain, ["/fast", "/large"], None, steps=None, parts=lambda: (3, 1))
    assert use is not None and use.rated_bytes == 800 * TB
    assert module.most_written_bytes(["/fast", "/large"], None, steps=100, parts=lambda: (3, 1)) == TB * 8 // 10


def test_the_drive_of_a_folder_is_found_below_partitions_and_mappings(tmp_path):
    (real := tmp_path / "devices" / "nvme0n1" / "nvme0n1p2").mkdir(parents=True)
    (blocks := tmp_path / "block").mkdir()
    for name, path in (("nvme0n1", real.parent), ("nvme0n1p2", real)):
        (blocks / name).symlink_to(path)
    (real / "partition").write_text("2")
    (real.parent / "size").write_text(f"{2 * TB // 512}\n")
    (real.parent / "device").mkdir()
    (real.parent / "device" / "model").write_text("Fast 2TB   \n")
    (blocks / "dm-0" / "slaves" / "nvme0n1p2").mkdir(parents=True)
    (blocks / "md0" / "slaves" / "sda").mkdir(parents=True)
    (blocks / "md0" / "slaves" / "sdb").mkdir()
    folder = (tmp_path / "a drive" / "in").resolve()
    folder.mkdir(parents=True)
    mounts = tmp_path / "mountinfo"

    def found(source: str) -> Drive:
        at = str(folder.parent).replace(" ", r"\040")
        lines = (
            "1 0 8:1 / / rw - ext4 /dev/sdz1 rw",
            f"2 1 0:5 / {at} rw,nosuid shared:1 - btrfs {source} rw",
            f"3 1 0:6 / {at}x rw - xfs /dev/sdy rw",
        )
        mounts.write_text("\n".join(lines))
        return drive_of(folder / "new", mounts=mounts, blocks=blocks)

    for source in ("/dev/nvme0n1p2", "/dev/dm-0", "/dev/nvme0n1"):
        drive = found(source)
        assert (drive.device, drive.model, drive.bytes) == ("nvme0n1", "Fast 2TB", 2 * TB)
        assert (drive.mount, drive.file_system, drive.source) == (str(folder.parent), "btrfs", source)
    assert [found(source).device for source in ("/dev/md0", "tmpfs", "/dev/gone")] == ["", "", ""]


def test_a_drive_that_is_not_mounted_is_told_and_nothing_is_made_in_its_place(tmp_path):
    table = tmp_path / "fstab"
    (drive := tmp_path / "a drive").mkdir()
    at = str(drive.resolve()).replace(" ", r"\040")
    table.write_text(f"# {at} was here\nUUID=1 / ext4 defaults 0 1\n/dev/sdb1 {at}2 xfs noauto\nswap none swap sw\n")
    check_place(drive / "states", table=table)
    check_place(drive, table=tmp_path / "none")
    with pytest.raises(UserError, match=f"there is no {drive / 'gone'}\n"):
        check_place(drive / "gone" / "states", table=table)
    table.write_text(f"/dev/sdb1 {at} xfs noauto 0 2\n")
    for folder in (drive, drive / "states"):
        with pytest.raises(UserError, match=r"has a drive for .*, and nothing is mounted there") as raised:
            check_place(folder, table=table)
        assert raised.value.code == "disk-failed" and list(drive.iterdir()) == []
