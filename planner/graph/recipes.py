"""Ways to treat the values a block computes in forward and reads again in backward, as data."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

_aten = torch.ops.aten
_MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`saves`: which results forward hands to backward ("all", "matmul" or "none"); the rest is computed again.
    `offloads`: what is saved travels to the host in between; `offloads_input`: so does the block's input, for backward
    reads it."""

    name: str
    saves: str
    offloads: bool = False
    offloads_input: bool = False

    def may_save(self, node: fx.Node) -> bool:
        """Whether the value of `node` may be among the saved tensors."""
        if self.saves == "matmul":
            source = node.args[0] if node.target is operator.getitem else node
            assert isinstance(source, fx.Node)
            return source.target in _MATMULS or "scaled_dot_product" in str(source.target)
        return self.saves == "all"


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

EAGER = Recipe(name="eager", saves="none")
"""How a block runs that cannot be traced: by its own code, computed again in backward."""
