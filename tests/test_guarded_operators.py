"""Higher-order operators and wrappers of tensors read guarded tensors after their update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_updates import LateUpdate
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

Function = Callable[[torch.Tensor], torch.Tensor]


def conditional(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def mapped(x: torch.Tensor) -> Any:
    return map(lambda row: row.sin() * 2, x)


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


@pytest.mark.slow
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
