"""Explains the errors of the Python interface."""

from __future__ import annotations

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    "Your own training loop": {
        "no-loss": (
            "The model's forward returns no loss.",
            "Return the loss as a scalar, or an object with `loss`.",
        ),
        "autocast-outside": (
            "The engine was called inside `torch.autocast`.",
            "Let the model's forward enter autocast itself, as the hint shows.",
        ),
        "batch-not-usable": (
            "The batch does not fit the plan.",
            "Pass batches of the kind with which the engine was prepared.",
        ),
        "model-changed": (
            "The model was changed after `prepare()`.",
            "Do what the hint says, or prepare the model again.",
        ),
        "weights-in-engine": (
            "The engine has the model's weights, and the model was called or saved directly.",
            "Call the engine. `restore()` gives the weights back to the model.",
        ),
        "weights-torn": (
            "An error ended a step in the middle of its updates.",
            "Load a checkpoint. `restore()` gives back weights of which some have been updated and others have not.",
        ),
        "engine-closed": (
            "The engine has ended.",
            "Prepare the model again.",
        ),
        "no-checkpoint": (
            "There is no checkpoint in the folder.",
            "Give a folder that `save()` wrote.",
        ),
        "compile-not-usable": (
            "`compile` is neither `auto` nor `off`.",
            "Use one of the two.",
        ),
        "optimizer-not-usable": (
            "The optimizer, or one of its options, is not supported.",
            "Do what the hint says.",
        ),
        "generation-not-usable": (
            "The model has no `generate()`.",
            "Use a transformers model with a language-modelling head (`…ForCausalLM`).",
        ),
    },
}
