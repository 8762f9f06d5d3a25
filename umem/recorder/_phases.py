"""Which of the phases that were followed are one phase of the trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umem.recorder._memory import StepLook

__all__ = ["FollowedPhase", "JoinedPhases", "join_phases"]


@dataclass(frozen=True)
class FollowedPhase:
    """A phase as a :class:`~umem.recorder.StepListener` is told of it, and where the trace has it.

    Parameters
    ----------
    label
        What the listener is told.
    phase
        Index in the trace's phases; of the optimizer's first one for "optimizer".
    """

    label: str
    phase: int


@dataclass(frozen=True)
class JoinedPhases:
    """The phases of a step, some of them joined."""

    numbers: NDArray[np.int64]
    """New number of each phase that was followed, from 0 without holes."""
    labels: tuple[str, ...]
    """Of the joined phases."""

    @property
    def begins(self) -> tuple[int | None, ...]:
        """Of each phase that was followed, the number of the joined phase that begins with it."""
        is_first = np.diff(self.numbers, prepend=-1) > 0
        numbers = zip(self.numbers.tolist(), is_first.tolist(), strict=True)
        return tuple(number if begins else None for number, begins in numbers)


def join_phases(look: StepLook, gaps: Collection[str]) -> JoinedPhases:
    """Join phases that use nothing of their own to their neighbours.

    Parameters
    ----------
    look
        What the phases use; the last one is the optimizer's, and stays.
    gaps
        Labels of what the model does between blocks. Where that uses nothing, it is part of the
        phase before. Where a block's backward pass, or what lies before it, has only begun when a
        checkpoint computes the block again, it is part of that.
    """
    labels, last = look.labels, len(look.labels) - 1
    before = np.array(
        [
            0 < phase < last and label in gaps and not look.accesses[phase]
            for phase, label in enumerate(labels)
        ]
    )
    after = np.array(
        [
            following.startswith("recompute ")
            and (label in gaps or label == "backward " + following.removeprefix("recompute "))
            for label, following in zip(labels, [*labels[1:], ""], strict=True)
        ]
    )
    stays = ~before & ~after
    # What joins the next phase has that one's number already.
    numbers: NDArray[np.int64] = np.cumsum(stays) - 1 + after
    return JoinedPhases(numbers, tuple(labels[phase] for phase in np.flatnonzero(stays)))
