"""The tables of what fits: the page has what the script prints from the kept answers, and these are the planner's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import questions, what_fits
from planner.commands.kept_traces import Traces

PAGE = questions.ROOT / "docs" / "how-to" / "what-fits.md"


def test_the_page_has_the_table_of_the_kept_answers() -> None:
    assert what_fits.fits_table(what_fits.kept()) in PAGE.read_text("utf-8")


def test_the_readme_has_the_tables_beside_other_tools() -> None:
    assert what_fits.readme(what_fits.kept()) in (what_fits.questions.ROOT / "README.md").read_text("utf-8")


def test_kept_answers_are_those_of_the_questions() -> None:
    assert set(what_fits.kept()) == {" ".join(question) for question in what_fits.asked()}


@pytest.mark.parametrize(
    ("number", "text"), [(0.44, "0.4"), (2.73, "2.7"), (8.0, "8.0"), (19.6, "20"), (326.6, "330"), (11595, "12,000")]
)
def test_two_digits_count(number: float, text: str) -> None:
    assert what_fits.rounded(number) == text


def test_a_published_figure_of_a_near_size_is_shown_with_its_size() -> None:
    assert what_fits.published("LoRA", "unsloth", "8B") == "22"
    assert what_fits.published("LoRA", "LLaMA-Factory", "8B") == "16 (7B)"
    assert what_fits.published("full", "unsloth", "8B") == "–"


def test_every_published_figure_is_in_a_row_and_every_tool_has_a_source() -> None:
    for method, tools in what_fits.PUBLISHED.items():
        assert method in what_fits.LEAST_METHODS
        for tool, figures in tools.items():
            assert tool in what_fits.SOURCES
            shown = [what_fits.published(method, tool, size) for size in what_fits.LEAST_SIZES]
            assert sum(figure != "–" for figure in shown) == figures.count(", ") + 1
    assert {len(row) for row in what_fits.FEATURES} == {7}


def test_a_kept_answer_is_what_the_planner_says(tmp_path: Path) -> None:
    what_fits.write_models(tmp_path)
    kept = what_fits.kept()["1B rtx4090 LoRA"]
    found = what_fits.planned("1B", "rtx4090", "LoRA", tmp_path, Traces())
    assert found.ram_gib == kept.ram_gib
    for name in ("gpu_bytes", "host_bytes", "tokens_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(kept, name), rel=0.02, abs=2**26), name


def test_with_a_byte_less_than_the_least_gpu_memory_nothing_fits(tmp_path: Path) -> None:
    what_fits.write_models(tmp_path)
    traces = Traces()
    answer = what_fits.planned_at_least("1B", "LoRA", tmp_path, traces)
    assert answer.tokens_per_s > 0
    job = what_fits.job_of("1B", "LoRA", tmp_path, rows=1).model_copy(update={"gpu_budget": answer.gpu_bytes - 1})
    hardware = what_fits.preset(what_fits.LEAST_ON, bf16=True, cpu_memory_bytes=answer.ram_gib * 2**30)
    assert what_fits.ask(job, hardware, traces=traces, helps=False).status == "infeasible"
