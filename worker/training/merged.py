"""Merges adapters into their base and writes the model folder file by file, with one weight in memory at a time.

Each weight goes through peft's own layer, so it becomes what peft's merge makes of it, in the dtype that the base is
published in. Some bases are merged in memory instead: those whose files have packed weights, or have no rows for tokens
that the job added, or no head of a reward model, or have one weight for an embedding and a head that are now two.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from planner.disk import check_space, sync_tree
from planner.errors import Exit, UserError
from planner.job.base import TOKENIZER
from planner.job.room import FILES_BYTES
from planner.job.schema import Job
from planner.keys.adapter import adapter_keys, takes_from_base
from planner.machine.this_machine import free_ram_bytes
from planner.models.files_of_weights import entries_of
from planner.models.hf_model import model_config, skeleton_model
from planner.models.peft_lora import load_adapter, plain_name
from planner.models.quantized import unpacks
from planner.models.written import published_dtype
from planner.units import counted, format_bytes
from worker.training.base_files import ANOTHER_FORM, BESIDE, base_folder, is_sharded, not_mergeable, weight_files
from worker.training.ends import align_config
from worker.training.model import load_model, tell_special_tokens

_PACKED = ("load_in_4bit", "load_in_8bit", "quantize_moe_experts")
_HULL = "base_model.model."  # the prefix of all names in peft's model


def write_merged(job: Job, adapters: Path, folder: Path, *, beside: int = 0) -> None:
    """Merge the `adapters` (a folder in peft's form) into the base of `job`, and write the model to `folder`, which
    must be new or empty. The tokenizer is taken from the adapters' folder. `beside`: for how many more copies of the
    model the disk must have space. Raises UserError; then nothing is left behind."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is not empty.", code="output-dir-used", exit_code=Exit.USAGE, hint="give a folder that is new"
        )
    draft = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _check_base(job)
        job = _as_merged(job, adapters)
        adapted = skeleton_model(job)
        print(f"merging the adapters of {adapters} into {job.model}", file=sys.stderr, flush=True)
        merge = _merge_files if _is_in_files(job, adapted) else _merge_in_memory
        merge(job, adapted, adapters, draft, beside)
        if job.special_tokens or (adapters / GENERATION_CONFIG_NAME).is_file():
            _name_special_tokens(job, draft)
        sync_tree(draft)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _merge_files(job: Job, adapted: nn.Module, adapters: Path, draft: Path, beside: int) -> None:
    base = base_folder(job)
    files = weight_files(base)
    keys: dict[str, str] = {}
    for file in files:
        for key in entries_of(file)[0]:
            if (other := keys.setdefault(key, file.name)) != file.name:
                raise not_mergeable(f"{key} is in {other} and in {file.name} of {base}")
    parts, model = _parts(adapted, adapters)
    named: dict[str, Any] = {}
    for name, part in parts.items():
        stored = _stored(name, part, model, keys)
        if not stored:
            raise not_mergeable(f"{base} has no {name} in its {counted(len(files), 'file')} of weights")
        named |= stored
    weights = sum(file.stat().st_size for file in files)
    check_space(draft, (1 + beside) * weights + FILES_BYTES, "the merged model")
    for file in files:
        _write(file, draft / file.name, named)
    if is_sharded(base):
        shutil.copyfile(base / SAFE_WEIGHTS_INDEX_NAME, draft / SAFE_WEIGHTS_INDEX_NAME)
    as_it_was = job.tokenizer == job.model and not (job.add_tokens or job.special_tokens)
    _copy_beside(base, draft, but=() if as_it_was else TOKENIZER)
    _copy_beside(adapters, draft)


def _copy_beside(source: Path, draft: Path, form: str = "*", *, but: tuple[str, ...] = ()) -> None:
    """Copy the files beside the weights (configs, tokenizer, template) whose names match `form` and none of `but`."""
    left_out = ("adapter_*", "*.index.json", *ANOTHER_FORM, *but)
    for file in source.glob(form):
        if file.suffix in BESIDE and file.is_file() and not any(file.match(other) for other in left_out):
            shutil.copyfile(file, draft / file.name)


