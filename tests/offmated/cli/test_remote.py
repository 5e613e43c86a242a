"""Commands for the daemon of another machine, over TCP; here the other machine is this one, with a state folder that
the commands do not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offmated.cli import main
from offmated.cli.remote import Remote
from planner.errors import Exit, UserError
from tests.support.daemons import HELD_AT, House, house


@pytest.fixture(scope="module")
def there() -> Iterator[House]:
    with house() as built:
        yield built


@pytest.fixture
def here(there: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine that knows the other's address and token."""
    address, token = there.client.page_url().split("#")
    monkeypatch.setenv("OFFMATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OFFMATE_HOST", address)
    monkeypatch.setenv("OFFMATE_TOKEN", token)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offmate(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def code(answer: Result) -> tuple[int, str]:
    """Exit code, and the error's."""
    return answer.exit_code, answer.output.rsplit("[", 1)[-1].strip(" ]\n")


def test_a_job_is_handed_in_followed_and_asked_for_from_elsewhere(there: House, here: Path) -> None:
    text = f"model: {there.home}/model\ndataset: {there.home}/text.jsonl\nmax_steps: 60\nrun_name: held\n"
    (here / "job.yaml").write_text(text)
    job = json.loads(offmate("submit", "job.yaml", "--json").output)["id"]
    there.wait_until_held(job)
    assert f"{HELD_AT}/60" in offmate("status").output
    there.release(job)
    answer = offmate("logs", "-f", str(job))
    assert answer.exit_code == 0 and "trainer here, from step 0" in answer.output
    there.wait_for(job, "done")
    assert json.loads(offmate("show", str(job), "--json").output)["state"] == "done"
    (here / "job.yaml").write_text(text.replace("run_name: held\n", "").replace("60", "3"))
    answer = offmate("run", "job.yaml")
    assert answer.exit_code == 0, answer.output
    assert not (here / "state").exists(), "nothing is started or kept here"


def test_what_is_for_this_machine_is_not_done_to_the_other(there: House, here: Path) -> None:
    for words in (("up",), ("down",), ("service", "install"), ("service", "uninstall")):
        assert code(offmate(*words)) == (Exit.USAGE, "not-remote")
    assert there.client.running()
    assert offmate("page").output.strip() == there.client.page_url()


def test_the_wrong_token_and_an_address_where_nobody_is_are_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMATE_TOKEN", "another")
    assert code(offmate("status")) == (Exit.USAGE, "no-token")
    monkeypatch.setenv("OFFMATE_HOST", "http://127.0.0.1:9")
    (here / "state" / "runs" / "1").mkdir(parents=True)
    (here / "state" / "runs" / "1" / "log.txt").write_text("a job of this machine")
    for words in (("status",), ("logs", "1"), ("metrics", "1")):
        answer = offmate(*words)
        assert code(answer) == (Exit.DAEMON_NOT_RUNNING, "daemon-silent")
        assert "of this machine" not in answer.output


@pytest.mark.parametrize(
    ("host", "token"),
    [
        ("box", "secret"),
        ("http://box:port", "secret"),
        ("ftp://box:1", "secret"),
        ("http://box:1/jobs", "secret"),
        ("http://me@box:1", "secret"),
        ("box:8477", ""),
        ("box:8477", "zwölf"),
        ("box:8477", "a\nb"),
        ("http://[::1", "secret"),
    ],
)
def test_what_is_no_address_or_no_token_is_said(host: str, token: str) -> None:
    with pytest.raises(UserError) as caught:
        Remote.from_environment({"OFFMATE_HOST": host, "OFFMATE_TOKEN": token})
    assert (caught.value.code, caught.value.exit_code) == ("bad-host", Exit.USAGE)
    assert not token or token not in str(caught.value)


def test_addresses_are_taken_as_people_write_them() -> None:
    for host in ("box:8477", "http://box:8477", "http://box:8477/"):
        remote = Remote.from_environment({"OFFMATE_HOST": host, "OFFMATE_TOKEN": "secret"})
        assert remote is not None and remote.url == "http://box:8477"
        assert "secret" not in repr(remote)
    assert Remote.from_environment({}) is None and Remote.from_environment({"OFFMATE_HOST": ""}) is None
