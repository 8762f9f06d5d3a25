"""`umem.profile`: what migration costs the steps of a real run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from umem.telemetry._live import LiveCollector
from umem.telemetry._lookup import current_residency, current_statistics
from umem.telemetry._profile import Profile

if TYPE_CHECKING:
    from torch import nn

    from umem.classes import TensorClass
    from umem.hints import HintStatistics

__all__ = ["profile"]


def profile(
    steps: int | None = None,
    *,
    model: nn.Module | None = None,
    name: str | None = None,
    required: bool = True,
    synchronize: bool = True,
    hints: Callable[[], HintStatistics | None] | None = None,
    residency: Callable[[], Mapping[TensorClass, int] | None] | None = None,
    ideal_s: float | None = None,
    nvtx: bool = False,
) -> Profile:
    """Record what migrates while a ``with`` block runs.

    Parameters
    ----------
    steps
        Stop recording after so many calls of :meth:`Profile.step`; the block may go on.
    model
        Its parameters, their gradients and their optimizer state are reported by name.
    name
        Of the workload; the script's name when none is given.
    required
        Whether it is an error that nobody can say here what moves: the driver's event queue cannot
        be had, CUPTI is missing or in another profiler's hands, and no hint engine is at work. If
        not, steps are timed and the report says what is missing. With a hint engine its own counts
        stand in, and the report says so too.
    synchronize
        Wait for the device at the marks of steps, so that a step's work counts with that step.
        Without it a step ends when the host is done with it.
    hints
        Asked for the statistics of the hint engine at the marks of steps, such as
        :meth:`umem.hints.HintEngine.statistics`. By default that of umem's executor, if it runs.
    residency
        Asked for the bytes on the device by class, at the marks of steps and phases. By default the
        executor's books, if it runs.
    ideal_s
        Time of a step with everything resident, from which the exposed stall follows. By default
        that of the step that the executor has recorded, if it runs.
    nvtx
        Make NVTX ranges of the executor's phases while recording, as :func:`nvtx_phases` does.

    Returns
    -------
    Profile
        Not started: use it in a ``with`` statement.

    Raises
    ------
    ValueError
        If `steps` is not a whole number above 0, or `ideal_s` is not a time above 0.

    Examples
    --------
    >>> with umem.profile(steps=3, model=model) as profile:  # doctest: +SKIP
    ...     for batch in batches:
    ...         train(batch)
    ...         profile.step()
    >>> profile.report().um_time_share  # doctest: +SKIP
    >>> profile.save("run.json.gz")  # doctest: +SKIP
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps={steps!r}: give a whole number above 0, or None for all")
    if ideal_s is not None and not 0 < ideal_s < float("inf"):
        raise ValueError(f"ideal_s={ideal_s!r}: give a time above 0 in seconds, or None")
    return Profile(
        LiveCollector(),
        steps=steps,
        model=model,
        name=name or Path(sys.argv[0]).stem or "run",
        required=required,
        synchronize=synchronize,
        hints=hints or current_statistics,
        residency=residency or current_residency,
        ideal_s=ideal_s,
        nvtx=nvtx,
    )
