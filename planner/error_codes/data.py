"""Explains the errors of tokenizers, data, chat templates and samples."""

from __future__ import annotations

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    "The tokenizer": {
        "tokenizer-not-usable": (
            "The tokenizer cannot be loaded.",
            "Give `tokenizer`: a folder with a tokenizer.json, or a name on the hub.",
        ),
        "tokenizer-has-own-code": (
            "The tokenizer comes with Python code of its own, which offmate never runs.",
            "Use a tokenizer that transformers knows without such code.",
        ),
        "slow-tokenizer": (
            "The tokenizer does not say where its tokens are in the text.",
            "Use a tokenizer with a tokenizer.json.",
        ),
        "token-not-there": (
            "The tokenizer does not have a special token that the job or its template uses.",
            "Correct the token, or add it with `add_tokens`.",
        ),
    },
    "Reading the data": {
        "dataset-unreadable": (
            "A data file, a record or a dataset of the hub cannot be read.",
            "Correct the file. In a `.jsonl` file each line is one JSON object.",
        ),
        "empty-dataset": (
            "The dataset has no record.",
            "Give a file with at least one record.",
        ),
        "broken-record": (
            "Records are invalid, or have another form than the others.",
            "Correct or remove them. `broken_rows: skip` leaves such records out.",
        ),
        "unknown-columns": (
            "The columns of the data are no known format, or not those that the entry of `dataset` names.",
            "Rename the columns, or name them in the entry, such as `type: instructions` with `columns: {instruction: "
            "question, output: answer}`.",
        ),
        "other-records": (
            "The data are preferences and the job has no `preference`, or the job has `preference` and the data "
            "are something else.",
            "Add or remove `preference`, or give other data.",
        ),
        "no-pairs": (
            "The data for an encoder-decoder are not prompts with completions.",
            "Give the columns `prompt` and `completion`, both texts, or `instruction`, (`input`,) `output`.",
        ),
        "nothing-to-train": (
            "No record has anything to learn.",
            "Give records with texts or answers that are learned, or a larger `max_length`. `offmate preview` "
            "shows what is learned.",
        ),
        "val-size-too-large": (
            "`val_size` leaves nothing to train on.",
            "Give a smaller `val_size`, or `eval_dataset`.",
        ),
        "rows-too-long": (
            "Documents or answers are longer than `max_length`, and `long_rows: refuse` is set.",
            "Give a larger `max_length`, or `long_rows: cut` or `drop`.",
        ),
        "rows-longer-than-planned": (
            "The data have longer rows than those for which the plan was made.",
            "`offmate retry ID --allow-changed-data` counts and plans them again.",
        ),
        "data-changed": (
            "The data files changed after the job was submitted.",
            "Put the files back, or accept the new ones: `offmate retry ID --allow-changed-data`.",
        ),
        "takes-too-much": (
            "Reading a file takes too much time or memory, such as a small file that unpacks to gigabytes.",
            "Write the file again in smaller parts, or leave it out.",
        ),
        "look-killed": (
            "The process that looked at a file was killed by the system.",
            "Try again when other programs use less memory.",
        ),
    },
    "Chat templates": {
        "no-chat-template": (
            "The data are conversations, and there is no chat template for them.",
            "Give `chat_template`: the path of a file, or a name such as `chatml`.",
        ),
        "bad-chat-template": (
            "The chat template is not valid Jinja. The error gives the line.",
            "Correct the template, or give another one.",
        ),
        "chat-template-refuses": (
            "The chat template raises an error for one conversation, or for all.",
            "Correct the data, or give another `chat_template`.",
        ),
        "chat-template-too-much": (
            "The chat template takes too much time, memory or text for a conversation.",
            "Give another `chat_template`.",
        ),
        "template-drops": (
            "The chat template does not show a part of a conversation, such as a turn, a call or the tools.",
            "Give a `chat_template` that shows it, or remove it from the data.",
        ),
        "template-prompts": (
            "The template cannot learn prompts, and `train_on_prompt` is set.",
            "Leave `train_on_prompt` out. LLaMA-Factory refuses this, too.",
        ),
    },
    "The turns that are learned": {
        "no-turns": (
            "A key says which turns are learned, and the data are not conversations.",
            "Leave the key out, or give conversations.",
        ),
        "assistant-turn-not-found": (
            "The chat template changes what the assistant says, so its place in the text is unknown.",
            "Use `train_on: all`, or a `chat_template` with `{% generation %}` around the assistant's turns.",
        ),
        "turn-not-shown": (
            "A turn is to be learned, and the chat template does not show its text.",
            "Give a `chat_template` that shows it, or leave its role out of `roles_to_train`.",
        ),
        "turns-not-apart": (
            "The chat template mixes the text of one turn with others, or marks another role's text as the "
            "assistant's.",
            "Give a `chat_template` that shows one turn after another, with `{% generation %}` around the "
            "assistant's turns alone.",
        ),
        "turns-not-marked": (
            "The chat template does not mark each of the assistant's turns, or marks them at the wrong places.",
            "Give a `chat_template` with `{% generation %}` around each of the assistant's turns, not within a "
            "macro or `{% set %}`.",
        ),
        "no-end-mark": (
            "The chat template does not write the tokens that end a turn and that the job is to learn.",
            "Name the tokens in `eot_tokens`, or set `train_on_eos: none`.",
        ),
        "mark-of-several-tokens": (
            "A mark in `eot_tokens` is several tokens for this tokenizer.",
            "Make it one token: name it in `add_tokens`, too.",
        ),
        "marks-disagree": (
            "The tokenizer's end token is also in `eot_tokens`, and `train_on_eos` and `train_on_eot` differ.",
            "Give both keys the same value, or remove the token from `eot_tokens`.",
        ),
    },
    "Samples": {
        "empty-prompt": (
            "A prompt has no token.",
            "Give the prompt some text, or remove it.",
        ),
        "sample-too-long": (
            "A prompt with its sample would be longer than the positions that the model has.",
            "Use a shorter prompt or fewer `sample_tokens`.",
        ),
    },
}
