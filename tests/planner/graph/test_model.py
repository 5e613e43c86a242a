from __future__ import annotations

import pytest
import torch

from planner.errors import UserError
from planner.job.schema import Job
from planner.models.hf_model import build_model, model_config, sample_batch, skeleton_model
from tests.support.tiny_models import NAMES, config_of


def job_for(folder, **keys) -> Job:
    return Job(model=str(folder), tokenizer=str(folder), dataset=("none",), **keys)


@pytest.mark.parametrize("name", NAMES)
def test_a_skeleton_has_the_models_names_shapes_ties_and_buffers_but_no_weights(name, tmp_path):
    config_of(name).save_pretrained(tmp_path)
    job = job_for(tmp_path)
    skeleton, real = skeleton_model(job), build_model(job, model_config(job))
    described = [{n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()} for m in (skeleton, real)]
    assert described[0] == described[1]
    assert all(p.is_meta for p in skeleton.parameters())
    buffers = dict(skeleton.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys()
    assert all(torch.equal(buffers[n], b) for n, b in real.named_buffers())
    tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (skeleton, real)]
    assert tied[0] == tied[1] == (name != "llama")
    assert skeleton.training


def test_bf16_jobs_have_bf16_weights_and_the_chosen_attention(tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    model = skeleton_model(job_for(tmp_path, bf16=True, attn_implementation="eager"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert not model.config.use_cache


def test_a_folder_without_config_json_is_no_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json") as caught:
        skeleton_model(job_for(tmp_path))
    assert caught.value.code == "model-not-usable"
    assert caught.value.exit_code == 2


def test_a_config_that_is_no_causal_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError) as caught:
        skeleton_model(job_for(tmp_path))
    assert caught.value.code == "model-not-usable"


def test_the_sample_batch_is_the_largest_slice(tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    batch = sample_batch(job_for(tmp_path, per_device_train_batch_size=3, max_length=64))
    assert {n: (tuple(t.shape), t.dtype) for n, t in batch.items()} == {
        "input_ids": ((3, 64), torch.int64),
        "labels": ((3, 64), torch.int64),
    }
