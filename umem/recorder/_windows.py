"""Which part of a step is timed: over several steps all of it, in each a few blocks only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Window", "find_windows"]

_MOST_WINDOWS = 3
_LEAST_SAMPLES = 3
"""So often at least each phase is timed, for a median that one odd step does not decide."""

_LEAST_BLOCKS = 2
"""A window follows up to two blocks more than its own, for their edges."""


@dataclass(frozen=True, eq=False)
class Window:
    """What is followed and timed of a step.

    Parameters
    ----------
    skipped
        Names of the blocks whose calls and backward passes are let pass.
    labels
        Of the phases that are told of, if the step is like the one that was looked at.
    begins
        Of each of them, the number of the phase of the trace that begins with it; None where none
        does.
    """

    skipped: frozenset[str]
    labels: tuple[str, ...]
    begins: tuple[int | None, ...]

    @property
    def marked(self) -> tuple[int, ...]:
        """Numbers of the phases of the trace whose begin is marked, in order."""
        return tuple(number for number in self.begins if number is not None)


def find_windows(
    labels: Sequence[str],
    begins: Sequence[int | None],
    blocks: Mapping[str, str],
    gaps: Collection[str],
    steps: int,
) -> tuple[Window, ...]:
    """Cut a step into windows for steps to take in turns.

    Each one follows a run of blocks, in the order in which the step first came to them, and of
    their neighbours those at which a phase of these ends. What is no block's is in all of them.

    Parameters
    ----------
    labels
        Of the phases that the step was told of when it was looked at.
    begins
        Of each of them, the number of the phase of the trace that begins with it, or None.
    blocks
        Name of the block of each label that is one's.
    gaps
        Labels of what the model does between blocks. Where a block's phase comes before, that
        block's hooks tell of it.
    steps
        How many are timed.

    Returns
    -------
    tuple of Window
        Together they have every phase between two marks. One that is the whole step where the
        steps or the blocks are too few for more.
    """
    tellers: list[str | None] = []
    for label in labels:
        before = tellers[-1] if tellers else None
        tellers.append(before if label in gaps else blocks.get(label))
    names = list(dict.fromkeys(name for name in tellers if name is not None))
    count = min(_MOST_WINDOWS, steps // _LEAST_SAMPLES, len(names) // _LEAST_BLOCKS)
    if count < 2:
        return (Window(frozenset(), tuple(labels), tuple(begins)),)
    edges = [teller for teller, number in zip(tellers, begins, strict=True) if number is not None]
    windows = []
    for window in range(count):
        own = set(names[window * len(names) // count : (window + 1) * len(names) // count])
        followed = {None, *own, *(end for begin, end in pairwise(edges) if begin in own)}
        kept = [place for place, teller in enumerate(tellers) if teller in followed]
        windows.append(
            Window(
                frozenset(names) - followed,
                tuple(labels[place] for place in kept),
                tuple(begins[place] for place in kept),
            )
        )
    return tuple(windows)
