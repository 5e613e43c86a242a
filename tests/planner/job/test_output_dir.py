"""Where a trained model may go, and what is made and removed there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.job import output_dir
from planner.job.output_dir import MARK, Place, new_token
from tests.support.disks import no_room_beyond, small_disk

MODEL = {"config.json": "{}", "model.safetensors": "weights", "additional_chat_templates/tool.jinja": "{{ x }}"}


def place(folder: Path) -> Place:
    return Place(folder=folder, token=new_token())


def publish(where: Place, *, step: int = 5) -> None:
    made = where.begin()
    write(made, MODEL)
    where.finish(made, run="/runs/1", step=step)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def tree(folder: Path) -> dict[str, str]:
    """Every file and link below a folder and what is in it, and every folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = f"-> {path.readlink()}" if path.is_symlink() else "folder" if path.is_dir() else path.read_text("utf-8")
        found[path.relative_to(folder).as_posix()] = kind
    return found


def refusal(folder: Path) -> tuple[str, str]:
    """The code and the one number with which a place is refused; nothing is left there."""
    before = tree(folder.parent) if folder.parent.is_dir() else {}
    with pytest.raises(UserError) as caught:
        place(folder).try_out()
    assert (tree(folder.parent) if folder.parent.is_dir() else {}) == before
    return caught.value.code, *caught.value.numbers


def test_a_free_place_is_one_that_is_empty_or_not_there_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    before = tree(tmp_path)
    for name in ("empty", "link", "link/a", "a/b/c", "n" * 255, "ä b"):
        place(tmp_path / name).try_out()
        assert tree(tmp_path) == before


def test_a_place_where_something_is_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    write(tmp_path / "full", {"thesis.txt": "precious", "b": "", "c": ""})
    assert refusal(tmp_path / "file") == ("output-exists", "it is a file")
    assert refusal(tmp_path / "full") == ("output-exists", "there is b and 2 more")
    assert refusal(tmp_path / "file" / "out") == ("output-unwritable", f"{tmp_path}/file is not a folder")


def test_what_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    gone = f"{tmp_path}/dangling is a link to nowhere, which is not there"
    assert refusal(tmp_path / "dangling") == ("output-unwritable", gone)
    assert refusal(tmp_path / "dangling" / "out") == ("output-unwritable", gone)
    assert refusal(tmp_path / "circle")[0] == "output-unwritable"
    long = tmp_path / ("n" * 256)
    assert refusal(long) == ("output-unwritable", f"{long}: File name too long")
    deep = tmp_path / "/".join(["d" * 200] * 18)
    deep /= "d" * (4050 - len(str(deep)))  # it could be made, the files in it could not
    assert refusal(deep)[0] == "output-unwritable"
    with pytest.raises(UserError, match="/proc/x cannot be made") as caught:
        place(Path("/proc/x")).try_out()
    assert caught.value.code == "output-unwritable"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert refusal(tmp_path / "closed" / "out")[0] == "output-unwritable"


def test_a_place_without_room_is_refused(tmp_path: Path) -> None:
    with no_room_beyond(100):
        assert refusal(tmp_path / "out")[0] == "disk-full"
    with pytest.raises(UserError, match="has no room for the trained model") as caught:
        place(tmp_path / "out").try_out(2**60)
    assert caught.value.code == "disk-full"
    assert tree(tmp_path) == {}


def test_a_disk_that_is_full_or_read_only_is_refused() -> None:
    with small_disk(64 * 1024) as disk:
        (disk / "ballast").write_bytes(bytes(64 * 1024))
        assert refusal(disk / "out")[0] == "disk-full"
    with small_disk(64 * 1024, "ro") as disk:
        code, reason = refusal(disk / "out")
        assert (code, reason.rpartition(": ")[2]) == ("output-unwritable", "Read-only file system")


@pytest.mark.parametrize("there", [False, True])
def test_a_model_is_put_in_place_whole_with_nothing_beside_it(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "out"
    if there:
        folder.mkdir(mode=0o750)
    inode = folder.stat().st_ino if there else None
    mine = place(folder)
    assert mine.published() is None
    publish(mine)
    files = tree(folder)
    assert {name: text for name, text in files.items() if name != MARK and text != "folder"} == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert mine.published() == 5
    assert place(folder).published() is None
    mine.try_out()
    assert inode in (None, folder.stat().st_ino), "the user's own folder is still the one that was there"
    with pytest.raises(UserError, match="is not empty"):
        place(folder).try_out()
    assert tree(folder) == files


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "out").symlink_to("large disk")
    publish(place(tmp_path / "out"))
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "large disk" / "config.json").exists()


SIBLINGS = {
    ".out.old/a": "1",
    ".out.tmp/b": "2",
    ".out.weights/c": "3",
    "out.old/d": "4",
    ".offmate-/e": "5",
    f".offmate-{'0' * 32}/f": "6",
    "other/g": "7",
}


@pytest.mark.parametrize("there", [False, True])
def test_what_others_have_beside_it_stays(tmp_path: Path, there: bool) -> None:
    write(tmp_path, SIBLINGS)
    before = tree(tmp_path)
    if there:
        (tmp_path / "out").mkdir()
    mine = place(tmp_path / "out")
    mine.try_out()
    publish(mine)
    mine.clear()
    mine.withdraw()
    assert tree(tmp_path) == before


