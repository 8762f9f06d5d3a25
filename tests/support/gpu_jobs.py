"""Scripts of tests/gpu in processes of their own, and pairs of a stock run and one under umem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "gpu" / "scripts"
JOB_TIMEOUT_S = 150
POISON = "UMEM_POISON"
"""The variable that scripts get from the run of the tests: the whole suite can run under poison."""
# Python 3.12 warns of every fork of a process with threads, which is what some scripts are about.
FORK_WARNING = "ignore:This process:DeprecationWarning"

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SIDE_BY_SIDE = {**DETERMINISTIC, "UMEM_MANAGED_LIMIT": "512MiB"}
"""All processes of a module together stay below the limit for managed memory of one machine."""


class Job:
    """A script in a process of its own: started at once, waited for when its result is asked."""

    def __init__(
        self,
        script: str,
        arguments: tuple[str, ...],
        variables: dict[str, str],
        launcher: tuple[str, ...] = (),
    ) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == POISON or not name.startswith("UMEM_")
        }
        self.command = " ".join([script, *arguments])
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-W", FORK_WARNING, *launcher),
                *(str(SCRIPTS / script), *arguments),
            ],
            env={**kept, "UMEM_MANAGED_LIMIT": "2GiB", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._done: subprocess.CompletedProcess[str] | None = None

    def finish(self) -> subprocess.CompletedProcess[str]:
        """The ended process. One that hangs is killed and fails the test."""
        if self._done is None:
            try:
                out, error = self.process.communicate(timeout=JOB_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                out, error = self.process.communicate()
                error += f"\n{self.command}: killed after {JOB_TIMEOUT_S} s"
            self._done = subprocess.CompletedProcess(
                self.command, self.process.returncode, out, error
            )
        return self._done

    def facts(self) -> Any:
        """What the script wrote as JSON in its last line. It must have ended well."""
        done = self.finish()
        assert done.returncode == 0, (
            f"{self.command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return json.loads(done.stdout.splitlines()[-1])


Start = Callable[..., Job]
"""The fixture: starts a script with arguments; keywords are environment variables."""

Pairs = Callable[[str], tuple[Any, Any]]
"""Returns what the program of a mode saw, stock and under umem."""


def under(policy: str, budget: str | int) -> dict[str, str]:
    """Variables by which scripts enable umem with a budget, as text or in bytes."""
    return {"UMEM_POLICY": policy, "UMEM_DEVICE_BUDGET": str(budget)}


def start_pair(
    start: Start, *words: str, umem: Mapping[str, str], **variables: str
) -> tuple[Job, Job]:
    """Start a script stock, and with more variables under umem."""
    return start(*words, **variables), start(*words, **variables, **umem)


def facts_of(begin: Callable[[str], tuple[Job, Job]], modes: Iterable[str]) -> Pairs:
    """The facts of pairs by mode: those of `modes` begin now, others when they are asked."""
    jobs = {mode: begin(mode) for mode in modes}

    def pair(mode: str) -> tuple[Any, Any]:
        if mode not in jobs:
            jobs[mode] = begin(mode)
        stock, other = jobs[mode]
        return stock.facts(), other.facts()

    return pair
