"""Figures of a training's steps, as a dict for any logger."""

from __future__ import annotations

from umem.core.classes import TensorClass
from umem.core.report import Direction
from umem.runtime.copies import copy_counts
from umem.runtime.state import is_enabled, runtime
from umem.streaming.training import streamed_trainings

__all__ = ["LoggedFigures"]

_MIB = 1 << 20

_Sums = dict[tuple[Direction, TensorClass], int]


class LoggedFigures:
    """What umem copies, holds and predicts.

    ==============================  ================================================================
    ``umem/to_device_mib``          copied to the device in a step, on average since the last time
    ``umem/to_host_mib``            the same to the host
    ``umem/CLASS_to_device_mib``    the same by tensor class, such as ``optimizer_state``; also
                                    ``_to_host_mib``
    ``umem/device_mib``             device memory that umem holds now
    ``umem/page_locked_mib``        page-locked host memory that it holds now
    ``umem/predicted_step_s``       of the plan that runs, if there is one
    ==============================  ================================================================

    Parameters
    ----------
    step
        The number of steps before the first that counts.

    Examples
    --------
    >>> figures = LoggedFigures()
    >>> for step in range(1, steps + 1):  # doctest: +SKIP
    ...     train_step()
    ...     wandb.log(figures.at(step), step)
    """

    def __init__(self, step: int = 0) -> None:
        self._copied: _Sums = copy_counts.copied_bytes()
        self._step = step

    def at(self, step: int) -> dict[str, float]:
        """The figures after so many steps; none if there was no step since the last time."""
        steps = step - self._step
        if steps <= 0:
            return {}
        copied = copy_counts.copied_bytes()
        more = {key: size - self._copied.get(key, 0) for key, size in copied.items()}
        self._copied, self._step = copied, step
        return _moved_mib(more, steps) | _held_mib() | _predicted()


def _moved_mib(copied: _Sums, steps: int) -> dict[str, float]:
    found = {"umem/to_device_mib": 0.0, "umem/to_host_mib": 0.0}
    for (direction, tensor_class), size_bytes in copied.items():
        mib = size_bytes / steps / _MIB
        found[f"umem/{direction}_mib"] += mib
        found[f"umem/{tensor_class.value}_{direction}_mib"] = mib
    return {name: round(mib, 3) for name, mib in found.items()}


def _held_mib() -> dict[str, float]:
    if not is_enabled():
        return {}
    kinds = runtime().allocator.kind_stats(0)
    return {
        "umem/device_mib": round(kinds["device"]["reserved_bytes"] / _MIB, 3),
        "umem/page_locked_mib": round(kinds["pinned"]["reserved_bytes"] / _MIB, 3),
    }


def _predicted() -> dict[str, float]:
    plans = (it.status().tuning for it in streamed_trainings())
    seconds = [it.predicted_s for it in plans if it is not None and it.predicted_s is not None]
    return {"umem/predicted_step_s": round(sum(seconds), 6)} if seconds else {}
