"""Finds the blocks of a model (the parts that run as one unit, as a decoder layer), traces each block's forward and
backward together, cuts the trace in two, and generates code for both.

Other packages import only the names listed here. This package imports `planner.cpu` for the meter of bytes.
"""

from planner.graph.block_code import Pair, make_pairs
from planner.graph.branch_numbers import depends_on_data
from planner.graph.call import BlockCall, items_for, loss_of, refuse_autocast, run_slice, value_of
from planner.graph.chunks import ChunkedHead, check_chunked, chunk_rows, loss_only
from planner.graph.detect import BlockNames, find_blocks
from planner.graph.eager import EagerPair
from planner.graph.fake import keep_device_guard
from planner.graph.front import recipes_on_front
from planner.graph.inductor import CannotCompileError, CompiledPair, why_not_compilable
from planner.graph.interface import BlockCode, Sink
from planner.graph.joint import Joint, trace_block
from planner.graph.label import label
from planner.graph.lifetimes import with_areas_of
from planner.graph.loss_by_rows import by_rows, logits_by_rows
from planner.graph.own_code import tried_on_cpu
from planner.graph.recipes import EAGER, RECIPES, Recipe, recipe_of
from planner.graph.result import Result
from planner.graph.scratch import ask_allocator, forget_workspaces, let_go, trials
from planner.graph.signature import CallShape, flatten_call, mappings_of
from planner.graph.unroll import take_turns

__all__ = [
    "EAGER",
    "RECIPES",
    "BlockCall",
    "BlockCode",
    "BlockNames",
    "CallShape",
    "CannotCompileError",
    "ChunkedHead",
    "CompiledPair",
    "EagerPair",
    "Joint",
    "Pair",
    "Recipe",
    "Result",
    "Sink",
    "ask_allocator",
    "by_rows",
    "check_chunked",
    "chunk_rows",
    "depends_on_data",
    "find_blocks",
    "flatten_call",
    "forget_workspaces",
    "items_for",
    "keep_device_guard",
    "label",
    "let_go",
    "logits_by_rows",
    "loss_of",
    "loss_only",
    "make_pairs",
    "mappings_of",
    "recipe_of",
    "recipes_on_front",
    "refuse_autocast",
    "run_slice",
    "take_turns",
    "trace_block",
    "value_of",
    "trials",
    "tried_on_cpu",
    "why_not_compilable",
    "with_areas_of",
]
