"""Python programs of tests that run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_python"]


def run_python(*words: str, **environment: str) -> str:
    """Run ``python`` with these words, and return what it prints; it finds this folder's modules.

    The test fails with the process's errors if that fails.
    """
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
