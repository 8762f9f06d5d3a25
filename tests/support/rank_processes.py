"""Ranks of a test: processes that meet over gloo, and what they report; or one, without others."""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fork_server import start_fork_server
from once import made_once
from torch import distributed

Runs = dict[str, Any]
"""What a rank has found, by program."""


class WarningLines(logging.Handler):
    """Collects what umem warns of, in a ``with`` block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("umem").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("umem").removeHandler(self)


@contextmanager
def one_rank() -> Iterator[None]:
    """``torch.distributed`` with this process alone."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def meeting(rank: int, folder: Path, count: int, **options: Any) -> Iterator[dict[str, Any]]:
    """This rank among others over gloo. What is put into the dictionary is the rank's result."""
    place = (folder / "meeting").as_uri()
    distributed.init_process_group("gloo", place, rank=rank, world_size=count, **options)
    found: dict[str, Any] = {}
    yield found
    result_file(folder, rank).write_text(json.dumps(found))
    distributed.destroy_process_group()


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its result, as JSON."""
    return folder / f"{rank}.json"


def run_ranks(main: Callable[[int, Path], None], folder: Path, count: int) -> list[Any]:
    """Run a function in a process for each rank, with the rank and `folder`; return the results."""
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=main, args=(rank, folder)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
    return _results(folder, count)


def run_ranks_once(
    main: Callable[[int, Path], None], temporary: pytest.TempPathFactory, count: int
) -> list[Any]:
    """As `run_ranks`, but once for all workers of a run of pytest."""
    folder = made_once(temporary, main.__module__, lambda it: run_ranks(main, it, count))
    return _results(folder, count)


def ranks_of(main: Callable[[int, Path], None], count: int) -> Any:
    """A fixture of a module, which has what each rank has found."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
        return run_ranks_once(main, tmp_path_factory, count)

    return ranks


def _results(folder: Path, count: int) -> list[Any]:
    return [json.loads(result_file(folder, rank).read_text()) for rank in range(count)]
