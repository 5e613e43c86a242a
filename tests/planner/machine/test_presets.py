"""Machines by name."""

from __future__ import annotations

import pytest

from planner.errors import UserError
from planner.machine.presets import CARDS, LINKS, needed_cpu_memory, preset, usable_cpu_bytes, usable_gpu_bytes

GIB = 2**30


def test_every_card_makes_a_machine_with_a_link_that_exists() -> None:
    names = "rtx3060 rtx3070 rtx3090 rtx4060 rtx4060ti rtx4070tisuper rtx4080 rtx4090 rtx5060ti rtx5090 a100 h100 h200"
    assert list(CARDS) == names.split()
    for name, card in CARDS.items():
        machine = preset(name, bf16=True)
        assert card.link in LINKS
        assert 0 < machine.gpu_bytes < card.memory_bytes
        assert 0.5 * LINKS[card.link] < machine.h2d_bytes_per_s < LINKS[card.link]
        # What a card could do at best, from the other figures of its maker: bf16 is 2 to 16 times fp32.
        assert 2 <= card.bf16_flops_per_s / card.fp32_flops_per_s <= 16
        assert machine.cpu_update_parameters_per_s * 28 < machine.cpu_memory_bytes_per_s < card.host_bytes_per_s


def test_figures_are_those_of_the_makers() -> None:
    card = CARDS["rtx4090"]
    assert (card.memory_bytes, card.memory_bytes_per_s, card.bf16_flops_per_s) == (24 * GIB, 1008e9, 165.16e12)
    assert LINKS["pcie4x16"] == pytest.approx(31.5e9, rel=1e-3)
    assert LINKS["pcie3x8"] == pytest.approx(7.88e9, rel=1e-3)


def test_names_are_read_as_people_write_them() -> None:
    machine = preset("rtx4060ti", bf16=True)
    for name in ("RTX 4060 Ti", "GeForce RTX-4060-Ti", "rtx_4060_ti"):
        assert preset(name, bf16=True) == machine


def test_fp32_computes_at_the_rate_of_fp32() -> None:
    bf16, fp32 = preset("rtx3060", bf16=True), preset("rtx3060", bf16=False)
    assert bf16.flops_per_s == pytest.approx(0.8 * 25.48e12)
    assert fp32.flops_per_s == pytest.approx(0.7 * 12.74e12)


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


@pytest.mark.parametrize(
    ("name", "link", "code", "near"),
    [
        ("rtx3061", None, "unknown-hardware", "rtx3060"),
        ("RTX 4070 Ti Sup", None, "unknown-hardware", "rtx4070tisuper"),
        ("rtx3060", "pcie4x1", "unknown-link", "pcie4x16"),
        ("rtx3060", "0GB", "unknown-link", ""),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_those_that_are(
    name: str, link: str | None, code: str, near: str
) -> None:
    with pytest.raises(UserError) as caught:
        preset(name, bf16=True, link=link)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert caught.value.numbers[0].startswith("known are ")
    assert near in caught.value.hint
