"""Machines from YAML and JSON files: words, fields, defaults, and what is said of a file that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.codec import to_json
from planner.commands.chain_files import NO_LIMIT_BYTES
from planner.commands.machine_file import load_hardware
from planner.errors import UserError
from planner.machine.hardware import Hardware
from planner.machine.presets import preset, usable_cpu_bytes, usable_gpu_bytes, with_drives
from tests.support.chains import HARDWARE

GIB = 2**30


def from_json_file(folder: Path, data: object) -> Hardware:
    file = folder / "machine.json"
    file.write_text(json.dumps(data))
    return load_hardware(file, bf16=True)


def from_yaml_file(folder: Path, text: str, *, bf16: bool = True) -> Hardware:
    file = folder / "my-box.yaml"
    file.write_text(text)
    return load_hardware(file, bf16=bf16)


def refusal(folder: Path, text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        from_yaml_file(folder, text)
    assert (caught.value.exit_code, caught.value.code) == (2, "bad-file")
    assert caught.value.what == f"Cannot use {folder / 'my-box.yaml'}."
    return caught.value


def test_the_json_form_of_a_machine_is_read_as_it_is(tmp_path: Path) -> None:
    assert from_json_file(tmp_path, to_json(HARDWARE)) == HARDWARE
    assert from_yaml_file(tmp_path, json.dumps(to_json(HARDWARE))) == HARDWARE


def test_a_machine_needs_its_link_and_one_rate_of_the_host(tmp_path: Path) -> None:
    found = from_json_file(tmp_path, {"h2d_bytes_per_s": 1e9, "cpu_update_parameters_per_s": 1e8})
    assert (found.name, found.d2h_bytes_per_s, found.gpu_bytes) == ("machine", 1e9, NO_LIMIT_BYTES)
    assert found.cpu_memory_bytes_per_s > 2e9 + 28e8, "no limit: more than everybody together can ask for"
    rates = {"h2d_bytes_per_s": 1, "cpu_memory_bytes_per_s": 56}
    assert from_json_file(tmp_path, rates).cpu_update_parameters_per_s == 2.0
    with pytest.raises(UserError, match="h2d_bytes_per_s: missing"):
        from_json_file(tmp_path, {"cpu_memory_bytes_per_s": 56})
    with pytest.raises(UserError, match="cpu_update_parameters_per_s: missing, and so is"):
        from_json_file(tmp_path, {"h2d_bytes_per_s": 1})
    with pytest.raises(UserError, match="d2h_bytes_per_s is 0; a rate is more than zero"):
        from_json_file(tmp_path, rates | {"d2h_bytes_per_s": 0})


def test_a_cards_name_alone_is_that_card_in_its_usual_machine(tmp_path: Path) -> None:
    for bf16 in (True, False):
        known = replace(preset("rtx4090", bf16=bf16), name="my-box")
        assert from_yaml_file(tmp_path, "card: RTX 4090\n", bf16=bf16) == known
        assert from_yaml_file(tmp_path, "card: 4090\n", bf16=bf16) == known


def test_words_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    text = """
        name: my box
        card: rtx4090
        gpu_memory: 48GiB
        cpu_memory: 96 GiB
        link: pcie4x8
        drive: 2xpcie4
    """
    known = preset("rtx4090", bf16=True, cpu_memory_bytes=96 * GIB, link="pcie4x8")
    expected = replace(with_drives(known, "2xpcie4"), name="my box", gpu_bytes=usable_gpu_bytes(48 * GIB))
    assert from_yaml_file(tmp_path, text) == expected


def test_words_need_no_card(tmp_path: Path) -> None:
    text = "gpu_memory: 16GiB\ncpu_memory: 32GiB\nlink: 12GB\ncpu_memory_bytes_per_s: 4e10\n"
    found = from_yaml_file(tmp_path, text)
    assert (found.gpu_bytes, found.cpu_bytes) == (usable_gpu_bytes(16 * GIB), usable_cpu_bytes(32 * GIB))
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.cpu_memory_bytes_per_s) == (12e9, 12e9, 4e10)


def test_a_field_stands_above_the_words_and_what_follows_from_it_above_the_card(tmp_path: Path) -> None:
    text = """
        card: rtx4090
        gpu_memory: 24GiB
        gpu_bytes: 20_000_000_000
        h2d_bytes_per_s: 10e9
        cpu_memory_bytes_per_s: 2.8e10
        flops_per_s: 1e14
    """
    found = from_yaml_file(tmp_path, text)
    assert (found.gpu_bytes, found.flops_per_s) == (20 * 10**9, 1e14)
    assert found.d2h_bytes_per_s == 10e9
    assert found.cpu_update_parameters_per_s == 1e9
    assert found.launch_s == preset("rtx4090", bf16=True).launch_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("card: rtx4091", "$.card: There is no hardware called rtx4091."),
        ("card: [rtx4090]", "$.card: expected a text, got ['rtx4090']"),
        (
            "card: rtx4090\ngpu_memory: 24",
            "$.gpu_memory: 24 leaves no memory for a job; give the whole memory with its",
        ),
        ("card: rtx4090\ngpu_memory: lots", '$.gpu_memory: not a size: "lots" (write it like 10GiB or 500MB)'),
        ("card: rtx4090\ncpu_memory: 512MiB", "$.cpu_memory: 512MiB leaves no memory for a job"),
        ("card: rtx4090\nlink: pcie4x3", "$.link: There is no link called pcie4x3."),
        ("card: rtx4090\ndrive: sata", "$.drive: There is no drive called sata."),
        ("card: rtx4090\ncpu_mem: 64GiB", "$.cpu_mem: unknown field; did you mean cpu_memory?"),
        ("card: rtx4090\nram: 1:30", "line 2: ram: YAML reads 1:30 as 90"),
        ("card: rtx4090\nlaunch_s: -1", "$.launch_s is -1; it must be zero or more"),
        ("card: rtx4090\ncard: rtx3090", "my-box.yaml: card is given twice, first in line 1 (line 2)"),
        ("card: [rtx4090", "my-box.yaml: "),
        ("rtx4090", "my-box.yaml is not a mapping of keys to values."),
        ("link: pcie4x8", "$.cpu_update_parameters_per_s: missing"),
    ],
)
def test_an_error_names_the_file_and_the_key(text: str, said: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text).numbers[0].startswith(said)


def test_a_card_that_is_not_known_is_answered_with_the_nearest(tmp_path: Path) -> None:
    assert refusal(tmp_path, "card: rtx4091").hint.startswith("did you mean rtx4090 (24 GB)")


def test_a_file_that_is_not_there_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_hardware(tmp_path / "gone.yaml", bf16=True)
    assert str(caught.value).splitlines()[:2] == [
        f"Cannot use {tmp_path / 'gone.yaml'}.",
        "  No such file or directory",
    ]
