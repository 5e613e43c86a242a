from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from planner.errors import UserError
from planner.graph import find_blocks
from planner.graph.fake import FakeMode
from tests.support.families import t5
from tests.support.tiny_models import VOCABULARY, batch_of, make_model

torch.set_num_threads(1)

WHERE = {
    "llama": ("model.embed_tokens", "model.layers", "lm_head"),
    "qwen2": ("model.embed_tokens", "model.layers", "lm_head"),
    "gpt2": ("transformer.wte", "transformer.h", "lm_head"),
    "bloom": ("transformer.word_embeddings", "transformer.h", "lm_head"),
}


@pytest.mark.parametrize("name", WHERE)
def test_embedding_layers_and_head_are_found_without_weights(name):
    embedding, layers, head = WHERE[name]
    model = make_model(name, layers=4).to("meta")
    for buffer_name, buffer in make_model(name, layers=4).named_buffers():
        module, _, local = buffer_name.rpartition(".")
        setattr(model.get_submodule(module), local, buffer)
    found = find_blocks(model, batch_of(), device=torch.device("cpu"))
    assert found.all == (embedding, *(f"{layers}.{i}" for i in range(4)), head)
    assert len(set(found.kinds)) == 3
    assert found.kinds[1] == found.kinds[2] == found.kinds[3] == found.kinds[4]


def test_an_encoder_and_a_decoder_are_one_chain_with_two_embeddings():
    found = find_blocks(t5(), batch_of())
    stacks = [[f"{stack}.embed_tokens", *(f"{stack}.block.{i}" for i in range(2))] for stack in ("encoder", "decoder")]
    assert list(found.all) == [*stacks[0], *stacks[1], "lm_head"]


def test_layers_with_another_attention_are_another_kind():
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        use_cache=False,
        layer_types=["sliding_attention", "full_attention"] * 2,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
    )
    kinds = find_blocks(transformers.Gemma3ForCausalLM(config).train(), batch_of()).kinds
    assert kinds[1] == kinds[3] != kinds[2] == kinds[4]


def test_the_kind_depends_on_constants_shapes_and_what_is_trained():
    def kind(batch=None, **shape):
        return find_blocks(make_model("gpt2", **shape), batch or batch_of()).kinds[1]

    assert kind() == kind()
    assert kind() != kind(dropout=0.2)
    assert kind() != kind(width=64)
    assert kind() != kind(batch_of(length=8))
    frozen = make_model("gpt2")
    frozen.transformer.h[1].requires_grad_(False)
    kinds = find_blocks(frozen, batch_of()).kinds
    assert kinds[1] != kinds[2]


def test_two_layers_that_differ_only_in_a_tensor_made_in_their_code_are_two_kinds():
    model = make_model("llama", layers=2)
    for index, layer in enumerate(model.model.layers):
        own = layer.mlp.forward
        layer.mlp.forward = lambda x, own=own, index=index: own(x) * torch.tensor(1.0 + index)
    kinds = find_blocks(model, batch_of()).kinds
    assert kinds[1] != kinds[2]


def test_detection_leaves_the_model_and_the_random_numbers_as_they_were():
    model = make_model("gpt2")
    before = dict(model.named_parameters())
    state = torch.get_rng_state()
    find_blocks(model, batch_of())
    assert all(p is before[n] for n, p in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_that_is_no_chain_of_layers_is_refused_with_the_reason():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

        def get_input_embeddings(self):
            return self.embed

        def get_output_embeddings(self):
            return self.head

        def forward(self, input_ids, labels):
            return self.head(self.embed(input_ids))

    with pytest.raises(UserError, match="no repeated layers") as caught:
        find_blocks(Odd(), batch_of())
    assert caught.value.code == "blocks-not-found"
    with pytest.raises(UserError, match="it has 1 modules with weights that run one after the other"):
        find_blocks(nn.Sequential(nn.Linear(8, 8)), {"input": torch.ones(2, 8)})


def test_a_weight_that_is_read_outside_its_block_is_refused_by_name():
    def scaled(where, weight, held):
        model = make_model("llama")
        owner, local = model.get_submodule(weight.rpartition(".")[0]), weight.rpartition(".")[2]
        own = getattr(owner, local)

        def scale(module, args, out):
            return out * (own if held else getattr(owner, local)).detach().abs().mean()

        model.get_submodule(where).register_forward_hook(scale)
        return model

    for where, held in (("model.norm", False), ("lm_head", False), ("model.layers.1", True)):
        with pytest.raises(UserError, match=r"lm_head\.weight is read outside of its block") as caught:
            find_blocks(scaled(where, "lm_head.weight", held), batch_of())
        assert caught.value.code == "weight-read-outside"
    find_blocks(scaled("model.layers.1", "model.norm.weight", False), batch_of())  # the frame's own
    model = make_model("llama")
    model.model.norm.register_forward_hook(
        lambda m, args, out: out.to(model.lm_head.weight.dtype) + torch.zeros_like(model.lm_head.weight.T)[:, 0]
    )
    find_blocks(model, batch_of())  # shape and dtype may be read


def test_a_count_without_data_is_as_long_as_the_model_says():
    fake = FakeMode().like(torch.zeros(5, dtype=torch.int64))
    counts = torch.bincount(fake, minlength=8)
    assert (counts.shape, counts.dtype) == ((8,), torch.int64)
    with pytest.raises(RuntimeError, match="bincount"):
        torch.bincount(fake)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (transformers.OPTConfig(hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, layerdrop=0.1), "model.decoder."),
        (transformers.XGLMConfig(d_model=32, ffn_dim=64, attention_heads=4, layerdrop=0.1), "model."),
    ],
    ids=["opt", "xglm"],
)
def test_a_model_that_drops_layers_is_refused_before_any_step(config, place):
    for key in ("num_hidden_layers", "num_layers"):
        if hasattr(config, key):
            setattr(config, key, 3)
    config.vocab_size, config.num_attention_heads = VOCABULARY, 4
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(UserError, match=r"leaves out layers at random(?s:.*)layerdrop is 0\.1") as told:
        find_blocks(model, batch_of())
    assert told.value.code == "layers-dropped"
    assert told.value.numbers == (f"{place}layerdrop is 0.1",)
