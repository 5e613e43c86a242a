"""Keeps plans, measurements and receipts (answers of `offmate plan`) between jobs, in tables of the job database.
Imports neither torch nor PuLP.

`planner/cache/tables.py` declares the tables. The key of a plan covers the model's sizes, the budgets and the machine's
name, never measured rates: rates differ a little with every measurement, and a plan stays right when they do.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, TypeVar, cast

from sqlalchemy import Engine, create_engine, delete, select, update
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.orm import Session

from planner.cache.tables import AnswerRow, MeasurementRow, PlanRow
from planner.codec import from_json, to_json
from planner.errors import Exit, UserError
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.schedule.timeless import without_times

log = logging.getLogger(__name__)

PLANNER = 22
"""The planner's version, a part of every key. Raise it when the planner answers the same question in another way."""

_BUSY_S = 30.0
_NO_TABLE = ("no such table", "does not exist", "doesn't exist")  # SQLite, PostgreSQL, MySQL


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlan:
    """A plan with the chain (the model's blocks) and the machine it was made for. `solve_s`: seconds that finding it
    took. `measurement`: key of the measurement on which it rests; None if the times were estimated."""

    plan: Plan
    chain: Chain
    hardware: Hardware
    solve_s: float
    measurement: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All on which a plan depends; its digest is the plan's key. Times and rates are left out, except whether they are
    measured. `weights_in_files`: whether frozen weights may be read from the model's files during training; which of
    them are (`on_disk` in `chain`) is left out of the key. `disk_bytes`: the room that optimizer states and activations
    may take on all disks together. `kernels`: which kernels PyTorch may choose
    (`planner.measure.repeatable.kernels_in_force`)."""

    chain: Chain
    machine: str
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    slices: int
    clip: bool
    measured: bool
    dtype: str
    optimizer: str = "adamw"
    exact: bool = True
    compiling: bool = False
    weights_in_files: bool = False
    disk_bytes: int = 0
    kernels: str = ""

    def key(self) -> str:
        """A hexadecimal digest of the question and of the planner's and torch's versions."""
        parts = cast(dict[str, Any], to_json(replace(self, chain=without_times(self.chain))))
        return _digest({"question": parts, "planner": PLANNER, "torch": version("torch")})


def measurement_key(kinds: dict[str, list[str]], *, machine: str, threads: int, slices: int) -> str:
    """A hexadecimal digest of what is measured and where: the names of the options per kind of block (which fix shapes
    and dtypes), the slices (micro-batches) of a step, the machine and its number of threads."""
    parts = {"kinds": kinds, "machine": machine, "threads": threads, "slices": slices}
    return _digest({"measurement": parts, "planner": PLANNER, "torch": version("torch")})


def answer_key(job: str, config: str, hardware: Hardware) -> str:
    """A hexadecimal digest of a user's question: the job's keys, the text of the model's config, the machine's figures,
    and the versions of all packages on which the answer depends."""
    versions = {name: version(name) for name in ("offmate", "torch", "transformers")}
    parts = {"job": job, "config": config, "hardware": to_json(hardware)}
    return _digest({"answer": parts, "planner": PLANNER, "versions": versions})


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """One line in the list of kept plans. `slices`: micro-batches of a step. `hits`: how often the plan was found.
    `solve_s`, `step_s`: seconds; `created_at`, `used_at`: seconds since 1970."""

    key: str
    model: str
    machine: str
    step_s: float
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    slices: int
    solve_s: float
    hits: int
    created_at: float
    used_at: float


def _kept(row: PlanRow) -> KeptPlan:
    plan = row.document["plan"]
    return KeptPlan(
        key=row.key,
        model=row.model,
        machine=row.document["hardware"]["name"],
        step_s=plan["step_s"],
        gpu_budget_bytes=plan["gpu_budget_bytes"],
        cpu_budget_bytes=plan["cpu_budget_bytes"],
        slices=plan["rounds"] * plan["slices"],
        solve_s=row.solve_s,
        hits=row.hits,
        created_at=_unix(row.created_at),
        used_at=_unix(row.used_at),
    )


def _is_known(row: PlanRow) -> bool:
    try:
        _kept(row)
    except (KeyError, TypeError):
        return False
    return True


def _unix(moment: datetime) -> float:
    """SQLite gives back moments without their zone; they were written in UTC."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_Row = TypeVar("_Row", PlanRow, MeasurementRow, AnswerRow)


