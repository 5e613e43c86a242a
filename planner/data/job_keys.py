"""The keys of a job for its data: what is read, what is learned of it, and what the model is evaluated on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.data.entry import DataEntry
from planner.data.records import TrainOn
from planner.keys.base import Keys
from planner.keys.fields import (
    Count,
    EvalSteps,
    EvalStrategy,
    NotNegative,
    Packing,
    Patience,
    Prompts,
    Shares,
    SpecialTokens,
    Switch,
    TargetLength,
    Text,
    Tokens,
    ValSize,
    Values,
)


class DataKeys(Keys):
    """These keys say which data the model is trained on, and how they become rows of tokens ([record formats,
    templates, packing](data.md))."""

    dataset: Annotated[
        tuple[Text | DataEntry, ...], Field(min_length=1, description="a path or Hugging Face id, or a list of them")
    ]
    """The data: files in jsonl (ndjson), json, csv, parquet, arrow or txt, folders of such files, or hub datasets. An
    entry of a list may be a [mapping](#dataset-path) that says more about its data."""
    chat_template: Annotated[str | None, Field(description="a path to a Jinja template, its text, or null")] = None
    """A Jinja template for conversations, or the [name of one](data.md#chat-templates). null, or axolotl's
    `tokenizer_default`: the tokenizer's own template."""
    chat_template_kwargs: Values = None
    """Values for the chat template, such as `enable_thinking: false`. They hold for training rows, previews,
    `sample_prompts` and `offmate sample`. The values of an entry of `dataset` take precedence over these, and those of
    a conversation (TRL's column of this name) over both. A value that is null is ignored."""
    special_tokens: SpecialTokens = None
    """A mapping of `eos_token`, `bos_token`, `unk_token` and others to tokens, and of `additional_special_tokens` to a
    list. It names tokens that the tokenizer has or gets by `add_tokens`; others are refused (`token-not-there`), but
    added for a file of axolotl, whose `tokens` may also be such a mapping. The configs of the trained model name these
    tokens, too. `pad_token` has an effect for reward models only."""
    add_tokens: Tokens = None
    """Tokens that are added to the tokenizer if it lacks them, as a list or as `a,b`. If embedding and head have too
    few rows, they get more: these are drawn around the mean of the others, under `seed`. With `method: lora` the new
    rows are learned if `lora_modules_to_save` has `embed_tokens` and `lm_head`; otherwise, and if `trainable` leaves
    embedding or head out, the job is refused (`tokens-not-learned`)."""
    mix_strategy: Annotated[
        Literal["concat", "interleave_under", "interleave_over", "interleave_once"],
        Field(description="concat, interleave_under, interleave_over or interleave_once"),
    ] = "concat"
    """How the entries of `dataset` are combined. `concat` takes all records of every entry. `interleave_under` draws
    records from the entries under `seed` until the first entry is used up; `interleave_over` goes on until every entry
    is used up, and entries that end earlier begin again. `interleave_once` leaves out entries that are used up, so
    every record comes once."""
    interleave_probs: Shares = None
    """The share of each entry when entries are interleaved; the shares add up to 1. A share of 0 is allowed with
    `interleave_under` only. null: the entries take turns."""
    max_samples: Annotated[Count | None, Field(description="a whole number from 1 to 10^9, or null for all")] = None
    """Only the first records of each entry of `dataset` are used, as many as this number says."""
    max_length: Annotated[int, Field(ge=2, le=10**7, description="a whole number of tokens from 2 to 10^7")] = 1024
    """The most tokens in a row; `long_rows` says what happens to longer documents. Rows are padded to a few lengths:
    `max_length`, three quarters of it, a half and so on. If all rows are shorter, the job is planned for the greatest
    of these lengths that occurs, and every bit stays the same. More than the model's positions is an error if these are
    a table, else a note."""
    max_target_length: TargetLength = None
    """For an encoder-decoder, the most tokens of a completion; `max_length` then counts the tokens of a prompt. The key
    is refused for other models."""
    packing: Packing = False
    """How documents fill rows; with `false` a row is one document. `true`: a row is as many documents as fit into
    `max_length`, isolated from each other: positions restart with each, attention stops at its borders, and the loss is
    that of each document alone. Models that mix documents are then refused (`packing-not-isolated`): OPT, Bloom,
    GPT-OSS, and those with linear attention, convolutions or states over tokens. `wrapped`: a row is a piece of
    `max_length` tokens, cut from all documents one after another, and the documents in a row see each other."""
    group_by_length: Switch = False
    """True: rows of similar length come together, in transformers' order, so there is less padding."""
    min_sample_len: Annotated[Count | None, Field(description="a whole number of tokens, 1 or more, or null")] = None
    """Documents with fewer tokens are left out, and their number is reported. The job is refused if none remains."""
    dataset_exact_deduplication: Switch = False
    """True: of documents with the same tokens, learned alike, only the first is kept; of preferences only the first of
    records whose answers and prompts have the same tokens. Documents that differ only where they are cut are the same.
    The number of documents that are left out is reported. The key is refused with `interleave_over`, and if `dataset`
    names an entry twice."""


class RowKeys(Keys):
    """These keys say which tokens are learned, and what happens to long documents and broken records."""

    train_on: Annotated[TrainOn, Field(description="completions, pairs, answers, all_answers or all")] = "completions"
    """Which tokens count in the loss. `completions`: answers and completions, and all of a text; `pairs`, as in TRL:
    the completion of a prompt with a completion, and all of a text or a conversation. `answers`: the assistant's turns,
    as with TRL's `assistant_only_loss`, but of a prompt with a completion only those in the completion; `all_answers`:
    also the turns in the prompt. `all`: everything; `answers` and `all_answers` refuse records that are neither
    conversations nor tokens (`no-turns`)."""
    long_rows: Annotated[
        Literal["cut", "drop", "split", "share", "refuse"], Field(description="cut, drop, split, share or refuse")
    ] = "cut"
    """What happens to a document that is longer than `max_length`. `cut`: it is cut there; `drop`: it is left out;
    `split`: it becomes several rows; `refuse`: the job is refused (`rows-too-long`). `share`: it is cut so that prompts
    and answers share the room, turn by turn, as in LLaMA-Factory: the shorter of prompt and answer stays whole if it
    needs less than half of the remaining room, else each gets its part."""
    broken_rows: Annotated[Literal["refuse", "skip"], Field(description="refuse or skip")] = "refuse"
    """What happens to records that cannot be read or rendered ([which these are](data.md#broken-records)). `refuse`
    refuses the job and lists each kind of mistake once. `skip` leaves these records out; the log and previews list
    their number and kinds. If no record is left, the job is refused."""


class EvaluationKeys(Keys):
    """These keys say on what, and when, the model is evaluated during training."""

    eval_dataset: Annotated[
        Annotated[tuple[Text | DataEntry, ...], Field(min_length=1)] | None,
        Field(description="a path or Hugging Face id, a list of them, or null"),
    ] = None
    """Separate data to evaluate on, instead of `val_size`. They are in the form of `dataset` and never mixed. The loss
    of an evaluation is the mean over all tokens to predict in all rows, with the weights of that step and without
    dropout. It is in the log, in `metrics.jsonl`, and in `offmate status` and `offmate show`."""
    val_size: ValSize = None
    """Rows of the training data, drawn by `seed`, on which the model is evaluated and not trained. With `packing: true`
    documents are drawn, before packing. It cannot be used with `mix_strategy: interleave_over`, which repeats
    records."""
    load_best_model_at_end: Switch = False
    """True: the model of the evaluation with the smallest loss is written; the evaluation before the first step does
    not count. Its weights are kept in the run folder and rewritten after each better evaluation."""
    early_stopping_patience: Patience = None
    """Training stops after this many evaluations in a row without a better one, by the rules of transformers'
    callback."""
    early_stopping_threshold: NotNegative = 0.0
    """For `early_stopping_patience`, a loss is better if it is smaller by more than this number."""
    eval_strategy: EvalStrategy = None
    """When the model is evaluated. null: by steps if `eval_steps` is given, else after every epoch. The last step is
    always followed by an evaluation. `no` turns evaluation off: the other keys that ask for it have no effect, and all
    data are trained on."""
    eval_steps: EvalSteps = None
    """The number of steps from one evaluation to the next; null: as many as `save_steps`. axolotl's `evals_per_epoch`
    is the share 1 / (it × epochs) of all steps, as in axolotl."""
    eval_on_start: Switch = False
    """True: the model is also evaluated before the first step."""
    sample_prompts: Prompts = None
    """Prompts that the model answers at each evaluation; the answers are in the log and in `metrics.jsonl`. The model
    continues texts as they are; messages go through the chat template. If the answers do not fit `gpu_budget`, the job
    ends before its first step (`generation-does-not-fit`)."""
    sample_tokens: Count = 64
    """The most tokens of an answer to `sample_prompts`. Each is the likeliest next token."""
    per_device_eval_batch_size: Annotated[Count | None, Field(description="a whole number from 1 to 10^9, or null")] = (
        None
    )
    """This key is accepted and not used: evaluation has the batch size of training. An evaluation that does not fit the
    plan's budget ends the job before its first step (`evaluation-does-not-fit`)."""