def _merge_in_memory(job: Job, adapted: nn.Module, adapters: Path, draft: Path, beside: int) -> None:
    """Merge as transformers and peft do: load the model with its adapters, merge, save."""
    base = base_folder(job)  # downloads it, before anything asks what is in it
    dtype, untied = published_dtype(job) or torch.float32, _has_two_ends_of_one(adapted)
    if untied:
        _untie(adapted)
    size_bytes, most_bytes = _sizes(adapted, dtype)
    check_space(draft, (1 + beside) * size_bytes + FILES_BYTES, "the merged model")
    if (free_bytes := free_ram_bytes()) < most_bytes:
        raise UserError(
            "This base can only be merged in host memory, and there is not enough of it free.",
            code="not-mergeable",
            exit_code=Exit.USAGE,
            numbers=(f"needed {format_bytes(most_bytes)}, free {format_bytes(free_bytes)}",),
            hint="stop what else runs here, or merge on a machine with more memory",
        )
    model: Any = load_model(job, dtype=dtype)
    load_adapter(model, str(adapters))
    if untied:
        _untie(model)
    merged = model.merge_and_unload()
    for p in merged.parameters():
        p.data = p.data.to(dtype)
    merged.config.use_cache = True  # off for training only
    merged.save_pretrained(draft, max_shard_size="5GB")
    # No other files: the base's configs may say that weights are packed, its tokenizer has no added tokens.
    _copy_beside(base, draft, "*processor_config.json")
    _copy_beside(adapters, draft)


def _name_special_tokens(job: Job, draft: Path) -> None:
    """Write the job's special tokens into the configs in `draft`, as they are in those of a model trained in full."""
    named = SimpleNamespace(config=AutoConfig.from_pretrained(draft, trust_remote_code=False), generation_config=None)
    if (file := draft / GENERATION_CONFIG_NAME).is_file():
        named.generation_config = GenerationConfig.from_dict(json.loads(file.read_text("utf-8")))
    tokenizer = AutoTokenizer.from_pretrained(draft, trust_remote_code=False)
    tell_special_tokens(job, cast(Any, named), tokenizer)
    if named.generation_config is not None:  # the adapters' one, where they have one
        align_config(named.config, named.generation_config, tokenizer)
    for config in filter(None, vars(named).values()):
        config.save_pretrained(draft)


def _sizes(adapted: Any, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of the model in `dtype` with its adapters, the most bytes in memory while it is merged). `adapted` is on
    the meta device. The second adds the larger of two needs: unpacking or merging the largest weight, which takes up to
    four times its fp32 size; then copies of the experts that transformers saves one by one."""
    base = adapted.get_base_model()
    size, copies, largest = 0, 0, 0
    for name, p in base.named_parameters():
        its = p.numel() * (4 if ".lora_" in name else dtype.itemsize)  # adapters are fp32 in a base of any dtype
        size += its
        if p.dim() > 2 and len(_Split(plain_name(name), None, base).parts(p)) > 1:
            copies += its
        if p.dim() > 2 or ".base_layer." in name:
            largest = max(largest, p.numel())
    return size, size + max(copies, 4 * 4 * largest)


def _as_merged(job: Job, adapters: Path) -> Job:
    """The job changed to describe what is merged: the base as published, and the adapters as written."""
    its: dict[str, Any] = {**dict.fromkeys(_PACKED, False), "adapter_name_or_path": None}
    if takes_from_base(job.init_lora_weights):  # these adapters are written in another form, of twice the rank
        its |= {**adapter_keys(str(adapters)), "init_lora_weights": True}
    return job.model_copy(update=its)


def _check_base(job: Job) -> None:
    """Raise UserError "base-quantized" for a base that was saved quantized in a form that cannot be unpacked."""
    config = model_config(job)
    if getattr(config, "quantization_config", None) and not unpacks(config):
        raise UserError(
            f"{job.model} was saved quantized: nothing can be merged into its files.",
            code="base-quantized",
            exit_code=Exit.USAGE,
            hint="merge into the model as it was published",
        )


def _is_in_files(job: Job, adapted: Any) -> bool:
    """Whether the base can be merged file by file: its files have the weights in the form of its layers, and every
    weight that the merge changes."""
    config = model_config(job)
    if unpacks(config) or _has_two_ends_of_one(adapted) or job.rewards:  # its head is in no file of the base
        return False
    return not job.add_tokens or len(adapted.get_input_embeddings().weight) == _rows(config)


def _ends(adapted: Any) -> list[Any]:
    base = adapted.get_base_model()
    return [base.get_input_embeddings(), base.get_output_embeddings()]


def _has_two_ends_of_one(adapted: Any) -> bool:
    """Whether embedding and head are one weight in the base, and one of them was trained alone."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    trained = any(isinstance(end, LoraLayer | ModulesToSaveWrapper) for end in _ends(adapted))
    return trained and bool(getattr(adapted.get_base_model().config, "tie_word_embeddings", False))


def _untie(adapted: Any) -> None:
    """Make embedding and head two weights: else peft's merge into one of them would change both."""
    from peft.tuners.lora import LoraLayer

    config = adapted.get_base_model().config
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    for end in _ends(adapted):
        if isinstance(end, LoraLayer):
            its: Any = end.get_base_layer()
            its.weight = nn.Parameter(its.weight.detach().clone(), requires_grad=False)