class Cache:
    """The kept plans, measurements and receipts of one database. Every method raises UserError `database-not-ready` if
    the tables are missing."""

    def __init__(self, database: str | Engine) -> None:
        """`database`: a SQLAlchemy URL or engine of the job database, whose migrations made the tables."""
        if isinstance(database, str):
            wait = {"timeout": _BUSY_S} if database.startswith("sqlite") else {}
            database = create_engine(database, connect_args=wait)
        self._engine = database

    def find_plan(self, key: str) -> CachedPlan | None:
        """The plan kept under `key`, and its count of hits rises by one. None if there is none, or if another version
        wrote it in a form that this one does not read."""
        row = self._find(PlanRow, key)
        if row is None:
            return None
        document, solve_s = row.document, row.solve_s
        try:
            return CachedPlan(
                plan=from_json(Plan, document["plan"]),
                chain=from_json(Chain, document["chain"]),
                hardware=from_json(Hardware, document["hardware"]),
                solve_s=solve_s,
                measurement=document.get("measurement"),
            )
        except (ValueError, KeyError) as error:
            log.info("the plan kept under %s is not used: %s", key[:12], error)
            return None

    def keep_plan(self, key: str, cached: CachedPlan, *, model: str) -> None:
        """Keep a plan under `key`, in place of what was there."""
        document = {name: to_json(getattr(cached, name)) for name in ("plan", "chain", "hardware", "measurement")}
        self._keep(PlanRow, key, {"model": model, "document": document, "solve_s": cached.solve_s})

    def find_measurement(self, key: str) -> dict[str, Any] | None:
        """The measurement kept under `key`, and its count of hits rises by one; None if there is none."""
        row = self._find(MeasurementRow, key)
        return None if row is None else row.document

    def keep_measurement(self, key: str, document: dict[str, Any], *, device: str) -> None:
        """Keep a measurement, in JSON form, under `key`, in place of what was there. `device`: name of the measured
        device."""
        self._keep(MeasurementRow, key, {"device": device[:255], "document": document})

    def find_answer(self, key: str) -> dict[str, Any] | None:
        """The receipt kept under `key`, a `planner.reports.receipt.Receipt` in JSON form, and its count of hits rises
        by one; None if there is none."""
        row = self._find(AnswerRow, key)
        return None if row is None else row.document

    def keep_answer(self, key: str, document: dict[str, Any]) -> None:
        """Keep a receipt, in JSON form, under `key`, in place of what was there."""
        self._keep(AnswerRow, key, {"document": document})

    def plans(self) -> list[KeptPlan]:
        """All kept plans, the most recently used first. Plans that another version wrote in an unreadable form are left
        out."""
        with self._transaction() as session:
            rows = session.scalars(select(PlanRow).order_by(PlanRow.used_at.desc(), PlanRow.id.desc())).all()
            return [_kept(row) for row in rows if _is_known(row)]

    def show_plan(self, key: str) -> dict[str, Any]:
        """The fields of `KeptPlan` and of the document (see `PlanRow`) of the one plan whose key begins with `key`.
        This does not count as a hit. Raises UserError if no plan, or more than one, has such a key."""
        with self._transaction() as session:
            row = self._one(session, key)
            return {**cast(dict[str, Any], to_json(_kept(row))), **row.document}

    def forget_plan(self, key: str) -> None:
        """Delete the one plan whose key begins with `key`, its measurement, and the receipts made from it. The next job
        that needs them is measured and planned anew. Raises UserError if no plan, or more than one, has such a key."""
        with self._transaction() as session:
            row = self._one(session, key)
            for answer in session.scalars(select(AnswerRow)).all():
                if answer.document.get("plan_key") == row.key:
                    session.delete(answer)
            session.execute(delete(MeasurementRow).where(MeasurementRow.key == row.document.get("measurement")))
            session.delete(row)

    def forget_plans(self) -> int:
        """Delete all plans, measurements and receipts; returns how many plans there were."""
        with self._transaction() as session:
            session.execute(delete(MeasurementRow))
            session.execute(delete(AnswerRow))
            return len(session.scalars(delete(PlanRow).returning(PlanRow.id)).all())

    def forget_measurement(self, key: str) -> None:
        """Delete the measurement under `key`, if there is one, and every plan that was made with it."""
        with self._transaction() as session:
            session.execute(delete(MeasurementRow).where(MeasurementRow.key == key))
            for row in session.scalars(select(PlanRow)).all():
                if row.document.get("measurement") == key:
                    session.delete(row)

    @staticmethod
    def _one(session: Session, key: str) -> PlanRow:
        rows = session.scalars(select(PlanRow).where(PlanRow.key.startswith(key, autoescape=True)).limit(2)).all()
        if len(rows) == 1:
            return rows[0]
        raise UserError(
            f"There is no plan {key}." if not rows else f"More than one plan begins with {key}.",
            code="no-such-plan",
            hint="offmate plans list",
            exit_code=Exit.NO_SUCH_JOB if not rows else Exit.USAGE,
        )

    def hits(self, key: str) -> int:
        """How often the plan under `key` was found in the cache; 0 if there is none."""
        with self._transaction() as session:
            return session.scalar(select(PlanRow.hits).where(PlanRow.key == key)) or 0

    def _find(self, table: type[_Row], key: str) -> _Row | None:
        with self._transaction() as session:
            # Writing first takes SQLite's lock at once; reading first could not wait for another writer.
            values = {"hits": table.hits + 1, "used_at": datetime.now(UTC)}
            session.execute(update(table).where(table.key == key).values(values))
            row = session.scalar(select(table).where(table.key == key))
            if row is not None:
                session.expunge(row)
            return row

    def _keep(self, table: type[PlanRow | MeasurementRow | AnswerRow], key: str, values: dict[str, Any]) -> None:
        now = datetime.now(UTC)
        for _ in range(2):  # a second time when another process kept the same key in between
            try:
                with self._transaction() as session:
                    changed = session.execute(
                        update(table).where(table.key == key).values(**values, used_at=now).returning(table.id)
                    ).first()
                    if changed is None:
                        session.add(table(key=key, hits=0, created_at=now, used_at=now, **values))
                return
            except IntegrityError:
                continue

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        """A transaction. Raises UserError `database-not-ready` where the tables are missing."""
        try:
            with Session(self._engine) as session, session.begin():
                yield session
        except (OperationalError, ProgrammingError) as error:
            if not any(words in str(error.orig) for words in _NO_TABLE):
                raise
            raise UserError(
                "The database has no tables for plans yet.",
                code="database-not-ready",
                numbers=(f"database {self._engine.url}",),
                hint="offmate up",
            ) from error
