"""Declares the tables of kept plans, measurements and receipts in the job database. Migrations in alembic/ create them;
`planner/cache/store.py` reads and writes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Float, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base class of the planner's tables."""


class PlanRow(Base):
    """One plan. `key`: digest of the question that it answers (`planner.cache.store.Question`). `document`: an object
    `{"plan", "chain", "hardware", "measurement"}`, each in JSON form. `solve_s`: seconds that finding the plan took."""

    __tablename__ = "plans"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    model: Mapped[str] = mapped_column(String(1024), default="")
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    solve_s: Mapped[float] = mapped_column(Float)
    hits: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    used_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class MeasurementRow(Base):
    """What was measured for one set of blocks on one machine. `document`: an object `{"times", "hardware"}`."""

    __tablename__ = "measurements"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    device: Mapped[str] = mapped_column(String(255), default="")
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    hits: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    used_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class AnswerRow(Base):
    """One receipt. `document`: a `planner.reports.receipt.Receipt` in JSON form. `key`: digest of the question as the
    user asked it; unlike a plan's key it is known before the model is traced."""

    __tablename__ = "answers"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    hits: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    used_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


metadata = Base.metadata
