"""Makes a job's model a reward model: a sequence classifier of transformers with one label, which gives a text one
number.

Its head, `score`, is computed for all tokens, and the number of the last one that is no padding is the text's reward.
A micro-batch of n pairs has 2n rows: the n chosen answers, each after its prompt, then the n rejected ones.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.models.preference_loss import mean_of_step, without_dropout
from planner.models.preferences import reward

HEAD = "score"
"""The name that the head has in transformers' classifiers of texts that were read from left to right."""

_items: ContextVar[tuple[Tensor | int | None] | None] = ContextVar("reward_items", default=None)
"""The number of pairs of the step (None: that of the micro-batch) while the model is being called with labels in this
thread; else None."""


def as_classifier(config: PreTrainedConfig, model: str) -> None:
    """Change the `config` of the language model `model` to that of a classifier with one label. It always names a
    padding token, as a classifier reads no two rows without one; loading replaces that by the tokenizer's. Raises
    UserError where transformers has no such classifier."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise _no_classifier(model, type(config).__name__)
    config.num_labels = 1
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0


def check_head(model: nn.Module, name: str) -> None:
    """Raise UserError if `model`, the classifier of the job's model `name`, does not score the last token: then it may
    be one that sees what follows a token, and needs to be told what is padding."""
    if not isinstance(getattr(model, HEAD, None), nn.Module):
        raise _no_classifier(name, type(model).__name__)


def name_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's padding token into the `config` of a classifier, which looks for the last token before the
    padding. Raises UserError for a tokenizer without one."""
    if tokenizer.pad_token_id is None:
        raise UserError(
            "The tokenizer has no token for padding, and none for the end of a text that could stand for it.",
            code="no-padding-token",
            exit_code=Exit.USAGE,
            hint="name one of its tokens: special_tokens: {pad_token: …}",
        )
    config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _no_classifier(model: str, its: str) -> UserError:
    return UserError(
        f"{model} cannot become a reward model: transformers has no classifier of its family that scores the last "
        "token.",
        code="no-reward-model",
        exit_code=Exit.USAGE,
        numbers=(its,),
        hint="use a model of another family, such as Llama, Qwen, Mistral, Gemma or Phi-3",
    )


def set_reward_loss(model: nn.Module, job: Job) -> None:
    """Let the sequence classifier `model`, perhaps wrapped by peft, give the job's loss and, as `figures` [2n] of its
    result, the rewards of the rows, when it is called with labels. It does not get these itself: many a family computes
    a loss of its own from them, and none needs them, as every row is scored. Dropout is switched off, as in TRL."""
    without_dropout(model)

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        items = kwargs.pop("num_items_in_batch", None)
        if kwargs.pop("labels", None) is not None:
            _items.set((items,))
        return args, kwargs

    def score(module: nn.Module, args: Any, result: Any) -> None:
        if (given := _items.get()) is None:
            return
        _items.set(None)
        rewards = result.logits.float().squeeze(-1)
        chosen, rejected = rewards.chunk(2)
        result.loss = mean_of_step(reward(chosen, rejected, job), len(chosen), *given)
        result.figures = rewards.detach()

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(score)
