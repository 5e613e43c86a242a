"""What deploy/ says of this repository is so. Docker itself is not run here."""

from __future__ import annotations

import re
import tomllib

import yaml

from offmated.api.addresses import TcpAddress
from offmated.cli import main
from offmated.config import KEYS
from tests import ROOT

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
