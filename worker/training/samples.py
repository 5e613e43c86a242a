"""Tokenizes the job's sample prompts, which a run makes its model continue at certain steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.keys.source import shown
from planner.models.encoder_decoder import has_pairs
from worker.data.chat import ChatTemplate
from worker.training.ends import ends_of_model
from worker.training.model import check_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """A job's sample prompts, each to be continued by the model by at most `new_tokens` tokens. `texts`: the part of
    each prompt that people see, which is all of it or its last message. `ends`: the ids of the tokens at which the
    model stops."""

    texts: tuple[str, ...]
    tokens: tuple[list[int], ...]
    new_tokens: int
    pad: int
    ends: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, job: Job, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> Samples | None:
        """Read and tokenize the sample prompts of `job`; None when it has none. Raises UserError."""
        if job.sample_prompts is None:
            return None
        values = job.chat_template_kwargs
        prompts = enumerate(job.sample_prompts, start=1)
        tokens = tuple(_tokens(prompt, number, tokenizer, values) for number, prompt in prompts)
        check_vocabulary(job, model, max(map(max, tokens)), "sample_prompts")
        positions = getattr(cast(Any, model).config, "max_position_embeddings", None)
        ends = (max(map(len, tokens)), job.sample_tokens)
        longest = max(ends) if has_pairs(model) else sum(ends)
        if isinstance(positions, int) and longest > positions:
            raise UserError(
                "A sample would be longer than the model can read.",
                code="sample-too-long",
                exit_code=Exit.USAGE,
                numbers=(f"prompt and sample_tokens {longest}, positions {positions}",),
                hint="use a shorter prompt or fewer sample_tokens",
            )
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return cls(
            texts=tuple(p if isinstance(p, str) else p[-1]["content"] for p in job.sample_prompts),
            tokens=tokens,
            new_tokens=job.sample_tokens,
            pad=pad if pad is not None else 0,
            ends=ends_of_model(model),
            tokenizer=tokenizer,
        )

    def is_cut(self, answer: list[int]) -> bool:
        """Whether a generated `answer` (token ids) has no end token: it stopped because it had all `new_tokens`."""
        return not any(token in self.ends for token in answer)

    def text(self, answer: list[int], *, raw: bool = False) -> str:
        """The text of a generated `answer` (token ids), up to its end token. `raw`: keep special tokens in the text,
        the end token included."""
        stop = next((place for place, token in enumerate(answer) if token in self.ends), len(answer))
        return str(self.tokenizer.decode(answer[: stop + raw], skip_special_tokens=not raw))


def _tokens(
    prompt: Any, number: int, tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any] | None
) -> list[int]:
    ids: Any
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise UserError(
            "A sample prompt is a list of messages, and the tokenizer has no chat template.",
            code="no-chat-template",
            exit_code=Exit.USAGE,
            hint="give the prompt as text, or give chat_template",
        )
    else:
        text = ChatTemplate(tokenizer, everything=True, values=values).prompt([dict(message) for message in prompt])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(
            "A sample prompt has no token.",
            code="empty-prompt",
            exit_code=Exit.USAGE,
            numbers=(f"entry {number} of sample_prompts: {shown(prompt)}",),
            hint="give it some text, or take it out",
        )
    return list(ids)
