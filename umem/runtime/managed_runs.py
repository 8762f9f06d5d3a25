"""The trainings and models that umem manages in this process, and how far they are.

`umem top` and the last lines of `umem run` read this. Trainings write plain numbers here at the end
of each step, which stay when model and optimizer are gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from umem.runtime.state import is_enabled, runtime

__all__ = ["ManagedRun", "managed_runs", "new_run"]

_MOST_RUNS = 64
"""The last ones of a process: one that tries many models makes many."""


@dataclass
class ManagedRun:
    """A training's steps, or the calls of a model that is not trained."""

    model: str
    unit: Literal["step", "call"]
    late: Callable[[], int | None] = field(default=lambda: None, repr=False)
    """Returns how often something was used before it was there; None if that is unknown now."""
    count: int = 0
    """Steps or calls so far."""
    planned: int = 0
    """Those under a plan."""
    predicted_s: float | None = None
    """Of a step under the present plan."""
    _is_planned: bool = False
    _timed: int = 0
    _begun_s: float | None = None
    _ended_s: float = 0.0
    _waited_before_s: float = 0.0
    _waited_s: float = 0.0

    @property
    def measured_s(self) -> float | None:
        """Mean time on the host's clock since the last plan began or ended; None at first."""
        if self._begun_s is None or not self._timed:
            return None
        return (self._ended_s - self._begun_s) / self._timed

    @property
    def waited_s(self) -> float | None:
        """Of `measured_s`, the time of requests for memory that the cache did not have.

        The driver makes such memory, takes it from elsewhere, or puts free memory together.
        """
        if self.measured_s is None:
            return None
        return (self._waited_s - self._waited_before_s) / self._timed

    def ends(self, predicted_s: float | None, *, is_planned: bool) -> None:
        """A step or call has ended."""
        self.count += 1
        self.planned += is_planned
        now_s = time.perf_counter()
        if (is_planned, predicted_s) != (self._is_planned, self.predicted_s):
            self._timed, self._begun_s = 0, None
        elif self._begun_s is None:
            self._begun_s, self._waited_before_s = now_s, _waits_so_far_s()
        else:
            self._timed += 1
            self._ended_s, self._waited_s = now_s, _waits_so_far_s()
        self._is_planned, self.predicted_s = is_planned, predicted_s


def _waits_so_far_s() -> float:
    """Time of such requests of this process, on all its GPUs."""
    return runtime().allocator.uncached_ns() * 1e-9 if is_enabled() else 0.0


_runs: deque[ManagedRun] = deque(maxlen=_MOST_RUNS)


def new_run(
    model: object, unit: Literal["step", "call"], late: Callable[[], int | None]
) -> ManagedRun:
    """Note that umem manages a training or a model from now on."""
    made = ManagedRun(type(model).__name__, unit, late)
    _runs.append(made)
    return made


def managed_runs() -> list[ManagedRun]:
    """Those that have made a step or call, in the order of their beginning."""
    return [it for it in list(_runs) if it.count]
