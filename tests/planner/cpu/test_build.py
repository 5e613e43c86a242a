"""Building the kernel on first use, keeping it, and doing without it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from planner.cpu import adamw, build
from tests.support.engine_plans import adamw as adamw_of
from tests.support.engine_plans import chain_of, mixed_plan
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
COMPILER = next((path for name in build.COMPILERS if (path := shutil.which(name))), None)
with_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache; what the process has chosen is chosen anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adamw._chosen.cache_clear()
    yield tmp_path / "cache" / "offmate"
    adamw._chosen.cache_clear()


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """$CC is a compiler that writes down each of its runs that makes a file."""
    runs, script = tmp_path / "runs", tmp_path / "cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-o*) echo "$@" >> {runs};; esac\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return runs


def files(cache):
    return sorted(path.suffix for path in cache.iterdir() if path.name != "lock")


@with_compiler
def test_the_kernel_is_built_once_and_then_found(cache, counted):
    first, second = adamw.NativeKernel(), adamw.NativeKernel()
    adamw.check(first)
    adamw.check(second)
    assert len(counted.read_text().splitlines()) == 1
    assert files(cache) == [".so"]
    assert cache.stat().st_mode & 0o077 == 0


@with_compiler
def test_processes_that_need_it_at_once_build_it_once(cache, counted):
    code = "import sys, pathlib; from planner.cpu import build; build.load(pathlib.Path(sys.argv[1]))"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(adamw.SOURCE)]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(counted.read_text().splitlines()) == 1
    assert files(cache) == [".so"]


@with_compiler
def test_another_source_or_compiler_is_another_file(cache, monkeypatch, tmp_path):
    adamw.NativeKernel()
    changed = tmp_path / "adamw.c"
    changed.write_text(adamw.SOURCE.read_text() + "/* more */\n")
    build.load(changed)
    monkeypatch.setenv("CC", f"{COMPILER} -g0")
    adamw.NativeKernel()
    assert files(cache) == [".so"] * 3


@with_compiler
def test_what_a_source_includes_is_part_of_it(cache, tmp_path):
    source = tmp_path / "number.c"
    source.write_text('#include "number.h"\nint number(void) { return NUMBER; }\n')
    for number in (1, 2):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}\n")
        assert build.load(source).number() == number
    assert files(cache) == [".so"] * 2


@with_compiler
def test_the_choice_falls_on_the_built_kernel_once_for_all_threads(counted, caplog):
    caplog.set_level(logging.INFO)
    found = []
    threads = [threading.Thread(target=lambda: found.append(adamw.cpu_kernel())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(found[0], adamw.NativeKernel) and set(map(id, found)) == {id(found[0])}
    assert [r.getMessage() for r in caplog.records] == ["updates on the CPU: one pass, built for this processor"]


WITHOUT = {
    "no compiler": ({"PATH": "/nowhere", "CC": ""}, "no C compiler: none of cc, gcc, clang is in PATH"),
    "one that is not there": ({"CC": "no-such-compiler"}, "No such file or directory: 'no-such-compiler'"),
    "one that fails": ({"CC": "false"}, "false: exit code 1"),
    "no place for what it makes": ({"XDG_CACHE_HOME": "/dev/null"}, "/dev/null/offmate"),
}


@pytest.mark.parametrize("without", WITHOUT)
def test_without_a_build_pytorch_updates_and_one_line_says_why(monkeypatch, caplog, without):
    environment, reason = WITHOUT[without]
    if "XDG_CACHE_HOME" in environment and COMPILER is None:
        pytest.skip("no C compiler")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kernel = adamw.cpu_kernel()
    assert adamw.cpu_kernel() is kernel
    assert isinstance(kernel, adamw.ChunkedKernel) and reason in kernel.shortcoming
    assert len(caplog.records) == 1 and caplog.records[0].levelname == "WARNING"
    assert reason in caplog.text and "updates on the CPU: PyTorch's, in chunks" in caplog.text
    adamw.check(kernel)


@with_compiler
def test_code_from_a_folder_that_others_can_write_is_not_run(cache):
    adamw.NativeKernel()
    cache.chmod(0o770)
    assert adamw.cpu_kernel().shortcoming == f"others can put code into {cache}"


@with_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("whole ? fmaf", "!whole ? fmaf"),
        ("change /= denom", "change *= 1.f / denom"),
        ("+ 0x7fff", "+ 0x8000"),
        ("- (kept >> 31)", "- 0"),
    ],
    ids=["the remainder", "a reciprocal", "rounding to bf16", "rounding of what is packed"],
)
def test_a_kernel_that_rounds_otherwise_is_not_used(monkeypatch, tmp_path, right, wrong):
    changed, code = tmp_path / "adamw.c", adamw.SOURCE.read_text()
    assert code.count(right) == 1
    changed.write_text(code.replace(right, wrong))
    monkeypatch.setattr(adamw, "SOURCE", changed)
    kernel = adamw.cpu_kernel()
    assert isinstance(kernel, adamw.ChunkedKernel)
    assert kernel.shortcoming == "its results differ from PyTorch's on this machine"


@with_compiler
def test_it_is_not_used_where_pytorch_computes_otherwise():
    code = "from planner.cpu import adamw; print(adamw.cpu_kernel().shortcoming)"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() in ("", "its results differ from PyTorch's on this machine")
    # Where the default is as good as it gets there is no difference, and the trial finds none.
    if "AVX" in torch.backends.cpu.get_cpu_capability():
        assert answer.stdout.strip() != ""


def test_an_engine_without_a_compiler_trains_with_the_same_bits(monkeypatch):
    monkeypatch.setenv("CC", "false")
    model, plain = (make_model("llama", torch.bfloat16) for _ in range(2))
    chain, settings = chain_of(model), {"optimizer": adamw_of(model), "max_grad_norm": 0.5}
    engine = Engine(model, plan=mixed_plan(chain, clip=True), chain=chain, device=torch.device("cpu"), **settings)
    reference = PlainEngine(plain, **settings)
    assert isinstance(adamw.cpu_kernel(), adamw.ChunkedKernel)
    assert not chain.packs  # it would take longer
    for step in range(3):
        for one in (engine, reference):
            one.step([batch_of(seed=step)], seeds=[step], learning_rate=1e-2)
    expected = dict(reference.state())
    for name, parts in engine.state():
        assert all(torch.equal(tensor, expected[name][part]) for part, tensor in parts.items()), name
    engine.close()
