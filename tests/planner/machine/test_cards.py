"""The table of cards: makers' figures, checked against each other."""

from __future__ import annotations

import pytest

from planner.machine.cards import CARDS, HOSTS, USUAL
from planner.machine.presets import LINKS

GIB = 2**30
LARGEST_CHIPS = {name for name in CARDS if name.partition("-")[0] in ("a100", "a30", "h100", "h200", "b200")}


@pytest.mark.parametrize("name", CARDS)
def test_a_cards_figures_agree_with_each_other(name: str) -> None:
    card = CARDS[name]
    assert card.fp32_flops_per_s == pytest.approx(2 * card.cores * card.clock_hz, rel=1e-3)
    assert card.memory_bytes_per_s == pytest.approx(card.bus_bits * card.bits_per_s / 8, rel=1e-3)
    assert card.memory_bytes >= 8 * GIB
    assert card.link in LINKS
    assert card.host in HOSTS


@pytest.mark.parametrize("name", CARDS)
def test_the_rate_of_bf16_is_a_multiple_of_fp32_that_the_architecture_has(name: str) -> None:
    card = CARDS[name]
    is_turing = card.link == "pcie3x16"
    assert (card.bf16_flops_per_s is None) == is_turing
    if card.bf16_flops_per_s is None:
        return
    ratio = card.bf16_flops_per_s / card.fp32_flops_per_s
    if card.name.startswith("GeForce"):
        assert ratio == pytest.approx(2, rel=1e-3)
    elif name in LARGEST_CHIPS:
        assert 13 < ratio < 31
    elif name == "l40":  # its data sheet has half of the L40S's
        assert ratio == pytest.approx(2, rel=1e-3)
    else:
        assert ratio == pytest.approx(4, rel=0.015)


def test_cards_of_which_plans_are_kept_have_the_figures_they_had() -> None:
    figures = {
        name: (
            CARDS[name].memory_bytes // GIB,
            CARDS[name].memory_bytes_per_s,
            CARDS[name].fp32_flops_per_s,
            CARDS[name].bf16_flops_per_s,
            CARDS[name].link,
        )
        for name in ("rtx3060", "rtx3090", "rtx4060ti", "rtx4090", "a100", "h200")
    }
    assert figures == {
        "rtx3060": (12, 360e9, 12.74e12, 25.48e12, "pcie4x16"),
        "rtx3090": (24, 936.2e9, 35.58e12, 71.16e12, "pcie4x16"),
        "rtx4060ti": (16, 288e9, 22.06e12, 44.12e12, "pcie4x8"),
        "rtx4090": (24, 1008e9, 82.58e12, 165.16e12, "pcie4x16"),
        "a100": (80, 2039e9, 19.5e12, 312e12, "pcie4x16"),
        "h200": (140, 4800e9, 66.9 * 1e12, 989.4e12, "pcie5x16"),
    }


def test_the_usual_cards_go_from_little_memory_to_much() -> None:
    sizes = [CARDS[name].memory_bytes for name in USUAL]
    assert sizes == sorted(set(sizes))
