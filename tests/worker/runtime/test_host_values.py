"""A model's code that looks at numbers on the device: what the host can say, it says."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from tests.support.engines import assert_same, assert_same_state, run
from tests.support.families import FAMILIES, family_model, masked_batch, t5
from tests.support.tiny_models import batch_of
from worker.runtime.cpu import CpuMachine
from worker.runtime.host_values import HostValues

torch.set_num_threads(1)
META = torch.device("meta")
"""A device that has no numbers: whoever looks at one there gets an error."""
WAITS = {"mixtral": "bincount"} if Version(transformers.__version__) < Version("5.23") else {}
"""What the device must count without a mask, for a mixture's auxiliary loss: which experts it chose."""


@pytest.mark.parametrize("batch", [batch_of(), masked_batch()], ids=["texts", "masked"])
@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_no_familys_forward_needs_to_look_at_the_device(family, batch):
    model = (t5() if family == "t5" else family_model(family)).to(META)
    if family in ("llama", "gpt2"):
        with pytest.raises(RuntimeError, match="meta"):
            model(**{name: t.to(META, copy=True) for name, t in batch.items()})
    with HostValues(META):
        given = {name: t.to(META, copy=True, non_blocking=True) for name, t in batch.items()}
        if family in WAITS and "attention_mask" not in batch:
            with pytest.raises(NotImplementedError, match=WAITS[family]):
                model(**given, num_items_in_batch=7)
        else:
            assert model(**given, num_items_in_batch=7).loss.device == META


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_engine_whose_host_answers_has_plain_bits(make, name, monkeypatch):
    monkeypatch.setattr(CpuMachine, "frame", lambda self, batch: HostValues(self.device))
    engine, plain = make(name, slices=2)
    assert_same(run(engine, range(2), 2), run(plain, range(2), 2))
    assert_same_state(engine, plain)


def test_answers_are_those_of_the_device():
    ids = torch.tensor([[3, 4, 5], [6, 7, 1]])
    with HostValues(META):
        given = ids.to(META, copy=True)
        positions = torch.arange(3, device=META).unsqueeze(0) + 1
        assert 1 in given[:, [-1, 0]] and 9 not in given
        assert bool((torch.diff(positions, dim=-1) == 1).all())
        assert int(positions.expand(2, -1).max()) == 3
        assert (given != 1).sum().item() == 5
        assert bool((given[:, :1] > positions).any() & given.bool().all())
        assert bool(torch.ones(2, 3, device=META).to(torch.bool).all())


def test_what_the_device_computed_or_changed_is_not_known():
    with HostValues(META):
        positions = torch.arange(3, device=META)
        chosen = torch.ones(3, device=META).argmax()
        for unknown in (chosen, positions + chosen, torch.arange(3.0, device=META) > 1):
            with pytest.raises(RuntimeError, match="meta"):
                bool(unknown.all())
        view = positions[1:]
        assert view.sum().item() == 3
        positions.add_(1)
        with pytest.raises(RuntimeError, match="meta"):
            view.sum().item()


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t[:1] + 1], ids=["copied", "computed"])
def test_what_the_host_changed_after_it_was_copied_is_not_known(make):
    source = torch.tensor([1, 2, 3])
    with HostValues(META):
        made = make(source.to(META))
        made.sum().item()
        source.add_(1)
        with pytest.raises(RuntimeError, match="meta"):
            made.sum().item()
        assert source.to(META).sum().item() == 9


def test_whether_an_element_is_in_it_is_known_of_known_elements():
    with HostValues(META):
        positions = torch.arange(3, device=META)
        assert positions[:1] in positions and positions[2:] + 1 not in positions
        unknown = torch.ones(3, device=META).argmax()
        with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
            assert unknown in positions


def test_a_range_up_to_a_tensor_is_not_known():
    end = torch.tensor(3)
    with HostValues(META):
        for made in (torch.arange(end, device=META), torch.arange(end=end, device=META)):
            with pytest.raises(RuntimeError, match="meta"):
                made.sum().item()
