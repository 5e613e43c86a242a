"""Documents as tokens: which are learned, and in how much memory."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from planner.data.job_keys import DataKeys, RowKeys
from planner.job.schema import Job
from tests.support.texts import make_job, tiny_llama_folder, write_jsonl
from worker.data import batches
from worker.data import corpus as corpora
from worker.data.batches import learned_of, rows_of
from worker.data.corpus import Corpus, encode
from worker.data.formats import Document

WORDS = ["héllo", "日本語", "a", " ", "\n", "<|end|>", "🙂🙂", "the quick", "e\u0301"]
TEMPLATES = {"none": None, "begin": "<s> $A", "both": "<s> $A <|end|>"}


def texts() -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(60)]


def tokenizer(spaces: str, template: str | None) -> PreTrainedTokenizerFast:
    library = Tokenizer(models.BPE())
    pieces = {"bytes": pre_tokenizers.ByteLevel(add_prefix_space=False), "words": pre_tokenizers.Metaspace()}
    library.pre_tokenizer = pieces[spaces]
    special = ["<s>", "<|end|>"]
    library.train_from_iterator(texts(), trainers.BpeTrainer(special_tokens=special, show_progress=False))
    if template is not None:
        ids = [(token, library.token_to_id(token)) for token in special]
        library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|end|>", bos_token="<s>")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tiny_llama_folder(tmp_path / "model"), write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))


@pytest.mark.parametrize("spaces", ["bytes", "words"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_token_is_learned_where_it_shares_a_character_with_a_trained_span(spaces: str, template: str) -> None:
    """Also where the span is the whole text, whose tokens are marked without asking each for its place."""
    its, rng = tokenizer(spaces, TEMPLATES[template]), random.Random(2)
    for text in texts():
        cuts = sorted(rng.sample(range(len(text) + 1), 2))
        for trained in (((0, len(text)),), ((cuts[0], cuts[1]),), ()):
            ((ids, learned),) = encode([Document(text=text, trained=trained, ended=False)], its)
            plain = its(text, return_offsets_mapping=True)
            assert ids.tolist() == plain["input_ids"]
            wanted = [
                any(begin < last and end > first for first, last in trained) for begin, end in plain["offset_mapping"]
            ]
            assert learned.tolist() == wanted, (text, trained)


def corpus(lengths: list[int]) -> Corpus:
    count = sum(lengths)
    trained = np.random.default_rng(0).random(count) < 0.3
    return Corpus(tokens=np.zeros(count, np.int32), trained=trained, ends=np.cumsum(lengths), fingerprint="")


@pytest.mark.parametrize("at_once", [1, 7, 10**6])
def test_learned_tokens_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(batches, "_AT_ONCE", at_once)
    its = corpus([3, 0, 9, 1, 1, 30, 2])
    starts = np.concatenate(([0], its.ends[:-1]))
    found = learned_of(its, starts, its.ends)
    pairs = zip(starts, its.ends, strict=True)
    assert found.tolist() == [int(its.trained[start:end].sum()) for start, end in pairs]


def test_rows_take_no_memory_by_the_token(job: Job) -> None:
    its = corpus([2000] * 2000)
    tracemalloc.start()
    try:
        rows_of(its, job)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20  # four million tokens
    finally:
        tracemalloc.stop()


def test_each_key_of_data_makes_other_tokens_or_is_named_here() -> None:
    changing = {"broken_rows", *corpora._KEYS, *corpora._CUT, *corpora._ONCE, *corpora._WHERE_GIVEN, *corpora._MIXED}
    keys = {*DataKeys.model_fields, *RowKeys.model_fields}
    assert keys - changing == {"group_by_length", "max_target_length"}, (
        "a key that changes which tokens there are belongs into a table of worker/data/corpus.py"
    )