def put_meanwhile(folder: Path, what: str, elsewhere: Path) -> None:
    """What a user may do with the output folder while the job trains."""
    if folder.is_dir():
        folder.rename(elsewhere / "moved") if what != "a file in it" else None
    match what:
        case "a file in it":
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("precious")
        case "another folder":
            folder.mkdir()
            (folder / "config.json").write_text("mine")
        case "a file":
            folder.write_text("precious")
        case "a link to a full folder":
            (elsewhere / "full").mkdir()
            (elsewhere / "full" / "config.json").write_text("mine")
            folder.symlink_to(elsewhere / "full")
        case "a dangling link":
            folder.symlink_to("nowhere")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "what", ["a file in it", "another folder", "a file", "a link to a full folder", "a dangling link"]
)
@pytest.mark.parametrize("when", ["before it is begun", "before it is finished", "among the renames"])
def test_what_comes_to_be_there_meanwhile_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, what: str, when: str
) -> None:
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if there:
        folder.mkdir()
    mine = place(folder)
    mine.try_out()
    if when == "among the renames":
        check = Place.check

        def check_then_put(self: Place) -> None:
            check(self)
            put_meanwhile(folder, what, elsewhere)

        monkeypatch.setattr(Place, "check", check_then_put)
    elif when == "before it is begun":
        put_meanwhile(folder, what, elsewhere)
    with pytest.raises((UserError, OSError)) as caught:
        made = mine.begin()
        write(made, MODEL)
        if when == "before it is finished":
            put_meanwhile(folder, what, elsewhere)
        mine.finish(made, run="/runs/1", step=5)
    if isinstance(caught.value, UserError):
        assert caught.value.code in ("output-exists", "output-unwritable")
    else:  # it was moved away, with what was being made in it
        assert there and what != "a file in it"
    monkeypatch.undo()
    mine.clear()
    left = {name: text for name, text in tree(tmp_path).items() if text != "folder" and "moved/.offmate-" not in name}
    expected = {
        "a file in it": {"out/config.json": "precious"},
        "another folder": {"out/config.json": "mine"},
        "a file": {"out": "precious"},
        "a link to a full folder": {"out": f"-> {elsewhere}/full", "elsewhere/full/config.json": "mine"},
        "a dangling link": {"out": "-> nowhere"},
    }[what]
    assert left == expected


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("links", [True, False], ids=["a disk with links", "a disk without"])
def test_an_attempt_that_is_cut_short_anywhere_leaves_what_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, links: bool
) -> None:
    """Every call that changes the disk is the last one once."""

    class Cut(BaseException):
        pass

    folder = tmp_path / "out"
    if there:
        folder.mkdir()
    before = tree(tmp_path)
    calls, last = [], 0
    for owner, name in ((os, "link"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
        real = getattr(owner, name)

        def counted(*args: object, real: object = real, name: str = name, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) > last:
                raise Cut
            if name == "link" and not links:
                raise OSError(errno.EPERM, "Operation not permitted")
            return real(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    mine = place(folder)
    while True:
        calls.clear()
        try:
            publish(mine)
            break
        except Cut:
            last, cut_at = 10**6, last
            calls.clear()
            if mine.published() is None:
                mine.clear()
                assert tree(tmp_path) == before, f"cut after {cut_at} calls"
            else:
                mine.clear()
                mine.withdraw()
            if there:
                folder.mkdir(exist_ok=True)
            last = cut_at + 1
    assert last > (10 if there else 3)
    monkeypatch.undo()
    assert mine.published() == 5
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", "additional_chat_templates", MARK}


def test_a_model_that_is_withdrawn_leaves_what_the_user_put_beside_it(tmp_path: Path) -> None:
    mine = place(tmp_path / "out")
    publish(mine)
    (tmp_path / "out" / "notes.txt").write_text("good")
    place(tmp_path / "out").withdraw()
    assert mine.published() == 5
    mine.withdraw()
    assert tree(tmp_path / "out") == {"notes.txt": "good"}


@pytest.mark.parametrize(
    "mark", ["", "[]", "{}", '{"token": null, "step": 1, "files": []}', '{"run": "/runs/1", "step": 5}', "\x00"]
)
def test_a_mark_of_another_kind_is_nobodys(mark: str, tmp_path: Path) -> None:
    write(tmp_path / "out", {MARK: mark})
    assert refusal(tmp_path / "out") == ("output-exists", f"there is {MARK}")


def test_a_mark_that_names_files_elsewhere_has_them_kept(tmp_path: Path) -> None:
    mine = place(tmp_path / "out")
    publish(mine)
    (tmp_path / "thesis.txt").write_text("precious")
    text = (tmp_path / "out" / MARK).read_text("utf-8")
    evil = text.replace('"config.json"', f'"config.json", "../thesis.txt", "{tmp_path}/thesis.txt", 5')
    (tmp_path / "out" / MARK).write_text(evil)
    mine.withdraw()
    assert tree(tmp_path) == {"thesis.txt": "precious"}


def test_the_module_names_no_place_by_a_name_that_could_be_guessed() -> None:
    assert output_dir.new_token() != output_dir.new_token()
    assert len(output_dir.new_token()) == 32
