"""Python programs of tests that run in a process of their own."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from forked_programs import ForkedPrograms

__all__ = ["run_forked", "run_python"]

_LIMIT_S = 240


def run_python(*words: str, **environment: str) -> str:
    """Run ``python`` with these words, and return what it prints; it finds this folder's modules.

    The test fails with the process's errors if that fails.
    """
    done = subprocess.run(
        [sys.executable, *words],
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_forked(code: str, *words: str, status: int = 0, **environment: str) -> str:
    """As ``run_python("-c", code, ...)``, in a process that has torch imported, but not umem.

    To import torch takes two seconds of a core. A process that prints errors has them in the
    result, behind its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder) / name for name in ("output", "errors"))
        found = _with_torch().run(
            *(["-c", code, *words], Path.cwd(), output, errors, _LIMIT_S),
            variables=_environment(environment),
        )
        assert found == status, errors.read_text()
        return output.read_text() + errors.read_text()


def _environment(more: dict[str, str]) -> dict[str, str]:
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


@functools.cache
def _with_torch() -> ForkedPrograms:
    """One for each process of pytest."""
    programs = ForkedPrograms(["torch"], _environment({}), _LIMIT_S)
    atexit.register(programs.close)
    return programs
