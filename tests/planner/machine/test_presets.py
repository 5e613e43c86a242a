"""Machines by name."""

from __future__ import annotations

import pytest

from planner.errors import UserError
from planner.machine.cards import CARDS, HOSTS
from planner.machine.presets import (
    LINKS,
    computes_bf16,
    needed_cpu_memory,
    preset,
    smallest_card,
    usable_cpu_bytes,
    usable_gpu_bytes,
)

GIB = 2**30


@pytest.mark.parametrize("name", CARDS)
def test_every_card_makes_a_machine_with_a_link_that_exists(name: str) -> None:
    card, machine = CARDS[name], preset(name, bf16=True)
    assert 0 < machine.gpu_bytes < card.memory_bytes
    assert 0.5 * LINKS[card.link] < machine.h2d_bytes_per_s < LINKS[card.link]
    host = HOSTS[card.host]
    assert machine.cpu_update_parameters_per_s * 28 < machine.cpu_memory_bytes_per_s < host.bytes_per_s


def test_links_have_the_rates_of_their_standard() -> None:
    assert LINKS["pcie4x16"] == pytest.approx(31.5e9, rel=1e-3)
    assert LINKS["pcie3x8"] == pytest.approx(7.88e9, rel=1e-3)


def test_fp32_computes_at_the_rate_of_fp32() -> None:
    bf16, fp32 = preset("rtx3060", bf16=True), preset("rtx3060", bf16=False)
    assert bf16.flops_per_s == pytest.approx(0.8 * 25.48e12)
    assert fp32.flops_per_s == pytest.approx(0.7 * 12.74e12)


def test_a_card_without_bf16_computes_it_at_the_rate_of_fp32() -> None:
    bf16, fp32 = preset("rtx2080ti", bf16=True), preset("rtx2080ti", bf16=False)
    assert bf16.flops_per_s == fp32.flops_per_s == pytest.approx(0.7 * 13.45e12)
    assert not computes_bf16("RTX 2080 Ti")
    assert computes_bf16("RTX 3060") and computes_bf16("my-machine.yaml")


@pytest.mark.parametrize(
    ("gib", "card"),
    [(7, "rtx5060"), (8, "rtx5070"), (15, "rtx5060ti"), (17, "rtx4090"), (30, "rtx5090"), (40, "rtx6000ada"),
     (48, "a100"), (90, "rtxpro6000"), (170, "b200"), (180, None)],
)  # fmt: skip
def test_the_usual_card_with_enough_memory_is_named(gib: int, card: str | None) -> None:
    assert smallest_card(gib * GIB) == card


def test_memory_and_link_of_the_host_can_be_said() -> None:
    machine = preset("rtx3060", bf16=True, cpu_memory_bytes=64 * GIB, link="PCIe 3.0 x16")
    assert machine.cpu_bytes == usable_cpu_bytes(64 * GIB)
    assert machine.h2d_bytes_per_s == pytest.approx(0.8 * 15.75e9, rel=1e-3)
    assert preset("rtx3060", bf16=True, link="10GB").d2h_bytes_per_s == 10e9


@pytest.mark.parametrize("size", [0, 32, 500 * 10**6, 2**30])
def test_memory_of_which_nothing_is_left_is_refused(size: int) -> None:
    with pytest.raises(UserError, match="leaves no memory for a job") as found:
        preset("rtx3060", bf16=True, cpu_memory_bytes=size)
    assert "--cpu-memory 32GiB" in str(found.value.hint)


def test_some_memory_is_left_to_the_system() -> None:
    assert 11 * GIB < usable_gpu_bytes(12 * GIB) < 11.5 * GIB
    assert usable_cpu_bytes(8 * GIB) == 7 * GIB
    assert needed_cpu_memory(usable_cpu_bytes(128 * GIB)) == 128 * GIB
    assert needed_cpu_memory(usable_cpu_bytes(128 * GIB) + 1) == 192 * GIB
    assert needed_cpu_memory(1300 * GIB) == 1536 * GIB


@pytest.mark.parametrize(("link", "near"), [("pcie4x1", "pcie4x16"), ("0GB", "")])
def test_a_link_that_is_not_known_is_answered_with_those_that_are(link: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        preset("rtx3060", bf16=True, link=link)
    assert (caught.value.code, caught.value.exit_code) == ("unknown-link", 2)
    assert caught.value.numbers[0].startswith("known are pcie3x4, ")
    assert near in caught.value.hint
