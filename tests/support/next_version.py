"""The next version of offmate, as far as its database is concerned: today's code with one more migration, which is made
up. A database of today's is one of an earlier version to it. With a new real migration, the made-up one gets the number
after it."""

from __future__ import annotations

from pathlib import Path

from offmated.jobs.migrate import scripts_folder
from tests import ROOT

MADE_UP = ROOT / "tests" / "support" / "next_version_migrations" / "0002_endings.py"
REVISION = "endings"


def migrations_in(folder: Path, made_up: str = MADE_UP.read_text()) -> Path:
    """`folder`, which is new, with today's migrations and one with the text `made_up`."""
    (folder / "versions").mkdir(parents=True)
    for real in (*scripts_folder().glob("*.py"), *scripts_folder().glob("versions/*.py")):
        (folder / real.relative_to(scripts_folder())).symlink_to(real)
    (folder / "versions" / MADE_UP.name).write_text(made_up)
    return folder


def install_in(folder: Path, made_up: str = MADE_UP.read_text()) -> None:
    """Make in `folder`, which comes first on the module path of a daemon's processes, a package `offmated` that has its
    migrations in it, as in a wheel: today's modules, as links, and `migrations_in`."""
    (folder / "offmated").mkdir()
    for real in (ROOT / "offmated").iterdir():
        if real.name != "__pycache__":
            (folder / "offmated" / real.name).symlink_to(real)
    migrations_in(folder / "offmated" / "migrations", made_up)
