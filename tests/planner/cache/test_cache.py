"""Plans and measurements that are found again, and what they are found by."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from planner.cache.store import Cache, CachedPlan, Question, answer_key, measurement_key
from planner.cache.tables import MeasurementRow, PlanRow, metadata
from planner.errors import UserError
from tests.support import chains as small

QUESTION = Question(
    chain=small.chain(2),
    machine="test",
    gpu_budget_bytes=10**6,
    cpu_budget_bytes=10**6,
    slices=1,
    clip=False,
    measured=True,
    dtype="torch.float32",
)
CACHED = CachedPlan(plan=small.mixed_plan(), chain=small.chain(2), hardware=small.HARDWARE, solve_s=1.5)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with the planner's tables."""
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    return url


def test_a_kept_plan_is_found_with_its_chain_and_machine(url: str) -> None:
    Cache(url).keep_plan("key", CACHED, model="tiny")
    assert Cache(url).find_plan("key") == CACHED
    assert Cache(url).find_plan("another") is None


def test_every_find_counts_as_a_hit(url: str) -> None:
    cache = Cache(url)
    cache.keep_plan("key", CACHED, model="tiny")
    assert cache.hits("key") == 0
    cache.find_plan("key")
    cache.find_plan("key")
    cache.find_plan("another")
    assert cache.hits("key") == 2
    assert cache.hits("another") == 0


def test_a_plan_kept_again_takes_the_place_of_the_first(url: str) -> None:
    cache = Cache(url)
    cache.keep_plan("key", CACHED, model="tiny")
    better = replace(CACHED, plan=replace(CACHED.plan, step_s=0.5))
    cache.keep_plan("key", better, model="tiny")
    assert cache.find_plan("key") == better
    with Session(create_engine(url)) as session:
        assert len(session.scalars(select(PlanRow)).all()) == 1


def test_measurements_are_kept_beside_plans(url: str) -> None:
    cache = Cache(url)
    cache.keep_measurement("key", {"times": [1, 2]}, device="cpu " * 100)
    assert cache.find_measurement("key") == {"times": [1, 2]}
    assert cache.find_measurement("another") is None
    assert cache.find_plan("key") is None
    with Session(create_engine(url)) as session:
        assert session.scalars(select(MeasurementRow.hits)).one() == 1


def test_receipts_go_with_the_plan_they_are_of(url: str) -> None:
    cache = Cache(url)
    for key in ("one", "two"):
        cache.keep_plan(key, CACHED, model="tiny")
        cache.keep_answer(f"about {key}", {"plan_key": key, "step_s": 1.5})
    assert cache.find_answer("about one") == {"plan_key": "one", "step_s": 1.5}
    assert cache.find_answer("about three") is None
    cache.forget_plan("one")
    assert cache.find_answer("about one") is None
    assert cache.find_answer("about two") is not None
    cache.forget_plans()
    assert cache.find_answer("about two") is None


def test_a_question_is_the_jobs_keys_the_models_config_and_the_machines_figures() -> None:
    key = answer_key("max_length: 8", "{}", small.HARDWARE)
    assert key == answer_key("max_length: 8", "{}", small.HARDWARE)
    faster = replace(small.HARDWARE, h2d_bytes_per_s=2 * small.HARDWARE.h2d_bytes_per_s)
    others = [("max_length: 9", "{}", small.HARDWARE), ("max_length: 8", "{ }", small.HARDWARE)]
    assert key not in {answer_key(*other) for other in (*others, ("max_length: 8", "{}", faster))}


def test_several_planners_may_keep_the_same_plan_at_once(url: str) -> None:
    errors: list[BaseException] = []

    def keep() -> None:
        try:
            for _ in range(5):
                Cache(url).keep_plan("key", CACHED, model="tiny")
                Cache(url).find_plan("key")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=keep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert Cache(url).hits("key") == 20


def test_a_database_without_the_tables_is_told_as_that(tmp_path: Path) -> None:
    cache = Cache(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(UserError) as told:
        cache.find_plan("key")
    assert str(told.value) == (
        "The database has no tables for plans yet.\n"
        f"  database sqlite:///{tmp_path / 'empty.db'}\n"
        "  hint: offmate up   [database-not-ready]"
    )


def test_the_key_does_not_depend_on_measured_times() -> None:
    slower = replace(
        QUESTION.chain,
        blocks=tuple(
            replace(block, options=tuple(replace(option, forward_s=9.0, backward_s=9.0) for option in block.options))
            for block in QUESTION.chain.blocks
        ),
    )
    assert replace(QUESTION, chain=slower).key() == QUESTION.key()


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_budget_bytes": 10**6 + 1},
        {"cpu_budget_bytes": 10**6 + 1},
        {"slices": 2},
        {"clip": True},
        {"measured": False},
        {"machine": "another"},
        {"dtype": "torch.bfloat16"},
        {"exact": False},
        {"compiling": True},
        {"weights_in_files": True},
        {"chain": small.chain(3)},
        {"chain": small.chain(2, tied=True)},
    ],
    ids=str,
)
def test_the_key_depends_on_all_that_the_answer_depends_on(change: dict[str, object]) -> None:
    assert replace(QUESTION, **change).key() != QUESTION.key()  # type: ignore[arg-type]


def test_measurements_are_found_by_kinds_options_machine_and_threads() -> None:
    key = measurement_key({"a": ["keep"]}, machine="test", threads=2, slices=1)
    assert key == measurement_key({"a": ["keep"]}, machine="test", threads=2, slices=1)
    assert key != measurement_key({"a": ["keep", "offload"]}, machine="test", threads=2, slices=1)
    assert key != measurement_key({"b": ["keep"]}, machine="test", threads=2, slices=1)
    assert key != measurement_key({"a": ["keep"]}, machine="test", threads=1, slices=1)
    assert key != measurement_key({"a": ["keep"]}, machine="test", threads=2, slices=2)


@pytest.mark.parametrize("document", [{}, {"plan": [], "hardware": {}}], ids=str)
def test_a_plan_in_the_form_of_another_version_is_neither_found_nor_listed(
    url: str, document: dict[str, object]
) -> None:
    cache = Cache(url)
    for key in ("old", "new"):
        cache.keep_plan(key, CACHED, model=key)
    with Session(create_engine(url)) as session, session.begin():
        session.scalars(select(PlanRow).where(PlanRow.key == "old")).one().document = document
    assert cache.find_plan("old") is None
    assert [kept.model for kept in cache.plans()] == ["new"]
