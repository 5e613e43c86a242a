"""Fine-tunes language models on one GPU that is too small for them, from Python.

`prepare` puts the engine into a training loop of your own, `plan` says whether and how fast a job runs on a machine,
`certify` compares a job's first steps with plain PyTorch's.

The public names are those in `offmate.__all__`, with what their docstrings describe. From version 0.2 on they follow
semantic versioning: until 1.0, a change that breaks callers raises the second number, and CHANGELOG.md says so. All
other modules and packages (`planner`, `worker`, `offmated`) may change with every version.

`import offmate` loads no PyTorch: that comes with the first use of `prepare` or `Engine`. `plan` and `certify` compute
in a process of their own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offmate.job_plan import JobPlan
    from offmate.questions import certify, plan
    from planner.errors import UserError
    from planner.reports.certificate import Certificate, Difference, Finding
    from worker.api import LoopEngine as Engine
    from worker.api import prepare

    __version__: str

__all__ = [
    "Certificate",
    "Difference",
    "Engine",
    "Finding",
    "JobPlan",
    "UserError",
    "__version__",
    "certify",
    "plan",
    "prepare",
]

_HOMES = {
    "Certificate": ("planner.reports.certificate", "Certificate"),
    "Difference": ("planner.reports.certificate", "Difference"),
    "Engine": ("worker.api", "LoopEngine"),
    "Finding": ("planner.reports.certificate", "Finding"),
    "JobPlan": ("offmate.job_plan", "JobPlan"),
    "UserError": ("planner.errors", "UserError"),
    "certify": ("offmate.questions", "certify"),
    "plan": ("offmate.questions", "plan"),
    "prepare": ("worker.api", "prepare"),
}
"""Public name -> its module, and its name there."""

if not TYPE_CHECKING:  # a type checker would take it for a promise of every name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value: object = import_module("offmated.version").release()
        elif name in _HOMES:
            module, attribute = _HOMES[name]
            value = getattr(import_module(module), attribute)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # found without this function from now on
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
