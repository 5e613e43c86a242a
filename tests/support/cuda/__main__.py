"""`python -m tests.support.cuda [pytest's arguments]`: pytest in a process that has the emulated device."""

from __future__ import annotations

import sys

import pytest

from tests.support.cuda import build


def main(arguments: list[str]) -> int:
    """Pytest's exit code."""
    if reason := build.missing():
        print(reason, file=sys.stderr)
        return pytest.ExitCode.USAGE_ERROR
    build.load()
    from tests.support.cuda import session, torch_cuda

    session.device = torch_cuda.install()
    if arguments[:1] == ["--serve"]:
        return pytest.main(arguments[2:], plugins=[session.Server(int(arguments[1]))])
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
