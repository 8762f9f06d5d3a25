"""Other tensors on the memory of optimizer state: known ones, and what makes them unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from umem.streaming.stage import StateViews


class OwnTensor(torch.Tensor):
    """A class that a guard cannot take the place of."""


def state() -> list[torch.Tensor]:
    return [torch.zeros(8), torch.ones(4), torch.ones(())]


def ids(tensors: Iterable[torch.Tensor] | None) -> set[int]:
    assert tensors is not None
    return {id(it) for it in tensors}


def test_state_without_views() -> None:
    its = state()
    assert StateViews(its).of(its) == []


def test_views_in_objects_of_the_program_are_known() -> None:
    its = state()
    first = {"a part": its[0][2:4], "all": its[0].data}
    second = [its[1].view(2, 2)]
    its[1].untyped_storage()  # Python's object of a storage is no tensor
    views = StateViews(its)
    assert ids(views.of(its)) == ids([*first.values(), *second])
    assert ids(views.of(its[:1])) == ids(first.values())


def of_its_own_class(its: list[torch.Tensor]) -> object:
    return its[0][2:4].as_subclass(OwnTensor)


def parameter(its: list[torch.Tensor]) -> object:
    return torch.nn.Parameter(its[0])


def in_one_of_its_own_class(its: list[torch.Tensor]) -> object:
    wrapper: Any = torch.ones(1).as_subclass(OwnTensor)
    wrapper.parts = [its[0][2:4]]
    return wrapper


def state_too(its: list[torch.Tensor]) -> object:
    its.append(its[0][:1])
    return None


@pytest.mark.parametrize("make", [of_its_own_class, in_one_of_its_own_class, parameter, state_too])
def test_others_are_not(make: Callable[[list[torch.Tensor]], object]) -> None:
    its = state()
    view, other = its[0][1:], make(its)
    assert StateViews(its).of(its) is None
    assert StateViews(its).of(its[1:3]) == []
    del view, other
