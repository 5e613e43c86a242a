"""Recipes: which of the values that a block computes in forward are saved for backward, and which saved values go to
host memory in between."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

_aten = torch.ops.aten
_MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_SAVES = ("all", "matmul", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which values a block's forward saves for its backward. `saves`: "all", "matmul", "none", or the names of nodes
    of the traced graph, separated by spaces. All other values are computed again in backward. `offloads`: saved values
    are moved to the host between forward and backward. `offloads_input`: the block's input, which backward reads, is
    moved there too."""

    name: str
    saves: str
    offloads: bool = False
    offloads_input: bool = False

    def may_save(self, node: fx.Node) -> bool:
        """Whether the recipe allows to save the value of `node`, a node of the traced graph."""
        if self.saves == "matmul":
            source = node.args[0] if node.target is operator.getitem else node
            assert isinstance(source, fx.Node)
            return source.target in _MATMULS or "scaled_dot_product" in str(source.target)
        return self.saves == "all" or node.name in self.saves.split(" ")

    def not_in(self, graph: fx.Graph) -> list[str]:
        """The node names in `saves` that no node of `graph` has."""
        names = {node.name for node in graph.nodes}
        return [] if self.saves in _SAVES else [name for name in self.saves.split(" ") if name not in names]

    @property
    def text(self) -> str:
        """The recipe as text: `recipe_of(recipe.text, recipe.name)` gives it back."""
        return self.name if self.name in (*RECIPES, EAGER.name) else f"{self.name.rpartition('-')[0]} {self.saves}"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="keep", saves="all"),
        Recipe(name="recompute", saves="none"),
        Recipe(name="offload", saves="matmul", offloads=True),
        Recipe(name="offload-input", saves="none", offloads_input=True),
        Recipe(name="offload-all", saves="matmul", offloads=True, offloads_input=True),
    )
}


def recipes_saving(number: int, saves: str) -> Iterator[Recipe]:
    """The recipes "keep", "offload", "offload-input" and "offload-all" changed to save `saves`, and named with
    `number` at the end ("keep-2"). A recipe that equals one of RECIPES in all but its name is left out."""
    named = {replace(recipe, name="") for recipe in RECIPES.values()}
    for word in ("keep", "offload", "offload-input", "offload-all"):
        recipe = replace(RECIPES[word], name=f"{word}-{number}", saves=saves)
        if replace(recipe, name="") not in named:
            yield recipe


def recipe_of(text: str, name: str = "") -> Recipe:
    """The recipe that `text` describes, under the name `name` ("": the name in `text`). `text`: the name of one of
    RECIPES, perhaps followed by a space and the names of the nodes to save instead. Raises KeyError for an unknown
    name."""
    word, _, nodes = text.partition(" ")
    return replace(RECIPES[word], name=name or word, saves=nodes or RECIPES[word].saves)


EAGER = Recipe(name="eager", saves="none")
"""How a block runs that cannot be traced: by its own code. Forward saves nothing, and backward runs forward again."""
