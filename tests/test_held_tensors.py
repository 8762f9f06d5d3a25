"""What a lane holds of the work that it has not passed."""

from __future__ import annotations

import weakref

import torch

from umem.streaming.stage import HeldTensors


def tensors() -> tuple[list[torch.Tensor], weakref.ref[torch.Tensor]]:
    some = [torch.ones(1)]
    return some, weakref.ref(some[0])


def test_tensors_are_held_until_their_last_work_is_over() -> None:
    passed: set[int] = set()
    held = HeldTensors(passed.__contains__)
    some, first = tensors()
    held.hold(some, 1)
    held.hold(some, 2)  # another piece of the same step
    some, second = tensors()
    passed.add(1)
    held.hold(some, 3)
    assert (first() is None, second() is None) == (False, False)
    some, third = tensors()
    passed.add(2)
    held.hold(some, 4)
    assert (first() is None, second() is None, third() is None) == (True, False, False)


def test_what_comes_later_is_not_asked_for_before() -> None:
    asked: list[int] = []

    def has_passed(moment: int) -> bool:
        asked.append(moment)
        return moment == 2

    held = HeldTensors(has_passed)
    references = []
    for moment in (1, 2, 3):
        some, reference = tensors()
        held.hold(some, moment)
        references.append(reference)
    assert asked == [1, 1]
    assert all(it() is not None for it in references)
