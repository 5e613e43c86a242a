"""Adds the generated pages of the reference to the site. mkdocs calls `on_files` when it has listed the files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "reference/keys.md": "keys",
    "reference/commands.md": "commands",
    "reference/errors.md": "errors",
    "reference/config.md": "config",
    "reference/python.md": "python",
    "reference/api.md": "api",
    "reference/other-tools.md": "other_tools",
}
"""Path of a page -> the module of this folder whose `page()` returns it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return `files` with the generated pages in place of those in docs/, which say where to find them."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    for path, name in PAGES.items():
        if (pointer := files.get_file_from_path(path)) is not None:
            files.remove(pointer)
        made = importlib.import_module(f"docs.make.{name}").page()
        files.append(File.generated(config, path, content=made))
    return files
