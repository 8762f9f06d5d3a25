"""Set-up of the GPU tests: one swap for the tests of this process, processes for the others."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import umem

SCRIPTS = Path(__file__).resolve().parent / "scripts"
MANAGED_LIMIT = "8GiB"
JOB_TIMEOUT_S = 150
POISON = "UMEM_POISON"
"""The variable that scripts get from the run of the tests: the whole suite can run under poison."""
# Python 3.12 warns of every fork of a process with threads, which is what some scripts are about.
FORK_WARNING = "ignore:This process:DeprecationWarning"


@pytest.fixture(scope="session", autouse=True)
def only_run() -> Iterator[None]:
    """Programs of a module run side by side and take most of the card: two runs would overfill it.

    So GPU tests have no several workers either.
    """
    path = Path(tempfile.gettempdir(), f"umem-gpu-tests-{os.getuid()}.lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.exit(f"another run of GPU tests holds {path}: wait for its end", returncode=1)
        yield


@pytest.fixture(scope="session", autouse=True)
def umem_enabled(only_run: None) -> None:
    """The swap, before anything in this process uses the GPU. A process has only one."""
    with pytest.MonkeyPatch.context() as environment:
        if "UMEM_MANAGED_LIMIT" not in os.environ:
            environment.setenv("UMEM_MANAGED_LIMIT", MANAGED_LIMIT)
        environment.delenv("UMEM_DEVICE_BUDGET", raising=False)
        assert umem.enable("managed")


def settle() -> None:
    """Give back all memory that nothing refers to, so that statistics start from rest."""
    gc.collect()
    torch.cuda.synchronize()
    # Workspaces of matrix products made in a capture would keep its pool.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.fixture
def settled() -> Iterator[None]:
    """No garbage and no cached segments, before and after."""
    settle()
    yield
    settle()


@pytest.fixture(scope="session")
def class_of() -> Callable[[torch.Tensor], umem.TensorClass | None]:
    """The class of the block that holds a tensor; None where umem knows of no such block."""

    def find(tensor: torch.Tensor) -> umem.TensorClass | None:
        address = tensor.untyped_storage().data_ptr()
        return next((b.tensor_class for b in umem.tensors() if b.address == address), None)

    return find


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


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Job]]:
    """Start scripts from ``scripts/``; keywords are environment variables.

    But `launcher` is what stands before the script, as options of Python's.
    """
    jobs: list[Job] = []

    def start_one(
        script: str, *arguments: str, launcher: tuple[str, ...] = (), **variables: str
    ) -> Job:
        jobs.append(Job(script, arguments, variables, launcher))
        return jobs[-1]

    yield start_one
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.finish()
