"""Compiled functions run with a cache on disk, and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MODULE = """
from numba import njit
from umem.core.compiled import compiled

@njit
def same(x):
    return x

@compiled
def double(x):
    return 2 * x

@compiled
def half(x):
    return x // 2

if __name__ == "__main__":
    print(same(21), flush=True)
    print(double(21), half(84))
"""

NOTICE = "umem: compiling the planner, once on this machine: up to a minute\n"
NO_CACHE = "umem: compiling the planner, in every process, for want of a cache: up to a minute\n"


def python(arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )


def test_compiled_code_is_cached_and_compilation_announced_once(tmp_path: Path) -> None:
    source, cache = tmp_path / "doubled.py", tmp_path / "cache"
    source.write_text(MODULE, encoding="utf-8")
    for message in (NOTICE, ""):
        done = python([str(source)], cache)
        assert (done.stdout, done.stderr) == ("21\n42 42\n", message)
        assert list(cache.rglob("*.nbi"))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    for _ in range(2):
        done = python(["-c", MODULE], tmp_path)  # numba keeps only what comes from a file
        assert (done.stdout, done.stderr) == ("21\n42 42\n", NO_CACHE)


def test_what_others_compile_is_not_announced(tmp_path: Path) -> None:
    assert python(["-c", MODULE.replace("@compiled", "@njit")], tmp_path).stderr == ""
