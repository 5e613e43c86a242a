"""Names of cards, as people and drivers write them."""

from __future__ import annotations

import pytest

from planner.errors import UserError
from planner.machine.card_names import card_named, find_card
from planner.machine.cards import CARDS


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_found_by_its_short_name_and_by_its_full_name(name: str) -> None:
    assert find_card(name) == name
    assert find_card(CARDS[name].name) == name


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("rtx_4090", "rtx4090"),
        ("RTX 4090 24GB", "rtx4090"),
        ("4070 ti super", "rtx4070tisuper"),
        ("rtx4060ti 16gb", "rtx4060ti"),
        ("4060ti8", "rtx4060ti-8gb"),
        ("RTX 3060", "rtx3060"),
        ("3060 8 GB", "rtx3060-8gb"),
        ("3080", "rtx3080"),
        ("3080m", "rtx3080-laptop"),
        ("3070 ti mobile", "rtx3070ti-laptop"),
        ("RTX A6000", "a6000"),
        ("6000 ada", "rtx6000ada"),
        ("a100-80", "a100"),
        ("a100 40GB", "a100-40gb"),
        ("h100 pcie", "h100-pcie"),
        ("H200 141GB", "h200"),
    ],
)
def test_names_are_read_as_people_write_them(written: str, card: str) -> None:
    assert find_card(written) == card


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU 16 GB", "rtx3080-laptop-16gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000-maxq"),
        ("Quadro RTX 6000", "quadrortx6000"),
        ("NVIDIA TITAN RTX", "titanrtx"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
    ],
)
def test_names_are_read_as_drivers_write_them(written: str, card: str) -> None:
    assert find_card(written) == card


@pytest.mark.parametrize(
    "written", ["RTX 6000", "RTX 2060", "RTX 4090 48GB", "4090 ti", "RTX PRO 6000 Server", "gpu", ""]
)
def test_a_name_that_is_no_card_or_several_is_not_guessed_at(written: str) -> None:
    assert find_card(written) is None


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("rtx3081", "did you mean rtx3080 (10 GB), rtx3080-12gb (12 GB) or rtx3080ti (12 GB)? "),
        ("rtx3061", "did you mean rtx3060 (12 GB) or rtx3060ti (8 GB)? "),
        ("rtx4090 48gb", "did you mean rtx4090 (24 GB), rtx4090d (24 GB) or rtx4090-laptop (16 GB)? "),
        ("RTX 6000", "did you mean a6000 (48 GB), rtx6000ada (48 GB) or rtxpro6000 (96 GB)? "),
        ("7900 xtx", ""),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_the_nearest_and_where_all_are(written: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        card_named(written)
    said = caught.value
    assert (said.what, said.code, said.exit_code) == (f"There is no hardware called {written}.", "unknown-hardware", 2)
    assert said.hint == f"{near}offmate plan --hardware list shows all cards; a file describes any other machine"
