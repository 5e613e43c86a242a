"""What deploy/ says of this repository is so, and its programs work. Docker itself is not run here."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from offmated.api.addresses import TcpAddress
from offmated.cli import main
from offmated.config import KEYS
from tests import ROOT
from tests.support.daemons import until

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["offmate"]


def test_the_image_is_made_of_files_that_are_there_and_of_all_packages() -> None:
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied), copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    metadata = project["project"]
    assert {*wheel["packages"], *wheel["force-include"], metadata["readme"], *metadata["license-files"]} <= copied
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', DOCKERFILE)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


def test_its_commands_are_offmates_and_its_folders_those_of_the_volumes() -> None:
    commands = re.findall(r'\["offmate", (.+)\]', DOCKERFILE)
    for command in commands:
        name, *options = re.findall(r'"([^"]+)"', command)
        assert {*options} <= {option for parameter in main.commands[name].params for option in parameter.opts}
    assert len(commands) == 2
    mounted = {volume.split(":")[1] for volume in SERVICE["volumes"]}
    assert set(re.findall(r"(?:OFFMATE_HOME|HF_HOME)=(\S+)", DOCKERFILE)) <= mounted


def test_the_service_builds_this_image_and_its_settings_are_known() -> None:
    build = SERVICE["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).exists()
    names = SERVICE["environment"].keys()
    assert {name for name in names if name.startswith("OFFMATE_")} <= set(KEYS.values())
    listens = TcpAddress.parse(SERVICE["environment"]["OFFMATE_LISTEN"])
    (port,) = SERVICE["ports"]
    assert port == f"127.0.0.1:{listens.port}:{listens.port}", "of the host nobody but this machine connects"


INSTALL = runpy.run_path(str(ROOT / "deploy" / "install.py"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Collecting torch<2.14,>=2.11 (from offmate==0.2.0)", "choosing torch<2.14,>=2.11"),
        ("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (196.1 MB)", "fetching torch-2.13.0 (196.1 MB)"),
        ("  Downloading https://host/whl/numpy-2.4.6-cp311-cp311-x.whl (17 MB)", "fetching numpy-2.4.6 (17 MB)"),
        ("  Using cached rich-14.0.0-py3-none-any.whl (310 kB)", "taking rich-14.0.0 (310 kB) from pip's cache"),
        ("  Getting requirements to build editable: started", "preparing the project"),
        ("Installing collected packages: a, b, c", "writing packages, 3 in all"),
        ("Requirement already satisfied: pip", None),
    ],
)
def test_lines_of_pip_are_told_in_words(line: str, words: str | None) -> None:
    assert INSTALL["in_words"](line) == words


@pytest.mark.parametrize(("device", "takes_cpu_build"), [("nvidiactl", False), ("dxg", False), ("null", True)])
def test_pytorchs_cpu_build_is_taken_only_where_neither_linux_nor_wsl2_has_a_gpu(
    device: str, takes_cpu_build: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tuple(str(tmp_path / Path(path).name) for path in INSTALL["GPU_DEVICES"])
    (tmp_path / device).touch()
    monkeypatch.setitem(INSTALL["cpu_index"].__globals__, "GPU_DEVICES", devices)  # a test makes no files in /dev
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO())
    assert INSTALL["cpu_index"]() == (["--index-url", INSTALL["TORCH_CPU"]] if takes_cpu_build else [])


def test_the_installation_tells_what_is_done_and_for_how_long(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(INSTALL["EVERY_S"], False, 0.02)
    names, tell = INSTALL["run_pip"].__globals__, INSTALL["tell"]

    def told(text: str, terminal: bool) -> None:
        tell(text, terminal)
        for words in ("asking", "writing"):
            if words in text:
                (tmp_path / words).touch()

    monkeypatch.setitem(names, "tell", told)
    code = """if True:
        import pathlib, sys, time
        def wait_for(name):
            until = time.monotonic() + 60
            while not pathlib.Path(sys.argv[1], name).exists() and time.monotonic() < until:
                time.sleep(0.01)
        wait_for("asking")
        print("Installing collected packages: a, b")
        wait_for("writing")
    """
    INSTALL["run_pip"]([sys.executable, "-c", code, str(tmp_path)], "packages")
    lines = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"packages: asking the package index, \d+ s", lines[0])
    assert any(re.fullmatch(r"packages: writing packages, 2 in all, \d+ s", line) for line in lines[1:-1])
    assert re.fullmatch(r"packages: done in \d+ s", lines[-1])


def test_an_installation_that_fails_shows_what_pip_said_and_has_its_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        INSTALL["run_pip"]([sys.executable, "-c", "print('ERROR: no such package'); exit(3)"], "packages")
    assert left.value.code == 3
    assert "ERROR: no such package" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_installation_that_is_stopped_ends_pip_and_says_so_in_one_line(number: int, tmp_path: Path) -> None:
    noted, programs = tmp_path / "pid", tmp_path / "bin"
    programs.mkdir()
    (programs / "pip").touch()  # the environment is there already
    # A process that only waits stands for pip.
    (programs / "python").write_text(f"#!/bin/sh\necho $$ >{noted}.part && mv {noted}.part {noted}\nexec sleep 60\n")
    (programs / "python").chmod(0o755)
    nowhere = {"https_proxy": "http://127.0.0.1:9", "no_proxy": ""}  # PyTorch's index does not answer
    install = subprocess.Popen(
        [sys.executable, ROOT / "deploy" / "install.py", tmp_path],
        env={**os.environ, **nowhere},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(noted.exists, "pip runs")
        install.send_signal(number)
        _, errors = install.communicate(timeout=30)
    finally:
        install.kill()
        install.wait()
        pip = int(noted.read_text())
        with suppress(ProcessLookupError):
            os.kill(pip, 0)
            os.kill(pip, signal.SIGKILL)
            pytest.fail("pip goes on")
    assert (install.returncode, errors) == (128 + number, "The installation is stopped.\n")


def test_the_trial_of_the_image_is_a_shell_script_and_says_that_no_docker_engine_answers(tmp_path: Path) -> None:
    script = ROOT / "deploy" / "try_image.sh"
    assert subprocess.run(["sh", "-n", script]).returncode == 0
    # A client without an engine stands for docker: an engine that is here is not to build anything.
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh", script], env={"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.splitlines()[0].startswith("No Docker engine answers")
    assert done.stderr.splitlines()[1].strip() == "Cannot connect to the Docker daemon"
