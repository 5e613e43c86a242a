"""Rows of preferences: their tokens, and which of these are scored, are what TRL's trainers make of the records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from trl import DPOTrainer, KTOTrainer
from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from planner.data.entry import DataEntry
from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.schema import Job
from tests.support.texts import CHATML, make_job, tiny_llama_folder, write_jsonl
from tests.worker.data.test_chat import FOLDER
from worker.data.corpus import load_corpus
from worker.data.documents import documents_of

Row = list[tuple[int, bool]]
TEMPLATES = [
    "chatml",
    *("llama3", "llama3_1", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "gemma", "gemma3", "gemma4"),
    *("phi3", "glm4moe", "deepseekv3", "deepseek_r1_distill", "cohere", "lfm2"),
]


def said(*contents: str, last: str = "assistant") -> list[dict[str, str]]:
    """Turns of user and assistant, one after the other; the last one is of `last`."""
    others = {"user": "assistant", "assistant": "user"}
    roles = [others[last] if (len(contents) - place) % 2 == 0 else last for place in range(len(contents))]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]


PAIRS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"prompt": said("2+2?", last="user"), "chosen": said("four"), "rejected": said("five!")},
        {"prompt": said("hi", "yes?", "so", last="user"), "chosen": said("no"), "rejected": said("no\n")},
    ],
    "messages with an implicit prompt": [
        {"chosen": said("2+2?", "four"), "rejected": said("2+2?", "five")},
        {"chosen": said("hi", "yes?", "so", "no"), "rejected": said("hi", "yes?", "so", "no")},
    ],
    "texts": [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5 or 6"},
        {"prompt": "so ", "chosen": "no<eos>", "rejected": "no"},
        {"prompt": "a\n", "chosen": "\nb", "rejected": "b"},
        {"prompt": "", "chosen": "yes", "rejected": "no"},
    ],
    "texts with an implicit prompt": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "yes", "rejected": "yes!"},
        {"chosen": "no", "rejected": "no"},
    ],
}
ANSWERS = [
    {"prompt": said("2+2?", last="user"), "completion": said("four"), "label": True},
    {"prompt": said("hi", "yes?", "so", last="user"), "completion": said("no"), "label": False},
]


def tokenizer_of(template: str, *, begins: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, for two newlines, and for a space with a letter b or n before it, which
    begins texts with <s> where it `begins` them."""
    chars = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("Ġ", "b"), ("Ġ", "n")]
    vocabulary = chars | {"".join(pair): 256 + number for number, pair in enumerate(merges)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>", "<pad>", "<s>", "<|im_start|>", "<|im_end|>"])
    if begins:
        first = ("<s>", inner.token_to_id("<s>"))
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", bos_token="<s>")
    tokenizer.chat_template = CHATML if template == "chatml" else (FOLDER / f"{template}.jinja").read_text("utf-8")
    return tokenizer


def job_of(folder: Path, records: list[dict[str, Any]], **keys: Any) -> Job:
    path = write_jsonl(folder / "data.jsonl", records)
    keys = {"preference": "dpo", **keys}
    return make_job(tiny_llama_folder(folder / "model"), path, **{k: v for k, v in keys.items() if v is not None})


def rows_of(job: Job, tokenizer: PreTrainedTokenizerFast) -> list[tuple[Row, Row]]:
    found = []
    for document in documents_of(job, tokenizer, pairs=False):
        chosen, rejected = ([(int(token), scored) for token, scored in row] for row in document.rows)
        found.append((chosen, rejected))
    return found


def row(prompt: list[int], answer: list[int]) -> Row:
    return [*((token, False) for token in prompt), *((token, True) for token in answer)]


def rows_of_dpo(records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[tuple[Row, Row]]:
    trainer, args = SimpleNamespace(_tokenizer=tokenizer), SimpleNamespace(dataset_num_proc=None, max_length=None)
    data = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(records), tokenizer, args, "train")
    return [(row(one["prompt_ids"], one["chosen_ids"]), row(one["prompt_ids"], one["rejected_ids"])) for one in data]


def rows_of_kto(records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[tuple[Row, Row]]:
    trainer = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None)
    data = KTOTrainer._prepare_dataset(trainer, Dataset.from_list(records), tokenizer, args, "train")
    rows = [(row(one["prompt_ids"], one["completion_ids"]), one["label"]) for one in data]
    if "label" not in records[0]:  # TRL has all chosen answers first
        half = len(rows) // 2
        return [(chosen[0], rejected[0]) for chosen, rejected in zip(rows[:half], rows[half:], strict=True)]
    return [(found, []) if label else ([], found) for found, label in rows]


def rows_of_orpo(kind: type) -> Callable[..., list[tuple[Row, Row]]]:
    def rows(records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[tuple[Row, Row]]:
        trainer = SimpleNamespace(processing_class=tokenizer, is_encoder_decoder=False, max_length=10**6)
        trainer.build_tokenized_answer = lambda *texts: kind.build_tokenized_answer(trainer, *texts)
        found = []
        for record in records:
            example = maybe_apply_chat_template(maybe_extract_prompt(record), tokenizer)
            one = kind.tokenize_row(trainer, example)
            pair = [
                [(token, label != -100) for token, label in zip(one[f"{k}_input_ids"], one[f"{k}_labels"], strict=True)]
                for k in ("chosen", "rejected")
            ]
            found.append((pair[0], pair[1]))
        return found

    return rows


TRAINERS = {
    "dpo": rows_of_dpo,
    "simpo": rows_of_orpo(CPOTrainer),
    "orpo": rows_of_orpo(ORPOTrainer),
    "kto": rows_of_kto,
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("loss", TRAINERS)
def test_conversations_are_scored_as_in_trl(tmp_path: Path, loss: str, template: str) -> None:
    tokenizer = tokenizer_of(template)
    for name in ("messages", "messages with an implicit prompt"):
        job = job_of(tmp_path, PAIRS[name], preference=loss)
        assert rows_of(job, tokenizer) == TRAINERS[loss](PAIRS[name], tokenizer), name


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("loss", TRAINERS)
def test_texts_are_scored_as_in_trl(tmp_path: Path, loss: str, begins: bool) -> None:
    tokenizer = tokenizer_of("chatml", begins=begins)
    for name in ("texts", "texts with an implicit prompt"):
        job = job_of(tmp_path, PAIRS[name], preference=loss)
        assert rows_of(job, tokenizer) == TRAINERS[loss](PAIRS[name], tokenizer), name


@pytest.mark.parametrize("template", TEMPLATES)
def test_answers_with_a_label_are_scored_as_in_trl(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(template)
    assert rows_of(job_of(tmp_path, ANSWERS, preference="kto"), tokenizer) == rows_of_kto(ANSWERS, tokenizer)


def test_texts_with_a_label_are_scored_as_in_trl(tmp_path: Path) -> None:
    records = [
        {"prompt": "2+2=", "completion": "4", "label": True},
        {"prompt": "a ", "completion": "no", "label": False},
    ]
    tokenizer = tokenizer_of("chatml", begins=True)
    assert rows_of(job_of(tmp_path, records, preference="kto"), tokenizer) == rows_of_kto(records, tokenizer)


def test_the_corpus_has_two_documents_of_each_record(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    corpus = load_corpus(job_of(tmp_path, ANSWERS, preference="kto"), tokenizer, tmp_path / "corpus")
    rows = [side for pair in rows_of_kto(ANSWERS, tokenizer) for side in pair]
    assert np.diff(corpus.ends, prepend=0).tolist() == [len(row) for row in rows] and len(rows) == 4
    assert corpus.tokens.tolist() == [token for row in rows for token, _ in row]
    assert corpus.trained.tolist() == [scored for row in rows for _, scored in row]


def test_tools_and_variables_of_a_record_reach_the_chat_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    more = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    records = [record | more for record in PAIRS["messages"]]
    tokenizer = tokenizer_of("qwen3")
    found = rows_of(job_of(tmp_path, records), tokenizer)
    assert found == rows_of_dpo(records, tokenizer) != rows_of_dpo(PAIRS["messages"], tokenizer)
    texts = [
        record | {"tools": json.dumps(tools), "chat_template_kwargs": more["chat_template_kwargs"]}
        for record in records
    ]
    assert rows_of(job_of(tmp_path, texts), tokenizer) == found
    plain = job_of(tmp_path, PAIRS["messages"], chat_template_kwargs=more["chat_template_kwargs"])
    without = [record | {"chat_template_kwargs": more["chat_template_kwargs"]} for record in PAIRS["messages"]]
    assert rows_of(plain, tokenizer) == rows_of_dpo(without, tokenizer)


def test_margins_of_pairs_are_refused_for_reward_models_as_trl_subtracts_them(tmp_path: Path) -> None:
    records = [record | {"margin": 0.5} for record in PAIRS["texts"]]
    tokenizer = tokenizer_of("chatml")
    with pytest.raises(UserError, match="has a column margin, which TRL subtracts") as refused:
        rows_of(job_of(tmp_path, records, preference="reward"), tokenizer)
    assert refused.value.code == "not-there"
    job = job_of(tmp_path, records, preference="reward")
    path = str(tmp_path / "data.jsonl")
    unused = job.model_copy(update={"dataset": (DataEntry(path=path, columns={"margin": ""}),)})
    assert len(rows_of(unused, tokenizer)) == len(records)
    assert len(rows_of(job_of(tmp_path, records, preference="dpo"), tokenizer)) == len(records)


def test_a_template_that_does_not_show_an_answer_breaks_the_record(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}{% endfor %}"
    with pytest.raises(UserError) as refused:
        rows_of(job_of(tmp_path, PAIRS["messages"]), tokenizer)
    assert refused.value.code == "template-drops"


@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_under_llama_factorys_templates_rows_are_llama_factorys(tmp_path: Path, loss: str) -> None:
    tokenizer = tokenizer_of("chatml")
    job = job_of(tmp_path, PAIRS["messages"][:1], preference=loss, chat_template="llama_factory:qwen")
    ((chosen, rejected),) = rows_of(job, tokenizer)
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    asked = f"{system}<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    for row, answer in ((chosen, "four"), (rejected, "five!")):
        assert tokenizer.decode([token for token, scored in row if not scored]) == asked
        assert tokenizer.decode([token for token, scored in row if scored]) == f"{answer}<|im_end|>\n"
    texts = rows_of(job_of(tmp_path, PAIRS["texts"], preference=loss, chat_template="llama_factory:qwen"), tokenizer)
    assert texts == TRAINERS[loss](PAIRS["texts"], tokenizer)


def test_records_that_llama_factory_leaves_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = {"d": {"file_name": "d.jsonl", "columns": {"prompt": "q", "response": "a", "kto_tag": "fine"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    rows = [{"q": "a", "a": "b", "fine": True}, {"q": "a", "a": "b", "fine": None}]
    write_jsonl(tmp_path / "d.jsonl", rows)
    tiny_llama_folder(tmp_path / "model")
    head = "model_name_or_path: model\nfinetuning_type: full\nstage: sft\ndataset: d\ndataset_dir: .\nbf16: false\n"
    job = Job.parse(f"{head}template: qwen\n", tmp_path).model_copy(update={"preference": "kto"})
    check_data(job)
    with caplog.at_level(logging.WARNING):
        ((chosen, rejected),) = rows_of(job, tokenizer_of("chatml"))
    assert chosen and not rejected
    assert "1 conversation left out, as LLaMA-Factory does: their label is not true or false" in caplog.text
