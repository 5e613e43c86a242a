"""Chat templates that would take the processor, the memory or the tokenizer for ever."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import Exit, UserError
from planner.models.tokenizer import load_tokenizer
from tests.support.texts import CHATML, byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from worker.data import bounds
from worker.data.batches import Batches
from worker.data.chat import ChatTemplate
from worker.training.samples import Samples

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"

TIME = {
    "loops": ENDLESS,
    "a power": "{{ (messages|length + 7) ** (9 ** (messages|length + 7)) }}",
    "a template that is long itself": "{{ range(99999)|sum }}" * 50_000,
}
MEMORY = {
    "a product": "{{ 'x' * 10**10 * messages|length }}",
    "a product of numbers in the template": "{{ 'x' * 10**10 }}",
    "doubling": DOUBLING,
    "a width": "{{ 'x'.ljust(10**12) }}",
    "a format": "{{ '%0999999999999d' % 1 }}",
    "a list": "{{ ([1] * 10**10)|length }}",
}


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_S", 0.5)


def refusal(template: str) -> UserError:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError) as caught:
        ChatTemplate(byte_tokenizer(chat_template=template), everything=True).render(MESSAGES)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert caught.value.exit_code == Exit.USAGE
    return caught.value


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("template", TIME.values(), ids=TIME)
def test_a_template_that_computes_for_ever_is_stopped(template: str) -> None:
    assert str(refusal(template)) == (
        "The chat template takes too much time or memory to render a conversation.\n"
        "  more than 500.0 ms of the processor's time\n"
        "  hint: give another chat_template   [chat-template-too-much]"
    )


@pytest.mark.parametrize("template", MEMORY.values(), ids=MEMORY)
def test_a_template_that_multiplies_gets_no_memory(template: str) -> None:
    assert refusal(template).numbers == ("more than 512.0 MiB of memory",)


def test_a_text_long_beyond_reason_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_TEXT", 1000)
    assert refusal("{{ 'x' * 9999 }}").code == "chat-template-too-much"
    long = [{"role": "user", "content": "a" * 10_000}, {"role": "assistant", "content": "b"}]
    assert len(ChatTemplate(byte_tokenizer(chat_template=CHATML)).render(long)[0]) > 10_000


ERRORS = {
    "a division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "a sum": ("{{ 'x' + 1 }}", "TypeError"),
    "no such thing": ("{{ [1][5].x }}", "UndefinedError"),
    "a number": ("{{ 1e308 * 10 ** 400 }}", "OverflowError"),
    "Python": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
}
MISTAKES = {
    "no template": ("{{ 1 }}\n{% for a in %}", "line 2 of the template: Expected an expression"),
    "no such filter": ("{{ 1 | nothing }}", "line 1 of the template: No filter named 'nothing'."),
    "loops within each other": (
        "{% for a in 'a' %}" * 21 + "{% endfor %}" * 21,
        "compiled to Python: too many statically nested blocks",
    ),
}


@pytest.mark.parametrize(("template", "name"), ERRORS.values(), ids=ERRORS)
def test_whatever_a_template_raises_is_one_error_for_people(template: str, name: str) -> None:
    error = refusal(template)
    assert (error.code, error.numbers[0].partition(":")[0]) == ("chat-template-refuses", name)


def refused(template: str, folder: Path) -> UserError:
    """What data of one conversation are refused with under this template."""
    data = write_jsonl(folder / "data.jsonl", [{"messages": MESSAGES}])
    job = make_job(tiny_llama_folder(folder / "model"), data)
    with pytest.raises(UserError) as caught:
        Batches(job, byte_tokenizer(chat_template=template))
    return caught.value


@pytest.mark.parametrize(("template", "number"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_a_template_is_told_with_its_line_before_any_row(
    template: str, number: str, tmp_path: Path
) -> None:
    error = refused(template, tmp_path)
    assert error.code == "bad-chat-template" and error.numbers[0].startswith(number)


@pytest.mark.parametrize(("template", "name"), ERRORS.values(), ids=ERRORS)
def test_what_a_template_raises_before_any_row_is_told_with_the_first_row(
    template: str, name: str, tmp_path: Path
) -> None:
    error = refused(template, tmp_path)
    assert error.code == "chat-template-refuses"
    assert error.numbers[0] == "line 1 of data.jsonl" and error.numbers[1].startswith(f"{name}:")


@pytest.mark.usefixtures("_impatient")
def test_the_time_of_a_rendering_ends_with_it() -> None:
    template = ChatTemplate(byte_tokenizer(chat_template=CHATML), everything=True)
    template.render(MESSAGES)
    end = time.process_time() + 2 * bounds.MOST_S
    while time.process_time() < end:
        template.render(MESSAGES)


def test_a_tokenizer_whose_templates_are_for_other_things_is_refused() -> None:
    tokenizer = byte_tokenizer(chat_template={"rag": CHATML})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="several chat templates, and none of them is named default"):
        ChatTemplate(tokenizer)


def test_a_sample_prompt_is_rendered_within_the_same_bounds(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "model", chat_template=MEMORY["doubling"])
    data = write_jsonl(tmp_path / "data.jsonl", sentences(2))
    job = make_job(folder, data, sample_prompts=[[{"role": "user", "content": "a"}]])
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    with pytest.raises(UserError, match="takes too much"):
        Samples.of(job, load_tokenizer(job), model)
    tokenizer = byte_tokenizer(chat_template=CHATML)
    found = Samples.of(job, tokenizer, model)
    assert found is not None
    expected = tokenizer.apply_chat_template(job.sample_prompts[0], add_generation_prompt=True, return_dict=False)
    assert found.tokens == (expected,)
