"""A finished model as a GGUF file, by llama.cpp's converter: the real one where it is installed, else the refusal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from planner.errors import UserError
from planner.job.schema import Job
from tests.support.lora_jobs import lora_job
from tests.support.texts import make_job
from tests.worker.training.test_merged import adapters_of
from worker.export import main
from worker.training.gguf import LLAMA_CPP, converter
from worker.training.merged import write_merged


def finished(tmp_path: Path, **keys: Any) -> tuple[Job, Path]:
    """A LoRA job with adapters in its run's folder, on a base whose tokenizer the converter knows the kind of."""
    job, run = lora_job(tmp_path, **keys), tmp_path / "run"
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(job.model)
    run.mkdir()
    (run / "resolved.yaml").write_text(job.resolved_yaml())
    adapters_of(job, run / "output")
    tokenizer.save_pretrained(run / "output")
    return job, run


def test_without_the_converter_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(LLAMA_CPP, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    _, run = finished(tmp_path)
    capsys.readouterr()
    assert main([str(run), str(tmp_path / "m.gguf"), "--gguf=auto"]) == 2
    assert capsys.readouterr().err == (
        "llama.cpp's converter, which writes GGUF files, is not here.\n"
        "  no convert_hf_to_gguf.py on the PATH, and LLAMA_CPP names none\n"
        "  hint: git clone --depth 1 https://github.com/ggml-org/llama.cpp && "
        f"{sys.executable} -m pip install sentencepiece && export LLAMA_CPP=$PWD/llama.cpp   [no-converter]\n"
    )
    monkeypatch.setenv(LLAMA_CPP, str(tmp_path))
    with pytest.raises(UserError, match=r"there is no convert_hf_to_gguf\.py"):
        converter()
    assert main([str(run), str(tmp_path / "m.gguf"), "--gguf=q4_k_m"]) == 2
    assert "[bad-gguf-type]" in capsys.readouterr().err
    (run / "output" / "adapter_config.json").unlink()
    assert main([str(run), str(tmp_path / "m.gguf"), "--gguf=auto"]) == 2
    assert "[nothing-to-export]" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


def test_a_clone_runs_in_this_python_and_an_installed_converter_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "convert_hf_to_gguf.py"
    script.touch(0o755)
    monkeypatch.delenv(LLAMA_CPP, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert converter() == [str(script)]
    packaged = script.rename(tmp_path / "convert-hf-to-gguf")
    assert converter() == [str(packaged)]
    packaged.rename(script)
    (tmp_path / "gguf-py").mkdir()
    assert converter() == [sys.executable, str(script)]
    monkeypatch.setenv("PATH", "/nowhere")
    for named in (tmp_path, script):
        monkeypatch.setenv(LLAMA_CPP, str(named))
        assert converter() == [sys.executable, str(script)]


def test_a_converter_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, run = finished(tmp_path)
    there = set(tmp_path.iterdir())
    script = tmp_path / "elsewhere" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(
        "import os, pathlib, sys\n"
        "assert pathlib.Path(sys.argv[1], 'model.safetensors').is_file()\n"
        "pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text('half of it')\n"
        "sys.exit(f\"no such family; offline: {os.environ['HF_HUB_OFFLINE']}\")\n"
    )
    monkeypatch.setenv(LLAMA_CPP, str(script.parent))
    assert main([str(run), str(tmp_path / "m.gguf"), "--gguf=auto"]) == 1
    said = capfd.readouterr().err
    assert "no such family; offline: 1" in said and "ended with 1; why is above" in said and "[not-converted]" in said
    assert "offmate export ID FOLDER/ writes what it reads" in said
    assert set(tmp_path.iterdir()) == {*there, script.parent}
    job = Job.from_resolved(run / "resolved.yaml")
    write_merged(job, run / "output", tmp_path / "whole")
    (run / "resolved.yaml").write_text(make_job(Path(job.model), Path(job.data[0].path)).resolved_yaml())
    shutil.rmtree(run / "output")
    (tmp_path / "whole").rename(run / "output")
    assert main([str(run), str(tmp_path / "m.gguf"), "--gguf=auto"]) == 1
    assert f"it reads the model folder {run / 'output'}   [not-converted]" in capfd.readouterr().err
    assert main([str(run), str(tmp_path / "folder")]) == 2
    assert f"  its model is {run / 'output'}\n" in capfd.readouterr().err


def _has_converter() -> bool:
    try:
        return bool(converter())
    except UserError:
        return False


@pytest.mark.skipif(not _has_converter(), reason=f"llama.cpp's converter is not here: {LLAMA_CPP} may name it")
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_file_has_the_merged_models_weights_and_a_name(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = finished(tmp_path, run_name="Tiny")
    write_merged(job, run / "output", tmp_path / "merged")
    if method == "full":
        whole = make_job(Path(job.model), Path(job.data[0].path), run_name="Tiny")
        (run / "resolved.yaml").write_text(whole.resolved_yaml())
        shutil.rmtree(run / "output")
        shutil.copytree(tmp_path / "merged", run / "output")
    target = tmp_path / "folder" / "m.gguf"
    assert main([str(run), str(target), "--gguf=f32"]) == 0
    assert list(target.parent.iterdir()) == [target]
    if (library := Path(converter()[-1]).parent / "gguf-py").is_dir():
        monkeypatch.syspath_prepend(library)
    reader = pytest.importorskip("gguf").GGUFReader(target)
    assert bytes(reader.fields["general.name"].parts[-1]) == b"Tiny"
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    wanted = load_file(tmp_path / "merged" / "model.safetensors")
    assert len(found) == len(wanted) == len(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict())
    same = {
        "token_embd": "model.embed_tokens",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "blk.2.attn_v": "model.layers.2.self_attn.v_proj",
        "output": "lm_head",
    }
    for theirs, ours in same.items():
        assert torch.equal(found[f"{theirs}.weight"], wanted[f"{ours}.weight"])
    assert main([str(run), str(target), "--gguf=f32"]) == 2
