"""Higher-order operators and wrappers of tensors read guarded tensors after their update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from late_updates import LateUpdate
from rank_processes import one_rank
from torch import nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = pytest.mark.slow


def conditional(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def mapped(x: torch.Tensor) -> Any:
    run: Any = map
    return run(lambda row: row.sin() * 2, x)


def looped(x: torch.Tensor) -> Any:
    def goes_on(count: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return count < 3

    def body(count: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return count + 1, value.sin()

    return while_loop(goes_on, body, (torch.tensor(0), x))[1]


def scanned(x: torch.Tensor) -> Any:
    def combine(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return carry + row, carry * row

    return scan(combine, torch.ones(x.shape[1:]), x)[1]


def scanned_in_any_order(x: torch.Tensor) -> Any:
    return associative_scan(torch.add, x, 0, combine_mode="generic")


def attention(x: torch.Tensor) -> Any:
    query = x.repeat(16, 1).view(1, 1, 128, 16)
    return flex_attention(query, query, query)


HIGHER_ORDER = [conditional, mapped, looped, scanned, scanned_in_any_order, attention]


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("function", HIGHER_ORDER, ids=lambda it: it.__name__)
def test_higher_order_operators_take_guarded_tensors(
    function: Callable[[torch.Tensor], Any], backend: str | None
) -> None:
    torch.compiler.reset()
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16)
    late = LateUpdate([x])
    run: Any = function if backend is None else torch.compile(function, backend=backend)
    assert torch.equal(run(x), function(torch.linspace(-1, 1, 8 * 16).view(8, 16) + 1))
    assert late.uses > 0


# ------------------------------------------------------------------ wrappers of tensors


def of_two(value: torch.Tensor) -> torch.Tensor:
    return TwoTensor(value, value.clone())


def sharded(value: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(value, init_device_mesh("cpu", (1,)), [Shard(0)])


WRAPPERS: dict[Any, tuple[str, ...]] = {of_two: ("a", "b"), sharded: ("_local_tensor",)}
"""Functions that make wrappers, with the attributes that are the tensors in these."""


def plain(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, TwoTensor):
        return value.a
    return value.full_tensor() if isinstance(value, DTensor) else value


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an operator": lambda it: it * 2,
    "a matrix product": lambda it: it @ it.detach().clone(),
    "a view": lambda it: it.view(16) * 2,
    "in place": lambda it: it.mul_(2),
    "copied": copy.deepcopy,
    "a parameter": lambda it: nn.Parameter(it) * 2,
    "compiled": torch.compile(lambda it: it * 2, backend="eager"),
    "reduced": lambda it: it.sum(),
}


@pytest.fixture
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("use", USES)
def test_a_use_of_a_wrapper_waits(use: str, wrap: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Its parts are used where the dispatcher has left the guard behind: it has one itself."""
    wrapper, expected = wrap(torch.arange(16.0).view(4, 4)), torch.arange(16.0).view(4, 4) + 1
    parts = [getattr(wrapper, name) for name in WRAPPERS[wrap]]
    late = LateUpdate(parts)
    late.hold([wrapper])
    found = USES[use](wrapper)
    assert late.uses > 0
    assert torch.equal(plain(found), USES[use](expected))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_use_of_a_part_waits(wrap: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for number, name in enumerate(WRAPPERS[wrap]):
        wrapper = wrap(torch.zeros(4, 4))
        parts = [getattr(wrapper, it) for it in WRAPPERS[wrap]]
        late = LateUpdate(parts)
        late.hold([wrapper])
        assert torch.equal(getattr(wrapper, name) + 0, torch.ones(4, 4))
        assert late.uses == 1
        assert torch.equal(parts[number], torch.ones(4, 4))


@pytest.mark.usefixtures("alone")
def test_a_dtensor_that_is_gathered_or_given_away_waits() -> None:
    uses: list[Callable[[Any], torch.Tensor]] = [
        lambda it: it.to_local(),
        lambda it: it.full_tensor(),
        lambda it: it.redistribute(placements=[Replicate()]).to_local(),
    ]
    for use in uses:
        wrapper: Any = sharded(torch.zeros(4, 4))
        late = LateUpdate([wrapper._local_tensor])
        late.hold([wrapper])
        assert torch.equal(use(wrapper) + 0, torch.ones(4, 4))
        assert late.uses > 0
