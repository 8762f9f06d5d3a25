"""Cases of several parameters: few, but with each two values of each two parameters together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairs(
    *axes: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Cases for `pytest.mark.parametrize` that have every pair of values in one case at least.

    A fault that takes two values is found as by the whole product. Of three parameters or more, the
    cases are about as many as the product of the two longest.

    Parameters
    ----------
    *axes
        The values of each parameter.
    allowed
        Whether a case, given as its values, may be among them.
    """
    ranges = (range(len(axis)) for axis in axes)
    left = {
        case: set(itertools.combinations(enumerate(case), 2))
        for case in itertools.product(*ranges)
        if allowed(*_values(axes, case))
    }
    chosen = []
    while left:
        case = max(left, key=lambda it: len(left[it]))  # the first of equals
        new = left.pop(case)
        chosen.append(case)
        left = {it: rest for it, old in left.items() if (rest := old - new)}
    return [_values(axes, case) for case in sorted(chosen)]


def _values(axes: Sequence[Sequence[Any]], case: Sequence[int]) -> tuple[Any, ...]:
    return tuple(axis[number] for axis, number in zip(axes, case, strict=True))
