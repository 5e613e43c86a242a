"""The wheel, as people install it: built from the repository, in an environment that has offmate from nowhere else."""

from __future__ import annotations

import email
import json
import os
import re
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import ROOT

PACKAGES = {"offmate", "planner", "worker", "offmated"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with what the test environment has: no network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("offmate-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel installed. Its dependencies, too large to install twice, come over a .pth file from
    the one the tests run in; paths named there do not bring their own .pth files, so the editable offmate stays out."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    (Path(site.stdout.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def home() -> Iterator[Path]:
    """A state folder with a short path: sockets have no room for pytest's."""
    with tempfile.TemporaryDirectory(prefix="offmate-") as folder:
        yield Path(folder)


def run(environment: Path, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A program of the environment, far from the repository."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OFFMATE", "VIRTUAL"))}
    return subprocess.run(
        [environment / "bin" / command[0], *command[1:]],
        cwd=home,
        env={**clean, "OFFMATE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_wheel_has_the_four_packages_and_the_migrations_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    code = {"planner/cpu/adamw.c", "planner/arrange/pack.c", "worker/runtime/arena.c", "worker/runtime/segments.h"}
    typed = {f"{package}/py.typed" for package in PACKAGES}
    assert {"offmated/migrations/env.py", *code, *typed} <= set(names)
    assert any(name.startswith("offmated/migrations/versions/") for name in names)


def test_the_code_comes_from_the_wheel(environment: Path, home: Path) -> None:
    code = "import offmate, planner, worker, offmated as d; print(*(m.__file__ for m in (offmate, planner, worker, d)))"
    files = run(environment, home, "python", "-c", code).stdout.split()
    assert len(files) == len(PACKAGES)
    for file in files:
        assert Path(file).is_relative_to(environment), file


def test_its_metadata_name_version_licence_and_authors(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "offmate contributors"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_version_is_one_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def test_the_names_for_python_come_from_the_wheel(environment: Path, home: Path) -> None:
    code = "from offmate import __version__, certify, plan, prepare; print(__version__)"
    done = run(environment, home, "python", "-c", code)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (done.returncode, done.stdout.strip()) == (0, version), done.stderr
    # Its process of its own is found, too.
    code = "import offmate\ntry: offmate.plan('none.yaml')\nexcept offmate.UserError as error: print(error.code)"
    done = run(environment, home, "python", "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "missing-file"), done.stderr


def test_an_installed_wheel_starts_a_daemon_and_migrates_its_database(environment: Path, home: Path) -> None:
    up = run(environment, home, "offmate", "up")
    assert up.returncode == 0, up.stderr
    try:
        with sqlite3.connect(home / "offmate.db") as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
        assert {"jobs", "plans", "measurements", "alembic_version"} <= tables
        status = run(environment, home, "offmate", "status", "--json")
        assert (status.returncode, json.loads(status.stdout)) == (0, [])
    finally:
        down = run(environment, home, "offmate", "down")
    assert down.returncode == 0, down.stderr
    assert run(environment, home, "offmate", "status").returncode == 69
