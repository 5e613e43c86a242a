"""Graphs of blocks: detection, joint trace, cut by a recipe, generated code. Only here torch's private API is used."""

from planner.graph.joint import Joint, Result, trace_block
from planner.graph.pair import Pair, Sink
from planner.graph.recipes import RECIPES, Recipe
from planner.graph.signature import CallShape, flatten_call

__all__ = ["RECIPES", "CallShape", "Joint", "Pair", "Recipe", "Result", "Sink", "flatten_call", "trace_block"]
