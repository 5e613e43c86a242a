"""A model folder as one GGUF file, made by llama.cpp's own converter where that is installed.

The converter is a program of its own (`convert_hf_to_gguf.py`), which knows each family's names and tokenizers: it runs
as a child process, says on stderr what it does, and reads weights one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from planner.disk import check_space, sync
from planner.errors import Exit, UserError
from planner.job.room import FILES_BYTES
from planner.job.schema import Job

LLAMA_CPP = "LLAMA_CPP"
"""The variable that names the converter, or the folder it is in."""
TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
"""What weights become, in the converter's words; auto: 16 bits, bf16 where the model has that."""
_NAMES = ("convert_hf_to_gguf.py", "convert_hf_to_gguf")


def converter() -> list[str]:
    """The beginning of the command that converts. Raises UserError `no-converter` where none is found.

    A clone of llama.cpp has the converter's library beside it: there it runs in this Python, which has all else that it
    needs. An installed one knows its own.
    """
    if named := os.environ.get(LLAMA_CPP, "").strip():
        place = Path(named).expanduser()
        found = [place / name for name in _NAMES] if place.is_dir() else [place]
        script = next((file for file in found if file.is_file()), None)
        where = f"{LLAMA_CPP}={named}: there is no {found[0].name}" if place.is_dir() else f"{LLAMA_CPP}={named}"
    else:
        script = next((Path(file) for name in _NAMES if (file := shutil.which(name))), None)
        where = f"no {_NAMES[0]} on the PATH, and {LLAMA_CPP} names none"
    if script is None:
        raise UserError(
            "llama.cpp's converter, which writes GGUF files, is not here.", code="no-converter", numbers=(where,),
            hint="git clone --depth 1 https://github.com/ggml-org/llama.cpp && "
            f"{sys.executable} -m pip install sentencepiece && export {LLAMA_CPP}=$PWD/llama.cpp",
            exit_code=Exit.USAGE,
        )  # fmt: skip
    script = script.absolute().resolve()
    runs_here = (script.parent / "gguf-py").is_dir() or not os.access(script, os.X_OK)
    return [*([sys.executable] if runs_here else []), str(script)]


def write_gguf(job: Job, output: Path, target: Path, kind: str) -> None:
    """Write the model of `job` as the file `target`, which is new, with weights of `kind` (one of TYPES). `output` is
    its model folder; adapters there are merged into their base first, in a folder that goes again. Raises UserError;
    then nothing of it is there."""
    if kind not in TYPES:
        raise UserError(
            f"--gguf {kind}: GGUF files are written as {', '.join(TYPES)}.", code="bad-gguf-type", exit_code=Exit.USAGE,
            hint="smaller ones are made of such a file by llama-quantize, which is llama.cpp's, too",
        )  # fmt: skip
    if target.exists():
        raise UserError(
            f"{target} is there already.", code="output-dir-used", exit_code=Exit.USAGE, hint="give a file that is new"
        )
    command = converter()
    draft = target.with_name(f".{target.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        model, larger = output, 2 if kind == "f32" else 1  # of weights in 16 bits
        if (output / "adapter_config.json").is_file():
            from worker.training.merged import write_merged

            model = draft / "model"
            write_merged(job, output, model, beside=larger)
        else:
            weights = sum(file.stat().st_size for file in output.glob("*.safetensors"))
            wide = json.loads((output / "config.json").read_text("utf-8")).get("dtype") == "float32"
            check_space(draft, larger * weights // (2 if wide else 1) + FILES_BYTES, "the GGUF file")
        model = _ending_as_taught(job, model, draft / "ends")
        made = draft / "made.gguf"
        name = job.run_name or target.stem
        options = ["--outfile", str(made), "--outtype", kind, "--model-name", name]
        print(f"{Path(command[-1]).name} writes {target.name}:", file=sys.stderr, flush=True)
        code = subprocess.call([*command, str(model), *options], stdin=subprocess.DEVNULL, env=_alone(draft))
        if code or not made.is_file():
            raise UserError(
                "llama.cpp's converter did not write the model.", code="not-converted",
                numbers=(f"{command[-1]} ended with {code}; why is above",),
                hint="it may be older than the model's family, or not know its tokenizer; offmate export ID FOLDER/ "
                "writes what it reads",
            )  # fmt: skip
        sync(made)
        made.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _ending_as_taught(job: Job, model: Path, folder: Path) -> Path:
    """`model`; or where it stops at a token that its base did not, and that is not its tokenizer's end token, a
    `folder` that links to it with a tokenizer whose end token is that one. Of all end tokens the converter writes the
    tokenizer's alone; llama.cpp knows some others by their texts, as <|im_end|>."""
    from transformers import AddedToken, AutoTokenizer

    from worker.training.ends import Ends, ends_in_folder, ends_of_files

    with contextlib.suppress(UserError):  # the base is gone: then nobody knows which are new
        ends = Ends(taught=ends_in_folder(model), before=ends_of_files(job))
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if ends.new and tokenizer.eos_token_id not in ends.new:
            token = str(tokenizer.convert_ids_to_tokens(ends.new[0]))
            tokenizer.add_special_tokens({"eos_token": AddedToken(token, normalized=False, special=True)})
            tokenizer.save_pretrained(folder)
            for file in model.iterdir():
                if not (folder / file.name).exists():
                    (folder / file.name).symlink_to(file.absolute())
            return folder
    return model


def _alone(folder: Path) -> dict[str, str]:
    """The converter's environment, without bars. It would run code that a tokenizer names in a repository of
    the hub: with nothing to download and nothing downloaded before, there is none."""
    return {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "no-hub")}