def _parts(adapted: Any, adapters: Path) -> tuple[dict[str, Any], Any]:
    """(name of each weight that the merge changes -> what it is merged from, the base model). A weight is merged from
    peft's layer, whose base is on the meta device; in modules trained as a whole, from the trained weight itself."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    weights = load_file(adapters / "adapter_model.safetensors")
    modules = list(cast(nn.Module, adapted).named_modules())
    whole: dict[str, Any] = {}
    base = adapted.get_base_model()
    for name, module in modules:
        if isinstance(module, ModulesToSaveWrapper):
            for local, _ in module.modules_to_save["default"].named_parameters():
                whole[f"{name.removeprefix(_HULL)}.{local}"] = weights.pop(f"{name}.{local}")
    named = adapted.named_parameters()
    trained = [name for name, parameter in named if parameter.requires_grad and ".modules_to_save." not in name]
    # Not by peft's own loader, which would put the adapters on the meta device, as the base is.
    saved = {name: name.replace(".default", "") for name in trained}
    saved = {name: key if key in weights else key.removesuffix(".weight") for name, key in saved.items()}
    adapted.load_state_dict({name: weights.pop(key) for name, key in saved.items()}, strict=False, assign=True)
    assert not weights, f"there is no place for {min(weights)}"
    layers = {f"{plain_name(n)}.{_weight_of(layer)}": layer for n, layer in modules if isinstance(layer, LoraLayer)}
    return {**layers, **whole}, base


def _rows(config: Any) -> int:
    """The number of the embedding's rows in the model as published."""
    return int(config.get_text_config().vocab_size)


def _weight_of(layer: Any) -> str:
    """The name of the weight that a peft layer adapts."""
    return str(getattr(layer, "parameter_name", "weight"))


@dataclass(frozen=True, eq=False)
class _Split:
    """A weight that the files have in several parts, such as one for each expert. `keys`: the keys of the parts."""

    name: str
    layer: Any
    model: Any
    keys: tuple[str, ...] = ()

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """Split a tensor of the weight's shape as transformers does when it saves the model: key -> part."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, {self.name: weight}))

    def deltas(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Key -> what the merge adds to this part, computed for weights of `dtype`, the files' dtype."""
        its, name = self.layer.get_base_layer(), self.layer.parameter_name
        before = getattr(its, name)
        setattr(its, name, nn.Parameter(torch.empty(1, dtype=dtype).expand(before.shape), requires_grad=False))
        delta = self.layer.get_delta_weight("default")
        setattr(its, name, before)
        return self.parts(delta)


def _stored(name: str, part: Any, model: Any, keys: Container[str]) -> dict[str, Any]:
    """Key of a weight, or of each of its parts, in the files -> what it is merged from; empty where it is not there."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    direct = next((key for key in (name, name.removeprefix(f"{prefix}.")) if key in keys), None)
    if direct is not None:
        return {direct: part}
    if not hasattr(part, "parameter_name"):
        return {}
    split = _Split(name, part, model)
    part_keys = tuple(split.parts(getattr(part.get_base_layer(), part.parameter_name).data))
    if not all(key in keys for key in part_keys):
        return {}
    return dict.fromkeys(part_keys, replace(split, keys=part_keys))


@torch.no_grad()
def _write(source: Path, target: Path, layers: Mapping[str, Any]) -> None:
    """Copy the file and overwrite the weights that the merge changes; shapes and dtypes stay the same."""
    shutil.copyfile(source, target)
    entries, first = entries_of(source)
    with safe_open(source, "pt") as content, target.open("r+b") as file:
        changed = {key: layers[key] for key in content.keys() if key in layers}  # noqa: SIM118, it is no mapping
        for layer in dict.fromkeys(changed.values()):  # all parts of a weight together, as they share their deltas
            deltas: dict[torch.dtype, dict[str, Tensor]] = {}
            for key in (key for key, its in changed.items() if its is layer):
                tensor = content.get_tensor(key)
                if isinstance(layer, _Split):
                    if tensor.dtype not in deltas:
                        deltas[tensor.dtype] = layer.deltas(tensor.dtype)
                    merged = tensor + deltas[tensor.dtype][key]
                else:
                    merged = _merged(layer, tensor)
                assert (merged.shape, merged.dtype) == (tensor.shape, tensor.dtype), key
                file.seek(first + entries[key]["data_offsets"][0])
                file.write(merged.contiguous().view(-1).view(torch.uint8).numpy().data)


def _merged(layer: Any, tensor: Tensor) -> Tensor:
    """The merged value of a weight that the files have in one piece."""
    if isinstance(layer, Tensor):
        return layer.to(tensor.dtype)
    its, name = layer.get_base_layer(), _weight_of(layer)
    setattr(its, name, nn.Parameter(tensor.clone(), requires_grad=False))
    layer.merge()
    merged: Tensor = getattr(its, name).data
    setattr(its, name, nn.Parameter(merged.to("meta"), requires_grad=False))
    return merged
