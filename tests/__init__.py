"""The specification, in folders that mirror the code; helpers live in tests/support."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""
