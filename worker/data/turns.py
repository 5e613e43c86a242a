"""Turns and their end marks, learned by axolotl's rules (its `chat_template` data, version 0.19).

A turn is what changes in the rendered text when it says something else, and nothing but its role and its content; its
end mark is the first one within three tokens behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from planner.job.data_entry import LearnedTurns
from planner.job.records import Message

Spans = tuple[tuple[int, int], ...]
_NEAR = 3  # tokens that a template may write between what is said and its end mark


class Turns:
    """Finds what is learned by a choice of turns. Raises UserError for marks that are no marks of this tokenizer."""

    def __init__(self, learned: LearnedTurns, template: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._learned, self._tokenizer = learned, tokenizer
        end = tokenizer.eos_token
        marks = [mark for mark in learned.marks if mark in template] if learned.marks else [end] if end else []
        ids = {mark: tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in marks}
        given = learned.marks not in ((), (end,))
        if given and (several := [mark for mark, pieces in ids.items() if len(pieces) != 1]):
            raise UserError(
                f"{several[0]} of eot_tokens is {len(ids[several[0]])} tokens.", code="mark-of-several-tokens",
                exit_code=Exit.USAGE, hint=f"make it one: add_tokens: [{several[0]!r}]",
            )  # fmt: skip
        if len(marks) > 1 and end in marks and learned.eos != learned.eot:
            raise UserError(
                f"{end} is the tokenizer's end token, and one of eot_tokens.", code="marks-disagree",
                exit_code=Exit.USAGE, numbers=(f"train_on_eos is {learned.eos}, train_on_eot {learned.eot}",),
                hint=f"make them the same, or take {end} out of eot_tokens",
            )  # fmt: skip
        own = {pieces[0] for pieces in ids.values() if len(pieces) == 1}
        self._marks = ((own, learned.eot), ({tokenizer.eos_token_id} - {None}, learned.eos))

    def spans(self, text: str, messages: Sequence[Message], places: Callable[[int], Spans]) -> Spans:
        """The spans of characters of `text` that are learned; `places` tells where in it what a turn says
        is, nowhere where it is not shown. Raises UserError for a learned turn that is not shown."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, tokens = encoded["input_ids"], encoded["offset_mapping"]
        starts = [start for start, _ in tokens]
        roles, everywhere = self._learned.roles, any(which == "all" for _, which in self._marks)
        found: set[tuple[int, int]] = set()
        last: dict[int, int] = {}
        for index, message in enumerate(messages):
            wanted = message.get("train", roles is None or message["role"] in roles)
            if not wanted and not everywhere:
                continue
            if not (pieces := places(index)):
                if wanted and message["content"].strip():
                    raise _not_shown(message)
                continue
            if wanted:
                found |= {*pieces}
            behind = bisect_left(starts, pieces[-1][1])
            for kind, (marks, which) in enumerate(self._marks):
                near = range(behind, min(behind + _NEAR + 1, len(ids)))
                if (at := next((at for at in near if ids[at] in marks), None)) is not None:
                    last[kind] = at
                    if which == "all" or (which == "turn" and wanted):
                        found.add(tuple(tokens[at]))
        found |= {tuple(tokens[at]) for kind, at in last.items() if self._marks[kind][1] == "last"}
        return tuple(sorted(found))


def _not_shown(message: Message) -> UserError:
    return UserError(
        f"The chat template does not show what a turn of the role {message['role']} says, and it is to be learned.",
        code="turn-not-shown", exit_code=Exit.USAGE, numbers=(f"turn: {message['content'][:200]!r}",),
        hint="give a chat_template that shows it, or leave its role out of roles_to_train",
    )  # fmt: skip
