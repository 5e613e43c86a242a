"""The cache's tables in the job database, which the migrations in alembic/ create. `planner/cache/store.py` uses
them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Float, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Tables of the planner."""


class PlanRow(Base):
    """One plan: `document` is `{"plan", "chain", "hardware", "measurement"}` in JSON forms, `key` the digest of what it
    answers."""

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
    """What was measured for one set of blocks on one machine: `document` is `{"times", "hardware"}`."""

    __tablename__ = "measurements"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    device: Mapped[str] = mapped_column(String(255), default="")
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    hits: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    used_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class AnswerRow(Base):
    """One receipt: `document` is a `planner.reports.receipt.Receipt` in JSON, `key` the digest of the question as it
    was asked. It can be found without tracing the model; a plan's key needs the trace."""

    __tablename__ = "answers"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    hits: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    used_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


metadata = Base.metadata
