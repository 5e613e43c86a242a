"""The documentation's site is built strictly, is complete, and needs no network."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import pytest
import yaml

from docs.make import api
from docs.make.config import VARIABLES
from docs.make.hook import PAGES
from offmated.cli import main
from offmated.config import KEYS
from planner.error_codes import THEMES
from planner.errors import Exit
from planner.job.described import entry_section, sections
from tests import ROOT
from tests.house.test_imports import modules
from tests.support.browser import browser, find_browser

MOST_WORDS = 25_000
NOT_FOR_USERS = {
    # offmate sets them for libraries, unless they are set
    *("CUDA_DEVICE_ORDER", "GIT_PYTHON_REFRESH", "MLFLOW_DISABLE_TELEMETRY", "OMP_WAIT_POLICY"),
    *("WANDB_DISABLE_SENTRY", "WANDB_ERROR_REPORTING"),
    "PYTHONPATH",  # handed on to processes of offmate's own
    *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),  # systemd sets them
}
"""Environment variables that the source reads and the page of settings does not name."""
FOUND = find_browser()


@dataclass
class Page(HTMLParser):
    """What a built page has: the anchors in it, its links, and the addresses that a browser loads with it."""

    file: Path
    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag has."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links |= {given["href"]} if "href" in given else set()
        else:
            self.loads |= {given[name] for name in ("href", "src") if given.get("rel") != "canonical" and name in given}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, after a strict build without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Path in the site -> the page there."""
    return {str(file.relative_to(site)): Page(file) for file in site.rglob("*.html")}


def named_in(nav: Any) -> Iterator[str]:
    """The paths of pages in a part of `nav`."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from named_in(part)


def nav() -> list[str]:
    """The paths of all pages of the site."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    return [*named_in(yaml.safe_load(text)["nav"])]


def commands(group: click.Group, name: str) -> Iterator[str]:
    """The names of all commands of a group, and of the groups in it."""
    for each, command in group.commands.items():
        yield f"{name} {each}"
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {each}")


def test_every_page_of_the_nav_is_built(pages: dict[str, Page]) -> None:
    assert set(PAGES) < set(nav())
    assert {path for path in nav() if path.removesuffix(".md") + ".html" not in pages} == set()


def test_every_key_command_code_and_setting_has_its_anchor(pages: dict[str, Page]) -> None:
    keys = {key.name for section in sections() for key in section.keys}
    entries = {f"dataset-{key.name}" for key in entry_section().keys}
    codes = {code for theme in THEMES.values() for code in theme}
    named = {name.replace(" ", "-") for name in commands(main, "offmate")}
    assert keys
    assert "offmate-submit" in named
    assert keys | entries <= pages["reference/keys.html"].anchors
    assert named <= pages["reference/commands.html"].anchors
    assert codes <= pages["reference/errors.html"].anchors
    assert KEYS.keys() <= pages["reference/config.html"].anchors


def test_every_exit_code_is_described(pages: dict[str, Page]) -> None:
    text = pages["reference/commands.html"].file.read_text("utf-8")
    assert {int(code) for code in re.findall(r"<td>(\d+)</td>", text)} == set(map(int, Exit))


