"""The errors that are raised where an engine, or the model that it has taken over, cannot be used."""

from __future__ import annotations

from planner.errors import Exit, UserError


def model_in_engine() -> UserError:
    """The error where the model is called itself while an engine has its weights."""
    return UserError(
        "The model was called while an engine has its weights.", code="weights-in-engine", exit_code=Exit.USAGE,
        hint="call the engine: step, evaluate, generate; or restore() the model before",
    )  # fmt: skip


def weights_torn() -> UserError:
    """The error where some weights are those before a step, and some those after it."""
    return UserError(
        "An error ended a step in the middle of its updates.", code="weights-torn",
        hint="load a checkpoint; restore() gives the weights as they are: some before the step, some after",
    )  # fmt: skip


def engine_closed() -> UserError:
    """The error where the engine's threads have ended."""
    return UserError(
        "The engine has ended.", code="engine-closed", exit_code=Exit.USAGE, hint="prepare() the model again"
    )
