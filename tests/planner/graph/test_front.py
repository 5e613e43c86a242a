"""Fronts: the sets of values that are best to save, against all the sets there are."""

from __future__ import annotations

import itertools
import random

import networkx
import pytest
import torch
from torch import nn

from planner.graph import front as fronts
from planner.graph.block_code import Pair, make_pairs
from planner.graph.front import Saved, front, recipes_on_front
from planner.graph.joint import Joint, trace_block
from planner.graph.min_cut import Network
from planner.graph.recipes import RECIPES, recipe_of


class Gated(nn.Module):
    """A norm, a gated pair of matrix products, and the input added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def traced(rows: int) -> Joint:
    torch.manual_seed(0)
    return trace_block(Gated(16), (torch.randn(rows, 16, requires_grad=True),), {})


@pytest.mark.parametrize("rows", [4, 256])
def test_the_front_is_the_lower_hull_of_all_sets(rows: int) -> None:
    cutter = fronts.Cutter(traced(rows))
    nodes = sorted(set(cutter.savers.values()), key=str)
    assert 5 <= len(nodes) <= 12
    every = {
        cutter.saved(set(chosen)) for count in range(len(nodes) + 1) for chosen in itertools.combinations(nodes, count)
    }
    hull = fronts.hull(cutter)
    assert len(hull) >= 3
    assert set(hull) <= every
    for few, many in itertools.pairwise(hull):
        assert few.bytes < many.bytes
        assert few.again > many.again
        price = (few.again - many.again) / (many.bytes - few.bytes)
        line = few.again + price * few.bytes
        assert min(point.again + price * point.bytes for point in every) >= line * (1 - 1e-9)


def test_of_a_hull_those_stay_that_a_mixture_of_others_replaces_worst() -> None:
    points = [Saved(frozenset(), size, again) for size, again in ((0, 100), (1, 50), (2, 49), (3, 20), (4, 19), (9, 0))]
    assert [point.bytes for point in fronts._thinned(points)] == [0, 1, 3, 9]


def test_random_cuts_are_as_small_as_those_of_another_library() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        arcs = {
            (chance.randrange(12), chance.randrange(12)): chance.choice((0.5, 1.0, 3.0, float("inf")))
            for _ in range(chance.randint(15, 50))
        }
        graph, network = networkx.DiGraph(), Network(12)
        graph.add_nodes_from(range(12))
        for (a, b), room in arcs.items():
            if a != b:
                graph.add_edge(a, b, capacity=room)
                network.arc(a, b, room)
        try:
            size, _ = networkx.minimum_cut(graph, 0, 11)
        except networkx.NetworkXUnbounded:
            with pytest.raises(ValueError, match="no cut"):
                network.cut(0, 11)
            continue
        side = network.cut(0, 11)
        assert 0 in side
        assert 11 not in side
        assert sum(room for (a, b), room in arcs.items() if a in side and b not in side) == pytest.approx(size)


def test_every_option_of_the_front_has_the_gradients_of_keeping_everything() -> None:
    joint = traced(32)
    pairs = make_pairs(joint, (*RECIPES.values(), *recipes_on_front(joint)))
    assert {name.rpartition("-")[0] for name in pairs if name not in RECIPES} >= {"keep", "offload", "offload-all"}
    module, x, tangent = Gated(16), torch.randn(32, 16), torch.randn(32, 16)
    values = [*module.parameters(), x]

    def gradients(pair: Pair) -> list[torch.Tensor]:
        given = [v.detach() for v in values]
        results, states = pair.forward(list(given))
        sums: dict[str, torch.Tensor] = {}
        kept = [given[i] for i in pair.backward_primals]
        grads = pair.backward([*results[pair.n_outputs :], *kept, tangent], states, sums.__setitem__)
        return [results[0], *(sums[name] for name in sorted(sums)), *(g for g in grads if g is not None)]

    with torch.no_grad():
        expected = gradients(pairs["keep"])
        for pair in pairs.values():
            assert all(map(torch.equal, gradients(pair), expected))
    sizes = {pair.saved_bytes for pair in pairs.values()}
    assert len(sizes) >= 4


def test_a_recipe_is_made_of_its_text() -> None:
    joint = traced(8)
    for recipe in (*RECIPES.values(), *recipes_on_front(joint)):
        again = recipe_of(recipe.text)
        assert (again.saves, again.offloads, again.offloads_input) == (
            recipe.saves,
            recipe.offloads,
            recipe.offloads_input,
        )
    with pytest.raises(KeyError):
        recipe_of("send-all mm")


def test_a_block_whose_backward_reads_nothing_of_it_has_no_front() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert front(trace_block(Scaled(), (torch.randn(4, 4, requires_grad=True),), {})) == []
