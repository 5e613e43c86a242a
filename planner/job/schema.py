"""Defines the job file: which keys it has, and what a correct file is.

The keys, with their types, defaults and texts, are by theme in `planner/keys/` and `planner/data/job_keys.py`. They are
named as in transformers' `TrainingArguments` and TRL; `planner/importers/tools.py` lists other tools' names for them.
`planner/keys/source.py` reads a file and finds lines and mistakes, and `planner/keys/fields.py` defines the types of
values.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import ConfigDict, ValidationError

from planner.data.entry import DataEntry, as_entry
from planner.data.job_keys import DataKeys, EvaluationKeys, RowKeys
from planner.importers.llama_factory_v1 import in_own_keys, is_v1
from planner.importers.read import canonical, settle_data
from planner.importers.tools import ALIASES, tool_of
from planner.importers.transformers import OWN
from planner.job.named_files import resolve_paths
from planner.job.notes import notes_of
from planner.job.planned import NOT_PLANNED
from planner.job.precision import settle_precision
from planner.keys.adapter import takes_from_base
from planner.keys.adapter_keys import AdapterKeys
from planner.keys.batch import AUTO, check_batch
from planner.keys.evaluation import check_evaluation
from planner.keys.lora import check_lora, check_weights, of_the_adapter
from planner.keys.loss_keys import LossKeys, check_loss
from planner.keys.lsp import LSP_SLICES, LSP_TOKENS, LspKeys, check_lsp
from planner.keys.memory_keys import MemoryKeys
from planner.keys.mixture import check_mixture
from planner.keys.model_keys import ModelKeys, NumberKeys
from planner.keys.optimizer import check_optimizer
from planner.keys.output_keys import OutputKeys, ReportKeys, ScheduleKeys
from planner.keys.preference import PreferenceKeys, averages_slices, check_preference, settle_preference
from planner.keys.schedules import check_schedule
from planner.keys.source import Source, read_text, read_yaml, to_user_error
from planner.keys.trainable import check_trainable
from planner.keys.training_keys import OptimizerKeys, StepKeys
from planner.keys.window import check_window
from planner.keys.wrong_values import mistakes_of
from planner.optimizers.adamw import AdamW
from planner.optimizers.table import OPTIMIZERS


# Pydantic takes the fields of the last class first. Files that offmate writes have the keys in this order, and the keys
# of kept plans are hashes of such text, so a new class goes to the front.
class Job(
    ScheduleKeys,
    EvaluationKeys,
    RowKeys,
    ReportKeys,
    MemoryKeys,
    NumberKeys,
    OutputKeys,
    OptimizerKeys,
    StepKeys,
    DataKeys,
    ModelKeys,
    AdapterKeys,
    LspKeys,
    LossKeys,
    PreferenceKeys,
):
    """One fine-tuning job as an immutable value: canonical key names, every default filled in, absolute paths, sizes in
    bytes.

    `model`, `tokenizer` and the entries of `dataset` are absolute paths or Hugging Face ids. `chat_template` is the
    text of the template. `warmup_steps` below 1 is a share of all steps. `max_grad_norm` None means that gradients are
    not clipped. `schedule` is the text form of a `planner.keys.window.Window`, the hours in which the job may use the
    GPU.
    """

    model_config = ConfigDict(defer_build=False)

    @classmethod
    def load(cls, path: Path) -> Job:
        """Return the job in the file `path`. Relative paths in it start at the file's folder. Raises UserError (exit
        2)."""
        return cls.parse(read_text(path), path.parent, name=path.name)

    @classmethod
    def parse(
        cls, text: str, folder: Path, *, name: str = "job.yaml", in_lines: bool = True, told: Collection[str] = ()
    ) -> Job:
        """Return the job in the YAML `text`. `folder`: where relative paths start. `name`: the file's name in errors.
        `in_lines`: the text comes from a file, so errors name its lines. `told`: keys that were set on the command line
        (--set), which errors say. Raises UserError (exit 2)."""
        return cls.parse_with_notes(text, folder, name=name, in_lines=in_lines, told=told)[0]

    @classmethod
    def parse_with_notes(
        cls, text: str, folder: Path, *, name: str = "job.yaml", in_lines: bool = True, told: Collection[str] = ()
    ) -> tuple[Job, tuple[str, ...]]:
        """Return the job in the YAML `text`, and notes for the user on values that work differently here than in the
        tool that the file was written for. The arguments are those of `parse`. Raises UserError (exit 2)."""
        source = replace(read_yaml(text, name, allow_unclear=True), told=frozenset(told))
        source = source if in_lines else replace(source, lines={})
        job, notes = cls._checked(source, Path(folder).absolute())
        return job, (*notes, *job.notes)

    @classmethod
    def question(
        cls,
        text: str,
        folder: Path,
        *,
        name: str = "job.yaml",
        in_lines: bool = True,
        told: Collection[str] = (),
        machine_bf16: bool = True,
    ) -> Job:
        """Return the job in the YAML `text` for planning only: the model's config must exist, but weights, tokenizer
        and data need not. Raises UserError (exit 2).

        Keys in `NOT_PLANNED`, which do not change a plan, are ignored, so that jobs with the same plan are equal.
        `in_lines`: the text comes from a file, so errors name its lines. `machine_bf16`: whether the machine computes
        in bf16, which decides `bf16` where the text leaves it out. The other arguments are those of `parse`.
        """
        source = replace(read_yaml(text, name, allow_unclear=True), told=frozenset(told))
        source = source if in_lines else replace(source, lines={})
        job, _ = cls._checked(source, Path(folder).absolute(), only_planned=True, machine_bf16=machine_bf16)
        return job.model_copy(update={"train_batch_size": None}) if job.is_split else job

    @classmethod
    def _checked(
        cls,
        source: Source,
        folder: Path | None,
        *,
        only_planned: bool = False,
        machine_bf16: bool | None = None,
    ) -> tuple[Job, tuple[str, ...]]:
        """Return the job that a file's values describe, and notes for the user on its keys. `folder`: where relative
        paths start; None: the values are those of `resolved.yaml`, whose paths are absolute. `only_planned`: the job is
        for planning only, as in `question`. `machine_bf16`: as in `settle_precision`."""
        v1_notes: tuple[str, ...] = ()
        unclear = source.unclear
        if folder is not None and is_v1(source.values):
            source, v1_notes = in_own_keys(source, folder, cls.model_fields, only_planned=only_planned)
        values, mistakes, notes = canonical(source, CANONICAL)
        notes = (*v1_notes, *notes)
        values = {key: value for key, value in values.items() if value is not None or key in _NULLABLE}
        if folder is not None:
            notes = (*notes, *settle_preference(values))
        if folder is not None and values.get("disk_paths") and "save_total_limit" not in values:
            values["save_total_limit"] = 1
            notes = (
                *notes,
                "save_total_limit is 1 because disk_paths are given: the drive holds the optimizer states twice, and a"
                " checkpoint points to one of the two. With save_total_limit: 2 a checkpoint copies them.",
            )
        if folder is not None and tool_of(source.values) is OWN:
            notes = (*notes, *settle_precision(values, source, machine_bf16=machine_bf16))
        if only_planned:
            alike = NOT_PLANNED | ({"optim"} if OPTIMIZERS.get(str(values.get("optim")), AdamW) is AdamW else set())
            if takes_from_base(values.get("init_lora_weights")):  # then the weights differ from those in any file
                alike = alike - {"init_lora_weights"}
            values = {key: value for key, value in values.items() if key not in alike}
        elif folder is not None:
            data_names = {key: _name_in(source, key) for key in ("dataset", "eval_dataset")}
            mistakes += settle_data(values, data_names, source, tool_of(source.values), folder)
        mistakes += resolve_paths(values, folder, source, lambda key: _name_in(source, key), only_planned=only_planned)
        names = {key: _name_in(source, key) for key in values}
        mistakes += check_evaluation(values, names, source) + check_optimizer(values, names, source)
        mistakes += check_loss(values, names, source)
        mistakes += check_lora(values, names, source, decided=folder is None)
        mistakes += check_lsp(values, names, source)
        mistakes += check_trainable(values, names, source)
        if folder is not None:
            notes = (*notes, *of_the_adapter(values, source, _name_in(source, "lora_target_modules")))
        mistakes += [] if only_planned else check_schedule(values, names, source)
        mistakes += [] if only_planned else check_mixture(values, names, source)
        mistakes += check_batch(values, names, source) + check_window(values, names, source)
        mistakes += check_preference(values, names, source)
        mistakes += [] if only_planned or mistakes else check_weights(values, names, source)
        broken = {mistake.key for mistake in mistakes}
        try:
            job = cls.model_validate(values)
        except ValidationError as error:
            wrong = mistakes_of(error, values, source, names, cls.model_fields)
            mistakes += [mistake for mistake in wrong if mistake.key not in broken]
        mistakes += [mistake for mistake in unclear if mistake.key not in {other.key for other in mistakes}]
        if mistakes:
            raise to_user_error(mistakes, source.name)
        return job, notes

    @classmethod
    def from_resolved(cls, path: Path) -> Job:
        """Return the job in `resolved.yaml`, the file in a run folder that `resolved_yaml` wrote. Raises UserError.

        A Hugging Face id stays an id, whatever files lie beside `resolved.yaml`: run folders have a folder `output`,
        and `output/x` is a valid id.
        """
        # No limit: it is longer than the submitted file, as it has every default and the template's text.
        return cls._checked(read_yaml(read_text(path, longest=None), path.name, longest=None), None)[0]

    def resolved_yaml(self) -> str:
        """Return the job as YAML text with canonical key names and every default. `from_resolved` reads an equal job
        from it."""
        values = self.model_dump(mode="json")
        of_method = {*AdapterKeys.model_fields, *LspKeys.model_fields, *PreferenceKeys.model_fields}
        ordered = {key: values[key] for key in sorted(values, key=of_method.__contains__)}
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)

    @property
    def data(self) -> tuple[DataEntry, ...]:
        """The entries of `dataset`: the data that the job trains on."""
        return tuple(map(as_entry, self.dataset))

    @property
    def eval_data(self) -> tuple[DataEntry, ...]:
        """The entries of `eval_dataset`; empty where the job has no separate data for evaluation."""
        return tuple(map(as_entry, self.eval_dataset or ()))

    @property
    def lsp_rows(self) -> int:
        """The number of rows of which a change of projectors looks at the gradient."""
        return self.lsp_samples or max(1, LSP_TOKENS // self.max_length)

    @property
    def lsp_slice_rows(self) -> int:
        """The rows of a slice in a change of projectors, which has at most `LSP_SLICES` slices."""
        return -(-self.lsp_rows // LSP_SLICES)

    @property
    def slice_rows(self) -> int:
        """Rows of the data in a micro-batch; with `preference` pairs. Only for a job whose `is_split` is true."""
        assert isinstance(self.per_device_train_batch_size, int), "the planner has not decided it yet"
        return self.per_device_train_batch_size

    @property
    def tensor_rows(self) -> int:
        """The first dimension of a micro-batch's tensors: `slice_rows`, twice as many with `preference`."""
        return self.slice_rows * (1 if self.preference is None else 2)

    @property
    def averages_slices(self) -> bool:
        """Whether the loss of preferences includes a mean over each micro-batch, so that another split of the step into
        micro-batches changes what is learned."""
        return averages_slices(self.preference, supervised=self.sft_share > 0, weighting=self.loss_weighting)

    @property
    def most_target_tokens(self) -> int:
        """The most tokens of a completion in models that read it apart from its prompt, such as encoder-decoders."""
        return self.max_target_length or self.max_length

    @property
    def is_split(self) -> bool:
        """Whether it is decided how many rows a micro-batch has. With `per_device_train_batch_size: auto` the planner
        decides it and sets it by `with_slices`."""
        return self.per_device_train_batch_size != AUTO

    def with_slices(self, rows: int) -> Job:
        """Return the job with its `train_batch_size` rows of a step split into micro-batches of `rows` rows."""
        assert self.train_batch_size is not None and self.train_batch_size % rows == 0
        slices = self.train_batch_size // rows
        return self.model_copy(update={"per_device_train_batch_size": rows, "gradient_accumulation_steps": slices})

    def with_lengths(self, lengths: tuple[int, int]) -> Job:
        """Return the job with shorter rows, for planning only. `lengths`: the most tokens of a row's input and of its
        labels. The rows for training are still padded by the job's own `max_length`."""
        read, labels = lengths
        apart = labels != read or self.max_target_length is not None
        targets = {"max_target_length": labels} if apart else {}
        rows = {"lsp_samples": self.lsp_rows} if self.method == "lsp" else {}
        return self.model_copy(update={"max_length": read, **rows, **targets})

    def eval_every(self, total_steps: int) -> int | None:
        """Return the number of steps from one evaluation to the next, in a run of `total_steps` steps; None where the
        job is evaluated after every epoch."""
        if self.eval_strategy == "epoch" or (self.eval_strategy is None and self.eval_steps is None):
            return None
        steps = self.save_steps if self.eval_steps is None else self.eval_steps
        return max(1, math.ceil(steps * total_steps)) if steps < 1 else int(steps)

    @property
    def state_homes(self) -> int:
        """How many copies of each optimizer state that is on disk are kept there, 1 or 2. With 2, a step writes one
        copy while the last checkpoint points to the other, so a checkpoint copies nothing. This works for one kept
        checkpoint only, because a second one would need a third copy."""
        return 2 if self.save_total_limit == 1 else 1

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user who submits this job, which depend on its values only and not on how its file was
        written."""
        return notes_of(dict(self), self.model_fields_set)


CANONICAL = {alias: key for key, aliases in ALIASES.items() for alias in aliases} | {k: k for k in Job.model_fields}
"""Any name that a key of a job file may have -> its canonical name."""

_NULLABLE = {key for key, field in Job.model_fields.items() if field.default is None} | {
    "lsp_nonzeros",
    "max_grad_norm",
    "save_minutes",
    "save_total_limit",
}
"""Keys for which null is a value. For all others null means that the key is not given."""


def _name_in(source: Source, canonical: str) -> str:
    """Return the name under which the file gives the canonical key; the canonical name itself where the file does not
    have it."""
    return next((key for key in source.values if CANONICAL.get(key) == canonical), canonical)


_OF_MODEL = {
    *AdapterKeys.model_fields,
    *LspKeys.model_fields,
    *LossKeys.model_fields,
    "preference",
    "ref_model",
    "gpu_budget",
    "cpu_budget",
    "add_tokens",
    "attn_implementation",
    "max_target_length",
    "packing",
    "special_tokens",
}
"""Keys whose values may be wrong for some models."""


def says_of_model(job: Job) -> bool:
    """Return whether the job sets a key whose value may be wrong for its model, so that only loading the model's config
    tells."""
    fields = type(job).model_fields
    return any(getattr(job, key) != fields[key].get_default(call_default_factory=True) for key in _OF_MODEL)