def test_every_route_of_the_api_is_described(pages: dict[str, Page]) -> None:
    source = ast.parse((ROOT / "offmated" / "api" / "app.py").read_text("utf-8"))
    routes = {
        "-".join((call.func.attr, *re.findall(r"\w+", str(call.args[0].value))))
        for call in ast.walk(source)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("get", "post")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    assert "post-jobs-job_id-cancel" in routes
    assert routes <= pages["reference/api.html"].anchors


def test_every_status_of_the_api_is_described() -> None:
    sent = {status for path in (ROOT / "offmated" / "api").glob("*.py") for status in statuses(path)}
    assert {413, 507} < sent
    of_the_framework = {200, 405}
    rows = re.findall(r"^\| ([\d, ]+) \|", api.page(), re.MULTILINE)
    assert {int(status) for row in rows for status in row.split(", ")} == sent | of_the_framework


def statuses(path: Path) -> Iterator[int]:
    """The status codes of answers that a module makes."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            given += [named.value for named in node.keywords if named.arg == "status_code"]
            if isinstance(node.func, ast.Name) and node.func.id in ("refused", "HTTPException"):
                given += node.args[:1]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "status":
            given += [node.value]
        for value in (each for part in given for each in ast.walk(part)):
            if isinstance(value, ast.Constant) and isinstance(value.value, int):
                yield value.value


def test_every_environment_variable_that_is_read_is_described_and_no_other(pages: dict[str, Page]) -> None:
    reads = Reads()
    for path in modules().values():
        reads.visit(ast.parse(path.read_text("utf-8")))
    names, unclear = reads.resolved()
    assert unclear == {"variable", "name"}, "the settings of the daemon; what its service hands on"
    assert not NOT_FOR_USERS & VARIABLES.keys()
    assert names == NOT_FOR_USERS | VARIABLES.keys()
    text = pages["reference/config.html"].file.read_text("utf-8")
    assert {name for name in {*VARIABLES, *KEYS.values()} if f"<code>{name}</code>" not in text} == set()


class Reads(ast.NodeVisitor):
    """The reads of environment variables in modules: in `os.environ`, in a mapping `environment` in its place, and
    through the modules of Hugging Face's libraries that read them. A function that reads the variable which it is given
    reads what its callers name."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._unclear: set[str] = set()
        self._constants: dict[str, str] = {}
        self._parameters: list[tuple[str, list[str]]] = []  # of the functions around a node, with their names
        self._readers: dict[
            str, tuple[str, int]
        ] = {}  # function -> its parameter with a variable's name, and its place
        self._calls: list[tuple[str, ast.Call, dict[str, str]]] = []

    def resolved(self) -> tuple[set[str], set[str]]:
        """The names of all variables that are read, and the expressions whose values are not known from the source."""
        for called, call, constants in self._calls:
            if called in self._readers:
                parameter, place = self._readers[called]
                given = [named.value for named in call.keywords if named.arg == parameter] + call.args[
                    place : place + 1
                ]
                for expression in given:
                    self._names.add(constants.get(ast.unparse(expression)) or ast.literal_eval(expression))
        return self._names, self._unclear

    def visit_Module(self, node: ast.Module) -> None:
        self._constants = {}
        for each in ast.walk(node):
            if isinstance(each, ast.Assign):
                target, value = each.targets[0], each.value
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                pairs = zip(target.elts, value.elts, strict=False) if several else [(target, value)]
                self._constants |= {
                    ast.unparse(name): text.value
                    for name, text in pairs
                    if isinstance(text, ast.Constant) and isinstance(text.value, str)
                }
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._parameters.append((node.name, [each.arg for each in node.args.args if each.arg != "self"]))
        self.generic_visit(node)
        self._parameters.pop()

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("get", "pop", "setdefault"):
            if is_environment(function.value):
                self._read(node.args[0])
        elif ast.unparse(function) in ("os.getenv", "getenv"):
            self._read(node.args[0])
        self._calls.append((ast.unparse(function).rpartition(".")[2], node, self._constants))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if is_environment(node.value) and isinstance(node.ctx, ast.Load):
            self._read(node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if isinstance(node.ops[0], ast.In | ast.NotIn) and is_environment(node.comparators[0]):
            self._read(node.left)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node.value) in ("constants", "config") and isinstance(node.ctx, ast.Load):
            self._names |= {node.attr} if node.attr.startswith("HF_") else set()
        self.generic_visit(node)

    def _read(self, name: ast.expr) -> None:
        text = ast.unparse(name)
        function, parameters = self._parameters[-1] if self._parameters else ("", [])
        if isinstance(name, ast.Constant):
            self._names.add(name.value)
        elif text in self._constants:
            self._names.add(self._constants[text])
        elif text in parameters:
            self._readers[function] = text, parameters.index(text)
        else:
            self._unclear.add(text)


def is_environment(node: ast.expr) -> bool:
    """Whether an expression stands for the environment variables of this process."""
    return ast.unparse(node) in ("os.environ", "environment")


def test_reads_of_environment_variables_are_found() -> None:
    reads = Reads()
    reads.visit(
        ast.parse(
            "B, X = 'C', 0\n"
            "def own(self, default, name): return os.environ.get(name)\n"
            "os.environ['A'] + os.environ[B] + os.getenv('D') + self.own(0, 'E') + self.own(name=B)\n"
            "if 'F' in os.environ and constants.HF_G: os.environ['SET'] = environment.pop(h)\n"
        )
    )
    assert reads.resolved() == ({"A", "C", "D", "E", "F", "HF_G"}, {"h"})


def test_no_page_loads_anything_from_the_network(site: Path, pages: dict[str, Page]) -> None:
    assert {load for page in pages.values() for load in page.loads if urlsplit(load).netloc} == set()
    styles = [file.read_text("utf-8") for file in site.rglob("*.css")]
    assert styles
    assert not any(re.search(r"""(@import|url\()\s*["']?(https?:)?//""", style) for style in styles)


@pytest.mark.skipif(FOUND is None, reason="no browser here")
def test_the_search_works_in_a_site_that_is_opened_from_disk(site: Path) -> None:
    assert FOUND is not None
    with browser(FOUND) as seen:
        seen.open(site / "index.html")
        seen.page.locator("input.md-search__input").press_sequentially("hub-gated")
        seen.page.wait_for_selector("a.md-search-result__link[href*='reference/errors.html']", state="attached")
        assert [address for address in seen.requests if not address.startswith("file:")] == []
        assert seen.problems == []


def test_every_link_within_the_site_leads_to_a_page_and_an_anchor(site: Path, pages: dict[str, Page]) -> None:
    broken = set()
    for path, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if path == "404.html" or parts.scheme or parts.netloc:  # 404.html is for web servers
                continue
            target = (page.file.parent / unquote(parts.path)).resolve() if parts.path else page.file
            there = (
                pages.get(str(target.relative_to(site.resolve()))) if target.is_relative_to(site.resolve()) else None
            )
            lost = parts.fragment and there is not None and unquote(parts.fragment) not in there.anchors
            if not target.exists() or lost:
                broken.add((path, link))
    assert broken == set()


def words_of(text: str) -> int:
    """The words of a page, without numbers, blocks of code and the addresses of links."""
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    return sum(any(map(str.isalpha, word)) for word in prose.replace("|", " ").split())


def test_the_written_pages_are_short_enough_to_be_read() -> None:
    written = [path for path in nav() if path not in PAGES and not path.startswith("notes/")]
    words = {path: words_of((ROOT / "docs" / path).read_text("utf-8")) for path in written}
    assert sum(words.values()) < MOST_WORDS, words
