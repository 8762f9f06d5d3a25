"""Marks of a run: where its steps and named phases begin and end, for reports and profilers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np

from umem.telemetry._nsys import PHASE_PREFIX, STEP_PREFIX
from umem.telemetry._recording import NamedRange

__all__ = ["Marks"]


class Marks:
    """Steps, which follow each other, and phases, by whatever clock they are given.

    Where NVIDIA's package ``nvtx`` is installed, both are NVTX ranges too, which any profiler
    shows.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.phases: list[NamedRange] = []
        self._step_begin_ns = 0
        self._nvtx = _nvtx()
        self._step_range: Any = None

    def open_step(self, now_ns: int) -> None:
        """The next step begins."""
        self._step_begin_ns = now_ns
        if self._nvtx:
            message = f"{STEP_PREFIX}{len(self.steps)}"
            self._step_range = self._nvtx.start_range(message=message)

    def end_step(self, now_ns: int) -> None:
        """The step is over."""
        self.steps.append((self._step_begin_ns, now_ns))
        self.abandon_step()

    def abandon_step(self) -> None:
        """What has begun is not a whole step."""
        if self._nvtx and self._step_range is not None:
            self._nvtx.end_range(self._step_range)
            self._step_range = None

    @contextmanager
    def phase(self, name: str, now_ns: Callable[[], int]) -> Iterator[None]:
        """A phase that lasts as long as the ``with`` block."""
        begin_ns = now_ns()
        opened = self._nvtx.start_range(message=PHASE_PREFIX + name) if self._nvtx else None
        try:
            yield
        finally:
            if self._nvtx:
                self._nvtx.end_range(opened)
            self.phases.append(NamedRange(name, begin_ns, now_ns()))

    def columns_since(self, begin_ns: int) -> dict[str, Any]:
        """The fields of a recording that began at a moment."""
        starts, ends = zip(*self.steps, strict=True) if self.steps else ((), ())
        return {
            "step_start_ns": np.array(starts, np.int64) - begin_ns,
            "step_end_ns": np.array(ends, np.int64) - begin_ns,
            "phases": tuple(
                NamedRange(it.name, it.start_ns - begin_ns, it.end_ns - begin_ns)
                for it in self.phases
            ),
        }


def _nvtx() -> ModuleType | None:
    with suppress(ImportError):
        return importlib.import_module("nvtx")
    return None
