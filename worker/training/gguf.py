"""Converts a model folder to one GGUF file with llama.cpp's own converter, where that is installed.

The converter is a separate program (`convert_hf_to_gguf.py`) that knows each family's names and tokenizers. It runs as
a child process, reports on stderr, and reads weights one at a time.
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
"""The name of the environment variable with the path of llama.cpp's converter, or of the folder that contains it."""
TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
"""The types that weights may get, in the converter's words; auto: 16 bits, bf16 where the model has that."""
_NAMES = ("convert_hf_to_gguf.py", "convert_hf_to_gguf", "convert-hf-to-gguf")


def converter() -> list[str]:
    """The first words of the command line that runs llama.cpp's converter. Raises UserError `no-converter` where none
    is found.

    A clone of llama.cpp has the converter's library beside it, so the converter runs in this Python, which has all else
    that it needs. An installed converter starts with its own Python."""
    if named := os.environ.get(LLAMA_CPP, "").strip():
        place = Path(named).expanduser()
        files = [place / name for name in _NAMES] if place.is_dir() else [place]
        script = next((file for file in files if file.is_file()), None)
        where = f"{LLAMA_CPP}={named}: there is no {files[0].name}" if place.is_dir() else f"{LLAMA_CPP}={named}"
    else:
        script = next((Path(file) for name in _NAMES if (file := shutil.which(name))), None)
        where = f"no {_NAMES[0]} on the PATH, and {LLAMA_CPP} names none"
    if script is None:
        raise UserError(
            "llama.cpp's converter, which writes GGUF files, is not here.",
            code="no-converter",
            numbers=(where,),
            hint="git clone --depth 1 https://github.com/ggml-org/llama.cpp && "
            f"{sys.executable} -m pip install sentencepiece && export {LLAMA_CPP}=$PWD/llama.cpp",
            exit_code=Exit.USAGE,
        )
    script = script.absolute().resolve()
    runs_here = (script.parent / "gguf-py").is_dir() or not os.access(script, os.X_OK)
    return [*([sys.executable] if runs_here else []), str(script)]


def write_gguf(job: Job, output: Path, target: Path, kind: str) -> None:
    """Write the trained model of `job` to the new GGUF file `target`, with weights of the type `kind` (one of TYPES).
    `output`: the job's model folder; if it holds adapters, they are first merged into their base, in a temporary
    folder. Raises UserError; then nothing is left behind."""
    if kind not in TYPES:
        raise UserError(
            f"--gguf {kind}: GGUF files are written as {', '.join(TYPES)}.",
            code="bad-gguf-type",
            exit_code=Exit.USAGE,
            hint="smaller ones are made of such a file by llama-quantize, which is llama.cpp's, too",
        )
    if target.exists():
        raise UserError(
            f"{target} is there already.", code="output-dir-used", exit_code=Exit.USAGE, hint="give a file that is new"
        )
    command = converter()
    draft = target.with_name(f".{target.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        model, larger = output, 2 if kind == "f32" else 1  # the file's size in multiples of the weights' in 16 bits
        if (output / "adapter_config.json").is_file():
            from worker.training.merged import write_merged

            model, reads = draft / "model", "offmate export ID FOLDER/ writes what it reads"
            write_merged(job, output, model, beside=larger)
        else:
            reads = f"it reads the model folder {output}"
            weights = sum(file.stat().st_size for file in output.glob("*.safetensors"))
            wide = json.loads((output / "config.json").read_text("utf-8")).get("dtype") == "float32"
            check_space(draft, larger * weights // (2 if wide else 1) + FILES_BYTES, "the GGUF file")
        model = _ending_as_taught(job, model, draft / "ends")
        converted = draft / "made.gguf"
        name = job.run_name or target.stem
        options = ["--outfile", str(converted), "--outtype", kind, "--model-name", name]
        print(f"{Path(command[-1]).name} writes {target.name}:", file=sys.stderr, flush=True)
        code = subprocess.call([*command, str(model), *options], stdin=subprocess.DEVNULL, env=_alone(draft))
        if code or not converted.is_file():
            raise UserError(
                "llama.cpp's converter did not write the model.",
                code="not-converted",
                numbers=(f"{command[-1]} ended with {code}; why is above",),
                hint=f"it may be older than the model's family, or not know its tokenizer; {reads}",
            )
        sync(converted)
        converted.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _ending_as_taught(job: Job, model: Path, folder: Path) -> Path:
    """The folder to convert: `model`, or `folder` where the model stops at a new token that is not its tokenizer's end
    token. Then `folder` links to the files of `model`, but has a tokenizer whose end token is the new one. The
    converter writes only the tokenizer's end token; llama.cpp knows some others by their texts, such as <|im_end|>."""
    from transformers import AddedToken, AutoTokenizer

    from worker.training.ends import Ends, ends_in_folder, ends_of_files

    with contextlib.suppress(UserError):  # where the base is gone, nobody knows which end tokens are new
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
    """The converter's environment, without progress bars and without the hub. Else the converter would run code that a
    tokenizer names in a repository of the hub; offline and with an empty cache there is no such code."""
    return {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "no-hub")}
