from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from planner.fast_imports import compiled_when_called
from tests import ROOT


def test_a_decorated_function_is_compiled_once_when_it_is_first_called(monkeypatch):
    compiled = []

    def compile_(function, **options):
        compiled.append((function.__name__, options))
        return lambda x: function(x) + 100

    monkeypatch.setattr(torch, "compile", compile_)
    with compiled_when_called():

        @torch.compile
        def one(x):
            return x + 1

        @torch.compile(dynamic=False)
        def two(x):
            return x + 2

    assert torch.compile is compile_
    assert not compiled
    assert [one(0), one(0), two(0)] == [101, 101, 102]
    assert compiled == [("one", {}), ("two", {"dynamic": False})]


def test_adapters_do_not_load_the_compilers_of_torch():
    pytest.importorskip("peft")
    code = (
        "import json, sys, torch; from planner.fast_imports import compiled_when_called\n"
        "with compiled_when_called(): import peft\n"
        "print(json.dumps('torch._inductor.compile_fx' in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) is False
