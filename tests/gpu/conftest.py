"""Set-up of the GPU tests: one swap for the tests of this process, processes for the others."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_jobs import Job, Start

import umem
from umem.runtime.hints import HintEngine

MANAGED_LIMIT = "8GiB"


@pytest.hookimpl(tryfirst=True)  # before others choose by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


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


@pytest.fixture(scope="module")
def engine() -> Iterator[HintEngine]:
    """One engine for all tests of a module: a second context takes long to create."""
    torch.zeros(1, device="cuda")
    with HintEngine.on_cuda() as made:
        made.start(0)
        yield made


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
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
