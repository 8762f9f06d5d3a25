"""Compiled functions run with a cache, and where there is no place for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULE = """
from umem.compiled import compiled

@compiled
def double(x):
    return 2 * x

if __name__ == "__main__":
    print(double(21))
"""


def run(folder: Path, cache: Path | str) -> str:
    source = folder / "doubled.py"
    source.write_text(MODULE, encoding="utf-8")
    return subprocess.run(
        [sys.executable, source],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_compiled_code_is_kept(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(tmp_path, cache) == "42\n"
    assert list(cache.rglob("*.nbi"))


def test_no_place_for_a_cache_is_no_error(tmp_path: Path) -> None:
    assert run(tmp_path, "/dev/null/nowhere") == "42\n"
