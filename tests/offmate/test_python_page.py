"""The page of the Python names, made from the code."""

from __future__ import annotations

import inspect
import re

import pytest

import offmate
from docs.make.python import page


def test_every_public_name_and_method_has_a_heading_and_a_text() -> None:
    text = page()
    heading, code = r"^##+ `\S+` \{ #(\S+) \}\n\n", r"(?:```python\n.*?```\n\n)?"
    anchors = re.findall(heading + code + r"(?=[^#`\n])", text, re.MULTILINE | re.DOTALL)
    expected = set(offmate.__all__) - {"__version__"}
    for name in list(expected):
        value = getattr(offmate, name)
        members = vars(value).items() if isinstance(value, type) else ()
        shown = (inspect.isfunction, lambda member: isinstance(member, property))
        expected |= {f"{name}.{key}" for key, member in members if key[0] != "_" and any(is_(member) for is_ in shown)}
    assert sorted(anchors) == sorted(expected)
    assert {"Engine.step", "Certificate.holds", "JobPlan", "plan"} <= expected


def test_signatures_stand_as_a_caller_writes_them() -> None:
    text = page()
    assert "step(batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> Tensor" in text
    assert "    *,\n    hardware: str | os.PathLike[str] | None = None,\n) -> JobPlan" in text
    assert "self" not in re.findall(r"\w+", " ".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    for name in ("LoopEngine", "AnyJob"):
        assert name not in text


def test_lists_and_examples_of_docstrings_are_markdown() -> None:
    text = page()
    assert "\n- `step_s`: seconds of a training step\n" in text
    assert '```python\nanswer = offmate.plan("job.yaml", hardware="rtx3060")\n' in text
    assert not re.search(r"^\w+ {2,}\w", text, re.MULTILINE), "a list of a docstring was left as it is"


@pytest.mark.parametrize("names", [set(offmate.__all__) - {"Finding"}, {*offmate.__all__, "extra"}])
def test_a_name_that_is_gone_or_new_stops_the_page(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offmate, "__all__", sorted(names))
    with pytest.raises(ValueError, match=r"differ in (Finding|extra)$"):
        page()
